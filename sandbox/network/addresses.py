"""Which names are names, and which addresses no sandbox may ever reach."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMERIC = re.compile(r"[0-9]+|0x[0-9a-f]*")
_NAT64 = tuple(ipaddress.IPv6Network(net) for net in ("64:ff9b::/96", "64:ff9b:1::/48"))
_UNICAST = ipaddress.IPv6Network("2000::/3")
_NEVER = tuple(
    ipaddress.ip_network(net)
    for net in (
        "0.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "168.63.129.16/32", "192.0.0.0/24",
        "224.0.0.0/4", "240.0.0.0/4", "::/96", "fe80::/10", "fec0::/10", "fd00:ec2::/32", "ff00::/8",
    )
)  # fmt: skip
"""Loopback, link-local, metadata services of clouds, multicast: refused even where a network is trusted."""


def hostname(text: str) -> str | None:
    """The canonical form of a DNS name; None for anything that is none.

    Addresses are none, in whatever spelling: `127.1`, `0x7f.1`, `2130706433`, `[::1]` reach an address
    through resolvers that are lenient.
    """
    name = text.removesuffix(".").lower()
    if not name.isascii():
        try:
            name = name.encode("idna").decode()
        except UnicodeError:
            return None
    labels = name.split(".")
    if (
        len(name) > 253
        or not all(_LABEL.fullmatch(label) for label in labels)
        or _NUMERIC.fullmatch(labels[-1])
    ):
        return None
    return name


def refusal(text: str, trusted: Sequence[Network] = ()) -> str | None:
    """Why this address may not be reached, None if it may: it is public, or in a trusted network.

    IPv6 forms that carry an IPv4 address (mapped, 6to4, NAT64, ISATAP, Teredo) count as that address too.
    """
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return f"{text!r} is no address"
    for form in (address, *_inner(address)):
        if any(form in net for net in _NEVER if net.version == form.version):
            return f"{address} is an address of this machine, its links or its cloud"
        if any(form in net for net in trusted if net.version == form.version):
            continue
        if not form.is_global or form.is_reserved or (form.version == 6 and form not in _UNICAST):
            return f"{address} is no public address"
    return None


def _inner(address: Address) -> list[Address]:
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found: list[Address] = []
    if address.ipv4_mapped is not None:
        found.append(address.ipv4_mapped)
    if address.sixtofour is not None:
        found.append(address.sixtofour)
    if address.teredo is not None:
        found += address.teredo
    if any(address in net for net in _NAT64) or (int(address) >> 32) & 0xFDFFFFFF == 0x00005EFE:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return found


class AllowList:
    """Patterns `name:port` and `*.name:port` (any depth below the name, not the name itself)."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """ValueError for a pattern of another form."""
        self._exact: set[tuple[str, int]] = set()
        self._below: set[tuple[str, int]] = set()
        for pattern in patterns:
            host, _, port = pattern.rpartition(":")
            name = hostname(host.removeprefix("*."))
            if name is None or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
                raise ValueError(f"{pattern!r} is no name:port or *.name:port that a sandbox can be allowed")
            (self._below if host.startswith("*.") else self._exact).add((name, int(port)))

    def __contains__(self, target: tuple[str, int]) -> bool:
        """`target`: a canonical name and a port."""
        name, port = target
        if target in self._exact:
            return True
        labels = name.split(".")
        return any((".".join(labels[start:]), port) in self._below for start in range(1, len(labels)))
