"""Ways out through files: what is transferred, what is frozen, and what stays."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import os
import tarfile
from pathlib import Path

from sandbox.base import Sandbox, SandboxError, SandboxProvider
from sandbox.escapes.arena import Arena
from sandbox.escapes.suite import Attempt


def _tar(*members: tuple[str, bytes, str]) -> bytes:
    """A tar of (name, type, link target); regular files hold `x`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind, target in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            member.size = 1 if kind == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(b"x") if kind == tarfile.REGTYPE else None)
    return buffer.getvalue()


async def _uploads(bait: Arena, box: Sandbox, provider: SandboxProvider) -> str:
    """Tars that want to leave, into places with planted links; `Arena.damage` sees what got out."""
    await box.exec(["ln", "-sfn", str(bait.folder), "/workspace/out"])
    await box.exec(["sh", "-c", f"mkdir -p /workspace{bait.folder.parent}; ln -sfn / /workspace/root"])
    tars = [
        _tar(("link", tarfile.SYMTYPE, str(bait.folder)), ("link/planted", tarfile.REGTYPE, "")),
        _tar(("out/planted", tarfile.REGTYPE, "")),
        _tar((f"root{bait.folder}/planted", tarfile.REGTYPE, "")),
        _tar((f"{bait.folder}/planted", tarfile.REGTYPE, "")),
        _tar(("../" * 12 + f"{bait.folder}/planted"[1:], tarfile.REGTYPE, "")),
        _tar(("hard", tarfile.LNKTYPE, f"{bait.folder}/secret"), ("hard", tarfile.REGTYPE, "")),
        _tar(
            ("a", tarfile.SYMTYPE, "b"),
            ("b", tarfile.SYMTYPE, str(bait.folder)),
            ("a/planted", tarfile.REGTYPE, ""),
        ),
    ]
    for tar in tars:
        with contextlib.suppress(OSError, ValueError, SandboxError):
            await box.put_tree("/workspace", tar)
    for path in ("out/planted", f"root{bait.folder}/planted", "../" * 12 + str(bait.folder)[1:] + "/planted"):
        with contextlib.suppress(OSError, ValueError, SandboxError):
            await box.write(path, b"x")
    return ""


async def _downloads(bait: Arena, box: Sandbox, provider: SandboxProvider) -> str:
    """Links, folders and /proc by way of read and get_tree."""
    secret = bait.secret.encode()
    await box.exec(["ln", "-sfn", str(bait.folder), "/workspace/out"])
    await box.exec(["ln", "-sfn", str(bait.folder / "secret"), "/workspace/file"])
    for path in ("file", "out/secret", str(bait.folder / "secret"), f"/proc/1/root{bait.folder}/secret",
                 f"/proc/self/root{bait.folder}/secret", f"/proc/{bait.pid}/environ", "/proc/self/environ",
                 "/proc/1/environ", f"/proc/self/cwd{bait.folder}/secret"):  # fmt: skip
        with contextlib.suppress(OSError, ValueError, SandboxError):
            if secret in await box.read(path):
                return f"read({path!r}) gave the bait"
    for path in (
        "out",
        str(bait.folder),
        "/proc/1/root" + str(bait.folder),
        "/proc/self/fd",
        "/proc/self/task",
    ):
        with contextlib.suppress(OSError, ValueError, SandboxError):
            async with asyncio.timeout(20):
                if secret in await box.get_tree(path, max_bytes=1 << 20):
                    return f"get_tree({path!r}) gave the bait"
    return ""


async def _races(bait: Arena, box: Sandbox, provider: SandboxProvider) -> str:
    """A folder that changes into a link to the bait and back while uploads pass through it."""
    swap = (
        "import os\n"
        f"os.makedirs('/workspace/r/d', exist_ok=True); os.symlink({str(bait.folder)!r}, '/workspace/r/l')\n"
        "print('up', flush=True)\n"
        "while True:\n"
        "  try:\n"
        "    os.rename('/workspace/r/d', '/workspace/r/x'); os.rename('/workspace/r/l', '/workspace/r/d')\n"
        "    os.rename('/workspace/r/d', '/workspace/r/l'); os.rename('/workspace/r/x', '/workspace/r/d')\n"
        "  except OSError: pass\n"
    )
    racer = await box.spawn(["python3", "-c", swap])
    await racer.readline()
    for number in range(30):
        with contextlib.suppress(OSError, ValueError, SandboxError):
            await box.put_tree("/workspace/r", _tar((f"d/planted{number}", tarfile.REGTYPE, "")))
        with contextlib.suppress(OSError, ValueError, SandboxError):
            if bait.secret.encode() in await box.read("/workspace/r/d/secret"):
                return "a race read the bait"
    await racer.kill()
    await racer.wait()
    return ""


_ODD_NAMES = r"""
for name in ('.wh...', '.wh..', '.wh..wh..opq', '.wh.usr', '.wh..wh.plnk', 'a\\b', '.wh.' + 'x' * 200):
    attempt(lambda: open('/workspace/' + name, 'w').write('x'))
attempt(lambda: os.makedirs('/workspace/.wh.dir/deep'))
attempt(lambda: os.symlink(FOLDER, '/workspace/link'))
attempt(lambda: os.symlink('/', '/workspace/top'))
for name in ('/etc/passwd', '/workspace/passwd'): attempt(lambda: os.mknod(name + '.dev',
    stat.S_IFCHR | 0o666, 0))
"""


async def _snapshots(bait: Arena, box: Sandbox, provider: SandboxProvider) -> str:
    """Names that mean something in layers, frozen and stored on the host, then used."""
    try:
        image = await box.snapshot()
    except (ValueError, OSError, SandboxError):
        return ""
    spec = dataclasses.replace(box.spec, image=image)
    async with await provider.create(spec) as child:
        seen = await child.exec(
            f"cat /workspace/link/secret /workspace/top{bait.folder}/secret; ls /usr/bin/env"
        )
        if bait.secret.encode() in seen.stdout:
            return "a frozen link reads the bait"
        if b"/usr/bin/env" not in seen.stdout:
            return "a frozen name hid the image's own files"
    return "" if Path("/usr/bin/env").exists() and os.path.isdir("/usr") else "THE HOST LOST FILES"


async def _images(bait: Arena, box: Sandbox, provider: SandboxProvider) -> str:
    """What one sandbox changed of its system must not be in the next one of the same image."""
    async with await provider.create(box.spec) as fresh:
        seen = await fresh.exec(
            "cat /usr/bin/planted /bin/planted /usr/lib/planted /opt/planted /etc/planted"
        )
        if b"planted by an escape" in seen.stdout:
            return "a change reached another sandbox of the image"
    for place in ("/usr/bin/planted", "/usr/lib/planted", "/opt/planted", "/etc/planted"):
        if Path(place).exists():
            return f"{place} appeared on the host"
    return ""


ATTEMPTS = [
    Attempt("bait_by_its_path", r"""
reads(SECRET); reads('/..' + SECRET); reads('/proc/self/root' + SECRET); reads('/proc/thread-self/root/..'
    + SECRET)
if os.path.isdir(FOLDER): escaped('the folder of the host is here')
for top in ('/tmp', '/var/tmp', '/home', '/root', '/mnt', '/media', '/srv', '/opt', '/run', '/var/lib'):
    for path in glob.glob(f'{top}/*')[:200] + glob.glob(f'{top}/*/*')[:500]:
        if os.path.basename(path) == 'secret': reads(path)
"""),
    Attempt("links_to_the_bait", r"""
for number, target in enumerate((SECRET, '../' * 20 + SECRET[1:], '/proc/1/root' + SECRET)):
    attempt(lambda: os.symlink(target, f'/tmp/l{number}')); reads(f'/tmp/l{number}')
    attempt(lambda: os.link(target, f'/tmp/h{number}')); reads(f'/tmp/h{number}')
    attempt(lambda: open(f'/tmp/l{number}', 'w').write('taken'))
"""),
    Attempt("change_the_system", r"""
for place in ('/usr/bin/planted', '/bin/planted', '/usr/lib/planted', '/opt/planted', '/etc/planted'):
    attempt(lambda: open(place, 'w').write('planted by an escape'))
for path in ('/usr/bin/env', '/bin/sh', '/etc/passwd', '/etc/ld.so.preload'): attempt(lambda: open(path,
    'a').close())
""", watch=_images),
    Attempt("uploads", watch=_uploads),
    Attempt("downloads", watch=_downloads),
    Attempt("races_with_uploads", watch=_races),
    Attempt("names_in_layers", _ODD_NAMES, watch=_snapshots),
]  # fmt: skip
