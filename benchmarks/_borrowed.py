"""An environment with pytest made from the running interpreter's packages: no network, nothing executed.

For measurements and tests only: real environments are built from wheels (`envfactory`).
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

DISTRIBUTIONS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")


def make_environment(folder: Path) -> None:
    """A virtual environment with pytest at `folder`, as if it stood at /opt/env."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    for name in DISTRIBUTIONS:
        for file in importlib.metadata.files(name) or []:
            if file.parts[0] != ".." and file.suffix != ".pyc":
                target = site / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(file.locate()), target)
    (folder / "bin").mkdir()
    home = Path(sys.base_prefix) / "bin"
    (folder / "bin" / "python").symlink_to(home / version)
    (folder / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n")
