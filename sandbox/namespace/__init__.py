"""The embedded backend: raw Linux namespaces, no daemon, no other program."""

from sandbox.namespace.handle import NamespaceProcess, NamespaceSandbox
from sandbox.namespace.provider import NamespaceProvider

__all__ = ["NamespaceProcess", "NamespaceProvider", "NamespaceSandbox"]
