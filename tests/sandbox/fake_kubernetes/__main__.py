"""Run the fake cluster until interrupted."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
from pathlib import Path

from sandbox.namespace import NamespaceProvider
from tests.sandbox.fake_kubernetes import FakeCluster


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sandbox.fake_kubernetes", description=__doc__)
    parser.add_argument("--store", type=Path, required=True, help="folder of the image store")
    parser.add_argument("--kubeconfig", type=Path, required=True, help="file to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        async with (
            NamespaceProvider(arguments.store, show_groups=True) as provider,
            FakeCluster(Path(folder), provider) as cluster,
        ):
            shutil.copyfile(cluster.kubeconfig, arguments.kubeconfig)
            print(f"listening on 127.0.0.1:{cluster.port}", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
