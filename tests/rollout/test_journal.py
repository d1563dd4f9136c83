"""Journals and the trajectory log: what a crash leaves is read back, torn ends are cut off."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catalog.trajectory import Trajectory
from rollout.journal import Journal, JournalError, TrajectoryLog, decode_lines, encode_line

VALUES = st.dictionaries(
    st.text(max_size=8), st.integers() | st.text(max_size=20) | st.floats(allow_nan=False), max_size=4
)


@settings(max_examples=60, deadline=None)
@given(st.lists(VALUES, max_size=6), st.data())
def test_any_cut_leaves_the_whole_lines_before_it(values, data):
    lines = [encode_line(value) for value in values]
    whole = b"".join(lines)
    cut = data.draw(st.integers(0, len(whole)))
    read, intact = decode_lines(whole[:cut])
    assert read == values[: len(read)]
    assert intact == sum(map(len, lines[: len(read)]))
    assert len(read) == sum(1 for n in range(1, len(lines) + 1) if sum(map(len, lines[:n])) <= cut)


@settings(max_examples=60, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=4), st.data())
def test_a_flipped_bit_ends_the_journal_there(values, data):
    whole = bytearray(b"".join(map(encode_line, values)))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= 1 << data.draw(st.integers(0, 7))
    read, _ = decode_lines(bytes(whole))
    assert len(read) < len(values)
    assert read == values[: len(read)]


@pytest.mark.parametrize("sync", ["never", "turn", "token"])
def test_a_torn_tail_is_replaced_by_what_comes_next(tmp_path, sync):
    path = tmp_path / "a" / "s.jsonl"
    journal = Journal(path, {"id": "s"}, sync=sync)
    journal.append({"token": 1})
    journal.append({"token": 2, "logprob": -0.1234567890123456}, turn=True)
    journal.close()
    journal.close()
    path.write_bytes(path.read_bytes()[:-9])
    again = Journal(path, {"id": "s"}, sync=sync)
    assert again.entries == [{"token": 1}]
    again.append({"token": 3})
    again.close()
    assert Journal(path, {"id": "s"}).entries == [{"token": 1}, {"token": 3}]


def test_a_journal_of_another_sample_or_format_is_refused(tmp_path):
    Journal(tmp_path / "j", {"id": "s", "seed": 1}).close()
    with pytest.raises(JournalError, match="another run folder"):
        Journal(tmp_path / "j", {"id": "s", "seed": 2})


def test_a_journal_torn_in_its_first_line_starts_over(tmp_path):
    (tmp_path / "j").write_bytes(b"0badc0de {")
    journal = Journal(tmp_path / "j", {"id": "s"})
    assert journal.entries == []
    journal.close()
    assert Journal(tmp_path / "j", {"id": "s"}).entries == []


def trajectory(id):
    return Trajectory(id=id, task_id="t", run_id="r", agent="a", policy="p")


def test_each_trajectory_is_written_once_and_read_back(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    log = TrajectoryLog(path)
    assert log.append(trajectory("a"))
    assert log.append(trajectory("b"))
    assert not log.append(trajectory("a"))
    assert [t.id for t in log] == ["a", "b"]
    log.close()
    path.write_bytes(path.read_bytes() + b'{"id": "c", "task')
    again = TrajectoryLog(path)
    assert "c" not in again
    assert len(again) == 2
    assert again.append(trajectory("c"))
    assert again["c"] == trajectory("c")
    again.close()
    assert len(path.read_bytes().splitlines()) == 3
