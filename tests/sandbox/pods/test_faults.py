"""What clusters do to pods and connections: typed, resumed, or survived."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox.base import Outcome, Repercussion, SandboxError, SandboxLost, SandboxSpec, SandboxUnavailable
from sandbox.kubernetes import (
    DeadlineExceeded,
    ImagePullFailed,
    KubernetesProvider,
    NodeLost,
    PodEvicted,
    PodOutOfMemory,
    PodRefused,
    PodStartFailed,
    Unschedulable,
)
from tests.sandbox.fake_kubernetes import FakeCluster, Faults, settings

pytestmark = pytest.mark.services


def set_faults(**values: Any) -> Callable[[Faults], None]:
    def apply(faults: Faults) -> None:
        for name, value in values.items():
            setattr(faults, name, value)

    return apply


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        (set_faults(missing_images={"sandbox"}), ImagePullFailed, "ImagePullBackOff.*not found"),
        (set_faults(deny_pods="no pods today"), PodRefused, "no pods today"),
        (set_faults(start_error='exec: "python3": executable file not found'), PodStartFailed, "python3"),
        (set_faults(runtimes=set()), PodRefused, "RuntimeClass"),
    ],
)
async def test_a_pod_that_cannot_be_is_a_typed_error_and_leaves_nothing(
    cluster: FakeCluster,
    store: Path,
    spec: SandboxSpec,
    fault: Callable[[Faults], None],
    error: type[SandboxError],
    text: str,
) -> None:
    async with KubernetesProvider(store, **settings(cluster, runtime_class="gvisor")) as kube:
        await kube.open()
        fault(cluster.faults)
        with pytest.raises(error, match=text):
            await kube.create(spec)
    assert cluster.pods() == []


async def test_a_full_cluster_refuses_and_later_admits(
    cluster: FakeCluster, kube: KubernetesProvider, spec: SandboxSpec
) -> None:
    cluster.node.memory = 300 << 20
    async with await kube.create(spec):
        with pytest.raises(Unschedulable, match="Insufficient memory") as caught:
            await kube.create(spec)
        assert caught.value.retry_after_s > 0
    async with await kube.create(spec) as box:
        assert (await box.exec("echo on")).ok


@pytest.mark.parametrize(
    ("reason", "message", "error", "outcome", "repercussion"),
    [
        ("Evicted", "The node was low on resource: memory.", PodEvicted, Outcome.LOST, None),
        ("Evicted", "Pod ephemeral local storage usage exceeds the total limit of containers 64Mi.",
         PodEvicted, Outcome.LOST, Repercussion.DISK),
        ("OOMKilled", "", PodOutOfMemory, Outcome.OOM, Repercussion.INIT),
        ("NodeShutdown", "Pod was terminated: imminent node shutdown.", NodeLost, Outcome.LOST, None),
    ],
)  # fmt: skip
async def test_the_end_of_a_pod_ends_its_commands_with_the_reason(
    cluster: FakeCluster,
    kube: KubernetesProvider,
    spec: SandboxSpec,
    reason: str,
    message: str,
    error: type[SandboxLost],
    outcome: Outcome,
    repercussion: Repercussion | None,
) -> None:
    async with await kube.create(spec) as box:
        running = asyncio.create_task(box.exec("echo begun; sleep 100"))
        await asyncio.sleep(0.3)
        await cluster.node.end(cluster.pods()[0], reason, message)
        async with asyncio.timeout(5):
            result = await running
        assert (result.outcome, result.repercussion, result.stdout) == (outcome, repercussion, b"begun\n")
        with pytest.raises(error):
            await box.exec("true")
        assert not await box.alive()
        assert await kube.list("default") == []


async def test_a_deadline_ends_the_pod(cluster: FakeCluster, store: Path, spec: SandboxSpec) -> None:
    async with (
        KubernetesProvider(store, **settings(cluster, life_s=2)) as kube,
        await kube.create(spec) as box,
    ):
        result = await box.exec("sleep 100")
        assert result.outcome is Outcome.LOST
        with pytest.raises(DeadlineExceeded, match="life_s"):
            await box.exec("true")


async def test_a_pod_deleted_by_someone_else_is_lost(
    cluster: FakeCluster, kube: KubernetesProvider, spec: SandboxSpec
) -> None:
    async with await kube.create(spec) as box:
        await cluster.node.remove(cluster.pods()[0], 0)
        with pytest.raises(SandboxLost, match=r"someone else|is gone"):
            await box.exec("true")


OUTPUT = "for i in $(seq 1 40000); do echo line $i; done; echo end >&2"
LINES = "".join(f"line {i}\n" for i in range(1, 40001)).encode()


@pytest.mark.parametrize(
    "fault",
    [
        set_faults(cut_output=[50_000, 0, 21, 333_333]),
        set_faults(lose_output=[100_000, 3_000]),
        set_faults(frame_bytes=1),
        set_faults(cut_output=[100_000, 100_000], refuse_execs=2, no_status=3),
        set_faults(only_v4=True, cut_output=[70_000]),
        set_faults(slow_close_s=0.5, reply_late_s=0.05, cut_output=[70_000]),
    ],
    ids=["cuts", "lost-messages", "single-bytes", "refused", "v4", "slow"],
)
async def test_a_command_survives_its_connection_runs_once_and_loses_no_byte(
    cluster: FakeCluster, kube: KubernetesProvider, spec: SandboxSpec, fault: Callable[[Faults], None]
) -> None:
    fault(cluster.faults)
    script = f"echo ran >> runs; {OUTPUT}; exit 9" if not cluster.faults.frame_bytes else "seq 3000; exit 9"
    async with await kube.create(spec) as box:
        result = await box.exec(script)
        wanted = (
            LINES if not cluster.faults.frame_bytes else "".join(f"{i}\n" for i in range(1, 3001)).encode()
        )
        assert (result.exit_code, result.stdout == wanted) == (9, True), (result.outcome, result.stdout_total)
        if not cluster.faults.frame_bytes:
            assert result.stderr == b"end\n"
            assert (await box.exec("cat runs")).stdout == b"ran\n"
    if cluster.faults.frame_bytes == 0:
        assert box.link.connections >= 2, "nothing was cut"


async def test_uploads_survive_cuts_byte_for_byte(
    cluster: FakeCluster, kube: KubernetesProvider, spec: SandboxSpec
) -> None:
    data = bytes(i * 7 % 256 for i in range(3_000_000))
    async with await kube.create(spec) as box:
        cluster.faults.cut_input = [100_000, 10, 1_000_000]
        cluster.cut_execs()
        await box.write("file", data)
        assert await box.read("file") == data
        sum = (await box.exec("sha256sum < file")).stdout.split()[0].decode()
        assert sum == hashlib.sha256(data).hexdigest()
        assert box.link.connections == 5


async def test_a_cut_while_a_spawned_process_converses(
    cluster: FakeCluster, kube: KubernetesProvider, spec: SandboxSpec
) -> None:
    async with await kube.create(spec) as box:
        process = await box.spawn(["cat"])
        for number in range(5):
            cluster.cut_execs()
            await process.write(f"word {number}\n".encode())
            assert await process.readline() == f"word {number}\n".encode()
        await process.close_stdin()
        assert (await process.wait()).exit_code == 0
        assert box.link.connections >= 5


async def test_no_connection_for_too_long_is_lost(
    cluster: FakeCluster, store: Path, spec: SandboxSpec
) -> None:
    async with (
        KubernetesProvider(store, **settings(cluster, reconnect_s=0.5)) as kube,
        await kube.create(spec) as box,
    ):
        running = asyncio.create_task(box.exec("sleep 100"))
        await asyncio.sleep(0.2)
        cluster.faults.refuse_execs = 1000
        cluster.cut_execs()
        assert (await running).outcome is Outcome.LOST
        with pytest.raises(SandboxLost, match="no connection"):
            await box.exec("true")


async def test_watches_are_taken_up_again(
    cluster: FakeCluster, kube: KubernetesProvider, spec: SandboxSpec
) -> None:
    cluster.faults.watch_lines = 2
    async with await kube.create(spec):
        assert kube.watch is not None
        assert kube.watch.lists == 1
        cluster.faults.watch_lines = None
        cluster.store.compact()
        cluster.drop_watches()
        async with await kube.create(spec) as box:
            assert (await box.exec("echo on")).ok
        assert kube.watch.lists == 2, "410 Gone is answered by a new list"
        assert kube.watch.watches >= 4


async def test_what_happened_during_a_gap_shows(
    cluster: FakeCluster, kube: KubernetesProvider, spec: SandboxSpec
) -> None:
    async with await kube.create(spec) as box:
        running = asyncio.create_task(box.exec("sleep 100"))
        await asyncio.sleep(0.2)
        pod = cluster.pods()[0]
        await cluster.node._stop(pod["metadata"]["uid"])
        cluster.store.delete("pods", pod)
        cluster.store.compact()
        cluster.drop_watches()
        async with asyncio.timeout(5):
            assert (await running).outcome is Outcome.LOST


async def test_busy_and_failing_servers_are_asked_again(
    cluster: FakeCluster, kube: KubernetesProvider, spec: SandboxSpec
) -> None:
    await kube.open()
    cluster.faults.refuse_requests = [(429, "0.1"), (503, ""), (500, "")]
    async with await kube.create(spec) as box:
        assert (await box.exec("echo on")).ok


async def test_a_server_that_never_answers_is_unavailable(
    cluster: FakeCluster, kube: KubernetesProvider, spec: SandboxSpec
) -> None:
    await kube.open()
    cluster.faults.refuse_requests = [(503, "")] * 100
    with pytest.raises(SandboxUnavailable, match="does not answer while creating pod"):
        await kube.create(spec)
    cluster.faults.refuse_requests = []


async def test_a_lost_answer_makes_no_second_pod(
    cluster: FakeCluster, kube: KubernetesProvider, spec: SandboxSpec
) -> None:
    await kube.open()
    cluster.faults.lose_answers = 2
    async with await kube.create(spec) as box:
        assert (await box.exec("echo on")).ok
        assert len(cluster.pods()) == 1


async def test_slow_nodes_are_waited_for_and_cancelling_cleans_up(
    cluster: FakeCluster, kube: KubernetesProvider, store: Path, spec: SandboxSpec
) -> None:
    cluster.faults.ready_s = 0.8
    async with await kube.create(spec):
        pass
    cluster.faults.ready_s = 60
    task = asyncio.create_task(kube.create(spec))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cluster.pods() == []
    async with KubernetesProvider(store, **settings(cluster, start_s=1.5)) as hasty:
        with pytest.raises(SandboxUnavailable, match=r"not ready after 1.5 s"):
            await hasty.create(spec)
    assert cluster.pods() == []
