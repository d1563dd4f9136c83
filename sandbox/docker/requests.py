"""What the engine and init are asked for, what they can do, and whether they did it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from sandbox import hostbase
from sandbox.base import Capabilities, PolicyUnsupported, SandboxSpec
from sandbox.docker import runtime
from sandbox.images import ImageManifest
from sandbox.namespace import buildnet, gate
from sandbox.node.contained import PLACE

LABEL = "posttrain"
MEMORY_FLOOR = 32
"""MiB, of which init takes about ten."""
_RIGHTS = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
           "SYS_ADMIN", "SYS_CHROOT")  # fmt: skip
"""Of PID 1 while it builds the root. It keeps the first eight, commands of root seven, the agent none."""
_NESTED_RIGHTS = (*_RIGHTS, "NET_ADMIN", "SETFCAP")


def check(spec: SandboxSpec, capabilities: Capabilities) -> None:
    """PolicyUnsupported for what cannot be enforced."""
    gate.check(spec.policy)
    spec.check_scheduling()
    if spec.nested and not capabilities.nested:
        raise PolicyUnsupported(
            "nested sandboxes need an engine with userns-remap: root inside would be root of this host"
        )
    for name in ("memory_mb", "pids", "disk_mb"):
        if getattr(spec, name) < 1:
            raise PolicyUnsupported(f"{name} must be at least 1, not {getattr(spec, name)}")
    if spec.memory_mb < MEMORY_FLOOR:
        raise PolicyUnsupported(f"memory_mb must be at least {MEMORY_FLOOR} for docker, not {spec.memory_mb}")
    if not spec.workdir.startswith("/"):
        raise PolicyUnsupported(f"workdir must be absolute, not {spec.workdir!r}")


def for_init(spec: SandboxSpec, manifest: ImageManifest) -> tuple[dict[str, Any], dict[str, str]]:
    """What init shall build, and the host folders that the container must show for it (path -> place)."""
    run_binds, etc_binds, network_env = buildnet.passage(spec.policy.mode)
    mounts = dict(runtime.mounts())
    mounts.update({source: runtime.inside(source) for source, _ in (*run_binds, *etc_binds)})
    system = hostbase.binds() if manifest.base == "host" else []
    request: dict[str, Any] = {
        "scratch": f"{PLACE}/scratch",
        "layers_dir": "/",
        "layers": [],
        "base": ".",
        "binds": [(runtime.inside(source), target) for source, target in system],
        "run_binds": [(runtime.inside(source), name) for source, name in run_binds],
        "etc_binds": [(runtime.inside(source), target) for source, target in etc_binds],
        "workdir": spec.workdir,
        "network": "host" if spec.policy.mode == "host" else "none",
        "nested": spec.nested,
        "single_id": False,
        "disk_bytes": spec.disk_mb << 20,
        "inodes": max(4096, spec.disk_mb * 256),
        "rlimits": {"RLIMIT_NOFILE": 4096},
        "lease_s": spec.lease_s,
        "scheduling": spec.scheduling,
        "handle": {"environment": {**manifest.env, **network_env, **spec.env}},
    }
    return request, mounts


def for_engine(
    api: Any, id: str, name: str, spec: SandboxSpec, mounts: Mapping[str, str], store: str, *, apparmor: bool
) -> dict[str, Any]:
    """Arguments of the SDK's `create_container`, but for the image."""
    memory = spec.memory_mb << 20
    quiet = spec.policy.mode != "host"
    security = ["no-new-privileges"]
    if apparmor:
        security.append("apparmor=unconfined")
    if spec.nested:
        security.append("seccomp=unconfined")  # our own filter still holds for the agent
    host: dict[str, Any] = api.create_host_config(
        network_mode="none" if quiet else "host",
        mem_limit=memory,
        memswap_limit=memory,
        pids_limit=spec.pids + 1,  # init does not count
        cap_drop=["ALL"],
        cap_add=list(_NESTED_RIGHTS if spec.nested else _RIGHTS),
        security_opt=security,
        read_only=True,
        tmpfs={f"{PLACE}/scratch": "size=64k,mode=755"},
        ipc_mode="none",
        log_config={"Type": "json-file", "Config": {"max-size": "64k", "max-file": "1"}},
    )
    if spec.scheduling == "batch":
        host["CpuShares"] = 2  # of which others have 1024
    host |= {
        "Mounts": [
            {"Type": "bind", "Source": source, "Target": target, "ReadOnly": True}
            for source, target in mounts.items()
        ],
        # Not in the SDK: our init masks /proc itself, and more of it; its group is shown as the root.
        "MaskedPaths": [],
        "ReadonlyPaths": [],
        "CgroupnsMode": "private",
    }
    if not quiet:
        host["UsernsMode"] = "host"  # engines refuse the host's network to remapped users
    if spec.runtime:
        host["Runtime"] = spec.runtime
    return {
        "name": name,
        "entrypoint": list(runtime.command()),
        "command": [],
        "user": "0:0",
        "working_dir": "/",
        "hostname": "sandbox",
        "environment": ["PATH=/usr/bin", "LC_ALL=C.UTF-8"],
        "network_disabled": quiet,  # saves the engine a hook; the network namespace is the container's own
        "host_config": host,
        "labels": {
            f"{LABEL}.id": id,
            f"{LABEL}.owner": spec.owner,
            f"{LABEL}.image": spec.image,
            f"{LABEL}.store": store,
            f"{LABEL}.created": repr(time.time()),
            f"{LABEL}.lease": "" if spec.lease_s is None else repr(spec.lease_s),
        },
    }


def verify(spec: SandboxSpec, facts: Mapping[str, Any], *, remapped: bool) -> None:
    """PolicyUnsupported unless what is in force is what was asked for. `facts` are init's own findings."""
    for name, wanted in (("memory", spec.memory_mb << 20), ("pids", spec.pids + 1)):
        value: str = facts["limits"].get(name, "none")
        if not value.isdigit() or int(value) > wanted:
            raise PolicyUnsupported(f"the engine did not limit {name}: asked {wanted}, in force {value}")
    wanted_own = ["pid", "mnt"]
    if spec.policy.mode != "host":
        wanted_own += ["net", *(["user"] if remapped else [])]
    for kind in wanted_own:
        if facts["namespaces"][kind] == os.readlink(f"/proc/self/ns/{kind}"):
            raise PolicyUnsupported(f"the engine gave the container no {kind} namespace of its own")


def capabilities(info: Mapping[str, Any]) -> Capabilities:
    """From what the engine says of itself."""
    options: list[str] = info["SecurityOptions"]
    remapped = any("name=userns" in option for option in options)
    missing: list[str] = []
    if not remapped:
        missing.append("own user namespace: the engine runs without userns-remap")
    if any("name=apparmor" in option for option in options):
        missing.append("AppArmor's docker-default: it forbids the mounts by which the disk is limited")
    if not any("name=seccomp" in option for option in options):
        missing.append("the engine's seccomp profile: it has none; only our own filter holds")
    for name, what in (("MemoryLimit", "memory"), ("PidsLimit", "processes")):
        if not info.get(name):
            missing.append(f"{what}: the engine finds no such control group on this host")
    if not info.get("CPUShares"):
        missing.append("the class batch: the engine finds no cpu control group on this host")
    missing.append("own cores and memory nodes: the engine's --cpuset-cpus is left to its operator")
    return Capabilities(
        network_none=True,
        memory_limit=bool(info.get("MemoryLimit")),
        pids_limit=bool(info.get("PidsLimit")),
        disk_limit=True,
        user_namespace=remapped,
        unenforced=tuple(missing),
        disk_limit_everywhere=True,
        seccomp=True,
        read_only_system=True,
        pty=True,
        tags=True,
        attach=True,
        snapshot=True,
        fork=True,
        log=True,
        lease=True,
        nested=remapped,
        networks=("none", "allow", "host"),
        set_network=True,
        scheduling=bool(info.get("CPUShares")),
    )
