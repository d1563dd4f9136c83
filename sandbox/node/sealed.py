"""No imports once the root is the image's: a module that it holds must never run with init's rights.

What node code, `tarfile` above all, imports only when it needs it is imported here, while the folders of
`sys.path` are still those of the host.
"""

from __future__ import annotations

import contextlib
import importlib
import sys

for _name in ("bz2", "gzip", "lzma", "zlib", "encodings.ascii", "encodings.latin_1", "encodings.utf_8"):
    with contextlib.suppress(ImportError):  # a Python may be built without; such tars are then refused
        importlib.import_module(_name)


def seal() -> None:
    """From now on every import of something new fails."""
    sys.path.clear()
    sys.meta_path.clear()
