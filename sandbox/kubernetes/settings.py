"""What a cluster's operator decides: where, from which registry, with which rights and patience.

Read from the TOML file that `$POSTTRAIN_KUBERNETES` names, or given to the provider by name.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

VARIABLE = "POSTTRAIN_KUBERNETES"


class KubernetesSettings(BaseModel):
    """Settings of the kubernetes backend."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kubeconfig: Path | None = None
    """None: the service account inside a cluster, else $KUBECONFIG or ~/.kube/config."""
    context: str | None = None
    namespace: str = "default"
    """Must exist. A namespace of its own with a quota is best."""
    image: str = "posttrain/sandbox:{hex}"
    """Where nodes pull an image from; `{hex}` is its digest in the image store without `sha256:`."""
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    python: str = "python3"
    """The interpreter (3.9 or newer, standard library) in the image that runs our helper."""
    users: Literal["two", "one"] = "two"
    """`two`: our helper is root with eight file and user capabilities, commands are uid 1000 with none
    (Pod Security "baseline"). `one`: everything is uid 1000 with nothing ("restricted"), without root."""
    host_users: bool | None = None
    """False: each pod has a user namespace of its own (Kubernetes 1.33). None: the cluster's default."""
    runtime_class: str = ""
    """RuntimeClass of pods whose spec names none (gVisor, Kata)."""
    cpu_request: str = "50m"
    cpu_limit: str = ""
    """Empty: no limit."""
    memory_request: float = Field(default=1.0, gt=0, le=1)
    """Share of the memory limit that is requested of the scheduler; below 1 overcommits."""
    node_selector: Mapping[str, str] = {}
    tolerations: tuple[Mapping[str, Any], ...] = ()
    priority_class: str = ""
    start_s: float = 120
    """Patience with a pod from creation to readiness, image pull included."""
    schedule_s: float = 30
    """Of it, patience with a pod that fits on no node (an autoscaler may add one)."""
    reconnect_s: float = 60
    """How long a cut connection may stay away, and how long a pod outlives its client."""
    heartbeat_s: int = Field(default=60, ge=1)
    """Duration of the Lease object that this client renews; `reap` by others goes by it."""
    life_s: int = 24 * 3600
    """activeDeadlineSeconds: the cluster ends every pod after that, whatever happens to us."""
    pids_limit: int | None = None
    """`podPidsLimit` of the nodes' kubelets, if set there: the API has no field for it."""
    hard_disk: bool = False
    """Nodes refuse writes beyond the limit at once (a project quota). Elsewhere the kubelet evicts, late."""
    kill_one: bool = False
    """Nodes kill one process out of memory, not the pod (`singleProcessOOMKill`, or control groups v1)."""
    trusted_networks: tuple[str, ...] = ()
    """Private networks (CIDR) of this client's where names of an allow-list may lie."""
    index_url: str | None = None
    """The package index that policies cut at a day; None: PIP_INDEX_URL or pypi.org."""
    network_enforced: Literal["probe", "trust"] = "probe"
    """`probe`: before the first sandbox is handed out, it tries to reach the API server; if it can, nothing
    enforces NetworkPolicies, and sandboxes are refused."""


def load(settings: Mapping[str, Any]) -> KubernetesSettings:
    """The file's settings with `settings` over them. ValueError that names a wrong one."""
    path = os.environ.get(VARIABLE)
    try:
        found = tomllib.loads(Path(path).read_text()) if path else {}
    except FileNotFoundError:
        raise ValueError(f"{VARIABLE} names {path}, which does not exist") from None
    return KubernetesSettings(**{**found, **settings})
