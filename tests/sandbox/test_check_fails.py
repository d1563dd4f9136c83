"""The conformance suite catches broken backends: each defect below makes the checks that it concerns fail."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sandbox import check
from sandbox.base import ExecResult, NetworkPolicy, Outcome, SandboxError, SandboxSpec, Size
from sandbox.namespace import NamespaceProvider, NamespaceSandbox

Exec = Callable[..., Awaitable[ExecResult]]


class BrokenBox:
    """A real sandbox, but for what `changes` replaces; each gets the real sandbox first."""

    def __init__(self, box: NamespaceSandbox, changes: dict[str, Any]) -> None:
        self._box, self._changes = box, changes

    def __getattr__(self, name: str) -> Any:
        change = self._changes.get(name)
        if change is None:
            return getattr(self._box, name)
        return lambda *arguments, **keywords: change(self._box, *arguments, **keywords)

    async def __aenter__(self) -> BrokenBox:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._box.close()


class BrokenProvider:
    """A real provider, but for what is replaced in it (`provider_...`), its specs (`spec`) or its
    sandboxes."""

    def __init__(self, real: NamespaceProvider, changes: dict[str, Any]) -> None:
        self._real, self._changes = real, changes

    async def create(self, spec: SandboxSpec) -> Any:
        change = self._changes.get("spec")
        return BrokenBox(await self._real.create(change(spec) if change else spec), self._changes)

    def __getattr__(self, name: str) -> Any:
        change = self._changes.get(f"provider_{name}")
        if change is None:
            return getattr(self._real, name)
        return lambda *arguments, **keywords: change(self._real, *arguments, **keywords)


def result_as(change: Callable[[ExecResult], ExecResult]) -> Any:
    async def run(box: NamespaceSandbox, *arguments: Any, **keywords: Any) -> ExecResult:
        return change(await box.exec(*arguments, **keywords))

    return run


def silent_timeout(result: ExecResult) -> ExecResult:
    return result if result.outcome is not Outcome.TIMEOUT else dataclasses.replace(result, stdout=b"")


def exited(result: ExecResult) -> ExecResult:
    return dataclasses.replace(result, outcome=Outcome.EXITED, exit_code=result.exit_code or 0)


async def open_hearted(box: NamespaceSandbox, argv: Any, **keywords: Any) -> ExecResult:
    return await box.exec(argv, **{**keywords, "env": {**os.environ, **(keywords.get("env") or {})}})


def options_as(**options: Any) -> Any:
    async def run(box: NamespaceSandbox, argv: Any, **keywords: Any) -> ExecResult:
        return await box.exec(argv, **{**keywords, **options})

    return run


def by_code(result: ExecResult) -> ExecResult:
    """Tools that read 128+n as a signal and 124 as a timeout."""
    if result.exit_code is not None and result.exit_code > 128:
        return dataclasses.replace(result, outcome=Outcome.SIGNALED, signal=result.exit_code - 128)
    return dataclasses.replace(result, outcome=Outcome.TIMEOUT) if result.exit_code == 124 else result


async def raising(box: NamespaceSandbox, *arguments: Any, **keywords: Any) -> ExecResult:
    result = await box.exec(*arguments, **keywords)
    if result.exit_code:
        raise SandboxError(f"exit {result.exit_code}")
    return result


async def host_side_timeout(box: NamespaceSandbox, argv: Any, **keywords: Any) -> ExecResult:
    """`docker exec` under a timeout on the host: the command inside lives on."""
    limit = keywords.pop("timeout", 60)
    task = asyncio.create_task(box.exec(argv, timeout=None, **keywords))
    done, _ = await asyncio.wait([task], timeout=limit)
    if done:
        return task.result()
    return ExecResult(Outcome.TIMEOUT, None, b"before\n", b"", 7, 0, limit)


async def uncancellable(box: NamespaceSandbox, *arguments: Any, **keywords: Any) -> ExecResult:
    return await asyncio.shield(asyncio.ensure_future(box.exec(*arguments, **keywords)))


async def on_a_terminal(box: NamespaceSandbox, argv: Any, **keywords: Any) -> ExecResult:
    """Everything through a pseudo-terminal."""
    allowed = {name: value for name, value in keywords.items() if name in ("cwd", "env", "user")}
    process = await box.spawn(argv, pty=Size(), **allowed)
    await process.write(keywords.get("stdin") or b"")
    await process.close_stdin()
    out = b"".join([chunk.data async for chunk in process])
    return dataclasses.replace(await process.wait(), stdout=out, stdout_total=len(out))


async def forgetful(
    box: NamespaceSandbox, argv: Any, *, key: str | None = None, **keywords: Any
) -> ExecResult:
    return await box.exec(argv, **keywords)


def trusting() -> Any:
    """Keys without a look at the command."""
    done: dict[str, ExecResult] = {}

    async def run(box: NamespaceSandbox, argv: Any, *, key: str | None = None, **keywords: Any) -> ExecResult:
        if key is not None and key in done:
            return dataclasses.replace(done[key], replayed=True)
        result = await box.exec(argv, **keywords)
        if key is not None:
            done[key] = result
        return result

    return run


async def leaking(box: NamespaceSandbox, *arguments: Any, **keywords: Any) -> ExecResult:
    os.dup(0)
    return await box.exec(*arguments, **keywords)


async def short_write(box: NamespaceSandbox, path: str, data: Any, **keywords: Any) -> None:
    await box.write(path, data[:65_536] if isinstance(data, bytes) else data, **keywords)


async def short_read(box: NamespaceSandbox, path: str, **keywords: Any) -> bytes:
    return (await box.read(path, **keywords))[: 1 << 20]


async def plain_tar(box: NamespaceSandbox, path: str, tar: Any) -> None:
    """Unpacks with tar's own ideas of where names may lead."""
    await box.exec(["mkdir", "-p", path])
    await box.exec(["tar", "-xPf", "-", "-C", path], stdin=tar, user="root")


async def same_snapshot(box: NamespaceSandbox) -> str:
    return box.spec.image


async def not_a_fork(box: NamespaceSandbox, n: int = 1) -> list[NamespaceSandbox]:
    return [box] * n


async def accepting(box: NamespaceSandbox, policy: NetworkPolicy) -> None:
    """Says yes, and does nothing."""


async def substring_list(real: NamespaceProvider, owner: str) -> Any:
    every = {box.spec.owner for box in real._live.values()}
    return [info for each in every if owner in each for info in await real.list(each)]


async def greedy_reap(real: NamespaceProvider, owner: str) -> int:
    boxes = list(real._live.values())
    for box in boxes:
        await real.kill(box.id)
    return len(boxes)


def spec_as(**changes: Any) -> Any:
    return lambda spec: dataclasses.replace(spec, **changes)


async def never_closing(box: NamespaceSandbox) -> None:
    """`close` that forgets."""


DEFECTS: dict[str, tuple[dict[str, Any], str]] = {
    "the tail of output is lost": (
        {"exec": result_as(lambda r: dataclasses.replace(r, stdout=r.stdout[: len(r.stdout) & ~7]))},
        "short_output_is_never_lost output_is_not_translated",
    ),
    "streams are merged": (
        {"exec": result_as(lambda r: dataclasses.replace(r, stdout=r.stdout + r.stderr, stderr=b""))},
        "exit_code_is_data short_output_is_never_lost",
    ),
    "codes are guessed": ({"exec": result_as(by_code)}, "every_exit_code_is_itself"),
    "a failure raises": ({"exec": raising}, "exit_code_is_data pauses_are_not_the_end"),
    "the host kills only its own end": ({"exec": host_side_timeout}, "timeout_kills_the_tree"),
    "output before a timeout is lost": (
        {"exec": result_as(silent_timeout)},
        "timeout_kills_the_tree partial_output_of_megabytes",
    ),
    "cancelling does not kill": ({"exec": uncancellable}, "cancelling_kills"),
    "everything has a terminal": (
        {"exec": on_a_terminal}, "no_terminal_unless_asked output_is_not_translated exit_code_is_data"
    ),
    "no command ends for what it is": (
        {"exec": result_as(exited)},
        "signal_is_typed memory_is_limited disk_is_limited processes_are_limited",
    ),
    "keys are ignored": ({"exec": forgetful}, "a_key_runs_once at_once_a_key_runs_once"),
    "keys are trusted": ({"exec": trusting()}, "a_key_names_one_command"),
    "descriptors leak": ({"exec": leaking}, "descriptors_do_not_leak"),
    "the host's environment comes along": (
        {"exec": open_hearted},
        "host_environment_is_invisible",
    ),
    "everybody is root": ({"exec": options_as(user="root")}, "users_have_their_ids no_capabilities"),
    "harm is nobody's": (
        {"exec": result_as(lambda r: dataclasses.replace(r, repercussion=None))},
        "deleting_the_work_folder filling_the_disk leaving_a_fork_bomb",
    ),
    "writes are short": ({"write": short_write}, "every_size_arrives_whole bytes_come_back"),
    "reads are short": ({"read": short_read}, "every_size_arrives_whole bytes_come_back"),
    "tar unpacks where it likes": ({"put_tree": plain_tar}, "upload_cannot_leave a_cut_tar_is_an_error"),
    "snapshots are empty": ({"snapshot": same_snapshot}, "snapshot_is_a_new_image"),
    "forks are one": ({"fork": not_a_fork}, "a_fork_is_its_own"),
    "policies are ignored": ({"set_network": accepting}, "set_network_does_or_refuses"),
    "the network is open": (
        {"spec": spec_as(network="host")}, "no_network sandboxes_do_not_reach_each_other"
    ),
    "limits are ignored": (
        {"spec": spec_as(memory_mb=1500, pids=1000, disk_mb=1000)},
        "memory_is_limited memory_is_not_swapped processes_are_limited disk_is_limited"
        " disk_limit_spans_all_folders impossible_limits_are_refused",
    ),
    "rights are kept": (
        {"spec": spec_as(nested=True), "exec": options_as(user="root")},
        "no_mounts_or_namespaces",
    ),
    "owners are substrings": ({"provider_list": substring_list}, "owners_are_compared_exactly"),
    "reap takes everything": (
        {"provider_reap": greedy_reap}, "reap_spares_the_living owners_are_compared_exactly"
    ),
    "close forgets": ({"close": never_closing}, "close_is_idempotent"),
}  # fmt: skip


SLOW = (
    "cancelling does not kill", "limits are ignored", "output before a timeout is lost", "harm is nobody's",
    "the network is open", "reads are short", "writes are short", "codes are guessed", "descriptors leak",
    "rights are kept", "the tail of output is lost", "keys are ignored",
)  # fmt: skip


@pytest.mark.parametrize(
    "defect", [pytest.param(name, marks=pytest.mark.services if name in SLOW else ()) for name in DEFECTS]
)
async def test_a_defect_is_caught(provider: NamespaceProvider, defect: str) -> None:
    changes, names = DEFECTS[defect]
    broken: Any = BrokenProvider(provider, changes)
    results = await check.run(broken, provider.images.host_base(), names.split())
    assert [result.name for result in results if result.status != "failed"] == []
