"""How an image is made, as a file that people write.

base = "debian:bookworm"            # or "host", a name or digest in the store, a path to an archive
system = ["python3-venv", "git"]    # Debian packages
python = ["pytest", "numpy<3"]      # into the virtual environment /opt/env
node = ["prettier@3"]               # into /opt/node
index_before = 2024-05-01           # Python and npm packages as of then
workspace = "checkout"              # a folder, beside this file; becomes /workspace
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from sandbox.oci.documents import ImageError


def _plain(word: str) -> str:
    """Packages reach a package manager's command line: no options, no control characters."""
    if not word.strip() or word.startswith("-") or not word.isprintable():
        raise ValueError(f"{word!r} is no package")
    return word


def _debian(word: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9+.-]*(:[a-z0-9]+)?(=[A-Za-z0-9.+:~-]+)?", word):
        raise ValueError(f"{word!r} is no Debian package")
    return word


Package = Annotated[str, AfterValidator(_plain)]
DebianPackage = Annotated[str, AfterValidator(_debian)]


class Recipe(BaseModel):
    """One image. Steps that are equal, from the base up, share their layers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str = "host"
    """`host` (this machine's /usr; cannot be exported), `debian:SUITE`, a name or digest in the store, or the
    path of an OCI layout, an archive of one, or what `docker save` wrote."""
    mirror: str = "http://deb.debian.org/debian"
    """Where `debian:SUITE` comes from."""
    system: tuple[DebianPackage, ...] = ()
    """Debian packages, also NAME=VERSION."""
    python: tuple[Package, ...] = ()
    """Requirements, installed from wheels into /opt/env."""
    node: tuple[Package, ...] = ()
    """npm packages, installed without their scripts into /opt/node."""
    index_before: date | None = None
    """Python and npm packages as if this day had not come yet (`sandbox.network.index`)."""
    workspace: Path | None = None
    """A folder that becomes /workspace, the agent's."""
    env: Mapping[str, str] = {}

    @classmethod
    def load(cls, path: Path) -> Recipe:
        """Read a TOML file; paths in it are relative to it. ImageError says what is wrong."""
        try:
            fields: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ImageError(f"{path} is no TOML: {error}") from None
        try:
            recipe = cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ImageError(f"{path}: {place}: {first['msg']}") from None
        changes: dict[str, Any] = {}
        if recipe.workspace is not None:
            changes["workspace"] = path.parent / recipe.workspace
        if "/" in recipe.base and (path.parent / recipe.base).exists():
            changes["base"] = str(path.parent / recipe.base)
        return recipe.model_copy(update=changes)

    def locked(self, lock: Mapping[str, tuple[str, ...]]) -> str:
        """This recipe as TOML, with the versions of `Built.lock`. Paths become absolute."""
        fields: dict[str, Any] = self.model_dump(mode="json", exclude_defaults=True)
        fields |= {name: list(words) for name, words in lock.items()}
        env: dict[str, str] = fields.pop("env", {})
        if self.workspace is not None:
            fields["workspace"] = str(self.workspace.absolute())
        fields.pop("index_before", None)
        lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
        if self.index_before is not None:
            lines.append(f"index_before = {self.index_before}")
        lines += [f"env.{json.dumps(name)} = {json.dumps(value)}" for name, value in env.items()]
        return "\n".join(lines) + "\n"
