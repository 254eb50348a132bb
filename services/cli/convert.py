"""`python -m services.cli.convert GGUF OUT`: one conversion in a process of its own, which gives torch's memory back.

Owns nothing. The reason of a failure is one line on stdout, for the parent; progress goes to stderr.
"""

from __future__ import annotations

import os
import pathlib
import sys

from services.core.errors import BatonError


def main() -> int:
    gguf, out = map(pathlib.Path, sys.argv[1:])
    try:
        from services.engine.gguf_conversion import convert_gguf

        convert_gguf(gguf, out)
    except Exception as error:  # the process boundary: the parent raises it again
        if os.environ.get("BATON_DEBUG"):
            raise
        name = "" if isinstance(error, BatonError) else f"{type(error).__name__}: "
        print(f"{name}{' '.join(str(error).split())}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
