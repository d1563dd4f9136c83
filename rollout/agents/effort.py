"""The effort line of the system prompt."""

from __future__ import annotations


def effort_line(effort: int) -> str:
    """First line of the system prompt when an effort is asked for, with the report's wording."""
    if not 1 <= effort <= 100:
        raise ValueError(f"effort {effort} is outside 1..100")
    return f"Reasoning Effort: {effort} (range 1-100; higher values request more thorough reasoning)"
