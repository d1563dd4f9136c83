"""The API server itself: routes, verbs, answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import ssl
from pathlib import Path
from typing import Any, Self

import yaml
from aiohttp import web

from sandbox.namespace import NamespaceProvider
from tests.sandbox.fake_kubernetes import discovery, validation
from tests.sandbox.fake_kubernetes.execs import Exec
from tests.sandbox.fake_kubernetes.faults import Faults
from tests.sandbox.fake_kubernetes.node import Node
from tests.sandbox.fake_kubernetes.store import Conflict, Event, Gone, Store


class Refused(Exception):
    """An answer that is no success."""

    def __init__(self, code: int, reason: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                       "message": message, "reason": reason, "details": details, "code": code}  # fmt: skip


class FakeCluster:
    """A cluster of one node. An async context manager; `kubeconfig` is a file for any client."""

    def __init__(
        self,
        folder: Path,
        provider: NamespaceProvider,
        *,
        memory_mb: int = 64 << 10,
        pod_pids: int = 180,
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        self.folder, self.certificate = folder, certificate
        self.token = secrets.token_hex(16)
        self.faults = Faults()
        self.store = Store()
        self.node = Node(self.store, provider, self.faults, memory_mb=memory_mb, pod_pids=pod_pids)
        self.kubeconfig = folder / "kubeconfig"
        self.requests: list[str] = []
        """Method and path of every request, in order."""
        self._watching: list[web.Request] = []
        self._runner: web.AppRunner | None = None
        self.execs: list[web.Request] = []

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._errors], client_max_size=16 << 20)
        app.router.add_route("*", "/{path:.*}", self._route)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.02)
        await self._runner.setup()
        context = None
        if self.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*self.certificate)
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        self.port = self.node.port = self._runner.addresses[0][1]
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}}
        self.store.create("namespaces", "", {**space, "status": {"phase": "Active"}})
        self.kubeconfig.write_text(yaml.safe_dump(self._kubeconfig()))
        return self

    def _kubeconfig(self) -> dict[str, Any]:
        scheme = "https" if self.certificate else "http"
        server: dict[str, Any] = {"server": f"{scheme}://127.0.0.1:{self.port}"}
        if self.certificate:
            server["certificate-authority"] = str(self.certificate[0])
        return {
            "apiVersion": "v1", "kind": "Config", "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": server}],
            "users": [{"name": "fake", "user": {"token": self.token}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
        }  # fmt: skip

    async def __aexit__(self, *exc: object) -> None:
        self.drop_watches()
        self.cut_execs()
        await self.node.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # ---- faults at once

    def drop_watches(self) -> None:
        """Cut every watch."""
        for request in list(self._watching):
            if request.transport is not None:
                request.transport.abort()

    def cut_execs(self) -> None:
        """Cut every exec stream."""
        for request in list(self.execs):
            if request.transport is not None:
                request.transport.abort()

    def pods(self) -> list[dict[str, Any]]:
        return self.store.list("pods", "")

    # ---- requests

    @web.middleware
    async def _errors(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refused as refused:
            code = refused.status["code"]
            headers = {"Retry-After": retry} if (retry := refused.status["details"].pop("retry", "")) else {}
            return web.json_response(refused.status, status=code, headers=headers)

    async def _route(self, request: web.Request) -> web.StreamResponse:
        path = "/" + request.match_info["path"]
        self.requests.append(f"{request.method} {path}")
        given = request.headers.get("Authorization")
        if given != f"Bearer {self.token}" and (given or self.certificate):  # kubectl sends none without TLS
            raise Refused(401, "Unauthorized", "Unauthorized")
        await asyncio.sleep(self.faults.reply_late_s)
        if self.faults.refuse_requests:
            code, retry = self.faults.refuse_requests.pop(0)
            raise Refused(code, "TooManyRequests" if code == 429 else "InternalError", "a fault", retry=retry)
        if (found := discovery.answer(path)) is not None:
            return web.json_response(found)
        parts = path.strip("/").split("/")
        group, parts = ("v1", parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
        namespace = ""
        if len(parts) >= 3 and parts[0] == "namespaces":
            namespace, parts = parts[1], parts[2:]
        known = {plural: kind for plural, kind, _ in discovery.RESOURCES.get(group, [])}
        if not parts or parts[0] not in known:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        return await self._verb(request, group, parts, known[parts[0]], namespace)

    async def _verb(
        self, request: web.Request, group: str, parts: list[str], kind: str, namespace: str
    ) -> web.StreamResponse:
        resource, name, sub = (*parts, "", "")[:3]
        if not name:
            if request.method == "POST":
                return await self._create(request, resource, kind, namespace)
            if request.query.get("watch") in ("true", "1"):
                return await self._watch(request, resource, namespace)
            return self._list(request, resource, group, kind, namespace)
        found = self.store.get(resource, namespace, name)
        if found is None:
            raise Refused(404, "NotFound", f'{resource} "{name}" not found', name=name, kind=resource)
        if sub == "exec":
            return await self._exec(request, found)
        if sub == "eviction":
            await self.node.end(found, "Evicted", "The node was low on resource: memory.")
            return web.json_response({"kind": "Status", "status": "Success"}, status=201)
        if sub == "log":
            return web.Response(text="")
        if request.method == "DELETE":
            return await self._delete(request, resource, found)
        if request.method in ("PATCH", "PUT"):
            return await self._patch(request, resource, found)
        return web.json_response(found)

    async def _create(self, request: web.Request, resource: str, kind: str, namespace: str) -> web.Response:
        body = json.loads(await request.read())
        wrong = validation.problems(body)
        if body.get("kind") != kind:
            wrong.append(f"kind: {body.get('kind')!r} is not {kind}")
        if wrong:
            unknown = any("unknown field" in each for each in wrong)
            code, reason = (400, "BadRequest") if unknown else (422, "Invalid")
            raise Refused(code, reason, f"{kind} is invalid: " + ", ".join(wrong))
        if kind == "Pod":
            self._admission(body)
        try:
            made = self.store.create(resource, namespace, body)
        except Conflict as taken:
            raise Refused(409, "AlreadyExists", f'{resource} "{taken}" already exists') from None
        if kind == "Pod":
            self.node.admit(made)
        if self.faults.lose_answers:
            self.faults.lose_answers -= 1
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(made, status=201)

    def _admission(self, body: dict[str, Any]) -> None:
        if self.faults.deny_pods:
            message = f'admission webhook "policy.example" denied the request: {self.faults.deny_pods}'
            raise Refused(403, "Forbidden", message)
        runtime = body["spec"].get("runtimeClassName", "")
        if runtime and runtime not in self.faults.runtimes:
            message = f'pods is forbidden: pod rejected: RuntimeClass "{runtime}" not found'
            raise Refused(403, "Forbidden", message)

    def _list(
        self, request: web.Request, resource: str, group: str, kind: str, namespace: str
    ) -> web.Response:
        items = self.store.list(resource, namespace, request.query.get("labelSelector", ""))
        start, limit = int(request.query.get("continue") or 0), int(request.query.get("limit") or 0)
        page = items[start : start + limit] if limit else items
        metadata = {"resourceVersion": str(self.store.version)}
        if limit and start + limit < len(items):
            metadata["continue"] = str(start + limit)
        return web.json_response(
            {"kind": f"{kind}List", "apiVersion": group, "metadata": metadata, "items": page}
        )

    async def _watch(self, request: web.Request, resource: str, namespace: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self._watching.append(request)
        lines = self.faults.watch_lines
        query = request.query
        after = int(query.get("resourceVersion") or self.store.version)
        try:
            async with asyncio.timeout(float(query.get("timeoutSeconds") or 300)):
                async for event in self.store.follow(
                    resource, namespace, query.get("labelSelector", ""), after
                ):
                    line = _line(event)
                    if lines is not None and lines <= 0:
                        await response.write(line[: len(line) // 2])
                        assert request.transport is not None
                        request.transport.abort()
                        return response
                    lines = None if lines is None else lines - 1
                    await response.write(line)
        except Gone:
            gone = Refused(410, "Expired", f"too old resource version: {after} ({self.store.oldest})").status
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self._watching.remove(request)
        with contextlib.suppress(ConnectionError):
            await response.write_eof()
        return response

    async def _delete(self, request: web.Request, resource: str, found: dict[str, Any]) -> web.Response:
        if resource != "pods":
            self.store.delete(resource, found)
            return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})
        if "deletionTimestamp" not in found["metadata"]:
            found["metadata"] |= {"deletionTimestamp": found["metadata"]["creationTimestamp"]}
            self.store.touch(resource, found)
            self.node.linger(self.node.remove(found, 1.0))
        return web.json_response(found)

    async def _patch(self, request: web.Request, resource: str, found: dict[str, Any]) -> web.Response:
        body = json.loads(await request.read())
        if isinstance(body, list):
            raise Refused(415, "UnsupportedMediaType", "JSON patches are not served here")
        _merge(found, body)
        self.store.touch(resource, found)
        return web.json_response(found)

    async def _exec(self, request: web.Request, pod: dict[str, Any]) -> web.StreamResponse:
        box = self.node.boxes.get(pod["metadata"]["uid"])
        statuses = pod["status"].get("containerStatuses") or [{"state": {}}]
        if self.faults.refuse_execs or box is None or "running" not in statuses[0]["state"]:
            self.faults.refuse_execs = max(0, self.faults.refuse_execs - 1)
            raise Refused(
                500, "InternalError", 'unable to upgrade connection: container not found ("sandbox")'
            )
        security = pod["spec"]["containers"][0].get("securityContext") or {}
        user = "root" if security.get("runAsUser", 0) == 0 else "agent"
        self.execs.append(request)
        try:
            return await Exec(box, request, self.faults, user, self.node.linger).serve()
        finally:
            self.execs.remove(request)


def _line(event: Event) -> bytes:
    return json.dumps({"type": event.type, "object": event.object}).encode() + b"\n"


def _merge(target: dict[str, Any], patch: dict[str, Any]) -> None:
    """JSON merge patch (RFC 7386)."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


def settings(cluster: FakeCluster, **changes: Any) -> dict[str, Any]:
    """Of a provider for this cluster: what its node enforces, and little patience."""
    return {
        "kubeconfig": str(cluster.kubeconfig), "pids_limit": cluster.node.pod_pids, "hard_disk": True,
        "kill_one": True, "reconnect_s": 5, "start_s": 100, "schedule_s": 0.3, **changes,
    }  # fmt: skip
