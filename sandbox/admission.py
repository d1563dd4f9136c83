"""How much one node may be promised: a hard, local limit, checked where the sandbox would live.

Memory is overcommitted on purpose, since most sandboxes use a fraction of their limit; a request that does
not fit is refused with AdmissionRefused before anything starts, so that a placer can try another node or
wait.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Admission:
    """The limits of one node: all clients that share an image store count together."""

    sandboxes: int | None = None
    """How many may live at once; None: as many as the other limits allow."""
    overcommit: float | None = 32.0
    """The sum of the sandboxes' memory limits may be that many times the node's memory; None: no limit."""
    available_mb: int = 256
    """Memory that must be available on the node (MemAvailable) before one more is admitted."""
