"""Says on how many examples a property is tried.

A quarter in `make test`, all in `make test-all` (`BATON_EXAMPLES=all`), and any other number for somebody who looks for
more (`BATON_EXAMPLES=2000`).
"""

from __future__ import annotations

import os

_CHOSEN = os.environ.get("BATON_EXAMPLES", "")


def num_examples(count: int) -> int:
    """Returns how many examples to try of a property for which `make test-all` tries `count`."""
    if _CHOSEN == "all":
        return count
    return int(_CHOSEN or (count + 3) // 4)
