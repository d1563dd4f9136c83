"""One sentence and an exit code for everything that can go wrong.

Code 2: the user can fix it, and the sentence says how. Code 1: the fault is ours. Code 130: interrupted.
"""

from __future__ import annotations

import errno
import traceback
from pathlib import Path

OK, FAULT, USER, INTERRUPTED = 0, 1, 2, 130

_ROOMS = ("catalog", "console", "envfactory", "model", "opd", "rl", "rollout", "sandbox", "sft", "verifiers")
_HOST_ERRORS = ("SandboxUnavailable", "AdmissionRefused", "PolicyUnsupported")
_USER_ERRNO = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EROFS: "choose a writable folder",
    errno.EACCES: "change its permissions or choose another place",
    errno.EPERM: "change its permissions or choose another place",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "name a file",
}


def explain(error: BaseException) -> tuple[int, str]:
    """Exit code and sentence for an error that reached the command line."""
    from cyclopts import CycloptsError

    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "Interrupted; the same command again goes on from here."
    if isinstance(error, CycloptsError):
        return USER, _one_line(str(error))
    if isinstance(getattr(error, "exit_code", None), int):
        return int(error.exit_code), _one_line(str(error))  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(error, ModuleNotFoundError) and (extra := _extra_of(error.name or "")):
        return USER, f"This needs {error.name}: install it with `pip install 'posttrain[{extra}]'`."
    if isinstance(error, OSError) and error.errno in _USER_ERRNO and error.filename is not None:
        return USER, f"{error.filename}: {error.strerror}: {_USER_ERRNO[error.errno]}."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return USER, f"{error.strerror}: {_USER_ERRNO[error.errno]}."
    if any(
        kind.__name__ in _HOST_ERRORS and kind.__module__ == "sandbox.values" for kind in type(error).__mro__
    ):
        return USER, _one_line(f"This host cannot run the sandbox: {error}.")
    if isinstance(error, ValueError) and _is_ours(error):
        return USER, _one_line(str(error))
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(where.filename).name}:{where.lineno}"
    what = f"{type(error).__name__}: {_one_line(str(error))}"
    return FAULT, f"Internal error at {place}: {what} (--debug shows the traceback)."


def _is_ours(error: ValueError) -> bool:
    # A plain ValueError is for users when one of our `raise` statements made it; the interpreter and
    # libraries raise it for faults of ours.
    if type(error) is not ValueError:
        return type(error).__module__.partition(".")[0] in _ROOMS
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    return (innermost.line or "").startswith("raise ")


def _extra_of(module: str) -> str | None:
    extras = {
        "torch": "torch",
        "numpy": "torch",
        "tokenizers": "torch",
        "safetensors": "torch",
        "transformers": "hf",
        "docker": "docker",
        "kubernetes": "kubernetes",
        "celery": "celery",
        "psycopg": "postgres",
        "datasets": "datasets",
        "pyarrow": "formats",
        "yaml": "formats",
    }
    return extras.get(module.partition(".")[0])


def _one_line(text: str) -> str:
    return " ".join(text.split())
