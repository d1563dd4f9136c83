"""A stranger's task becomes ours: its repository at its commit, an environment, and what the tests really do.

    importer = Importer(home, blobs, images, provider, grader, repository="/srv/mirrors/{repo}.git")
    unpacked = await importer(parcel)

The environment is built as for any source (`envfactory.build`), or is an image that the user names. Gold is
run once to learn the complete set of ids and the time that it takes; what the document claims stays what must
pass, so a claim that does not hold fails a gate later instead of being mended here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from catalog.blobs import Blobs
from catalog.models import Limits, Origin, Task, TestStatus
from envfactory import build as builds
from envfactory import layout as layouts
from envfactory.build import Build, Suite, sandbox_env
from envfactory.formats.base import Foreign, Parcel
from envfactory.formats.fields import FormatError
from envfactory.formats.parcels import Unpacked, apply_diff, keep_foreign
from envfactory.packaging import Draft, Packager
from envfactory.sanitize import clean
from envfactory.sources.base import History, Progress, open_source, silent, slug
from envfactory.sources.base import Limits as SourceLimits
from envfactory.stages.inspector import leaks, specifies
from envfactory.trees import Changes, Tree, changed, scratch, write_tree
from envfactory.wheels import Lock
from sandbox.base import SandboxProvider
from sandbox.images import ImageStore
from verifiers.grading import Grader
from verifiers.operators import functions
from verifiers.runner import TestRun

FIRST_RUN_S = 600.0
"""For the run that measures; afterwards a task's own limit is ten times what it took, at least 10 s."""


class Importer:
    """See the module.

    Args:
        repository: path or URL of a git repository; `{repo}` stands for the document's `owner/name`.
        image: digest of an image with the tests' environment in /opt/env; None builds one.
    """

    def __init__(
        self,
        home: Path,
        blobs: Blobs,
        images: ImageStore,
        provider: SandboxProvider,
        grader: Grader,
        *,
        repository: str,
        image: str | None = None,
        progress: Progress = silent,
    ) -> None:
        self._home, self._blobs, self._images = home, blobs, images
        self._provider, self._grader = provider, grader
        self._repository, self._image = repository, image
        self._progress = progress
        if image is not None and not images.exists(image):
            raise FormatError(f"no image {image} is in {images.root}: build or import it first")

    async def __call__(self, parcel: Parcel) -> Unpacked:
        """The task, a draft. Raises FormatError, SourceError, BuildError."""
        self._progress(f"{parcel.id}: fetching {parcel.repo}")
        history = self._history(parcel)
        # Before minutes go into an environment: do the diffs apply, and are the tests pytest's?
        _diffs(parcel, clean(history.tree(history.newest)))
        build = await self._build(history, parcel)
        draft = _draft(parcel, build, history)
        packager = Packager(build, self._images, self._blobs)
        task = _allowing(packager.package(draft), draft)
        self._progress(f"{parcel.id}: running gold")
        run = await self._grader.run(task, _only(draft.solved, draft.start), task.verifier.arguments)
        measured, notes = _measured(task, run)
        # Where tests were taken out or a bug put in, the workspace is no commit of that repository.
        commit = parcel.commit if draft.keep_tests and not parcel.start else ""
        said = {"repo": parcel.repo, "commit": commit, "version": parcel.version}
        said |= {"created": parcel.created, "image": parcel.image}
        foreign = (*parcel.foreign, Foreign(format="import", fields={k: v for k, v in said.items() if v}))
        kept = keep_foreign(replace(parcel, foreign=foreign), self._blobs)
        measured = measured.model_copy(update={"foreign": kept})
        gates = tuple(gate.model_copy(update={"cost_s": 0.0}) for gate in (leaks(draft), specifies(draft)))
        return Unpacked(measured, notes, gates)

    def _history(self, parcel: Parcel) -> History:
        address = self._repository.replace("{repo}", parcel.repo)
        if parcel.commit and not re.fullmatch(r"[0-9a-f]{40}", parcel.commit):
            raise FormatError(f"{parcel.id}: base_commit {parcel.commit[:50]!r} is no full commit id")
        if parcel.commit:
            address = f"{address}@{parcel.commit}"
        return open_source(address, SourceLimits(commits=1)).fetch(self._home, self._progress)

    async def _build(self, history: History, parcel: Parcel) -> Build:
        if self._image is None:
            return await builds.build(
                history, self._home, self._provider, self._images, progress=self._progress
            )
        tree = clean(history.tree(history.newest))
        layout = layouts.detect(tree, history.name)
        with scratch() as folder:
            write_tree(tree, folder / "workspace")
            image = self._images.add_layer(
                self._image,
                folder / "workspace",
                at="/workspace",
                env=sandbox_env(layout),
                note="clean workspace",
            )
        return Build(
            name=history.name,
            source=history.source,
            pinned=history.pinned,
            revision=history.newest,
            version=parcel.version or "0",
            licence=layouts.licence(tree),
            layout=layout,
            requirements=(),
            lock=Lock(()),
            env_image=self._image,
            image=image,
            tree=tree,
            suite=Suite({}, ()),
        )


def _draft(parcel: Parcel, build: Build, history: History) -> Draft:
    """The parcel's diffs as changes of the repository's tree."""
    base = build.tree
    start, gold, tests, arguments = _diffs(parcel, base)
    path, function = _touched(changed(base, start), gold)
    return Draft(
        origin=Origin(
            kind="import",
            source=history.pinned,
            revision=parcel.version or history.newest.name,
            path=path,
            function=function,
            licence=build.licence,
        ),
        slug=slug(parcel.id),
        base=base,
        start=start,
        solved={**start, **gold},
        fail_to_pass=parcel.fail_to_pass,
        pass_to_pass=parcel.pass_to_pass,
        expected=dict.fromkeys((*parcel.fail_to_pass, *parcel.pass_to_pass), TestStatus.PASSED),
        arguments=arguments,
        visible=(),
        statement=parcel.statement,
        tests=tests,
        limits=Limits(timeout_s=FIRST_RUN_S),
        # SWE-bench's agents see the old tests. Where the tests are in the repository itself they must go.
        keep_tests=bool(parcel.tests),
    )


def _diffs(parcel: Parcel, base: Tree) -> tuple[Changes, Changes, Changes, tuple[str, ...]]:
    """What the starting diff, gold and the test patch change, and the test files to run. FormatError."""
    start, _ = apply_diff(parcel.start, base, f"the starting diff of {parcel.id}")
    workspace = changed(base, start)
    gold, _ = apply_diff(parcel.gold, workspace, f"the patch of {parcel.id}")
    tests, _ = apply_diff(parcel.tests, workspace, f"the test patch of {parcel.id}")
    return start, gold, tests, _arguments(parcel, changed(workspace, tests))


def _arguments(parcel: Parcel, tree: Tree) -> tuple[str, ...]:
    """The test files of the listed ids. Raises FormatError for ids that are not pytest's."""
    files: set[str] = set()
    for id in (*parcel.fail_to_pass, *parcel.pass_to_pass):
        path, mark, name = id.partition("::")
        if not mark or not name or path not in tree:
            raise FormatError(
                f"{parcel.id} lists the test {id[:80]!r}, which is no FILE::NAME of a file that is there: "
                "only tasks whose tests pytest runs can be imported"
            )
        files.add(path)
    return tuple(sorted(files))


def _touched(before: Tree, gold: Changes) -> tuple[str | None, str | None]:
    """The first source file that gold changes, and the function if it changes one and no other file."""
    sources = sorted(path for path in gold if path.endswith(".py") and not layouts.is_protected(path))
    if not sources:
        return None, None
    path = sources[0]
    old, new = before.get(path), gold[path]
    if len(sources) > 1 or old is None or new is None:
        return path, None
    texts = [data.decode("utf-8", "replace") for data in (old.data, new)]
    found = [{span.qualname: text[span.start : span.end] for span in functions(text)} for text in texts]
    names = [name for name, text in found[0].items() if found[1].get(name, text) != text]
    # A change inside a nested function changes the one around it, too: the outermost is meant.
    outer = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    return path, outer[0] if len(outer) == 1 and set(found[0]) == set(found[1]) else None


def _allowing(task: Task, draft: Draft) -> Task:
    """The task with the files that gold touches among those that may change."""
    allowed = task.verifier.allowed
    inside = tuple(path.rstrip("/") for path in allowed)
    extra = [
        path
        for path in sorted(_only(draft.solved, draft.start))
        if path not in inside and not path.startswith(tuple(f"{folder}/" for folder in inside))
    ]
    return task.model_copy(
        update={"verifier": task.verifier.model_copy(update={"allowed": (*allowed, *extra)})}
    )


def _only(solved: Changes, start: Changes) -> dict[str, bytes | None]:
    """What leads from the start state to the solved one."""
    return {path: data for path, data in solved.items() if path not in start or start[path] != data}


def _measured(task: Task, run: TestRun) -> tuple[Task, tuple[str, ...]]:
    """The task with the complete set of ids and its own time limit, and what gold did not do as claimed."""
    listed = (*task.verifier.fail_to_pass, *task.verifier.pass_to_pass)
    wrong = [name for name in listed if run.tests.get(name) is not TestStatus.PASSED]
    expected: Mapping[str, TestStatus] = {**run.tests, **dict.fromkeys(listed, TestStatus.PASSED)}
    timeout = max(10.0, min(FIRST_RUN_S, 10 * run.duration_s))
    limits = task.environment.limits.model_copy(update={"timeout_s": timeout})
    changes: dict[str, Any] = {
        "verifier": task.verifier.model_copy(
            update={"expected": dict(sorted(expected.items())), "timeout_s": timeout}
        ),
        "environment": task.environment.model_copy(update={"limits": limits}),
    }
    notes = list[str]()
    if run.outcome != "finished":
        notes.append(f"gold's run ended by {run.outcome}")
    if wrong:
        seen = run.tests.get(wrong[0], TestStatus.ABSENT)
        notes.append(
            f"with gold {len(wrong)} of {len(listed)} listed tests do not pass, as {wrong[0]} ({seen})"
        )
    return task.model_copy(update=changes), tuple(notes)
