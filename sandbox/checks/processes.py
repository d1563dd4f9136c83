"""Processes of a sandbox, read from /proc: minimal systems have no `ps`."""

from __future__ import annotations

from sandbox.base import Sandbox

_ARGUMENTS = "for d in /proc/[0-9]*; do tr '\\0' ' ' < $d/cmdline 2>/dev/null && echo; done"
_STATES = "grep -h '^State:' /proc/[0-9]*/status 2>/dev/null"


async def processes(box: Sandbox, *, user: str | None = None) -> list[str]:
    """Command line of every process that `user` sees, the one that looks included."""
    listing = await box.exec(_ARGUMENTS, user=user)
    assert listing.stdout, listing.text
    return [line.strip() for line in listing.stdout.decode(errors="replace").splitlines()]


async def running(box: Sandbox, command: str) -> int:
    """How many processes have exactly this command line."""
    return (await processes(box)).count(command)


async def zombies(box: Sandbox) -> int:
    """How many processes have ended and were not waited for."""
    listing = await box.exec(_STATES)
    assert listing.stdout, listing.text
    return listing.stdout.count(b"Z (zombie)")
