"""Real runs of reward scripts: what they write counts, and what the agent leaves behind does not."""

from __future__ import annotations

import pytest

from catalog.models import Environment, Limits, Origin, Problem, Task, VerifierSpec
from sandbox.trees import pack_files
from verifiers import patches
from verifiers.command import MAX_RESULT, parse_reward

BEFORE = {"answer.txt": b"41\n", "tool.sh": b"echo old\n", "notes/a b.txt": b"x\n"}
SCRIPT = """\
grep -cx 42 answer.txt > /logs/verifier/reward.txt
exit 3
"""


@pytest.fixture(scope="module")
def make(images, blobs):
    def task(script: str, *, kind: str = "command", protected=None, timeout: float = 20, **settings) -> Task:
        tests = blobs.put(pack_files({"test.sh": script.encode(), "data/wanted": b"42\n"}))
        return Task(
            id="answer",
            origin=Origin(kind="import", source="x", revision="1"),
            problem=Problem(statement="Put the answer into answer.txt"),
            environment=Environment(
                image=images.workspace(BEFORE), tree="none", limits=Limits(memory_mb=256, disk_mb=64)
            ),
            verifier=VerifierSpec(
                kind=kind,
                settings={"tests": tests, **settings},
                protected=blobs.put(pack_files(protected or {})),
                allowed=(".",),
                timeout_s=timeout,
            ),
            solution=blobs.put(b""),
        )

    return task


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_number_decides_and_the_exit_status_does_not(grader, make):
    task = make(SCRIPT)
    right = patches.make_diff({"answer.txt": b"41\n"}, {"answer.txt": b"42\n"})
    assert (await grader.grade(task, right)).reward == 1.0
    assert (await grader.grade(task, b"")).reward == 0.0
    outside = (await grader.grade(task, right.replace(b"answer.txt", b"../answer.txt"))).evidence
    assert outside.startswith("Refused")
    for name in ("../../tests/test.sh", "/tests/test.sh", "a/../../x", ".git/config", "sub/.GIT/hooks/x"):
        verdict = await grader.grade_files(task, {name: b"echo 1 > /logs/verifier/reward.txt"})
        assert verdict.reward == 0.0
        assert verdict.evidence.startswith("Refused")


async def test_a_verdict_is_cached_and_fresh_runs_again(grader, make):
    task = make(SCRIPT + "# cached\n")
    assert not (await grader.grade_files(task, {"answer.txt": b"42\n"})).cached
    assert (await grader.grade_files(task, {"answer.txt": b"42\n"})).cached
    assert not (await grader.grade_files(task, {"answer.txt": b"42\n"}, fresh=True)).cached


async def test_deletions_modes_and_protected_files_reach_the_workspace(grader, make):
    script = """\
    [ ! -e "notes/a b.txt" ] && [ -x tool.sh ] && [ "$(cat kept/x)" = ours ] \
        && [ "$(stat -c %u kept/x)" = 0 ] && [ "$WORD" = two ] \
        && cmp -s /tests/data/wanted answer.txt && echo 1 > /logs/verifier/reward.txt
    [ -e /logs/verifier/reward.txt ] || echo 0 > /logs/verifier/reward.txt
    """
    task = make(script, protected={"kept/x": b"ours"}, env={"WORD": "two"})
    files = {"notes/a b.txt": None, "tool.sh": b"echo new\n", "answer.txt": b"42\n", "kept/x": b"theirs"}
    assert (await grader.grade_files(task, files, executable=["tool.sh"])).reward == 1.0
    assert (await grader.grade_files(task, files)).reward == 0.0


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("true", "reward-missing"),
        ("printf '' > /logs/verifier/reward.txt", "reward-malformed"),
        ("echo nan > /logs/verifier/reward.txt", "reward-malformed"),
        ('echo \'{"a": 1, "b": 1}\' > /logs/verifier/reward.json', "reward-malformed"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "reward-malformed"),
    ],
)
async def test_no_readable_number_is_no_verdict(grader, make, script, kind):
    verdict = await grader.grade_files(make(script), {})
    assert verdict.reward is None
    assert (verdict.failure.boundary, verdict.failure.kind) == ("verifier", kind)


async def test_json_comes_before_text_and_partial_rewards_are_asked_for(grader, make):
    script = (
        'echo 1 > /logs/verifier/reward.txt; echo \'{"reward": 0.25, "b": 1}\' > /logs/verifier/reward.json'
    )
    assert (await grader.grade_files(make(script), {})).reward == 0.0
    assert (await grader.grade_files(make(script, threshold=0.25), {})).reward == 1.0
    assert (await grader.grade_files(make(script, threshold=None), {})).reward == 0.25
    assert (await grader.grade_files(make(script, key="b"), {})).reward == 1.0


async def test_code_under_another_user_and_late_writers_do_not_reach_the_result(grader, make):
    script = """\
    setpriv --reuid 1000 --regid 1000 --clear-groups sh tool.sh
    (sleep 1; echo 1 > /logs/verifier/reward.txt) >/dev/null 2>&1 &
    ls /logs/verifier | grep -q . || echo 0 > /logs/verifier/reward.txt
    """
    forger = (
        b"echo 1 > /logs/verifier/reward.txt; mv /logs /logs2; echo 1 > /logs/.output\n"
        b"rm -rf /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; exit 0\n"
    )
    verdict = await grader.grade_files(make(script), {"tool.sh": forger})
    assert verdict.reward == 0.0
    assert "wrote 0" in verdict.evidence


async def test_a_script_that_does_not_end_fails_the_solution(grader, make):
    verdict = await grader.grade_files(make("sleep 60", timeout=1), {})
    assert verdict.reward == 0.0
    assert "timeout" in verdict.evidence


async def test_faults_of_the_task_are_typed(grader, make, blobs):
    task = make(SCRIPT)
    for change, kind in (
        ({"settings": {"tests": blobs.put(pack_files({"run.sh": b""}))}}, "settings"),
        ({"settings": {"script": "x"}}, "settings"),
        ({"settings": {"tests": "sha256:" + "0" * 64}}, "KeyError"),
        ({"kind": "nobody"}, "kind"),
    ):
        spec = task.verifier.model_copy(update=change)
        verdict = await grader.grade_files(task.model_copy(update={"verifier": spec}), {})
        assert verdict.reward is None
        assert verdict.failure.kind == kind


@pytest.mark.parametrize(
    ("name", "data", "value"),
    [
        ("txt", b" 0.5\n", 0.5),
        ("json", b'{"reward": 1}', 1.0),
        ("json", b'{"score": -2.5}', -2.5),
        ("json", b'{"score": 1, "reward": 0}', 0.0),
    ],
)
async def test_rewards_are_read_as_harbor_reads_them(name, data, value):
    assert parse_reward(name, data, "reward") == value


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("txt", b"yes"), ("txt", b"inf"), ("txt", b"\xff"), ("txt", b"1" * (MAX_RESULT + 1)),
        ("json", b""), ("json", b"1"), ("json", b"{}"), ("json", b'{"reward": true}'), ("json", b"[" * 9999),
        ("json", b'{"reward": "1"}'), ("json", b'{"reward": NaN}'),
        ("json", b'{"reward": 1' + b"0" * 400 + b"}"),
        ("json", b'{"reward": 1, "other": null}'),
    ],
)  # fmt: skip
async def test_malformed_rewards_are_refused(name, data):
    with pytest.raises(ValueError, match="reward"):
        parse_reward(name, data, "reward")
