"""What this host can enforce, said plainly, and what to change where it cannot."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from sandbox.base import Capabilities
from sandbox.node import seccomp


def capabilities(hello: dict[str, Any]) -> Capabilities:
    """From the nodelet's report."""
    groups: dict[str, Any] = hello["groups"]
    missing: list[str] = []
    if not groups["memory"]:
        missing.append(
            f"memory of the whole sandbox (only RLIMIT_DATA per process): {groups['reasons'].get('memory')}"
        )
    if not groups["pids"]:
        missing.append(f"processes (only RLIMIT_NPROC of the agent): {groups['reasons'].get('pids')}")
    if not hello["user_namespace"]:
        missing.append(f"own user namespace: {hello['user_namespace_reason']}")
        missing.append("/proc/sys against root of a nested sandbox, who may unmount what protects it")
    elif hello["id_map"] is None:
        missing.append("root and agent inside are one host user: an unprivileged host user maps one id only")
    scheduling = bool(groups["cpu"]) or not hello["autogroups"]
    if not scheduling:
        missing.append(
            "the class batch beside other sessions, which the kernel gives equal shares"
            f" (kernel.sched_autogroup_enabled=1), and no idle group: {groups['reasons'].get('cpu')}"
        )
    if hello["core_scheduling"]:
        missing.append(f"own cores (core scheduling): {hello['core_scheduling']}")
    missing += ["CPU time and disk bandwidth: no limit", "AppArmor, SELinux and eBPF: no policy is applied"]
    return Capabilities(
        network_none=True,
        memory_limit=bool(groups["memory"]),
        pids_limit=bool(groups["pids"]),
        disk_limit=True,
        user_namespace=bool(hello["user_namespace"]),
        unenforced=tuple(missing),
        disk_limit_everywhere=True,
        seccomp=seccomp.PROGRAM is not None,
        read_only_system=True,
        pty=True,
        tags=True,
        attach=True,
        snapshot=True,
        fork=True,
        log=True,
        lease=True,
        nested=True,
        networks=("none", "allow", "host"),
        set_network=True,
        scheduling=scheduling,
        core_scheduling=not hello["core_scheduling"],
        numa_nodes=max(1, hello["numa_nodes"]),
    )


def explain(reply: dict[str, Any] | None) -> str:
    """One sentence for a creation that failed."""
    if reply is None:
        return "the sandbox died while it was being set up"
    text = str(reply["error"])
    number = reply.get("errno")
    if "overlay" in text and number in (errno.ENODEV, errno.EPERM):
        return (
            f"this kernel has no overlay mounts for us ({text}); load the module `overlay` or use Linux 5.11+"
        )
    if number in (errno.EMFILE, errno.ENFILE):
        return f"too many open files ({text}); raise `ulimit -n`"
    if number == errno.ENOSPC:
        limit = "a kernel limit on namespaces or control groups is reached"
        return f"{limit} ({text}); close sandboxes or raise the sysctls user.max_*_namespaces"
    return f"cannot set up a sandbox here: {text}"


def start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; with the pid it names a process for good."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def is_running(pid: int, started: int | None) -> bool:
    """Whether the process of that pid and start still lives (where there is no /proc: any of that pid)."""
    if started is not None:
        return start_time(pid) == started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
