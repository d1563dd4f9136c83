"""What the agent is told, written from templates: the failing behaviour, the documented one, the interface.

A statement never quotes the edit that made a bug nor the lines of a solution, and names the function at
fault only when a failing test or its own traceback does. Texts are functions of their inputs: addresses,
times and temporary paths are taken out of messages, and the variant is chosen by the task's slug.
"""

from __future__ import annotations

import hashlib
import re
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence

from envfactory.interface import Symbol
from envfactory.prune import test_name, test_path

_OPENINGS = (
    "`{package}` misbehaves: {tests} in its test suite now {fail}.",
    "A regression in `{package}`: {tests} {fail}, although {it} passed before.",
    "Since a recent change to `{package}`, {tests} {fail}.",
    "{tests_capital} of `{package}` {fail} on the current state of the code.",
)
_CLOSINGS = (
    "Find the cause in the package's code and mend it. Do not change the tests.",
    "Correct the package so that this works again and nothing else changes. The tests are right as they are.",
    "Please repair the code of the package. Tests, their data and settings stay as they are.",
)
_MESSAGE_LIMIT = 1200
_DOC_LIMIT = 700


def procedural(
    package: str, visible: Sequence[str], messages: Mapping[str, str], *, about: Symbol | None, seed: str
) -> str:
    """Statement of a task whose bug was made by an edit.

    `messages`: failure text by test id (only visible tests are read). `about`: the symbol that the tests
    exercise (`envfactory.interface.subject`), for its documentation. `seed` chooses the variant.
    """
    choice = hashlib.sha256(seed.encode()).digest()
    one = len(visible) == 1
    tests = "one test" if one else f"{len(visible)} tests"
    opening = _OPENINGS[choice[0] % len(_OPENINGS)].format(
        package=package,
        tests=tests,
        tests_capital=tests.capitalize(),
        fail="fails" if one else "fail",
        it="it" if one else "they",
    )
    parts = [opening, failing_behaviour(visible, messages)]
    if about is not None:
        name = f"{about.module}.{about.name}"
        parts.append(
            f"What `{name}` should do, by its documentation:\n\n{_quoted(about.docstring, _DOC_LIMIT)}"
        )
    parts.append(_CLOSINGS[choice[1] % len(_CLOSINGS)])
    return "\n\n".join(parts) + "\n"


def release(
    package: str,
    visible: Sequence[str],
    messages: Mapping[str, str],
    *,
    notes: Sequence[str],
    interface: str,
    seed: str,
) -> str:
    """Statement of a task mined from history. `notes`: cleaned lines of the change log or commit message."""
    parts = [f"`{package}` should get the following change."]
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    if interface:
        parts.append(f"The public interface afterwards (new or changed signatures):\n\n```\n{interface}\n```")
    parts.append("How it shows today:")
    parts.append(failing_behaviour(visible, messages))
    parts.append(_CLOSINGS[hashlib.sha256(seed.encode()).digest()[1] % len(_CLOSINGS)])
    return "\n\n".join(parts) + "\n"


def failing_behaviour(visible: Sequence[str], messages: Mapping[str, str]) -> str:
    """How to run the visible tests, and what the first of them that says something says."""
    run = " ".join(f"'{test}'" if re.search(r"[^\w./:\-]", test) else test for test in visible)
    text = f"    python -m pytest {run}"
    for test in visible:
        message = stable_message(messages.get(test, ""))
        if message:
            return f"{text}\n\n`{test_name(test)}` in {test_path(test)} ends with:\n\n```\n{message}\n```"
    return text


def stable_message(message: str) -> str:
    """A failure message without what differs from run to run, cut to its last lines."""
    text = re.sub(r"\b0x[0-9a-fA-F]{6,16}\b", "0x...", message)
    text = re.sub(r"/tmp/[\w./-]+", "/tmp/...", text)
    text = text.replace("/workspace/", "").replace(f"{sys.base_prefix}/", ".../")
    text = "\n".join(line for line in text.splitlines() if line.strip(" ^~"))
    text = re.sub(r"\bin \d+\.\d+ ?s\b", "in ...s", text)
    lines = [line.rstrip() for line in text.strip().splitlines()]
    kept: list[str] = []
    size = 0
    for line in reversed(lines):
        size += len(line) + 1
        if size > _MESSAGE_LIMIT and kept:
            break
        kept.append(line[:_MESSAGE_LIMIT])
    return "\n".join(reversed(kept)).replace("```", "'''")


def _quoted(text: str, limit: int) -> str:
    text = textwrap.dedent(text).strip()
    if len(text) > limit:
        cut = text.rfind("\n\n", 0, limit)
        text = text[: cut if cut > limit // 4 else limit].rstrip() + "\n..."
    return textwrap.indent(text, "> ", lambda _: True)


def clean_notes(
    lines: Sequence[str], *, gold: str, mentions: Collection[str] = (), limit: int = 12
) -> list[str]:
    """Change-log or commit lines fit for a statement.

    References (issue numbers, commit ids, addresses, names of people) go; so do headings, trailers and
    lines that repeat code of the solution (`gold`: its added lines). When `mentions` is given and some
    lines mention one of those names, only these lines are kept.
    """
    added = {re.sub(r"\s+", "", line) for line in gold.splitlines() if len(re.sub(r"\s+", "", line)) >= 12}
    result: list[str] = []
    for line in _joined(lines):
        if re.match(
            r"(?:Signed-off-by|Co-authored-by|Reviewed-by|Change-Id|Closes|Merge (?:pull|branch))\b",
            line,
            re.I,
        ):
            continue
        text = re.sub(r"https?://\S+", "", line)
        text = re.sub(r":(?:issue|pr|user|ghissue|ghpull|gh):`[^`]*`", "", text)
        text = re.sub(r"\[([^\]]+)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)
        text = re.sub(r"^\[[^\]]+\]:?\s*$", "", text)
        text = re.sub(
            r"\b(?:fix(?:es|ed)?|close[sd]?|resolve[sd]?|see|refs?)\s+(?:gh-|#)\d+\b", "", text, flags=re.I
        )
        text = re.sub(r"\(?\b(?:GH|PR|issue|pull)?[ -]?#\d+\)?", "", text, flags=re.I)
        text = re.sub(
            r"\b[0-9a-f]{7,40}\b(?<=[a-f0-9])(?=\W|$)", lambda m: m[0] if m[0].isdigit() else "", text
        )
        text = re.sub(r"(?:by|thanks to)?\s*@[\w-]+", "", text, flags=re.I)
        text = re.sub(r"\(\s*[,;]?\s*\)|\[\s*\]", "", text)
        text = re.sub(r"\s{2,}", " ", text).strip(" -*+,;:")
        squeezed = re.sub(r"\s+", "", text)
        if len(text) < 8 or _is_heading(text) or any(code in squeezed for code in added):
            continue
        result.append(text)
    named = [text for text in result if any(re.search(rf"\b{re.escape(name)}\b", text) for name in mentions)]
    return (named or result)[:limit]


def _joined(lines: Sequence[str]) -> list[str]:
    """List items with their continuation lines as one line each."""
    result: list[str] = []
    for line in lines:
        stripped = line.strip()
        if not stripped:
            result.append("")
        elif result and result[-1] and line[:1] in " \t" and not re.match(r"[-*+•]\s|\d+[.)]\s", stripped):
            result[-1] += " " + stripped
        else:
            result.append(stripped)
    return [line for line in result if line]


def _is_heading(text: str) -> bool:
    if re.fullmatch(r"[=\-~^#*_.`]{3,}", text) or text.startswith("#"):
        return True
    return bool(re.match(r"(?:version\s+|v)?\d+\.\d+[\w.]*\b", text, re.I)) and len(text) < 60
