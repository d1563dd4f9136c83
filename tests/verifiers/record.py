"""Records what the tools of this machine report about the projects in `suites`, mended.

    python -m tests.verifiers.record node unittest go cargo      # each that is installed; writes recorded/

Jest and vitest are looked for on the PATH. Paths of the machine become /workspace.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.verifiers.suites import SUITES
from verifiers import reports
from verifiers.suite import FOLDER, RUNNERS

RECORDED = Path(__file__).parent / "recorded"
MARK = "mark"
"""What stands before the lines of our own reporters."""


def main(names: list[str]) -> None:
    """Record these suites."""
    scripts = str(Path(reports.__file__).parent)
    RECORDED.mkdir(exist_ok=True)
    for name in names:
        suite = SUITES[name]
        command = suite.settings.get("command") or RUNNERS[suite.runner].command
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder).resolve()
            for path, text in {**suite.files, **suite.fixed}.items():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(text, encoding="utf-8")
            argv = [word.replace(FOLDER, scripts) for word in (*command, *suite.arguments)]
            found = subprocess.run(
                argv, cwd=root, env={**os.environ, **suite.settings.get("env", {})},
                input=f"{MARK}\n".encode(), capture_output=True, check=False,
            )  # fmt: skip
            data = found.stdout
            for file in suite.settings.get("reports", ()):
                data = b"".join(each.read_bytes() for each in sorted((root / file).glob("*.xml")))
            if not data:
                sys.exit(found.stderr.decode(errors="replace")[-2000:])
            data = re.sub(rb"<properties>.*?</properties>", b"", data, flags=re.DOTALL)
            for prefix in {sys.base_prefix, sys.prefix}:
                data = data.replace(prefix.encode(), b"/usr")
            data = data.replace(str(root).encode(), b"/workspace").replace(scripts.encode(), FOLDER.encode())
        (RECORDED / f"{name}.txt").write_bytes(data)
        print(f"{name}: exit status {found.returncode}, {len(data):,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
