"""An OCI image layout: a folder with `oci-layout`, `index.json` and blobs by digest."""

from __future__ import annotations

from pathlib import Path

from sandbox.oci import documents
from sandbox.oci.blobs import Blobs, write_file
from sandbox.oci.names import Names

LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'


class Layout:
    """The layout in a folder, made if need be."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs/sha256").mkdir(parents=True, exist_ok=True)
        if not (root / "oci-layout").exists():
            write_file(root / "oci-layout", LAYOUT)
        if not (root / "index.json").exists():
            write_file(root / "index.json", documents.write_index([]))
        self.blobs = Blobs(root)
        self.names = Names(root)
