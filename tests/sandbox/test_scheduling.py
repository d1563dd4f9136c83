"""Idle groups as the host sees them, memory nodes of other machines, and what engines are asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox.base import SandboxSpec
from sandbox.namespace import NamespaceProvider
from sandbox.node import cgroups, scheduling


async def test_a_batch_sandbox_is_an_idle_group(provider: NamespaceProvider) -> None:
    provider.capabilities()
    parent = provider._groups["cpu"]
    if parent is None:
        assert "cpu" in provider._groups["reasons"]
        return
    image = provider.images.host_base()
    before = set(os.listdir(parent))
    async with await provider.create(SandboxSpec(image=image, scheduling="batch")) as box:
        (folder,) = (Path(parent, name) for name in os.listdir(parent) if name.endswith(box.id))
        weights = [folder / name for name in ("cpu.idle", "cpu.weight", "cpu.shares")]
        assert next(each for each in weights if each.exists()).read_text().strip() in ("1", "2")
        process = await box.spawn(["cat"])
        await process.write(b"on\n")
        assert await process.readline() == b"on\n"
        assert len((folder / "cgroup.procs").read_text().split()) >= 3, "the command is elsewhere"
    assert set(os.listdir(parent)) <= before, "an idle group was left behind"


@pytest.mark.parametrize(
    ("files", "written"),
    [
        ({"cpu.idle": "0", "cpu.shares": "1024"}, {"cpu.idle": "1", "cpu.shares": "1024"}),
        ({"cpu.shares": "1024"}, {"cpu.shares": "2"}),
        ({"cpu.weight": "100"}, {"cpu.weight": "1"}),
    ],
)
def test_the_lowest_weight_that_a_kernel_knows(
    tmp_path: Path, files: dict[str, str], written: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    cgroups._idle(str(tmp_path))
    assert {name: (tmp_path / name).read_text() for name in files} == written


def test_sandboxes_are_spread_over_nodes_by_their_size(tmp_path: Path) -> None:
    for node, processors in (("node0", "0-3,8"), ("node1", "4-5"), ("node2", "\n"), ("power", "1")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(processors)
    nodes = scheduling.Nodes(str(tmp_path))
    assert nodes.processors == {0: {0, 1, 2, 3, 8}, 1: {4, 5}}
    placed = [nodes.place() for _ in range(7)]
    assert (placed.count(0), placed.count(1)) == (5, 2)
    nodes.leave(1)
    assert nodes.place() == 1


def test_one_node_is_no_choice(tmp_path: Path) -> None:
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0/cpulist").write_text("0-1")
    for folder in (tmp_path, tmp_path / "none"):
        nodes = scheduling.Nodes(str(folder))
        assert nodes.place() is None
        nodes.leave(None)


def test_numbers() -> None:
    assert scheduling.numbers("0-2,7,9-9\n") == {0, 1, 2, 7, 9}
    assert scheduling.numbers("\n") == set()
