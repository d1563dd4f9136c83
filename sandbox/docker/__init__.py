"""The docker backend: containers of an engine on this machine, with our own init inside."""

from sandbox.docker.handle import DockerSandbox
from sandbox.docker.provider import DockerProvider

__all__ = ["DockerProvider", "DockerSandbox"]
