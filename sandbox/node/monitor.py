"""One monitor per command, as root of the sandbox and out of the command's reach.

It is a child subreaper, so whatever the command starts (also after setsid and double fork) stays below it
and can be killed together. It reports how the direct child ended as soon as it ended, then stays only as
long as background processes live.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import termios
import time
from typing import Any

from sandbox.node import cgroups, children, privileges, scheduling, wire
from sandbox.node import syscalls as sc

KILL_SECONDS = 5.0
IGNORED_ABOVE = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ignored by Python or by the zygote; exec would hand that on to the command."""


def run(spec: dict[str, Any], request: dict[str, Any], status: socket.socket, pipes: list[int]) -> None:
    """Serve one exec request: pipes are stdin, stdout, stderr of the command."""
    wake, before = prepare(spec)
    child = start(spec, request, pipes, status)
    if child is None:
        return
    for fd in pipes:
        os.close(fd)
    ended, reason = _watch(child, request.get("timeout"), status, wake)
    report = describe(spec, before, ended, reason)
    with contextlib.suppress(OSError):
        wire.send(status, report)
    status.close()
    if not reason:
        reap_the_rest()


def prepare(spec: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """Become a monitor: (descriptor that wakes at SIGCHLD, limits hit so far)."""
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    return children.wake_fd(), _events(spec)


def start(
    spec: dict[str, Any], request: dict[str, Any], pipes: list[int], status: socket.socket
) -> int | None:
    """Fork the command; None (and the client knows) where the process limit refuses."""
    try:
        child = os.fork()
    except OSError as error:
        with contextlib.suppress(OSError):
            wire.send(status, refusal(error))
        return None
    if child == 0:
        _become(spec, request, pipes)
    return child


def refusal(error: OSError) -> dict[str, Any]:
    """The report of a command that could not even be forked."""
    return {"error": f"fork: {error.strerror}", "kind": "pids", "repercussion": "processes"}


def describe(
    spec: dict[str, Any], before: dict[str, int], ended: tuple[int, Any] | None, reason: str
) -> dict[str, Any]:
    """The report of a command's end."""
    report = _report(ended, reason)
    report["hit"] = [name for name, value in _events(spec).items() if value > before[name]]
    report["repercussion"] = _repercussion(spec, report)
    return report


def _repercussion(spec: dict[str, Any], report: dict[str, Any]) -> str | None:
    """What the commands of this sandbox have destroyed of it."""
    if not os.path.isdir(spec["workdir"]):
        return "system"
    if report["exit"] in (126, 127) and not _shell_works():
        return "system"
    if "pids" in report["hit"] and not _can_fork():
        return "processes"
    return "disk" if report["disk_full"] else None


def _shell_works() -> bool:
    try:
        pid = os.fork()
    except OSError:
        return True  # unknown: the process limit is another matter
    if pid == 0:
        try:
            os.execv("/bin/sh", ["/bin/sh", "-c", ":"])
        finally:
            os._exit(127)
    return os.waitpid(pid, 0)[1] == 0


def _can_fork() -> bool:
    try:
        pid = os.fork()
    except OSError:
        return False
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True


def reap_the_rest() -> None:
    """Reap background processes until none is left."""
    while True:
        children.reap_all()
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            return


def _events(spec: dict[str, Any]) -> dict[str, int]:
    """How often the sandbox hit its limits so far."""
    return {name: cgroups.count(fd, key) for name, (fd, key) in spec["events"].items()}


def _watch(
    child: int, timeout: float | None, status: socket.socket, wake: int
) -> tuple[tuple[int, Any] | None, str]:
    """Wait for the direct child; (its status and usage, "" or why everything was killed)."""
    deadline = None if timeout is None else time.monotonic() + timeout
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(status.fileno(), select.POLLIN)
    reason = ""
    ended: tuple[int, Any] | None = None
    while ended is None and not reason:
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000 + 1
        events = dict(poll.poll(left))
        if wake in events:
            children.drain(wake)
        for pid, code, usage in children.reap_all():
            if pid == child:
                ended = (code, usage)
        if ended is None and status.fileno() in events and not _answer(status, child):
            reason = "killed"
        elif ended is None and deadline is not None and time.monotonic() >= deadline:
            reason = "timeout"
    if reason:
        gone = kill_tree()
        ended = next(((code, usage) for pid, code, usage in gone if pid == child), None)
    return ended, reason


def _answer(status: socket.socket, child: int) -> bool:
    """Serve one message of the client: a signal for the command's group, or (False) the end."""
    try:
        message, _ = wire.receive(status)
    except OSError:
        return False
    if message is None or "signal" not in message:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, int(message["signal"]))
    return True


def _report(ended: tuple[int, Any] | None, reason: str) -> dict[str, Any]:
    report: dict[str, Any] = {"reason": reason, "exit": None, "signal": None, "maxrss": None}
    if ended is not None:
        code, usage = ended
        report["maxrss"] = usage.ru_maxrss * 1024
        if os.WIFSIGNALED(code):
            report["signal"] = os.WTERMSIG(code)
        else:
            report["exit"] = os.WEXITSTATUS(code)
    try:
        disk = os.statvfs("/")
        report["disk_full"] = disk.f_bavail * disk.f_frsize < 64 << 10 or disk.f_favail == 0
    except OSError:
        report["disk_full"] = False
    return report


def descendants() -> set[int]:
    """Pids of all living processes below this one, by parent links in /proc."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fd = os.open(f"/proc/{name}/stat", os.O_RDONLY)
            except OSError:
                continue
            try:
                fields = os.read(fd, 4096).rpartition(b")")[2].split()
            except OSError:
                continue
            finally:
                os.close(fd)
            if fields[0] not in (b"Z", b"X"):
                parents[int(name)] = int(fields[1])
    found = {os.getpid()}
    grew = True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in found and pid not in found}
        found |= more
        grew = bool(more)
    return found - {os.getpid()}


def kill_tree() -> list[tuple[int, int, Any]]:
    """Kill everything below this monitor; returns what was reaped.

    Processes are stopped first until no new one appears (a stopped process cannot fork), then killed. A
    zombie's children hang at this monitor at once, so parent links stay complete.
    """
    dead: list[tuple[int, int, Any]] = []
    deadline = time.monotonic() + KILL_SECONDS
    stopped: set[int] = set()
    while time.monotonic() < deadline:
        alive = descendants()
        if alive - stopped:
            for pid in alive - stopped:
                _signal(pid, signal.SIGSTOP)
            stopped |= alive
            continue
        for pid in alive:
            _signal(pid, signal.SIGKILL)
        dead += children.reap_all()
        if not descendants():
            return dead + children.reap_all()
        time.sleep(0.001)
    os.kill(-1, signal.SIGKILL)  # everything in the sandbox but init: nothing may outlive its timeout
    return dead + children.reap_all()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _become(spec: dict[str, Any], request: dict[str, Any], pipes: list[int]) -> None:
    """Turn the forked child into the command; never returns."""
    code = 127
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        if request.get("pty"):
            fcntl.ioctl(pipes[0], termios.TIOCSCTTY, 0)
        for fd in range(3):
            os.dup2(pipes[fd], fd)
        os.closerange(3, 1 << 20)
        for number in IGNORED_ABOVE:
            signal.signal(number, signal.SIG_DFL)
        _limits(spec)
        if spec.get("scheduling") == "batch":
            scheduling.idle()
        privileges.drop(spec, request["user"])
        argv = [os.fsencode(word) for word in request["argv"]]
        env = {os.fsencode(key): os.fsencode(value) for key, value in request["env"].items()}
        try:
            os.chdir(os.fsencode(request["cwd"]))
            os.execvpe(argv[0], argv, env)
        except OSError as error:
            code = 126 if error.errno in (errno.EACCES, errno.ENOEXEC) else 127
            what = os.fsdecode(error.filename or argv[0])
            os.write(2, f"{what}: {error.strerror}\n".encode(errors="replace"))
    except OSError as error:
        os.write(2, f"sandbox: cannot start the command: {error}\n".encode(errors="replace"))
        code = 125
    finally:
        os._exit(code)


def _limits(spec: dict[str, Any]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, value in spec["rlimits"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (wanted, wanted))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        own = int(file.read())
        file.write(str(min(1000, max(500, own + 100))))  # the command dies before the sandbox's init
