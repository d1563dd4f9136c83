"""Reasoning and tool calls: there and back, and step by step as at once."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.chat import ChatFormat, ChatML, FlashChat, Message
from model.tokenizer import Tokenizer
from model.turns import Call, Tool, Transcript, Turn, messages, read, write

TOKENIZER = Tokenizer()
CHATS: list[ChatFormat] = [FlashChat(TOKENIZER), ChatML(TOKENIZER.encode, 3, 7)]
TOOLS = [Tool("run", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}})]

text = st.text(max_size=8) | st.sampled_from(
    ["</|DSML|parameter>", "|DSML|", "<|end|>", "\n", "<think>", "é|"]
)
names = st.from_regex(r"[a-z_][a-z0-9_.-]{0,5}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=2,
)
calls = st.lists(st.builds(Call, names, st.dictionaries(names, values, max_size=3)), max_size=2).map(tuple)
assistants = st.builds(
    Turn,
    st.just("assistant"),
    text.filter(lambda t: not t.startswith("<think>")),
    st.just("") | text.filter(lambda t: "</think>" not in t),
    st.just(()) | calls,
)
others = st.builds(Turn, st.sampled_from(["system", "user", "tool"]), text)
blocks = st.lists(others | assistants, min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(assistants)
def test_what_an_assistant_says_reads_back(turn):
    assert read(write(turn).content) == turn


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("chat", CHATS, ids=["flash", "chatml"])
@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.tuples(blocks, assistants, st.booleans()), min_size=1, max_size=5))
def test_step_by_step_equals_at_once(chat, tools, steps):
    transcript, turns, seen = Transcript(chat, tools), [], []
    for given_turns, reply, stopped in steps:
        before = list(seen)
        step = transcript.prompt(given_turns)
        turns += given_turns
        seen = before[: step.keep] + step.ids
        assert seen == transcript.ids == chat.render(messages(turns, tools), open=True)
        if tools or all(turn.role != "user" for turn in given_turns):
            assert step.keep == len(before)
        sampled = TOKENIZER.encode(write(reply).content) + ([chat.stop_ids[0]] if stopped else [])
        transcript.reply(sampled, reply)
        turns.append(reply)
        seen = seen + sampled
        assert seen == transcript.ids


def test_reasoning_goes_when_the_user_speaks_again_and_stays_with_tools():
    talk = [
        Turn("user", "a"),
        Turn("assistant", "b", "why"),
        Turn("user", "c"),
        Turn("assistant", "d", "how"),
    ]
    assert [m.content for m in messages(talk)] == ["a", "b", "c", "<think>how</think>d"]
    assert [m.content for m in messages(talk, TOOLS)][2] == "<think>why</think>b"
    assert messages(talk, TOOLS)[0].content.startswith("Tools, one JSON schema a line:\n{")


def test_without_either_a_turn_is_its_content():
    assert write(Turn("assistant", "try 1")) == Message("assistant", "try 1")
    assert messages([Turn("user", "x"), Turn("tool", "y")]) == [Message("user", "x"), Message("tool", "y")]


def test_sampled_ids_are_kept_as_they_came():
    """Another spelling of the same text is not encoded again."""
    chat, spelt = FlashChat(TOKENIZER), [i for c in "try 1" for i in TOKENIZER.encode(c)]
    assert spelt != TOKENIZER.encode("try 1")
    transcript = Transcript(chat, TOOLS)
    first = transcript.prompt([Turn("user", "go")])
    transcript.reply([*spelt, TOKENIZER.end], read(TOKENIZER.decode(spelt)))
    transcript.prompt([Turn("user", "on")])
    assert transcript.ids[len(first.ids) :][: len(spelt)] == spelt


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ("<think>on and on", "no end"),
        ("x<|DSML|tool_calls>\nrun", "not whole"),
        ("<|DSML|tool_calls>\n</|DSML|tool_calls>", "not whole"),
        (write(Turn("assistant", calls=(Call("run", {"a": 1}),))).content + "more", "not whole"),
        (
            write(Turn("assistant", calls=(Call("run", {"a": 1}),))).content.replace(">1<", ">1 2<"),
            "Extra data",
        ),
        (
            write(Turn("assistant", calls=(Call("r", {"a": 1, "b": 2}),))).content.replace('"b"', '"a"'),
            "twice",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(said, match):
    with pytest.raises(ValueError, match=match):
        read(said)


def test_malformed_calls_fail_at_once():
    whole = write(Turn("assistant", calls=(Call("run", {f"a{i}": "x" * 50 for i in range(2000)}),))).content
    began = time.process_time()
    with pytest.raises(ValueError, match="not whole"):
        read(whole.replace("</|DSML|invoke>", "</|DSML|invoked>"))
    assert len(read(whole).calls[0].arguments) == 2000
    assert time.process_time() - began < 2


def test_what_cannot_be_written_is_refused():
    for wrong, match in [
        (Turn("assistant", reasoning="a</think>b"), "would end it"),
        (Turn("assistant", "<think>x"), "at its start"),
        (Turn("assistant", calls=(Call("a b", {}),)), "cannot name"),
        (Turn("assistant", calls=(Call("a", {"": 1}),)), "cannot name"),
    ]:
        with pytest.raises(ValueError, match=match):
            write(wrong)
    with pytest.raises(ValueError, match="only an assistant"):
        Turn("tool", "x", reasoning="y")
    transcript = Transcript(CHATS[0])
    with pytest.raises(ValueError, match="at least one turn"):
        transcript.prompt([])
    with pytest.raises(ValueError, match="follows a prompt"):
        transcript.reply([], Turn("assistant"))
    transcript.prompt([Turn("user", "x")])
    with pytest.raises(ValueError, match="no reply"):
        transcript.prompt([Turn("user", "y")])
