"""Runs Baton's engine in a process of its own, for measurements that take turns with others on the same cores.

`python -m benchmarks.alone '{"model": FOLDER, "threads": N, "dtype": …, "quantization": …, "kv_dtype": …, "cores":
[…]}'` speaks the lines of `benchmarks/peers/lines.py`. Programs of peers speak the same (`benchmarks/peers`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.peers.lines import answer_lines


def main() -> None:
    options = json.loads(sys.argv[1])
    if options.get("cores"):
        os.sched_setaffinity(0, options["cores"])  # before torch counts them
    from benchmarks.engine import running
    from benchmarks.precision import Precision

    precision = Precision(options["dtype"], options["quantization"], options["kv_dtype"])
    step_tokens = options.get("max_num_batched_tokens", 2048)
    with running(Path(options["model"]), precision, options["threads"], step_tokens) as load:
        answer_lines(load.run)


if __name__ == "__main__":
    main()
