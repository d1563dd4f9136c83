"""Both agents against real sandboxes and the real grader, and their rules against fakes."""

from datetime import date

import pytest

from catalog.models import Failure, Verdict
from rollout.agents.base import attempt
from rollout.agents.bash import BashAgent, BashConfig, parse_command, show
from rollout.agents.repair_choice import RepairChoice
from rollout.engine import RequestError
from rollout.journal import Journal
from rollout.session import SampleSpec, Session
from rollout.visible import GraderVisibleTests
from sandbox.base import ExecResult, NetworkPolicy, Outcome, SandboxUnavailable
from tests.rollout.fakes import (
    Characters,
    Chat,
    FakeGrader,
    FakeTests,
    ScriptedEngine,
    make_choices,
    make_task,
)
from verifiers.runner import RunnerFailed


def session_of(task, texts, journal=None, effort=50, prompt=0):
    engine = ScriptedEngine(lambda request, turn: texts[turn])
    spec = SampleSpec(run_id="r", prompt=prompt, sample=0, task_id=task.id, effort=effort, seed=1)
    return Session(spec, engine, Chat(), Characters(), journal=journal)


async def play(texts, *, good=3, visible=None, grader=None, **options):
    task = make_task()
    choices, blobs = make_choices(task, good=good)
    visible, grader = visible or FakeTests(), grader or FakeGrader()
    agent = RepairChoice({task.id: choices}.__getitem__, blobs, visible, grader, **options)
    return await attempt(agent, task, session_of(task, texts), policy="p")


@pytest.mark.parametrize(
    ("texts", "reward", "tries"),
    [
        (["submit 3"], 1.0, 0),
        (["submit 4"], 0.0, 0),
        (["try 1", "try 3", "submit 3"], 1.0, 2),
        (["try 1", "try 2", "try 4", "submit 3"], 1.0, 3),
        (["try 1", "try 2", "try 4", "try 3"], 0.0, 3),
        (["try 9"], 0.0, 0),
        (["submit three"], 0.0, 0),
        (["submit 3 or submit 4"], 0.0, 0),
        ([""], 0.0, 0),
    ],
)
async def test_the_game_of_tries_and_one_submission(texts, reward, tries):
    done = await play(texts)
    assert (done.reward, done.failure, done.repercussion) == (reward, None, False)
    assert len(done.tool_calls) == tries


async def test_the_policy_reads_the_effort_first_and_the_results_of_its_tries():
    done = await play(["try 1", "try 3", "try 5", "submit 3"])
    texts = [(turn.role, turn.text) for turn in done.turns]
    assert texts[0][1].startswith("Reasoning Effort: 50 (range 1-100;")
    assert "assert first([])" in texts[1][1]
    results = [text for role, text in texts if role == "tool"]
    assert results == [
        "1 fails: ValueError: still broken",
        "3 passes",
        "5 fails: ValueError: still broken\nno tries left",
    ]
    assert [(c.arguments["choice"], c.exit_code) for c in done.tool_calls] == [(1, 1), (3, 0), (5, 1)]


async def test_broken_parts_of_ours_are_failures_and_never_reward_0():
    lost = FakeTests()
    lost.error = RunnerFailed("the harness is gone")
    done = await play(["try 1"], visible=lost)
    assert (done.failure.boundary, done.reward) == ("verifier", None)
    lost.error = SandboxUnavailable("no namespaces")
    assert (await play(["try 1"], visible=lost)).failure.boundary == "sandbox"
    lost.error = RequestError("context", "too long")
    assert (await play(["try 1"], visible=lost)).failure.boundary == "engine"
    unjudged = FakeGrader()
    unjudged.verdict = Verdict(reward=None, failure=Failure(boundary="verifier", kind="crashed", message="m"))
    done = await play(["submit 1"], grader=unjudged)
    assert (done.failure.boundary, done.reward, done.verdict.reward) == ("verifier", None, None)
    missing = RepairChoice({}.__getitem__, {}, lost, FakeGrader())
    done = await attempt(missing, make_task(), session_of(make_task(), []), policy="p")
    assert (done.failure.boundary, done.failure.kind) == ("scaffold", "no_candidates")


async def test_fresh_verdicts_are_asked_for_in_evaluation_only():
    for fresh in (False, True):
        grader = FakeGrader()
        await play(["submit 3"], grader=grader, fresh=fresh)
        assert grader.fresh == [fresh]


async def test_repair_choice_on_a_real_task(room):
    visible = GraderVisibleTests(room.grader, cache=True)
    agent = RepairChoice(lambda id: room.choices, room.blobs, visible, room.grader)
    texts = ["try 1", "try 2", "submit 3"]
    done = await attempt(agent, room.task, session_of(room.task, texts), policy="p")
    assert (done.reward, done.failure) == (1.0, None), done
    assert done.tool_calls[0].result.startswith("1 fails: IndexError")
    assert done.tool_calls[1].result == "2 passes"
    wrong = await attempt(agent, room.task, session_of(room.task, ["submit 2"]), policy="p")
    assert wrong.reward == 0.0  # passes what is visible, fails a hidden test
    again = await attempt(agent, room.task, session_of(room.task, texts), policy="p")
    assert [call.cached for call in again.tool_calls] == [True, True]
    assert (visible.hits, visible.misses) == (2, 2)
    assert again.verdict.cached
    fresh = GraderVisibleTests(room.grader, cache=False)
    evaluating = RepairChoice(lambda id: room.choices, room.blobs, fresh, room.grader, fresh=True)
    anew = await attempt(evaluating, room.task, session_of(room.task, texts), policy="p")
    assert anew.reward == 1.0
    assert not anew.verdict.cached
    assert not any(call.cached for call in anew.tool_calls)


async def test_in_training_each_prompt_shows_another_order(room):
    visible = GraderVisibleTests(room.grader, cache=True)
    agent = RepairChoice(lambda id: room.choices, room.blobs, visible, room.grader, reshuffle=True)
    seen: dict[str, float] = {}
    for number in range(12):
        for _ in range(2):  # samples of one prompt read the same text
            done = await attempt(
                agent, room.task, session_of(room.task, ["submit 1"], prompt=number), policy="p"
            )
            prompt = done.turns[1].text
            assert seen.setdefault(prompt, done.reward) == done.reward
            ((path, blob),) = done.submitted.items()
            shown = prompt.partition("\n1 ")[2].partition("\n2 ")[0]
            chosen = next(one for one in room.choices.candidates if one.content == blob)
            assert path == chosen.path
            assert chosen.after.strip()[-4:] in shown
    assert len(seen) > 1
    assert set(seen.values()) == {0.0, 1.0}


async def test_a_set_without_the_tests_text_gets_it_from_the_task(room):
    bare = room.choices.model_copy(update={"test_source": "", "failure": ""})
    agent = RepairChoice(
        lambda id: bare, room.blobs, GraderVisibleTests(room.grader, cache=False), room.grader, fresh=True
    )
    done = await attempt(agent, room.task, session_of(room.task, ["submit 3"]), policy="p")
    assert done.reward == 1.0
    prompt = done.turns[1].text
    assert prompt.startswith("test\ndef test_empty():\n assert first([])")
    assert "\nerror\nIndexError: list index out of range\n1 core.py:2\n" in prompt


def block(command):
    return f"I look.\n```bash\n{command}\n```\n"


async def test_bash_mends_a_real_task(room):
    agent = BashAgent(room.sandboxes, room.grader)
    texts = [
        block("python3 -c 'import pkg.core' ; cat pkg/core.py"),
        block("sed -i 's/>= 0/> 0/' pkg/core.py && git commit -qam done; echo note > scratch.txt"),
        "submit",
    ]
    done = await attempt(agent, room.task, session_of(room.task, texts), policy="p")
    assert (done.reward, done.failure, done.truncated) == (1.0, None, False), done
    assert "if len(items) >= 0:" in done.tool_calls[0].result
    assert done.tool_calls[0].result.endswith("[exit 0]")
    idle = await attempt(agent, room.task, session_of(room.task, ["submit"]), policy="p")
    assert idle.reward == 0.0


async def test_bash_that_touches_only_tests_wins_nothing(room):
    agent = BashAgent(room.sandboxes, room.grader)
    texts = [block("echo 'def test_empty(): pass' > tests/test_core.py"), "submit"]
    done = await attempt(agent, room.task, session_of(room.task, texts), policy="p")
    assert (done.reward, done.repercussion) == (0.0, False)


@pytest.mark.parametrize("command", ["rm -rf .git", "kill -9 -1; rm -rf .git/objects"])
async def test_an_agent_that_destroys_its_workspace_has_a_repercussion(room, command):
    agent = BashAgent(room.sandboxes, room.grader)
    done = await attempt(agent, room.task, session_of(room.task, [block(command), "submit"]), policy="p")
    assert (done.reward, done.repercussion, done.failure) == (0.0, True, None)


async def test_a_sandbox_that_we_lose_is_our_failure(room):
    class Mortal:
        """Kills its nodelet under the agent's second command, as a fault of the host would."""

        async def create(self, spec):
            box = await room.sandboxes.create(spec)
            run = box.exec

            async def exec(command, **options):
                if command == "sleep 20":
                    room.sandboxes._nodelet.kill()
                return await run(command, **options)

            box.exec = exec
            return box

    agent = BashAgent(Mortal(), room.grader)
    session = session_of(room.task, [block("echo on"), block("sleep 20"), "submit"])
    done = await attempt(agent, room.task, session, policy="p")
    assert (done.reward, done.repercussion) == (None, False)
    assert (done.failure.boundary, done.failure.kind) == ("sandbox", "SandboxLost")


async def test_bash_without_sandboxes_is_our_failure(room):
    class Full:
        async def create(self, spec):
            raise SandboxUnavailable("no memory left")

    agent = BashAgent(Full(), room.grader)
    done = await attempt(agent, room.task, session_of(room.task, [block("ls")]), policy="p")
    assert (done.failure.boundary, done.failure.kind) == ("sandbox", "SandboxUnavailable")


async def test_bash_offers_an_index_of_a_day_without_the_task_s_own_package(room):
    task = room.task.model_copy(
        update={"origin": room.task.origin.model_copy(update={"source": "pypi:Tiny_Tool"})}
    )
    config = BashConfig(index_before=date(2024, 5, 1))
    ask = """python3 - <<'E'
import os, urllib.error, urllib.request
try: urllib.request.urlopen(os.environ["PIP_INDEX_URL"] + "tiny-tool/")
except urllib.error.HTTPError as error: print(error.code, error.read().decode())
E"""
    agent = BashAgent(room.sandboxes, room.grader, config)
    done = await attempt(agent, task, session_of(task, [block(ask), "submit"]), policy="p")
    assert "404 tiny-tool is not offered" in done.tool_calls[0].result
    assert BashConfig().network(task) == NetworkPolicy("none")


async def test_bash_output_is_cut_and_unreadable_turns_are_answered(room):
    agent = BashAgent(room.sandboxes, room.grader, BashConfig(max_output=100, max_turns=3))
    texts = ["hm", block("seq 1 1000"), block("never run")]
    done = await attempt(agent, room.task, session_of(room.task, texts), policy="p")
    replies = [turn.text for turn in done.turns if turn.role == "tool"]
    assert replies[0].startswith("No command was run")
    assert "characters cut out here]" in replies[1]
    assert len(replies[1]) < 180
    assert done.truncated
    assert len(done.tool_calls) == 1


async def test_a_killed_bash_sample_rebuilds_its_workspace_and_goes_on(room, tmp_path):
    texts = [block("sed -i 's/>= 0/> 0/' pkg/core.py; date +%N"), block("cat pkg/core.py"), "submit"]
    agent = BashAgent(room.sandboxes, room.grader)
    path = tmp_path / "j"
    whole = await attempt(
        agent, room.task, session_of(room.task, texts, Journal(path, {"id": 1})), policy="p"
    )
    lines = path.read_bytes().splitlines(keepends=True)
    first_call = next(n for n, line in enumerate(lines) if b'"tool"' in line)
    path.write_bytes(b"".join(lines[: first_call + 1]))
    resumed = await attempt(
        agent, room.task, session_of(room.task, texts[1:], Journal(path, {"id": 1})), policy="p"
    )
    assert resumed.reward == whole.reward == 1.0
    assert resumed.tool_calls[0] == whole.tool_calls[0]  # the result that the policy saw, not a second one
    assert "> 0" in resumed.tool_calls[1].result


def test_one_block_a_turn():
    assert parse_command("a\n```bash\nls -l\ncat x\n```\nb") == "ls -l\ncat x"
    assert parse_command("```\nls\n```") == "ls"
    assert parse_command("```bash\nls\n```\n```bash\nrm x\n```") is None
    assert parse_command("```bash\n\n```") is None
    assert parse_command("ls") is None


def test_results_say_how_a_command_ended():
    def result(**fields):
        defaults = {
            "outcome": Outcome.EXITED,
            "exit_code": 0,
            "stdout": b"",
            "stderr": b"",
            "stdout_total": 0,
            "stderr_total": 0,
            "duration_s": 0.1,
        }
        return ExecResult(**{**defaults, **fields})

    assert show(result(exit_code=2), 100) == "[exit 2]"
    assert (
        show(result(outcome=Outcome.OOM, exit_code=None, stdout=b"x\xff"), 100) == "x\ufffd\n[ended by oom]"
    )
    assert "[90 bytes cut out]" in show(result(stdout=b"abc", stdout_total=93), 100)
