"""Recipes: shared layers, remembered steps, equal digests."""

from __future__ import annotations

import asyncio
import json
import subprocess
from datetime import date
from pathlib import Path

import pytest

from sandbox.base import SandboxSpec
from sandbox.builder import Built, build, stays
from sandbox.images import ImageStore
from sandbox.namespace import NamespaceProvider
from sandbox.oci import archives, canonical
from sandbox.oci.documents import ImageError
from sandbox.recipe import Recipe
from tests.sandbox.test_archives import DIR, LOWER, UPPER, make, tar_of
from tests.sandbox.test_images import grow


def recipe(folder: Path, text: str) -> Recipe:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text(text)
    return Recipe.load(folder / "recipe.toml")


async def test_a_hundred_tasks_share_all_layers_but_the_last(
    provider: NamespaceProvider, tmp_path: Path
) -> None:
    store = provider.images
    archives.write(store, make(store), tmp_path / "base.tar", name="base:1")
    layers: list[tuple[str, ...]] = []
    for number in range(100):
        grow(tmp_path / f"task{number}", str(number))
        made = await build(
            recipe(tmp_path, f'base = "./base.tar"\nworkspace = "task{number}"\nenv.N = "x"'), store, provider
        )
        layers.append(made.layers)
        assert store.manifest(made.digest).env["N"] == "x"
    assert len({each[:-1] for each in layers}) == 1
    assert len({each[-1] for each in layers}) == 100


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("base = ", "is no TOML"),
        ("bse = 'host'", "bse: Extra inputs"),
        ("python = ['--index-url=http://evil']", r"python\.0: .*is no package"),
        ("system = ['a; rm -rf /']", r"system\.0: .*no Debian package"),
    ],
)
def test_recipes_that_are_none(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ImageError, match=sentence):
        recipe(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("system = ['git']", "need a base of their own"),
        ("base = 'debian:a/b'", "no Debian suite"),
        ("base = 'nothing'", "no image nothing"),
    ],
)
async def test_recipes_that_cannot_be_made(
    provider: NamespaceProvider, tmp_path: Path, text: str, sentence: str
) -> None:
    with pytest.raises(ImageError, match=sentence):
        await build(recipe(tmp_path, text), provider.images, provider)


def test_a_locked_recipe_is_the_recipe_with_versions(tmp_path: Path) -> None:
    first = recipe(
        tmp_path, "index_before = 2024-05-01\npython = ['pytest']\nworkspace = '.'\nenv.A = 'b\"c'"
    )
    text = first.locked({"python": ("pytest==8.2.0", "pluggy==1.5.0")})
    second = recipe(tmp_path / "other", text)
    assert second.python == ("pytest==8.2.0", "pluggy==1.5.0")
    assert (second.env, second.index_before) == (first.env, date(2024, 5, 1))
    assert second.workspace is not None
    assert second.workspace.samefile(tmp_path)


def test_canonical_layers_forget_order_time_and_what_changes(tmp_path: Path) -> None:
    """Any order of the same entries gives the same bytes, and they unpack to the same as before."""
    store = ImageStore(tmp_path / "store")
    digests: set[str] = set()
    noise = ("var/log/apt.log", "x", {"mtime": 7})
    shuffled = (*LOWER[2:4], *LOWER[:2], *LOWER[4:], noise, ("root", "", DIR), ("root/.cache", "", DIR))
    plain = (*LOWER, ("root", "", DIR))
    for entries in (plain, shuffled):
        with store.blobs.temporary() as out:
            canonical.rewrite(tar_of(*entries), out, keep=stays)
            digests.add(store.import_layer(out))
    assert len(digests) == 1
    folder = store.layer_path(digests.pop())
    assert (folder / "tools/tool").stat().st_ino == (folder / "tools/same").stat().st_ino
    assert (folder / "tools/link").readlink() == Path("/tools/tool")
    assert not (folder / "var").exists()
    with store.blobs.temporary() as out:
        canonical.rewrite(tar_of(*UPPER), out, keep=stays)
        assert (store.layer_path(store.import_layer(out)) / "etc/gone").is_char_device()


@pytest.mark.services
@pytest.mark.timeout(900)
async def test_debian_python_and_node_twice_the_same(tmp_path: Path) -> None:
    """A whole system from nothing, in two stores: the same digests. It runs here, and others can read it."""
    grow(tmp_path / "ws", "work")
    (tmp_path / "ws/test_one.py").write_text("def test_one():\n    assert True\n")
    text = (
        'base = "debian:bookworm"\nsystem = ["python3-venv"]\npython = ["pytest"]\nworkspace = "ws"\n'
        'env.GREETING = "hello"\n'
    )

    async def once(root: Path) -> Built:
        async with NamespaceProvider(root) as provider:
            first = await build(recipe(tmp_path, text), provider.images, provider)
            again = await build(recipe(tmp_path, text), provider.images, provider)
            assert again.digest == first.digest
            assert (first.cached, again.cached) == (0, 3)
            spec = SandboxSpec(image=again.digest, memory_mb=512, disk_mb=128)
            async with await provider.create(spec) as box:
                script = "pytest -q && echo $GREETING && bin/tool && id -un && cat /etc/debian_version"
                result = await box.exec(script, timeout=300)
                assert result.ok, result.text
                assert result.stdout.split()[-4:-1] == [b"hello", b"work", b"agent"]
                assert (await box.exec("touch /usr/x")).exit_code == 1
            return first

    made = await asyncio.gather(once(tmp_path / "store0"), once(tmp_path / "store1"))
    assert made[0].digest == made[1].digest
    assert any(word.startswith("pytest==") for word in made[0].lock["python"])
    store = ImageStore(tmp_path / "store0")
    archives.write(store, made[0].digest, tmp_path / "image.tar", name="tool:1")
    command = ["skopeo", "inspect", "--config", f"oci-archive:{tmp_path}/image.tar:tool:1"]
    seen = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert "GREETING=hello" in seen["config"]["Env"]


@pytest.mark.services
@pytest.mark.timeout(600)
async def test_python_and_node_on_the_host_s_base_twice_the_same(tmp_path: Path) -> None:
    digests: set[str] = set()
    for number in range(2):
        async with NamespaceProvider(tmp_path / f"store{number}") as provider:
            dated = Recipe(python=("more-itertools",), index_before=date(2024, 5, 1))
            below = await build(dated, provider.images, provider)
            assert "more-itertools==10.2.0" in below.lock["python"]
            further = Recipe(base=below.digest, node=("is-number@7.0.0",))
            made = await build(further, provider.images, provider)
            assert made.lock["node"] == ("is-number@7.0.0",)
            digests.add(made.digest)
            async with await provider.create(SandboxSpec(image=made.digest)) as box:
                script = "python -c 'import more_itertools' && node -e \"require('is-number')\""
                result = await box.exec(script, timeout=300)
                assert result.ok, result.text
    assert len(digests) == 1
