"""The interpreter that runs as PID 1 of a container: the client's own, shown read-only.

An image may have no Python, another C library, or a Python that somebody replaced, and PID 1 starts with
rights. So the container gets this machine's /usr and Python below `contained.PLACE` and starts them through
their own dynamic loader; nothing of the image is executed before the rights are gone.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from pathlib import Path

from sandbox import hostbase
from sandbox.base import SandboxUnavailable
from sandbox.node.contained import PLACE

HOST = f"{PLACE}/host"
CODE = f"{PLACE}/code/sandbox/node"
_BOOT = (
    f"import sys; sys.path.insert(0, {PLACE + '/code'!r}); "
    "from sandbox.node import contained; contained.main()"
)
_LOADER = re.compile(r"^ld-(linux|musl|[0-9.]+).*\.so(\.\d+)?$")


def inside(path: str) -> str:
    """Where the host's `path` is while the container boots."""
    return HOST + path


@cache
def _libraries() -> tuple[str, tuple[str, ...]]:
    """(dynamic loader, library folders) of this process, as real paths below the folders we show."""
    shown = tuple(folder + "/" for folder, _ in hostbase.binds())
    loader = ""
    folders: dict[str, None] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")
        if not path[1]:
            continue
        name = os.path.realpath("/" + path[2])
        if _LOADER.match(os.path.basename(name)) and name.startswith(shown):
            loader = name
        if ".so" in name and name.startswith("/usr/lib"):
            folders.setdefault(os.path.dirname(name))
    if not loader:
        raise SandboxUnavailable(
            "the docker backend needs a Python whose C library lies below /usr: start it with another one"
        )
    return loader, (*folders, hostbase.python_prefix() + "/lib")


@cache
def command() -> tuple[str, ...]:
    """The container's command line. Raises SandboxUnavailable for a Python that cannot be shown."""
    loader, folders = _libraries()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = os.path.realpath(f"{hostbase.python_prefix()}/bin/{version}")
    library_path = ":".join(inside(folder) for folder in folders)
    return (inside(loader), "--library-path", library_path, inside(python), "-I", "-S", "-c", _BOOT)


def mounts() -> dict[str, str]:
    """Host folder -> place in the booting container; all of them read-only."""
    code = str(Path(__file__).resolve().parents[1] / "node")
    return {**{folder: inside(folder) for folder, _ in hostbase.binds()}, code: CODE}
