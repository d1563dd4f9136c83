"""Ways out through other processes, rights, users, control groups and time."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from sandbox.base import Outcome, Sandbox, SandboxProvider
from sandbox.escapes.arena import Arena
from sandbox.escapes.suite import Attempt


def _on_host(word: bytes) -> list[str]:
    """Host processes with that word in their command line."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(path.parent.name)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


async def _heartbeats(bait: Arena, box: Sandbox, provider: SandboxProvider) -> str:
    """Does anything that the timed-out command started still live?"""
    await asyncio.sleep(0.4)
    before = (await box.exec("cat /tmp/beat 2>/dev/null | wc -c")).stdout
    await asyncio.sleep(0.8)
    after = (await box.exec("cat /tmp/beat 2>/dev/null | wc -c")).stdout
    return "" if before == after else f"heartbeats went on after the timeout: {before!r}, {after!r}"


async def _after_close(bait: Arena, box: Sandbox, provider: SandboxProvider) -> str:
    """Does anything live on the host after the sandbox was closed?"""
    word = b"escape-after-close-" + box.id.encode()
    await box.exec(["sh", "-c", f"setsid setsid sh -c 'sleep 600; : {word.decode()}' >/dev/null 2>&1 & echo"])
    await box.close()
    await asyncio.sleep(0.3)
    left = _on_host(word)
    return f"processes {left} outlived the sandbox" if left else ""


ATTEMPTS = [
    Attempt(
        "environment_of_processes",
        r"""
for pid in filter(str.isdigit, os.listdir('/proc')):
    for name in ('environ', 'cmdline', 'maps', 'comm', 'status', 'stack', 'wchan', 'auxv'):
        data = attempt(lambda: open(f'/proc/{pid}/{name}', 'rb').read()) or b''
        if bait_in(data): escaped(f'/proc/{pid}/{name} shows the bait')
if bait_in(repr(dict(os.environ)).encode()): escaped('own environment')
""",
    ),
    Attempt(
        "kill_by_number",
        r"""
for pid in (PID, CLIENT):
    inside = attempt(lambda: open(f'/proc/{pid}/cmdline', 'rb').read()) or b''
    if b'sleep(3600)' in inside: escaped(f'process {pid} of the host is visible')
if PID > 3000: attempt(lambda: os.kill(PID, 9))
""",
    ),
    Attempt(
        "trace_init",
        r"""
for pid in (1, os.getppid(), PID):
    if call('ptrace', 0x4206, pid, 0, 0) >= 0: escaped(f'seized {pid}')
    local, remote = ctypes.create_string_buffer(64), (ctypes.c_ulong * 2)(0x400000, 64)
    vector = (ctypes.c_ulong * 2)(ctypes.addressof(local), 64)
    if call('process_vm_readv', pid, vector, 1, remote, 1, 0) > 0: escaped(f'read memory of {pid}')
    for name in attempt(lambda: os.listdir(f'/proc/{pid}/fd')) or ():
        if attempt(lambda: os.readlink(f'/proc/{pid}/fd/{name}')): escaped(f'saw descriptor {name} of {pid}')
""",
    ),
    Attempt(
        "memory_files_of_init",
        r"""
for pid in (1, os.getppid()):
    for name in ('mem', 'maps', 'environ', 'auxv', 'pagemap', 'syscall', 'stack', 'io'):
        data = attempt(lambda: open(f'/proc/{pid}/{name}', 'rb').read(64))
        if data and name in ('mem', 'environ', 'maps', 'auxv'): escaped(f'/proc/{pid}/{name}')
    if attempt(lambda: open(f'/proc/{pid}/mem', 'r+b')) is not None: escaped(f'opened memory of {pid}')
""",
    ),
    Attempt(
        "descriptors_of_init",
        r"""
for pid in (1, os.getppid()):
    fd = call('pidfd_open', pid, 0)
    if fd < 0: continue
    for number in range(64):
        if call('pidfd_getfd', fd, number, 0) >= 0: escaped(f'took descriptor {number} of {pid}')
    for name in attempt(lambda: os.listdir(f'/proc/{pid}/fd')) or ():
        if attempt(lambda: os.open(f'/proc/{pid}/fd/{name}',
            os.O_RDWR)) is not None: escaped(f'opened {name} of {pid}')
""",
    ),
    Attempt(
        "limits_of_init",
        r"""
for pid in (1, PID):
    now = ctypes.create_string_buffer(16)
    if call('prlimit64', pid, 7, 0, now) >= 0 and call('prlimit64', pid, 7, now, 0) >= 0:
        escaped(f'set limits of {pid}')
high = struct.pack('QQ', 1 << 20, 1 << 20)
if call('prlimit64', 0, 7, high, 0) >= 0: escaped('raised its own limit of descriptors')
old = int(open('/proc/self/oom_score_adj').read())
attempt(lambda: open('/proc/self/oom_score_adj', 'w').write('-1000'))
if int(open('/proc/self/oom_score_adj').read()) < old and old >= 0: escaped('hid from the memory killer')
if call('setpriority', 0, 0, -20) >= 0: escaped('raised its priority')
if call('sched_setscheduler', 0, 1, struct.pack('i', 50)) >= 0: escaped('became a real-time process')
""",
    ),
    Attempt(
        "become_root",
        r"""
was = os.getuid()
if was != 0:
    for go in (lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.seteuid(0),
        lambda: os.setgid(0),
               lambda: os.setgroups([0]), lambda: os.setresgid(0, 0, 0)):
        def child(go=go):
            attempt(go)
            if 0 in os.getresuid() or 0 in os.getresgid() or 0 in os.getgroups(): escaped('changed the user')
        in_child(child)
""",
    ),
    Attempt(
        "raise_capabilities",
        r"""
def held():
    text = open('/proc/self/status').read()
    return {n: int(l.split()[1], 16) for l in text.split('\n') for n in ('CapPrm', 'CapEff', 'CapBnd')
        if l.startswith(n)}
before = held()
header = struct.pack('Ii', 0x20080522, 0)
for mask in (1 << 21, (1 << 40) - 1, 1 << 16, 1 << 19, 1 << 17):
    call('capset', header, struct.pack('IIIIII', mask & 0xffffffff, mask & 0xffffffff, mask & 0xffffffff,
        mask >> 32, mask >> 32, mask >> 32))
    libc.prctl(47, 2, mask.bit_length() - 1, 0, 0)
after = held()
for name, mask in after.items():
    if mask & ~before[name]: escaped(f'{name} grew to {mask:x}')
for number, name in ((21, 'SYS_ADMIN'), (19, 'SYS_PTRACE'), (16, 'SYS_MODULE'), (17, 'SYS_RAWIO'), (27,
    'MKNOD'), (2, 'DAC_READ_SEARCH'), (12, 'NET_ADMIN'), (13, 'NET_RAW'), (25, 'SYS_TIME')):
    if after['CapEff'] >> number & 1: escaped(f'holds CAP_{name}')
if os.getuid() != 0 and after['CapBnd']: escaped(f"bounding set {after['CapBnd']:x}")
""",
    ),
    Attempt(
        "setuid_programs",
        r"""
if os.getuid() == 0:
    for path in ('/tmp/suid', '/workspace/suid', '/dev/shm/suid'):
        def go():
            open(path, 'wb').write(open('/usr/bin/id', 'rb').read()); os.chmod(path, 0o6755)
            seen = subprocess.run(['setpriv', '--reuid=1000', '--clear-groups', path, '-u'],
                capture_output=True)
            if seen.stdout == b'0\n' and seen.returncode == 0: escaped(f'{path} gave root')
        attempt(go)
else:
    found = subprocess.run(['find', '/', '-xdev', '/usr', '-perm', '/6000', '-type', 'f'],
        capture_output=True)
    for path in set(found.stdout.decode().split('\n')) - {''}:
        if os.path.basename(path) in ('su', 'sudo', 'pkexec', 'mount', 'umount', 'newgrp', 'passwd'):
            seen = attempt(lambda: subprocess.run([path, '-c', 'id -u'], capture_output=True,
                stdin=subprocess.DEVNULL, timeout=5))
            if seen and seen.stdout.strip() == b'0': escaped(path)
""",
        timeout=60,
    ),
    Attempt(
        "file_capabilities",
        r"""
path = '/workspace/capable'
def go():
    open(path, 'wb').write(open('/usr/bin/id', 'rb').read()); os.chmod(path, 0o755)
    os.setxattr(path, 'security.capability', struct.pack('<IIIII', 0x02000001, 1 << 21, 0, 0, 0))
    escaped('gave a file CAP_SYS_ADMIN')
attempt(go)
""",
    ),
    Attempt(
        "release_agent",
        r"""
os.makedirs('/tmp/cg', exist_ok=True)
for options in (b'memory', b'pids', b'rdma', b'cpu', b'none,name=x', b'devices'):
    refused('mount', b'cgroup', b'/tmp/cg', b'cgroup', 0, options)
for path in glob.glob('/sys/fs/cgroup/**/release_agent', recursive=True) + ['/tmp/cg/release_agent']:
    writes(path)
for path in glob.glob('/sys/fs/cgroup/**/notify_on_release', recursive=True): writes(path)
""",
    ),
    Attempt(
        "control_groups",
        r"""
for line in open('/proc/self/cgroup'):
    path = line.strip().split(':', 2)[2]
    if '/..' in path: escaped(f'the control group namespace shows {path}')
for top in ('/sys/fs/cgroup', '/cgroup', '/run/cgroup'):
    for name in ('cgroup.procs', 'tasks', 'memory.max', 'memory.limit_in_bytes', 'pids.max',
        'cgroup.subtree_control', 'devices.allow', 'cgroup.kill'):
        for path in glob.glob(f'{top}/{name}') + glob.glob(f'{top}/*/{name}'):
            if attempt(lambda: os.open(path, os.O_WRONLY)) is not None: escaped(f'opened {path}')
""",
    ),
    Attempt(
        "outlive_the_timeout",
        r"""
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            for number in range(1, 32):
                if number not in (9, 17, 19): signal.signal(number, signal.SIG_IGN)
            if os.fork(): os._exit(0)
            while True:
                open('/tmp/beat', 'a').write('x'); time.sleep(0.05)
        os._exit(0)
time.sleep(60)
""",
        watch=_heartbeats,
        timeout=1.0,
        outcome=(Outcome.TIMEOUT,),
    ),
    Attempt(
        "outrun_the_timeout",
        r"""
def chain():
    while True:
        if os.fork(): os._exit(0)
        os.setsid(); open('/tmp/beat', 'a').write('x')
for _ in range(4):
    if os.fork() == 0: chain()
time.sleep(60)
""",
        watch=_heartbeats,
        timeout=1.0,
        outcome=(Outcome.TIMEOUT,),
    ),
    Attempt("outlive_the_sandbox", watch=_after_close),
]  # fmt: skip
