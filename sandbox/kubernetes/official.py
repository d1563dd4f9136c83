"""The official client's asyncio half and what it stands on, imported by name: both come with an extra.

Types of theirs are Any here, so that this room is checked the same with and without them.
"""

from __future__ import annotations

import importlib
from typing import Any

aiohttp: Any = importlib.import_module("aiohttp")
client: Any = importlib.import_module("kubernetes.aio.client")
config: Any = importlib.import_module("kubernetes.aio.config")
