"""Images from recipes, layer by layer.

Each step runs in a sandbox on the image below it, with the host's network; what it changed becomes a layer,
made canonical (`sandbox.oci.canonical`). A step is remembered by what it does and on what, so that recipes
which begin alike share those layers: of a hundred tasks of one repository all but the last. Nothing is
remembered before it is stored, so a build that was killed goes on at the step where it was.

The same recipe gives the same digests as long as its packages mean the same versions: `Built.lock` names
them, and the recipe with these in it is good for later and for other machines.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import shutil
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox import hostbase
from sandbox.base import NetworkPolicy, Sandbox, SandboxProvider, SandboxSpec
from sandbox.images import ImageStore
from sandbox.oci import archives, canonical, documents
from sandbox.oci.blobs import write_file
from sandbox.oci.documents import ImageError
from sandbox.recipe import Recipe
from sandbox.trees import AGENT, FIXED_TIME

FORMAT = 1
STEP_SECONDS = 1800.0
_CHANGING = re.compile(
    r"(var/log|var/cache|var/lib/apt/lists|var/tmp|tmp|run|root|home/agent|dev|proc|sys)/.+"
    r"|var/lib/(dpkg|systemd)/.*(-old|/random-seed)|etc/(machine-id|\.pwd\.lock|resolv\.conf|hostname|hosts|mtab)"
    r"|var/lib/dbus/machine-id|(.*/)?\.package-lock\.json-\d+"
)
"""What no two installations have in common, or what belongs to the machine and not to the image."""
_COMPILE = (
    "find {where} -name '*.pyc' -delete && "
    "PYTHONHASHSEED=0 {python} -m compileall -q -j1 --invalidation-mode unchecked-hash {where} || true"
)


@dataclass(frozen=True, slots=True)
class Built:
    """What a recipe became."""

    digest: str
    layers: tuple[str, ...]
    lock: Mapping[str, tuple[str, ...]]
    """Versions that `system`, `python` and `node` stand for, in the form that a recipe takes."""
    cached: int
    """Steps that needed no work."""
    steps: int


@dataclass(frozen=True, slots=True)
class _Step:
    image: str
    lock: tuple[str, ...] = ()


async def build(
    recipe: Recipe,
    store: ImageStore,
    provider: SandboxProvider,
    *,
    fresh: bool = False,
    disk_mb: int = 4096,
    say: Callable[[str], None] = lambda _: None,
) -> Built:
    """Make the image of a recipe. `fresh` repeats every step; `say` hears what is being done.

    Raises ImageError with one sentence where a step fails, SandboxUnavailable where no sandbox runs.
    """
    return await _Builder(recipe, store, provider, fresh, disk_mb, say).run()


@dataclass
class _Builder:
    recipe: Recipe
    store: ImageStore
    provider: SandboxProvider
    fresh: bool
    disk_mb: int
    say: Callable[[str], None]
    cached: int = 0
    steps: int = 0
    lock: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict[str, tuple[str, ...]])

    async def run(self) -> Built:
        image = await self._base()
        if self.recipe.system:
            image = await self._install("system", image, self.recipe.system, _system, "/usr")
        if self.recipe.python:
            image = await self._install("python", image, self.recipe.python, self._python, "/opt/env")
        if self.recipe.node:
            image = await self._install("node", image, self.recipe.node, _node, "")
        workspace = self.recipe.workspace
        if workspace is not None or self.recipe.env:
            with tempfile.TemporaryDirectory(dir=self.store.root, prefix=".new-") as empty:
                image = self.store.add_layer(
                    image, workspace or Path(empty), at="/workspace", env=self.recipe.env, note="workspace"
                )
        return Built(image, self.store.manifest(image).layers, self.lock, self.cached, self.steps)

    # ---- the base

    async def _base(self) -> str:
        base = self.recipe.base
        if base == "host":
            if self.recipe.system:
                raise ImageError("system packages need a base of their own: set base to debian:SUITE")
            return self.store.host_base()
        if base.startswith("debian:"):
            suite = base.removeprefix("debian:")
            if not re.fullmatch(r"[a-z-]+", suite):
                raise ImageError(f"{suite!r} is no Debian suite")
            key = ["debian", suite, self.recipe.mirror, documents.architecture()]
            known = self._recall(key)
            if known is None:
                known = _Step(await self._debian(suite))
                self._remember(key, known)
            return known.image
        if Path(base).exists():
            found = archives.read(self.store, Path(base))
            if len(found) > 1:
                raise ImageError(f"{base} holds {len(found)} images: import it and name one of them")
            return found[0][1]
        return self.store.resolve(base)

    async def _debian(self, suite: str) -> str:
        tool = shutil.which("mmdebstrap")
        if tool is None:
            raise ImageError("a Debian base needs mmdebstrap: run `sudo apt-get install mmdebstrap`")
        self.say(f"Debian {suite}")
        with (
            tempfile.TemporaryDirectory(dir=self.store.root, prefix=".new-") as folder,
            self.store.blobs.temporary() as out,
        ):
            raw = Path(folder) / "base.tar"
            command = [tool, "--quiet", "--variant=minbase", "--include=ca-certificates", suite, str(raw)]
            environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "SOURCE_DATE_EPOCH": str(FIXED_TIME)}
            running = await asyncio.create_subprocess_exec(
                *command, self.recipe.mirror, env=environment, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE
            )
            _, said = await running.communicate()
            if running.returncode:
                raise ImageError(f"mmdebstrap made no Debian {suite}: {_tail(said)}")
            with raw.open("rb") as file:
                canonical.rewrite(file, out, keep=stays, devices=True)
            layer = self.store.import_layer(out)
        below = self.store.stack(None, layer, note=f"Debian {suite}")
        return self._people(below)

    def _people(self, image: str) -> str:
        """Give the image the user that agents are, and their folders."""
        etc = self.store.layer_path(self.store.manifest(image).layers[-1]) / "etc"
        with tempfile.TemporaryDirectory(dir=self.store.root, prefix=".new-") as folder:
            for name, line in (
                ("passwd", f"agent:x:{AGENT}:{AGENT}:agent:/home/agent:/bin/sh\n"),
                ("group", f"agent:x:{AGENT}:\n"),
            ):
                (Path(folder) / name).write_text((etc / name).read_text() + line)
            image = self.store.add_layer(image, Path(folder), at="/etc", owner="root", note="agent")
        with tempfile.TemporaryDirectory(dir=self.store.root, prefix=".new-") as folder:
            return self.store.add_layer(image, Path(folder), at="/home/agent", note="home")

    # ---- steps in sandboxes

    async def _install(
        self,
        kind: str,
        image: str,
        packages: Sequence[str],
        install: Callable[[Sequence[str]], tuple[str, str]],
        compiled: str,
    ) -> str:
        script, ask = install(packages)
        day = self.recipe.index_before if kind in ("python", "node") else None
        key = [kind, image, script, ask, str(day or "")]
        known = self._recall(key)
        if known is None:
            self.say(f"{kind}: {' '.join(packages)}")
            known = await self._run(kind, image, script, ask, compiled)
            self._remember(key, known)
        self.lock[kind] = known.lock
        return known.image

    async def _run(self, kind: str, image: str, script: str, ask: str, compiled: str) -> _Step:
        spec = SandboxSpec(
            image=image, owner="images", workdir="/", network="host",
            memory_mb=self.disk_mb + 1024, disk_mb=self.disk_mb, pids=1024,
        )  # fmt: skip
        if kind in ("python", "node") and self.recipe.index_before is not None:
            policy = NetworkPolicy("allow", index_before=self.recipe.index_before)
            spec = dataclasses.replace(spec, network=policy)
        async with await self.provider.create(spec) as box:
            await _must(box, kind, script)
            if compiled:
                await _must(box, kind, _COMPILE.format(where=compiled, python=self._interpreter()))
            lock = tuple(sorted((await _must(box, kind, ask)).split()))
            top = self.store.manifest(await box.snapshot()).layers[-1]
        with self.store.blobs.path(top).open("rb") as raw, self.store.blobs.temporary() as out:
            canonical.rewrite(raw, out, keep=stays)
            layer = self.store.import_layer(out)
        env = {"python": _PYTHON_ENV, "node": _NODE_ENV}.get(kind, {})
        below = self.store.manifest(image).env
        merged = {**env, "PATH": f"{env['PATH']}:{below.get('PATH', _PATH)}"} if env else {}
        return _Step(self.store.stack(image, layer, env=merged, note=f"{kind}: {' '.join(lock)}"[:500]), lock)

    def _interpreter(self) -> str:
        return f"{hostbase.python_prefix()}/bin/python3" if self.recipe.base == "host" else "/usr/bin/python3"

    def _python(self, packages: Sequence[str]) -> tuple[str, str]:
        python = self._interpreter()
        script = (
            f"test -x {python} || {{ echo 'no Python: add python3-venv to system' >&2; exit 1; }}\n"
            f"{python} -m venv /opt/env\n"
            "/opt/env/bin/pip --disable-pip-version-check --no-cache-dir install --quiet --no-compile "
            f"--only-binary :all: {_quote(packages)}"
        )
        return script, "/opt/env/bin/pip --disable-pip-version-check list --format=freeze"

    # ---- memory of steps

    def _recall(self, key: Sequence[Any]) -> _Step | None:
        self.steps += 1
        path = self._memory(key)
        if self.fresh or not path.exists():
            return None
        record = json.loads(path.read_text())
        if not self.store.exists(record["image"]):
            return None
        self.cached += 1
        return _Step(record["image"], tuple(record["lock"]))

    def _remember(self, key: Sequence[Any], step: _Step) -> None:
        record = {"image": step.image, "lock": step.lock, "key": key}
        write_file(self._memory(key), json.dumps(record).encode())

    def _memory(self, key: Sequence[Any]) -> Path:
        digest = documents.digest_of(json.dumps([FORMAT, *key]).encode())
        return self.store.root / "steps" / f"{digest[7:]}.json"


_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PYTHON_ENV = {"PATH": "/opt/env/bin", "VIRTUAL_ENV": "/opt/env", "PYTHONDONTWRITEBYTECODE": "1"}
_NODE_ENV = {"PATH": "/opt/node/node_modules/.bin", "NODE_PATH": "/opt/node/node_modules"}


def _system(packages: Sequence[str]) -> tuple[str, str]:
    options = "-qq -o APT::Sandbox::User=root -o Dpkg::Use-Pty=0 -o Dpkg::Options::=--force-unsafe-io"
    script = (
        "export DEBIAN_FRONTEND=noninteractive\n"
        f"apt-get {options} update\n"
        f"apt-get {options} install -y --no-install-recommends {_quote(packages)} >/tmp/apt.log 2>&1 "
        "|| { tail -c 2000 /tmp/apt.log >&2; exit 1; }\n"
        "apt-get clean"
    )
    names = _quote([re.split("[:=]", package)[0] for package in packages])
    return script, f"dpkg-query -W -f '${{Package}}=${{Version}}\\n' {names}"


def _node(packages: Sequence[str]) -> tuple[str, str]:
    script = (
        "mkdir -p /opt/node && cd /opt/node\n"
        "HOME=/tmp npm install --silent --ignore-scripts --no-audit --no-fund --cache /tmp/npm "
        f"--prefix /opt/node {_quote(packages)} >&2"
    )
    listing = (
        "const t=JSON.parse(require('fs').readFileSync('/opt/node/package-lock.json')).packages;"
        "for(const [n,p] of Object.entries(t))"
        "if(n&&!n.slice(13).includes('node_modules/'))console.log(n.slice(13)+'@'+p.version)"
    )
    return script, f'node -e "{listing}"'


async def _must(box: Sandbox, kind: str, script: str) -> str:
    result = await box.exec(f"set -e\n{script}", user="root", timeout=STEP_SECONDS, max_output=1 << 20)
    if not result.ok:
        said = _tail(result.stderr or result.stdout)
        raise ImageError(f"the step {kind} ended as {result.outcome.value} {result.exit_code}: {said}")
    return result.stdout.decode(errors="replace")


def stays(name: str) -> bool:
    """Whether a path belongs to an image, by name."""
    return not _CHANGING.fullmatch(name)


def _quote(words: Sequence[str]) -> str:
    return " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)


def _tail(output: bytes) -> str:
    """The last line that says something, printable."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    text = lines[-1] if lines else "without a word"
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:300]
