"""A diff turned round does what `git apply -R` does, and turned round twice is itself."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfactory.formats.fields import FormatError
from envfactory.formats.parcels import applied
from envfactory.formats.reverse import reverse
from envfactory.packaging import diff
from envfactory.trees import File
from verifiers.patches import make_diff

_lines = st.lists(
    st.sampled_from([b"a\n", b"b\n", b"c\r\n", b"\n", b"- x\n", b"+ y\n", b"@@ z\n"]), max_size=12
)
_text = st.builds(lambda lines, end: b"".join(lines) + end, _lines, st.sampled_from([b"", b"no newline"]))
_data = _text | st.binary(max_size=30)
_names = st.sampled_from(["a.py", "b c.txt", "d/ü.bin", 'q"q', "tab\tname"])
_trees = st.dictionaries(_names, _data, max_size=4)


@settings(max_examples=40, deadline=None)
@given(before=_trees, after=_trees)
def test_it_leads_back(before: dict[str, bytes], after: dict[str, bytes]) -> None:
    forward = make_diff(before, after)
    backward = reverse(forward)
    assert reverse(backward) == forward
    assert applied(backward, {k: File(v) for k, v in after.items()}, "it") == {
        name: File(data) for name, data in before.items()
    }


def test_modes_and_deletions_lead_back() -> None:
    before = {"run": File(b"x\n"), "gone": File(b"y\n", executable=True)}
    after = {"run": File(b"z\n", executable=True)}
    assert applied(reverse(diff(before, after)), after, "it") == before


def test_a_rename_leads_back() -> None:
    forward = (
        b"diff --git a/old b/new\nold mode 100644\nnew mode 100755\nsimilarity index 66%\nrename from old\n"
        b"rename to new\nindex 0a207c0..b17a7b4\n--- a/old\n+++ b/new\n@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n"
    )
    tree = {"old": File(b"a\nb\nc\n")}
    after = applied(forward, tree, "it")
    assert after == {"new": File(b"a\nB\nc\n", executable=True)}
    assert applied(reverse(forward), after, "it") == tree
    assert reverse(reverse(forward)) == forward


@pytest.mark.parametrize(
    "damaged",
    [
        b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,2 +1 @@\n-a\n",
        b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ nothing @@\n-a\n",
        b"diff --git a/x b/y\nsimilarity index 100%\ncopy from x\ncopy to y\n",
        b"diff --git a/x b/x\nindex 1..2 100644\nGIT binary patch\nliteral 1\nIcmZ\n\n",
    ],
)
def test_what_has_no_opposite_is_a_sentence(damaged: bytes) -> None:
    with pytest.raises(FormatError):
        reverse(damaged)
