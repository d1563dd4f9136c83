"""The base "host": this machine's /usr and Python, read-only, under an /etc of our own making.

Nothing of the host's /etc, home folders, /var, /run or /opt is shown; only what programs need to start
(linker cache, alternatives, certificates) is copied once into a skeleton.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from pathlib import Path

from sandbox.trees import AGENT

FORMAT = 1
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_COPIED = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "ssl/certs", "ssl/openssl.cnf",
           "ca-certificates.conf", "mime.types", "protocols", "services", "shells", "debian_version",
           "bash.bashrc", "profile", "inputrc", "magic", "terminfo", "pki/tls/certs")  # fmt: skip
_WRITTEN = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\n"
    f"agent:x:{AGENT}:{AGENT}:agent:/home/agent:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": f"root:x:0:\ntty:x:5:\nagent:x:{AGENT}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
    "resolv.conf": "",
    "timezone": "Etc/UTC\n",
    "gitconfig": "[safe]\n\tdirectory = *\n[init]\n\tdefaultBranch = main\n[user]\n"
    "\tname = agent\n\temail = agent@sandbox\n[advice]\n\tdetachedHead = false\n",
}
_FOLDERS = ("dev", "proc", "run", "sys", "tmp", "etc", "opt", "mnt", "srv", "var/tmp", "var/log", "var/lib",
            "var/cache", "home", "root")  # fmt: skip


BARE = f"sha256:{hashlib.sha256(b'bare 1').hexdigest()}"
"""Names the skeleton of `build_bare`."""


def python_prefix() -> str:
    """Real path of the interpreter's installation, shown read-only at its own path."""
    return os.path.realpath(sys.base_prefix)


def digest() -> str:
    """Identifies the base: format, Python, distribution, architecture."""
    release = Path("/etc/os-release")
    parts = [str(FORMAT), platform.python_version(), python_prefix(), platform.machine(),
             release.read_text() if release.exists() else ""]  # fmt: skip
    return f"sha256:{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}"


def binds() -> list[tuple[str, str]]:
    """(host folder, path inside) of what is mounted read-only."""
    found = [path for path in _SYSTEM if os.path.isdir(path) and not os.path.islink(path)]
    prefix = python_prefix()
    if not any(prefix == path or prefix.startswith(path + "/") for path in found):
        found.append(prefix)
    return [(path, path) for path in found]


def build(folder: Path) -> None:
    """Fill `folder` with mount points, links and /etc."""
    for name in _FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for path in _SYSTEM:
        if os.path.islink(path):
            (folder / path[1:]).symlink_to(os.readlink(path))
    for _, target in binds():
        (folder / target[1:]).mkdir(parents=True, exist_ok=True)
    for name in ("home/agent", "workspace"):
        (folder / name).mkdir()
        if os.geteuid() == 0:
            os.chown(folder / name, AGENT, AGENT)
    (folder / "var/tmp").chmod(0o1777)
    etc = folder / "etc"
    for name in _COPIED:
        _copy(Path("/etc") / name, etc / name)
    for name, text in _WRITTEN.items():
        (etc / name).write_text(text)
    (etc / "os-release").symlink_to("../usr/lib/os-release")
    (etc / "mtab").symlink_to("/proc/self/mounts")
    if os.path.exists("/usr/share/zoneinfo/Etc/UTC"):
        (etc / "localtime").symlink_to("/usr/share/zoneinfo/Etc/UTC")


def build_bare(folder: Path) -> None:
    """Fill `folder` with what lies under images that hold a whole system: mount points and defaults."""
    for name in (*_FOLDERS, "home/agent", "workspace"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in ("home/agent", "workspace"):
        if os.geteuid() == 0:
            os.chown(folder / name, AGENT, AGENT)
    (folder / "tmp").chmod(0o1777)
    (folder / "var/tmp").chmod(0o1777)
    for name, text in _WRITTEN.items():
        (folder / "etc" / name).write_text(text)


def _copy(source: Path, target: Path) -> None:
    """Copy what exists and is readable by everyone; private keys and the like stay out."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
        for entry in sorted(source.iterdir()):
            if entry.is_symlink():
                (target / entry.name).symlink_to(os.readlink(entry))
            elif entry.is_dir() or (entry.is_file() and entry.stat().st_mode & 0o004):
                _copy(entry, target / entry.name)
    elif source.is_file() and source.stat().st_mode & 0o004:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
