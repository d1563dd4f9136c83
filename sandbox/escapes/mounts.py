"""Ways out through mounts, roots and file handles."""

from sandbox.escapes.suite import Attempt

ATTEMPTS = [
    Attempt(
        "mount_file_systems",
        r"""
os.makedirs('/tmp/m', exist_ok=True)
for kind in (b'tmpfs', b'proc', b'sysfs', b'cgroup', b'cgroup2', b'devtmpfs', b'debugfs', b'securityfs',
    b'overlay'):
    refused('mount', b'none', b'/tmp/m', kind, 0, 0)
for source in (b'/', b'/proc/1/root', b'/usr', b'/dev'): refused('mount', source, b'/tmp/m', b'', 4096, 0)
""",
    ),
    Attempt(
        "mount_by_new_calls",
        r"""
for kind in (b'tmpfs', b'proc', b'cgroup2'): refused('fsopen', kind, 0)
refused('open_tree', -100, b'/', 1)
refused('move_mount', -100, b'/usr', -100, b'/tmp', 0)
refused('mount_setattr', -100, b'/usr', 0x8000, struct.pack('QQQQ', 0, 1, 0, 0), 32)
""",
    ),
    Attempt(
        "remount_writable",
        r"""
for place in (b'/', b'/usr', b'/proc', b'/proc/sys', b'/dev', b'/sys'):
    refused('mount', b'none', place, b'', 32, 0)
    refused('mount', b'none', place, b'', 32 | 4096, 0)
""",
    ),
    Attempt(
        "unmount_what_hides",
        r"""
for place in (b'/proc', b'/proc/kcore', b'/proc/keys', b'/proc/sys', b'/dev', b'/tmp'):
    for flags in (0, 2, 8): refused('umount2', place, flags)
""",
    ),
    Attempt(
        "mount_in_own_namespaces",
        r"""
def go(flags):
    if call('unshare', flags) < 0: return
    escaped(f'unshare {flags:x}')
    os.makedirs('/tmp/m', exist_ok=True)
    refused('mount', b'none', b'/tmp/m', b'tmpfs', 0, 0)
for flags in (0x10000000, 0x20000, 0x10020000, 0x40000000, 0x20000000, 0x8000000, 0x4000000, 0x2000000,
    0x7e020000):
    in_child(lambda: go(flags))
""",
    ),
    Attempt(
        "clone_into_namespaces",
        r"""
def go(flags):
    pid = call('clone', flags | 17, 0, 0, 0, 0)
    if pid == 0: os._exit(0)
    if pid > 0: escaped(f'clone {flags:x}'); os.waitpid(pid, 0)
for flags in (0x10000000, 0x20000, 0x40000000, 0x20000000): in_child(lambda: go(flags))
def go3():
    arguments = struct.pack('QQQQQQQQ', 0x10000000, 0, 0, 0, 17, 0, 0, 0)
    pid = call('clone3', arguments, len(arguments))
    if pid == 0: os._exit(0)
    if pid > 0: escaped('clone3'); os.waitpid(pid, 0)
in_child(go3)
""",
    ),
    Attempt(
        "join_namespaces_of_init",
        r"""
for kind in ('mnt', 'user', 'pid', 'net', 'uts', 'ipc', 'cgroup'):
    for pid in ('1', str(PID), 'self'):
        fd = attempt(lambda: os.open(f'/proc/{pid}/ns/{kind}', os.O_RDONLY))
        if fd is None: continue
        before = os.readlink(f'/proc/self/ns/{kind}')
        if call('setns', fd, 0) >= 0 and os.readlink(f'/proc/self/ns/{kind}') != before:
            escaped(f'joined {kind} of {pid}')
""",
    ),
    Attempt(
        "chroot_twice",
        r"""
def go():
    top = os.open('/', os.O_RDONLY | os.O_DIRECTORY)
    os.makedirs('/tmp/jail', exist_ok=True)
    if call('chroot', b'/tmp/jail') >= 0: os.fchdir(top)
    for _ in range(64): os.chdir('..')
    call('chroot', b'.')
    reads(SECRET); reads('.' + SECRET)
in_child(go)
""",
    ),
    Attempt(
        "pivot_root",
        r"""
os.makedirs('/tmp/new/old', exist_ok=True)
refused('pivot_root', b'/tmp/new', b'/tmp/new/old')
refused('pivot_root', b'.', b'.')
""",
    ),
    Attempt(
        "roots_and_folders_of_processes",
        r"""
for pid in ('1', 'self', str(PID), str(CLIENT), *filter(str.isdigit, os.listdir('/proc'))):
    for name in ('root', 'cwd'):
        reads(f'/proc/{pid}/{name}{SECRET}')
        reads(f'/proc/{pid}/{name}/../../../../../..{SECRET}')
    for fd in attempt(lambda: os.listdir(f'/proc/{pid}/fd')) or ():
        reads(f'/proc/{pid}/fd/{fd}{SECRET}'); reads(f'/proc/{pid}/fd/{fd}/../../../../..{SECRET}')
""",
    ),
    Attempt(
        "inherited_descriptors",
        r"""
for fd in range(3, 4096):
    target = attempt(lambda: os.readlink(f'/proc/self/fd/{fd}'))
    if target is None: continue
    if attempt(lambda: os.fstat(fd)) is not None: escaped(f'descriptor {fd} is {target}')
for fd in (0, 1, 2):
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind in (stat.S_IFDIR, stat.S_IFBLK): escaped(f'stream {fd} is a folder or device')
""",
    ),
    Attempt(
        "handles_of_the_host",
        r"""
handle = ctypes.create_string_buffer(struct.pack('Ii', 128, 0) + bytes(128))
identity = ctypes.c_int()
if call('name_to_handle_at', -100, b'/', handle, ctypes.byref(identity), 0) >= 0: escaped('name_to_handle_at')
for place in ('/', '/usr', '/tmp', '/etc'):
    at = os.open(place, os.O_RDONLY)
    for inode in (2, 128, 256, 64):
        for kind, size in ((1, 8), (0x81, 12), (2, 16)):
            body = struct.pack('Q', inode) + bytes(size)
            guess = ctypes.create_string_buffer(struct.pack('Ii', size, kind) + body)
            if call('open_by_handle_at', at, guess, 0) >= 0: escaped(f'opened inode {inode} of {place}')
""",
    ),
    Attempt(
        "sources_of_mounts",
        r"""
seen = open('/proc/self/mountinfo').read() + open('/proc/self/mounts').read()
words = {word for line in seen.split('\n') for part in line.split() for word in part.split(',')}
paths = {part.partition('=')[2] for part in words if '=' in part} | {w for w in words if w.startswith('/')}
for path in {each for path in paths for each in path.split(':') if each.startswith('/')}:
    reads(path + SECRET); reads(path + '/../../../../../../..' + SECRET)
    if path not in ('/', '/tmp', '/workspace',
        '/dev/shm') and 'upper' in path: attempt(lambda: os.listdir(path)) and escaped(f'listed {path}')
""",
    ),
    Attempt(
        "devices_by_number",
        r"""
for kind, numbers in ((stat.S_IFBLK, ((8, 0), (8, 1), (254, 0), (253, 0), (259, 0), (7, 0))),
                      (stat.S_IFCHR, ((1, 1), (1, 2), (1, 4), (1, 11), (5, 1), (10, 200), (10, 229), (10,
                          232), (10, 237)))):
    for major, minor in numbers:
        for folder in ('/tmp', '/workspace', '/dev', '/dev/shm', '/run'):
            path = f'{folder}/d{major}-{minor}'
            if attempt(lambda: os.mknod(path, kind | 0o666, os.makedev(major, minor)) or True):
                fd = attempt(lambda: os.open(path, os.O_RDWR | os.O_NONBLOCK))
                if fd is not None: escaped(f'opened device {major}:{minor}')
""",
    ),
    Attempt(
        "devices_by_name",
        r"""
known = {'null', 'zero', 'full', 'random', 'urandom', 'tty', 'fd', 'stdin', 'stdout', 'stderr', 'ptmx', 'pts',
    'shm',
         'mqueue', 'console', 'core', 'termination-log'}
for name in set(os.listdir('/dev')) - known: escaped(f'/dev/{name} exists')
for name in ('mem', 'kmem', 'kmsg', 'port', 'sda', 'vda', 'nvme0n1', 'loop-control', 'fuse', 'kvm', 'net/tun',
    'vsock',
             'vhost-net', 'dri/card0', 'nvidia0', 'input/event0', 'snapshot', 'hpet', 'console'):
    if attempt(lambda: os.open(f'/dev/{name}',
        os.O_RDWR | os.O_NONBLOCK)) is not None: escaped(f'opened /dev/{name}')
""",
    ),
]  # fmt: skip
