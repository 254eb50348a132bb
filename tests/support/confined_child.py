"""Answers each question, a number, after so many seconds of processor time: a program for a `ConfinedProcess`."""

from __future__ import annotations

import sys
import time

from services.worker.confinement import serve


def _burn(seconds: float) -> float:
    until_s = time.process_time() + seconds
    while time.process_time() < until_s:
        pass
    return seconds


def main() -> int:
    serve(_burn, memory_bytes=1 << 30, processor_s=1, first_processor_s=int(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
