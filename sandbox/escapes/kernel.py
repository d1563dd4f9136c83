"""Ways out through the kernel's own doors: settings, modules, programs, keys, clocks and other call
tables."""

from sandbox.escapes.suite import Attempt

ATTEMPTS = [
    Attempt(
        "kernel_settings",
        r"""
for path in ('kernel/core_pattern', 'kernel/modprobe', 'kernel/hostname', 'kernel/poweroff_cmd',
             'vm/overcommit_memory', 'vm/swappiness', 'kernel/randomize_va_space', 'kernel/yama/ptrace_scope',
             'fs/suid_dumpable', 'kernel/sysrq', 'kernel/ns_last_pid', 'net/ipv4/ip_forward',
             'user/max_user_namespaces', 'kernel/panic', 'fs/file-max'):
    writes('/proc/sys/' + path)
""",
    ),
    Attempt(
        "system_request",
        r"""
def go():
    fd = os.open('/proc/sysrq-trigger', os.O_WRONLY)
    if stat.S_ISREG(os.fstat(fd).st_mode): escaped('sysrq-trigger is writable')
attempt(go)
""",
    ),
    Attempt(
        "kernel_memory",
        r"""
for path in ('/proc/kcore', '/dev/mem', '/dev/kmem', '/dev/port', '/proc/vmcore', '/sys/kernel/debug'):
    data = attempt(lambda: open(path, 'rb').read(4096))
    if data: escaped(f'read {path}')
for path in ('/proc/kallsyms', '/proc/modules'):
    for line in (attempt(lambda: open(path).read(100000)) or '').split('\n'):
        words = line.split()
        if words and any(w.startswith('0xffff') or (len(w) == 16 and w.startswith('ffff'))
            for w in words): escaped(f'{path}: {line}'); break
if call('iopl', 3) >= 0: escaped('iopl')
if call('ioperm', 0, 64, 1) >= 0: escaped('ioperm')
""",
    ),
    Attempt(
        "kernel_log",
        r"""
buffer = ctypes.create_string_buffer(4096)
for kind in (2, 3, 9, 10):
    if call('syslog', kind, buffer, 4096) > 0: escaped(f'syslog {kind}')
for path in ('/proc/kmsg', '/dev/kmsg'):
    def go():
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        if os.read(fd, 4096): escaped(path)
    attempt(go)
""",
    ),
    Attempt(
        "other_processes_in_statistics",
        r"""
for path in ('/proc/sched_debug', '/proc/timer_list', '/proc/latency_stats', '/proc/keys', '/proc/key-users',
    '/proc/locks',
             '/sys/kernel/debug/sched/debug', '/proc/slabinfo', '/proc/vmallocinfo'):
    data = attempt(lambda: open(path, 'rb').read(1 << 20)) or b''
    if path.endswith('locks'): continue
    if data.strip(): escaped(f'{path} has {len(data)} bytes')
""",
    ),
    Attempt(
        "helpers_of_the_kernel",
        r"""
for path in ('/sys/kernel/uevent_helper', '/proc/sys/kernel/hotplug',
    '/sys/kernel/mm/transparent_hugepage/enabled',
             '/sys/module/kernel/parameters/panic', '/sys/power/state',
    '/sys/fs/selinux/enforce', '/sys/kernel/vmcoreinfo'):
    writes(path)
for path in glob.glob('/sys/kernel/security/**', recursive=True)[:50]: writes(path)
""",
    ),
    Attempt(
        "binary_formats",
        r"""
if attempt(lambda: os.open('/proc/sys/fs/binfmt_misc/register', os.O_WRONLY)) is not None: escaped('register')
refused('mount', b'binfmt_misc', b'/proc/sys/fs/binfmt_misc', b'binfmt_misc', 0, 0)
""",
    ),
    Attempt(
        "kernel_modules",
        r"""
no_right('init_module', b'nonsense', 8, b'')
no_right('finit_module', os.open('/usr/bin/env', os.O_RDONLY), b'', 0)
no_right('delete_module', b'posttrain_no_such_module', 0)
no_right('kexec_load', 0, 0, 0, 0xffff)
""",
    ),
    Attempt(
        "programs_in_the_kernel",
        r"""
program = struct.pack('BBhi', 0xb7, 0, 0, 0) + struct.pack('BBhi', 0x95, 0, 0, 0)
code, licence = ctypes.create_string_buffer(program, 16), ctypes.create_string_buffer(b'GPL')
for kind in (1, 2, 3):
    attribute = struct.pack('IIQQIIQ', kind, 2, ctypes.addressof(code), ctypes.addressof(licence), 0, 0,
        0) + bytes(80)
    refused('bpf', 5, attribute, len(attribute))
refused('bpf', 0, struct.pack('IIII', 1, 4, 4, 1) + bytes(60), 76)
""",
    ),
    Attempt(
        "counters_of_the_kernel",
        r"""
for kind in (0, 1, 2):
    attribute = struct.pack('IIQQQQ', kind, 112, 0, 0, 0, 0) + bytes(72)
    for pid, cpu in ((0, -1), (-1, 0), (1, -1)): refused('perf_event_open', attribute, pid, cpu, -1, 0)
""",
    ),
    Attempt(
        "rings_and_faults",
        r"""
refused('io_uring_setup', 4, ctypes.create_string_buffer(120))
refused('userfaultfd', 0); refused('userfaultfd', 1)
refused('fanotify_init', 0, 0)
""",
    ),
    Attempt(
        "keys_of_the_host",
        r"""
refused('add_key', b'user', b'posttrain-escape', b'payload', 7, -3)
refused('add_key', b'user', b'posttrain-escape', b'payload', 7, -4)
refused('request_key', b'user', b'posttrain-escape', 0, 0)
for ring in (-1, -2, -3, -4, -5): refused('keyctl', 0, ring, 0, 0, 0)
refused('keyctl', 1, 0, 0, 0, 0)
""",
    ),
    Attempt(
        "clock_and_name",
        r"""
now = time.time()
refused('settimeofday', struct.pack('qq', int(now), 0), 0)
refused('clock_settime', 0, struct.pack('qq', int(now), 0))
refused('adjtimex', struct.pack('I', 0x8000) + bytes(204))
name = os.uname().nodename.encode()
refused('sethostname', name, len(name))
refused('setdomainname', name, len(name))
""",
    ),
    Attempt(
        "whole_machine",
        r"""
no_right('reboot', 0xfee1dead, 672274793, 0xbad, 0)
no_right('swapon', b'/tmp/no-such-file', 0)
no_right('acct', b'/tmp/no-such-file')
no_right('quotactl', 0x80000800, b'/dev/null', 0, 0)
""",
    ),
    Attempt(
        "calls_of_32_bits",
        r"""
def go():
    if not X86: return
    code = b'\xb8\x20\x01\x00\x00\x31\xdb'  # eax = keyctl, ebx = 0
    code += b'\xb9\xfd\xff\xff\xff' + b'\x31\xd2' + b'\xcd\x80' + b'\x48\x98\xc3'
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    result = ctypes.CFUNCTYPE(ctypes.c_long)(address)()
    if result >= 0: escaped(f'keyctl by int 0x80 returned {result}')
in_child(go)
def x32():
    if X86:
        for number in (165, 250, 272, 321):
            if libc.syscall(ctypes.c_long(0x40000000 | number), ctypes.c_long(0), ctypes.c_long(-3),
                ctypes.c_long(0), ctypes.c_long(0), ctypes.c_long(0)) >= 0:
                escaped(f'x32 call {number}')
in_child(x32)
""",
    ),
    Attempt(
        "memory_shared_with_the_host",
        r"""
segment = libc.shmget(0x0BA17, 0, 0)
if segment >= 0: escaped('the segment of the host is here')
libc.shmat.restype = ctypes.c_void_p
for number in range(64):
    address = libc.shmat(number, None, 0o10000)
    if address and address != ctypes.c_void_p(-1).value and bait_in(ctypes.string_at(address,
        40)): escaped(f'segment {number}')
for path in glob.glob('/dev/shm/*') + glob.glob('/dev/mqueue/*'): escaped(f'{path} was there before us')
""",
    ),
]  # fmt: skip
