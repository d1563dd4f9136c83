"""Programs that try to fake a verdict. They are data here and run in jails only.

Each must score 0 on every task, or be refused; one of them satisfies weak tests by construction and says so
(`needs_differential`). Envfactory's gate runs them against every task: a task that one of them passes is weak.
"""

from __future__ import annotations

from verifiers.hacks import framework, process
from verifiers.hacks.base import HackProbe

__all__ = ["PROBES", "HackProbe"]

PROBES: tuple[HackProbe, ...] = (*framework.PROBES, *process.PROBES)
