"""Stage 2, environment: a specification becomes an image layer, blobs and a Task record.

The packager removes what could leak (`envfactory.sanitize`), proves it with an oracle over the git objects,
and raises when the proof fails. The self-test, that the visible tests fail in what the agent finds, is the
first run of the search in stage 3.
"""

from __future__ import annotations

from catalog.models import Task
from envfactory.packaging import Packager
from envfactory.stages.base import Specification


class EnvironmentAgent:
    """See the module."""

    name = "environment"

    def __init__(self, packager: Packager) -> None:
        self._packager = packager

    async def run(self, given: Specification) -> Task:
        """Raises LeakError: a fault of ours, never a rejection."""
        return self._packager.package(given.draft)
