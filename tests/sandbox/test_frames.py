"""What both ends of a link rely on, without a pod: frames, their ledger, and descriptors over them."""

from __future__ import annotations

import contextlib
import os
import select
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.node import frames, mux
from sandbox.node.frames import Frame, Kind, Ledger, LinkBroken, Parser
from sandbox.node.sessions import PollReactor

CHUNKS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def chop(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    while data:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[:size])
        data = data[size:]
    return pieces


@given(st.lists(st.binary(max_size=60), max_size=8), CHUNKS)
def test_frames_survive_any_chopping(payloads: list[bytes], sizes: list[int]) -> None:
    ledger, parser = Ledger(), Parser()
    data = b"".join(ledger.encode(Kind.DATA, 7, payload) for payload in payloads)
    found = [frame for piece in chop(data, sizes) for frame in parser.feed(piece)]
    assert [(frame.stream, frame.payload) for frame in found] == [(7, payload) for payload in payloads]
    assert [frame.number for frame in found] == list(range(1, len(payloads) + 1))


@given(st.binary(min_size=1, max_size=40), st.data())
def test_a_damaged_byte_is_noticed(payload: bytes, data: st.DataObject) -> None:
    frame = bytearray(Ledger().encode(Kind.DATA, 1, payload))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    try:
        found = list(Parser().feed(bytes(frame)))
    except LinkBroken:
        return
    assert found == [], "a damaged frame was accepted"  # its length grew: it waits for bytes that never come


@settings(max_examples=60)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=6), st.integers(1, 12))
def test_any_cuts_deliver_each_frame_once_in_order(cuts: list[int], count: int) -> None:
    sender, receiver = Ledger(), Ledger()
    wire = b"".join(sender.encode(Kind.DATA, 1, f"frame {i}".encode()) for i in range(count))
    got: list[bytes] = []
    for cut in [*cuts, 1 << 20]:
        parser = Parser()
        got += [frame.payload for frame in parser.feed(wire[:cut]) if receiver.accept(frame)]
        wire = sender.replay(receiver.received)
    assert got == [f"frame {i}".encode() for i in range(count)]
    assert sender.replay(receiver.received) == b""
    assert sender.heard == count


def test_a_missing_frame_breaks_the_connection() -> None:
    sender, receiver = Ledger(), Ledger()
    first, second, third = (sender.encode(Kind.DATA, 1, text) for text in (b"1", b"2", b"3"))
    (one,) = Parser().feed(first)
    (last,) = Parser().feed(third)
    assert receiver.accept(one)
    assert not receiver.accept(one), "a repetition is no news"
    with pytest.raises(LinkBroken, match="frame 2 is missing"):
        receiver.accept(last)
    assert second in sender.replay(1)


def test_a_request_is_acknowledged_at_once() -> None:
    sender, receiver = Ledger(), Ledger()
    (frame,) = Parser().feed(sender.encode(Kind.REQUEST, 0, b"{}"))
    assert receiver.accept(frame)
    assert receiver.owes()
    receiver.encode(Kind.ACK)
    assert not receiver.owes()


class Pair:
    """Two muxes joined by memory, and one poll loop for both."""

    def __init__(self) -> None:
        self.reactor = PollReactor()
        self.queues: tuple[list[bytes], list[bytes]] = ([], [])
        self.ends = [
            mux.Mux(Ledger(), self.reactor, self.queues[side].append) for side in (0, 1)
        ]  # emits of side 0 go to side 1 and the other way round

    def turn(self) -> None:
        """Everything that is ready, once."""
        for fd, events in self.reactor.poll.poll(0):
            for end in self.ends:
                if fd in end.descriptors:
                    if events & select.POLLOUT:
                        end.writable(fd)
                    if events & ~select.POLLOUT and end.reading(fd):
                        end.readable(fd)
        for side in (0, 1):
            sent, self.queues[side][:] = list(self.queues[side]), []
            for frame in (frame for data in sent for frame in Parser().feed(data)):
                self.ends[1 - side].frame(frame)


def test_a_stalled_reader_holds_up_nobody_else() -> None:
    pair = Pair()
    (slow_r, slow_w), (fast_r, fast_w) = os.pipe(), os.pipe()
    (slow_out_r, slow_out_w), (fast_out_r, fast_out_w) = os.pipe(), os.pipe()
    for id, fd in ((1, slow_r), (2, fast_r)):
        pair.ends[0].add(id, fd, "read")
    for id, fd in ((1, slow_out_w), (2, fast_out_w)):
        pair.ends[1].add(id, fd, "write")
    for fd in (slow_w, fast_w):
        os.set_blocking(fd, False)
    written = received = 0
    for _ in range(400):  # nobody reads slow_out_r
        for fd in (slow_w, fast_w):
            with contextlib.suppress(BlockingIOError):
                written += os.write(fd, b"x" * 60_000) * (fd == slow_w)
        pair.turn()
        received += len(os.read(fast_out_r, 1 << 20)) if select.select([fast_out_r], [], [], 0)[0] else 0
    assert received > 2_000_000
    assert written < mux.WINDOW + 400_000, "more than the window was taken for a reader that stalls"
    for end in pair.ends:
        end.close()
    for fd in (slow_w, fast_w, slow_out_r, fast_out_r):
        os.close(fd)


def test_output_comes_before_the_report() -> None:
    pair = Pair()
    ours, report = socket.socketpair()
    out_r, out_w = os.pipe()
    frames_seen: list[Frame] = []
    pair.ends[1].frame = frames_seen.append  # type: ignore[method-assign]
    status = pair.ends[0].add(1, report.detach(), "both")
    output = pair.ends[0].add(2, out_r, "read")
    pair.ends[0].order(status, [output])
    os.set_blocking(out_w, False)
    total = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            total += os.write(out_w, b"z" * 4096)
    assert total > 4096
    ours.send(b"the end")
    for _ in range(20):
        pair.turn()
    data = [frame for frame in frames_seen if frame.kind is Kind.DATA]
    assert [frame.stream for frame in data][-1] == 1
    assert sum(len(frame.payload) for frame in data if frame.stream == 2) == total
    pair.ends[0].close()
    ours.close()
    os.close(out_w)


def test_kinds_of_descriptors() -> None:
    read_end, write_end = os.pipe()
    a, b = socket.socketpair()
    null = os.open("/dev/null", os.O_RDONLY)
    file = os.memfd_create("x")
    log = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_APPEND)
    found = [mux.kind_of(fd) for fd in (read_end, write_end, a.fileno(), null, file, log)]
    assert found == ["read", "write", "both", "null", "file", "log"]
    for fd in (read_end, write_end, null, file, log):
        os.close(fd)
    a.close()
    b.close()


def test_what_a_reader_no_longer_takes_is_a_broken_pipe_for_the_writer() -> None:
    pair = Pair()
    (source_r, source_w), (sink_r, sink_w) = os.pipe(), os.pipe()
    pair.ends[0].add(1, source_r, "read")
    pair.ends[1].add(1, sink_w, "write")
    os.close(sink_r)
    os.write(source_w, b"x")
    for _ in range(5):
        pair.turn()
    with pytest.raises(BrokenPipeError):
        os.write(source_w, b"x")
    os.close(source_w)
    assert frames.MAX_PAYLOAD > mux.CHUNK
