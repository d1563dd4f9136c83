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
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from verifiers.harness import folding, jail, memo, plugin, wire

LINE = 32_000
PATIENCE = 10
"""Times its timeout that a run may take on a machine that is too busy for it."""
OUTPUT = 4096
"""Bytes of the jail's printed output that are kept: its end. Only people read them."""


@dataclass
class Settings:
    """What is the same for every jail."""

    workdir: str
    home: str
    uid: int
    """Of the agent's files and processes; 0 where the sandbox has no second user."""
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
    timeout: float
    deadline: float
    receiver: wire.Receiver
    fold: folding.Fold = field(default_factory=folding.Fold)
    printed: bytes = b""
    stopped: str = ""
    """Why we killed it, if we did."""


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
        self._input = bytearray()
        self._learned: set[str] = set()

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
            for job in self.jobs.values():
                if now >= job.deadline and not job.stopped:
                    self._expire(job, now)

    @staticmethod
    def _expire(job: Job, now: float) -> None:
        """Kill a job whose time is over. Time in which it wanted a processor and got none does not count."""
        granted = job.started + job.timeout + waited(job.pid)
        last = job.started + PATIENCE * job.timeout
        if now >= min(granted, last):
            job.stopped = "timeout" if now >= granted else "starved"
            os.kill(job.pid, signal.SIGKILL)
        else:
            job.deadline = min(granted, last)

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
        known = self._known_tests(request)
        key = secrets.token_bytes(32)
        results, results_in = os.pipe()
        output, output_in = os.pipe()
        started = time.monotonic()
        pid = jail.fork_into(jail.NEWPID)
        if pid == 0:
            init(self, request | {"known": known}, key, results_in, output_in)
        os.close(results_in)
        os.close(output_in)
        job = Job(
            id=request["id"],
            pid=pid,
            pidfd=os.pidfd_open(pid),
            results=results,
            output=output,
            started=started,
            timeout=request["timeout"],
            deadline=started + request["timeout"],
            receiver=wire.Receiver(key),
        )
        self.jobs[pid] = job
        for fd in (job.pidfd, results, output):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, job)

    def _known_tests(self, request: dict[str, Any]) -> dict[str, types.CodeType]:
        """Path -> compiled code of those requested test files whose content is ours, not the agent's."""
        known: dict[str, types.CodeType] = {}
        for name in dict.fromkeys(argument.split("::")[0] for argument in request["arguments"]):
            if name in request["files"] or not name.endswith(".py"):
                continue
            text = request["trusted"].get(name)
            source = clean_source(name) if text is None else base64.b64decode(text)
            path = f"{self.settings.workdir}/{name}"
            if source is not None and (code := self.memo.test(path, source)) is not None:
                known[path] = code
        return known

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
        if job.stopped == "timeout":
            outcome = "timeout"
        elif job.stopped:
            outcome, printed = "infrastructure", "the machine was too busy to give the tests their time"
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
        self._learn(job.fold.loaded)

    def _learn(self, paths: list[str]) -> None:
        """Compile the clean copies of what a jail imported, each path once; the jail only gave names."""
        prefix = self.settings.workdir + "/"
        for path in paths:
            if path in self._learned or not path.startswith(prefix) or ".." in path or path[-3:] != ".py":
                continue
            self._learned.add(path)
            source = clean_source(path.removeprefix(prefix))
            if source is not None:
                self.memo.module(path, source)
                self.memo.test(path, source)


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
        trusted = decode_files(request["trusted"])
        user = settings.uid, settings.gid
        disk_mb = settings.limits.disk_mb
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
        jail.enter(settings.workdir, settings.home, *user, disk_mb, trusted, request["protected"])
        worker = os.fork()
        if worker == 0:
            work(server, request, key, channel, proc)
        os.close(channel)
        os.close(proc)
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


def work(server: Server, request: dict[str, Any], key: bytes, channel: int, proc: int) -> None:
    """The test process: an unprivileged user from here on. `proc`: the /proc outside of the jail."""
    code, settings = INFRASTRUCTURE, server.settings
    try:
        jail.limit(settings.limits)
        if settings.uid == 0:
            jail.become_other(jail.AGENT, proc)
        os.close(proc)
        jail.drop(settings.uid or jail.AGENT, settings.gid or jail.AGENT)
        os.umask(0o022)
        os.setsid()
        files = decode_files(request["files"])
        jail.lay(settings.workdir, files, frozenset(request["executable"]))
        os.chdir(settings.workdir)
        prepare_interpreter(settings)
        code = 1
        send = wire.sender(channel, key)
        reporter = plugin.Reporter(send, settings.workdir, request["known"], request["trace"])
        plugin.run(reporter, server.integrity, request["arguments"], settings.plugins)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def waited(init: int) -> float:
    """Seconds that the test process of a jail stood in line for a processor; 0 where Linux does not tell."""
    try:
        with open(f"/proc/{init}/task/{init}/children") as file:
            worker = file.read().split()[0]
        with open(f"/proc/{worker}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


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


def clean_source(path: str) -> bytes | None:
    """A regular file of the clean workspace."""
    full = os.path.join(jail.BASE, path)
    if os.path.islink(full) or not os.path.isfile(full):
        return None
    with open(full, "rb") as file:
        return file.read()


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
        data = clean_source(path)
        found[path] = None if data is None else base64.b64encode(data).decode()
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
        uid, gid, home = jail.AGENT, jail.AGENT, "/home/agent"
    if jail.one_id():
        uid = gid = 0
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
    jail.protect(jail.BASE, (*config["base"], *config["protected"]))
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
