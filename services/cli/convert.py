"""Runs `python -m services.cli.convert GGUF OUT LIFELINE`: one conversion in its own process, whose end frees torch's
memory. It ends with the process that has the other end of the pipe LIFELINE.

Owns: nothing. It prints the reason of a failure as one line on stdout, for the parent.
"""

from __future__ import annotations

import os
import pathlib
import sys

from services.core.errors import BatonError
from services.core.lifecycle import Lifecycle
from services.core.printable import printable
from services.engine.cpu.openmp import expect_shared_cores


def main() -> int:
    gguf, out = map(pathlib.Path, sys.argv[1:3])
    Lifecycle(lifeline_fd=int(sys.argv[3]), orphan_grace_s=0.0).watch_lifeline()
    try:
        expect_shared_cores()
        from services.engine.model.gguf_conversion import convert_gguf  # loads torch

        convert_gguf(gguf, out)
    except Exception as error:  # the process boundary: the parent raises the error again
        if os.environ.get("BATON_DEBUG"):
            raise
        name = "" if isinstance(error, BatonError) else f"{type(error).__name__}: "
        print(printable(f"{name}{' '.join(str(error).split())}"))
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # a terminal's Ctrl-C reaches the parent too, which says what there is to say
        sys.exit(130)
