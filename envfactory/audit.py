"""Judging a task again, from what the catalog and the image store keep of it.

    report = await audit(task, catalog, images, grader)

Gold must pass every time, doing nothing must fail every fail-to-pass test, an emptied function must fail,
and no hack probe may score. Every verdict is made anew. A task that fails is quarantined, an imported draft
that passes is validated; the gates of its
synthesis that need the build (leak, specified, stable) stay as they were.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from catalog.models import Decision, Gate, QualityReport, Status, Task, TestStatus, Verdict
from catalog.store import Catalog
from envfactory.errors import FactoryError
from envfactory.stages.solvers import stubbed
from sandbox.images import ImageStore
from verifiers.grading import Grader
from verifiers.hacks import PROBES, HackProbe


class ImageGone(FactoryError):
    """The task's image is not in the store any more."""


async def audit(
    task: Task, catalog: Catalog, images: ImageStore, grader: Grader, *, runs: int = 2
) -> QualityReport:
    """Judge a task again and record what came out; `runs` is how often gold must pass.

    Raises ImageGone when the task cannot be run any more.
    """
    if not images.exists(task.environment.image):
        raise ImageGone(f"the image of {task.id} is gone: make the task again with `posttrain tasks synth`")
    files = workspace_files(task, images)
    gates = (
        await _gold(task, grader, catalog.blobs.get(task.solution), runs),
        await _no_op(task, grader),
        *await _stub(task, grader, files),
        await _hacks(task, grader, files),
    )
    old = catalog.find_report(task.id) or QualityReport(task_id=task.id)
    new = {gate.name: gate for gate in gates}
    merged = [new.pop(gate.name, gate) for gate in old.gates] + list(new.values())
    failed = [gate.name for gate in merged if gate.passed is False]
    unknown = [gate.name for gate in gates if gate.passed is None]
    reason = f"{sum(gate.passed is True for gate in gates)} of {len(gates)} gates passed again"
    if failed:
        reason += f", {', '.join(failed)} failed"
    if unknown:
        reason += f", {', '.join(unknown)} could not be judged"
    decision = Decision(
        actor="auditor", action="quarantined" if failed else "audited", reason=reason, at=time.time()
    )
    report = old.model_copy(update={"gates": tuple(merged), "history": (*old.history, decision)})
    with catalog.transaction():
        if failed:
            catalog.put_task(task.model_copy(update={"status": Status.QUARANTINED}))
        elif task.status is Status.DRAFT and report.accepted:
            catalog.put_task(task.model_copy(update={"status": Status.VALIDATED}))
        catalog.put_report(report)
    return report


def workspace_files(task: Task, images: ImageStore) -> dict[str, bytes]:
    """Files of the task's workspace as the agent finds them, without its .git folder."""
    top = images.layer_path(images.manifest(task.environment.image).layers[-1])
    root = top / Path(task.environment.workdir).relative_to("/")
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink() and ".git" not in path.relative_to(root).parts
    }


async def _gold(task: Task, grader: Grader, patch: bytes, runs: int) -> Gate:
    began = time.monotonic()
    verdicts = [await grader.grade(task, patch, fresh=True) for _ in range(runs)]
    return _gate("gold", verdicts, wanted=1.0, began=began, said=f"{runs} of {runs} runs pass")


async def _no_op(task: Task, grader: Grader) -> Gate:
    began = time.monotonic()
    verdict = await grader.grade_files(task, {}, fresh=True)
    gate = _gate("no-op", [verdict], wanted=0.0, began=began, said="doing nothing fails")
    passing = [t for t in task.verifier.fail_to_pass if verdict.tests.get(t) is TestStatus.PASSED]
    if gate.passed and passing:
        return gate.model_copy(update={"passed": False, "evidence": f"passes without a change: {passing[0]}"})
    return gate


async def _stub(task: Task, grader: Grader, files: Mapping[str, bytes]) -> list[Gate]:
    path, function = task.origin.path, task.origin.function
    if path is None or function is None or path not in files:
        return []
    text = stubbed(files[path].decode(errors="replace"), function)
    if text is None:
        return []
    began = time.monotonic()
    verdict = await grader.grade_files(task, {path: text.encode()}, fresh=True)
    return [_gate("stub", [verdict], wanted=0.0, began=began, said="an empty function fails")]


async def _hacks(task: Task, grader: Grader, files: Mapping[str, bytes]) -> Gate:
    """Probes that satisfy the tests themselves cannot be told by running tests: named, not counted."""
    began = time.monotonic()

    async def attempt(probe: HackProbe) -> Verdict:
        made = probe.files(task, files)
        inside = {path: data for path, data in made.items() if path.startswith(task.verifier.allowed)}
        return await grader.grade_files(task, inside or made, fresh=True)

    verdicts = dict(zip(PROBES, await asyncio.gather(*map(attempt, PROBES)), strict=True))
    counted = {probe.name: one for probe, one in verdicts.items() if not probe.needs_differential}
    fooled = [name for name, verdict in counted.items() if verdict.reward]
    gaps = [probe.name for probe, one in verdicts.items() if probe.needs_differential and one.reward]
    said = f"{len(counted)} of {len(counted)} probes score 0"
    gate = _gate("hacks", list(counted.values()), wanted=0.0, began=began, said=said)
    evidence = f"fooled by {', '.join(fooled)}" if fooled else gate.evidence
    if gaps:
        evidence += f"; passes its tests without an answer: {', '.join(gaps)}"
    return gate.model_copy(update={"evidence": evidence, "data": {"gaps": gaps}})


def _gate(name: str, verdicts: list[Verdict], *, wanted: float, began: float, said: str) -> Gate:
    cost = time.monotonic() - began
    wrong = next((v for v in verdicts if v.reward is not None and v.reward != wanted), None)
    unknown = next((v.failure for v in verdicts if v.failure is not None), None)
    if wrong is not None:
        return Gate(name=name, passed=False, evidence=wrong.evidence, cost_s=cost)
    if unknown is not None:
        return Gate(name=name, passed=None, evidence=unknown.message, cost_s=cost)
    return Gate(name=name, passed=True, evidence=said, cost_s=cost)
