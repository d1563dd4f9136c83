"""Pods with an allow-list: their network is closed, and the proxy in our process is reached over the link."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from sandbox.base import NetworkPolicy, SandboxSpec
from sandbox.kubernetes import KubernetesProvider
from sandbox.network import proxy
from tests.sandbox.fake_kubernetes import FakeCluster
from tests.sandbox.network.test_namespace import FETCH, GOOD, HOLD, SQUAT
from tests.sandbox.network.test_proxy import World

pytestmark = pytest.mark.services


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """Stands for the internet, behind the proxy's resolver and dialler."""
    async with World() as made:
        monkeypatch.setattr(proxy, "addresses_of", made.resolve)
        monkeypatch.setattr(proxy, "connect", made.dial)
        yield made


async def test_the_proxy_is_the_only_way_out(
    cluster: FakeCluster, kube: KubernetesProvider, spec: SandboxSpec, world: World
) -> None:
    async with await kube.create(replace(spec, network=GOOD)) as box:
        (policy,) = [pod["metadata"]["labels"]["posttrain.dev/network"] for pod in cluster.pods()]
        assert policy == "none", "the pod itself reaches nothing"

        async def fetch(url: str) -> str:
            return (await box.exec(["python3", "-c", FETCH, url])).text.strip()

        assert await fetch("http://good.example/") == "hi"
        assert "may not reach evil.example:80" in await fetch("http://evil.example/")
        assert [attempt.target for attempt in box.attempts if attempt.reason is None] == ["good.example:80"]
        cluster.cut_execs()
        assert await fetch("http://good.example/") == "hi"
        assert box.link.connections == 2
        tunnel = await box.spawn(["python3", "-c", HOLD])
        assert await tunnel.readline() == b"HTTP/1.1 200\n"
        await box.set_network(NetworkPolicy("none"))
        assert await tunnel.readline() == b"b''\n"
        assert "lost" in await fetch("http://good.example/")
        squatter = await box.spawn(["python3", "-c", SQUAT])
        await squatter.readline()
        await box.set_network(GOOD)
        assert await fetch("http://good.example/") == "hi"
