"""Tokenizer and chat formats."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.chat import ChatFormat, ChatML, FlashChat, Message
from model.tokenizer import SPECIALS, Tokenizer, train_tokenizer

TOKENIZER = Tokenizer()
FORMATS: list[ChatFormat] = [FlashChat(TOKENIZER), ChatML(TOKENIZER.encode, 3, 7)]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60) | st.text("ab_ \t\n\r0189 é<|>end.(", max_size=60))
def test_any_text_comes_back_and_holds_no_special(text):
    found = TOKENIZER.encode(text)
    assert TOKENIZER.decode(found) == text
    assert all(i >= len(SPECIALS) for i in found)
    assert TOKENIZER.encode_many([text, "x"])[0] == found


@given(st.text("0123456789", min_size=1, max_size=12))
def test_digits_stand_alone(number):
    assert len(TOKENIZER.encode(number)) == len(number)


def test_phrases_of_the_agents_are_short():
    for phrase in [*(f" {i}" for i in range(1, 9)), "try", "submit", "\n        ", "return"]:
        assert len(TOKENIZER.encode(phrase)) == 1, phrase


def test_bad_bytes_and_lone_surrogates_are_replaced():
    broken = TOKENIZER.encode("é")
    while len(broken) == 1:
        broken = TOKENIZER.encode("\U00013000")
    assert TOKENIZER.decode(broken[:1]) == "\ufffd"
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")).startswith("a\ufffd")


def test_specials_are_written_on_demand():
    assert TOKENIZER.vocab == 4096
    assert [TOKENIZER.special(name) for name in SPECIALS] == list(range(8))
    assert TOKENIZER.decode([1, 7]) == ""
    assert TOKENIZER.decode([1, 7], specials=True) == "<|bos|><|end|>"
    with pytest.raises(ValueError, match="no special token"):
        TOKENIZER.special("try")


def test_training_is_deterministic_and_keeps_specials_out_of_text(tmp_path):
    texts = ["def f(x):\n    return x\n"] * 20
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        train_tokenizer(texts, vocab=300).save(str(path))
    assert paths[0].read_bytes() == paths[1].read_bytes()
    own = Tokenizer(paths[0])
    assert own.decode(own.encode("<|end|>ü")) == "<|end|>ü"
    assert min(own.encode("<|end|>")) >= len(SPECIALS)


messages = st.lists(
    st.builds(Message, st.sampled_from(["system", "user", "assistant", "tool"]), st.text(max_size=12)),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("chat", FORMATS, ids=["flash", "chatml"])
@settings(max_examples=50, deadline=None)
@given(before=messages, after=messages, reply=st.text(max_size=12), stopped=st.booleans())
def test_rendering_turn_by_turn_equals_rendering_at_once(chat, before, after, reply, stopped):
    sampled = TOKENIZER.encode(reply) + ([chat.stop_ids[0]] if stopped else [])
    got = chat.render(before, open=True) + sampled + chat.delta(after, stopped=stopped)
    assert got == chat.render([*before, Message("assistant", reply), *after], open=True)


@pytest.mark.parametrize("chat", FORMATS, ids=["flash", "chatml"])
@given(messages)
def test_what_the_assistant_says_is_its_content_and_stop(chat, talk):
    ids, said = chat.render_said(talk)
    assert ids == chat.render(talk)
    want = [[*TOKENIZER.encode(m.content), chat.stop_ids[0]] for m in talk if m.role == "assistant"]
    assert [i for i, own in zip(ids, said, strict=True) if own] == [i for turn in want for i in turn]


def test_text_modules_need_no_torch():
    code = (
        "import sys, model.chat, model.turns, model.tokenizer, model.config, model.presets, model.policy;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
