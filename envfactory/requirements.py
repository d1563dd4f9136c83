"""What a package needs to run and to be tested, read from its files without running any of them.

Runtime: PKG-INFO (source distributions), pyproject.toml, setup.cfg, setup.py as syntax, requirements.txt.
Tests: extras and dependency groups of telling names, tests_require, tox.ini, requirements files of
telling names. Tools that do not take part in a test run (linters, builders, documentation) are left out.
"""

from __future__ import annotations

import ast
import email.parser
import email.policy
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from envfactory.layout import ini, toml
from envfactory.trees import Tree

_TEST_NAMES = {
    "test",
    "tests",
    "testing",
    "dev",
    "develop",
    "development",
    "unittest",
    "pytest",
    "check",
    "ci",
}
_TEST_FILES = re.compile(
    r"(?:requirements[-_/.])?(?:(?:test|tests|testing|dev|ci)[-_]?requirements|requirements[-_./]?(?:test|tests|testing|dev|ci)"
    r"|requirements/(?:test|tests|testing|dev|ci)|tests?/requirements)\.(?:txt|in)"
)
_TOOLS = frozenset(
    """
    tox nox black ruff flake8 pylint isort mypy pyright pyre-check bandit coverage codecov coveralls
    twine build wheel pip pip-tools uv hatch hatchling flit flit-core poetry poetry-core pdm
    setuptools-scm hatch-vcs bump2version bumpversion bump-my-version pre-commit sphinx furo mkdocs
    mkdocs-material sphinx-rtd-theme myst-parser readme-renderer check-manifest pyroma interrogate
    pydocstyle pycodestyle pyflakes mccabe towncrier zest-releaser invoke ipython jupyter notebook
    ipdb pytest-cov pytest-xdist pytest-flake8 pytest-mypy pytest-black pytest-ruff
    pytest-checkdocs pytest-enabler pytest-sugar pytest-watch pytest-randomly pytest-codspeed
    pytest-pretty tox-uv mutmut cibuildwheel numpydoc sphinx-copybutton autoflake pyupgrade vulture
    safety types-setuptools cython diff-cover pytest-github-actions-annotate-failures gitpython
    docutils pygments-github-lexers wemake-python-styleguide
    """.split()  # noqa: SIM905
)
_KNOWN_PLUGINS = {"--cov": "pytest-cov", "--benchmark": "pytest-benchmark", "--randomly": "pytest-randomly"}


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of a package, each a PEP 508 string, sorted."""

    runtime: tuple[str, ...]
    tests: tuple[str, ...]
    requires_python: str | None = None
    version: str | None = None


def needs(tree: Tree, name: str = "") -> Needs:
    """Read every place that names dependencies. Damaged files and foreign markers are passed over."""
    runtime: list[str] = []
    tests: list[str] = []
    project = toml(text_of(tree, "pyproject.toml"))
    static = project.get("project", {})
    requires_python, version = static.get("requires-python"), static.get("version")
    if "PKG-INFO" in tree:
        info = email.parser.Parser(policy=email.policy.compat32).parsestr(
            text_of(tree, "PKG-INFO"), headersonly=True
        )
        requires_python, version = info.get("Requires-Python", requires_python), info.get("Version", version)
        for text in info.get_all("Requires-Dist", []):
            extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", text)
            if extra is None:
                runtime.append(text)
            elif extra.group(1) in _TEST_NAMES:
                tests.append(re.sub(r"\s*(?:and\s*)?extra\s*==\s*['\"][^'\"]+['\"]", "", text).rstrip("; "))
    runtime += _strings(static.get("dependencies"))
    for group in (static.get("optional-dependencies", {}), project.get("dependency-groups", {})):
        tests += _named(group)
    poetry = project.get("tool", {}).get("poetry", {})
    runtime += [key for key in poetry.get("dependencies", {}) if key.lower() != "python"]
    for group in poetry.get("group", {}).values():
        tests += list(group.get("dependencies", {}))
    setup_cfg = ini(text_of(tree, "setup.cfg"))
    runtime += setup_cfg.get("options", {}).get("install_requires", "").splitlines()
    tests += setup_cfg.get("options", {}).get("tests_require", "").splitlines()
    tests += _named(setup_cfg.get("options.extras_require", {}))
    keywords = setup_keywords(text_of(tree, "setup.py"))
    runtime += _strings(keywords.get("install_requires"))
    tests += _strings(keywords.get("tests_require")) + _named(keywords.get("extras_require"))
    tests += [
        line
        for section, values in ini(text_of(tree, "tox.ini")).items()
        if section.startswith("testenv")
        and not re.search(r"lint|doc|mypy|type|style|build|format|flake", section)
        for line in values.get("deps", "").splitlines()
    ]
    for path in sorted(tree):
        if _TEST_FILES.fullmatch(path):
            tests += text_of(tree, path).splitlines()
    wanted = _clean(runtime, name)
    return Needs(
        wanted,
        tuple(r for r in _clean(tests, name, tools=False) if r not in wanted),
        requires_python,
        version,
    )


def pytest_plugins(addopts: str) -> tuple[str, ...]:
    """Plugins that pytest's own options of a repository cannot do without."""
    return tuple(plugin for flag, plugin in _KNOWN_PLUGINS.items() if flag in addopts)


def text_of(tree: Tree, path: str) -> str:
    """A file as text, empty when the tree has none of that path."""
    return tree[path].data.decode("utf-8", "replace") if path in tree else ""


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return value.splitlines()
    return [item for item in value if isinstance(item, str)] if isinstance(value, list | tuple) else []


def _named(groups: Any) -> list[str]:
    """Requirements of the extras whose names speak of tests."""
    if not isinstance(groups, dict):
        return []
    return [
        text for key, value in groups.items() if str(key).lower() in _TEST_NAMES for text in _strings(value)
    ]


def _clean(lines: Iterable[str], name: str, *, tools: bool = True) -> tuple[str, ...]:
    """Sorted unique requirements that hold for this interpreter; options, paths and URLs are passed over."""
    result: dict[str, str] = {}
    for line in lines:
        text = re.sub(r"(^|\s)#.*$", "", line).strip()
        text = re.sub(r"^[\w,{}.!-]+:\s+", "", text)
        if not text or text.startswith("-") or "{" in text:
            continue
        try:
            requirement = Requirement(text)
            if requirement.url or (requirement.marker and not requirement.marker.evaluate()):
                continue
        except (InvalidRequirement, UndefinedEnvironmentName):
            continue
        key = canonicalize_name(requirement.name)
        if key == canonicalize_name(name or "-") or (not tools and key in _TOOLS) or key == "pytest":
            continue
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        # Exact pins of a development set are often too old for this interpreter; ranges are kept.
        specifier = str(requirement.specifier) if tools else ""
        result.setdefault(key, f"{key}{extras}{specifier}")
    return tuple(result[key] for key in sorted(result))


def setup_keywords(source: str) -> dict[str, Any]:
    """Literal keyword arguments of `setup(...)`, simple module-level names resolved."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError):
        return {}
    names: dict[str, Any] = {}
    for node in module.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = _literal(node.value, names)
    result: dict[str, Any] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "setup":
            for keyword in node.keywords:
                if keyword.arg:
                    result[keyword.arg] = _literal(keyword.value, names)
    return result


def _literal(node: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Dict):
        return {
            _literal(k, names): _literal(v, names) for k, v in zip(node.keys, node.values, strict=True) if k
        }
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item, names) for item in node.elts]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def extension_modules(tree: Tree) -> bool:
    """Whether the package has compiled parts."""
    sources = (".pyx", ".c", ".cpp", ".rs", ".pxd")
    return any(path.endswith(sources) and not path.startswith(("tests/", "docs/")) for path in tree)
