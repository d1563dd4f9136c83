"""Files in and out, snapshots: complete, typed, and never through a planted link."""

from __future__ import annotations

import contextlib
import errno
import io
import tarfile

from sandbox.base import SandboxSpec
from sandbox.check import Bench, Check


def _tar(*members: tarfile.TarInfo, data: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in members:
            member.size = len(data) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(data) if member.isreg() else None)
    return buffer.getvalue()


def _link(name: str, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


async def bytes_come_back(bench: Bench) -> None:
    """write then read gives the same megabytes, with parents, mode and owner."""
    data = bytes(i * 7 % 256 for i in range(3_000_000))
    async with bench.box() as box:
        await box.write("deep/er/file.bin", data, mode=0o755)
        assert await box.read("/workspace/deep/er/file.bin") == data, "content differs"
        seen = await box.exec("stat -c '%a %u' deep/er/file.bin deep; echo more >> deep/er/file.bin")
        assert seen.stdout == b"755 1000\n755 1000\n", seen
        assert seen.exit_code == 0, seen


async def file_errors_are_typed(bench: Bench) -> None:
    """Missing files, folders and too large files raise what `open` would."""
    async with bench.box() as box:
        await box.exec("mkdir folder; head -c 2000 /dev/zero > big; mkfifo pipe")
        for path, wanted in (("none", FileNotFoundError), ("folder", IsADirectoryError), ("big", ValueError),
                             ("pipe", ValueError)):  # fmt: skip
            try:
                await box.read(path, max_bytes=1000)
            except wanted:
                continue
            raise AssertionError(f"reading {path} raised nothing")


async def write_to_a_full_disk_raises(bench: Bench) -> None:
    """A write that does not fit raises ENOSPC instead of leaving half a success."""
    async with bench.box(disk_mb=10) as box:
        try:
            await box.write("big", b"x" * 20_000_000)
        except OSError as error:
            number = error.errno
        else:
            number = 0
        assert number == errno.ENOSPC, f"20 MB on 10 MB: error {number}"


async def trees_travel(bench: Bench) -> None:
    """put_tree and get_tree keep names, content, links and the executable bit."""
    run = tarfile.TarInfo("a/run.sh")
    run.mode = 0o755
    async with bench.box() as box:
        await box.put_tree("tree", _tar(run, _link("a/link", "run.sh"), data=b"#!/bin/sh\necho ran\n"))
        assert (await box.exec("tree/a/link")).stdout == b"ran\n"
        await box.exec(["touch", "tree/ü name\nwith newline"])
        with tarfile.open(fileobj=io.BytesIO(await box.get_tree("tree"))) as tar:
            names = sorted(tar.getnames())
            assert names == ["a", "a/link", "a/run.sh", "ü name\nwith newline"], names
            assert tar.getmember("a/link").linkname == "run.sh"


async def upload_cannot_leave(bench: Bench) -> None:
    """Entries with `..`, absolute names, through links, or devices are refused."""
    device = tarfile.TarInfo("device")
    device.type = tarfile.CHRTYPE
    bad = {
        "dots": _tar(tarfile.TarInfo("../out"), data=b"x"),
        "absolute": _tar(tarfile.TarInfo("/tmp/out"), data=b"x"),
        "link": _tar(_link("l", "/tmp"), tarfile.TarInfo("l/out"), data=b"x"),
        "device": _tar(device),
        "no tar": b"this is not a tar" * 100,
    }
    async with bench.box() as box:
        for name, tar in bad.items():
            try:
                await box.put_tree("/workspace/in", tar)
            except ValueError:
                continue
            raise AssertionError(f"{name} was accepted")
        assert not (await box.exec("ls /tmp/out /workspace/out")).ok


async def upload_through_a_planted_link(bench: Bench) -> None:
    """A link that the agent planted below the target leads no upload outside it."""
    async with bench.box() as box:
        await box.exec("mkdir in; ln -s /etc in/sub")
        with contextlib.suppress(ValueError):
            await box.put_tree("in", _tar(tarfile.TarInfo("sub/planted"), data=b"x"))
        assert not (await box.exec("ls /etc/planted")).ok, "the upload followed the link"


async def download_of_odd_files(bench: Bench) -> None:
    """A fifo, a socket or an endless link does not hang get_tree; links are not followed."""
    async with bench.box() as box:
        await box.exec(
            "mkdir odd; mkfifo odd/pipe; ln -s /dev/zero odd/zero; ln -s loop odd/loop; echo x > odd/f"
        )
        with tarfile.open(fileobj=io.BytesIO(await box.get_tree("odd"))) as tar:
            files = [member.name for member in tar if member.isreg()]
            assert files == ["f"], files


async def snapshot_is_a_new_image(bench: Bench) -> None:
    """A snapshot carries changes and deletions; its parent image stays as it was."""
    async with bench.box() as box:
        await box.exec("echo one > kept; mkdir gone; echo x > gone/file; chmod 700 kept; ln -s kept link")
        first = await box.snapshot()
    async with await bench.provider.create(SandboxSpec(image=first, owner=bench.owner)) as box:
        assert (await box.exec("cat kept link; ls gone; stat -c %a kept")).stdout == b"one\none\nfile\n700\n"
        await box.exec("rm -r gone; rm link; echo two > kept; mkdir gone; echo y > gone/new")
        second = await box.snapshot()
    async with await bench.provider.create(SandboxSpec(image=second, owner=bench.owner)) as box:
        assert (await box.exec("cat kept; ls gone; ls")).stdout == b"two\nnew\ngone\nkept\n"
    async with bench.box() as box:
        assert (await box.exec("ls")).stdout == b"", "the parent image changed"


async def snapshots_are_deterministic(bench: Bench) -> None:
    """The same changes give the same digest."""
    digests: list[str] = []
    for _ in range(2):
        async with bench.box() as box:
            await box.exec("mkdir d; for i in 3 1 2; do echo $i > d/$i; done")
            digests.append(await box.snapshot())
    assert digests[0] == digests[1], digests


CHECKS = [
    Check(function)
    for function in (
        bytes_come_back, file_errors_are_typed, write_to_a_full_disk_raises, trees_travel,
        upload_cannot_leave, upload_through_a_planted_link, download_of_odd_files,
    )
] + [
    Check(snapshot_is_a_new_image, needs=("snapshot",)),
    Check(snapshots_are_deterministic, needs=("snapshot",)),
]  # fmt: skip
