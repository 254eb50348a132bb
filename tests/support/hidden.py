"""Starts Python processes in which some packages cannot be imported, as if they were not installed.

Owns: the code that hides them. Never: what the process does then.
"""

from __future__ import annotations

_HIDE = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if hidden(name) else super().find_spec(name, path, target)

sys.meta_path[:] = [Finder if each is PathFinder else each for each in sys.meta_path]
"""


def without(names: set[str]) -> str:
    """Returns code for the start of a process that has none of these top-level packages."""
    return f"hidden = lambda name: name.partition('.')[0] in {sorted(names)}\n{_HIDE}"


def with_only(names: set[str]) -> str:
    """Returns code for the start of a process that has the standard library and these packages; a dot is a part of a
    name."""
    kept = tuple(names | {name.partition(".")[0] for name in names if "." in name})
    return (
        "hidden = lambda name: name.partition('.')[0] not in sys.stdlib_module_names and not any(\n"
        f"    name == kept or name.startswith(kept + '.') and kept != 'google' for kept in {kept})\n{_HIDE}"
    )
