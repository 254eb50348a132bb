"""Runs a command and passes on what it prints; on a terminal it says for how long it has run while it prints nothing.

`make` runs pip and the compiler so: both may be silent for most of a minute. It needs no package, since it runs before
any is installed.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence

_SILENCE_S = 1.0
_CLEAR = b"\r\x1b[K"


def main(command: Sequence[str]) -> int:
    """Returns the command's exit status."""
    began_s, is_terminal, is_told = time.monotonic(), sys.stdout.isatty(), False
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        while True:
            said = b""
            if select.select([process.stdout], [], [], _SILENCE_S)[0]:
                said = os.read(process.stdout.fileno(), 1 << 16)
                if not said:
                    break
            elif is_terminal:
                said = _CLEAR + f"... {time.monotonic() - began_s:.0f} s".encode()
            if is_told and not said.startswith(_CLEAR):
                said = _CLEAR + said
            is_told = said.startswith(_CLEAR + b"...")
            sys.stdout.buffer.write(said)
            sys.stdout.buffer.flush()
        if is_told:
            sys.stdout.buffer.write(_CLEAR)
            sys.stdout.buffer.flush()
    return process.returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # the command has it too
        sys.exit(130)
