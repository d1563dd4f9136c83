"""`posttrain demo`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from catalog.errors import UserError
from console.session import InSession

app = App(name="demo", help="The whole job on one machine: a package becomes tasks, and an agent learns.")


@app.default
def demo(
    *,
    folder: Path = Path("runs/demo"),
    source: str | None = None,
    config: Annotated[Path | None, Parameter(alias="-c")] = None,
    deterministic: Annotated[bool, Parameter(negative="")] = False,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    session: InSession,
) -> None:
    """Run the demo, or go on with one that was interrupted.

    Parameters
    ----------
    folder
        Where everything goes. A second run in the same folder goes on where the first one stopped.
    source
        Package or repository to make tasks of, instead of pypi:boltons.
    config
        TOML file with settings of the demo.
    deterministic
        Sequential rollout: slower, and every run ends in the same table.
    dry_run
        Print the resolved settings and stop.
    """
    from console.demo.config import DemoConfig
    from console.settings import load_settings

    if session.home is not None:
        raise UserError("The demo keeps its home inside its --folder: leave --home out.")
    changes: dict[str, Any] = {"source": source} if source is not None else {}
    if deterministic:
        changes["deterministic"] = True
    settings = load_settings(DemoConfig, config).model_copy(update=changes)
    if dry_run:
        value = settings.model_dump(mode="json")
        session.emit(value, lambda: print(json.dumps(value, indent=2)))
        return
    # Two spinning OpenMP threads beside busy sandboxes cost ten times what they bring.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from console.demo.run import run_demo
    from console.progress import Stages

    with Stages(file=session.log) as log:
        summary = run_demo(settings, folder, log=log)
    session.emit(summary, lambda: None)
