"""What we send to the API server: valid by the official client's OpenAPI, and as strict as it can be."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from sandbox.base import NetworkPolicy, SandboxSpec
from sandbox.kubernetes import KubernetesSettings, errors, manifests
from sandbox.kubernetes.settings import load
from tests.sandbox.fake_kubernetes.validation import problems

pytestmark = pytest.mark.services
IMAGE = "sha256:" + "ab" * 32
EVERYTHING = {
    "runtime_class": "gvisor", "cpu_limit": "2", "memory_request": 0.25, "node_selector": {"pool": "boxes"},
    "tolerations": ({"key": "sandbox", "operator": "Exists", "effect": "NoSchedule"},), "host_users": False,
    "priority_class": "low", "image_pull_secrets": ("registry",), "image": "registry.test/team/sandbox:{hex}",
}  # fmt: skip


def pod(spec: SandboxSpec | None = None, **settings: Any) -> dict[str, Any]:
    spec = spec or SandboxSpec(image=IMAGE)
    return manifests.pod(
        "0123456789abcdef", "c0ffee", spec, {"A": "ü"}, KubernetesSettings(**settings), "helper"
    )


@pytest.mark.parametrize(
    "made",
    [
        pod(),
        pod(**EVERYTHING),
        pod(users="one"),
        pod(
            SandboxSpec(
                image=IMAGE, owner="a long owner/with odd characters: ü" * 4, network="host", lease_s=7
            )
        ),
        pod(SandboxSpec(image=IMAGE, network=NetworkPolicy("none"), runtime="kata", memory_mb=1, pids=1)),
        manifests.config_map(),
        *manifests.network_policies(),
        manifests.lease("c0ffee", "someone", 60, "2026-01-02T03:04:05.000006Z"),
    ],
)
def test_manifests_are_valid(made: dict[str, Any]) -> None:
    assert problems(made) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"automountServiceAccountTokens": False}, "unknown field"),
        ({"activeDeadlineSeconds": "60"}, "valid integer"),
        ({"containers": [{"image": "x"}]}, "name"),
        ({"dnsPolicy": "None", "dnsConfig": {}}, "must provide one"),
        ({"volumes": []}, "Not found: 'helper'"),
    ],
)
def test_the_validation_would_notice(change: dict[str, Any], problem: str) -> None:
    body = pod()
    body["spec"] |= change
    assert any(problem in each for each in problems(body)), problems(body)


def test_pods_have_no_more_rights_than_they_need() -> None:
    body = pod(**EVERYTHING)["spec"]
    (container,) = body["containers"]
    security = container["securityContext"]
    assert body["automountServiceAccountToken"] is False
    assert body["enableServiceLinks"] is False
    assert body["restartPolicy"] == "Never"
    assert (body["runtimeClassName"], body["hostUsers"]) == ("gvisor", False)
    assert not {"hostNetwork", "hostPID", "hostIPC"} & body.keys()
    assert security["allowPrivilegeEscalation"] is False
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert security["capabilities"]["drop"] == ["ALL"]
    baseline = {"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD",
                "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"}  # fmt: skip
    assert set(security["capabilities"]["add"]) < baseline, "Pod Security Standards, baseline"
    assert container["resources"]["limits"] == {"memory": "1024Mi", "ephemeral-storage": "512Mi", "cpu": "2"}
    assert container["resources"]["requests"]["memory"] == "256Mi"
    assert body["activeDeadlineSeconds"] == 86400


def test_one_user_pods_meet_the_restricted_standard() -> None:
    (container,) = pod(users="one")["spec"]["containers"]
    security = container["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 1000)


def test_network_is_denied_by_default() -> None:
    none, host = manifests.network_policies()
    assert none["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert (none["spec"]["ingress"], none["spec"]["egress"]) == ([], [])
    labels = pod()["metadata"]["labels"]
    assert none["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert not host["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert "169.254.0.0/16" in json.dumps(host["spec"]["egress"])


def test_owners_never_share_a_label() -> None:
    owners = ["a", "A", "a-b", "a_b", "a b", "a/b", "a" * 41, "a" * 42, "ä", "ö", "", ".", "-a"]
    labels = [manifests.label(owner) for owner in owners]
    assert len(set(labels)) == len(owners)
    assert all(len(label) <= 63 for label in labels)


def test_the_helper_is_the_same_everywhere_and_runs_on_an_old_python(tmp_path: Path) -> None:
    assert manifests.helper() == manifests.helper()
    map = manifests.config_map()
    assert map["immutable"] is True
    assert len(yaml.safe_dump(map)) < 1 << 20
    with zipfile.ZipFile(io.BytesIO(manifests.helper())) as archive:
        for name in archive.namelist():
            compile(archive.read(name), name, "exec", dont_inherit=True)
    (tmp_path / "podlet.pyz").write_bytes(manifests.helper())
    done = subprocess.run(
        [sys.executable, "-I", "-S", tmp_path / "podlet.pyz", "connect"], capture_output=True
    )
    assert (done.returncode, done.stdout) == (3, b""), done
    assert b"no podlet listens" in done.stderr


@pytest.mark.parametrize(
    ("status", "message", "error", "text"),
    [
        (401, "Unauthorized", errors.SandboxUnavailable, "kubeconfig"),
        (403, 'pods is forbidden: User "x" cannot create resource "pods"', errors.SandboxUnavailable, "RBAC"),
        (
            403,
            'pods "p" is forbidden: exceeded quota: q, requested: memory=1Gi',
            errors.QuotaExceeded,
            "quota",
        ),
        (
            403,
            'pods "p" is forbidden: violates PodSecurity "restricted:latest"',
            errors.PodRefused,
            "PodSecurity",
        ),
        (403, 'admission webhook "w" denied the request: no', errors.PodRefused, "webhook"),
        (422, "Pod is invalid: spec.x", errors.PodRefused, "spec.x"),
        (404, "namespaces not found", errors.SandboxLost, "namespaces"),
        (501, "not implemented", errors.SandboxUnavailable, "501"),
    ],
)
def test_answers_are_typed(status: int, message: str, error: type[Exception], text: str) -> None:
    body = json.dumps({"kind": "Status", "message": message}).encode()
    found = errors.refusal(status, body, "creating a pod")
    assert type(found) is error
    assert text in str(found)


def test_settings_come_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kubernetes.toml"
    path.write_text('namespace = "sandboxes"\nruntime_class = "gvisor"\n')
    monkeypatch.setenv("POSTTRAIN_KUBERNETES", str(path))
    found = load({"runtime_class": "kata"})
    assert (found.namespace, found.runtime_class) == ("sandboxes", "kata")
    with pytest.raises(ValueError, match="namspace"):
        load({"namspace": "x"})
    monkeypatch.setenv("POSTTRAIN_KUBERNETES", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="does not exist"):
        load({})


def test_a_batch_pod_asks_for_the_smallest_share() -> None:
    requests = [
        pod(SandboxSpec(image=IMAGE, scheduling=kind))["spec"]["containers"][0]["resources"]["requests"][
            "cpu"
        ]
        for kind in ("latency", "batch")
    ]
    assert requests == [KubernetesSettings().cpu_request, "1m"]
