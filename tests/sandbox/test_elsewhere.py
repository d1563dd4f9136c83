"""Much of the conformance suite where the host gives less: as an ordinary user, and in a chroot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USER = 47_110
SUITE = """
import asyncio, dataclasses, json, sys
from pathlib import Path
from sandbox import check
from sandbox.namespace import NamespaceProvider
async def main():
    async with NamespaceProvider(Path(sys.argv[1])) as provider:
        names = sys.argv[2].split(",") if sys.argv[2] else []
        results = await check.run(provider, provider.images.host_base(), names)
        print(json.dumps({
            "capabilities": dataclasses.asdict(provider.capabilities()),
            "results": [dataclasses.asdict(result) for result in results],
        }))
asyncio.run(main())
"""
NAMES = (
    "exit_code_is_data,stdin_environment_and_folder,users_have_their_ids,timeout_kills_the_tree,cancelling_kills,"
    "no_zombies,spawned_process_is_killed,memory_is_limited,processes_are_limited,disk_is_limited,bytes_come_back,"
    "trees_travel,upload_cannot_leave,snapshot_is_a_new_image,host_environment_is_invisible,no_network,"
    "host_processes_are_invisible,init_cannot_be_inspected,no_capabilities,no_mounts_or_namespaces,"
    "kernel_settings_are_out_of_reach,dangerous_calls_are_refused,neighbours_are_invisible,"
    "killing_everything_harms_only_itself,listed_while_alive,reap_spares_the_living"
)
"""`POSTTRAIN_ALL_CHECKS=1` runs all instead, `=a,b` those."""
CHROOT = """
import os, sys
from sandbox.node import syscalls as sc
root, folders = sys.argv[1], sys.argv[2].split(":")
sc.unshare(sc.CLONE_NEWNS)
sc.mount(None, "/", None, sc.MS_REC | sc.MS_PRIVATE)
sc.mount("tmpfs", root, "tmpfs")
for folder in folders:
    if os.path.islink(folder):
        os.symlink(os.readlink(folder), root + folder)
    elif os.path.isdir(folder):
        os.makedirs(root + folder, exist_ok=True)
        sc.mount(folder, root + folder, None, sc.MS_BIND | sc.MS_REC)
for folder in ("/proc", "/tmp", "/sys", "/store"):
    os.makedirs(root + folder, exist_ok=True)
os.chroot(root)
os.chdir(sys.argv[3])
os.execve(sys.argv[4], sys.argv[4:], os.environ)
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changing the user or the root needs root")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that an ordinary user may enter (pytest's own are closed)."""
    made = Path(tempfile.mkdtemp(prefix="posttrain-test-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def names() -> str:
    chosen = os.environ.get("POSTTRAIN_ALL_CHECKS")
    return "" if chosen == "1" else chosen or NAMES


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), sysconfig.get_paths()["purelib"]])
    return {"PATH": os.defpath, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/nonexistent"}


def verdict(output: str) -> dict[str, bool]:
    """Asserts that nothing failed; returns the capabilities."""
    report = json.loads(output)
    failed = [each for each in report["results"] if each["status"] == "failed"]
    assert [(each["name"], each["detail"]) for each in failed] == []
    passed = sum(each["status"] == "passed" for each in report["results"])
    assert passed >= min(20, len(report["results"]) // 2)
    return report["capabilities"]


def test_as_an_ordinary_user(folder: Path) -> None:
    for python in (sys.executable, "/usr/bin/python3"):
        command = [python, "-c", "import pydantic; from sandbox import images"]
        trial = {"user": USER, "group": USER, "extra_groups": [], "env": environment(), "cwd": "/"}
        try:
            if subprocess.run(command, capture_output=True, **trial).returncode == 0:
                break
        except PermissionError:
            continue
    else:
        pytest.skip("no Python of this environment is readable by an ordinary user")
    (folder / "store").mkdir()
    os.chown(folder / "store", USER, USER)
    command = [python, "-c", SUITE, str(folder / "store"), names()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, **trial)
    if "user namespaces are refused here" in done.stderr:
        pytest.skip("this host forbids user namespaces to ordinary users")
    assert done.returncode == 0, done.stderr
    assert verdict(done.stdout)["user_namespace"]


@pytest.mark.skipif(not os.path.ismount("/"), reason="inside a chroot no second one can be set up")
def test_as_root_in_a_chroot_without_proc(folder: Path) -> None:
    prefix = os.path.realpath(sys.base_prefix)
    shown = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/dev", prefix, sys.prefix, str(ROOT),
             sysconfig.get_paths()["purelib"]]  # fmt: skip
    arguments = [
        str(folder),
        ":".join(dict.fromkeys(shown)),
        str(ROOT),
        sys.executable,
        "-c",
        SUITE,
        "/store",
        names(),
    ]
    done = subprocess.run(
        [sys.executable, "-c", CHROOT, *arguments],
        env=environment(), capture_output=True, text=True, timeout=400, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    capabilities = verdict(done.stdout)
    assert capabilities["user_namespace"]
