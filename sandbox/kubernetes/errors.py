"""What clusters do to pods, as types: from API answers and pod statuses to one sentence each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sandbox.base import (
    AdmissionRefused,
    PolicyUnsupported,
    Repercussion,
    SandboxError,
    SandboxLost,
    SandboxUnavailable,
)


class ImagePullFailed(SandboxUnavailable):
    """The node cannot get the image."""


class PodStartFailed(SandboxUnavailable):
    """The container does not start (no python3 in the image, a runtime class that is not there, ...)."""


class Unschedulable(AdmissionRefused):
    """The pod fits on no node."""


class QuotaExceeded(AdmissionRefused):
    """The namespace's quota is used up."""


class PodRefused(PolicyUnsupported):
    """Admission (Pod Security, a webhook, validation) refuses such pods."""


class PodEvicted(SandboxLost):
    """The kubelet or the scheduler took the pod away: node pressure, preemption, or its own disk limit."""


class PodOutOfMemory(SandboxLost):
    """The whole pod was killed at its memory limit."""


class DeadlineExceeded(SandboxLost):
    """The pod reached `life_s`."""


class NodeLost(SandboxLost):
    """The node went away or shut down."""


PULL_REASONS = frozenset({"ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
                          "RegistryUnavailable"})  # fmt: skip
"""Waiting reasons after which waiting longer is in vain. ErrImagePull is followed by a second try."""
START_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError",
                           "CrashLoopBackOff", "StartError"})  # fmt: skip
EVICTION_REASONS = frozenset({"Evicted", "Preempting", "PreemptionByScheduler"})
NODE_REASONS = frozenset({"NodeLost", "Shutdown", "Terminated", "NodeShutdown", "UnexpectedAdmissionError",
                          "NodeAffinity", "OutOfcpu", "OutOfmemory", "OutOfpods"})  # fmt: skip


def message_of(body: str | bytes | None) -> str:
    """The `message` of an API Status, or the text itself."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body or ""
    try:
        status: dict[str, Any] = json.loads(text)
        return str(status["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip()


def refusal(status: int, body: str | bytes | None, doing: str) -> SandboxError:
    """The error for an API answer that is not a success."""
    text = message_of(body)
    if status == 401:
        return SandboxUnavailable(f"the cluster does not know us while {doing}: renew the kubeconfig's login")
    if status == 403 and "exceeded quota" in text:
        return QuotaExceeded(f"the namespace's quota is used up: {text}", "memory", 5.0)
    if status == 403 and ("PodSecurity" in text or "denied the request" in text or "forbidden:" in text):
        if "cannot " in text and "User " in text:
            return SandboxUnavailable(f"no right for {doing}: {text}; grant it to this account in RBAC")
        return PodRefused(f"admission refuses this pod: {text}")
    if status in (400, 422):
        return PodRefused(f"the API server refuses {doing}: {text}")
    if status == 404:
        return SandboxLost(f"{doing}: {text}")
    return SandboxUnavailable(f"the API server answered {status} while {doing}: {text}")


def container(pod: Mapping[str, Any]) -> dict[str, Any]:
    """The status of our container ({} before there is one)."""
    statuses: list[dict[str, Any]] = _part(pod, "status").get("containerStatuses") or []
    return next((each for each in statuses if each["name"] == "sandbox"), dict[str, Any]())


def _part(value: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A nested object, {} where it or what holds it is absent."""
    for name in names:
        value = value.get(name) or {}
    return dict(value)


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether the helper inside answers probes."""
    return bool(container(pod).get("ready")) and not pod["metadata"].get("deletionTimestamp")


def start_failure(pod: Mapping[str, Any], waited_s: float, schedule_s: float) -> SandboxError | None:
    """Why a pod that is not ready yet will never be."""
    name = pod["metadata"]["name"]
    waiting = _part(container(pod), "state", "waiting")
    reason, text = str(waiting.get("reason", "")), str(waiting.get("message", ""))
    if reason in PULL_REASONS:
        return ImagePullFailed(f"pod {name} cannot get its image ({reason}): {text}; push it, or set `image`")
    if reason in START_REASONS:
        return PodStartFailed(f"pod {name} does not start ({reason}): {text}")
    conditions: list[dict[str, Any]] = _part(pod, "status").get("conditions") or []
    for each in conditions:
        if each["type"] == "PodScheduled" and each["status"] == "False" and waited_s >= schedule_s:
            return Unschedulable(f"pod {name} fits on no node: {each.get('message', '')}", "memory", 5.0)
    return end(pod)


def end(pod: Mapping[str, Any]) -> SandboxLost | PodStartFailed | None:
    """Why a pod has ended; None while it has not."""
    name, status, state = pod["metadata"]["name"], _part(pod, "status"), container(pod)
    terminated = _part(state, "state", "terminated") or _part(state, "lastState", "terminated")
    phase = status.get("phase")
    reason = str(status.get("reason") or terminated.get("reason") or "")
    text = str(status.get("message") or terminated.get("message") or "")
    if terminated.get("reason") == "OOMKilled":
        what = f"pod {name} was killed at its memory limit: raise memory_mb"
        return PodOutOfMemory(what, Repercussion.INIT)
    if phase not in ("Failed", "Succeeded") and not terminated:
        deleted = pod["metadata"].get("deletionTimestamp")
        return SandboxLost(f"pod {name} is being deleted by someone else") if deleted else None
    if reason in EVICTION_REASONS:
        own = "exceeds" in text and "limit" in text
        return PodEvicted(f"pod {name} was evicted: {text}", Repercussion.DISK if own else None)
    if reason == "DeadlineExceeded":
        return DeadlineExceeded(f"pod {name} reached its deadline: raise life_s")
    if reason in NODE_REASONS:
        return NodeLost(f"pod {name} went with its node ({reason}): {text}")
    if reason in START_REASONS or reason == "ContainerCannotRun":
        return PodStartFailed(f"pod {name} does not start ({reason}): {text}")
    code: Any = terminated.get("exitCode")
    what = f"pod {name} ended ({reason or phase}, exit code {code}): {text}".rstrip(": ")
    return SandboxLost(what, Repercussion.INIT if code == 137 and reason == "Error" else None)
