"""A drafted task becomes a Task: an image layer, a protected tar, a gold patch and a record.

Everything here is a function of its inputs: the same draft gives the same layer, blobs and id on every
run, so a synthesis that was killed and started again finds its own work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import libcst

from catalog.blobs import Blobs
from catalog.models import (
    Environment,
    Limits,
    Origin,
    Problem,
    Substrate,
    Task,
    TestStatus,
    VerifierSpec,
)
from envfactory import git, sanitize
from envfactory.build import Build, sandbox_env
from envfactory.errors import FactoryError
from envfactory.layout import Layout, is_protected, is_test_path
from envfactory.packs import PackWriter
from envfactory.prune import prune, test_name, test_path
from envfactory.trees import (
    Changes,
    File,
    Tree,
    changed,
    difference,
    scratch,
    tar_of,
    tree_key,
    write_tree,
)
from sandbox.images import ImageStore
from sandbox.trees import tree_digest
from verifiers import changes


class LeakError(FactoryError):
    """A packaged workspace holds more than it may. A fault of ours: the task must not be used."""


@dataclass(frozen=True)
class Draft:
    """Everything that makes a task, before it has an image.

    `base` is a clean workspace; `start` and `solved` lead from it to the state that the agent finds and
    to the solved one (sources only); `tests` leads to the verifier's test files.
    """

    origin: Origin
    slug: str
    base: Tree
    start: Changes
    solved: Changes
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    expected: dict[str, TestStatus]
    arguments: tuple[str, ...]
    visible: tuple[str, ...]
    statement: str
    interface: str = ""
    tests: Changes = field(default_factory=dict[str, bytes | None])
    limits: Limits = field(default_factory=Limits)
    layout: Layout | None = None
    """Of `base`, where it is not the build's: an older revision may be laid out otherwise."""
    keep_tests: bool = False
    """The agent sees the test files of `base` as they are (imported tasks), not the visible tests alone."""

    @property
    def start_tests(self) -> dict[str, File]:
        """The state that the agent finds, with all of the verifier's tests: what a grader starts from."""
        return changed(changed(self.base, self.start), self.tests)

    @property
    def solved_tests(self) -> dict[str, File]:
        """The solved workspace with the verifier's tests: where the gold run happens."""
        return changed(changed(self.base, self.solved), self.tests)


class Packager:
    """Packages drafts of one build; keeps what their workspaces share."""

    def __init__(self, build: Build, images: ImageStore, blobs: Blobs) -> None:
        self._build = build
        self._images = images
        self._blobs = blobs
        self._packs = PackWriter()

    def package(self, draft: Draft) -> Task:
        """Write layer and blobs; the record. Raises LeakError when the workspace is not closed."""
        layout = draft.layout or self._build.layout
        image, digest = add_workspace(
            self._images, self._build.env_image, workspace(draft),
            packs=self._packs, env=sandbox_env(layout), note=draft.slug,
        )  # fmt: skip
        verifier = VerifierSpec(
            fail_to_pass=tuple(sorted(draft.fail_to_pass)),
            pass_to_pass=tuple(sorted(draft.pass_to_pass)),
            expected=dict(sorted(draft.expected.items())),
            arguments=tuple(sorted(draft.arguments)),
            protected=self._blobs.put(tar_of(protected(draft))),
            allowed=layout.allowed,
            timeout_s=draft.limits.timeout_s,
        )
        return Task(
            id=task_id(draft, verifier, self._build),
            origin=draft.origin,
            problem=Problem(
                statement=draft.statement,
                visible_tests=tuple(sorted(draft.visible)),
                interface=draft.interface,
            ),
            environment=Environment(
                image=image, tree=digest, limits=draft.limits, substrate=self._substrate(draft)
            ),
            verifier=verifier,
            solution=self._blobs.put(gold_patch(draft)),
        )

    def _substrate(self, draft: Draft) -> Substrate | None:
        """The build's image with the changes to this draft's graded workspace.

        None where that image looks for the package in another folder than the draft has it in.
        """
        if draft.layout is not None and draft.layout.import_root != self._build.layout.import_root:
            return None
        laid = changes.dump(difference(self._build.tree, draft.start_tests))
        return Substrate(image=self._build.image, changes=self._blobs.put(laid))


def add_workspace(
    images: ImageStore,
    parent: str,
    tree: Tree,
    *,
    packs: PackWriter,
    env: Mapping[str, str],
    note: str,
    at: str = "/workspace",
) -> tuple[str, str]:
    """One layer with an agent's workspace, one root commit in it: digests of the image and of the tree.

    Raises LeakError when the workspace is not closed.
    """
    files = dict(tree) | {f".git/{path}": file for path, file in packs.repository(tree).items()}
    with scratch() as temporary:
        folder = temporary / "workspace"
        write_tree(files, folder)
        (folder / ".git/objects/info").mkdir()
        (folder / ".git/refs/tags").mkdir()
        if found := sanitize.problems(folder):
            raise LeakError(f"the workspace of {note} is not sound: {found[0]}")
        return images.add_layer(parent, folder, at=at, env=env, note=note), tree_digest(folder)


def task_id(draft: Draft, verifier: VerifierSpec, build: Build) -> str:
    """Slug and content hash. Image digests and texts stay out: they may differ between hosts."""
    return Task.make_id(
        draft.slug,
        draft.origin.kind,
        tree_key(changed(draft.base, draft.start)),
        tree_key(changed(draft.base, draft.solved)),
        verifier.protected,
        verifier.fail_to_pass,
        verifier.pass_to_pass,
        sorted(draft.visible),
        build.lock.digest(),
    )


def workspace(draft: Draft) -> dict[str, File]:
    """What the agent finds: the start state, with the verifier's test files cut down to the visible tests."""
    names: dict[str, set[str]] = defaultdict(set)
    for test in draft.visible:
        names[test_path(test)].add(test_name(test))
    tree = changed(draft.base, draft.start)
    if draft.keep_tests:
        return tree
    # Data and helpers that the new tests need come along; new test files only as far as they are visible.
    helpers = {path: data for path, data in draft.tests.items() if not is_test_path(path)}
    tree = changed(tree, helpers)
    tests = changed(draft.base, draft.tests)
    for path in draft.arguments:
        tree.pop(path, None)
        if path in tests and names.get(path):
            file = tests[path]
            try:
                text = prune(file.data.decode("utf-8"), names[path])
            except (libcst.ParserSyntaxError, UnicodeDecodeError):
                continue
            tree[path] = File(text.encode(), executable=file.executable)
    return tree


def protected(draft: Draft) -> dict[str, File]:
    """Every test, conftest and ini file of the verifier; links are left to the image."""
    arguments = frozenset(draft.arguments)
    every = changed(draft.base, draft.tests)
    return {path: file for path, file in every.items() if is_protected(path, arguments) and not file.link}


def gold_patch(draft: Draft) -> bytes:
    """git diff from the agent's workspace to the solved one, sources only."""
    return diff(changed(draft.base, draft.start), changed(draft.base, draft.solved))


def diff(before: Tree, after: Tree) -> bytes:
    """A binary-safe git diff between two trees, sorted by path."""
    parts: list[bytes] = []
    options = [
        "diff",
        "--no-index",
        "--binary",
        "--full-index",
        "--no-color",
        "--no-ext-diff",
        "--no-textconv",
    ]
    with scratch() as root:
        for path in sorted(before.keys() | after.keys()):
            old, new = before.get(path), after.get(path)
            if old == new:
                continue
            for side, file in (("a", old), ("b", new)):
                if file is not None:
                    write_tree({f"{side}/{path}": file}, root)
            if old is None:
                arguments, place = ["--", "/dev/null", path], root / "b"
            elif new is None:
                arguments, place = ["--", path, "/dev/null"], root / "a"
            else:
                arguments, place = ["--no-prefix", "--", f"a/{path}", f"b/{path}"], root
            parts.append(git.run([*options, *arguments], place, ok=(0, 1)))
    return b"".join(parts)
