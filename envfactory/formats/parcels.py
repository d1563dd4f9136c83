"""Between the catalog and parcels: a task with its blobs and image packed up, and unpacked in another home.

    parcel = pack(task, catalog.blobs, images)
    unpacked = unpack(parcel, home, catalog.blobs, images)

A task whose image is not in this home is made again from the parcel's workspace and pinned requirements;
on the same Python that gives the same digests. Parcels without a record of ours are `importing`'s work.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from catalog.blobs import Blobs
from catalog.models import BlobRef, Gate, QualityReport, Status, Task, canonical_json, digest_json
from envfactory import git, wheels
from envfactory.errors import full_disk_is_a_user_error
from envfactory.formats.archives import tar_tree
from envfactory.formats.base import Foreign, Parcel, Setup
from envfactory.formats.fields import FormatError
from envfactory.layout import is_protected
from envfactory.packaging import add_workspace, diff
from envfactory.packs import PackWriter
from envfactory.trees import Changes, File, Tree, changed, read_tree, scratch, tar_of
from sandbox.images import ImageStore
from verifiers import patches

SITE = f"{wheels.ENV}/lib"


@dataclass(frozen=True)
class Unpacked:
    """A task that is in this home, and what there is to say about how it got there."""

    task: Task
    notes: tuple[str, ...] = ()
    gates: tuple[Gate, ...] = ()
    """What could be judged on the way."""


def pack(task: Task, blobs: Blobs, images: ImageStore, report: QualityReport | None = None) -> Parcel:
    """Everything that the task refers to. FormatError: no image, or no pytest task."""
    if task.verifier.kind != "pytest":
        raise FormatError(
            f"{task.id} is judged by a {task.verifier.kind} verifier, and only pytest tasks are exported"
        )
    if not images.exists(task.environment.image):
        raise FormatError(f"the image of {task.id} is gone: make the task again with `posttrain tasks synth`")
    manifest = images.manifest(task.environment.image)
    root = images.layer_path(manifest.layers[-1]) / task.environment.workdir.lstrip("/")
    workspace = read_tree(root)
    tests = changed_files(workspace, tar_tree(blobs.get(task.verifier.protected)))
    source, _, version = task.origin.source.partition("==")
    parcel = Parcel(
        id=task.id,
        statement=task.problem.statement,
        gold=blobs.get(task.solution),
        tests=diff(workspace, tests),
        fail_to_pass=task.verifier.fail_to_pass,
        pass_to_pass=task.verifier.pass_to_pass,
        repo=repository_name(source),
        commit=git.head(root),
        version=version or task.origin.revision,
        workspace=workspace,
        setup=setup_of(task, images),
        task=task,
        report=report,
    )
    if task.foreign is None:
        return parcel
    foreign = tuple(Foreign.model_validate_json(line) for line in blobs.get(task.foreign).splitlines())
    return replace(parcel, foreign=foreign, **natives_of(foreign))


def natives_of(foreign: tuple[Foreign, ...]) -> dict[str, str]:
    """What a foreign document called the repository and the rest, so that it is called so again."""
    said = next((one.fields for one in foreign if one.format == "import"), {})
    return {key: str(said[key]) for key in ("repo", "commit", "version", "created", "image") if key in said}


def keep_foreign(parcel: Parcel, blobs: Blobs) -> BlobRef | None:
    """Store what the document said beyond our record; None when there is nothing."""
    if not parcel.foreign:
        return None
    rows = sorted(canonical_json(one.model_dump(mode="json")) for one in parcel.foreign)
    return blobs.put(b"\n".join(rows))


def repository_name(source: str) -> str:
    """`owner/name` of a source: of a URL its last two parts, of anything else `posttrain/NAME`."""
    address = re.sub(r"(@[0-9a-f]{40})?$", "", source).removesuffix("/").removesuffix(".git")
    owner, _, name = address.replace(":", "/").rpartition("/")
    owner = owner.rpartition("/")[2] if "://" in source else "posttrain"
    return f"{_word(owner)}/{_word(name)}"


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "source"


def setup_of(task: Task, images: ImageStore) -> Setup:
    """How to make the task's environment elsewhere, read off its lowest layer."""
    manifest = images.manifest(task.environment.image)
    home = images.layer_path(manifest.layers[0]) / SITE
    site = next(iter(sorted(home.glob("python3.*/site-packages"))), None)
    if site is None:
        raise FormatError(f"{task.id} has no Python environment in its image, so no format can describe it")
    pins: list[str] = []
    metadata: dict[str, str] = {}
    for folder in sorted(site.glob("*.dist-info")):
        installer = folder / "INSTALLER"
        if installer.is_file() and installer.read_bytes() == b"posttrain\n":
            for file in sorted(folder.iterdir()):
                metadata[f"{folder.name}/{file.name}"] = file.read_text(encoding="utf-8", errors="replace")
        else:
            name, _, version = folder.name.removesuffix(".dist-info").rpartition("-")
            pins.append(f"{name}=={version}")
    return Setup(
        python=site.parent.name.removeprefix("python"),
        requirements=tuple(sorted(pins, key=str.lower)),
        metadata=metadata,
        env=dict(sorted(manifest.env.items())),
        workdir=task.environment.workdir,
    )


def unpack(parcel: Parcel, home: Path, blobs: Blobs, images: ImageStore) -> Unpacked:
    """The parcel's own task, ready in this home. Raises FormatError, BuildError, NoSpace."""
    task, notes = parcel.task, list[str]()
    if task is None:
        raise FormatError(f"{parcel.id} is not a task of ours: name its repository with --repo")
    place = parcel.id
    gold = blobs.put(parcel.gold)
    here = images.exists(task.environment.image)
    workspace = parcel.workspace
    if workspace is None and here:
        workspace = read_tree(images.layer_path(images.manifest(task.environment.image).layers[-1])
                              / task.environment.workdir.lstrip("/"))  # fmt: skip
    if workspace is None:
        raise FormatError(f"{place} came without its workspace, and its image is not here: export it again")
    after = applied(parcel.tests, workspace, f"the test patch of {place}")
    wanted = frozenset(task.verifier.arguments)
    guarded = {path: file for path, file in after.items() if is_protected(path, wanted) and not file.link}
    applied(parcel.gold, workspace, f"the patch of {place}", task.verifier.allowed)
    verifier = task.verifier.model_copy(update={"protected": blobs.put(tar_of(guarded))})
    environment = task.environment
    if parcel.workspace is not None or not here:
        image, tree = _image(parcel, workspace, home, images)
        if tree != environment.tree:
            notes.append("the workspace is not the one that was exported")
        elif image != environment.image:
            notes.append("the environment was made again and differs from the exported one")
        environment = environment.model_copy(update={"image": image, "tree": tree})
    substrate = environment.substrate
    if substrate and not (images.exists(substrate.image) and blobs.exists(substrate.changes)):
        environment = environment.model_copy(update={"substrate": None})
    made = task.model_copy(update={"solution": gold, "verifier": verifier, "environment": environment})
    edited = (
        parcel.edited
        or gold != task.solution
        or verifier.protected != task.verifier.protected
        or environment.tree != task.environment.tree
    )
    if edited:
        # It is another task now: it gets an id of its own, and has no gate behind it.
        slug = re.sub(r"-[0-9a-f]{12}$", "", task.id)
        id = Task.make_id(slug, "edited", digest_json(made.model_dump(mode="json", exclude={"id"})))
        made = made.model_copy(update={"id": id, "status": Status.DRAFT})
        notes.append(f"{task.id} was changed after its export: kept as the draft {id}")
    made = made.model_copy(update={"foreign": keep_foreign(parcel, blobs)})
    return Unpacked(made, tuple(notes))


def applied(patch: bytes, tree: Tree, what: str, allowed: tuple[str, ...] | None = None) -> dict[str, File]:
    """The tree after a git diff. Raises FormatError naming `what`."""
    changes, executable = apply_diff(patch, tree, what, allowed)
    after = changed(tree, changes)
    for path, data in changes.items():
        if data is not None:
            after[path] = File(data, executable=path in executable)
    return after


def apply_diff(
    patch: bytes, tree: Tree, what: str, allowed: tuple[str, ...] | None = None
) -> tuple[Changes, frozenset[str]]:
    """What a git diff changes in a tree, and which changed files are executable. Raises FormatError."""

    def read(name: str) -> patches.SourceFile | None:
        file = tree.get(name)
        return None if file is None or file.link else patches.SourceFile(file.data, file.executable)

    try:
        done = patches.apply(patch, read, allowed)
    except patches.PatchRefused as error:
        raise FormatError(f"{what} cannot be used: {error}") from error
    return done.files, done.executable


def changed_files(tree: Tree, files: Tree) -> dict[str, File]:
    """The tree with these files laid over it, mode bits included."""
    return dict(tree) | dict(files)


def _image(parcel: Parcel, workspace: Tree, home: Path, images: ImageStore) -> tuple[str, str]:
    """The task's image in this home, made if need be: digests of the image and of its workspace."""
    task, setup = parcel.task, parcel.setup
    assert task is not None
    if images.exists(task.environment.image):
        below = images.manifest(task.environment.image)
        parent = _without_last(task.environment.image, images)
        env = dict(below.env)
    elif setup is not None:
        parent, env = environment_image(setup, home, images, parcel.id), setup.env
    else:
        raise FormatError(f"{parcel.id} does not say how its environment is made: export it again")
    slug = re.sub(r"-[0-9a-f]{12}$", "", task.id)
    return add_workspace(
        images, parent, workspace, packs=PackWriter(), env=env, note=slug, at=task.environment.workdir
    )


def _without_last(image: str, images: ImageStore) -> str:
    """The image below an image's uppermost layer, which is the workspace's."""
    manifest = images.manifest(image)
    parent = (
        images.host_base() if images.manifest(images.host_base()).base_digest == manifest.base_digest else ""
    )
    if not parent:
        raise FormatError("the image belongs to another host: import the task with its workspace")
    for layer, note in zip(manifest.layers[:-1], manifest.notes[:-1], strict=True):
        parent = images.stack(parent, layer, env=manifest.env, note=note)
    return parent


def environment_image(setup: Setup, home: Path, images: ImageStore, what: str) -> str:
    """An image with the pinned requirements in /opt/env. Raises FormatError (another Python), BuildError."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if setup.python != here:
        raise FormatError(
            f"{what} wants Python {setup.python}, and this is {here}: run posttrain with that one"
        )
    for path in setup.metadata:
        if not re.fullmatch(r"[A-Za-z0-9._+-]+\.dist-info/[A-Za-z0-9_.-]+", path) or ".." in path:
            raise FormatError(f"{what}: {path[:80]!r} is no file of a package's metadata")
    bad = [pin for pin in setup.requirements if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._+!-]+", pin)]
    if bad:
        raise FormatError(f"{what}: the requirement {bad[0][:80]!r} is not pinned as NAME==VERSION")
    lock = wheels.resolve(setup.requirements, home)
    extra = {f"{wheels.SITE}/{path}": File(text.encode()) for path, text in setup.metadata.items()}
    scripts = next((t for p, t in setup.metadata.items() if p.endswith("/entry_points.txt")), "")
    environment = wheels.environment_tree(lock, home, extra | wheels.console_scripts(scripts))
    with full_disk_is_a_user_error(images.root), scratch() as folder:
        wheels.write_environment(environment, folder / "env")
        return images.add_layer(
            images.host_base(), folder / "env", env=setup.env, note="environment", owner="root"
        )
