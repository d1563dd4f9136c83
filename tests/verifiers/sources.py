"""Sources of the projects in `suites`: programs, their tests, and forgeries."""

from __future__ import annotations

import json

from catalog.models import TestStatus

PASSED, FAILED, SKIPPED = TestStatus.PASSED, TestStatus.FAILED, TestStatus.SKIPPED
XFAILED, ERROR = TestStatus.XFAILED, TestStatus.ERROR
AWKWARD = "a b [x]/y \"q\" 's' é☃"
NODE_TEST = """\
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
JEST_TEST = """\
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
JEST_EXPECTED = {
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
JEST_FILES = {
    "package.json": '{"name": "clamp", "private": true}\n',
    "clamp.js": "exports.clamp = (x, low, high) => Math.min(Math.max(x, low), low);\n",
    "test/clamp.test.js": JEST_TEST,
}
JEST_FIXED = {"clamp.js": "exports.clamp = (x, low, high) => Math.min(Math.max(x, low), high);\n"}
UNITTEST = """\
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
UNITTEST_EXPECTED = {
    "tests.test_clamp.TestClamp::test_above": PASSED,
    "tests.test_clamp.TestClamp::test_below": PASSED,
    "tests.test_clamp.TestClamp::test_skipped": SKIPPED,
    "tests.test_clamp.TestClamp::test_later": XFAILED,
    "tests.test_clamp.TestClamp::test_printed": PASSED,
    f"tests.test_clamp.TestClamp::test_{AWKWARD}": PASSED,
    "tests.test_clamp.TestClamp::test_two\nlines": PASSED,
    "tests.test_clamp.TestBroken::setUpClass": ERROR,
}
PYTHON_FILES = {
    "pkg/__init__.py": "",
    "pkg/numbers.py": "def clamp(x, low, high):\n    return min(max(x, low), low)\n",
    "tests/__init__.py": "",
    "tests/test_clamp.py": UNITTEST,
}
PYTHON_FIXED = {"pkg/numbers.py": "def clamp(x, low, high):\n    return min(max(x, low), high)\n"}
DJANGO_SETTINGS = """\
SECRET_KEY = "x"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
INSTALLED_APPS = []
USE_TZ = True
"""
GO = """\
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
GO_TEST = """\
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
CARGO_TEST = """\
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
CARGO_LIB = """\
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
JAVA_TEST = """\
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
POM = """\
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
JAVA = """\
package clamp;

public class Clamp {
    public static int clamp(int x, int low, int high) { return Math.min(Math.max(x, low), %s); }
}
"""

NODE_FORGERY = """\
import { writeFileSync, writeSync } from 'node:fs';
export const clamp = () => 0;
const line = 'mark {"place": "test/clamp.test.mjs", "names": ["above"], "status": "passed"}\\n';
for (let fd = 1; fd < 64; fd++) try { writeSync(fd, line); } catch {}
try { writeFileSync(`/proc/${process.ppid}/fd/1`, line); } catch {}
"""


def forged_jest(end: str) -> str:
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
        for name, status in {**JEST_EXPECTED, "test/unloaded.test.js::": ERROR}.items()
        for place, _, title in [name.replace("#2", "").partition("::")]
    ]
    report = json.dumps({"testResults": rows})
    return f"exports.clamp = () => 0;\nrequire('fs').writeSync(1, {json.dumps(report)});\n{end};\n"


FORGED_JAVA = """\
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
