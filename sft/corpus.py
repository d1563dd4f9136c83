"""Pretraining corpus: sources of public packages, never executed, deduplicated, decontaminated.

    python -m sft.corpus --packages examples/pretrain_packages.txt --exclude boltons --out FILE.jsonl.xz

Wheels are fetched with the user's pip (`--only-binary`, so no code of theirs runs), unpacked, and their
`.py` files kept when the package's licence is permissive. A file is dropped when one of its functions also
stands in an excluded package (the demo's), or when more than half of them have been seen before. One JSON
object a line: package, version, licence, path, text.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import lzma
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path

PERMISSIVE = ("mit", "bsd", "apache", "psf", "python software foundation", "isc", "zope", "hpnd", "unlicense")
COPYLEFT = ("gpl", "mozilla", "mpl", "eupl", "cecill")
MAX_FILE_CHARS = 60_000
MAX_PACKAGE_CHARS = 14_000_000


@dataclass
class Corpus:
    """What has been collected so far, with the functions seen, by normalised hash."""

    seen: set[str] = field(default_factory=set)
    banned: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)

    def accept(self, text: str) -> bool:
        """Whether a file is new enough to keep; registers its functions."""
        try:
            hashes = function_hashes(text)
        except (SyntaxError, ValueError, RecursionError):
            self.counts["unparsable"] += 1
            return False
        if hashes & self.banned:
            self.counts["contaminated"] += 1
            return False
        if not hashes or 2 * len(hashes & self.seen) > len(hashes):
            self.counts["duplicate or without functions"] += 1
            return False
        self.seen |= hashes
        return True


def function_hashes(text: str) -> set[str]:
    """Hashes of the bodies (without docstrings) of all functions of at least three statements."""
    hashes: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        dump = "".join(ast.dump(statement) for statement in body)
        if len(dump) > 200:
            hashes.add(hashlib.sha256(dump.encode()).hexdigest()[:20])
    return hashes


def licence_of(metadata: str) -> str:
    """Licence words of a wheel's METADATA, lower case."""
    message = HeaderParser().parsestr(metadata)
    words = [message.get("License-Expression") or "", (message.get("License") or "")[:200]]
    words += [c for c in message.get_all("Classifier") or [] if c.startswith("License")]
    return " | ".join(word for word in words if word).lower()


def is_permissive(licence: str) -> bool:
    return any(word in licence for word in PERMISSIVE) and not any(word in licence for word in COPYLEFT)


def fetch(name: str, folder: Path) -> Path | None:
    """A package's wheel in `folder`, None if there is none."""
    before = set(folder.iterdir())
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(folder),
        name,
    ]
    if subprocess.run(command, capture_output=True).returncode:
        return None
    new = set(folder.iterdir()) - before
    return new.pop() if new else None


def python_files(archive: Path) -> Iterator[tuple[str, str]]:
    """(path, text) of every Python file of a wheel or sdist."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as bundle:
            for name in sorted(bundle.namelist()):
                if name.endswith(".py"):
                    yield name, bundle.read(name).decode(errors="replace")
        return
    with tarfile.open(archive) as bundle:
        for member in bundle:
            file = bundle.extractfile(member) if member.isfile() and member.name.endswith(".py") else None
            if file is not None:
                yield member.name, file.read().decode(errors="replace")


def wheel_metadata(archive: Path) -> str:
    with zipfile.ZipFile(archive) as bundle:
        name = next(name for name in bundle.namelist() if name.endswith(".dist-info/METADATA"))
        return bundle.read(name).decode(errors="replace")


def collect(wheels: list[Path], banned: list[Path], out: Path) -> Counter[str]:
    """Write the corpus of these wheels without anything that occurs in the banned archives."""
    corpus = Corpus()
    for archive in banned:
        for _, text in python_files(archive):
            corpus.banned |= function_hashes(text)
    temporary = out.with_name(out.name + ".part")
    with lzma.open(temporary, "wt", encoding="utf-8", preset=6) as stream:
        for wheel in sorted(wheels):
            package, version = wheel.name.split("-")[:2]
            licence = licence_of(wheel_metadata(wheel))
            if not is_permissive(licence):
                corpus.counts["packages without a permissive licence"] += 1
                continue
            corpus.counts["packages"] += 1
            taken = 0
            for path, text in python_files(wheel):
                if (
                    not 400 < len(text) <= MAX_FILE_CHARS
                    or "\ufffd" in text
                    or "generated" in text[:600].lower()
                ):
                    continue
                if taken + len(text) > MAX_PACKAGE_CHARS or not corpus.accept(text):
                    continue
                taken += len(text)
                row = {
                    "package": package,
                    "version": version,
                    "licence": licence[:80],
                    "path": path,
                    "text": text,
                }
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
                corpus.counts["files"] += 1
            corpus.counts["characters"] += taken
            print(f"{package} {version}: {taken / 1e6:.1f} M characters", file=sys.stderr)
    temporary.replace(out)
    return corpus.counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packages", type=Path, required=True, help="one name a line")
    parser.add_argument("--exclude", nargs="*", default=["boltons"], help="packages to decontaminate against")
    parser.add_argument("--wheels", type=Path, help="folder of wheels fetched before; default: fetch")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        banned_folder, folder = Path(scratch, "banned"), args.wheels or Path(scratch, "wheels")
        banned_folder.mkdir()
        folder.mkdir(exist_ok=True)
        banned = [fetch(name, banned_folder) for name in args.exclude]
        if None in banned:
            raise SystemExit(
                f"no wheel of {args.exclude[banned.index(None)]} on the index; name a package that has one"
            )
        if args.wheels is None:
            for name in args.packages.read_text().split():
                if fetch(name, folder) is None:
                    print(f"{name}: no wheel, left out", file=sys.stderr)
        names = {name.lower().replace("-", "_") for name in args.packages.read_text().split()}
        wheels = [w for w in folder.glob("*.whl") if w.name.split("-")[0].lower().replace("-", "_") in names]
        counts = collect(wheels, [path for path in banned if path], args.out)
    print(json.dumps(dict(counts), indent=1))


if __name__ == "__main__":
    main()
