import pytest

from envfactory import metadata, requirements
from envfactory.errors import BuildError
from envfactory.layout import detect, is_protected, licence
from envfactory.requirements import needs
from envfactory.trees import File


def tree(**files: str) -> dict[str, File]:
    """Paths with `__` for a slash; `.py` is added to names without a dot."""
    return {path: File(text.encode()) for path, text in files.items()}


TEST = "def test_a():\n    pass\n"


@pytest.mark.parametrize(
    ("paths", "root", "packages", "tests"),
    [
        (("boltons/__init__.py", "tests/test_x.py", "docs/conf.py", "setup.py"), "", ("boltons",), 1),
        (
            ("src/pkg/__init__.py", "src/pkg/a.py", "tests/test_x.py", "tests/sub/b_test.py"),
            "src",
            ("src/pkg",),
            2,
        ),
        (("pkg.py", "test_pkg.py", "setup.py", "conftest.py"), "", ("pkg.py",), 1),
        (("pkg/__init__.py", "pkg/tests/test_x.py", "examples/__init__.py"), "", ("pkg",), 1),
        (("pkg/__init__.py", "other/__init__.py", "tests/__init__.py", "tests/test_x.py"), "", ("pkg",), 1),
        (("a/__init__.py", "b/__init__.py", "tests/test_x.py", "docs/test_doc.py"), "", ("a", "b"), 1),
        (("src/a/__init__.py", "src/b.py", "pkg/__init__.py", "test/test_x.py"), "src", ("src/a",), 1),
    ],
)
def test_layouts(paths: tuple[str, ...], root: str, packages: tuple[str, ...], tests: int) -> None:
    found = detect({path: File(TEST.encode()) for path in paths}, "pkg")
    assert (found.import_root, found.packages, len(found.tests)) == (root, packages, tests)
    assert found.pythonpath == ("/workspace/src" if root else "/workspace")


def test_settings_may_name_other_test_files() -> None:
    files = tree(**{"pkg/__init__.py": "", "tests/check_x.py": TEST, "tests/test_y.py": TEST})
    ini = {"pytest.ini": File(b"[pytest]\npython_files = check_*.py test_*.py\n")}
    assert detect(files | ini).tests == ("tests/check_x.py", "tests/test_y.py")
    toml = {"pyproject.toml": File(b'[tool.pytest.ini_options]\npython_files = ["check_*.py"]\n')}
    assert "tests/check_x.py" in detect(files | toml).tests


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (("tests/test_x.py", "setup.py"), "no importable package"),
        (("pkg/__init__.py", "setup.py"), "no test file"),
    ],
)
def test_what_is_missing_is_said(paths: tuple[str, ...], words: str) -> None:
    with pytest.raises(BuildError, match=words):
        detect({path: File(TEST.encode()) for path in paths}, "pkg")


def test_what_grading_restores() -> None:
    yes = (
        "tests/data/a.json",
        "conftest.py",
        "pkg/conftest.py",
        "pyproject.toml",
        "tox.ini",
        "test_x.py",
        "pkg/test/a",
    )
    no = ("pkg/core.py", "README.md", "docs/pyproject.toml", "pkg/testing.py", "setup.py")
    assert [path for path in (*yes, *no) if is_protected(path)] == list(yes)


SETUP = """\
from setuptools import setup
import os
os.unlink('/tmp/never')
TESTS = ['pytest>=3', 'mock', 'tox']
setup(name='x', version='1.2', install_requires=['six>=1.9', "win; sys_platform == 'win32'"],
      tests_require=TESTS,
      extras_require={'test': TESTS + ['more'], 'docs': ['sphinx'], 'dev': ['freezegun==0.1']},
      entry_points={'console_scripts': ['x = x.cli:main']})
"""


def test_setup_py_is_read_and_not_run() -> None:
    files = tree(**{"setup.py": SETUP})
    found = needs(files, "x")
    assert found.runtime == ("six>=1.9",)
    assert found.tests == ("freezegun", "mock")
    assert metadata.version_of(files, "9") == "1.2"
    assert metadata.entry_points(files) == "[console_scripts]\nx = x.cli:main\n\n"


def test_every_place_of_requirements_is_read() -> None:
    files = tree(
        **{
            "pyproject.toml": '[project]\ndependencies = ["attrs"]\n'
            '[project.optional-dependencies]\ntests = ["a[b]>=1"]\n'
            '[dependency-groups]\ndev = ["ruff", "c"]\nlint = ["z"]\n',
            "setup.cfg": "[options.extras_require]\ntesting =\n    d\n    pytest-cov\n",
            "tox.ini": "[testenv]\ndeps =\n    -r requirements.txt\n    py39: e\n[testenv:docs]\ndeps = z\n",
            "requirements-test.txt": "f==1.0  # pinned\n-e .\ngit+https://x/y\ng @ https://x/g.whl\n",
            "PKG-INFO": "Name: x\nVersion: 3\nRequires-Dist: h (>=2)\nRequires-Dist: i; extra == 'test'\n"
            "Requires-Dist: z; extra == 'docs'\n\nBody: x\n",
        }
    )
    found = needs(files, "x")
    assert found.runtime == ("attrs", "h>=2")
    assert found.tests == ("a[b]", "c", "d", "e", "f", "i")
    assert found.version == "3"


def test_damaged_files_are_passed_over() -> None:
    files = tree(
        **{"pyproject.toml": "[[", "setup.cfg": "no section", "setup.py": "def (", "tox.ini": "[a]\n]["}
    )
    assert needs(files, "x") == requirements.Needs((), ())


def test_version_files_that_a_checkout_lacks_are_made() -> None:
    files = tree(**{"pyproject.toml": '[tool.setuptools_scm]\nversion_file = "src/x/_version.py"\n'})
    (path, text), *rest = metadata.generated_files(files, "1.2.dev3").items()
    assert (path, rest) == ("src/x/_version.py", [])
    scope: dict[str, object] = {}
    exec(text, scope)
    assert (scope["__version__"], scope["version_tuple"]) == ("1.2.dev3", (1, 2, "dev3"))


def test_licences() -> None:
    assert licence(tree(**{"pyproject.toml": '[project]\nlicense = "MIT"\n'})) == "MIT"
    assert licence(tree(LICENSE="Apache License\nVersion 2.0")) == "Apache-2.0"
    assert licence(tree(README="MIT")) is None
