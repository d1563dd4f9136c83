"""The embedded backend: raw Linux namespaces, no daemon, no other program."""

from sandbox.namespace.handle import NamespaceSandbox
from sandbox.namespace.process import NamespaceProcess
from sandbox.namespace.provider import NamespaceProvider

__all__ = ["NamespaceProcess", "NamespaceProvider", "NamespaceSandbox"]
