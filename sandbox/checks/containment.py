"""What a sandbox must not see or reach: the host's files, secrets, processes, network, kernel."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from sandbox.base import SandboxSpec
from sandbox.check import Bench, Check
from sandbox.checks.processes import processes, running


async def host_environment_is_invisible(bench: Bench) -> None:
    """No variable of the client arrives, nor can it be read from a process."""
    name, value = "POSTTRAIN_CHECK_SECRET", "c0ffee-environment"
    os.environ[name] = value
    try:
        async with bench.box() as box:
            for user in ("agent", "root"):
                seen = await box.exec("env; cat /proc/*/environ", user=user)
                assert value.encode() not in seen.stdout, f"{user} sees the client's environment"
    finally:
        del os.environ[name]


async def host_files_are_invisible(bench: Bench) -> None:
    """Home folders, temporary files and key files of the host are not there, for root neither."""
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_text("c0ffee-file")
        homes = [
            str(Path.home() / ".ssh"),
            str(Path.home() / ".bash_history"),
            "/etc/shadow",
            "/etc/machine-id",
        ]
        async with bench.box() as box:
            for user in ("agent", "root"):
                for path in (str(secret), *homes, os.getcwd() + "/pyproject.toml"):
                    assert not (await box.exec(["cat", path], user=user)).ok, f"{user} reads {path}"
                grep = await box.exec("grep -rsl c0ffee-file /tmp /home /mnt /srv /opt /var /run", user=user)
                assert grep.stdout == b"", grep.text
                assert (await box.exec("find /root -type f -maxdepth 2", user=user)).stdout == b""


async def host_processes_are_invisible(bench: Bench) -> None:
    """Only processes of the sandbox are in /proc."""
    async with bench.box() as box:
        seen = await processes(box, user="root")
        assert len(seen) <= 10, seen  # a host has more
        assert not (await box.exec(f"test -d /proc/{os.getpid()}/fd && test {os.getpid()} -gt 50")).ok


async def init_cannot_be_inspected(bench: Bench) -> None:
    """The agent reads neither descriptors nor memory of the sandbox's own processes."""
    async with bench.box() as box:
        for what in ("ls /proc/1/fd", "cat /proc/1/environ", "head -c 1 /proc/1/mem", "ls /proc/1/root/",
                     "cat /proc/1/maps"):  # fmt: skip
            seen = await box.exec(what)
            assert not seen.ok or seen.stdout == b"", f"{what}: {seen.text}"


async def no_network(bench: Bench) -> None:
    """Loopback alone: no route, no name server, no host port, no abstract socket of the host."""
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket() as server:
        abstract.bind("\0posttrain-check")
        abstract.listen()
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        script = (
            "import socket\n"
            "def attempt(family, address):\n"
            "    s = socket.socket(family); s.settimeout(2)\n"
            "    try: s.connect(address); print('reached', address)\n"
            "    except OSError as error: pass\n"
            f"attempt(socket.AF_INET, ('127.0.0.1', {port}))\n"
            "attempt(socket.AF_INET, ('192.0.2.1', 80))\n"
            "attempt(socket.AF_INET, ('169.254.169.254', 80))\n"
            "attempt(socket.AF_INET6, ('2001:db8::1', 80))\n"
            "attempt(socket.AF_INET6, ('fe80::1', 80))\n"
            "attempt(socket.AF_UNIX, '\\0posttrain-check')\n"
            "try: print('resolved', socket.getaddrinfo('example.org', 80))\n"
            "except OSError: pass\n"
            "print([name for _, name in socket.if_nameindex()])\n"
        )
        async with bench.box() as box:
            seen = await box.exec(["python3", "-c", script], timeout=30)
            assert seen.stdout == b"['lo']\n", seen


async def loopback_works(bench: Bench) -> None:
    """A server and a client inside reach each other."""
    script = (
        "import socket, threading\n"
        "s = socket.create_server(('127.0.0.1', 0))\n"
        "threading.Thread(target=lambda: s.accept()[0].sendall(b'hi')).start()\n"
        "print(socket.create_connection(s.getsockname()).recv(2))\n"
    )
    async with bench.box() as box:
        assert (await box.exec(["python3", "-c", script])).stdout == b"b'hi'\n"


async def no_capabilities(bench: Bench) -> None:
    """The agent has none, can gain none, and setuid programs do not help."""
    async with bench.box() as box:
        status = (await box.exec("cat /proc/self/status")).stdout.decode()
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(fields[name], 16) == 0, f"{name}: {fields[name]}"
        assert fields["NoNewPrivs"].strip() == "1", fields["NoNewPrivs"]
        await box.exec("cp /usr/bin/id /workspace/id; chmod 4755 /workspace/id", user="root")
        seen = await box.exec("/workspace/id -u; /workspace/id -ru")
        assert seen.stdout == b"1000\n1000\n", seen


async def no_mounts_or_namespaces(bench: Bench) -> None:
    """Neither user can mount, or make namespaces to mount in."""
    async with bench.box() as box:
        for user in ("agent", "root"):
            for what in ("mount -t tmpfs none /mnt", "umount /proc", "unshare -r true", "unshare -m true",
                         "mount -o remount,rw /usr", "mount -t proc none /mnt", "unshare -rm true",
                         "mount --bind /workspace /usr"):  # fmt: skip
                assert not (await box.exec(what, user=user)).ok, f"{user} could {what}"


async def system_is_read_only(bench: Bench) -> None:
    """The host's programs cannot be changed, by root neither; deleting /usr harms nobody."""
    async with bench.box() as box, bench.box() as neighbour:
        for user in ("agent", "root"):
            await box.exec(
                "rm -rf /usr/bin /usr/sbin /bin /etc /opt /workspace /home /var 2>/dev/null",
                user=user,
                timeout=60,
            )
        assert (await neighbour.exec("ls /usr/bin/env /workspace -d")).ok, "the neighbour lost its files"
        assert Path("/usr/bin/env").exists(), "THE HOST LOST ITS FILES"


async def kernel_settings_are_out_of_reach(bench: Bench) -> None:
    """sysctls, sysrq, kernel memory and devices are closed, for root too."""
    async with bench.box() as box:
        for user in ("agent", "root"):
            # `true >>` opens for writing and writes nothing: a hole that is found here does no harm
            for what in ("true >> /proc/sys/kernel/core_pattern", "true >> /proc/sys/vm/drop_caches",
                         "test -s /proc/kcore", "head -c 1 /proc/kmsg | grep .", "test -s /proc/keys",
                         "mknod /tmp/sda b 8 0", "mknod /tmp/mem c 1 1", "ls /dev/sda /dev/vda /dev/mem",
                         "for f in $(find /sys/fs/cgroup -type f); do (echo 1 > $f) && exit 0; done; exit 1",
                         "test -f /proc/sysrq-trigger -a -w /proc/sysrq-trigger"):  # fmt: skip
                assert not (await box.exec(what, user=user, timeout=5)).ok, f"{user} could {what}"


async def dangerous_calls_are_refused(bench: Bench) -> None:
    """bpf, keyrings, io_uring, perf and userfaultfd are refused, vsock and packet sockets too."""
    script = (
        "import ctypes, os, socket\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "x86 = os.uname().machine == 'x86_64'\n"
        "calls = dict(bpf=(321, 280), keyctl=(250, 219), io_uring_setup=(425, 425), perf=(298, 241),"
        " userfaultfd=(323, 282), open_by_handle_at=(304, 265), add_key=(248, 217))\n"
        "for name, numbers in calls.items():\n"
        "    result = libc.syscall(numbers[0 if x86 else 1], 0, 0, 0, 0, 0)\n"
        "    if result >= 0 or ctypes.get_errno() not in (1, 38): print(name, result, ctypes.get_errno())\n"
        "for family in (17, 38, 40):\n"
        "    try: socket.socket(family, socket.SOCK_STREAM); print('family', family)\n"
        "    except OSError: pass\n"
    )
    async with bench.box() as box:
        seen = await box.exec(["python3", "-c", script])
        assert seen.text == "", seen.text


async def neighbours_are_invisible(bench: Bench) -> None:
    """Files, shared memory, message queues and processes of one sandbox are not in another."""
    async with bench.box() as one, bench.box() as two:
        await one.exec("echo x > /tmp/mine; echo x > /dev/shm/mine; ipcmk -Q; sleep 311 >/dev/null 2>&1 &")
        seen = await two.exec("find /tmp /dev/shm -type f; ipcs -q | grep 0x")
        assert seen.stdout == b"", seen.text
        assert await running(one, "sleep 311") == 1
        assert await running(two, "sleep 311") == 0


async def root_network_only_when_asked(bench: Bench) -> None:
    """A sandbox without `network=host` has no resolver configured."""
    spec = SandboxSpec(image=bench.image, owner=bench.owner)
    async with await bench.provider.create(spec) as box:
        assert (await box.exec("grep -c nameserver /etc/resolv.conf")).stdout.strip() in (b"0", b"")


CHECKS = [
    Check(function)
    for function in (
        host_environment_is_invisible, host_files_are_invisible, host_processes_are_invisible, loopback_works,
        init_cannot_be_inspected, no_capabilities, no_mounts_or_namespaces, system_is_read_only,
        kernel_settings_are_out_of_reach, neighbours_are_invisible, root_network_only_when_asked,
    )
] + [
    Check(no_network, needs=("network_none",)), Check(dangerous_calls_are_refused, needs=("seccomp",)),
]  # fmt: skip
