"""Errors that are the user's to fix.

The `posttrain` command prints such an error as one sentence and leaves with code 2; anything else is a
fault of ours and keeps its traceback under `--debug`. Other rooms need not import this class: a
`ValueError` subclass, or any exception with `exit_code = 2`, is treated alike.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """One sentence that says what is wrong and what to change."""

    exit_code = 2


class UnknownId(UserError):
    """No record has this id."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean X?` for the closest known word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else ""
