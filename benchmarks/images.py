"""What images cost: unpacked and as EROFS, a hundred tasks that share layers, steps that are remembered.

    python -m benchmarks.images --json FILE [--files 5000]

The foreign image is made here: `--files` files of sizes as in a Debian system, over this host's base, written
as an archive and taken in once unpacked and once for the kernel to mount. Peers read the same archive where
they are installed (`umoci unpack`; `skopeo copy` into a layout, which does not unpack). Times are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandbox.base import SandboxSpec
from sandbox.builder import build
from sandbox.images import ImageStore
from sandbox.namespace import NamespaceProvider
from sandbox.oci import archives, collect, erofs
from sandbox.recipe import Recipe

ROUNDS = 3
TASKS = 100


def tree(folder: Path, files: int) -> None:
    """Files of a log-normal size, median 2.5 kB, in folders of fifty."""
    dice = random.Random(0)
    for number in range(files):
        path = folder / f"d{number // 50}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dice.randbytes(int(dice.lognormvariate(7.8, 1.6))))


def disk(folder: Path) -> int:
    """Bytes that the files of a folder take on the disk."""
    return sum(
        os.lstat(os.path.join(place, name)).st_blocks * 512
        for place, _, names in os.walk(folder)
        for name in names
    )


def median(work: Callable[[Path], object], root: Path) -> float:
    """Seconds of a piece of work in a fresh folder."""
    taken: list[float] = []
    root.mkdir()
    for number in range(ROUNDS):
        place = root / str(number)
        started = time.perf_counter()
        work(place)
        taken.append(time.perf_counter() - started)
        shutil.rmtree(place, ignore_errors=True)
    return statistics.median(taken)


async def first_output(store: ImageStore, image: str) -> float:
    """Median milliseconds from create to the output of a command that reads a file of the image."""
    taken: list[float] = []
    async with NamespaceProvider(store) as provider:
        for _ in range(20):
            started = time.perf_counter()
            async with await provider.create(SandboxSpec(image=image)) as box:
                assert (await box.exec(["wc", "-c", "/opt/data/d0/f0"])).ok
                taken.append(time.perf_counter() - started)
    return round(statistics.median(taken) * 1000, 1)


async def foreign(root: Path, files: int) -> dict[str, Any]:
    """One archive taken in both ways."""
    source = ImageStore(root / "source")
    tree(root / "tree", files)
    image = source.add_layer(source.host_base(), root / "tree", at="/opt/data")
    archive = root / "image.tar"
    archives.write(source, image, archive, name="image:1", host_base=True)
    found: dict[str, Any] = {"files": files, "archive_mb": round(archive.stat().st_size / 1e6, 1)}
    for name, unpack in (("unpacked", True), ("erofs", False)):
        if not unpack and not erofs.supported():
            continue

        def take(place: Path, unpack: bool = unpack) -> ImageStore:
            store = ImageStore(place, unpack=unpack)
            archives.read(store, archive)
            return store

        seconds = median(take, root / name)
        store = take(root / f"{name}-kept")
        found[name] = {
            "import_s": round(seconds, 2),
            "disk_mb": round(disk(store.root) / 1e6, 1),
            "first_output_ms": await first_output(store, image),
        }
    found |= peers(archive, root)
    return found


def peers(archive: Path, root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    layout = root / "peer"
    if shutil.which("skopeo"):
        copy = ["skopeo", "copy", "--quiet", f"oci-archive:{archive}:image:1"]

        def pull(place: Path) -> None:
            subprocess.run([*copy, f"oci:{place}:1"], check=True, capture_output=True)

        found["skopeo"] = {"import_s": round(median(pull, root / "skopeo"), 2)}
        if shutil.which("umoci"):
            pull(layout)

            def unpack(place: Path) -> None:
                command = ["umoci", "unpack", "--image", f"{layout}:1", str(place)]
                subprocess.run(command, check=True, capture_output=True)

            found["umoci"] = {"unpack_s": round(median(unpack, root / "umoci"), 2)}
    return found


async def shared(root: Path) -> dict[str, Any]:
    """A hundred tasks of one repository, over an environment of 500 files."""
    store = ImageStore(root / "shared")
    tree(root / "environment", 500)
    parent = store.add_layer(store.host_base(), root / "environment", at="/opt/env", owner="root")
    alone = disk(store.root)
    taken: list[float] = []
    async with NamespaceProvider(store) as provider:
        for number in range(TASKS):
            workspace = root / f"task{number}"
            workspace.mkdir()
            (workspace / "a.py").write_text(f"print({number})\n" * 300)
            started = time.perf_counter()
            await build(Recipe(base=parent, workspace=workspace), store, provider)
            taken.append(time.perf_counter() - started)
    whole = disk(store.root)
    started = time.perf_counter()
    collected = collect.collect(store, grace_s=-1)
    return {
        "environment_mb": round(alone / 1e6, 2),
        "task_kb": round((whole - alone) / TASKS / 1e3, 1),
        "build_ms": round(statistics.median(taken) * 1000, 1),
        "collected": collected.images,
        "collect_s": round(time.perf_counter() - started, 2),
    }


async def measure(files: int) -> dict[str, Any]:
    memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    with tempfile.TemporaryDirectory() as folder:
        return {
            "machine": f"{os.cpu_count()} cores, {memory} GiB, kernel {platform.release().split('-')[0]}",
            "foreign": await foreign(Path(folder), files),
            "hundred_tasks": await shared(Path(folder)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--files", type=int, default=5000)
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments.files))
    for name, value in {**result["foreign"], **result["hundred_tasks"]}.items():
        print(f"{name:16} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
