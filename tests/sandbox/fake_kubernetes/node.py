"""Scheduler and kubelet of the fake: pods become namespace sandboxes, with statuses as of a real node."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Coroutine
from typing import Any

from sandbox.base import Outcome, SandboxError, SandboxSpec
from sandbox.namespace import NamespaceProvider, NamespaceSandbox
from tests.sandbox.fake_kubernetes.faults import Faults
from tests.sandbox.fake_kubernetes.store import Store, now

UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "k": 1000, "M": 10**6, "G": 10**9}


def quantity(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([A-Za-z]*)", text).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


class Node:
    """One node. `memory_mb` is what the scheduler may give away, `pod_pids` the kubelet's podPidsLimit."""

    def __init__(
        self, store: Store, provider: NamespaceProvider, faults: Faults, *, memory_mb: int, pod_pids: int
    ) -> None:
        self.store, self.provider, self.faults = store, provider, faults
        self.memory = memory_mb << 20
        self.pod_pids = pod_pids
        self.boxes: dict[str, NamespaceSandbox] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.port = 0
        """Of the API server, as pods are told."""
        self.lingering: set[asyncio.Task[None]] = set()

    def admit(self, pod: dict[str, Any]) -> None:
        """A pod was created."""
        pod["status"] = {"phase": "Pending", "qosClass": "Burstable", "conditions": []}
        uid = pod["metadata"]["uid"]
        self.tasks[uid] = asyncio.create_task(self._life(pod))
        self.tasks[uid].add_done_callback(lambda task: task.cancelled() or task.result())

    async def remove(self, pod: dict[str, Any], grace_s: float) -> None:
        """End the pod's sandbox and forget the pod."""
        uid = pod["metadata"]["uid"]
        if (task := self.tasks.get(uid)) is not None:
            task.cancel()
            await asyncio.wait([task])
        self.tasks.pop(uid, None)
        await self._stop(uid)
        self.store.delete("pods", pod)

    async def _stop(self, uid: str) -> None:
        if (box := self.boxes.pop(uid, None)) is not None:
            await box.close()

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        for uid in list(self.boxes):
            await self._stop(uid)
        if (
            self.lingering
        ):  # removals under way, and commands whose client left: they end with their sandboxes
            await asyncio.wait(self.lingering, timeout=10)

    def linger(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something that nobody waits for, at most as long as the cluster lives."""
        task = asyncio.create_task(coroutine)
        self.lingering.add(task)
        task.add_done_callback(self.lingering.discard)
        return task

    # ---- a pod's life

    async def _life(self, pod: dict[str, Any]) -> None:
        container, name = pod["spec"]["containers"][0], pod["spec"]["containers"][0]["name"]
        if not await self._schedule(pod) or not await self._pull(pod, name, container["image"]):
            return
        if self.faults.start_error:
            self._wait(pod, name, "RunContainerError", self.faults.start_error)
            return
        uid = pod["metadata"]["uid"]
        try:
            box = self.boxes[uid] = await self.provider.create(self._spec(pod))
            await self._volumes(box, pod)
            security = container.get("securityContext") or {}
            user = "root" if security.get("runAsUser", 0) == 0 else "agent"
            env = {"HOSTNAME": "sandbox", "KUBERNETES_SERVICE_HOST": "127.0.0.1",
                   "KUBERNETES_SERVICE_PORT": str(self.port)}  # fmt: skip
            command = container.get("command") or ["sleep", "infinity"]
            main = await box.spawn(command, cwd="/", user=user, env=env)
        except (SandboxError, KeyError) as error:
            self._wait(pod, name, "CreateContainerError", str(error))
            return
        running = {"running": {"startedAt": now()}}
        self._set(pod, phase="Running", startTime=now(), podIP="127.0.0.1", hostIP="127.0.0.1",
                  containerStatuses=[self._status(pod, name, running, ready=False)])  # fmt: skip
        probe = asyncio.create_task(self._probe(pod, box, container))
        try:
            async with asyncio.timeout(pod["spec"].get("activeDeadlineSeconds")):
                result = await main.wait()
        except TimeoutError:
            await self.end(
                pod, "DeadlineExceeded", "Pod was active on the node longer than the specified deadline"
            )
            return
        finally:
            probe.cancel()
        await self._stop(uid)
        if result.outcome is Outcome.OOM:
            self.ended(pod, "OOMKilled", 137)
        elif result.exit_code == 0:
            self.ended(pod, "Completed", 0, phase="Succeeded")
        else:
            code = result.exit_code if result.exit_code is not None else 137
            self.ended(pod, "Error", code, message=result.stderr.decode(errors="replace")[-2000:])

    async def _schedule(self, pod: dict[str, Any]) -> bool:
        while (wanted := self._request(pod)) > self.memory - self._used(pod):
            free = (self.memory - self._used(pod)) >> 20
            message = (
                f"0/1 nodes are available: 1 Insufficient memory ({wanted >> 20}Mi asked, {free}Mi free)."
            )
            self._condition(pod, "PodScheduled", "False", "Unschedulable", message)
            await asyncio.sleep(0.2)
        pod["spec"]["nodeName"] = "fake-node"
        self._condition(pod, "PodScheduled", "True")
        return True

    def _request(self, pod: dict[str, Any]) -> int:
        resources = pod["spec"]["containers"][0].get("resources") or {}
        return quantity((resources.get("requests") or {}).get("memory", "0"))

    def _used(self, but: dict[str, Any]) -> int:
        return sum(
            self._request(pod)
            for pod in self.store.list("pods", "")
            if pod is not but
            and pod["spec"].get("nodeName")
            and pod["status"]["phase"] in ("Pending", "Running")
        )

    async def _pull(self, pod: dict[str, Any], name: str, image: str) -> bool:
        self._wait(pod, name, "ContainerCreating", "")
        await asyncio.sleep(self.faults.pull_s)
        digest = self._digest(image)
        while any(part in image for part in self.faults.missing_images) or not self.provider.images.exists(
            digest
        ):
            text = f'failed to pull image "{image}": not found'
            self._wait(pod, name, "ErrImagePull", text)
            await asyncio.sleep(0.2)
            self._wait(pod, name, "ImagePullBackOff", f'Back-off pulling image "{image}": {text}')
            await asyncio.sleep(1.0)
        return True

    def _digest(self, image: str) -> str:
        return "sha256:" + (image.rpartition(":")[2] + "0" * 64)[:64]

    def _spec(self, pod: dict[str, Any]) -> SandboxSpec:
        container = pod["spec"]["containers"][0]
        limits = (container.get("resources") or {}).get("limits") or {}
        egress = [
            rule
            for policy in self.store.list("networkpolicies", pod["metadata"]["namespace"])
            if self._selects(policy, pod)
            for rule in policy["spec"].get("egress") or []
        ]
        return SandboxSpec(
            image=self._digest(container["image"]),
            owner=f"fake-{pod['metadata']['name']}",
            workdir="/",
            memory_mb=quantity(limits.get("memory", "1024Mi")) >> 20,
            disk_mb=quantity(limits.get("ephemeral-storage", "512Mi")) >> 20,
            pids=self.pod_pids,
            network="host" if egress or not self.faults.network_plugin else "none",
        )

    def _selects(self, policy: dict[str, Any], pod: dict[str, Any]) -> bool:
        wanted = policy["spec"]["podSelector"].get("matchLabels") or {}
        return wanted.items() <= (pod["metadata"].get("labels") or {}).items()

    async def _volumes(self, box: NamespaceSandbox, pod: dict[str, Any]) -> None:
        namespace = pod["metadata"]["namespace"]
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or []}
        for mount in pod["spec"]["containers"][0].get("volumeMounts") or []:
            volume, path = volumes[mount["name"]], mount["mountPath"]
            await box.exec(["mkdir", "-p", path], user="root", cwd="/")
            if "configMap" in volume:
                map = self.store.get("configmaps", namespace, volume["configMap"]["name"])
                assert map is not None, f"no config map {volume['configMap']['name']}"
                for name, data in (map.get("binaryData") or {}).items():
                    script = 'cat > "$0" && chmod 444 "$0" && chown 0:0 "$0"'
                    done = await box.exec(["/bin/sh", "-c", script, f"{path}/{name}"], user="root", cwd="/",
                                          stdin=base64.b64decode(data))  # fmt: skip
                    assert done.ok, done.text
            else:
                await box.exec(["chmod", "0777", path], user="root", cwd="/")

    async def _probe(self, pod: dict[str, Any], box: NamespaceSandbox, container: dict[str, Any]) -> None:
        await asyncio.sleep(self.faults.ready_s)
        probe = container.get("startupProbe")
        failures = 0
        while probe and not (await box.exec(probe["exec"]["command"], user="root", cwd="/")).ok:
            failures += 1
            if failures >= probe["failureThreshold"]:
                await self.end(pod, "Error", "startup probe failed")
                return
            await asyncio.sleep(0.05 * 2 ** min(failures, 4))  # a real kubelet waits for periodSeconds
        status = self._status(pod, container["name"], {"running": {"startedAt": now()}}, ready=True)
        self._condition(pod, "Ready", "True", containerStatuses=[status])

    # ---- statuses

    def _status(
        self, pod: dict[str, Any], name: str, state: dict[str, Any], *, ready: bool
    ) -> dict[str, Any]:
        image = pod["spec"]["containers"][0]["image"]
        return {"name": name, "image": image, "imageID": image, "ready": ready, "started": ready,
                "restartCount": 0, "state": state}  # fmt: skip

    def _set(self, pod: dict[str, Any], **changes: Any) -> None:
        pod["status"] |= changes
        self.store.touch("pods", pod)

    def _wait(self, pod: dict[str, Any], name: str, reason: str, message: str) -> None:
        state = {"waiting": {"reason": reason, "message": message}}
        self._set(pod, containerStatuses=[self._status(pod, name, state, ready=False)])

    def _condition(
        self, pod: dict[str, Any], type: str, status: str, reason: str = "", message: str = "", **changes: Any
    ) -> None:
        others = [each for each in pod["status"]["conditions"] if each["type"] != type]
        fresh = {
            "type": type,
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": now(),
        }
        if fresh["reason"] and any(each.get("message") == message for each in pod["status"]["conditions"]):
            return
        self._set(pod, conditions=[*others, fresh], **changes)

    def ended(
        self, pod: dict[str, Any], reason: str, code: int, *, phase: str = "Failed", message: str = ""
    ) -> None:
        """The container ended."""
        name = pod["spec"]["containers"][0]["name"]
        state = {"terminated": {"exitCode": code, "reason": reason, "message": message, "finishedAt": now()}}
        self._set(pod, phase=phase, containerStatuses=[self._status(pod, name, state, ready=False)])

    async def end(self, pod: dict[str, Any], reason: str, message: str, *, code: int = 137) -> None:
        """Something else than the container ended the pod: eviction, deadline, a lost node."""
        uid = pod["metadata"]["uid"]
        task = self.tasks.get(uid)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            await asyncio.wait([task])
        await self._stop(uid)
        if reason == "OOMKilled":
            self.ended(pod, reason, code)
            return
        pod["status"] |= {"reason": reason, "message": message}
        self.ended(pod, "Error", code)
