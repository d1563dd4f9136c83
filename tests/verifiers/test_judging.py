"""The record of a verifier, and the table of kinds."""

from __future__ import annotations

import importlib

import pytest
from pydantic import ValidationError

from catalog.models import TestStatus, VerifierSpec
from sandbox.base import SandboxLost, SandboxUnavailable
from verifiers.judging import KINDS, Unjudgeable, strange, unjudged

EMPTY = "sha256:" + "0" * 64


def test_pytest_verifiers_keep_their_digest():
    """A value computed before verifiers had settings: cached verdicts and task ids depend on it."""
    spec = VerifierSpec(
        fail_to_pass=("t::a",),
        pass_to_pass=(),
        expected={"t::a": TestStatus.PASSED},
        arguments=("t",),
        protected=EMPTY,
        allowed=(".",),
    )
    assert spec.digest() == "sha256:da6b89e3ceac9e13d8f308ec37e366e0a2e73d9d6763bd29e7cf9829eb1924fb"
    assert "settings" not in spec.model_dump_json()


def test_settings_belong_to_other_kinds_and_count_in_the_digest():
    one = VerifierSpec(kind="state", settings={"a": 1}, protected=EMPTY, allowed=(".",))
    other = VerifierSpec(kind="state", settings={"a": 2}, protected=EMPTY, allowed=(".",))
    assert one.digest() != other.digest()
    assert VerifierSpec.model_validate_json(one.model_dump_json()) == one
    with pytest.raises(ValidationError, match="settings are for other verifiers"):
        VerifierSpec(settings={"a": 1}, fail_to_pass=("t",), protected=EMPTY, allowed=(".",))
    with pytest.raises(ValidationError, match="at least one fail-to-pass"):
        VerifierSpec(protected=EMPTY, allowed=(".",))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_has_its_function(kind):
    module, _, name = KINDS[kind].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_what_breaks_is_typed_by_its_boundary():
    assert unjudged(SandboxUnavailable("x")).failure.boundary == "sandbox"
    assert unjudged(SandboxLost("x")).failure.kind == "SandboxLost"
    assert unjudged(KeyError("blob")).failure.boundary == "verifier"
    assert unjudged(Unjudgeable("reward-missing", "x")).failure.kind == "reward-missing"


@pytest.mark.parametrize("name", ["/a", "a/../b", "./a", "a//b", "a\0b", ""])
def test_strange_names_are_not_read(name):
    assert strange(name)
    assert not strange("a b/c")
