"""What the server says of itself: versions, resources, and as much OpenAPI as kubectl asks for."""

from __future__ import annotations

from typing import Any

# group/version -> plural, kind, namespaced
RESOURCES = {
    "v1": [("namespaces", "Namespace", False), ("pods", "Pod", True), ("configmaps", "ConfigMap", True),
           ("secrets", "Secret", True), ("events", "Event", True)],
    "networking.k8s.io/v1": [("networkpolicies", "NetworkPolicy", True)],
    "coordination.k8s.io/v1": [("leases", "Lease", True)],
}  # fmt: skip
VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


def answer(path: str) -> dict[str, Any] | None:
    """The document at that path, None if there is none."""
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0-fake", "platform": "linux/amd64"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [name.rpartition("/") for name in RESOURCES if "/" in name]
        versions = [
            {"groupVersion": f"{group}/{version}", "version": version} for group, _, version in groups
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [
            {"name": group, "versions": [each], "preferredVersion": each}
            for (group, _, _), each in zip(groups, versions, strict=True)
        ]}  # fmt: skip
    if path.startswith("/openapi/v3"):
        return _openapi(path.removeprefix("/openapi/v3").strip("/"))
    group = path.removeprefix("/apis/").removeprefix("/api/")
    if group in RESOURCES:
        found = [{"name": plural, "singularName": kind.lower(), "kind": kind, "namespaced": spaced,
                  "verbs": VERBS, "shortNames": ["po"] if plural == "pods" else []}
                 for plural, kind, spaced in RESOURCES[group]]  # fmt: skip
        if group == "v1":
            found.append({"name": "pods/exec", "singularName": "", "kind": "PodExecOptions",
                          "namespaced": True, "verbs": ["create", "get"]})  # fmt: skip
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": found}
    return None


def _openapi(place: str) -> dict[str, Any] | None:
    """kubectl only looks whether a kind's PATCH takes `fieldValidation`: then the server validates."""
    places = {("apis/" if "/" in group else "api/") + group: group for group in RESOURCES}
    if not place:
        return {"paths": {each: {"serverRelativeURL": f"/openapi/v3/{each}"} for each in places}}
    if place not in places:
        return None
    group, _, version = places[place].rpartition("/")
    parameter = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
    paths = {
        f"/{place}/namespaces/{{namespace}}/{plural}/{{name}}": {
            "patch": {
                "parameters": [parameter],
                "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": kind},
                "responses": {},
            }
        }
        for plural, kind, _ in RESOURCES[places[place]]
    }
    return {"openapi": "3.0.0", "info": {"title": "fake", "version": "1"}, "paths": paths}
