"""Which commands wait for which, what shares a core with what, and which memory is near.

- A `batch` command runs at SCHED_IDLE and may not leave it, since RLIMIT_NICE is 0. The policy orders the
  tasks of one group alone, so where a cpu control group is writable (`cgroups`) the whole sandbox is idle
  among its siblings, too. Where none is, the sessions of the kernel's autogroups compete as equals; ours are
  made nice.
- Two threads of one core never run different sandboxes at once (core scheduling, Linux 5.14), where a core
  has two.
- On a machine of several memory nodes each sandbox starts on the processors of the one with the fewest. That
  is a place, not a limit: commands may choose others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterable

from sandbox.node import syscalls as sc

PR_SCHED_CORE = 62
CORE_CREATE = 1
THREAD_GROUP = 1
NODES = "/sys/devices/system/node"
AUTOGROUP = "/proc/sys/kernel/sched_autogroup_enabled"


def idle() -> None:
    """The calling process and all that it starts run when nobody else wants to. OSError if they would not."""
    resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as file:
        file.write("19")


def autogroups() -> bool:
    """Whether the kernel makes a group of each session."""
    with contextlib.suppress(OSError), open(AUTOGROUP) as file:
        return file.read().strip() == "1"
    return False


def own_cores() -> None:
    """From now on this process and its children share a core with nobody else. OSError where that is of no
    use."""
    sc.prctl(PR_SCHED_CORE, CORE_CREATE, 0, THREAD_GROUP)


def core_reason() -> str:
    """Empty if `own_cores` works here, else why not."""
    pid = os.fork()
    if pid == 0:
        try:
            own_cores()
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    number = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if number == errno.ENODEV:
        return "no two threads share a core here"
    return "" if number == 0 else f"the kernel refuses it ({os.strerror(number)}; CONFIG_SCHED_CORE)"


class Nodes:
    """The memory nodes of this machine, and how many sandboxes were placed on each."""

    def __init__(self, folder: str = NODES) -> None:
        self.processors: dict[int, set[int]] = {}
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                if name.startswith("node") and name[4:].isdigit():
                    with open(f"{folder}/{name}/cpulist") as file:
                        processors = numbers(file.read())
                    if processors:  # there are nodes of memory alone
                        self.processors[int(name[4:])] = processors
        self.placed = dict.fromkeys(self.processors, 0)

    def place(self) -> int | None:
        """The node for one more sandbox; None where there is no choice."""
        if len(self.processors) < 2:
            return None
        node = min(self.placed, key=lambda each: (self.placed[each] / len(self.processors[each]), each))
        self.placed[node] += 1
        return node

    def leave(self, node: int | None) -> None:
        """A sandbox that `place` put there is gone."""
        if node is not None:
            self.placed[node] -= 1


def stay_on(processors: Iterable[int]) -> None:
    """Run on these, as far as this process may."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, processors)


def numbers(text: str) -> set[int]:
    """The kernel's lists: `0-3,8` is 0, 1, 2, 3 and 8."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
