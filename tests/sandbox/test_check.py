"""The conformance suite that we ship, against the namespace backend of this host."""

from __future__ import annotations

import pytest

from sandbox import check
from sandbox.namespace import NamespaceProvider


@pytest.mark.parametrize("name", [each.title() for each in check.checks()])
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
