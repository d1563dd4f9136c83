from __future__ import annotations

import errno
import socket
import struct
from pathlib import Path

import pytest

from sandbox.base import PolicyUnsupported, SandboxLost, SandboxSpec, provider
from sandbox.checks.processes import running
from sandbox.namespace import NamespaceProvider, buildnet, probe
from sandbox.node import seccomp


def test_factory_names_its_choices(tmp_path: Path) -> None:
    assert provider("namespace", store=tmp_path).name == "namespace"
    with pytest.raises(ValueError, match="choose namespace"):
        provider("nonsense")


async def test_bad_requests_are_refused(provider: NamespaceProvider) -> None:
    image = provider.images.host_base()
    for spec in (SandboxSpec(image=image, pids=0), SandboxSpec(image=image, workdir="relative")):
        with pytest.raises(PolicyUnsupported):
            await provider.create(spec)
    async with await provider.create(SandboxSpec(image=image)) as box:
        with pytest.raises(ValueError, match="choose agent or root"):
            await box.exec("true", user="daemon")
        with pytest.raises(ValueError, match="NUL"):
            await box.exec(["echo", "a\0b"])


def test_what_is_not_enforced_is_said() -> None:
    nothing = {
        "version": 0,
        "memory": None,
        "pids": None,
        "cpu": None,
        "reasons": {"cpu": "no cpu", "memory": "no cgroups", "pids": "none"},
    }
    hello = {"groups": nothing, "user_namespace": True, "user_namespace_reason": "", "id_map": None,
             "autogroups": True, "core_scheduling": "one thread a core", "numa_nodes": 2}  # fmt: skip
    found = probe.capabilities(hello)
    assert (found.scheduling, found.core_scheduling, found.numa_nodes) == (False, False, 2)
    assert [text in found.unenforced[3 + at] for at, text in enumerate(("no cpu", "one thread"))] == [
        True
    ] * 2
    calm = probe.capabilities({**hello, "autogroups": False, "core_scheduling": ""})
    assert (calm.scheduling, calm.core_scheduling) == (True, True)
    assert (found.memory_limit, found.pids_limit, found.disk_limit) == (False, False, True)
    assert len(found.unenforced) == 7
    assert "no cgroups" in found.unenforced[0]


@pytest.mark.parametrize(
    ("reply", "wanted"),
    [
        (None, "died while it was being set up"),
        (
            {"error": "mount overlay on /x: No such device", "errno": errno.ENODEV},
            "load the module `overlay`",
        ),
        ({"error": "socketpair", "errno": errno.EMFILE}, "raise `ulimit -n`"),
        ({"error": "clone", "errno": errno.ENOSPC}, "max_.*_namespaces"),
    ],
)
def test_errors_say_what_to_change(reply: dict[str, object] | None, wanted: str) -> None:
    with pytest.raises(AssertionError, match=wanted):
        raise AssertionError(probe.explain(reply))


def test_build_settings_pass_only_with_network(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("certificate")
    environment = {"PIP_INDEX_URL": "https://mirror/simple", "PIP_CERT": str(bundle), "SECRET": "x"}
    assert buildnet.passage("none", environment) == ([], [], {})
    shown, etc, variables = buildnet.passage("host", environment)
    assert shown == [(str(bundle), "host/PIP_CERT")]
    assert variables == {"PIP_INDEX_URL": "https://mirror/simple", "PIP_CERT": "/run/host/PIP_CERT"}
    assert {target for _, target in etc} <= {"/etc/resolv.conf", "/etc/hosts"}


async def test_build_network(
    provider: NamespaceProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("certificate")
    monkeypatch.setenv("PIP_CERT", str(bundle))
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror/simple")
    spec = SandboxSpec(image=provider.images.host_base(), network="host")
    async with await provider.create(spec) as box:
        seen = await box.exec("cat $PIP_CERT; echo; echo $PIP_INDEX_URL")
        assert seen.stdout == b"certificate\nhttps://mirror/simple\n"
        interfaces = await box.exec(["python3", "-c", "import socket; print(len(socket.if_nameindex()))"])
        assert int(interfaces.stdout) == len(socket.if_nameindex())
        await box.exec("echo x > file")
        assert provider.images.exists(await box.snapshot())


async def test_nested_root_can_make_namespaces_and_the_agent_cannot(provider: NamespaceProvider) -> None:
    spec = SandboxSpec(image=provider.images.host_base(), nested=True)
    inner = "mount -t proc -o ro p /proc && mount -t tmpfs t /mnt && ls /mnt && ls -d /proc/[0-9]* | wc -l"
    jail = f"unshare -mpif --propagation private sh -c '{inner}'"
    async with await provider.create(spec) as box:
        seen = await box.exec(jail, user="root")
        assert seen.ok, seen.text
        assert int(seen.stdout) <= 5, "the inner process namespace shows outer processes"
        assert not (await box.exec(jail)).ok
        assert not (await box.exec("unshare -r true")).ok


WAYS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
RDONLY, REMOUNT, BIND, REC, PRIVATE = 1, 32, 4096, 16384, 1 << 18
NEWNS, NEWUTS, NEWUSER, NEWPID = 1 << 17, 1 << 26, 1 << 28, 1 << 29
tried = []
def way(name, *calls):
    "Make the calls; then only open, for writing, a setting of our own uts namespace. Nothing is written."
    pid = os.fork()
    if pid == 0:
        done = [call() for call in calls]
        where = '/tmp/p' if name.startswith('new') else '/proc'
        try: os.open(where + '/sys/kernel/domainname', os.O_WRONLY)
        except OSError: os._exit(0)
        print(name, done, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    tried.append(name)
def fresh(flags=0):
    os.makedirs('/tmp/p', exist_ok=True)
    return libc.mount(b'p', b'/tmp/p', b'proc', flags, None)
def apart(flags):
    done = libc.unshare(flags)
    return done, flags & NEWPID and os.fork() and os._exit(os.wait()[0] * 0)
def remount(place, flags): return libc.mount(None, place, None, flags, None)
own = lambda: apart(NEWNS | NEWUTS | NEWPID)
private = lambda: libc.mount(None, b'/', None, REC | PRIVATE, None)
way('plain')
way('unmounted', lambda: libc.umount2(b'/proc/sys', 2))
way('unmounted in own', own, private, lambda: libc.umount2(b'/proc/sys', 2))
way('unmounted twice', own, private, lambda: [libc.umount2(b'/proc', 2) for _ in range(3)])
for name, flags in (('remounted', REMOUNT), ('bind remounted', REMOUNT | BIND)):
    way(name, lambda: remount(b'/proc/sys', flags))
    way(name + ' in own', own, private, lambda: remount(b'/proc/sys', flags))
way('new writable', own, private, fresh)
way('new read-only', own, private, lambda: fresh(RDONLY))
way('new remounted', own, private, lambda: fresh(RDONLY), lambda: remount(b'/tmp/p', REMOUNT))
way('new bind remounted', own, private, lambda: fresh(RDONLY), lambda: remount(b'/tmp/p', REMOUNT | BIND))
way('new in a user namespace', lambda: apart(NEWUSER | NEWNS | NEWPID | NEWUTS), fresh)
pid = os.fork()
if pid == 0:
    own(); private(); fresh(RDONLY)
    for each in ('sys/kernel/domainname', 'sysrq-trigger', 'irq/default_smp_affinity'):
        if os.path.exists('/tmp/p/' + each) and os.access('/tmp/p/' + each, os.W_OK): print(each)
    print('mounted' if os.path.exists('/tmp/p/self') else 'no proc', flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print(len(tried), 'tried')
"""


async def test_nested_root_opens_no_setting_of_the_host(provider: NamespaceProvider) -> None:
    spec = SandboxSpec(image=provider.images.host_base(), nested=True)
    async with await provider.create(spec) as box:
        done = await box.exec(["python3", "-c", WAYS], user="root", cwd="/")
        assert done.stdout == b"mounted\n13 tried\n", done.text
        assert (await box.exec("test ! -e /proc/whole && echo 500 > /proc/self/oom_score_adj")).ok


@pytest.mark.parametrize("program", [seccomp.PROGRAM, seccomp.NESTED_PROGRAM])
def test_seccomp_program_is_well_formed(program: bytes | None) -> None:
    if program is None:
        pytest.skip("no filter for this architecture")
    instructions = list(struct.iter_unpack("HBBI", program))
    assert instructions[-1] == (0x06, 0, 0, 0x7FFF0000), "the default is to allow"
    for at, (code, if_true, if_false, _) in enumerate(instructions):
        if code & 7 == 5:
            assert at + 1 + max(if_true, if_false) < len(instructions), f"jump out of the program at {at}"


async def test_a_guest_shares_the_sandbox_and_only_detaches(provider: NamespaceProvider, store: Path) -> None:
    spec = SandboxSpec(image=provider.images.host_base(), workdir="/some/where", env={"A": "1"})
    async with NamespaceProvider(store) as other, await provider.create(spec) as box:
        guest = await other.attach(box.id)
        await box.write("file", b"shared")
        assert (await guest.exec("cat file; echo $A")).stdout == b"shared1\n"
        held = await guest.exec("sleep 4000 & echo x")
        assert held.ok
        await guest.close()
        assert await running(box, "sleep 4000") == 1
        again = await other.attach(box.id)
        await box.close()
        assert not await again.alive()
        with pytest.raises(SandboxLost):
            await again.exec("true")
        await again.close()
        with pytest.raises(SandboxLost):
            await other.attach(box.id)
