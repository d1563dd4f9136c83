"""A git folder or URL: the newest commits of its default branch.

The clone is shallow, so a repository of 50,000 commits costs what its newest ones cost. Repositories
with submodules are refused: their content would be missing from every workspace.
"""

from __future__ import annotations

import re
from pathlib import Path

from catalog.models import digest_json
from envfactory import git
from envfactory.errors import SourceError
from envfactory.layout import has_tests
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
    slug,
)


class RepositorySource:
    """A git repository by path or URL, optionally with `@` and a full commit id behind it."""

    def __init__(self, address: str, limits: Limits) -> None:
        self.name = git.redacted(address)
        self.limits = limits
        pinned = re.fullmatch(r"(.+)@([0-9a-f]{40})", address)
        self._address, self._commit = pinned.groups() if pinned else (address, None)

    def fetch(self, home: Path, progress: Progress = silent) -> History:
        """Clone the newest commits into `home`. Raises SourceError or NoSpace."""
        tip = self._commit or git.remote_head(self._address)
        base = slug(re.sub(r"\.git$", "", self._address.rstrip("/")).rpartition("/")[2].rpartition(":")[2])
        key = digest_json([git.redacted(self._address), tip, self.limits.commits])[7:19]
        folder = home / "sources" / f"git-{base}-{key}"
        if found := load_history(folder, self.name):
            return found
        check_space(home, self.limits.free_mb)
        progress(f"{base}: cloning the newest {self.limits.commits} commits")
        with new_folder(folder) as temporary:
            repository = temporary / "repo.git"
            # One commit more than asked for: the oldest one is only ever a parent.
            if self._commit:
                git.fetch_commit(self._address, repository, self._commit, depth=self.limits.commits + 1)
            else:
                git.clone(self._address, repository, depth=self.limits.commits + 1)
            newest = git.read_commit(repository, git.head(repository))
            self._check(newest)
            commits = git.log(repository, limit=self.limits.commits + 1)
            revisions = tuple(Revision(c.id[:12], c.id, c.date, c.message) for c in commits)
            pinned = f"{git.redacted(self._address)}@{commits[-1].id}"
            save_history(History(self.name, pinned, base, "commit", repository, revisions), temporary)
        history = load_history(folder, self.name)
        assert history is not None
        return history

    def _check(self, tree: git.Tree) -> None:
        if ".gitmodules" in tree:
            raise SourceError(
                f"{self.name} has git submodules, which stay empty in a task: copy their files into it first"
            )
        if not has_tests(tree):
            raise SourceError(
                f"{self.name} has no Python tests (test_*.py): choose a repository that has some"
            )
