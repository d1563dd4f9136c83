"""Everything the factory asks of git, in one module.

Cloning goes through GitPython with its unsafe options and protocols refused; the address is checked
against a list of schemes first. Bulk reads and writes (`cat-file --batch`, `fast-import`, the oracle)
are plain subprocesses: GitPython leaks one process a repository there. No hook, no filter, no submodule
and no credential prompt of a foreign repository ever runs: repositories are bare, and the settings that
could start a program are fixed by the environment.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from envfactory.errors import SourceError
from envfactory.packs import AUTHOR
from envfactory.trees import File, Tree

SCHEMES = ("https", "http", "ssh", "git", "file")
_SAFE = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "protocol.ext.allow": "never",
    "safe.directory": "*",
    "transfer.fsckObjects": "false",
}


class GitFailed(Exception):
    """git left with an error; the text is its last line."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit of the first-parent line."""

    id: str
    parents: tuple[str, ...]
    date: int
    """Author date, seconds since the epoch."""
    message: str


def environment(*, user_config: bool = False) -> dict[str, str]:
    """Environment of a git process. `user_config`: read the user's own settings (proxy, insteadOf, keys)."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or "SSL" in name}
    keep |= {
        "GIT_TERMINAL_PROMPT": "0",
        # `git status` must not rewrite the index of a workspace that it only looks at.
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_ALLOW_PROTOCOL": ":".join(SCHEMES),
        "GIT_HTTP_LOW_SPEED_LIMIT": "1000",
        "GIT_HTTP_LOW_SPEED_TIME": "30",
        "GIT_TEMPLATE_DIR": "",
        "LC_ALL": "C",
        "GIT_CONFIG_COUNT": str(len(_SAFE)),
    }
    if not user_config:
        keep |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    for i, (key, value) in enumerate(_SAFE.items()):
        keep[f"GIT_CONFIG_KEY_{i}"], keep[f"GIT_CONFIG_VALUE_{i}"] = key, value
    return keep


def run(
    arguments: Sequence[str],
    repository: Path,
    *,
    stdin: bytes = b"",
    ok: Iterable[int] = (0,),
    timeout: float = 300,
) -> bytes:
    """Standard output of `git ARGUMENTS` in a repository. Raises GitFailed."""
    done = subprocess.run(
        ["git", "--no-replace-objects", *arguments],
        cwd=repository,
        input=stdin,
        capture_output=True,
        env=environment(),
        timeout=timeout,
        check=False,
    )
    if done.returncode not in tuple(ok):
        raise GitFailed(_last_line(done.stderr.decode(errors="replace")))
    return done.stdout


def clone(address: str, target: Path, *, depth: int) -> None:
    """A bare copy of the newest `depth` commits of the default branch, without tags or submodules.

    `address` is a folder or a URL of an allowed scheme. Raises SourceError.
    """
    import git  # GitPython; a tenth of a second to import

    url = _checked_address(address)
    try:
        with git.Repo.clone_from(
            url,
            str(target),
            env=environment(user_config=True),
            bare=True,
            depth=depth,
            single_branch=True,
            no_tags=True,
            allow_unsafe_protocols=url.startswith("file://"),
        ):
            pass
    except git.GitCommandError as error:
        reason = _last_line(str(error.stderr).strip().strip("'"))
        raise SourceError(
            f"cannot clone {redacted(address)} ({reason}): check the address and your access"
        ) from error


def fetch_commit(address: str, target: Path, commit: str, *, depth: int) -> None:
    """A bare repository with one commit (40 digits) of another one and its `depth` - 1 ancestors as HEAD."""
    url = _checked_address(address)
    target.mkdir()
    run(["init", "--quiet", "--bare", "--template=", "--initial-branch=main", "."], target)
    command = ["git", "fetch", "--quiet", f"--depth={depth}", "--no-tags", "--no-recurse-submodules"]
    done = subprocess.run(
        [*command, "--", url, f"{commit}:refs/heads/main"],
        cwd=target,
        capture_output=True,
        env=environment(user_config=True),
        check=False,
    )
    if done.returncode != 0:
        reason = _last_line(done.stderr.decode(errors="replace"))
        raise SourceError(
            f"cannot fetch commit {commit[:12]} of {redacted(address)} ({reason}): check that it exists"
        )


def _checked_address(address: str) -> str:
    if "://" in address:
        scheme = address.partition("://")[0].lower()
        if scheme not in SCHEMES:
            raise SourceError(f"{scheme}:// addresses are not accepted: use one of {', '.join(SCHEMES)}")
        return address
    if re.match(r"^[\w.-]+@[\w.-]+:", address):
        return address
    folder = Path(address).expanduser()
    if not folder.is_dir():
        raise SourceError(f"{address} is no folder: give a git repository's path, its URL, or pypi:NAME")
    # A plain path would be copied whole, whatever the depth; a URL goes through the transport.
    return folder.resolve().as_uri()


def redacted(address: str) -> str:
    """The address without its user and password."""
    return re.sub(r"(?<=://)[^/@]*@", "", address)


def head(repository: Path) -> str:
    """Commit id of HEAD. Raises SourceError for a repository without commits."""
    try:
        return run(["rev-parse", "--verify", "HEAD^{commit}"], repository).decode().strip()
    except GitFailed:
        raise SourceError("the repository has no commit yet: commit something first") from None


def log(repository: Path, *, limit: int, start: str = "HEAD") -> list[Commit]:
    """The newest commits of the first-parent line, oldest first."""
    text = run(
        [
            "log",
            "-z",
            "--first-parent",
            f"--max-count={limit}",
            "--format=%H%x01%P%x01%at%x01%B",
            start,
            "--",
        ],
        repository,
    )
    commits: list[Commit] = []
    for row in text.decode(errors="replace").split("\0"):
        if row:
            commit, parents, date, message = row.split("\x01", 3)
            commits.append(Commit(commit, tuple(parents.split()), int(date or 0), message.strip()))
    return commits[::-1]


def read_commit(repository: Path, commit: str, *, known: dict[str, bytes] | None = None) -> dict[str, File]:
    """The files of a commit. `known` (object id to bytes) is used and filled, so that neighbours share bytes.

    Submodule entries are left out; `envfactory.sources.repository` refuses repositories that have them.
    """
    cache = {} if known is None else known
    rows: list[tuple[str, str, str]] = []
    for row in run(["ls-tree", "-r", "-z", "--full-tree", commit], repository).split(b"\0"):
        if row:
            description, _, path = row.partition(b"\t")
            mode, kind, oid = description.decode().split()
            if kind == "blob":
                rows.append((path.decode("utf-8", "surrogateescape"), mode, oid))
    missing = list(dict.fromkeys(oid for _, _, oid in rows if oid not in cache))
    cache.update(zip(missing, read_blobs(repository, missing), strict=True))
    return {
        path: File(cache[oid], executable=mode == "100755", link=mode == "120000") for path, mode, oid in rows
    }


def read_blobs(repository: Path, oids: Sequence[str]) -> list[bytes]:
    """Contents of blobs, in order, through one process."""
    if not oids:
        return []
    data = run(["cat-file", "--batch"], repository, stdin="".join(f"{oid}\n" for oid in oids).encode())
    result: list[bytes] = []
    position = 0
    for _ in oids:
        end = data.index(b"\n", position)
        size = int(data[position:end].rsplit(b" ", 1)[1])
        result.append(data[end + 1 : end + 1 + size])
        position = end + 2 + size
    return result


def import_history(repository: Path, releases: Sequence[tuple[Tree, int, str]]) -> list[str]:
    """Make a bare repository with one commit for each (tree, date, message), in order; their ids."""
    repository.mkdir(parents=True)
    run(["init", "--quiet", "--bare", "--template=", "--initial-branch=main", "."], repository)
    stream: list[bytes] = []
    for i, (tree, date, message) in enumerate(releases):
        text = message.encode()
        who = f"{AUTHOR} {date} +0000".encode()
        stream.append(b"commit refs/heads/main\nmark :%d\nauthor %s\ncommitter %s\n" % (i + 1, who, who))
        stream.append(b"data %d\n%s\n" % (len(text), text))
        stream.append(b"deleteall\n")
        for path in sorted(tree):
            file = tree[path]
            name = (
                b'"'
                + path.encode("utf-8", "surrogateescape").replace(b'"', b'\\"').replace(b"\n", b"\\n")
                + b'"'
            )
            stream.append(b"M %s inline %s\ndata %d\n" % (file.mode.encode(), name, len(file.data)))
            stream.append(file.data + b"\n")
    marks = repository / "marks"
    run(["fast-import", "--quiet", "--force", f"--export-marks={marks}"], repository, stdin=b"".join(stream))
    ids = dict(line.split() for line in marks.read_text().splitlines())
    marks.unlink()
    return [ids[f":{i + 1}"] for i in range(len(releases))]


def unreachable_objects(git_folder: Path) -> tuple[set[str], int]:
    """Objects that HEAD does not reach, and the number of commits in the store. A task has none and one."""
    place = [f"--git-dir={git_folder}"]
    form = "--batch-check=%(objecttype) %(objectname)"
    every = run([*place, "cat-file", "--batch-all-objects", form, "--unordered"], git_folder).decode().split()
    reached = run([*place, "rev-list", "--objects", "--no-object-names", "HEAD"], git_folder)
    return set(every[1::2]) - set(reached.decode().split()), every[::2].count("commit")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    chosen = next(
        (line for line in lines if line.startswith(("fatal:", "ERROR:", "error:"))),
        lines[-1] if lines else "",
    )
    return redacted(chosen.removeprefix("fatal: "))[:200] or "git gave no reason"


def remote_head(address: str) -> str:
    """Commit id that the default branch of a repository points to. Raises SourceError."""
    url = _checked_address(address)
    try:
        done = subprocess.run(
            ["git", "ls-remote", "--exit-code", "--", url, "HEAD"],
            capture_output=True,
            env=environment(user_config=True),
            timeout=120,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SourceError(f"{redacted(address)} does not answer: check the address and the network") from None
    if done.returncode == 2:
        raise SourceError(f"{redacted(address)} has no commit yet: commit something first")
    if done.returncode != 0:
        reason = _last_line(done.stderr.decode(errors="replace"))
        raise SourceError(f"cannot read {redacted(address)} ({reason}): check the address and your access")
    return done.stdout.decode().split()[0]
