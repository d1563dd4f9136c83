"""Dependencies as wheels: resolved and fetched by pip, unpacked as data, frozen in a lock.

`pip download --only-binary=:all:` runs no code of any package, and neither does unpacking: a wheel is a
zip with a known layout (the wheel specification). So an environment is made without a build step, the
same bytes every time, in about a second. Packages without a wheel for this interpreter are an error.
"""

from __future__ import annotations

import base64
import configparser
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from catalog.atomic import write_atomic
from catalog.jsonl import read_record
from catalog.models import digest_json
from envfactory.errors import BuildError, full_disk_is_a_user_error
from envfactory.trees import File, safe_path, write_tree

ENV = "opt/env"
"""Where the environment lies in an image, relative to its root."""
_TAG = f"{sys.version_info.major}.{sys.version_info.minor}"
SITE = f"{ENV}/lib/python{_TAG}/site-packages"
_NOT_COMPILED = r"site-packages/(pygments/(lexers|styles)|.*/tests?)/"
"""Folders whose bytecode is not made ahead: large, and no test run imports them as a rule."""


class NoWheel(BuildError):
    """A requirement has no wheel; `requirement` names it."""

    def __init__(self, requirement: str, message: str) -> None:
        super().__init__(message)
        self.requirement = requirement


@dataclass(frozen=True, slots=True)
class Wheel:
    """One fetched wheel."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Lock:
    """A resolved set of wheels, sorted by name."""

    wheels: tuple[Wheel, ...]

    def digest(self) -> str:
        return digest_json([[wheel.name, wheel.sha256] for wheel in self.wheels])


def resolve(requirements: Sequence[str], home: Path) -> Lock:
    """Fetch wheels for all requirements into `home/wheels`. The answer is kept: asking again changes nothing.

    Raises NoWheel for a requirement without a wheel, BuildError when pip cannot resolve or reach its index.
    """
    wanted = sorted(set(requirements))
    record = home / "wheels" / "locks" / f"{digest_json([1, wanted, sys.version, sys.platform])[7:39]}.json"
    if record.is_file():
        lock = Lock(tuple(Wheel(**row) for row in read_record(record)["wheels"]))
        if all((home / "wheels" / wheel.name).is_file() for wheel in lock.wheels):
            return lock
    folder = home / "wheels"
    with full_disk_is_a_user_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download.", dir=folder) as temporary:
            _download(wanted, Path(temporary), folder)
            wheels: list[Wheel] = []
            for place in sorted(Path(temporary).glob("*.whl")):
                data = place.read_bytes()
                wheels.append(Wheel(place.name, hashlib.sha256(data).hexdigest()))
                target = folder / place.name
                if not target.is_file():
                    write_atomic(target, data)
        lock = Lock(tuple(wheels))
        text = json.dumps(
            {"requirements": wanted, "wheels": [{"name": w.name, "sha256": w.sha256} for w in wheels]}
        )
        write_atomic(record, text.encode())
    return lock


def _download(requirements: Sequence[str], target: Path, known: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--only-binary=:all:"]
    command += [
        "--disable-pip-version-check",
        "--progress-bar=off",
        "--dest",
        str(target),
        "--find-links",
        str(known),
    ]
    listing = "".join(f"{requirement}\n" for requirement in requirements)
    place = target / "requirements.txt"
    place.write_text(listing)
    done = subprocess.run(
        [*command, "--requirement", str(place)],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=900,
        check=False,
    )
    place.unlink()
    if done.returncode == 0:
        return
    errors = done.stderr
    # Before "no matching distribution" pip says whether it could not ask at all.
    if re.search(
        r"NewConnectionError|Name or service not known|name resolution|Connection refused|SSLError", errors
    ):
        raise BuildError(
            "pip cannot reach its package index: check the network, pip's index-url and its certificate"
        )
    if "No space left" in errors:
        raise OSError(28, "No space left on device")
    if missing := re.search(r"No matching distribution found for ([^\s(]+)", errors):
        name = missing.group(1)
        raise NoWheel(
            name, f"{name} has no wheel for Python {_TAG} on the package index: it cannot be a dependency"
        )
    if "ResolutionImpossible" in errors or "conflicting dependencies" in errors:
        raise BuildError(
            f"the requirements {', '.join(requirements)} contradict each other: choose another version"
        )
    lines = [line for line in errors.splitlines() if line.startswith("ERROR")] or errors.splitlines()[-1:]
    raise BuildError(
        f"pip cannot fetch the dependencies ({' '.join(lines)[:200]}): check them by hand with pip download"
    )


def environment_tree(lock: Lock, home: Path, extra: dict[str, File]) -> dict[str, File]:
    """Files of a virtual environment at /opt/env with these wheels in it, paths relative to the root.

    The interpreter is a link to the one that runs us, which sandboxes show at its own path. `extra` is
    added as it is (metadata of the package under test).
    """
    base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    tree: dict[str, File] = {
        f"{ENV}/pyvenv.cfg": File(
            f"home = {os.path.dirname(base)}\ninclude-system-site-packages = false\n"
            f"version = {'.'.join(map(str, sys.version_info[:3]))}\nexecutable = {base}\n".encode()
        ),
        f"{ENV}/bin/python": File(base.encode(), link=True),
        f"{ENV}/bin/python3": File(b"python", link=True),
        f"{ENV}/bin/python{_TAG}": File(b"python", link=True),
    }
    for wheel in lock.wheels:
        data = (home / "wheels" / wheel.name).read_bytes()
        if hashlib.sha256(data).hexdigest() != wheel.sha256:
            raise BuildError(f"{home / 'wheels' / wheel.name} has changed on disk: remove it and try again")
        tree.update(_unpack(wheel.name, data))
    return tree | extra


def _unpack(name: str, data: bytes) -> dict[str, File]:
    tree: dict[str, File] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            path = safe_path(info.filename)
            if info.is_dir():
                continue
            if path is None:
                raise BuildError(
                    f"{name} holds the path {info.filename[:80]!r}, which leaves it: do not use it"
                )
            content = archive.read(info)
            place = _place(path)
            if place is None:
                continue
            executable = bool((info.external_attr >> 16) & 0o111)
            if place.startswith(f"{ENV}/bin/"):
                executable = True
                content = re.sub(rb"\A#!pythonw?", f"#!/{ENV}/bin/python".encode(), content)
            tree[place] = File(content, executable=executable)
            if path.endswith(".dist-info/entry_points.txt"):
                tree.update(console_scripts(content.decode("utf-8", "replace")))
    return tree


def _place(path: str) -> str | None:
    """Where a wheel's entry belongs, relative to the image's root; None for what is not installed."""
    top, _, rest = path.partition("/")
    if not top.endswith(".data"):
        return f"{SITE}/{path}"
    kind, _, rest = rest.partition("/")
    homes = {"purelib": SITE, "platlib": SITE, "scripts": f"{ENV}/bin", "data": ENV}
    return f"{homes[kind]}/{rest}" if kind in homes and rest else None


def console_scripts(entry_points: str) -> dict[str, File]:
    """The commands that an entry_points.txt declares, as scripts in the environment's bin folder."""
    parser = configparser.RawConfigParser(delimiters=("=",), strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        parser.read_string(entry_points)
    except configparser.Error:
        return {}
    scripts: dict[str, File] = {}
    for name, target in parser.items("console_scripts") if parser.has_section("console_scripts") else []:
        match = re.match(r"\s*([\w.]+)\s*:\s*([\w.]+)", target or "")
        if match and re.fullmatch(r"[\w.-]+", name):
            module, function = match.groups()
            first = function.partition(".")[0]
            text = (
                f"#!/{ENV}/bin/python\nimport sys\n\nfrom {module} import {first}\n\nsys.exit({function}())\n"
            )
            scripts[f"{ENV}/bin/{name}"] = File(text.encode(), executable=True)
    return scripts


def pytest_plugins(tree: dict[str, File]) -> tuple[str, ...]:
    """Modules of the pytest plugins in an environment; runners load plugins only by name."""
    found: set[str] = set()
    for path, file in tree.items():
        if path.endswith(".dist-info/entry_points.txt"):
            parser = configparser.RawConfigParser(delimiters=("=",), strict=False)
            try:
                parser.read_string(file.data.decode("utf-8", "replace"))
            except configparser.Error:
                continue
            if parser.has_section("pytest11"):
                found |= {target.partition(":")[0].strip() for _, target in parser.items("pytest11")}
    return tuple(sorted(found))


def package_metadata(name: str, version: str, metadata: bytes | None, entry_points: str) -> dict[str, File]:
    """Installed-package metadata for the package under test, whose code lies in /workspace.

    Without it `importlib.metadata.version(NAME)`, entry points and plugins would not work.
    """
    folder = f"{SITE}/{re.sub(r'[-_.]+', '_', name)}-{version}.dist-info"
    text = metadata or f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    names = {"METADATA": text, "INSTALLER": b"posttrain\n"}
    if entry_points:
        names["entry_points.txt"] = entry_points.encode()
    rows: list[str] = []
    for file, content in sorted(names.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{folder.rpartition('/')[2]}/{file},sha256={digest},{len(content)}\n")
    names["RECORD"] = "".join(rows).encode()
    return {f"{folder}/{file}": File(content) for file, content in names.items()} | console_scripts(
        entry_points
    )


def write_environment(tree: dict[str, File], folder: Path) -> None:
    """Write an environment and compile its bytecode ahead (never checked again, so it cannot go stale).

    Compiling executes nothing, but foreign source could crash a compiler, so it has its own process,
    with a fixed hash seed: the order of constant sets is part of the bytes.
    """
    write_tree(tree, folder)
    command = [sys.executable, "-s", "-P", "-m", "compileall", "-q", "-q", "-f", "-x", _NOT_COMPILED]
    command += ["--invalidation-mode", "unchecked-hash", "-s", str(folder), "-p", "/", str(folder / SITE)]
    subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, timeout=600, check=False
    )
