"""The official client's asyncio half and what it stands on, imported at first use: both come with an extra.

Types of theirs are Any here, so that this room is checked the same with and without them.
"""

from __future__ import annotations

import importlib
from typing import Any


class _Late:
    """A module that is imported when an attribute of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


def require() -> None:
    """Raise ModuleNotFoundError now where the extra is not installed."""
    for name in ("kubernetes", "aiohttp"):
        importlib.import_module(name)


aiohttp: Any = _Late("aiohttp")
client: Any = _Late("kubernetes.aio.client")
config: Any = _Late("kubernetes.aio.config")
