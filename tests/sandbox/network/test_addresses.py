"""Names and addresses: no spelling of a forbidden address gets through."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.network.addresses import AllowList, hostname, refusal


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254",
        "168.63.129.16", "100.100.100.200", "192.0.0.192", "224.0.0.1", "255.255.255.255", "240.0.0.1",
        "203.0.113.5", "198.18.0.1", "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:169.254.169.254",
        "::ffff:0:169.254.169.254", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "fd00:ec2::254",
        "2002:7f00:1::", "2002:a9fe:a9fe::1", "64:ff9b::169.254.169.254", "64:ff9b:1::10.0.0.1",
        "2001:db8::1", "ff02::1",
        "2001:0:a9fe:a9fe:0:0:0:0", "2a00::200:5efe:7f00:1", "2a00::5efe:a9fe:a9fe", "nothing", "",
    ],
)  # fmt: skip
def test_forbidden_in_every_form(address: str) -> None:
    assert refusal(address) is not None


@pytest.mark.parametrize("address", ["151.101.0.223", "8.8.8.8", "2606:4700::6810:84e5", "2a04:4e42::223"])
def test_public_addresses_are_reached(address: str) -> None:
    assert refusal(address) is None


def test_a_trusted_network_opens_that_network_alone() -> None:
    trusted = tuple(ipaddress.ip_network(net) for net in ("10.1.0.0/16", "169.254.0.0/16", "0.0.0.0/0"))
    assert refusal("10.1.2.3", trusted[:1]) is None
    assert refusal("10.2.2.3", trusted[:1]) is not None
    for never in ("169.254.169.254", "127.0.0.1", "100.100.100.200"):
        assert refusal(never, trusted) is not None


@given(st.ip_addresses(v=4))
def test_ipv6_that_carries_a_forbidden_ipv4_is_forbidden(address: ipaddress.IPv4Address) -> None:
    if refusal(str(address)) is None:
        return
    for form in ("::ffff:{0}", "64:ff9b::{0}", "::{0}", "2a00::5efe:{0}"):
        assert refusal(form.format(address)) is not None
    high, low = divmod(int(address), 1 << 16)
    assert refusal(f"2002:{high:x}:{low:x}::1") is not None


@pytest.mark.parametrize(
    "text",
    ["", ".", "127.0.0.1", "127.1", "0x7f.1", "0x7f000001", "2130706433", "017700000001", "[::1]", "::1",
     "a b", "a..b", "a/b", "a@b", "a:b", "-a.b", "a" * 64 + ".b", "a." * 130 + "b", "1.2.3.4.", "x.0x1",
     "a\0b", "a%41.b"],
)  # fmt: skip
def test_what_is_no_name(text: str) -> None:
    assert hostname(text) is None


def test_names_have_one_form() -> None:
    assert hostname("PyPI.org.") == hostname("pypi.org") == "pypi.org"
    assert hostname("bücher.example") == "xn--bcher-kva.example"


def test_patterns_match_what_they_say() -> None:
    allow = AllowList(("pypi.org:443", "*.pythonhosted.org:443", "Mirror.Example:8080"))
    for target in (("pypi.org", 443), ("files.pythonhosted.org", 443), ("a.b.pythonhosted.org", 443)):
        assert target in allow
    assert ("mirror.example", 8080) in allow
    for target in (
        ("pypi.org", 80), ("evilpypi.org", 443), ("pypi.org.evil.example", 443), ("pythonhosted.org", 443),
        ("evilpythonhosted.org", 443), ("mirror.example", 443),
    ):  # fmt: skip
        assert target not in allow
    assert ("anything.example", 443) not in AllowList(())


@pytest.mark.parametrize(
    "pattern", ["pypi.org", "*:443", "*.*.org:443", "1.2.3.4:443", "a:0", "a:99999", "a:b", ":1"]
)
def test_patterns_that_are_none(pattern: str) -> None:
    with pytest.raises(ValueError, match="is no name:port"):
        AllowList((pattern,))
