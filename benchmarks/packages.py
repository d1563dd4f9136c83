"""What the factory makes of packages: found, accepted, rejected by reason, minutes.

    python -m benchmarks.packages --json FILE [--home FOLDER] [--packages NAME ...] [--train 12] [--test 12]

Each package goes through the same synthesis as `posttrain tasks synth pypi:NAME`, with few tasks wanted. A
package that makes none is a row with the sentence that says why.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from catalog.atomic import write_atomic
from catalog.store import Catalog
from envfactory.config import SynthConfig
from envfactory.errors import FactoryError
from envfactory.synthesis import Tools, synthesize
from sandbox.base import provider
from sandbox.images import ImageStore

PACKAGES = ("cachetools", "inflection", "toolz", "humanize", "parse")


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--home", type=Path, help="default: a temporary folder")
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES))
    parser.add_argument("--train", type=int, default=12)
    parser.add_argument("--test", type=int, default=12)
    args = parser.parse_args()
    config = SynthConfig(tasks={"train": args.train, "dev": 0, "test": args.test})
    with tempfile.TemporaryDirectory(prefix="posttrain-packages.") as scratch:
        home = args.home or Path(scratch)
        rows: list[dict[str, Any]] = []
        for name in args.packages:
            rows.append(asyncio.run(one(name, home, config)))
            print(json.dumps(rows[-1]), flush=True)
            args.json.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(args.json, json.dumps({"format": 1, "packages": rows}, indent=1).encode())


async def one(name: str, home: Path, config: SynthConfig) -> dict[str, Any]:
    """One row of the table."""
    began = time.monotonic()
    backend = provider("namespace", store=home / "images")
    row: dict[str, Any] = {"package": name}
    try:
        with Catalog.open(home) as catalog:
            tools = Tools(catalog, backend, ImageStore(home / "images"))
            made = await synthesize(f"pypi:{name}", home, tools, config)
        row |= {
            "version": made.build.version,
            "tests": len(made.build.suite.statuses),
            **made.funnel.summary(),
        }
        row["candidate_sets"] = len(made.candidates)
    except FactoryError as error:
        row["error"] = str(error)
    finally:
        await backend.close()
    return row | {"minutes": round((time.monotonic() - began) / 60, 2)}


if __name__ == "__main__":
    main()
