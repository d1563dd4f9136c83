"""The `posttrain` command.

    posttrain tasks synth pypi:boltons
    posttrain tasks report --out report.html
    posttrain train rl --config fast.toml --steps 40 --dry-run

Each group of commands has a file of its own beside this one. Rooms are imported inside the commands, so
that `posttrain --help` answers at once. Results go to standard output, everything else to standard error
when `--json` is given. Exit codes: `console.errors`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Group, Parameter

from console.errors import OK, explain
from console.session import Session

app = App(
    name="posttrain",
    help="From public repositories to audited coding tasks, and from those to a better agent.",
    version="0.1.0",
    version_flags=["--version"],
)
app.command("console.tasks:app", name="tasks", help="Synthesize, audit and browse tasks.")
app.command("console.demo.command:app", name="demo", help="The whole job on one machine.")
app.command("console.runs:app", name="runs", help="Jobs and what came of them.")
app.command("console.sandboxes:app", name="sandbox", help="Whether this host can keep foreign code in.")
app.command("console.images:app", name="images", help="Build, keep and exchange the images of sandboxes.")
app.command("console.rollouts:app", name="rollout", help="Let a policy act on tasks.")
app.command("console.regrade:app", name="regrade", help="Grade stored trajectories again.")
app.command("console.train:app", name="train", help="Turn trajectories and tasks into new weights.")
app.meta.group_parameters = Group("Everywhere")


@app.meta.default
def _launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    home: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
    debug: Annotated[bool, Parameter(negative="")] = False,
) -> Any:
    """Parse the global options, then run the command with a `Session` of them.

    Parameters
    ----------
    home
        Folder of the catalog, blobs and images ($POSTTRAIN_HOME, or posttrain in the cache folder).
    json
        Print one JSON document instead of text.
    debug
        Show the traceback of an error.
    """
    command, bound, ignored = app.parse_args(tokens, exit_on_error=False, print_error=False)
    session = Session(home=home, json=json, debug=debug)
    return command(*bound.args, **bound.kwargs, **dict.fromkeys(ignored, session))


def _globals_first(tokens: list[str]) -> list[str]:
    """Move the global options to the front: commands that take further settings would swallow them."""
    front: list[str] = []
    rest: list[str] = []
    waiting = iter(tokens)
    for token in waiting:
        if token == "--":
            rest += [token, *waiting]
        elif token == "--home" and (value := next(waiting, None)) is not None:
            front += [token, value]
        elif token in ("--json", "--debug") or token.startswith("--home="):
            front.append(token)
        else:
            rest.append(token)
    return front + rest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code (`SystemExit` never leaves this function)."""
    tokens = _globals_first(list(sys.argv[1:] if arguments is None else arguments))
    try:
        code = app.meta(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except SystemExit as error:
        return int(error.code or OK)
    except BrokenPipeError:
        # The reader has enough. Python would complain again while closing standard output.
        sys.stdout = None
        return OK
    except (Exception, KeyboardInterrupt) as error:  # the outermost boundary: nothing may pass unexplained
        if "--debug" in tokens:
            raise
        code, sentence = explain(error)
        print(f"posttrain: {sentence}", file=sys.stderr)
        return code
    return code if isinstance(code, int) else OK
