"""Tests that one thing has one public name: no class and no type alias is defined twice."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests.support import ROOT


def defined(source: str) -> Iterator[str]:
    """Yields the public classes and type aliases of a module. An alias is an assignment to a name in CamelCase."""
    for statement in ast.parse(source).body:
        target: ast.expr | None = None
        if isinstance(statement, ast.ClassDef):
            target = ast.Name(statement.name)
        elif isinstance(statement, ast.AnnAssign):
            target = statement.target
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
        if isinstance(target, ast.Name) and target.id[0].isupper() and not target.id.isupper():
            yield target.id


def repeated(sources: dict[str, str]) -> dict[str, list[str]]:
    """Returns the files of each name that is defined more than once."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        for name in defined(source):
            found[name].append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_a_class_and_an_alias_of_one_name_are_found() -> None:
    first = "LIMIT = 1\nclass Call: ...\nclass _Own: ...\nPair = tuple[int, int]\n"
    second = "LIMIT = 1\nCall: TypeAlias = str\nclass _Own: ...\nclass Pair: ...\n"
    assert repeated({"first": first, "second": second}) == {"Call": ["first", "second"], "Pair": ["first", "second"]}


def test_no_public_name_stands_for_two_things() -> None:
    paths = [path for folder in ("services", "client") for path in sorted((ROOT / folder).rglob("*.py"))]
    shipped = [path for path in paths if "_pb2" not in path.name]
    assert repeated({str(path.relative_to(ROOT)): path.read_text() for path in shipped}) == {}
