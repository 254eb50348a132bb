"""Tests the tree's import graph: no circles, and what calls itself pure is so, whatever it imports.

Imports within functions and for type checkers count like others. Packages that are pure as a whole are declared in
pyproject.toml, `[tool.importlinter]`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping, Set
from pathlib import Path

import grimp

from tests.support import ROOT

IMPURE = ("torch", "transformers", "grpc", "asyncio", "os", "time", "datetime", "threading", "concurrent", "socket")
SAYS_PURE = re.compile(r"\bpure\b", re.IGNORECASE)


@functools.cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("services", "baton", include_external_packages=True, cache_dir=None)


def circles(imports: Mapping[str, Set[str]]) -> list[list[str]]:
    """Returns groups of modules each of which imports all others of its group, through others or not."""
    reached = {module: _reachable(module, imports) for module in imports}
    groups = {frozenset(other for other in reached[module] if module in reached[other]) for module in imports}
    return sorted(sorted(group) for group in groups if group)


def _reachable(start: str, imports: Mapping[str, Set[str]]) -> set[str]:
    found: set[str] = set()
    todo = [start]
    while todo:
        new = (imports[todo.pop()] & imports.keys()) - found
        found |= new
        todo.extend(new)
    return found


def ways_to_impurity(module: str) -> list[list[str]]:
    """Chains of imports from the module, or from any module of the package, to what no pure one may have."""
    present = [name for name in IMPURE if name in graph().modules]
    return [list(way) for name in present for way in graph().find_shortest_chains(module, name)]


def pure_modules() -> list[str]:
    """Returns the modules whose docstring says that they are pure. A package's speaks for all that is in it."""
    return sorted(_module(path) for path in (ROOT / "services").rglob("*.py") if SAYS_PURE.search(_docstring(path)))


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def deeds_at_import(source: str) -> list[str]:
    """Returns the statements outside of functions that do more than define a name: calls, loops, what sets an item."""
    deeds = (ast.AugAssign, ast.Delete, ast.For, ast.While, ast.With, ast.Assert)
    found = []
    for statement in ast.parse(source).body:
        calls = isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant)
        sets = isinstance(statement, ast.Assign) and any(isinstance(part, ast.Subscript) for part in statement.targets)
        if calls or sets or isinstance(statement, deeds):
            found.append(ast.unparse(statement))
    return found


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"outside"}, "e": {"e"}}) == [["b", "c"], ["e"]]


def test_no_module_imports_itself_through_others() -> None:
    modules = {name for name in graph().modules if name.startswith("services.")}
    assert circles({name: graph().find_modules_directly_imported_by(name) for name in modules}) == []


def test_what_says_it_is_pure_is() -> None:
    found = {module: ways_to_impurity(module) for module in pure_modules()}
    assert {module: ways for module, ways in found.items() if ways} == {}


def test_deeds_at_import_are_found() -> None:
    source = '"""Says what it is."""\nimport os\nNAMES = ("a",)\nos.environ["A"] = "1"\nprint()\ndef f(): print()\n'
    assert deeds_at_import(source) == ["os.environ['A'] = '1'", "print()"]


def test_no_import_has_side_effects() -> None:
    found = {str(path): deeds_at_import(path.read_text()) for path in (ROOT / "services").rglob("*.py")}
    assert {path: deeds for path, deeds in found.items() if deeds} == {}


def test_only_a_transports_own_files_know_which_one_it_is() -> None:
    named = {path for path in (ROOT / "services").rglob("*.py") if re.search("TRANSPORT_(SHM|GRPC)", path.read_text())}
    assert {path.parent for path in named} == {ROOT / "services/kvtransfer/transports"}


def test_the_walk_sees_through_other_modules_and_into_packages() -> None:
    assert {"services.kv", "services.kv.lease", "services.engine.schedule.scheduler"} <= set(pure_modules())
    assert ["services.rpc.silence", "services.core.clock", "time"] in ways_to_impurity("services.rpc.silence")
    assert ["services.engine.model.kv_cache", "torch"] in ways_to_impurity("services.engine")
