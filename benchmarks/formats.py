"""Exported tasks before the programs that other people read them with.

    python -m benchmarks.formats --json FILE [--home FOLDER] [--package NAME] [--tasks 3] [--peers FOLDER]

Tasks of a package are exported in every format. Each task's tests run once with gold and once without a
change, as a SWE-bench harness runs them (its `eval.sh`, in a sandbox); what they printed goes to swebench 4.1
and 5, and to swesmith, whose reports must say resolved and not resolved. Harbor and terminal-bench load and
lint their folders, OpenEnv serves its own and plays two episodes, mini-swe-agent and Harbor read episodes.
The peers are installed from a package index, each into a virtual environment of its own (2.5 GB in all).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from catalog.atomic import write_atomic
from catalog.blobs import Blobs
from catalog.models import Task, Verdict
from catalog.store import Catalog
from catalog.trajectory import ToolCall, Trajectory, Turn
from envfactory.config import SynthConfig
from envfactory.formats.base import Parcel
from envfactory.formats.parcels import pack
from envfactory.formats.registry import TASKS, TRAJECTORIES
from envfactory.formats.swebench_v5 import eval_script
from envfactory.synthesis import Tools, synthesize
from sandbox.base import SandboxProvider, SandboxSpec, provider
from sandbox.images import ImageStore

PEERS = {
    "swebench4": ("swebench==4.1.0", "swesmith==0.0.9"),
    "swebench5": ("swebench==5.0.2",),
    "mini-swe-agent": ("mini-swe-agent==2.4.6",),
    "openenv": ("openenv-core==0.3.0", "uv"),
    "harbor": ("harbor==0.26.0",),
    "terminal-bench": ("terminal-bench==0.2.18",),
}
NEWER = {"harbor": (3, 12), "terminal-bench": (3, 12)}
"""Python that a peer asks for, where it is newer than ours may be."""
SCRIPTS = Path(__file__).parent / "peers"
FILES = {
    "swebench": "swebench.jsonl",
    "swebench-v5": "swebench-v5",
    "swe-smith": "swe-smith.json",
    "swe-rebench": "swe-rebench.parquet",
    "harbor": "harbor",
    "terminal-bench": "terminal-bench",
    "openenv": "openenv_tasks",
    "huggingface": "huggingface",
}


class NoPython(Exception):
    """A peer asks for a newer Python than this machine has."""


def newer_python(least: tuple[int, int]) -> str:
    """A Python of at least that version: ours, one on PATH, or one that pyenv keeps. Raises NoPython."""
    if sys.version_info[:2] >= least:
        return sys.executable
    kept = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/3.*/bin/python"))
    for python in [*(f"python3.{minor}" for minor in range(14, least[1] - 1, -1)), *map(str, reversed(kept))]:
        check = f"import sys, venv, ensurepip; sys.exit(sys.version_info < {least})"
        try:
            if subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0:
                return python
        except FileNotFoundError:
            continue
    raise NoPython(f"no Python {least[0]}.{least[1]} or newer is on this machine")


def install(name: str, folder: Path) -> Path:
    """The Python of a peer's environment, made if need be. Raises NoPython, CalledProcessError."""
    place, wanted = folder / name, PEERS[name]
    stamp = place / "requirements"
    if not stamp.is_file() or stamp.read_text() != " ".join(wanted):
        python = newer_python(NEWER[name]) if name in NEWER else sys.executable
        subprocess.run([python, "-m", "venv", "--clear", str(place)], check=True)
        pip = [str(place / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, *wanted], check=True)
        stamp.write_text(" ".join(wanted))
    return place / "bin/python"


def ask(python: Path, script: str, *arguments: object) -> dict[str, Any]:
    """What a script of `benchmarks/peers` says in a peer's environment."""
    with tempfile.TemporaryDirectory(prefix="posttrain-peer.") as elsewhere:
        env = {**os.environ, "HOME": elsewhere, "HF_HUB_OFFLINE": "1", "HARBOR_TELEMETRY": "0"}
        env |= {"MSWEA_SILENT_STARTUP": "1", "GITHUB_TOKEN": "none"}
        command = [str(python), "-P", str(SCRIPTS / script), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=elsewhere, env=env, check=False)
    if done.returncode:
        raise RuntimeError(f"{script} failed: {done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def documents(parcels: Sequence[Parcel], trajectories: Sequence[Trajectory], out: Path) -> dict[str, float]:
    """Write every format beneath a folder, and read it back; seconds by format."""
    seconds: dict[str, float] = {}
    for name, file in FILES.items():
        began = time.monotonic()
        TASKS[name].write(parcels, out / file)
        back = sorted(TASKS[name].read(out / file), key=lambda parcel: parcel.id)
        if back != sorted(parcels, key=lambda parcel: parcel.id):
            raise RuntimeError(f"{name} did not come back the same")
        seconds[name] = round(time.monotonic() - began, 3)
    TRAJECTORIES["atif"].write(trajectories, out / "atif.jsonl")
    TRAJECTORIES["mini-swe-agent"].write(trajectories, out / "mini")
    TASKS["swebench-v5"].write(parcels, out / "swebench-v5.parquet")
    return seconds


def episode(task: Task, patch: str) -> Trajectory:
    """A short trajectory of the task, for formats of trajectories."""
    turns = (
        Turn(role="user", text=task.problem.statement, start=0, end=3),
        Turn(role="assistant", text="```bash\nls\n```", start=3, end=5),
        Turn(role="tool", text="[exit 0]", start=5, end=6),
        Turn(role="assistant", text="submit", start=6, end=8),
    )
    sampled = (False, False, False, True, True, False, True, True)
    call = ToolCall(
        name="bash", arguments={"command": "ls"}, result="[exit 0]", outcome="exited", exit_code=0
    )
    return Trajectory(
        id=f"run-{task.id}",
        task_id=task.id,
        run_id="run",
        agent="bash",
        policy="none",
        turns=turns,
        token_ids=tuple(range(8)),
        sampled=sampled,
        logprobs=tuple(-0.5 if own else None for own in sampled),
        versions=tuple(0 if own else None for own in sampled),
        tool_calls=(call,),
        verdict=Verdict(reward=1.0),
        patch=patch,
    )


async def harness_logs(parcels: Sequence[Parcel], backend: SandboxProvider, folder: Path) -> None:
    """What a SWE-bench harness would have logged for gold and for no change: `ID.VARIANT.log`."""
    folder.mkdir()
    for parcel in parcels:
        assert parcel.task is not None
        for variant, patch in (("gold", parcel.gold), ("none", b"")):
            spec = SandboxSpec(image=parcel.task.environment.image, owner="benchmark")
            async with await backend.create(spec) as box:
                await box.exec("cp -a /workspace /testbed && chown -R 1000 /testbed", user="root", cwd="/")
                await box.write("/tmp/patch.diff", patch)
                await box.write("/tmp/eval.sh", eval_script(parcel, "swebench-v5").encode())
                run = "test ! -s /tmp/patch.diff || git apply /tmp/patch.diff; "
                run += "bash /tmp/eval.sh > /tmp/log 2>&1"
                where = (parcel.setup.env if parcel.setup else {}).get("PYTHONPATH", "")
                env = {"PYTHONPATH": where.replace(parcel.task.environment.workdir, "/testbed", 1)}
                await box.exec(run, cwd="/testbed", env=env, timeout=300)
                (folder / f"{parcel.id}.{variant}.log").write_bytes(await box.read("/tmp/log"))


async def openenv_episodes(
    parcel: Parcel, server: Path, venv: Path, backend: SandboxProvider, images: ImageStore
) -> Any:
    """The server and its client in one sandbox: the package's tests run there and nowhere else."""
    assert parcel.task is not None
    with tempfile.TemporaryDirectory(prefix="posttrain-peer.") as scratch:
        slim = Path(scratch) / "venv"
        # What an episode does not import; half of the environment's bytes.
        unused = shutil.ignore_patterns("__pycache__", "tests", "pip", "uv", "uvx", "openai", "hf_xet")
        shutil.copytree(venv, slim, symlinks=True, ignore=unused)
        image = images.add_layer(
            parcel.task.environment.image, slim, at="/opt/peer", note="openenv", owner="root"
        )
    image = images.add_layer(image, server, at="/opt/server", note="server", owner="root")
    image = images.add_layer(image, SCRIPTS, at="/opt/scripts", note="script", owner="root")
    spec = SandboxSpec(image=image, owner="benchmark", memory_mb=2048, disk_mb=1024)
    async with await backend.create(spec) as box:
        await box.write("/tmp/gold.patch", parcel.gold)
        site = f"/opt/env/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        env = {"PYTHONPATH": f"/tmp/place:{site}", "TASKS_WORKSPACE": "/tmp/place", "HOME": "/tmp"}
        argv = [
            "/opt/peer/bin/python",
            "-P",
            "/opt/scripts/openenv.py",
            "/opt/server",
            parcel.id,
            "/tmp/gold.patch",
        ]
        done = await box.exec(argv, cwd="/tmp", env=env, timeout=300)
    if not done.ok:
        raise RuntimeError(f"openenv.py failed: {done.text[-3000:]}")
    return json.loads(done.stdout.decode().strip().splitlines()[-1])


def check_rows(python4: Path, python5: Path, out: Path) -> dict[str, Any]:
    """swebench 4.1, swesmith and swebench 5 on the documents and logs."""
    return {
        "swebench4": ask(
            python4, "swebench4.py", out / "swebench.jsonl", out / "swe-smith.json", out / "logs"
        ),
        "swebench5": ask(
            python5, "swebench5.py", out / "swebench-v5", out / "swebench-v5.parquet", out / "logs"
        ),
    }


def check_folders(harbor: Path, out: Path) -> dict[str, Any]:
    """Harbor on its folders, our ATIF, and terminal-bench's folders mapped to its own."""
    mapped = out / "mapped"
    mapped.mkdir()
    return ask(harbor, "harbor.py", out / "harbor", out / "atif.jsonl", out / "terminal-bench", mapped)


def check_mini(python: Path, out: Path) -> dict[str, Any]:
    """mini-swe-agent on our trajectories, and ours on what its agent writes."""
    written = out / "theirs.traj.json"
    said = ask(python, "mini.py", out / "mini", written)
    (one,) = TRAJECTORIES["mini-swe-agent"].read(written)
    TRAJECTORIES["mini-swe-agent"].write([one], out / "again.jsonl")
    said["comes_back"] = json.loads((out / "again.jsonl").read_text()) == json.loads(written.read_text())
    said["roles"] = [turn.role for turn in one.turns]
    return said


async def measure(home: Path, package: str, count: int, peers: Path, skip: Sequence[str]) -> dict[str, Any]:
    """Every check on tasks of a package."""
    backend, images = provider("namespace", store=home / "images"), ImageStore(home / "images")
    try:
        with Catalog.open(home) as catalog:
            config = SynthConfig(tasks={"train": 0, "dev": 0, "test": count})
            made = await synthesize(f"pypi:{package}", home, Tools(catalog, backend, images), config)
            tasks = list(made.tasks)[:count]
            return await check(tasks, catalog.blobs, images, backend, peers, skip=skip)
    finally:
        await backend.close()


async def check(
    tasks: Sequence[Task],
    blobs: Blobs,
    images: ImageStore,
    backend: SandboxProvider,
    peers: Path,
    *,
    skip: Sequence[str] = (),
) -> dict[str, Any]:
    """Export the tasks, run them, ask every peer but those to skip."""
    parcels = [pack(task, blobs, images) for task in tasks]
    patches = [base64.b64encode(parcel.gold).decode() for parcel in parcels]
    episodes = [episode(task, patch) for task, patch in zip(tasks, patches, strict=True)]
    python = {name: install(name, peers) for name in PEERS if name not in skip}
    with tempfile.TemporaryDirectory(prefix="posttrain-formats.") as scratch:
        out = Path(scratch)
        result: dict[str, Any] = {"tasks": len(tasks), "seconds": documents(parcels, episodes, out)}
        await harness_logs(parcels, backend, out / "logs")
        if {"swebench4", "swebench5"} <= set(python):
            result |= check_rows(python["swebench4"], python["swebench5"], out)
        if "harbor" in python:
            result["harbor"] = check_folders(python["harbor"], out)
        if "terminal-bench" in python:
            script = "terminal_bench.py"
            result["terminal-bench"] = ask(python["terminal-bench"], script, out / "terminal-bench")
        if "mini-swe-agent" in python:
            result["mini-swe-agent"] = check_mini(python["mini-swe-agent"], out)
        if "openenv" in python:
            server, venv = out / FILES["openenv"], python["openenv"].parent.parent
            result["openenv"] = await openenv_episodes(parcels[0], server, venv, backend, images)
            result["openenv"]["validate"] = validate(venv, server)
    return result


def validate(venv: Path, server: Path) -> str:
    """The last line of `openenv validate`, after the `uv lock` that it asks for."""
    subprocess.run([venv / "bin/uv", "lock", "--quiet"], cwd=server, check=True)
    done = subprocess.run(
        [venv / "bin/openenv", "validate", str(server)], capture_output=True, text=True, check=False
    )
    return done.stdout.strip().splitlines()[0].replace(str(server.parent), "...")


def faults(result: dict[str, Any]) -> list[str]:
    """What is not as it must be; empty when every peer that was asked agrees."""
    found: list[str] = []
    for name, key in (("swebench4", "resolved"), ("swebench4", "smith_resolved"), ("swebench5", "resolved")):
        said = result.get(name, {}).get(key)
        if said is None:
            continue
        wrong = [log for log, resolved in said.items() if resolved != log.endswith(".gold")]
        if wrong or len(said) != 2 * result["tasks"]:
            found.append(f"{name} {key}: {wrong}")
    good: dict[str, dict[str, Any]] = {
        "swebench4": {"names_that_differ": []},
        "swebench5": {"problems": [], "rows_agree": True},
        "harbor": {"findings": [], "unmapped": []},
        "terminal-bench": {"files": [True] * result["tasks"]},
        "mini-swe-agent": {"comes_back": True},
        "openenv": {"rewards": {"noop": [0.0, True], "gold": [1.0, True]}},
    }
    for name, wanted in good.items():
        for key, value in wanted.items():
            if name in result and result[name][key] != value:
                found.append(f"{name} {key}: {result[name][key]}")
    if not result.get("openenv", {}).get("validate", "[OK]").startswith("[OK]"):
        found.append(f"openenv validate: {result['openenv']['validate']}")
    return found


def machine() -> str:
    """Cores, memory and kernel."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, kernel {platform.release()}"


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--home", type=Path, help="default: a temporary folder")
    parser.add_argument("--package", default="inflection")
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--peers", type=Path, default=Path(".venv/peers"))
    parser.add_argument("--skip", nargs="*", default=[], choices=sorted(PEERS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="posttrain-formats.") as scratch:
        home = (args.home or Path(scratch)).resolve()
        result = asyncio.run(measure(home, args.package, args.tasks, args.peers.resolve(), args.skip))
    result["faults"] = faults(result)
    for name, key in (("swebench5", "reports"), ("harbor", "instructions")):
        result.get(name, {}).pop(key, None)
    result["skipped"] = args.skip
    result["machine"] = machine()
    for name, value in result.items():
        print(f"{name:16} {json.dumps(value)[:200]}")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(args.json, json.dumps({"format": 1, "package": args.package, **result}, indent=1).encode())
    sys.exit(bool(result["faults"]))


if __name__ == "__main__":
    main()
