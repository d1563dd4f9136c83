"""`exec(key=)`: a command that runs once, whatever becomes of its client.

The log knows what finished, the sandbox's init what runs; between them no command of a key starts twice.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

from sandbox.base import ExecResult, Outcome, Repercussion, SandboxError
from sandbox.namespace.channel import Channel
from sandbox.node import verdicts

if TYPE_CHECKING:
    from sandbox.namespace.connection import Connection

GRACE_SECONDS = 15.0
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


async def run(
    box: Connection, key: str, call: dict[str, Any], request: dict[str, Any], data: bytes | None
) -> ExecResult:
    """The result of the command of that key: recorded, of the run under way, or of a new run."""
    known = box.log.recall(key, call, data)
    if known is not None and known.result is not None:
        return dataclasses.replace(known.result, replayed=True)
    token = box.log.start("exec", call, key=key, data=data)
    message = {**request, "held": "keyed", "name": f"key:{key}", "token": token}
    while True:
        reply = await _ask(box, message, data)
        if reply is not None and "gone" in reply:
            known = box.log.recall(key, call, data)
            if known is not None and known.result is not None:
                box.log.finish(token, known.result)
                return dataclasses.replace(known.result, replayed=True)
            if not reply["known"]:  # the one before was cancelled and is about to leave
                await asyncio.sleep(0.01)
                continue
            reply = None
        if reply is not None and "failed" in reply:
            raise SandboxError(
                f"the command of key {key!r} ended, but its log cannot grow: {reply['failed']}"
            )
        if reply is None or "error" in reply:
            result = await _without_record(box, request, reply)
            box.log.finish(token, result, sync=True)
            return result
        result = box.log.result(reply["done"])
        assert result is not None, "a monitor reported a result that is not in the log"
        if reply["done"] != token:
            box.log.finish(token, result)
        return dataclasses.replace(result, replayed=reply["done"] != token)


async def _ask(box: Connection, message: dict[str, Any], data: bytes | None) -> dict[str, Any] | None:
    """Start or join the command; the answer at its end, None if its monitor or the sandbox died."""
    ours, theirs = socket.socketpair()
    status = Channel(ours)
    stdin = os.open("/dev/null", os.O_RDONLY) if data is None else _file_of(data)
    try:
        try:
            await box.send(message, [theirs.fileno(), stdin, box.log.fd])
        finally:
            theirs.close()
            os.close(stdin)
        timeout: float | None = message["timeout"]
        try:
            async with asyncio.timeout(None if timeout is None else timeout + GRACE_SECONDS):
                return await status.receive()
        except TimeoutError:
            await box.abandon()
            return None
        except asyncio.CancelledError:
            await _kill(status)
            raise
    finally:
        status.close()


async def _kill(status: Channel) -> None:
    """Have the command killed, and wait until that is recorded."""
    try:
        await status.send({"kill": True})
        async with asyncio.timeout(GRACE_SECONDS):
            await status.receive()
    except (OSError, TimeoutError):
        return


def _file_of(data: bytes) -> int:
    """A sealed file in memory: the command's whole input, also when its client is killed meanwhile."""
    fd = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


async def _without_record(
    box: Connection, request: dict[str, Any], reply: dict[str, Any] | None
) -> ExecResult:
    """The result of a command that could not start, or whose monitor was killed."""
    fate: Repercussion | None = None
    code: int | None = None
    number: int | None = None
    if reply is not None:
        word, code, number = verdicts.classify(reply)
        outcome, fate = Outcome(word), Repercussion(reply["repercussion"])
    elif not box.connected:
        outcome, fate = Outcome.LOST, await box.fate()
    else:
        may_kill = request["user"] == "root" or box.single_id
        outcome, number = Outcome.SIGNALED if may_kill else Outcome.OOM, signal.SIGKILL
    return ExecResult(outcome, code, b"", b"", 0, 0, 0.0, signal=number, repercussion=fate)
