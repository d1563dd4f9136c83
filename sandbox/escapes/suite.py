"""Running the attempts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sandbox.base import ExecResult, Outcome, Sandbox, SandboxLost, SandboxProvider, SandboxSpec
from sandbox.escapes.arena import Arena, arena

Status = Literal["contained", "escaped", "inconclusive"]

PRELUDE = r"""
import ctypes, errno, glob, mmap, os, re, signal, socket, stat, struct, subprocess, sys, time
FOLDER, PID, PORT = os.environ['BAIT_FOLDER'], int(os.environ['BAIT_PID']), int(os.environ['BAIT_PORT'])
ABSTRACT, CLIENT, HOST = os.environ['BAIT_ABSTRACT'], int(os.environ['BAIT_CLIENT']), os.environ['BAIT_HOST']
SECRET = FOLDER + '/secret'
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
X86 = os.uname().machine == 'x86_64'
NR = {k: v[0 if X86 else 1] for k, v in dict(
    mount=(165, 40), umount2=(166, 39), pivot_root=(155, 41), unshare=(272, 97), setns=(308, 268), clone=(56,
        220),
    fsopen=(430, 430), open_tree=(428, 428), move_mount=(429, 429), mount_setattr=(442, 442), ptrace=(101,
        117),
    process_vm_readv=(310, 270), pidfd_open=(434, 434), pidfd_getfd=(438, 438), prlimit64=(302, 261),
    name_to_handle_at=(303, 264), open_by_handle_at=(304, 265), add_key=(248, 217), request_key=(249, 218),
    keyctl=(250, 219), bpf=(321, 280), perf_event_open=(298, 241), userfaultfd=(323,
        282), io_uring_setup=(425, 425),
    kexec_load=(246, 104), init_module=(175, 105), finit_module=(313, 273), delete_module=(176, 106),
    reboot=(169, 142), swapon=(167, 224), acct=(163, 89), syslog=(103, 116), settimeofday=(164, 170),
    clock_settime=(227, 112), adjtimex=(159, 171), sethostname=(170, 161), setdomainname=(171, 162),
    iopl=(172, -1), ioperm=(173, -1), capset=(126, 91), fanotify_init=(300, 262), quotactl=(179, 60),
    mq_open=(240, 180), clone3=(435, 435), setpriority=(141, 140), sched_setscheduler=(144, 119),
    kcmp=(312, 272), memfd_secret=(447, 447), process_madvise=(440, 440), chroot=(161, 51),
).items()}
def call(name, *arguments):
    "Result of a system call; -1 and get_errno() on failure."
    return libc.syscall(ctypes.c_long(NR[name]), *[
        ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_long(a) if isinstance(a, int) else a
        for a in arguments])
def escaped(what):
    print('ESCAPED', what, flush=True)
def refused(name, *arguments):
    "An escape unless the call fails."
    if (result := call(name, *arguments)) >= 0: escaped(f'{name} returned {result}')
def attempt(function):
    "Whatever fails is contained."
    try: return function()
    except (OSError, ValueError, subprocess.SubprocessError): return None
def bait_in(data):
    return re.search(rb'c0ffee-[0-9a-f]{24}', data)
def reads(path):
    "An escape if the bait can be read there."
    data = attempt(lambda: open(path, 'rb').read(4096))
    if data and bait_in(data): escaped(f'read {path}')
def writes(path):
    "An escape if the file can be opened for writing and takes back what it holds."
    def go():
        fd = os.open(path, os.O_WRONLY)
        escaped(f'opened {path} for writing')
        try: os.write(fd, open(path, 'rb').read())
        finally: os.close(fd)
    attempt(go)
def no_right(name, *arguments):
    "An escape unless the call is refused for want of a right, before its senseless arguments are seen."
    if call(name, *arguments) >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        escaped(f'{name} gave {errno.errorcode.get(ctypes.get_errno())}')
def in_child(function, seconds=10):
    "Run in a child, which a signal may kill."
    pid = os.fork()
    if pid == 0:
        try: function()
        except BaseException as error: print(type(error).__name__, error, file=sys.stderr)
        finally: sys.stdout.flush(); os._exit(0)
    end = time.time() + seconds
    while time.time() < end:
        if os.waitpid(pid, os.WNOHANG)[0]: return
        time.sleep(0.01)
    os.kill(pid, 9); os.waitpid(pid, 0)
"""
_MARK = "\nprint('TRIED', flush=True)\n"

Watch = Callable[[Arena, Sandbox, SandboxProvider], Awaitable[str]]


@dataclass(frozen=True)
class Attempt:
    """One way out that is tried."""

    name: str
    program: str = ""
    """Python, run inside after PRELUDE."""
    watch: Watch | None = None
    """Done by the host afterwards, with the sandbox still there: what got out, or ""."""
    timeout: float = 30.0
    outcome: tuple[Outcome, ...] = (Outcome.EXITED,)
    """Ends of the program that count as tried."""


@dataclass(frozen=True)
class EscapeResult:
    name: str
    user: str
    status: Status
    detail: str


def attempts() -> list[Attempt]:
    """All attempts."""
    from sandbox.escapes import files, kernel, mounts, network, processes

    modules = (mounts, processes, kernel, network, files)
    return [attempt for module in modules for attempt in module.ATTEMPTS]


async def run(
    provider: SandboxProvider,
    image: str,
    names: Sequence[str] = (),
    *,
    spec: Mapping[str, Any] | None = None,
    users: Sequence[str] = ("agent", "root"),
    told: Callable[[EscapeResult], None] | None = None,
) -> list[EscapeResult]:
    """Run the named attempts (default: all) as each user, each in a fresh sandbox. ValueError for an unknown
    name.

    `spec` changes the sandboxes' specs; `told` hears each result as it comes.
    """
    every = {attempt.name: attempt for attempt in attempts()}
    unknown = [name for name in names if name not in every]
    if unknown:
        raise ValueError(f"unknown attempt {unknown[0]!r}; choose from {', '.join(every)}")
    made: dict[str, Any] = {"image": image, "owner": "escape", "memory_mb": 256, "pids": 64, "disk_mb": 64}
    results: list[EscapeResult] = []
    async with arena() as bait:
        for name in names or every:
            for user in users:
                box = await provider.create(SandboxSpec(**{**made, **(spec or {})}))
                async with box:
                    result = await _one(every[name], user, bait, box, provider)
                results.append(result)
                if told is not None:
                    told(result)
    return results


async def _one(
    attempt: Attempt, user: str, bait: Arena, box: Sandbox, provider: SandboxProvider
) -> EscapeResult:
    status: Status = "contained"
    detail = ""
    if attempt.program:
        status, detail = await _inside(attempt, user, bait, box)
    if status != "escaped" and attempt.watch is not None:
        try:
            got = await attempt.watch(bait, box, provider)
        except SandboxLost as lost:
            status, detail = "inconclusive", str(lost)
        else:
            status, detail = ("escaped", got) if got else (status, detail)
    if damage := bait.damage():
        status, detail = "escaped", damage
    return EscapeResult(attempt.name, user, status, detail)


async def _inside(attempt: Attempt, user: str, bait: Arena, box: Sandbox) -> tuple[Status, str]:
    """Run the program; what it found decides, and the secret in its output always does."""
    program = PRELUDE + attempt.program + _MARK
    try:
        result: ExecResult = await box.exec(
            ["python3", "-B", "-c", program],
            env=bait.variables(),
            user=user,
            timeout=attempt.timeout,
            cwd="/tmp",
        )
    except SandboxLost as lost:
        return "inconclusive", str(lost)
    lines = [line for line in result.text.splitlines() if line.startswith("ESCAPED")]
    if lines or bait.secret.encode() in result.stdout:
        return "escaped", "; ".join(lines) or "the secret was printed"
    tried = b"TRIED" in result.stdout or result.outcome not in (Outcome.EXITED, Outcome.SIGNALED)
    if not tried or result.outcome not in attempt.outcome:
        return "inconclusive", f"{result.outcome}: {result.text[-500:]}"
    return "contained", ""
