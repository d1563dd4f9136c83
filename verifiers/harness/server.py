"""The trusted process inside the sandbox: reads requests, forks jails, keeps results.

Started as root of the sandbox with the image's Python. Requests are JSON lines on standard input, the first
one is the configuration; replies are lines `ID LAST TEXT` on standard output, where the TEXTs of one id
joined are JSON (cut so that no line is long). One thread, one event loop, one fork for each request: the
interpreter is warm, pytest is imported, and nothing of the package under test ever is.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import pwd
import secrets
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from verifiers.harness import folding, jail, memo, plugin, wire

LINE = 32_000
OUTPUT = 4096
"""Bytes of the jail's printed output that are kept: its end. Only people read them."""


@dataclass
class Settings:
    """What is the same for every jail."""

    workdir: str
    home: str
    uid: int
    gid: int
    limits: jail.Limits
    env: dict[str, str]
    path: list[str]
    plugins: list[str]


@dataclass
class Job:
    """One running jail."""

    id: int
    pid: int
    pidfd: int
    results: int
    output: int
    started: float
    deadline: float
    receiver: wire.Receiver
    fold: folding.Fold = field(default_factory=folding.Fold)
    printed: bytes = b""
    timed_out: bool = False


class Server:
    """The event loop and its jobs."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.jobs: dict[int, Job] = {}
        self.memo = memo.CompileMemo()
        plugin.warm(jail.FOLDER)
        self.memo.install()
        self.integrity = plugin.Integrity()
        self._selector = selectors.DefaultSelector()
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._input = bytearray()

    def serve(self) -> None:
        """Until standard input closes."""
        os.set_blocking(0, False)
        self._selector.register(0, selectors.EVENT_READ, None)
        gc.collect()
        gc.freeze()
        while True:
            now = time.monotonic()
            wait = min((job.deadline for job in self.jobs.values()), default=now + 60) - now
            for key, _ in self._selector.select(max(0.0, wait)):
                if key.data is None:
                    if not self._read_requests():
                        return
                else:
                    self._event(key.data, key.fd)
            now = time.monotonic()
            for job in list(self.jobs.values()):
                if now >= job.deadline and not job.timed_out:
                    job.timed_out = True
                    os.kill(job.pid, signal.SIGKILL)

    def _read_requests(self) -> bool:
        try:
            data = os.read(0, 1 << 20)
        except BlockingIOError:
            return True
        if not data:
            for job in self.jobs.values():
                os.kill(job.pid, signal.SIGKILL)
            return False
        self._input += data
        if b"\n" not in data:
            return True
        *lines, rest = bytes(self._input).split(b"\n")
        self._input = bytearray(rest)
        for line in lines:
            request: dict[str, Any] = json.loads(line)
            match request["op"]:
                case "run":
                    self._start(request)
                case "cancel":
                    for job in self.jobs.values():
                        if job.id == request["id"]:
                            os.kill(job.pid, signal.SIGKILL)
                case "read":
                    reply(request["id"], {"files": read_base(request["paths"])})
                case _:
                    raise ValueError(f"unknown request {request['op']!r}")
        return True

    def _start(self, request: dict[str, Any]) -> None:
        self.memo.learn(self.settings.workdir, jail.BASE, self._test_files(request))
        key = secrets.token_bytes(32)
        results, results_in = os.pipe()
        output, output_in = os.pipe()
        started = time.monotonic()
        jail.unshare(jail.NEWPID)
        pid = os.fork()
        if pid == 0:
            init(self, request, key, results_in, output_in)
        jail.setns(self._own_pids, jail.NEWPID)
        os.close(results_in)
        os.close(output_in)
        job = Job(
            id=request["id"],
            pid=pid,
            pidfd=os.pidfd_open(pid),
            results=results,
            output=output,
            started=started,
            deadline=started + request["timeout"],
            receiver=wire.Receiver(key),
        )
        self.jobs[pid] = job
        for fd in (job.pidfd, results, output):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, job)

    def _test_files(self, request: dict[str, Any]) -> list[str]:
        names = (argument.split("::")[0] for argument in request["arguments"])
        return [f"{self.settings.workdir}/{name}" for name in names]

    def _event(self, job: Job, fd: int) -> None:
        if fd == job.pidfd:
            self._finish(job)
        elif job.pid in self.jobs:
            self._drain(job, fd)

    def _drain(self, job: Job, fd: int) -> bool:
        """Read what is there; False at the end of the pipe or when nothing is left for now."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
            return False
        if fd == job.output:
            job.printed = (job.printed + data)[-OUTPUT:]
        else:
            for frame in job.receiver.feed(data):
                job.fold.take(frame)
        return True

    def _finish(self, job: Job) -> None:
        """The jail's first process is dead, hence all of them."""
        _, status = os.waitpid(job.pid, 0)
        del self.jobs[job.pid]
        for fd in (job.results, job.output):
            while self._drain(job, fd):
                pass
        for fd in (job.pidfd, job.results, job.output):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
            os.close(fd)
        code = os.waitstatus_to_exitcode(status)
        result = job.fold.result()
        if job.receiver.forged:
            result["tampered"].append("bytes on the result pipe that the reporter did not write")
        printed = job.printed.decode(errors="replace")
        if job.timed_out:
            outcome = "timeout"
        elif code == INFRASTRUCTURE and not job.fold.ready:
            outcome = "infrastructure"
        else:
            outcome = "finished" if job.fold.finished else "crashed"
        result |= {
            "outcome": outcome,
            "exit": code,
            "duration": time.monotonic() - job.started,
            "output": printed,
        }
        reply(job.id, result)
        self.memo.learn(self.settings.workdir, jail.BASE, job.fold.loaded)


INFRASTRUCTURE = 113
"""Exit code of a jail that could not be set up, before any foreign code ran."""


def init(server: Server, request: dict[str, Any], key: bytes, results: int, output: int) -> None:
    """The first process of a jail. Waits for the test process, then takes everything down with it."""
    code, settings = INFRASTRUCTURE, server.settings
    try:
        quiet = os.open("/dev/null", os.O_RDWR)
        os.dup2(quiet, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # high and unpredictable, so that closing a range of descriptors or writing to a few is no trick
        channel = 600 + secrets.randbelow(400)
        os.dup2(results, channel, inheritable=False)
        os.closerange(3, channel)
        os.closerange(channel + 1, 1024)
        jail.enter(settings.workdir, settings.home, settings.uid, settings.gid, settings.limits.disk_mb)
        worker = os.fork()
        if worker == 0:
            work(server, request, key, channel)
        os.close(channel)
        jail.drop(0, 0)
        while True:
            pid, status = os.wait()
            if pid == worker:
                code = os.waitstatus_to_exitcode(status)
                code = code if code >= 0 else 128 - code
                break
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def work(server: Server, request: dict[str, Any], key: bytes, channel: int) -> None:
    """The test process: an unprivileged user from here on."""
    code, settings = INFRASTRUCTURE, server.settings
    try:
        jail.limit(settings.limits)
        jail.drop(settings.uid, settings.gid)
        os.umask(0o022)
        os.setsid()
        files = decode_files(request["files"])
        jail.lay(settings.workdir, files, frozenset(request["executable"]))
        os.chdir(settings.workdir)
        prepare_interpreter(settings)
        code = 1
        send = wire.sender(channel, key)
        known = {
            path: code
            for (path, _), code in server.memo.tests.items()
            if path.removeprefix(settings.workdir + "/") not in files
        }
        reporter = plugin.Reporter(send, settings.workdir, known, request["trace"])
        plugin.run(reporter, server.integrity, request["arguments"], settings.plugins)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def prepare_interpreter(settings: Settings) -> None:
    """Make this process look like `python -m pytest` in the workspace, and forget the harness's modules."""
    os.environ.clear()
    os.environ.update(settings.env)
    time.tzset()
    sys.path[:] = settings.path + [p for p in sys.path if p not in (jail.FOLDER, *settings.path)]
    sys.argv = ["pytest"]
    # nothing is there and nobody can put something there: no forged .pyc is ever read
    sys.pycache_prefix = jail.FOLDER + "/none"
    for name in [n for n in sys.modules if n.split(".")[0] == "verifiers"]:
        del sys.modules[name]
    sys.modules["__main__"] = type(sys)("__main__")
    signal.signal(signal.SIGINT, signal.default_int_handler)


def decode_files(files: Mapping[str, str | None]) -> dict[str, bytes | None]:
    return {path: None if text is None else base64.b64decode(text) for path, text in files.items()}


def read_base(paths: list[str] | None) -> dict[str, Any]:
    """Contents from the clean workspace; with None the list of its files (true: executable)."""
    if paths is None:
        listing: dict[str, Any] = {}
        for folder, names, files in os.walk(jail.BASE):
            if ".git" in names:
                names.remove(".git")
            for name in files:
                path = os.path.join(folder, name)
                listing[os.path.relpath(path, jail.BASE)] = os.access(path, os.X_OK)
        return listing
    found: dict[str, Any] = {}
    for path in paths:
        full = f"{jail.BASE}/{path}"
        if os.path.isfile(full) and not os.path.islink(full):
            with open(full, "rb") as file:
                found[path] = base64.b64encode(file.read()).decode()
        else:
            found[path] = None
    return found


def reply(id: int, value: dict[str, Any]) -> None:
    """Write one reply in lines of bounded length."""
    text = json.dumps(value)
    pieces = [text[i : i + LINE] for i in range(0, len(text), LINE)]
    lines = [f"{id} {int(i == len(pieces) - 1)} {piece}\n" for i, piece in enumerate(pieces)]
    data = "".join(lines).encode()
    while data:
        data = data[os.write(1, data) :]


def configure(config: dict[str, Any]) -> Settings:
    """Copy the workspace away from everybody's reach and lay the trusted files over the copy."""
    workdir: str = config["workdir"]
    try:
        user = pwd.getpwnam("agent")
        uid, gid, home = user.pw_uid, user.pw_gid, user.pw_dir
    except KeyError:
        uid, gid, home = 1000, 1000, "/home/agent"
    for folder in (jail.BASE, jail.SCRATCH):
        os.makedirs(folder, exist_ok=True)
    jail.tmpfs(jail.BASE, config["base_mb"], "755")
    os.chown(jail.BASE, uid, gid)
    os.makedirs(workdir, exist_ok=True)
    jail.copy_tree(workdir, jail.BASE, uid, gid)
    jail.lay(jail.BASE, decode_files(config["base"]), frozenset())
    for folder, names, files in os.walk(jail.BASE):
        for name in (*names, *files):
            os.chown(os.path.join(folder, name), uid, gid, follow_symlinks=False)
    jail.protect(jail.BASE, config["base"])
    python_path = os.environ.get("VERIFIER_PYTHONPATH", "")
    path = [p for p in python_path.split(":") if p]
    if not path:
        source = f"{workdir}/src"
        path = [source, workdir] if os.path.isdir(jail.BASE + "/src") else [workdir]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "VERIFIER_", "PYTHON"))}
    env |= {
        "HOME": home,
        "USER": "agent",
        "LOGNAME": "agent",
        "TZ": "UTC",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": ":".join(path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    env |= config["env"]
    limits = jail.Limits(**config["limits"])
    return Settings(workdir, home, uid, gid, limits, env, path, config["plugins"])


def main() -> None:
    line = sys.stdin.buffer.readline()
    server = Server(configure(json.loads(line)))
    reply(0, {"python": sys.version.split()[0], "pytest": pytest.__version__})
    server.serve()


if __name__ == "__main__":
    main()
