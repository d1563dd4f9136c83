"""What a command may do: uid, capabilities, no_new_privs, seccomp."""

from __future__ import annotations

import os
from typing import Any

from sandbox.node import seccomp
from sandbox.node import syscalls as sc

AGENT = 1000
ROOT_CAPABILITIES = (
    1 << sc.CAP_CHOWN | 1 << sc.CAP_DAC_OVERRIDE | 1 << sc.CAP_FOWNER | 1 << sc.CAP_FSETID
    | 1 << sc.CAP_KILL | 1 << sc.CAP_SETGID | 1 << sc.CAP_SETUID
    | 1 << sc.CAP_SETPCAP  # so that a helper of ours inside can take everything away from an agent
)  # fmt: skip
NESTED_CAPABILITIES = (
    ROOT_CAPABILITIES | 1 << sc.CAP_SYS_ADMIN | 1 << sc.CAP_SYS_CHROOT | 1 << sc.CAP_NET_ADMIN
    | 1 << sc.CAP_SETFCAP  # Linux asks for it where a jail maps the only user to the agent
)  # fmt: skip


def bound(spec: dict[str, Any]) -> None:
    """Called once by init: no command of this sandbox can have more than this."""
    sc.bound_capabilities(NESTED_CAPABILITIES if spec["nested"] else ROOT_CAPABILITIES)


def drop(spec: dict[str, Any], user: str) -> None:
    """Leave init's rights for those of `user` ("agent" or "root")."""
    sc.prctl(sc.PR_SET_NO_NEW_PRIVS, 1)
    if spec.get("one_user"):
        pass  # a pod without root: we are the agent already
    elif user == "root":
        sc.set_capabilities(NESTED_CAPABILITIES if spec["nested"] else ROOT_CAPABILITIES)
    else:
        if spec["single_id"]:
            _single_agent()
        else:
            sc.bound_capabilities(0, of=NESTED_CAPABILITIES)
            os.setgroups([])
            os.setresgid(AGENT, AGENT, AGENT)
            os.setresuid(AGENT, AGENT, AGENT)
        sc.prctl(sc.PR_CAP_AMBIENT, sc.PR_CAP_AMBIENT_CLEAR_ALL)
        sc.set_capabilities(0)
    program = seccomp.NESTED_PROGRAM if user == "root" and spec["nested"] else seccomp.PROGRAM
    if program is not None:
        sc.seccomp(program)


def _single_agent() -> None:
    """Only one id is mapped: the agent is the same user in a user namespace of its own, without rights."""
    sc.unshare(sc.CLONE_NEWUSER)
    sc.prctl(sc.PR_SET_DUMPABLE, 1)  # or /proc/self would belong to the host's root
    for name, text in (("setgroups", "deny"), ("uid_map", f"{AGENT} 0 1"), ("gid_map", f"{AGENT} 0 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    sc.bound_capabilities(0)
    sc.set_capabilities(0)
