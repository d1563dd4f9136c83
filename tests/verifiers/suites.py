"""One small project for every runner, with awkward test names; `clamp` ignores its upper bound in each.

`tests.verifiers.record` runs them with the tools of this machine, `test_suites` in sandboxes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from catalog.models import Environment, Limits, Origin, Problem, Task, TestStatus, VerifierSpec
from sandbox.trees import pack_files
from tests.verifiers.tasks import Blobs
from verifiers.suite import RUNNERS

PASSED, FAILED, SKIPPED = TestStatus.PASSED, TestStatus.FAILED, TestStatus.SKIPPED
XFAILED, ERROR = TestStatus.XFAILED, TestStatus.ERROR
AWKWARD = "a b [x]/y \"q\" 's' é☃"


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


_NODE_TEST = """\
import assert from 'node:assert';
import { before, describe, it, test } from 'node:test';
import { clamp } from '../clamp.mjs';

test('above', () => assert.equal(clamp(7, 0, 3), 3));
test('below', () => assert.equal(clamp(-7, 0, 3), 0));
test(%(awkward)s, () => {});
test('two\\nlines', () => {});
test('', () => {});
test('twice', () => {});
test('twice', () => {});
test.skip('skipped', () => {});
test.todo('later', () => { throw new Error('not yet'); });
test('printed', () => console.log('✔ above (1ms)\\nok 1 - above'));
describe('outer', () => {
  it('inner > deep', () => {});
  it('inner', () => {});
});
test('failing', () => assert.equal(1, 2));
describe('broken', () => {
  before(() => { throw new Error('no fixture'); });
  it('never', () => {});
});
""" % {"awkward": repr(AWKWARD)}  # noqa: UP031
_JEST_TEST = """\
const { clamp } = require('../clamp.js');

test('above', () => expect(clamp(7, 0, 3)).toBe(3));
test('below', () => expect(clamp(-7, 0, 3)).toBe(0));
test(%(awkward)s, () => {});
test('two\\nlines', () => {});
test('twice', () => {});
test('twice', () => {});
test.skip('skipped', () => {});
test.todo('later');
test('printed', () => console.log('{"numTotalTests": 0}'));
describe('outer', () => {
  test('inner > deep', () => {});
});
""" % {"awkward": repr(AWKWARD)}  # noqa: UP031
_JEST_EXPECTED = {
    "test/clamp.test.js::above": PASSED,
    "test/clamp.test.js::below": PASSED,
    f"test/clamp.test.js::{AWKWARD}": PASSED,
    "test/clamp.test.js::two\nlines": PASSED,
    "test/clamp.test.js::twice": PASSED,
    "test/clamp.test.js::twice#2": PASSED,
    "test/clamp.test.js::skipped": SKIPPED,
    "test/clamp.test.js::later": SKIPPED,
    "test/clamp.test.js::printed": PASSED,
    "test/clamp.test.js::outer > inner > deep": PASSED,
}
_JEST_FILES = {
    "package.json": '{"name": "clamp", "private": true}\n',
    "clamp.js": "exports.clamp = (x, low, high) => Math.min(Math.max(x, low), low);\n",
    "test/clamp.test.js": _JEST_TEST,
}
_JEST_FIXED = {"clamp.js": "exports.clamp = (x, low, high) => Math.min(Math.max(x, low), high);\n"}
_UNITTEST = """\
import unittest

from pkg.numbers import clamp


class TestClamp(unittest.TestCase):
    def test_above(self):
        self.assertEqual(clamp(7, 0, 3), 3)

    def test_below(self):
        for x in (-1, -7):
            with self.subTest(x=x):
                self.assertEqual(clamp(x, 0, 3), 0)

    @unittest.skip("no reason")
    def test_skipped(self):
        pass

    @unittest.expectedFailure
    def test_later(self):
        self.fail("not yet")

    def test_printed(self):
        print('{"end": 1}')


setattr(TestClamp, "test_" + %(awkward)s, lambda self: None)
setattr(TestClamp, "test_two\\nlines", lambda self: None)


class TestBroken(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise RuntimeError("no fixture")

    def test_never(self):
        pass
""" % {"awkward": repr(AWKWARD)}  # noqa: UP031
_UNITTEST_EXPECTED = {
    "tests.test_clamp.TestClamp::test_above": PASSED,
    "tests.test_clamp.TestClamp::test_below": PASSED,
    "tests.test_clamp.TestClamp::test_skipped": SKIPPED,
    "tests.test_clamp.TestClamp::test_later": XFAILED,
    "tests.test_clamp.TestClamp::test_printed": PASSED,
    f"tests.test_clamp.TestClamp::test_{AWKWARD}": PASSED,
    "tests.test_clamp.TestClamp::test_two\nlines": PASSED,
    "tests.test_clamp.TestBroken::setUpClass": ERROR,
}
_PYTHON_FILES = {
    "pkg/__init__.py": "",
    "pkg/numbers.py": "def clamp(x, low, high):\n    return min(max(x, low), low)\n",
    "tests/__init__.py": "",
    "tests/test_clamp.py": _UNITTEST,
}
_PYTHON_FIXED = {"pkg/numbers.py": "def clamp(x, low, high):\n    return min(max(x, low), high)\n"}
_DJANGO_SETTINGS = """\
SECRET_KEY = "x"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
INSTALLED_APPS = []
USE_TZ = True
"""
_GO = """\
package clamp

func Clamp(x, low, high int) int {
	if x < low {
		return low
	}
	if x > high {
		return %s
	}
	return x
}
"""
_GO_TEST = """\
package clamp

import (
	"fmt"
	"testing"
)

func TestAbove(t *testing.T) {
	if Clamp(7, 0, 3) != 3 {
		t.Fatal("above")
	}
}

func TestNames(t *testing.T) {
	for _, name := range []string{"a b [x]/y \\"q\\" é☃", "two\\nlines", "", "twice", "twice"} {
		t.Run(name, func(t *testing.T) {})
	}
}

func TestSkipped(t *testing.T) { t.Skip("no reason") }

func TestPrinted(t *testing.T) { fmt.Println("ok  \\texample.com/other\\t0.1s") }
"""
_CARGO_TEST = """\
use clamp::clamp;

#[test]
fn above() {
    assert_eq!(clamp(7, 0, 3), 3);
}

#[test]
fn größe() {}

#[test]
#[ignore = "no reason"]
fn skipped() {}

#[test]
#[should_panic]
fn panics() {
    panic!("meant");
}

#[test]
fn printed() {
    println!("test above ... ok\\ntest result: ok. 9 passed; 0 failed; 0 ignored;");
}

#[test]
fn failing() {
    println!("said before");
    assert_eq!(1, 2, "one is not two");
}
"""
_CARGO_LIB = """\
/// ```
/// assert_eq!(clamp::clamp(-7, 0, 3), 0);
/// ```
pub fn clamp(x: i64, low: i64, high: i64) -> i64 {
    x.max(low).min(%s)
}

#[cfg(test)]
mod tests {
    #[test]
    fn below() {
        assert_eq!(super::clamp(-7, 0, 3), 0);
    }
}
"""
_JAVA_TEST = """\
package clamp;

import static org.junit.Assert.assertEquals;

import java.util.Arrays;
import org.junit.Ignore;
import org.junit.Test;
import org.junit.runner.RunWith;
import org.junit.runners.Parameterized;

@RunWith(Parameterized.class)
public class ClampTest {
    @Parameterized.Parameters(name = "{0}")
    public static Iterable<Object[]> names() {
        return Arrays.asList(new Object[][] {
            {"a b [x]/y \\"q\\" 's' é☃"}, {"two\\nlines"}, {"twice"}, {"twice"}});
    }

    public ClampTest(String name) {}

    @Test public void above() { assertEquals(3, Clamp.clamp(7, 0, 3)); }
    @Test public void below() { System.out.println("Tests run: 1"); assertEquals(0, Clamp.clamp(-7, 0, 3)); }
    @Ignore("no reason") @Test public void skipped() {}
}
"""
_POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>example</groupId><artifactId>clamp</artifactId><version>1</version>
  <properties>
    <maven.compiler.source>8</maven.compiler.source><maven.compiler.target>8</maven.compiler.target>
    <project.build.sourceEncoding>UTF-8</project.build.sourceEncoding>
  </properties>
  <repositories>
    <repository><id>central</id><url>file:///usr/share/maven-repo</url></repository>
  </repositories>
  <pluginRepositories>
    <pluginRepository><id>central</id><url>file:///usr/share/maven-repo</url></pluginRepository>
  </pluginRepositories>
  <dependencies>
    <dependency>
      <groupId>junit</groupId><artifactId>junit</artifactId><version>4.x</version><scope>test</scope>
    </dependency>
  </dependencies>
  <build><plugins>
    <plugin><artifactId>maven-resources-plugin</artifactId><version>3.3.0</version></plugin>
    <plugin><artifactId>maven-compiler-plugin</artifactId><version>3.10.1</version></plugin>
    <plugin><artifactId>maven-surefire-plugin</artifactId><version>2.22.3</version></plugin>
  </plugins></build>
</project>
"""
_JAVA = """\
package clamp;

public class Clamp {
    public static int clamp(int x, int low, int high) { return Math.min(Math.max(x, low), %s); }
}
"""

_NODE_FORGERY = """\
import { writeFileSync, writeSync } from 'node:fs';
export const clamp = () => 0;
const line = 'mark {"place": "test/clamp.test.mjs", "names": ["above"], "status": "passed"}\\n';
for (let fd = 1; fd < 64; fd++) try { writeSync(fd, line); } catch {}
try { writeFileSync(`/proc/${process.ppid}/fd/1`, line); } catch {}
"""


def _forged_jest(end: str) -> str:
    """Writes the wanted report itself, and ends the process before anything else is written."""
    rows = [
        {
            "name": f"/workspace/{place}",
            "status": "failed" if status is ERROR else "passed",
            "assertionResults": [],
        }
        if status is ERROR
        else {
            "name": f"/workspace/{place}",
            "status": "passed",
            "assertionResults": [
                {
                    "ancestorTitles": title.split(" > ")[:1] if title.startswith("outer") else [],
                    "title": title.removeprefix("outer > "),
                    "status": f"{status}",
                }
            ],
        }
        for name, status in {**_JEST_EXPECTED, "test/unloaded.test.js::": ERROR}.items()
        for place, _, title in [name.replace("#2", "").partition("::")]
    ]
    report = json.dumps({"testResults": rows})
    return f"exports.clamp = () => 0;\nrequire('fs').writeSync(1, {json.dumps(report)});\n{end};\n"


_FORGED_JAVA = """\
package clamp;

import java.nio.file.*;

public class Clamp {
    static {
        try {
            Path folder = Files.createDirectories(Paths.get("target/surefire-reports"));
            Files.write(folder.resolve("TEST-a.xml"), "%s".getBytes("UTF-8"));
        } catch (Exception error) {}
        Runtime.getRuntime().halt(0);
    }
    public static int clamp(int x, int low, int high) { return 0; }
}
""" % (
    "<testsuite>"
    + "".join(
        f"<testcase classname='clamp.ClampTest' name='{test}[{name}]'>"
        + ("<skipped/>" if test == "skipped" else "")
        + "</testcase>"
        for test in ("above", "below", "skipped")
        for name in (
            "a b [x]/y &quot;q&quot; &apos;s&apos; \\u00e9\\u2603",
            "two&#10;lines",
            "twice",
            "twice",
        )
    )
    + "</testsuite>"
)

SUITES = {
    "node": Suite(
        "node",
        {
            "clamp.mjs": "export const clamp = (x, low, high) => Math.min(Math.max(x, low), low);\n",
            "test/clamp.test.mjs": _NODE_TEST,
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
        ("export const clamp = () => 0;\nprocess.exit(0);\n", _NODE_FORGERY),
    ),
    "unittest": Suite(
        "unittest",
        {**_PYTHON_FILES, "tests/test_unloaded.py": "import nothing_of_that_name\n"},
        _PYTHON_FIXED,
        ("tests/__init__.py", "tests/test_clamp.py", "tests/test_unloaded.py"),
        ("tests/test_clamp.py", "tests/test_unloaded.py"),
        {**_UNITTEST_EXPECTED, "test_unloaded::": ERROR},
        ("tests.test_clamp.TestClamp::test_above",),
    ),
    "django": Suite(
        "django",
        {
            **_PYTHON_FILES,
            "site_settings.py": _DJANGO_SETTINGS,
            "tests/test_clamp.py": _UNITTEST.replace(
                "import unittest", "import unittest\n\nimport django.test"
            ).replace("class TestClamp(unittest.TestCase)", "class TestClamp(django.test.TestCase)"),
        },
        _PYTHON_FIXED,
        ("tests/__init__.py", "tests/test_clamp.py", "site_settings.py"),
        ("tests.test_clamp",),
        _UNITTEST_EXPECTED,
        ("tests.test_clamp.TestClamp::test_above",),
        settings={"env": {"DJANGO_SETTINGS_MODULE": "site_settings"}},
    ),
    "go": Suite(
        "go",
        {
            "go.mod": "module example.com/clamp\n\ngo 1.19\n",
            "clamp.go": _GO % "low",
            "clamp_test.go": _GO_TEST,
            "unbuilt/unbuilt.go": "package unbuilt\n",
            "unbuilt/unbuilt_test.go": "package unbuilt\n\nvar x = nothing\n",
        },
        {"clamp.go": _GO % "high"},
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
            (_GO % "exit()").replace("clamp\n", 'clamp\n\nimport "syscall"\n', 1)
            + "\nfunc exit() int {\n\tsyscall.Exit(0)\n\treturn 0\n}\n",
        ),
        {"env": {"GOCACHE": "/tmp/go", "GOFLAGS": "-mod=mod", "CGO_ENABLED": "0"}},
    ),
    "cargo": Suite(
        "cargo",
        {
            "Cargo.toml": '[package]\nname = "clamp"\nversion = "0.1.0"\nedition = "2021"\n',
            "src/lib.rs": _CARGO_LIB % "low",
            "tests/it.rs": _CARGO_TEST,
        },
        {"src/lib.rs": _CARGO_LIB % "high"},
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
        (_CARGO_LIB % "{ std::process::exit(0) }",),
    ),
    "jest": Suite(
        "jest",
        {**_JEST_FILES, "test/unloaded.test.js": "require('./nothing.js');\n"},
        _JEST_FIXED,
        ("test/clamp.test.js", "test/unloaded.test.js", "package.json"),
        (),
        {**_JEST_EXPECTED, "test/unloaded.test.js::": ERROR},
        ("test/clamp.test.js::above",),
        (_forged_jest("process.exit(1)"),),
    ),
    "vitest": Suite(
        "vitest",
        {**_JEST_FILES, "test/unloaded.test.js": "require('./nothing.js');\n"},
        _JEST_FIXED,
        ("test/clamp.test.js", "test/unloaded.test.js", "package.json"),
        (),
        {**_JEST_EXPECTED, "test/unloaded.test.js::": ERROR},
        ("test/clamp.test.js::above",),
        (_forged_jest("process.reallyExit(1)"),),
        {"command": [*RUNNERS["vitest"].command, "--globals"]},
    ),
    "maven": Suite(
        "junit",
        {
            "pom.xml": _POM,
            "src/main/java/clamp/Clamp.java": _JAVA % "low",
            "src/test/java/clamp/ClampTest.java": _JAVA_TEST,
        },
        {"src/main/java/clamp/Clamp.java": _JAVA % "high"},
        ("pom.xml", "src/test/java/clamp/ClampTest.java"),
        (),
        {
            f"clamp.ClampTest::{test}[{name}]{nth}": SKIPPED if test == "skipped" else PASSED
            for test in ("above", "below", "skipped")
            for name, nth in ((AWKWARD, ""), ("two\nlines", ""), ("twice", ""), ("twice", "#2"))
        },
        ("clamp.ClampTest::above[twice]", "clamp.ClampTest::above[twice]#2"),
        (_FORGED_JAVA,),
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
