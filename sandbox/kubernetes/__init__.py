"""Sandboxes as pods, through the official Python client (`pip install posttrain[kubernetes]`)."""

from sandbox.kubernetes.errors import (
    DeadlineExceeded,
    ImagePullFailed,
    NodeLost,
    PodEvicted,
    PodOutOfMemory,
    PodRefused,
    PodStartFailed,
    QuotaExceeded,
    Unschedulable,
)
from sandbox.kubernetes.handle import KubernetesSandbox
from sandbox.kubernetes.provider import KubernetesProvider
from sandbox.kubernetes.settings import KubernetesSettings

__all__ = [
    "DeadlineExceeded",
    "ImagePullFailed",
    "KubernetesProvider",
    "KubernetesSandbox",
    "KubernetesSettings",
    "NodeLost",
    "PodEvicted",
    "PodOutOfMemory",
    "PodRefused",
    "PodStartFailed",
    "QuotaExceeded",
    "Unschedulable",
]
