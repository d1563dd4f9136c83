"""`posttrain sandbox run`: one command in a fresh sandbox of any image."""

from __future__ import annotations

import asyncio
import sys
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from console.errors import FAULT
from console.session import InSession, clean

if TYPE_CHECKING:
    from sandbox.base import ExecResult, SandboxSpec


def run(
    image: str,
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    allow: tuple[str, ...] = (),
    index_before: str | None = None,
    index_without: tuple[str, ...] = (),
    trust: tuple[str, ...] = (),
    workspace: Path | None = None,
    backend: str = "namespace",
    timeout: float = 600,
    memory_mb: int = 1024,
    disk_mb: int = 512,
    session: InSession,
) -> int:
    """Run one command in a fresh sandbox; ends with the command's exit code.

    Parameters
    ----------
    image
        Name or digest of an image, or `host`.
    command
        Words of the command, after `--`.
    allow
        NAME:PORT or *.NAME:PORT that it may reach, through the proxy; nothing otherwise.
    index_before
        Offer a package index as it was before this day (2024-05-01).
    index_without
        A package that this index does not have.
    trust
        A private network (CIDR) where allowed names may lie.
    workspace
        A folder whose copy becomes /workspace.
    backend
        namespace, docker or kubernetes.
    timeout
        Seconds.
    memory_mb
        Memory limit.
    disk_mb
        Limit of what it writes.
    """
    from sandbox.base import NetworkPolicy, SandboxSpec
    from sandbox.images import ImageStore

    if not command:
        raise ValueError("name a command after the image: posttrain sandbox run IMAGE -- COMMAND")
    try:
        day = date.fromisoformat(index_before) if index_before else None
    except ValueError:
        raise ValueError(f"--index-before takes a day as 2024-05-01, not {index_before!r}") from None
    wanted = bool(allow or day or index_without)
    policy = NetworkPolicy("allow", allow, day, index_without) if wanted else NetworkPolicy()
    store = ImageStore(session.store())
    digest = store.host_base() if image == "host" else store.resolve(image)
    if workspace is not None:
        digest = store.add_layer(digest, workspace, at="/workspace")
    spec = SandboxSpec(image=digest, owner="run", network=policy, memory_mb=memory_mb, disk_mb=disk_mb)
    settings = {"trusted_networks": trust} if trust else {}
    result, refused = asyncio.run(_run(backend, store.root, settings, spec, command, timeout))
    code = result.exit_code if result.exit_code is not None else FAULT

    def show() -> None:
        sys.stdout.write(result.stdout.decode(errors="replace"))
        sys.stderr.write(result.stderr.decode(errors="replace"))
        for line in refused:
            print(f"refused: {clean(line)}", file=sys.stderr)
        if result.exit_code is None:
            print(f"It ended as {result.outcome.value} after {result.duration_s:.1f} s.", file=sys.stderr)

    value = {"outcome": result.outcome.value, "exit_code": result.exit_code, "refused": refused}
    value |= {
        "stdout": result.stdout.decode(errors="replace"),
        "stderr": result.stderr.decode(errors="replace"),
    }
    session.emit(value, show)
    return code


async def _run(
    backend: str,
    store: Path,
    settings: dict[str, Any],
    spec: SandboxSpec,
    command: tuple[str, ...],
    timeout: float,
) -> tuple[ExecResult, list[str]]:
    from sandbox.base import provider

    sandboxes = provider(backend, store=store, **settings)
    try:
        async with await sandboxes.create(spec) as box:
            result = await box.exec(list(command), timeout=timeout)
            attempts = getattr(box, "attempts", [])
            return result, [f"{each.target}: {each.reason}" for each in attempts if each.reason]
    finally:
        await sandboxes.close()
