"""The durable log of a sandbox, on its own."""

from __future__ import annotations

import os
import time
from datetime import date
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox.base import ExecResult, KeyReused, NetworkPolicy, Outcome, Repercussion, SandboxSpec
from sandbox.log import INLINE_BYTES, KEPT_BYTES, SandboxLog, decode, encode, prune
from sandbox.node import journal

IMAGE = "sha256:" + "1" * 64
RESULTS = st.builds(
    ExecResult,
    outcome=st.sampled_from(Outcome),
    exit_code=st.none() | st.integers(0, 255),
    stdout=st.binary(max_size=300),
    stderr=st.text(max_size=300).map(lambda text: text.encode(errors="replace")),
    stdout_total=st.integers(0, 1 << 40),
    stderr_total=st.integers(0, 1 << 40),
    duration_s=st.floats(0, 1e6),
    signal=st.none() | st.integers(1, 64),
    peak_memory=st.none() | st.integers(0, 1 << 40),
    repercussion=st.none() | st.sampled_from(Repercussion),
)
DONE = ExecResult(Outcome.EXITED, 0, b"out\xff", b"", 4, 0, 0.5)


@given(result=RESULTS)
def test_results_survive(result: ExecResult) -> None:
    assert decode(encode(result)) == result


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=3 * INLINE_BYTES))
def test_inputs_survive(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    log = SandboxLog.create(
        tmp_path_factory.mktemp("log"), SandboxSpec(image=IMAGE), "a1", backend="namespace"
    )
    log.start("write", {"path": "file"}, data=data)
    (entry,) = log.entries()
    assert log.data(entry) == data
    log.close()


def test_order_keys_and_ends_are_shared_between_clients(tmp_path: Path) -> None:
    spec = SandboxSpec(image=IMAGE, network=NetworkPolicy("allow", ("a.example:443",), date(2024, 5, 1)))
    one = SandboxLog.create(tmp_path, spec, "a1", backend="docker")
    two = SandboxLog(tmp_path, "a1")
    assert (two.spec, two.backend) == (spec, "docker")
    call = {"argv": ["ls"], "cwd": "/", "timeout": 5}
    first = one.start("exec", call, key="k")
    second = two.start("exec", {"argv": ["pwd"]})
    assert [entry.token for entry in one.entries()] == [first, second]
    found = two.recall("k", {**call, "timeout": 9}, None)
    assert found is not None
    assert found.result is None
    one.finish(first, DONE, sync=True)
    found = two.recall("k", call, None)
    assert found is not None
    assert found.result == DONE
    for other, data in (({**call, "cwd": "/tmp"}, None), (call, b"input")):
        with pytest.raises(KeyReused, match="names another command"):
            two.recall("k", other, data)
    assert two.recall("other", call, None) is None
    cancelled = one.start("exec", call, key="c")
    one.finish(cancelled, ExecResult(Outcome.CANCELLED, None, b"", b"", 0, 0, 0.1))
    assert two.recall("c", call, None) is None, "a cancelled command may run again"
    again = two.start("exec", call, key="c")
    two.finish(again, DONE)
    found = one.recall("c", call, None)
    assert found is not None
    assert found.token == again
    one.close()
    two.close()


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    log = SandboxLog.create(tmp_path, SandboxSpec(image=IMAGE), "a1", backend="namespace")
    token = log.start("exec", {"argv": ["a"]})
    os.write(log.fd, b'{"start": "torn", "op": "ex\n')
    log.finish(token, DONE)
    os.write(log.fd, b'{"start": "under way')
    assert [entry.result for entry in log.entries()] == [DONE]
    log.close()


def test_too_large_inputs_are_known_by_digest_only(tmp_path: Path) -> None:
    log = SandboxLog.create(tmp_path, SandboxSpec(image=IMAGE), "a1", backend="namespace")
    log.start("write", {"path": "big"}, data=b"x" * (KEPT_BYTES + 1))
    with pytest.raises(FileNotFoundError):
        log.data(log.entries()[0])
    log.close()


def test_prune_spares_the_living_and_the_young(tmp_path: Path) -> None:
    for id in ("old", "young", "living"):
        log = SandboxLog.create(tmp_path, SandboxSpec(image=IMAGE), id, backend="namespace")
        log.start("write", {"path": id}, data=id.encode() * INLINE_BYTES)
        log.close()
    long_ago = time.time() - 40 * 86400
    for path in [tmp_path / "logs/old.jsonl", tmp_path / "logs/living.jsonl"]:
        os.utime(path, (long_ago, long_ago))
    assert prune(tmp_path, spare=["living"]) == 1
    assert sorted(path.stem for path in (tmp_path / "logs").glob("*.jsonl")) == ["living", "young"]


def test_an_id_is_no_path(tmp_path: Path) -> None:
    for id in ("../a", "", ".hidden", "a/b"):
        with pytest.raises(ValueError, match="no sandbox id"):
            SandboxLog(tmp_path, id)


@given(data=st.binary(max_size=100))
def test_bytes_in_json(data: bytes) -> None:
    assert journal.unpack(journal.pack(data)) == data
