"""Other ways to run commands in containers, measured beside ours: `docker run`, and SWE-ReX's deployment.

All of them get one engine (private, with a bridge, in a network namespace of its own: SWE-ReX publishes a
port) and one image: a minimal Debian with Python and SWE-ReX, made by mmdebstrap and pip. Limits are on
wherever the peer has them. SWE-ReX is driven by a process of its own, in a virtual environment of its own.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from sandbox.docker.private import PrivateEngine

IMAGE = "benchmark/debian:latest"
_ENTRY = """#!/bin/sh
PYTHONPATH=/opt/swerex exec /usr/bin/python3 /opt/swerex/bin/swerex-remote "$@"
"""
_DRIVER = """
import asyncio, json, logging, sys, time
from swerex.deployment.docker import DockerDeployment
from swerex.runtime.abstract import Command
logging.disable(logging.CRITICAL)

async def main(image, samples, repeats, *arguments):
    create, again = [], []
    for _ in range(int(samples)):
        started = time.perf_counter()
        box = DockerDeployment(image=image, pull="never", docker_args=list(arguments))
        await box.start()
        result = await box.runtime.execute(Command(command=["/bin/echo", "hello"]))
        create.append(time.perf_counter() - started)
        assert result.stdout == "hello\\n", result
        for _ in range(int(repeats)):
            started = time.perf_counter()
            await box.runtime.execute(Command(command=["/bin/true"]))
            again.append(time.perf_counter() - started)
        await box.stop()
    print(json.dumps({"create": create, "exec": again}))

asyncio.run(main(*sys.argv[1:]))
"""


class Peers:
    """What the peers need, made once in `folder`: the image as a tar, and SWE-ReX's environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tar = folder / "debian.tar"
        self._python = folder / "swerex/bin/python"

    def prepare(self) -> None:
        """Build what is missing. Raises CalledProcessError if a registry or mmdebstrap refuses."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._python.exists():
            subprocess.run([sys.executable, "-m", "venv", self.folder / "swerex"], check=True)
            self._pip("install", "swe-rex", "aiohttp")
        if not self.tar.exists():
            with tempfile.TemporaryDirectory(dir=self.folder) as work:
                root = Path(work) / "root"
                packages = "--include=python3,procps"
                release = platform.freedesktop_os_release()["VERSION_CODENAME"]
                subprocess.run(
                    ["mmdebstrap", "--quiet", "--variant=minbase", packages, release, root], check=True
                )
                version = os.readlink(root / "usr/bin/python3").removeprefix("python")
                wheels = ["--only-binary=:all:", "--python-version", version]
                self._pip("install", *wheels, "--target", str(root / "opt/swerex"), "swe-rex")
                entry = root / "usr/local/bin/swerex-remote"
                entry.write_text(_ENTRY)
                entry.chmod(0o755)
                shutil.rmtree(root / "dev")
                (root / "dev").mkdir()
                with tarfile.open(Path(work) / "tar", "w", format=tarfile.PAX_FORMAT) as tar:
                    tar.add(root, ".")
                os.rename(Path(work) / "tar", self.tar)

    def _pip(self, *words: str) -> None:
        command = [self._python, "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
        subprocess.run(command, check=True)

    def load(self, engine: PrivateEngine) -> None:
        """Give the engine the image."""
        docker(engine, "import", str(self.tar), IMAGE)

    def swerex(self, engine: PrivateEngine, samples: int, repeats: int) -> dict[str, list[float]]:
        """Seconds from nothing to the first command's output, and of one more command."""
        arguments = [IMAGE, str(samples), str(repeats), "--memory=1g", "--pids-limit=256"]
        with tempfile.TemporaryFile("w+") as errors:
            done = subprocess.run(
                [self._python, "-c", _DRIVER, *arguments],
                env=_environment(engine), stdout=subprocess.PIPE, stderr=errors, text=True,
                preexec_fn=engine.enter_network,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(f"SWE-ReX failed: {_last_line(errors)}")
        return json.loads(done.stdout.splitlines()[-1])


def docker_run(engine: PrivateEngine, samples: int, repeats: int) -> dict[str, list[float]]:
    """The same with the command-line client: `docker run` to the first output, then `docker exec`."""
    create: list[float] = []
    again: list[float] = []
    limits = ["--memory=1g", "--memory-swap=1g", "--pids-limit=256", "--network=none"]
    for number in range(samples):
        name = f"plain-{os.getpid()}-{time.monotonic_ns()}-{number}"
        command = ["docker", "run", "--rm", "--name", name, *limits, IMAGE, "/bin/sh", "-c"]
        started = time.perf_counter()
        with subprocess.Popen(
            [*command, "echo hello; exec sleep 600"], env=_environment(engine), stdout=subprocess.PIPE
        ) as box:
            assert box.stdout is not None
            assert box.stdout.readline() == b"hello\n", "docker run said nothing"
            create.append(time.perf_counter() - started)
            for _ in range(repeats):
                started = time.perf_counter()
                docker(engine, "exec", name, "/bin/true")
                again.append(time.perf_counter() - started)
            docker(engine, "kill", name)
    return {"create": create, "exec": again}


def docker(engine: PrivateEngine, *words: str) -> None:
    """Run the command-line client. Raises CalledProcessError."""
    subprocess.run(["docker", *words], env=_environment(engine), check=True, stdout=subprocess.DEVNULL)


def _environment(engine: PrivateEngine) -> dict[str, str]:
    return {**os.environ, "DOCKER_HOST": engine.url}


def _last_line(file: IO[Any]) -> str:
    file.seek(0)
    lines = file.read().strip().splitlines()
    return lines[-1] if lines else "no output"
