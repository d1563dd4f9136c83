"""Bytes in and out at every size, layers by content, and copies that are their own."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from sandbox.base import Data
from sandbox.check import Bench, Check
from sandbox.checks.processes import running, zombies


async def _pieces(data: bytes, size: int = 333_333) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]
        await asyncio.sleep(0)


async def every_size_arrives_whole(bench: Bench) -> None:
    """Files of no byte, around every buffer's border and of thirty megabytes, at once and streamed."""
    sizes = (0, 1, 4095, 4096, 65_535, 65_536, 65_537, 131_073, (1 << 20) + 1, 30_000_000)
    source = os.urandom(1 << 20) * 29
    async with bench.box(disk_mb=100) as box:
        for size in sizes:
            data = source[:size]
            given: tuple[Data, ...] = (data,) if size < 1000 else (data, _pieces(data))
            for way in given:
                await box.write("file", way)
                seen = await box.exec("sha256sum file; stat -c %s file")
                wanted = f"{hashlib.sha256(data).hexdigest()}  file\n{len(data)}\n"
                assert seen.stdout.decode() == wanted, f"{size} bytes arrived as {seen.text}"
            assert await box.read("file") == data, f"{size} bytes came back otherwise"


async def writes_at_once_keep_apart(bench: Bench) -> None:
    """Twenty files written and read at the same time keep their bytes."""
    async with bench.box() as box:

        async def one(number: int) -> bool:
            data = bytes([number]) * (100_000 + number)
            await box.write(f"file{number}", data)
            return await box.read(f"file{number}") == data

        assert all(await asyncio.gather(*(one(number) for number in range(20)))), "files were mixed up"


async def an_overwritten_file_is_new(bench: Bench) -> None:
    """Writing over a longer file, a read-only file, a link or a fifo leaves exactly the new bytes there."""
    async with bench.box() as box:
        await box.exec(
            "echo victim > victim; ln -s victim link; mkfifo pipe; seq 1000 > long; seq 9 > locked"
        )
        await box.exec("chmod 400 locked")
        for name in ("link", "pipe", "long", "locked"):
            async with asyncio.timeout(20):
                await box.write(name, b"new", mode=0o600)
                assert await box.read(name) == b"new", f"{name} is not new"
            assert (await box.exec(["stat", "-c", "%a", name])).stdout in (b"600\n", b"777\n"), name


async def trees_of_megabytes_travel(bench: Bench) -> None:
    """Thousands of files and twenty megabytes go in, streamed too, and come back equal; no helper is left."""
    files = {f"d{n % 50}/f{n}": os.urandom(200) for n in range(1500)} | {"big": os.urandom(1 << 20) * 20}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    async with bench.box(disk_mb=200, memory_mb=512) as box:
        given: tuple[Data, ...] = (buffer.getvalue(), _pieces(buffer.getvalue()))
        for number, way in enumerate(given):
            await box.put_tree(f"tree{number}", way)
            with tarfile.open(fileobj=io.BytesIO(await box.get_tree(f"tree{number}"))) as tar:
                found = {m.name: file.read() for m in tar if m.isreg() and (file := tar.extractfile(m))}
            assert found == files, f"{len(found)} of {len(files)} files came back equal"
        assert await zombies(box) == 0
        assert await running(box, "tar") == 0


async def a_cut_tar_is_an_error(bench: Bench) -> None:
    """An upload that ends in the middle of a file raises; a stream that breaks raises what broke it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        member = tarfile.TarInfo("file")
        member.size = 500_000
        tar.addfile(member, io.BytesIO(bytes(500_000)))

    async def broken() -> AsyncIterator[bytes]:
        yield buffer.getvalue()[:100_000]
        raise ConnectionResetError("the source broke")

    async with bench.box() as box:
        try:
            await box.put_tree("in", buffer.getvalue()[:300_000])
        except ValueError:
            pass
        else:
            raise AssertionError("a cut tar was accepted")
        for way in (box.put_tree("in", broken()), box.write("file", broken())):
            try:
                async with asyncio.timeout(30):
                    await way
            except (ConnectionResetError, ValueError):
                continue
            raise AssertionError("a broken stream was accepted")
        assert (await box.exec("echo on")).stdout == b"on\n"


async def hard_links_cannot_leave(bench: Bench) -> None:
    """A tar's hard link to a file outside, or through a link that it brings along, is refused."""
    bad: list[bytes] = []
    for target in ("/etc/passwd", "../../etc/passwd", "l/passwd"):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            link = tarfile.TarInfo("l")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc"
            tar.addfile(link)
            hard = tarfile.TarInfo("h")
            hard.type, hard.linkname = tarfile.LNKTYPE, target
            tar.addfile(hard)
        bad.append(buffer.getvalue())
    async with bench.box() as box:
        for tar_bytes in bad:
            try:
                await box.put_tree("in", tar_bytes)
            except (ValueError, OSError):
                assert not (await box.exec("test -f in/h")).ok, "the link is there all the same"
                continue
            raise AssertionError("a hard link out of the tree was accepted")


async def links_lead_nowhere_on_the_host(bench: Bench) -> None:
    """Reading, downloading or writing through a link that names a host file reaches only the sandbox."""
    with tempfile.TemporaryDirectory() as folder:
        secret, target = Path(folder) / "secret", Path(folder) / "target"
        secret.write_text("c0ffee-host")
        async with bench.box() as box:
            await box.exec(["ln", "-s", str(secret), "read"])
            await box.exec(["ln", "-s", str(target), "write"])
            await box.exec(["ln", "-s", folder, "folder"])
            with contextlib.suppress(OSError, ValueError):
                assert b"c0ffee" not in await box.read("read"), "a host file was read"
            with contextlib.suppress(OSError, ValueError):
                assert b"c0ffee" not in await box.get_tree("folder"), "a host folder was read"
            with contextlib.suppress(OSError, ValueError):
                await box.write("write", b"planted")
            with contextlib.suppress(OSError, ValueError):
                await box.write("folder/target", b"planted")
        assert not target.exists(), "a host file was written"


async def a_fork_is_its_own(bench: Bench) -> None:
    """Forks have the files as of now, and from then on their own; processes and keys are not copied."""
    async with bench.box() as box:
        await box.exec("echo shared > file; rm -rf gone; sleep 324 >/dev/null 2>&1 & echo x")
        one, two = await box.fork(2)
        async with one, two:
            await one.exec("echo one >> file")
            await two.exec("echo two >> file")
            seen = [(await each.exec("cat file")).stdout for each in (box, one, two)]
            assert seen == [b"shared\n", b"shared\none\n", b"shared\ntwo\n"], seen
            assert await running(one, "sleep 324") == 0, "a fork has its parent's processes"
            assert len({box.id, one.id, two.id}) == 3
            await box.close()
            assert (await one.exec("cat file")).ok, "a fork died with its parent"


async def forks_have_their_own_randomness(bench: Bench) -> None:
    """Random numbers, clock and boot of forks are fresh, not copies."""
    async with bench.box() as box:
        made = await box.fork(2)
        try:
            seen = {
                (await each.exec("head -c 16 /dev/urandom | od -An -tx1")).stdout for each in (box, *made)
            }
            assert len(seen) == 3, "two sandboxes drew the same random bytes"
            for each in made:
                drift = abs(float((await each.exec("date +%s.%N")).stdout) - time.time())
                assert drift < 5, f"the clock of a fork is {drift} s off"
        finally:
            await asyncio.gather(*(each.close() for each in made))


CHECKS = [
    *(Check(function) for function in (
        every_size_arrives_whole, writes_at_once_keep_apart, an_overwritten_file_is_new,
        trees_of_megabytes_travel, a_cut_tar_is_an_error, hard_links_cannot_leave,
        links_lead_nowhere_on_the_host,
    )),
    Check(a_fork_is_its_own, needs=("fork",)),
    Check(forks_have_their_own_randomness, needs=("fork",)),
]  # fmt: skip
