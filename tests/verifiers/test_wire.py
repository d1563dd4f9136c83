"""Frames and their folding, as pure functions."""

from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.harness.folding import CALL, FAILED, PASSED, SETUP, SKIPPED, SUBTEST, TEARDOWN, XFAIL, Fold
from verifiers.harness.wire import Frame, Kind, Receiver, sender

KEY = b"k" * 32
messages = st.tuples(
    st.integers(0, 255), st.integers(0, 2**32 - 1), st.integers(0, 255), st.binary(max_size=300)
)


def sent(frames: list[tuple[int, int, int, bytes]], key: bytes = KEY) -> bytes:
    """The bytes that a sender writes."""
    read_end, write_end = os.pipe()
    try:
        send = sender(write_end, key)
        for frame in frames:
            send(*frame)
        os.close(write_end)
        data = b""
        while block := os.read(read_end, 1 << 16):
            data += block
        return data
    finally:
        os.close(read_end)


@given(st.lists(messages, max_size=20), st.integers(1, 40))
def test_what_is_sent_arrives_however_it_is_cut(frames, step):
    receiver, got = Receiver(KEY), []
    data = sent(frames)
    for start in range(0, len(data), step):
        got += receiver.feed(data[start : start + step])
    assert [(f.kind, f.index, f.flag, f.payload) for f in got] == frames
    assert (receiver.forged, receiver.pending) == (False, False)


@given(st.lists(messages, min_size=1, max_size=5), st.data())
def test_any_changed_byte_is_noticed(frames, data):
    stream = bytearray(sent(frames))
    place = data.draw(st.integers(0, len(stream) - 1))
    stream[place] ^= data.draw(st.integers(1, 255))
    receiver = Receiver(KEY)
    got = receiver.feed(bytes(stream))
    assert len(got) < len(frames)
    assert receiver.forged or receiver.pending


@given(st.binary(min_size=4, max_size=200), st.lists(messages, max_size=3))
def test_foreign_bytes_end_the_conversation(junk, frames):
    receiver = Receiver(KEY)
    first = receiver.feed(sent(frames))
    assert len(first) == len(frames)
    receiver.feed(junk)
    later = receiver.feed(sent(frames))
    assert later == []


def test_repeated_and_foreign_frames_do_not_verify():
    data = sent([(1, 0, 0, b"a")])
    receiver = Receiver(KEY)
    assert len(receiver.feed(data)) == 1
    assert receiver.feed(data) == []
    assert receiver.forged
    other = Receiver(b"x" * 32)
    assert other.feed(data) == []
    assert other.forged


def test_long_texts_are_cut():
    """A frame is never longer than a receiver takes."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, True)
    receiver, got = Receiver(KEY), []

    def drain() -> None:
        while block := os.read(read_end, 1 << 16):
            got.extend(receiver.feed(block))

    reader = threading.Thread(target=drain)
    reader.start()
    sender(write_end, KEY)(Kind.NOTE, 0, 0, b"x" * (2 << 20))
    os.close(write_end)
    reader.join()
    os.close(read_end)
    assert not receiver.forged
    assert 1 << 19 < len(got[0].payload) < 1 << 20


def fold(*frames: Frame) -> Fold:
    folded = Fold()
    for frame in frames:
        folded.take(frame)
    return folded


def collected(*names: str, function: int = 1) -> list[Frame]:
    frames = [Frame(Kind.COLLECTED, i, function, name.encode()) for i, name in enumerate(names)]
    return [*frames, Frame(Kind.READY, len(names), 0, b"")]


def phase(index: int, which: int, outcome: int, extra: int = 0, text: bytes = b"") -> Frame:
    return Frame(Kind.PHASE, index, which + 4 * outcome + extra, text)


def passing(index: int) -> list[Frame]:
    return [
        phase(index, SETUP, PASSED),
        Frame(Kind.RETURNED, index, 0, b""),
        phase(index, CALL, PASSED),
        phase(index, TEARDOWN, PASSED),
    ]


END = Frame(Kind.END, 0, 0, b"")


def test_an_honest_run():
    folded = fold(*collected("a", "b"), *passing(0), *passing(1), END)
    result = folded.result()
    assert result["tests"] == {"a": "passed", "b": "passed"}
    assert (result["tampered"], folded.finished) == ([], True)


@pytest.mark.parametrize(
    ("frames", "status"),
    [
        ([], None),
        ([phase(0, SETUP, FAILED)], "error"),
        ([phase(0, SETUP, SKIPPED)], "skipped"),
        ([phase(0, SETUP, SKIPPED, XFAIL)], "xfailed"),
        ([phase(0, SETUP, PASSED)], "error"),
        ([phase(0, SETUP, PASSED), phase(0, CALL, FAILED), phase(0, TEARDOWN, PASSED)], "failed"),
        ([phase(0, SETUP, PASSED), phase(0, CALL, SKIPPED), phase(0, TEARDOWN, PASSED)], "skipped"),
        ([phase(0, SETUP, PASSED), phase(0, CALL, SKIPPED, XFAIL), phase(0, TEARDOWN, PASSED)], "xfailed"),
        (passing(0)[:3], "error"),
        ([*passing(0)[:3], phase(0, TEARDOWN, FAILED)], "error"),
        ([*passing(0)[:2], phase(0, CALL, FAILED, SUBTEST), *passing(0)[2:]], "failed"),
        ([*passing(0)[:2], phase(0, CALL, PASSED, XFAIL), passing(0)[3]], "xpassed"),
    ],
)
def test_phases_become_one_status(frames, status):
    result = fold(*collected("a"), *frames, END).result()
    assert result["tests"] == ({} if status is None else {"a": status})
    assert result["tampered"] == []


@pytest.mark.parametrize(
    "frames",
    [
        [*collected("a"), phase(0, SETUP, PASSED), phase(0, CALL, PASSED)],
        [*collected("a"), *passing(0), *passing(0)],
        [*collected("a"), *passing(1)],
        [*collected("a"), *collected("a")],
        [*passing(0)],
        [*collected("a"), Frame(Kind.RETURNED, 0, 0, b"")],
        [*collected("a"), END, *passing(0)],
        [Frame(99, 0, 0, b"")],
        [Frame(Kind.PATCHED, 0, 0, b"pytest.raises")],
        [Frame(Kind.COLLECTED, 3, 0, b"a")],
    ],
)
def test_what_cannot_be_is_tampering(frames):
    assert fold(*frames).tampered


def test_what_was_reported_first_stays():
    frames = [*collected("a"), phase(0, SETUP, PASSED), phase(0, CALL, FAILED), phase(0, TEARDOWN, PASSED)]
    assert fold(*frames, *passing(0), END).result()["tests"] == {"a": "failed"}


def test_tests_without_a_function_pass_by_their_phases():
    frames = [phase(0, SETUP, PASSED), phase(0, CALL, PASSED), phase(0, TEARDOWN, PASSED)]
    result = fold(*collected("doc", function=0), *frames, END).result()
    assert (result["tests"], result["tampered"]) == ({"doc": "passed"}, [])


def test_equal_ids_are_numbered_and_addresses_leave_messages():
    folded = fold(*collected("a", "a", "a"), phase(2, SETUP, FAILED, 0, b"<f at 0x7f00deadbeef>"))
    assert [item.id for item in folded.items] == ["a", "a#2", "a#3"]
    assert folded.result()["messages"] == {"a#3": "<f at 0x...>"}


frames = st.lists(
    st.builds(Frame, st.integers(0, 12), st.integers(0, 4), st.integers(0, 70), st.binary(max_size=6)),
    max_size=30,
)


@given(frames)
def test_any_frames_fold(some):
    """No sequence raises, and nothing passes without setup, call, return and teardown."""
    folded = fold(*some)
    result = folded.result()
    assert set(result["tests"].values()) <= {"passed", "failed", "error", "skipped", "xfailed", "xpassed"}
    for item in folded.items:
        if item.status() == "passed":
            assert [item.phases.get(p, 9) & 3 for p in (SETUP, CALL, TEARDOWN)] == [PASSED] * 3
            assert item.returned or not item.has_function
