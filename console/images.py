"""`posttrain images`: build, keep, exchange the images that sandboxes start from."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from console.session import InSession, print_table

if TYPE_CHECKING:
    from sandbox.images import ImageStore

app = App(name="images", help="Build, keep and exchange the images that sandboxes start from.")


def _store(session: InSession) -> ImageStore:
    from sandbox.images import ImageStore

    return ImageStore(session.store())


@app.command(name="list")
def list_(*, all: Annotated[bool, Parameter(negative="")] = False, session: InSession) -> None:
    """Images that have a name.

    Parameters
    ----------
    all
        Those without a name too.
    """
    from sandbox.oci import collect

    store = _store(session)
    found = collect.images(store, unnamed=all)

    def show() -> None:
        rows = [(image.name, image.digest, image.base, image.layers, _size(image.bytes)) for image in found]
        print_table(("name", "digest", "base", "layers", "size"), rows, empty="No image has a name yet.")

    session.emit([image.model_dump() for image in found], show)


@app.command
def build(
    recipe: Path,
    *,
    name: str | None = None,
    fresh: Annotated[bool, Parameter(negative="")] = False,
    lock: Path | None = None,
    backend: str = "namespace",
    session: InSession,
) -> None:
    """Make the image of a recipe; steps that were done before are not done again.

    Parameters
    ----------
    recipe
        A TOML file: base, system, python, node, workspace, env.
    name
        Name of the image (the file's).
    fresh
        Repeat every step.
    lock
        Write the recipe here with the versions that its packages stand for today.
    backend
        Where the steps run.
    """
    from sandbox.base import provider
    from sandbox.builder import Built, build
    from sandbox.recipe import Recipe

    store = _store(session)
    wanted = Recipe.load(recipe)

    async def run() -> Built:
        sandboxes = provider(backend, store=store.root)
        try:
            return await build(
                wanted, store, sandboxes, fresh=fresh, say=lambda what: print(what, file=session.log)
            )
        finally:
            await sandboxes.close()

    made = asyncio.run(run())
    called = name or recipe.stem
    store.tag(called, made.digest)
    if lock is not None:
        lock.write_text(wanted.locked(made.lock), encoding="utf-8")

    def show() -> None:
        print(f"{made.digest} {called}")
        print(f"{len(made.layers)} layers; {made.cached} of {made.steps} steps were there already.")

    session.emit({"name": called, **asdict(made)}, show)


@app.command
def export(image: str, out: Path, *, name: str | None = None, session: InSession) -> None:
    """Write an image to a file or folder that docker, podman, skopeo and umoci read.

    Parameters
    ----------
    image
        Name or digest.
    out
        A tar (`image.tar`: `docker load -i`, `skopeo copy oci-archive:image.tar`),
        or a folder for an OCI layout.
    name
        Name inside the archive (the image's own).
    """
    from sandbox.oci import archives

    store = _store(session)
    digest = store.resolve(image)
    called = name or (image if not image.startswith("sha256:") else out.stem)
    archives.write(store, digest, out, name=called)
    session.emit({"digest": digest, "name": called, "out": str(out)}, lambda: print(f"{digest} is in {out}"))


@app.command(name="import")
def import_(path: Path, *, name: str | None = None, session: InSession) -> None:
    """Take in an OCI layout or archive, or what `docker save` wrote.

    Parameters
    ----------
    path
        The file or folder.
    name
        Name of the image here (the one that the archive gives).
    """
    from sandbox.oci import archives

    _show(archives.read(_store(session), path, name=name), session)


@app.command
def pull(reference: str, *, name: str | None = None, session: InSession) -> None:
    """Fetch an image from a registry (logins are those of `docker login`).

    Parameters
    ----------
    reference
        HOST/REPOSITORY:TAG or HOST/REPOSITORY@DIGEST.
    name
        A further name for it here.
    """
    from sandbox.oci import registry

    store = _store(session)
    digest = registry.pull(store, reference)
    if name is not None:
        store.tag(name, digest)
    _show([(name or reference, digest)], session)


@app.command
def push(image: str, reference: str, *, session: InSession) -> None:
    """Send an image to a registry.

    Parameters
    ----------
    image
        Name or digest.
    reference
        HOST/REPOSITORY:TAG.
    """
    from sandbox.oci import registry

    store = _store(session)
    digest = store.resolve(image)
    registry.push(store, digest, reference)
    _show([(reference, digest)], session)


@app.command
def tag(image: str, name: str, *, session: InSession) -> None:
    """Give an image one more name; named images are never collected.

    Parameters
    ----------
    image
        Name or digest.
    name
        The new name.
    """
    store = _store(session)
    digest = store.resolve(image)
    store.tag(name, digest)
    _show([(name, digest)], session)


@app.command
def untag(name: str, *, session: InSession) -> None:
    """Take a name away; `gc` removes the image if nothing else holds it.

    Parameters
    ----------
    name
        The name.
    """
    _store(session).names.remove(name)
    session.emit({"removed": name}, lambda: print(f"{name} is no name any more"))


@app.command
def gc(
    *,
    grace_hours: float = 24.0,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    session: InSession,
) -> None:
    """Remove images that no name, task, build, lease or sandbox holds, and what only they needed.

    Parameters
    ----------
    grace_hours
        Nothing younger goes: it may be in the making.
    dry_run
        Only say what would go.
    """
    from sandbox.oci import collect

    result = collect.collect(
        _store(session), keep=_needed(session), grace_s=grace_hours * 3600, dry_run=dry_run
    )
    said = "would be removed" if dry_run else "removed"

    def show() -> None:
        print(f"{result.images} images and {result.layers} unpacked layers {said}: {_size(result.bytes)}.")
        print(f"{result.kept} images kept.")

    session.emit({**result.model_dump(), "dry_run": dry_run}, show)


def _needed(session: InSession) -> set[str]:
    """Images of the catalog's tasks and of the builds that they came from."""
    from catalog.jsonl import read_record
    from catalog.store import default_home

    found: set[str] = set()
    with session.catalog() as catalog:
        for task in catalog.list_tasks():
            found.add(task.environment.image)
            if task.environment.substrate is not None:
                found.add(task.environment.substrate.image)
    for path in ((session.home or default_home()) / "builds").glob("*.json"):
        record = read_record(path)
        found |= {record[name] for name in ("image", "env_image") if name in record}
    return found


def _show(images: list[tuple[str, str]], session: InSession) -> None:
    value: list[dict[str, Any]] = [{"name": name, "digest": digest} for name, digest in images]
    session.emit(value, lambda: print("\n".join(f"{digest} {name}" for name, digest in images)))


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"
