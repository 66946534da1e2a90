"""Who imports whom, read from the source without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """One imported module: `source` and `target` as dotted names, an own module as exact as can be.

    `typing` is true under `if TYPE_CHECKING`: such an import never runs.
    """

    source: str
    target: str
    line: int
    typing: bool


def modules(package: Path) -> dict[str, Path]:
    """Every module of a package by its dotted name; a package goes by its own name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(package: Path) -> list[Import]:
    """All imports of a package, those inside functions included."""
    known = modules(package)
    return [
        Import(source, target, node.lineno, typing)
        for source, path in known.items()
        for node, typing in _statements(ast.parse(path.read_text("utf-8")), False)
        for target in _targets(node, source, path.name == "__init__.py", known)
    ]


def _statements(node: ast.AST, typing: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, typing
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in (ast.unparse(node.test)).split("."):
        for child in node.body:
            yield from _statements(child, True)
        for child in node.orelse:
            yield from _statements(child, typing)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _statements(child, typing)


def _targets(
    node: ast.Import | ast.ImportFrom, source: str, is_package: bool, known: dict[str, Path]
) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        parts = source.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        base = ".".join([*parts, *([node.module] if node.module else [])])
    for alias in node.names:
        whole = f"{base}.{alias.name}"
        yield whole if whole in known else base
