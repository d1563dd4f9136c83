"""Ways out through sockets."""

from sandbox.escapes.suite import Attempt

_TRY = r"""
def connect(family, address, kind=socket.SOCK_STREAM, seconds=1):
    def go():
        with socket.socket(family, kind) as s:
            s.settimeout(seconds); s.connect(address)
            if kind == socket.SOCK_STREAM:
                data = attempt(lambda: s.recv(100)) or b''
                escaped(f'connected to {address}: {data[:5]!r}')
    attempt(go)
"""

ATTEMPTS = [
    Attempt(
        "ports_of_the_host",
        _TRY + r"""
for host in ('127.0.0.1', '0.0.0.0', '127.1.2.3', '10.0.2.2', '172.17.0.1', '192.168.0.1', '10.0.0.1',
    '192.0.2.1'):
    connect(socket.AF_INET, (host, PORT))
for host in ('::1', '::ffff:127.0.0.1', 'fe80::1'): connect(socket.AF_INET6, (host, PORT))
for name in (HOST, 'host.docker.internal', 'gateway.docker.internal', 'host.containers.internal',
    'kubernetes.default.svc'):
    attempt(lambda: connect(socket.AF_INET, (socket.gethostbyname(name), PORT)))
for line in (attempt(lambda: open('/proc/net/route').read()) or '').split('\n')[1:]:
    words = line.split()
    if len(words) > 2 and words[2] != '00000000':
        connect(socket.AF_INET, (socket.inet_ntoa(struct.pack('<I', int(words[2], 16))), PORT))
""",
        timeout=60,
    ),
    Attempt("abstract_sockets_of_the_host", _TRY + r"""
connect(socket.AF_UNIX, '\0' + ABSTRACT)
for line in (attempt(lambda: open('/proc/net/unix').read()) or '').split('\n'):
    if '@' in line and ABSTRACT in line: escaped(f'listed: {line}')
"""),
    Attempt("socket_files_of_the_host", _TRY + r"""
for path in (FOLDER + '/socket', '/var/run/docker.sock',
             '/run/docker.sock',
    '/run/containerd/containerd.sock',
             '/run/systemd/private', '/run/dbus/system_bus_socket', '/run/crio/crio.sock', '/dev/log',
             '/run/user/0/bus'):
    connect(socket.AF_UNIX, path)
for top in ('/run', '/var/run', '/tmp', '/dev'):
    for path in glob.glob(f'{top}/**', recursive=True):
        if attempt(lambda: stat.S_ISSOCK(os.lstat(path).st_mode)): connect(socket.AF_UNIX, path)
"""),
    Attempt("foreign_families", r"""
for family in (40, 17, 38, 30, 44, 21, 31, 16 | 0x100, 45, 42):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        made = attempt(lambda: socket.socket(family, kind, 0))
        if made is not None: escaped(f'family {family}')
"""),
    Attempt("raw_packets", r"""
for family, kind, protocol in ((socket.AF_INET, socket.SOCK_RAW, 255), (socket.AF_INET, socket.SOCK_RAW, 1),
                               (socket.AF_INET6, socket.SOCK_RAW, 58), (17, socket.SOCK_RAW, 0x300), (17,
                                   socket.SOCK_DGRAM, 0x300)):
    if attempt(lambda: socket.socket(family, kind,
        protocol)) is not None: escaped(f'raw socket {family} {protocol}')
"""),
    Attempt("network_devices", r"""
def ask(message_type, flags, body):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as s:
        s.settimeout(2); s.bind((0, 0))
        s.send(struct.pack('IHHII', 16 + len(body), message_type, flags | 5, 1, 0) + body)
        data = s.recv(65536)
        return struct.unpack_from('i', data, 16)[0] if struct.unpack_from('H', data, 4)[0] == 2 else None
name = struct.pack('HH', 4 + 9, 3) + b'no-such0\0' + bytes(3)
for message_type in (16, 17, 19):  # new, delete and set a device that does not exist
    error = attempt(lambda: ask(message_type, 0, struct.pack('BxHiII', 0, 0, 0, 0, 0) + name))
    if error not in (None, -errno.EPERM): escaped(f'message {message_type} gave {error}')
names = {n for _, n in socket.if_nameindex()}
if names - {'lo', 'eth0', 'sit0', 'tunl0', 'ip6tnl0'}: escaped(f'devices {names}')
"""),
    Attempt("messages_of_the_kernel", r"""
for protocol in (9, 15, 10, 6, 11, 20):
    def go():
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as s:
            s.settimeout(0.3); s.bind((0, 1))
            data = s.recv(4096)
            if data: escaped(f'netlink {protocol} said {data[:40]!r}')
    attempt(go)
"""),
    Attempt("metadata_and_names", _TRY + r"""
for host in ('169.254.169.254', '169.254.170.2', '100.100.100.200', '168.63.129.16'):
    connect(socket.AF_INET, (host, 80))
connect(socket.AF_INET6, ('fd00:ec2::254', 80))
query = bytes.fromhex('123401000001000000000000') + b'\x06escape\x07example\x03org\0\0\x10\0\x01'
for host in ('8.8.8.8', '1.1.1.1', '127.0.0.53', '127.0.0.11', '169.254.20.10', '10.96.0.10'):
    def go():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.settimeout(0.5); s.sendto(query, (host, 53))
            if s.recv(512): escaped(f'{host} answered')
    attempt(go)
if attempt(lambda: socket.getaddrinfo('example.org', 80)): escaped('a name was resolved')
""", timeout=60),
]  # fmt: skip
