"""Runs `baton` with pools that no other process can map, as on a GPU: `python -m benchmarks.staged up …`."""

from __future__ import annotations

import functools
import sys
from typing import Any

from services.cli import main as cli
from services.cli import up
from services.cli.plan import ROLES

PROGRAM = (sys.executable, "-m", "benchmarks.staged")


def main() -> int:
    command = sys.argv[1:2]
    if command == ["up"]:
        up.supervise = functools.partial(up.supervise, program=PROGRAM)
    elif set(command) & set(ROLES):
        _take_descriptors()
    return cli.main()


def _take_descriptors() -> None:
    """Has pools that are made in this process from now on lose their descriptors, by which others map them."""
    from services.engine.engine import Engine  # torch: only where something is computed

    load = Engine.__init__

    def load_without(self: Engine, *arguments: Any, **options: Any) -> None:
        load(self, *arguments, **options)
        self.cache.close()

    Engine.__init__ = load_without  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
