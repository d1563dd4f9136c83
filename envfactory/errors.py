"""What the user can mend: each is one sentence that says what to do; the command leaves with code 2."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FactoryError(Exception):
    """Base of the factory's errors for users. The message is one sentence with the way out."""

    exit_code = 2


class SourceError(FactoryError):
    """The source cannot be fetched or is nothing that tasks can be made of."""


class BuildError(FactoryError):
    """The environment of a source cannot be built, or its tests do not run in it."""


class NoSpace(FactoryError):
    """The disk is full or nearly so."""


@contextmanager
def full_disk_is_a_user_error(folder: Path) -> Iterator[None]:
    """Turn ENOSPC and EDQUOT, wherever they strike inside, into `NoSpace`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NoSpace(f"no space left in {folder}: free some, or choose another home folder") from error
