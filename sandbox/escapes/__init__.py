"""The escape suite: attempts to get out of a sandbox, each against bait that the host puts out.

    results = await sandbox.escapes.run(provider, image)

Backend-neutral: an attempt is a program that runs inside, as the agent and as root, and looks for what it
must not find. It prints ESCAPED with what it got, and TRIED at its end, so that a program that broke before
it tried is no evidence of containment. Where one succeeds it does no harm: files are written back as they
are, calls that change the machine get senseless arguments, and only bait is killed. Only ever run it through
a sandbox.
"""

from sandbox.escapes.suite import Attempt, EscapeResult, attempts, run

__all__ = ["Attempt", "EscapeResult", "attempts", "run"]
