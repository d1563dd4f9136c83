"""Independent clients against the fake, so that it is not our own reading of the protocol alone: a real
kubectl and the official synchronous client. And our exec stream against plain commands."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.base import SandboxSpec
from sandbox.kubernetes import KubernetesProvider, KubernetesSandbox
from sandbox.kubernetes.execstream import STDERR, STDOUT, ExecStream, parse_status
from sandbox.namespace import NamespaceProvider
from tests.sandbox.fake_kubernetes import FakeCluster, settings

pytestmark = pytest.mark.services
OFFICIAL = """
import json, sys, time, yaml
from kubernetes import client, config
from kubernetes.stream import stream
core = client.CoreV1Api(config.new_client_from_config(sys.argv[1]))
core.create_namespaced_pod("default", yaml.safe_load(open(sys.argv[2])))
pod = core.read_namespaced_pod("plain", "default")
while not (pod.status.container_statuses and pod.status.container_statuses[0].ready):
    time.sleep(0.1)
    pod = core.read_namespaced_pod("plain", "default")
api = client.CoreV1Api(config.new_client_from_config(sys.argv[1]))
ws = stream(api.connect_get_namespaced_pod_exec, "plain", "default", stdout=True, stderr=True,
            command=["sh", "-c", "head -c 5000000 /dev/zero; echo err >&2; exit 3"],
            _preload_content=False, binary=True)
out = err = b""
while ws.is_open():
    ws.update(timeout=5)
    out += ws.read_channel(1)
    err += ws.read_channel(2)
print(json.dumps({"out": len(out), "err": err.decode(), "code": ws.returncode, "kind": pod.kind}))
"""

ROOT = Path(__file__).resolve().parents[3]
POD = """
apiVersion: v1
kind: Pod
metadata: {name: plain, labels: {app: plain}}
spec:
  containers:
  - name: main
    image: posttrain/sandbox:HEX
    command: [sleep, "1000"]
    resources: {limits: {memory: 256Mi}}
"""


# ---- our exec stream


async def collect(stream: ExecStream) -> dict[int, bytes]:
    found = {STDOUT: b"", STDERR: b""}
    async for channel, data in stream:
        found[channel] += data
    return found


async def raw(kube: KubernetesProvider, box: KubernetesSandbox, *command: str) -> ExecStream:
    cluster = await kube.open()
    return await cluster.exec(f"posttrain-{box.id}", command)


async def test_bytes_half_close_and_exit_status(kube: KubernetesProvider, spec: SandboxSpec) -> None:
    data = bytes(i * 7 % 256 for i in range(1_000_000))
    async with await kube.create(spec) as box:
        stream = await raw(kube, box, "sh", "-c", "cat; echo over >&2; exit 7")
        assert stream.half_closes
        assert stream.status is None
        sending = asyncio.create_task(stream.write(data))

        async def finish() -> None:
            await sending
            await stream.close_stdin()  # the other direction stays open

        closing = asyncio.create_task(finish())
        found = await collect(stream)
        await closing
        assert (found[STDOUT] == data, found[STDERR]) == (True, b"over\n")
        assert stream.status is not None
        assert stream.status.code == 7


async def test_a_missing_status_is_unknown_not_zero(
    cluster: FakeCluster, kube: KubernetesProvider, spec: SandboxSpec
) -> None:
    async with await kube.create(spec) as box:
        cluster.faults.no_status = 1
        stream = await raw(kube, box, "true")
        with pytest.raises(ConnectionError, match="was cut"):
            await collect(stream)
        assert stream.status is None


async def test_v4_cannot_half_close(
    cluster: FakeCluster, kube: KubernetesProvider, spec: SandboxSpec
) -> None:
    cluster.faults.only_v4 = True
    async with await kube.create(spec) as box:
        stream = await raw(kube, box, "echo", "x")
        with pytest.raises(RuntimeError, match="v5"):
            await stream.close_stdin()
        assert (await collect(stream))[STDOUT] == b"x\n"
        assert (await box.exec("cat; exit 3", stdin=b"input")).stdout == b"input", "our own frames need no v5"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b'{"status":"Success"}', 0),
        (b'{"status":"Failure","details":{"causes":[{"reason":"ExitCode","message":"137"}]}}', 137),
        (b'{"status":"Failure","reason":"InternalError","message":"oops"}', None),
        (b"not json", None),
    ],
)
def test_statuses(text: bytes, code: int | None) -> None:
    assert parse_status(text).code == code


async def test_tls_with_the_clusters_own_certificate(
    node: NamespaceProvider, store: Path, tmp_path: Path, spec: SandboxSpec
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
         "-days", "2", "-subj", "/CN=fake", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key,
         "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    async with (
        FakeCluster(tmp_path, node, certificate=(certificate, key)) as cluster,
        KubernetesProvider(store, **settings(cluster)) as kube,
        await kube.create(spec) as box,
    ):
        assert cluster.kubeconfig.read_text().count("https://") == 1
        assert (await box.exec("echo over TLS")).stdout == b"over TLS\n"


# ---- kubectl and the official client


@pytest.fixture
def kubectl() -> str:
    found = shutil.which("kubectl", path=f"{ROOT}/.venv/bin{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip("kubectl is not installed: run .ci/kubectl")
    return found


async def run(
    *command: str | Path, input: bytes | None = None, env: dict[str, str] | None = None
) -> tuple[int, bytes, bytes]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, env=env)
    out, err = await process.communicate(input)
    assert process.returncode is not None
    return process.returncode, out, err


def manifest(folder: Path, node: NamespaceProvider) -> Path:
    path = folder / "pod.yaml"
    path.write_text(POD.replace("HEX", node.images.host_base().removeprefix("sha256:")))
    return path


async def test_kubectl(cluster: FakeCluster, node: NamespaceProvider, tmp_path: Path, kubectl: str) -> None:
    k = (kubectl, "--kubeconfig", cluster.kubeconfig, "--cache-dir", tmp_path / "cache")
    assert await run(*k, "create", "-f", manifest(tmp_path, node)) == (0, b"pod/plain created\n", b"")
    code, _, err = await run(*k, "wait", "--for=condition=Ready", "pod/plain", "--timeout=20s")
    assert code == 0, err
    code, out, err = await run(*k, "get", "pods", "-l", "app=plain", "-o", "name")
    assert (code, out) == (0, b"pod/plain\n"), err
    code, out, err = await run(*k, "exec", "plain", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (code, out, err) == (7, b"out\n", b"err\ncommand terminated with exit code 7\n")
    data = os.urandom(3_000_000)
    code, out, err = await run(*k, "exec", "-i", "plain", "--", "cat", input=data)
    assert (code, out == data) == (0, True), err
    (tmp_path / "file").write_bytes(data)
    for source, target in (("file", "plain:/tmp/file"), ("plain:/tmp/file", "back")):
        where = {"cwd": tmp_path}
        process = await asyncio.create_subprocess_exec(*map(str, k), "cp", source, target, **where)
        assert await process.wait() == 0
    assert (tmp_path / "back").read_bytes() == data
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(manifest(tmp_path, node).read_text().replace("name: main", "nmae: main"))
    code, _, err = await run(*k, "create", "-f", wrong)
    assert code == 1
    assert b'unknown field "Pod.spec.containers[0].nmae"' in err
    code, out, err = await run(*k, "delete", "pod", "plain", "--timeout=20s")
    assert code == 0, err
    assert cluster.pods() == []


async def test_kubectl_sees_our_pods_and_runs_in_them(
    cluster: FakeCluster, kube: KubernetesProvider, spec: SandboxSpec, kubectl: str, tmp_path: Path
) -> None:
    k = (kubectl, "--kubeconfig", cluster.kubeconfig, "--cache-dir", tmp_path / "cache")
    async with await kube.create(spec) as box:
        await box.write("/workspace/file", b"ours")
        code, out, err = await run(*k, "exec", f"posttrain-{box.id}", "--", "cat", "/workspace/file")
        assert (code, out) == (0, b"ours"), err
        code, out, err = await run(*k, "get", "pods,networkpolicies,leases,configmaps", "-o", "name")
        assert code == 0, err
        assert out.decode().split()[:3] == [
            f"pod/posttrain-{box.id}",
            "networkpolicy.networking.k8s.io/posttrain-none",
            "networkpolicy.networking.k8s.io/posttrain-host",
        ]


async def test_the_official_client(cluster: FakeCluster, node: NamespaceProvider, tmp_path: Path) -> None:
    code, out, err = await run(sys.executable, "-c", OFFICIAL, cluster.kubeconfig, manifest(tmp_path, node))
    assert code == 0, err
    assert json.loads(out) == {"out": 5_000_000, "err": "err\n", "code": 3, "kind": "Pod"}


async def test_the_fake_as_a_program_and_the_command_that_checks_it(tmp_path: Path, kubectl: str) -> None:
    kubeconfig, home = tmp_path / "config", tmp_path / "home"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.sandbox.fake_kubernetes", "--store", str(home / "images"),
        "--kubeconfig", str(kubeconfig), stdout=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert (await process.stdout.readline()).startswith(b"listening on 127.0.0.1:")
        code, out, err = await run(kubectl, "--kubeconfig", kubeconfig, "get", "namespaces", "-o", "name")
        assert (code, out) == (0, b"namespace/default\n"), err
        code, out, err = await run(
            sys.executable, "-m", "console", "sandbox", "check", "kubernetes", "exit_code_is_data",
            "snapshot_is_a_new_image", "--rounds", "1",
            "--settings", json.dumps({"kubeconfig": str(kubeconfig)}),
            env={**os.environ, "POSTTRAIN_HOME": str(home), "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert code == 0, (out, err)
        assert b"1 passed, 0 failed, 1 do not apply." in out
        assert b"podPidsLimit" in out, "what is not enforced is said"
    finally:
        process.terminate()
        await process.wait()
