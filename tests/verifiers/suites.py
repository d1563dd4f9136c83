"""One small project for every runner, with awkward test names; `clamp` ignores its upper bound in each.

`tests.verifiers.record` runs them with the tools of this machine, `test_suites` in sandboxes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from catalog.models import Environment, Limits, Origin, Problem, Task, TestStatus, VerifierSpec
from sandbox.trees import pack_files
from tests.verifiers.sources import (
    AWKWARD,
    CARGO_LIB,
    CARGO_TEST,
    DJANGO_SETTINGS,
    ERROR,
    FAILED,
    FORGED_JAVA,
    GO,
    GO_TEST,
    JAVA,
    JAVA_TEST,
    JEST_EXPECTED,
    JEST_FILES,
    JEST_FIXED,
    NODE_FORGERY,
    NODE_TEST,
    PASSED,
    POM,
    PYTHON_FILES,
    PYTHON_FIXED,
    SKIPPED,
    UNITTEST,
    UNITTEST_EXPECTED,
    XFAILED,
    forged_jest,
)
from tests.verifiers.tasks import Blobs
from verifiers.suite import RUNNERS


@dataclass(frozen=True)
class Suite:
    """A project, what mends it, and what its suite then reports."""

    runner: str
    files: dict[str, str]
    fixed: dict[str, str]
    tests: tuple[str, ...]
    """Files that the task protects."""
    arguments: tuple[str, ...]
    expected: dict[str, TestStatus]
    fail_to_pass: tuple[str, ...]
    hostile: tuple[str, ...] = ()
    """What an unmended file that would pass by other means looks like."""
    settings: dict[str, Any] = field(default_factory=dict)


SUITES = {
    "node": Suite(
        "node",
        {
            "clamp.mjs": "export const clamp = (x, low, high) => Math.min(Math.max(x, low), low);\n",
            "test/clamp.test.mjs": NODE_TEST,
            "test/unloaded.test.mjs": "import './nothing.mjs';\n",
        },
        {"clamp.mjs": "export const clamp = (x, low, high) => Math.min(Math.max(x, low), high);\n"},
        ("test/clamp.test.mjs", "test/unloaded.test.mjs"),
        ("test/clamp.test.mjs", "test/unloaded.test.mjs"),
        {
            "test/clamp.test.mjs::above": PASSED,
            "test/clamp.test.mjs::below": PASSED,
            f"test/clamp.test.mjs::{AWKWARD}": PASSED,
            "test/clamp.test.mjs::two\nlines": PASSED,
            "test/clamp.test.mjs::<anonymous>": PASSED,
            "test/clamp.test.mjs::twice": PASSED,
            "test/clamp.test.mjs::twice#2": PASSED,
            "test/clamp.test.mjs::skipped": SKIPPED,
            "test/clamp.test.mjs::later": XFAILED,
            "test/clamp.test.mjs::printed": PASSED,
            "test/clamp.test.mjs::outer > inner > deep": PASSED,
            "test/clamp.test.mjs::outer > inner": PASSED,
            "test/clamp.test.mjs::failing": FAILED,
            "test/clamp.test.mjs::broken > never": ERROR,
            "test/clamp.test.mjs::broken": ERROR,
            "test/unloaded.test.mjs::": ERROR,
        },
        ("test/clamp.test.mjs::above",),
        ("export const clamp = () => 0;\nprocess.exit(0);\n", NODE_FORGERY),
    ),
    "unittest": Suite(
        "unittest",
        {**PYTHON_FILES, "tests/test_unloaded.py": "import nothing_of_that_name\n"},
        PYTHON_FIXED,
        ("tests/__init__.py", "tests/test_clamp.py", "tests/test_unloaded.py"),
        ("tests/test_clamp.py", "tests/test_unloaded.py"),
        {**UNITTEST_EXPECTED, "test_unloaded::": ERROR},
        ("tests.test_clamp.TestClamp::test_above",),
    ),
    "django": Suite(
        "django",
        {
            **PYTHON_FILES,
            "site_settings.py": DJANGO_SETTINGS,
            "tests/test_clamp.py": UNITTEST.replace(
                "import unittest", "import unittest\n\nimport django.test"
            ).replace("class TestClamp(unittest.TestCase)", "class TestClamp(django.test.TestCase)"),
        },
        PYTHON_FIXED,
        ("tests/__init__.py", "tests/test_clamp.py", "site_settings.py"),
        ("tests.test_clamp",),
        UNITTEST_EXPECTED,
        ("tests.test_clamp.TestClamp::test_above",),
        settings={"env": {"DJANGO_SETTINGS_MODULE": "site_settings"}},
    ),
    "go": Suite(
        "go",
        {
            "go.mod": "module example.com/clamp\n\ngo 1.19\n",
            "clamp.go": GO % "low",
            "clamp_test.go": GO_TEST,
            "unbuilt/unbuilt.go": "package unbuilt\n",
            "unbuilt/unbuilt_test.go": "package unbuilt\n\nvar x = nothing\n",
        },
        {"clamp.go": GO % "high"},
        ("go.mod", "clamp_test.go"),
        ("./...",),
        {
            "example.com/clamp::TestAbove": PASSED,
            "example.com/clamp::TestNames": PASSED,
            'example.com/clamp::TestNames/a_b_[x]/y_"q"_é☃': PASSED,
            "example.com/clamp::TestNames/two_lines": PASSED,
            "example.com/clamp::TestNames/#00": PASSED,
            "example.com/clamp::TestNames/twice": PASSED,
            "example.com/clamp::TestNames/twice#01": PASSED,
            "example.com/clamp::TestSkipped": SKIPPED,
            "example.com/clamp::TestPrinted": PASSED,
            "example.com/clamp/unbuilt::": ERROR,
        },
        ("example.com/clamp::TestAbove",),
        (
            (GO % "exit()").replace("clamp\n", 'clamp\n\nimport "syscall"\n', 1)
            + "\nfunc exit() int {\n\tsyscall.Exit(0)\n\treturn 0\n}\n",
        ),
        {"env": {"GOCACHE": "/tmp/go", "GOFLAGS": "-mod=mod", "CGO_ENABLED": "0"}},
    ),
    "cargo": Suite(
        "cargo",
        {
            "Cargo.toml": '[package]\nname = "clamp"\nversion = "0.1.0"\nedition = "2021"\n',
            "src/lib.rs": CARGO_LIB % "low",
            "tests/it.rs": CARGO_TEST,
        },
        {"src/lib.rs": CARGO_LIB % "high"},
        ("Cargo.toml", "tests/it.rs"),
        (),
        {
            "clamp:src/lib.rs::tests::below": PASSED,
            "it:tests/it.rs::above": PASSED,
            "it:tests/it.rs::größe": PASSED,
            "it:tests/it.rs::skipped": SKIPPED,
            "it:tests/it.rs::panics": PASSED,
            "it:tests/it.rs::printed": PASSED,
            "it:tests/it.rs::failing": FAILED,
            "clamp:doc::src/lib.rs - clamp": PASSED,
        },
        ("it:tests/it.rs::above",),
        (CARGO_LIB % "{ std::process::exit(0) }",),
    ),
    "jest": Suite(
        "jest",
        {**JEST_FILES, "test/unloaded.test.js": "require('./nothing.js');\n"},
        JEST_FIXED,
        ("test/clamp.test.js", "test/unloaded.test.js", "package.json"),
        (),
        {**JEST_EXPECTED, "test/unloaded.test.js::": ERROR},
        ("test/clamp.test.js::above",),
        (forged_jest("process.exit(1)"),),
    ),
    "vitest": Suite(
        "vitest",
        {**JEST_FILES, "test/unloaded.test.js": "require('./nothing.js');\n"},
        JEST_FIXED,
        ("test/clamp.test.js", "test/unloaded.test.js", "package.json"),
        (),
        {**JEST_EXPECTED, "test/unloaded.test.js::": ERROR},
        ("test/clamp.test.js::above",),
        (forged_jest("process.reallyExit(1)"),),
        {"command": [*RUNNERS["vitest"].command, "--globals"]},
    ),
    "maven": Suite(
        "junit",
        {
            "pom.xml": POM,
            "src/main/java/clamp/Clamp.java": JAVA % "low",
            "src/test/java/clamp/ClampTest.java": JAVA_TEST,
        },
        {"src/main/java/clamp/Clamp.java": JAVA % "high"},
        ("pom.xml", "src/test/java/clamp/ClampTest.java"),
        (),
        {
            f"clamp.ClampTest::{test}[{name}]{nth}": SKIPPED if test == "skipped" else PASSED
            for test in ("above", "below", "skipped")
            for name, nth in ((AWKWARD, ""), ("two\nlines", ""), ("twice", ""), ("twice", "#2"))
        },
        ("clamp.ClampTest::above[twice]", "clamp.ClampTest::above[twice]#2"),
        (FORGED_JAVA,),
        {
            "command": ["mvn", "-B", "-Dmaven.repo.local=/tmp/m2", "test"],
            "reports": ["target/surefire-reports"],
        },
    ),
}


def task_of(suite: Suite, image: str, blobs: Blobs, **changes: Any) -> Task:
    """The task to mend the project; `changes` replace fields of its verifier."""
    fields: dict[str, Any] = {
        "kind": "suite",
        "settings": {"runner": suite.runner, **suite.settings},
        "fail_to_pass": suite.fail_to_pass,
        "expected": suite.expected,
        "arguments": suite.arguments,
        "protected": blobs.put(pack_files({name: suite.files[name].encode() for name in suite.tests})),
        "allowed": (".",),
        "timeout_s": 240,
    }
    return Task(
        id="clamp",
        origin=Origin(kind="procedural", source="x", revision="1"),
        problem=Problem(statement="clamp ignores its upper bound"),
        environment=Environment(
            image=image, tree="none", limits=Limits(memory_mb=4096, pids=512, disk_mb=1024)
        ),
        verifier=VerifierSpec(**{**fields, **changes}),
        solution=blobs.put(b""),
    )
