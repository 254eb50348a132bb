"""Speaks with an engine that is measured, in lines that it says and hears in whatever environment it runs. Imports no
package.

An engine says READY when it is. Then for each line `{"count": N, "prompt_tokens": N, "max_tokens": N}` on stdin it runs
those sequences and says `DONE {"seconds": S}`. `benchmarks/turns.py` is the other side.
"""

import json
import sys
from collections.abc import Callable


def answer_lines(run: Callable[[int, int, int], float]) -> None:
    """Warms up, and serves until stdin ends. `run(count, prompt_tokens, max_tokens)` returns the seconds it took."""
    run(4, 256, 8)
    print("READY", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        seconds = run(asked["count"], asked["prompt_tokens"], asked["max_tokens"])
        print("DONE " + json.dumps({"seconds": seconds}), flush=True)
