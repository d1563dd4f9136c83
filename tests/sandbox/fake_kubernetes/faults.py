"""Knobs: what goes wrong, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Faults:
    """All off. Counters go down as faults are spent."""

    refuse_requests: list[tuple[int, str]] = field(default_factory=list)
    """(status, Retry-After) of the next requests, whatever they are."""
    lose_answers: int = 0
    """So many creations succeed but their answer never arrives: the connection is cut."""
    deny_pods: str = ""
    """An admission webhook's message, if it refuses every pod."""
    missing_images: set[str] = field(default_factory=set)
    """Parts of image names that no registry has."""
    runtimes: set[str] = field(default_factory=lambda: {"gvisor", "kata"})
    """RuntimeClasses that exist."""
    pull_s: float = 0.0
    ready_s: float = 0.0
    """Seconds from the container's start to its first probe."""
    start_error: str = ""
    """The runtime cannot start the container."""
    watch_lines: int | None = None
    """Watches are cut after so many events, in the middle of a line."""
    cut_output: list[int] = field(default_factory=list)
    """The next exec streams are cut after so many bytes to the client, one number each."""
    cut_input: list[int] = field(default_factory=list)
    """The next exec streams are cut after so many bytes from the client."""
    lose_output: list[int] = field(default_factory=list)
    """The next exec streams lose the message that contains this byte, without a word."""
    refuse_execs: int = 0
    """So many exec requests answer 500 `container not found`."""
    frame_bytes: int = 0
    """Output comes in messages of so many bytes."""
    no_status: int = 0
    """So many exec streams end without a status on channel 3."""
    slow_close_s: float = 0.0
    """Seconds between the status and the end of the connection."""
    only_v4: bool = False
    network_plugin: bool = True
    """Whether anything enforces NetworkPolicies."""
    reply_late_s: float = 0.0
    """Seconds that every request takes longer."""
