"""A docker engine of one's own: own data, sockets and control group, no bridge, no firewall rules.

    python -m sandbox.docker.private FOLDER      (in the foreground; DOCKER_HOST=unix://FOLDER/docker.sock)

For tests and measurements, and for machines without an engine: it touches no other engine's images,
containers or networks, needs root and Debian's docker.io, and takes everything with it when it stops.
"""

from __future__ import annotations

import argparse
import contextlib
import grp
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

from sandbox.base import SandboxUnavailable
from sandbox.node import syscalls as sc
from sandbox.node.init import loopback_up

START_SECONDS = 60.0
STOP_SECONDS = 40.0
SUBORDINATE = ("/etc/subuid", "/etc/subgid")
NOBODY = 65534
OPEN_PLACE = "/var/opt"
"""Where the engine alone sees its data: remapped ids must be able to walk there, and may not to /root."""
FIRST_ID = 1_500_000_000
"""Of the ids that stand for the container's: far from those of people and services."""


class PrivateEngine:
    """A context manager: `dockerd` runs between enter and exit. Ends also when this process is killed.

    With `bridge` its containers may have a bridge and published ports, in a network namespace of the engine's
    own: `enter_network` of a child process (as `preexec_fn`) reaches those ports on 127.0.0.1. With `remap`
    root inside containers is an ordinary id outside, where the host has /etc/subuid and /etc/subgid to show
    other ones to the engine alone. Its mounts are in a mount namespace of its own and vanish with it.
    """

    def __init__(self, folder: Path, *, bridge: bool = False, remap: bool = True) -> None:
        self._bridge = bridge
        self._remap = remap and all(os.path.exists(path) for path in (*SUBORDINATE, OPEN_PLACE))
        self.folder = folder.absolute()
        self._seen = OPEN_PLACE if self._remap else f"{self.folder}/open"
        self.url = f"unix://{self.folder}/docker.sock"
        self.group = f"posttrain-engine-{os.getpid()}-{time.monotonic_ns()}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """SandboxUnavailable, with the engine's own last words, if it does not come up."""
        program = shutil.which("dockerd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        if program is None:
            raise SandboxUnavailable("there is no dockerd: run `sudo apt-get install docker.io`")
        if os.geteuid() != 0:
            raise SandboxUnavailable("only root can start a docker engine: run as root or use a running one")
        self.folder.mkdir(parents=True, exist_ok=True)
        if len(str(self.folder)) > 65:  # a socket's address holds 107 bytes, and containerd adds 38
            raise SandboxUnavailable(f"the path {self.folder} is too long for a socket: choose a shorter one")
        (self.folder / "open").mkdir(exist_ok=True)
        (self.folder / "open").chmod(0o711)
        (self.folder / "daemon.json").write_text("{}")
        names = {pwd.getpwuid(NOBODY).pw_name, grp.getgrgid(NOBODY).gr_name}
        (self.folder / "subordinate").write_text("".join(f"{name}:{FIRST_ID}:65536\n" for name in names))
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [program, "--config-file", f"{self.folder}/daemon.json", "--host", self.url,
                 "--data-root", f"{self._seen}/data", "--exec-root", f"{self.folder}/exec",
                 "--pidfile", f"{self.folder}/pid", "--storage-driver", "overlay2",
                 *([] if self._bridge else ["--bridge", "none"]),
                 *([f"--userns-remap={NOBODY}:{NOBODY}"] if self._remap else []),
                 "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--log-level", "warn",
                 "--exec-opt", "native.cgroupdriver=cgroupfs", "--cgroup-parent", f"/{self.group}",
                 "--containerd-namespace", self.group],
                cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=self._prepare,
            )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                words = (self.folder / "log").read_text(errors="replace").strip().splitlines()[-3:]
                self.stop()
                raise SandboxUnavailable(f"dockerd did not start: {' | '.join(words)}")
            time.sleep(0.05)

    def _prepare(self) -> None:
        """In the child, before it becomes dockerd."""
        sc.unshare(sc.CLONE_NEWNS)
        sc.mount(None, "/", None, sc.MS_REC | sc.MS_SLAVE)
        if self._remap:
            for path in SUBORDINATE:
                sc.mount(f"{self.folder}/subordinate", path, None, sc.MS_BIND)
            sc.mount(f"{self.folder}/open", OPEN_PLACE, None, sc.MS_BIND)
        if self._bridge:
            sc.unshare(sc.CLONE_NEWNET)
            loopback_up()
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGTERM)

    def enter_network(self) -> None:
        """Move the calling process into the engine's network namespace."""
        assert self._process is not None, "the engine runs"
        namespace = os.open(f"/proc/{self._process.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        sc.setns(namespace, sc.CLONE_NEWNET)
        os.close(namespace)

    def _answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(5)
                sock.connect(self.url.removeprefix("unix://"))
                sock.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
                return b" 200 " in sock.recv(64)
        except OSError:
            return False

    def stop(self) -> None:
        """Stop the engine with its containers and remove the control groups; its folder stays."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        with contextlib.suppress(OSError, ValueError):  # left behind only by an engine that was killed
            os.kill(int((self.folder / "exec/containerd/containerd.pid").read_text()), signal.SIGKILL)
        for group in Path("/sys/fs/cgroup").glob(f"**/{self.group}"):
            with contextlib.suppress(OSError):
                group.rmdir()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def main() -> None:
    """Run one until it is interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    with PrivateEngine(parser.parse_args().folder) as engine, contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        print(f"export DOCKER_HOST={engine.url}", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
