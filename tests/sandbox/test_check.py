"""The conformance suite that we ship, against the namespace backend of this host."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from sandbox import check
from sandbox.namespace import NamespaceProvider

QUICK = (
    "exit_code_is_data", "signal_is_typed", "list_is_argv", "stdin_environment_and_folder",
    "users_have_their_ids", "silent_background_process", "timeout_kills_the_tree",
    "timeout_spares_the_neighbours", "cancelling_kills", "no_zombies", "spawned_process_converses",
    "closed_streams_still_have_a_status", "every_exit_code_is_itself", "output_is_not_translated",
    "both_streams_of_a_process", "memory_is_limited", "processes_are_limited", "disk_is_limited",
    "impossible_limits_are_refused", "bytes_come_back", "file_errors_are_typed", "trees_travel",
    "upload_cannot_leave", "upload_through_a_planted_link", "snapshot_is_a_new_image",
    "links_lead_nowhere_on_the_host", "a_fork_is_its_own", "host_environment_is_invisible",
    "host_files_are_invisible", "host_processes_are_invisible", "init_cannot_be_inspected",
    "no_capabilities", "no_mounts_or_namespaces", "dangerous_calls_are_refused", "neighbours_are_invisible",
    "no_network", "set_network_does_or_refuses", "close_is_idempotent", "listed_while_alive",
    "reap_spares_the_living", "owners_are_compared_exactly", "another_client_attaches",
    "a_failed_creation_leaves_nothing", "capabilities_are_honest", "a_key_runs_once",
    "a_key_names_one_command", "the_log_is_ordered_and_complete", "a_tag_is_attached_again",
    "a_terminal_interrupts", "deleting_the_work_folder", "filling_the_disk", "killing_the_first_process",
)  # fmt: skip
"""These run with every `make test`, the others with `make test-services`: all of them take a minute or
two."""


def parameters() -> list[ParameterSet]:
    """Every check, by its name."""
    names = [each.title() for each in check.checks()]
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.services) for name in names]


@pytest.mark.parametrize("name", parameters())
async def test_conformance(provider: NamespaceProvider, name: str) -> None:
    (result,) = await check.run(provider, provider.images.host_base(), [name])
    assert result.status != "failed", result.detail


async def test_a_broken_backend_fails(provider: NamespaceProvider) -> None:
    async def wrong(bench: check.Bench) -> None:
        """Never true."""
        async with bench.box() as box:
            assert (await box.exec("false")).ok, "false is not ok"

    bench = check.Bench(provider, provider.images.host_base())
    result = await check.run_one(check.Check(wrong), bench)
    assert result.status == "failed"
    assert "false is not ok" in result.detail


async def test_unknown_names_are_refused(provider: NamespaceProvider) -> None:
    with pytest.raises(ValueError, match="unknown check 'nonsense'"):
        await check.run(provider, "", ["nonsense"])
    names = [each.title() for each in check.checks()]
    assert len(names) == len(set(names)) >= 110
    assert set(QUICK) <= set(names)
