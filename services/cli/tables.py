"""Lays out what commands print: columns, and texts of unknown length."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

_MOST_CELL_CHARS = 48
_MOST_COLUMNS = 1000


def clip(text: str, most: int = _MOST_CELL_CHARS) -> str:
    """Returns the text, or its beginning: one worker's long name must not push all others off the screen."""
    return text if len(text) <= most else text[: most - 1] + "…"


def columns(most: int) -> int:
    """Returns the columns of the terminal that is standard output, if it has fewer than `most`."""
    return min(most, shutil.get_terminal_size((most, 0)).columns) if sys.stdout.isatty() else most


def prints(characters: str) -> bool:
    """Returns whether standard output can show these characters."""
    try:
        characters.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def size(num_bytes: int) -> str:
    """Returns the bytes in the unit in which they have few digits."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines with columns as wide as their widest cell; numbers are aligned to the right. On a terminal that is
    too narrow for it, the table is turned if that helps: each row becomes a column."""
    lines, most = _laid_out(rows), columns(_MOST_COLUMNS)
    if max(map(len, lines)) <= most:
        return lines
    turned = _laid_out(list(zip(*rows, strict=True)))
    return turned if max(map(len, turned)) <= most else lines


def _laid_out(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(_pad(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _pad(cell: str, width: int) -> str:
    return cell.rjust(width) if cell[:1].isdigit() and ":" not in cell else cell.ljust(width)
