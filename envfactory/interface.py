"""Names and signatures that tests use and a workspace does not show, read from syntax."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from envfactory.layout import Layout, module_name
from envfactory.trees import Tree


@dataclass(frozen=True, slots=True)
class Symbol:
    """A public function, method or class."""

    module: str
    name: str
    """Qualified inside the module."""
    signature: str
    docstring: str


def symbols(source: str, module: str) -> dict[str, Symbol]:
    """Functions, classes and methods of a module by qualified name; empty for damaged source."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, Symbol] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
                kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
                signature = f"{kind} {node.name}({ast.unparse(node.args)}){returns}"
            elif isinstance(node, ast.ClassDef):
                bases = ", ".join(ast.unparse(base) for base in node.bases)
                signature = f"class {node.name}({bases})" if bases else f"class {node.name}"
            else:
                if isinstance(node, ast.If | ast.Try):
                    visit(node.body, prefix)
                continue
            name = prefix + node.name
            found[name] = Symbol(module, name, signature, ast.get_docstring(node) or "")
            if isinstance(node, ast.ClassDef):
                visit(node.body, name + ".")

    visit(tree.body, "")
    return found


def words(source: str) -> set[str]:
    """Identifiers that a piece of source mentions: names, attributes, imported names, keywords of calls."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return set(re.findall(r"[A-Za-z_]\w*", source))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).rpartition(".")[2])
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
    return found


def changed_interface(
    before: Tree, after: Tree, paths: Collection[str], layout: Layout, used: Collection[str]
) -> list[Symbol]:
    """Public symbols of `paths` that are new or have another signature, as far as tests use them (`used`)."""
    result: list[Symbol] = []
    for path in sorted(paths):
        if path not in after:
            continue
        module = module_name(path, layout)
        old = symbols(_text(before, path), module)
        for name, symbol in symbols(_text(after, path), module).items():
            private = any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
            same = name in old and old[name].signature == symbol.signature
            if not private and not same and name.rpartition(".")[2] in used:
                result.append(symbol)
    return result


def render(found: Collection[Symbol]) -> str:
    """One line a symbol, grouped by module."""
    groups: dict[str, list[str]] = {}
    for symbol in found:
        owner = symbol.name.rpartition(".")[0]
        where = f"{symbol.module}.{owner}" if owner else symbol.module
        groups.setdefault(where, []).append(f"    {symbol.signature}")
    return "\n".join(f"{where}:\n" + "\n".join(rows) for where, rows in groups.items())


def subject(test: str, sources: Mapping[str, dict[str, Symbol]], name: str) -> Symbol | None:
    """The documented package symbol that a test is about: one it uses, best the one that its name mentions.

    `sources`: symbols by module path; `name`: name of the test.
    """
    used = words(test)
    candidates: list[tuple[int, str, Symbol]] = []
    for found in sources.values():
        for qualified, symbol in found.items():
            last = qualified.rpartition(".")[2]
            if last in used and not last.startswith("_") and symbol.docstring:
                mentioned = last.lower() in name.lower()
                candidates.append((0 if mentioned else 1 if "." not in qualified else 2, qualified, symbol))
    return min(candidates, key=lambda row: (row[0], -len(row[1]), row[1]))[2] if candidates else None


def _text(tree: Tree, path: str) -> str:
    return tree[path].data.decode("utf-8", "replace") if path in tree else ""
