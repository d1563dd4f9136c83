"""What we send to the API server, as plain dictionaries: pods, network policies, the helper's config map."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sandbox.base import SandboxSpec
from sandbox.kubernetes.settings import KubernetesSettings
from sandbox.trees import AGENT

GROUP = "posttrain.dev"
MANAGED = {"app.kubernetes.io/managed-by": "posttrain"}
HELPER = "/opt/posttrain/podlet.pyz"
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETPCAP", "SETUID")
"""What our helper keeps (all within Pod Security "baseline"); commands of agents get none."""


SOCKET = "/run/posttrain/podlet.sock"
_MAIN = f"""import os, sys

if sys.argv[1] == "probe":
    sys.exit(not os.path.exists({SOCKET!r}))
if sys.argv[1] == "connect":
    from sandbox.node.connector import main
else:
    from sandbox.node.podlet import main
main()
"""


def label(text: str) -> str:
    """`text` as a label value that no other text has: labels take 63 characters of a small alphabet."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", text)[:40].strip("_.-")
    if plain == text:
        return text
    return f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:12]}".lstrip("-")


def helper() -> bytes:
    """The helper for pods: a zip that Python runs, the same bytes on every machine."""
    root = Path(__file__).resolve().parents[1]
    files = {
        "__main__.py": _MAIN,
        "sandbox/__init__.py": "",
        **{f"sandbox/node/{path.name}": path.read_text() for path in (root / "node").glob("*.py")},
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, (2000, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, files[name])
    return buffer.getvalue()


def config_map() -> dict[str, Any]:
    """The helper as an immutable object named by its content: any number of clients share it."""
    data = helper()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"posttrain-helper-{hashlib.sha256(data).hexdigest()[:16]}",
            "labels": dict(MANAGED),
        },
        "immutable": True,
        "binaryData": {"podlet.pyz": base64.b64encode(data).decode()},
    }


def network_policies() -> list[dict[str, Any]]:
    """One for each mode: everything denied, and all but link-local and metadata addresses for builds."""
    anywhere: list[dict[str, Any]] = [
        {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}},
        {"ipBlock": {"cidr": "::/0", "except": ["fe80::/10", "fd00:ec2::254/128"]}},
    ]
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": f"posttrain-{mode}", "labels": dict(MANAGED)},
            "spec": {
                "podSelector": {"matchLabels": {**MANAGED, f"{GROUP}/network": mode}},
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [],
                "egress": rules,
            },
        }
        for mode, rules in (("none", []), ("host", [{"to": anywhere}]))
    ]


def lease(client: str, holder: str, seconds: int, now: str) -> dict[str, Any]:
    """The heartbeat of one client; its pods name it."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": f"posttrain-{client}", "labels": {**MANAGED, f"{GROUP}/client": client}},
        "spec": {
            "holderIdentity": holder,
            "leaseDurationSeconds": seconds,
            "acquireTime": now,
            "renewTime": now,
        },
    }


def pod(
    id: str, client: str, spec: SandboxSpec, env: Mapping[str, str], settings: KubernetesSettings, helper: str
) -> dict[str, Any]:
    """The pod of one sandbox. `env` is what its commands get, `helper` the config map's name."""
    annotations = {
        f"{GROUP}/owner": spec.owner,
        f"{GROUP}/image": spec.image,
        f"{GROUP}/lease": f"posttrain-{client}",
        f"{GROUP}/lease-seconds": f"{spec.lease_s or 0:g}",
        f"{GROUP}/spec": json.dumps({**asdict(spec), "network": spec.policy.encode()}),
        f"{GROUP}/environment": json.dumps(dict(env)),
    }
    body: dict[str, Any] = {
        "activeDeadlineSeconds": settings.life_s,
        "automountServiceAccountToken": False,
        "containers": [_container(spec, settings)],
        "enableServiceLinks": False,
        "hostname": "sandbox",
        "restartPolicy": "Never",
        "securityContext": _pod_security(settings),
        "terminationGracePeriodSeconds": 1,
        "volumes": [
            {"name": "helper", "configMap": {"name": helper, "defaultMode": 0o444}},
            {"name": "socket", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        ],
    }
    if spec.policy.mode != "host":
        body |= {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}
    optional: dict[str, Any] = {
        "runtimeClassName": spec.runtime or settings.runtime_class,
        "priorityClassName": settings.priority_class,
        "nodeSelector": dict(settings.node_selector),
        "tolerations": [dict(each) for each in settings.tolerations],
        "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets],
    }
    body |= {name: value for name, value in optional.items() if value}
    if settings.host_users is not None:
        body["hostUsers"] = settings.host_users
    network = "host" if spec.policy.mode == "host" else "none"  # an allow-list's proxy needs no network
    labels = {**MANAGED, f"{GROUP}/owner": label(spec.owner), f"{GROUP}/client": client,
              f"{GROUP}/id": id, f"{GROUP}/network": network}  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod_name(id), "labels": labels, "annotations": annotations},
        "spec": body,
    }


def pod_name(id: str) -> str:
    return f"posttrain-{id}"


def _pod_security(settings: KubernetesSettings) -> dict[str, Any]:
    security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if settings.users == "one":
        security |= {"runAsNonRoot": True, "runAsUser": AGENT, "runAsGroup": AGENT, "fsGroup": AGENT}
    return security


def _container(spec: SandboxSpec, settings: KubernetesSettings) -> dict[str, Any]:
    two = settings.users == "two"
    security: dict[str, Any] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], **({"add": list(CAPABILITIES)} if two else {})},
        "privileged": False,
        "readOnlyRootFilesystem": False,
        "runAsUser": 0 if two else AGENT,
        "runAsGroup": 0 if two else AGENT,
        "runAsNonRoot": not two,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    requests = {
        "cpu": "1m" if spec.scheduling == "batch" else settings.cpu_request,
        "memory": f"{max(1, int(spec.memory_mb * settings.memory_request))}Mi",
        "ephemeral-storage": f"{spec.disk_mb}Mi",
    }
    limits = {"memory": f"{spec.memory_mb}Mi", "ephemeral-storage": f"{spec.disk_mb}Mi"}
    if settings.cpu_limit:
        limits["cpu"] = settings.cpu_limit
    podlet = {"workdir": spec.workdir, "lease_s": spec.lease_s, "reconnect_s": settings.reconnect_s,
              "start_s": settings.start_s,
              "rlimits": {"RLIMIT_NOFILE": 4096}}  # fmt: skip
    return {
        "name": "sandbox",
        "image": settings.image.format(hex=spec.image.removeprefix("sha256:"), digest=spec.image),
        "imagePullPolicy": settings.image_pull_policy,
        "command": command(settings, "serve", json.dumps(podlet)),
        "resources": {"requests": requests, "limits": limits},
        "securityContext": security,
        "startupProbe": {
            "exec": {"command": command(settings, "probe")},
            "periodSeconds": 1,
            "timeoutSeconds": 10,
            "failureThreshold": max(1, int(settings.start_s)),
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "helper", "mountPath": "/opt/posttrain", "readOnly": True},
            {"name": "socket", "mountPath": "/run/posttrain"},
        ],
    }


def command(settings: KubernetesSettings, *arguments: str) -> list[str]:
    """How the helper is started in a pod."""
    return [settings.python, "-I", "-S", HELPER, *arguments]
