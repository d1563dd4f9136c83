"""The package index that the user's pip is set up for, for real: `make test-services` runs this."""

from pathlib import Path

import pytest

from envfactory.build import build
from envfactory.sources import Limits, open_source
from sandbox.base import SandboxProvider
from sandbox.images import ImageStore


@pytest.mark.services
@pytest.mark.timeout(300)
async def test_a_small_package_of_the_index_becomes_an_environment(
    tmp_path: Path, images: ImageStore, sandboxes: SandboxProvider
) -> None:
    history = open_source("pypi:inflection==0.5.1", Limits(releases=3)).fetch(tmp_path)
    assert [revision.name for revision in history.revisions] == ["0.4.0", "0.5.0", "0.5.1"]
    made = await build(history, tmp_path, sandboxes, images)
    assert len(made.suite.passing) == 455
    assert made.suite.failing == made.suite.flaky == ()
