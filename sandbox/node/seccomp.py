"""The system calls that commands are refused: doors that capabilities alone do not close, as a BPF program.

Namespaces and mounts need rights that agents lack anyway; keyrings, bpf, io_uring, userfaultfd and foreign
socket families (vsock reaches past a network namespace) need none. Refused calls give EPERM, so programs
fall back as they would in a container. `clone3` gives ENOSYS: its flags lie in memory, glibc then uses clone.
"""

from __future__ import annotations

import errno
import os
import struct

from sandbox.node import syscalls as sc

# name: (x86_64, aarch64)
_REFUSED = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280),
    "clock_adjtime": (305, 266), "clock_settime": (227, 112), "delete_module": (176, 106),
    "finit_module": (313, 273), "fsconfig": (431, 431), "fsmount": (432, 432), "fsopen": (430, 430),
    "fspick": (433, 433), "init_module": (175, 105), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "io_uring_setup": (425, 425), "kexec_file_load": (320, 294),
    "kexec_load": (246, 104), "keyctl": (250, 219), "mount": (165, 40), "mount_setattr": (442, 442),
    "move_mount": (429, 429), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "open_tree": (428, 428), "perf_event_open": (298, 241), "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41), "quotactl": (179, 60), "quotactl_fd": (443, 443), "reboot": (169, 142),
    "request_key": (249, 218), "setdomainname": (171, 162), "sethostname": (170, 161), "setns": (308, 268),
    "settimeofday": (164, 170), "swapoff": (168, 225), "swapon": (167, 224), "syslog": (103, 116),
    "umount2": (166, 39), "unshare": (272, 97), "userfaultfd": (323, 282),
}  # fmt: skip
_JAILS = {
    "mount", "umount2", "pivot_root", "unshare", "setns", "mount_setattr", "move_mount", "open_tree",
    "fsopen", "fsconfig", "fsmount", "fspick", "sethostname", "setdomainname",
}  # fmt: skip
"""What a nested sandbox's root needs to make jails; all else is refused there too, and in the jails."""
_PRLIMIT = (302, 261)
_CLONE, _CLONE3, _SOCKET, _SOCKETPAIR = (56, 220), (435, 435), (41, 198), (53, 199)
_ARCHITECTURE = (0xC000003E, 0xC00000B7)
_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink
_NAMESPACES = (
    sc.CLONE_NEWNS | sc.CLONE_NEWCGROUP | sc.CLONE_NEWUTS | sc.CLONE_NEWIPC | sc.CLONE_NEWUSER
    | sc.CLONE_NEWPID | sc.CLONE_NEWNET
)  # fmt: skip

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data (little endian)
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000


def _op(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, k)


def _refuse_if(code: int, k: int, number: int) -> bytes:
    return _op(code, k, 0, 1) + _op(_RETURN, _ERRNO | number)


def program(*, nested: bool = False) -> bytes | None:
    """The filter for this machine, None on an architecture whose numbers we do not know."""
    machine = os.uname().machine
    if machine not in ("x86_64", "aarch64"):
        return None
    column = 0 if machine == "x86_64" else 1
    code = _op(_LOAD, _ARCH) + _op(_EQUAL, _ARCHITECTURE[column], 1, 0)
    code += _op(_RETURN, _ERRNO | errno.ENOSYS)  # 32-bit calls
    code += _op(_LOAD, _NUMBER)
    code += _refuse_if(_AT_LEAST, 0x40000000, errno.ENOSYS)  # x32
    for name, numbers in _REFUSED.items():
        if not (nested and name in _JAILS):
            code += _refuse_if(_EQUAL, numbers[column], errno.EPERM)
    if not nested:
        code += _refuse_if(_EQUAL, _CLONE3[column], errno.ENOSYS)
        clone = _op(_LOAD, _FIRST_ARGUMENT) + _refuse_if(_ANY_BIT, _NAMESPACES, errno.EPERM)
        code += _if_call(_CLONE[column], clone + _op(_RETURN, _ALLOW))
        # Limits of oneself alone: root inside could starve init.
        own = _op(_LOAD, _FIRST_ARGUMENT) + _op(_EQUAL, 0, 1, 0) + _op(_RETURN, _ERRNO | errno.EPERM)
        code += _if_call(_PRLIMIT[column], own + _op(_RETURN, _ALLOW))
    for numbers in (_SOCKET, _SOCKETPAIR):
        check = _op(_LOAD, _FIRST_ARGUMENT)
        for family in _FAMILIES:
            check += _op(_EQUAL, family, 0, 1) + _op(_RETURN, _ALLOW)
        code += _if_call(numbers[column], check + _op(_RETURN, _ERRNO | errno.EAFNOSUPPORT))
    return code + _op(_RETURN, _ALLOW)


def _if_call(number: int, body: bytes) -> bytes:
    """Run `body`, which returns, for that call alone."""
    return _op(_EQUAL, number, 0, len(body) // 8) + body


PROGRAM = program()
NESTED_PROGRAM = program(nested=True)
