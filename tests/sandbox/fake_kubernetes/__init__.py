"""A small API server for tests: real HTTP and websockets on loopback, whose pods are namespace sandboxes.

It knows what our backend, kubectl and the official clients need: discovery, namespaced objects with resource
versions, lists, watches with bookmarks and 410, server-side validation, exec over v4/v5.channel.k8s.io, a
scheduler with memory, a kubelet with probes, limits, deadlines, eviction. `Faults` breaks it on purpose.
It is no Kubernetes: what passes here alone has met a fake.

    python -m tests.sandbox.fake_kubernetes --store FOLDER --kubeconfig FILE
"""

from tests.sandbox.fake_kubernetes.faults import Faults
from tests.sandbox.fake_kubernetes.server import FakeCluster, settings

__all__ = ["FakeCluster", "Faults", "settings"]
