"""The escape suite against the namespace backend, and against sandboxes that are open on purpose."""

from __future__ import annotations

import asyncio

import pytest

from sandbox import escapes
from sandbox.namespace import NamespaceProvider

NAMES = [attempt.name for attempt in escapes.attempts()]
QUICK = (
    "mount_file_systems", "join_namespaces_of_init", "roots_and_folders_of_processes",
    "inherited_descriptors", "devices_by_number", "environment_of_processes", "trace_init",
    "raise_capabilities", "kernel_settings", "abstract_sockets_of_the_host", "bait_by_its_path", "uploads",
    "downloads",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.services) for name in NAMES]
)
async def test_nothing_escapes(provider: NamespaceProvider, name: str) -> None:
    results = await escapes.run(provider, provider.images.host_base(), [name])
    assert [result for result in results if result.status != "contained"] == []


async def test_an_open_network_is_seen(provider: NamespaceProvider) -> None:
    names = ["ports_of_the_host", "abstract_sockets_of_the_host"]
    image = provider.images.host_base()
    results = await escapes.run(provider, image, names, spec={"network": "host"}, users=["agent"])
    assert [result.status for result in results] == ["escaped", "escaped"]


async def test_kept_rights_are_seen(provider: NamespaceProvider) -> None:
    names = ["mount_file_systems", "mount_by_new_calls", "mount_in_own_namespaces", "clone_into_namespaces",
             "raise_capabilities"]  # fmt: skip
    image = provider.images.host_base()
    results = await escapes.run(provider, image, names, spec={"nested": True}, users=["root"])
    assert [result.name for result in results if result.status != "escaped"] == []


async def test_even_nested_sandboxes_refuse_what_no_jail_needs(provider: NamespaceProvider) -> None:
    names = [
        "keys_of_the_host",
        "rings_and_faults",
        "programs_in_the_kernel",
        "kernel_modules",
        "foreign_families",
        "pivot_root",
        "unmount_what_hides",
        "clock_and_name",
        "other_processes_in_statistics",
    ]
    image = provider.images.host_base()
    results = await escapes.run(provider, image, names, spec={"nested": True}, users=["root"])
    assert [result for result in results if result.status != "contained"] == []


async def test_damage_is_seen() -> None:
    async with escapes.suite.arena() as bait:
        assert bait.damage() == ""
        (bait.folder / "planted").touch()
        assert "planted" in bait.damage()
        (bait.folder / "planted").unlink()
        (bait.folder / "secret").write_text("taken")
        assert "bait file" in bait.damage()
    async with escapes.suite.arena() as bait:
        process = await asyncio.create_subprocess_exec("kill", "-9", str(bait.pid))
        await process.wait()
        await asyncio.sleep(0.1)
        assert "bait process" in bait.damage()


async def test_a_program_that_breaks_is_no_evidence(
    provider: NamespaceProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = escapes.Attempt("broken", "raise SystemExit(1)")
    monkeypatch.setattr(escapes.suite, "attempts", lambda: [broken])
    results = await escapes.run(provider, provider.images.host_base(), users=["agent"])
    assert [result.status for result in results] == ["inconclusive"]
    with pytest.raises(ValueError, match="unknown attempt"):
        await escapes.run(provider, "", ["nonsense"])


def test_there_are_enough() -> None:
    assert len(NAMES) == len(set(NAMES)) >= 40
