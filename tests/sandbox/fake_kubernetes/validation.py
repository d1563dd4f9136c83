"""Objects against the OpenAPI types of the official client: unknown fields, wrong types, absences."""

from __future__ import annotations

import re
from typing import Any

from kubernetes import client
from pydantic import ValidationError

TYPES = {
    "Pod": "V1Pod",
    "ConfigMap": "V1ConfigMap",
    "Namespace": "V1Namespace",
    "Secret": "V1Secret",
    "NetworkPolicy": "V1NetworkPolicy",
    "Lease": "V1Lease",
    "Event": "CoreV1Event",
}
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")


def problems(body: dict[str, Any]) -> list[str]:
    """What a real API server would refuse; an empty list if nothing."""
    kind = str(body.get("kind"))
    if kind not in TYPES:
        return [f"kind {kind!r} is unknown here"]
    model = getattr(client, TYPES[kind])
    found = list(_unknown(body, TYPES[kind], kind))
    try:
        model.model_validate(body)
    except ValidationError as error:
        found += [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
    return found or _rules(body)


def _unknown(value: Any, type: str, where: str) -> list[str]:
    """Fields that the type does not have, at any depth."""
    if outer := re.fullmatch(r"List\[(.*)\]", type):
        items = value if isinstance(value, list) else []
        return [each for i, item in enumerate(items) for each in _unknown(item, outer[1], f"{where}[{i}]")]
    if outer := re.fullmatch(r"Dict\[str, (.*)\]", type):
        pairs = value.items() if isinstance(value, dict) else ()
        return [each for key, item in pairs for each in _unknown(item, outer[1], f"{where}.{key}")]
    model = getattr(client, type, None)
    if model is None or not isinstance(value, dict):
        return []
    types = {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}
    found = [f'unknown field "{where}.{name}"' for name in value if name not in types]
    for name, item in value.items():
        if name in types:
            found += _unknown(item, types[name], f"{where}.{name}")
    return found


def _rules(body: dict[str, Any]) -> list[str]:
    """Rules that types do not say."""
    found: list[str] = []
    metadata = body.get("metadata") or {}
    name = metadata.get("name", "x")
    if not _NAME.fullmatch(name) or len(name) > 253:
        found.append(f"metadata.name: Invalid value: {name!r}")
    for key, value in (metadata.get("labels") or {}).items():
        if len(value) > 63 or not _LABEL.fullmatch(value):
            found.append(f"metadata.labels[{key}]: Invalid value: {value!r}")
    if sum(len(k) + len(v) for k, v in (metadata.get("annotations") or {}).items()) > 256 << 10:
        found.append("metadata.annotations: Too long: may not be more than 262144 bytes")
    if body.get("kind") == "ConfigMap":
        size = sum(len(value) for value in (body.get("binaryData") or {}).values())
        if size > 1 << 20:
            found.append("ConfigMap: Too long: may not be more than 1048576 bytes")
    if body.get("kind") == "Pod":
        found += _pod_rules(body["spec"])
    return found


def _pod_rules(spec: dict[str, Any]) -> list[str]:
    found: list[str] = []
    volumes = {volume["name"] for volume in spec.get("volumes") or []}
    for container in spec.get("containers") or []:
        for mount in container.get("volumeMounts") or []:
            if mount["name"] not in volumes:
                found.append(f"spec.containers[0].volumeMounts: Not found: {mount['name']!r}")
        resources = container.get("resources") or {}
        for group in ("requests", "limits"):
            for key, value in (resources.get(group) or {}).items():
                if not _QUANTITY.fullmatch(str(value)):
                    found.append(f"resources.{group}[{key}]: quantities must match: {value!r}")
        security = container.get("securityContext") or {}
        if security.get("runAsNonRoot") and security.get("runAsUser") == 0:
            found.append("securityContext: runAsNonRoot and runAsUser 0 contradict")
    if spec.get("dnsPolicy") == "None" and not (spec.get("dnsConfig") or {}).get("nameservers"):
        found.append("spec.dnsConfig.nameservers: Required value: must provide one with dnsPolicy None")
    if spec.get("activeDeadlineSeconds", 1) < 1:
        found.append("spec.activeDeadlineSeconds: Invalid value: must be at least 1")
    return found
