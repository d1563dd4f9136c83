"""The verifier that runs a suite with its own runner: unittest, Django, node:test, jest, vitest, go, cargo,
and whatever writes JUnit XML or CTRF.

Settings: `SuiteSettings`; expected ids and statuses stand in the task's verifier, as for pytest, and
`observe` finds them on the solved workspace. The suite runs as the agent's user, without rights, in a fresh
sandbox: the task's protected files are laid over the change, belong to root and lie in sticky folders of
root's, and files that steer the runner are left out of the change.

Where a report travels, from safest to weakest (docs/verifiers.md says what each leaves open):
- node:test, jest, vitest: standard output of a parent process, each line under a mark that the processes of
  the tests never see;
- unittest, Django: a descriptor of the process that runs the tests, under a mark;
- go, cargo: standard output of a parent process that believes what the tests' process prints;
- JUnit XML and CTRF: standard output, or files that the tests could write too.
So the report must agree with itself and with the exit status. Where it does not, there is no verdict.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from catalog.models import Record, Task, Verdict
from sandbox.base import ExecResult, Outcome, Sandbox
from sandbox.trees import AGENT
from verifiers.grading import plain_files, protected_files
from verifiers.judging import Bench, Change, Unjudgeable, each, lay, settings_of
from verifiers.reports import cargo, ctrf, gotest, jest, junit, marked
from verifiers.reports.base import MAX_BYTES, Parser, Report, ReportError, collect
from verifiers.runner import RunOutcome, TestRun, check_path
from verifiers.verdicts import verdict

FOLDER = "/run/suite"
"""Where our reporters lie in the sandbox, root's."""
_DIED: dict[Outcome, RunOutcome] = {
    Outcome.TIMEOUT: "timeout", Outcome.OOM: "crashed", Outcome.PIDS: "crashed", Outcome.DISK: "crashed",
    Outcome.SIGNALED: "crashed",
}  # fmt: skip
STOP = """\
for round in 1 2 3 4 5; do
    found=
    for status in /proc/[0-9]*/status; do
        grep -q "^Uid:[[:space:]]*AGENT[[:space:]]" "$status" 2>/dev/null || continue
        pid=${status#/proc/}; kill -9 "${pid%/status}" 2>/dev/null; found=yes
    done
    [ -n "$found" ] || exit 0
done
""".replace("AGENT", f"{AGENT}")
"""Ends what the suite left running, so that nothing writes while its files are read."""

_PYTHON = ("python", "-s", "-B", f"{FOLDER}/unittest_main.py")
_PYTHON_STEERS = r"(site|user)customize\.py|[^/]*\.(pth|pyc)"
_REPORTER = f"{FOLDER}/node_reporter.mjs"
_JS = f"{FOLDER}/js_reporter.mjs"


@dataclass(frozen=True)
class Runner:
    """One kind of suite."""

    parse: Parser | None
    """None: lines of our own reporter."""
    command: tuple[str, ...] = ()
    """What runs it; the task's arguments follow."""
    script: str = ""
    """Our reporter."""
    steers: str = r"(?!)"
    """Names of files, with any folder before them, that decide what runs or what is reported: an agent's copy
    never applies."""
    quiet: bool = True
    """Whether nothing but our reporter writes into its channel."""


RUNNERS = {
    "node": Runner(
        None,
        ("node", "--test", f"--test-reporter={_REPORTER}", "--test-reporter-destination=stdout"),
        "node_reporter.mjs",
        r"node_modules/.*",
    ),
    "unittest": Runner(None, _PYTHON, "unittest_main.py", _PYTHON_STEERS),
    "django": Runner(None, (*_PYTHON, "--django"), "unittest_main.py", _PYTHON_STEERS),
    "jest": Runner(
        None,
        # the limit is there because with one jest never runs tests in the process that reports
        ("jest", "--ci", f"--reporters={_JS}", "--maxWorkers=2", "--workerIdleMemoryLimit=2GB"),
        "js_reporter.mjs",
        r"node_modules/.*|package\.json|jest\.config\.[^/]*|babel\.config\.[^/]*|\.babelrc[^/]*",
        quiet=False,
    ),
    "vitest": Runner(
        None,
        ("vitest", "run", f"--reporter={_JS}"),
        "js_reporter.mjs",
        r"node_modules/.*|(vitest|vite)\.(config|workspace)\.[^/]*",
        quiet=False,
    ),
    "go": Runner(gotest.parse, ("go", "test", "-json", "-count=1"), steers=r"[^/]*_test\.go|go\.work"),
    "cargo": Runner(
        cargo.parse,
        ("sh", "-c", 'exec cargo test --offline --no-fail-fast "$@" 2>&1', "sh"),
        steers=r"\.cargo/.*|rust-toolchain(\.toml)?|Cargo\.toml",
    ),
    "junit": Runner(
        junit.parse,
        steers=r"pom\.xml|\.mvn/.*|[^/]*\.gradle(\.kts)?|gradle\.properties|src/test/.*",
    ),
    "ctrf": Runner(ctrf.parse),
    "jest-json": Runner(jest.parse),
}
"""Name -> how it is run and read. Those without a command take it from the settings."""


class SuiteSettings(Record):
    """Settings of a `suite` verifier."""

    runner: Literal[
        "node", "unittest", "django", "jest", "vitest", "go", "cargo", "junit", "ctrf", "jest-json"
    ]
    command: tuple[str, ...] = ()
    """Instead of the runner's own command; the verifier's arguments follow it."""
    reports: tuple[str, ...] = ()
    """Files and folders of the workspace, removed before the run, that hold the report after it; empty: it
    comes on standard output. Of a folder every .xml (junit) or .json file counts, by name."""
    env: dict[str, str] = {}


@dataclass(frozen=True)
class Observed:
    """One run of a suite."""

    run: TestRun
    exit_code: int | None
    failing: bool
    """Whether a test or a file failed, which the runner's exit status must tell too."""
    doubts: tuple[str, ...]
    """Where the report contradicts itself."""
    dropped: tuple[str, ...]
    """Changed files that did not apply."""


async def judge(bench: Bench, task: Task, change: Change) -> Verdict:
    """Run the suite on the changed workspace and compare the complete set of expected ids.

    None where the report cannot be read or disagrees with itself or with the exit status. Raises Unjudgeable,
    SandboxError, LookupError.
    """
    spec = task.verifier
    seen = await observe(bench, task, change)
    try:
        result = verdict(spec.expected, spec.fail_to_pass, spec.pass_to_pass, seen.run)
    except ValueError as error:
        raise Unjudgeable("settings", f"{error}") from error
    doubts = list(seen.doubts)
    if seen.exit_code == 0 and seen.failing:
        doubts.append("the runner ended with exit status 0 and reported failures")
    elif seen.exit_code != 0 and not seen.failing and result.reward == 1.0:
        doubts.append(f"the runner ended with exit status {seen.exit_code} and reported no failure")
    if doubts:
        raise Unjudgeable("disagreement", f"the report is not to be believed: {'; '.join(doubts[:5])}")
    if seen.dropped:
        note = f" Put back or left out: {', '.join(seen.dropped)}."
        result = result.model_copy(update={"evidence": result.evidence + note})
    return result


async def observe(bench: Bench, task: Task, change: Change) -> Observed:
    """Run the suite once and return what it reported, without judging. Raises as `judge` does."""
    settings = settings_of(task, SuiteSettings)
    runner = RUNNERS[settings.runner]
    command = settings.command or runner.command
    if not command:
        raise Unjudgeable("settings", f"the runner {settings.runner} needs a command: add it to the settings")
    try:
        protected = protected_files(bench.blobs.get(task.verifier.protected))
        for name in settings.reports:
            check_path(name)
    except ValueError as error:
        raise Unjudgeable("settings", f"{error}") from error
    steers = re.compile(rf"(.*/)?({runner.steers})", re.DOTALL)
    dropped = tuple(sorted(name for name in change.files if name in protected or steers.fullmatch(name)))
    kept = {name: data for name, data in change.files.items() if name not in dropped}
    workdir, mark = task.environment.workdir, secrets.token_hex(16)
    async with bench.clean(task) as box:
        await lay(box, workdir, Change(kept, change.executable), protected)
        await _guard(box, workdir, list(protected))
        if settings.reports:
            await each(box, ["rm", "-rf", "--"], workdir, settings.reports)
        if runner.script:
            await _install(box, runner.script)
        result = await box.exec(
            [*command, *task.verifier.arguments],
            stdin=f"{mark}\n".encode() if runner.script else None,
            cwd=workdir,
            env=settings.env,
            timeout=task.verifier.timeout_s,
            max_output=MAX_BYTES + 1,
        )
        outcome = _outcome(result)
        documents = [] if outcome != "finished" else await _documents(box, workdir, settings, result)
    report = _read(runner, documents, mark, workdir)
    if outcome == "finished" and not report.finished:
        outcome = "crashed"
    run = TestRun(
        tests={one.id: one.status for one in report.results},
        messages={one.id: one.message for one in report.results if one.message},
        outcome=outcome,
        duration_s=result.duration_s,
        tampered=report.tampered,
        output=(result.stderr or result.stdout)[-2000:].decode(errors="replace"),
    )
    return Observed(run, result.exit_code, report.failing, report.doubts, dropped)


def _outcome(result: ExecResult) -> RunOutcome:
    """How the run ended. Raises Unjudgeable where that is our fault."""
    if result.outcome in _DIED:
        return _DIED[result.outcome]
    if result.repercussion is not None:
        return "crashed"
    if result.outcome is not Outcome.EXITED:
        raise Unjudgeable("runner", f"the suite's command ended as {result.outcome}")
    if result.exit_code in (126, 127):
        said = result.stderr[-300:].decode(errors="replace").strip()
        raise Unjudgeable("runner", f"the suite's command cannot be run: {said}")
    return "finished"


def _read(runner: Runner, documents: Sequence[bytes], mark: str, workdir: str) -> Report:
    """The report; one that was never written is one of a run that did not end."""
    written = [document for document in documents if document.strip()]
    if not written:
        return collect((), finished=False)
    try:
        if runner.parse is None:
            report = marked.parse(*written, mark=mark, quiet=runner.quiet)
        else:
            report = runner.parse(*written)
    except ReportError as error:
        raise Unjudgeable("report-malformed", f"{error}") from error
    return report.inside(workdir)


async def _documents(box: Sandbox, workdir: str, settings: SuiteSettings, result: ExecResult) -> list[bytes]:
    """What the run wrote. Raises Unjudgeable for too much, or for what is no file."""
    if not settings.reports:
        if result.stdout_total > len(result.stdout):
            raise Unjudgeable("report-malformed", f"the report has more than {MAX_BYTES >> 20} MiB")
        return [result.stdout]
    await box.exec(["/bin/sh", "-c", STOP], user="root", cwd="/")
    found: list[bytes] = []
    for name in settings.reports:
        try:
            found.append(await box.read(f"{workdir}/{name}", max_bytes=MAX_BYTES))
        except IsADirectoryError:
            found += await _folder(
                box, f"{workdir}/{name}", ".xml" if settings.runner == "junit" else ".json"
            )
        except FileNotFoundError:
            continue
        except (ValueError, OSError) as error:
            raise Unjudgeable("report-malformed", f"the report {name} cannot be read: {error}") from error
    return found


async def _folder(box: Sandbox, path: str, suffix: str) -> list[bytes]:
    try:
        tar = await box.get_tree(path, max_bytes=MAX_BYTES)
        files = plain_files(tar)
    except ValueError as error:
        raise Unjudgeable("report-malformed", f"the reports cannot be read: {error}") from error
    return [data for name, data in sorted(files.items()) if name.endswith(suffix)]


async def _guard(box: Sandbox, workdir: str, names: Sequence[str]) -> None:
    """Folders above these files become root's and sticky: tests may add files, and move none of root's."""
    folders = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    if folders:
        await each(box, ["chown", "-h", "0:0", "--"], workdir, folders)
        await each(box, ["chmod", "1777", "--"], workdir, folders)


async def _install(box: Sandbox, script: str) -> None:
    made = await box.exec(["mkdir", "-p", FOLDER], user="root", cwd="/")
    await box.write(f"{FOLDER}/{script}", marked.script(script))
    owned = await box.exec(["chown", "-R", "0:0", FOLDER], user="root", cwd="/")
    if not (made.ok and owned.ok):
        raise Unjudgeable("setup", f"our reporter could not be installed: {(made.text + owned.text)[-300:]}")


__all__ = ["RUNNERS", "Observed", "Runner", "SuiteSettings", "judge", "observe"]
