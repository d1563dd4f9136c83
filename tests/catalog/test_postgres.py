"""The same catalog on PostgreSQL: a server of our own, on a socket in a temporary folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from catalog.database import connect
from catalog.errors import UnknownId, UserError
from catalog.models import Gate, QualityReport, Status, Verdict
from catalog.store import Catalog
from catalog.tables import metadata
from tests.catalog.test_store import make_run, make_task, make_trajectory

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """URL of a running server. As root it runs as `postgres`, which refuses to be root."""
    (*_, programs) = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    who = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.getuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="pg"))
    try:
        if who:
            shutil.chown(folder, "postgres", "postgres")
        data = folder / "data"
        initdb = [programs / "initdb", "-D", data, "-A", "trust", "-U", "postgres", "-E", "UTF8", "-N"]
        subprocess.run(initdb, check=True, capture_output=True, cwd="/", **who)  # type: ignore[call-overload]
        options = f"-c listen_addresses= -k {folder} -c fsync=off"
        control = [programs / "pg_ctl", "-D", data, "-w", "-l", folder / "log"]
        start = [*control, "-o", options, "start"]
        subprocess.run(start, check=True, stdout=subprocess.DEVNULL, cwd="/", **who)  # type: ignore[call-overload]
        try:
            yield f"postgresql+psycopg://postgres@/postgres?host={folder}"
        finally:
            stop = [*control, "-m", "immediate", "stop"]
            subprocess.run(stop, check=True, capture_output=True, cwd="/", **who)  # type: ignore[call-overload]
    finally:
        shutil.rmtree(folder)


def test_the_catalog_works_on_postgresql(server: str, tmp_path: Path) -> None:
    code = "import sys; from catalog.store import Catalog; Catalog.open(sys.argv[1], url=sys.argv[2]).close()"
    opening = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), server]) for _ in range(4)]
    assert [child.wait(60) for child in opening] == [0, 0, 0, 0], "several processes migrate at once"

    engine = connect(server)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()

    with Catalog.open(tmp_path, url=server) as catalog:
        task = make_task(status=Status.ACCEPTED)
        with pytest.raises(UserError, match="Put the task before"):
            catalog.put_report(QualityReport(task_id=task.id))
        for _ in range(2):
            catalog.put_task(task)
            catalog.put_run(make_run())
            catalog.put_trajectory(make_trajectory("t", task))
        gate = Gate(name="noop", passed=False, evidence="")
        catalog.put_report(QualityReport(task_id=task.id, gates=(gate,)))
        assert catalog.get_task(task.id) == task
        assert catalog.get_trajectory("t").logprobs == (None, -0.5)
        assert catalog.count_rejections() == {"noop": 1}
        with pytest.raises(UnknownId, match="Did you mean"):
            catalog.get_task(task.id[:-1])
        catalog.verdicts.put("k", Verdict(reward=1.0))

        def hit() -> None:
            for _ in range(20):
                assert catalog.verdicts.get("k")

        threads = [threading.Thread(target=hit) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert catalog.verdicts.stats() == (1, 80)
        assert catalog.stages.once("s", [1], lambda: {"a": 1}) == catalog.stages.once("s", [1], dict)


def test_a_server_that_is_down_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="start the server or correct the URL"):
        Catalog.open(tmp_path, url=f"postgresql+psycopg://postgres@/postgres?host={tmp_path}")
