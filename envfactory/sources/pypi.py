"""`pypi:NAME[==VERSION]`: a package's source distributions become a git history of releases.

One commit a release, oldest to newest version, with a fixed author and the release's own date, so the
same releases always make the same commits. Source distributions are archives to read; their setup.py
and build backends never run here.
"""

from __future__ import annotations

import calendar
import hashlib
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidSdistFilename, canonicalize_name, parse_sdist_filename
from packaging.version import InvalidVersion, Version

from catalog.atomic import write_atomic
from catalog.models import digest_json
from envfactory import git
from envfactory.errors import SourceError
from envfactory.index import IndexFile, PackageIndex
from envfactory.layout import has_tests
from envfactory.sdist import unpack
from envfactory.sources.base import (
    History,
    Limits,
    Progress,
    Revision,
    check_space,
    load_history,
    new_folder,
    save_history,
    silent,
)
from envfactory.trees import File

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class _Release:
    version: Version
    file: IndexFile


class PypiSource:
    """Source distributions of one package on the index that pip is set up for."""

    def __init__(self, requirement: str, limits: Limits, index: PackageIndex | None = None) -> None:
        package, equals, version = requirement.partition("==")
        if not _NAME.fullmatch(package.strip()):
            raise SourceError(f"pypi:{requirement} is no package name: write pypi:NAME or pypi:NAME==VERSION")
        self.package = canonicalize_name(package.strip())
        self.name = f"pypi:{requirement}"
        self.limits = limits
        self._index = index
        try:
            self.version = Version(version.strip()) if equals else None
        except InvalidVersion:
            raise SourceError(f"{version!r} is no version: write pypi:{package}==1.2.3") from None

    def fetch(self, home: Path, progress: Progress = silent) -> History:
        """Bring the newest releases up to VERSION into `home`. Raises SourceError or NoSpace."""
        index = self._index or PackageIndex()
        releases = self._choose(index.files(self.package))
        newest = releases[-1]
        key = digest_json([self.package, [[str(r.version), r.file.name, r.file.sha256] for r in releases]])[
            7:19
        ]
        folder = home / "sources" / f"pypi-{self.package}-{newest.version}-{key}"
        if found := load_history(folder, self.name):
            return found
        check_space(home, self.limits.free_mb)
        progress(f"{self.package}: {len(releases)} releases, {releases[0].version} to {newest.version}")
        with ThreadPoolExecutor(4) as pool:
            archives = list(pool.map(lambda release: _cached(index, release.file, home), releases))
        states = [_state(release, data) for release, data in zip(releases, archives, strict=True)]
        if not has_tests(states[-1][0]):
            raise SourceError(f"{newest.file.name} ships no tests: give the package's git repository instead")
        with new_folder(folder) as temporary:
            commits = git.import_history(temporary / "repo.git", states)
            revisions = tuple(
                Revision(str(release.version), commit, date)
                for release, commit, (_, date, _) in zip(releases, commits, states, strict=True)
            )
            pinned = f"pypi:{self.package}=={newest.version}"
            save_history(
                History(self.name, pinned, self.package, "release", temporary / "repo.git", revisions),
                temporary,
            )
        history = load_history(folder, self.name)
        assert history is not None
        return history

    def _choose(self, files: list[IndexFile]) -> list[_Release]:
        """The newest final releases that this Python can run, oldest first."""
        here = ".".join(map(str, sys.version_info[:3]))
        chosen: dict[Version, IndexFile] = {}
        other_python = False
        for file in files:
            version = _sdist_version(file.name, self.package)
            if version is None or file.yanked:
                continue
            if version.is_prerelease and version != self.version:
                continue
            if self.version is not None and version > self.version:
                continue
            if not _runs_here(file.requires_python, here):
                other_python = True
                continue
            if version not in chosen or file.name.endswith(".tar.gz"):
                chosen[version] = file
        if self.version is not None and self.version not in chosen:
            raise SourceError(
                f"{self.package} has no source distribution of {self.version} for Python {here}:"
                " name another version"
            )
        if not chosen:
            why = f"for Python {here}" if other_python else "at all"
            raise SourceError(
                f"{self.package} has no source distribution {why}: give its git repository instead"
            )
        ordered = sorted(chosen)[-self.limits.releases :]
        return [_Release(version, chosen[version]) for version in ordered]


def _sdist_version(filename: str, package: str) -> Version | None:
    try:
        name, version = parse_sdist_filename(filename)
    except (InvalidSdistFilename, InvalidVersion):
        return None
    return version if name == package else None


def _runs_here(requires_python: str | None, here: str) -> bool:
    try:
        return not requires_python or here in SpecifierSet(requires_python)
    except InvalidSpecifier:
        return True


def _cached(index: PackageIndex, file: IndexFile, home: Path) -> bytes:
    """A source distribution, from the home folder when it is there."""
    place = home / "downloads" / f"{file.sha256}-{file.name}"
    if file.sha256 and place.is_file():
        data = place.read_bytes()
        if hashlib.sha256(data).hexdigest() == file.sha256:
            return data
    data = index.download(file)
    if file.sha256:
        write_atomic(place, data)
    return data


def _state(release: _Release, data: bytes) -> tuple[dict[str, File], int, str]:
    tree, newest = unpack(release.file.name, data)
    date = newest
    if release.file.uploaded:
        text = re.sub(r"(\.\d+)?Z?$", "", release.file.uploaded)
        date = calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    return tree, date, f"Release {release.version}\n"
