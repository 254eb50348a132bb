"""Keeps all imports of one worker: the destination's side of the handoff. Pure; for one thread.

Owns: the import's states, and the rule of reuse: blocks are freed only when no copy can still write them. Never: the
references behind an import, which the caller drops when `on_freed` is called, exactly once; nor I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from services.core.errors import Cancelled


class ImportState(enum.Enum):
    RESERVED = "reserved"
    """The blocks are set aside."""
    COPYING = "copying"
    """The fetch is open: copies may be writing."""
    VALIDATING = "validating"
    """Everything was copied; the source is asked, by a Release, whether the lease still held."""
    READY = "ready"
    """The Release was valid. The blocks' references pass to the sequence."""
    DRAINING = "draining"
    """The import was given up; a copy may still be writing."""
    FREED = "freed"


_NEXT: dict[ImportState, frozenset[ImportState]] = {
    ImportState.RESERVED: frozenset({ImportState.COPYING, ImportState.DRAINING}),
    ImportState.COPYING: frozenset({ImportState.VALIDATING, ImportState.DRAINING}),
    ImportState.VALIDATING: frozenset({ImportState.READY, ImportState.DRAINING}),
    ImportState.READY: frozenset(),
    ImportState.DRAINING: frozenset({ImportState.FREED}),
    ImportState.FREED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Import:
    """Keeps the blocks set aside for one handoff, until a sequence has them or they are free again."""

    block_ids: tuple[int, ...]
    state: ImportState = ImportState.RESERVED
    entered_s: dict[ImportState, float] = field(default_factory=dict)
    """When each state was entered."""
    num_copies: int = 0
    """Copies that can still write the blocks."""

    @property
    def given_up(self) -> bool:
        return self.state in (ImportState.DRAINING, ImportState.FREED)

    def advance(self, to: ImportState, now: float) -> None:
        assert to in _NEXT[self.state], f"import: {self.state.name} -> {to.name}"
        self.state = to
        self.entered_s[to] = now


class ImportTable:
    """Keeps a worker's imports and moves them from state to state.

    `begin`, `copy_started`, `validate` and `ready` raise Cancelled if the import was given up, so that the work on it
    stops. `on_freed(import)` is called once when an import is FREED.
    """

    def __init__(self, *, on_freed: Callable[[Import], None]) -> None:
        self._on_freed = on_freed
        self._imports: dict[Import, None] = {}

    def __len__(self) -> int:
        """Returns the number of imports that are neither READY nor FREED."""
        return len(self._imports)

    def __iter__(self) -> Iterator[Import]:
        return iter(list(self._imports))

    def reserve(self, block_ids: Sequence[int], now: float) -> Import:
        """Adds an import, which takes over one reference to each block."""
        import_ = Import(tuple(block_ids))
        import_.entered_s[ImportState.RESERVED] = now
        self._imports[import_] = None
        return import_

    def begin(self, import_: Import, now: float) -> None:
        """Notes that the fetch opens: RESERVED to COPYING."""
        self._require_live(import_)
        import_.advance(ImportState.COPYING, now)

    def copy_started(self, import_: Import) -> None:
        """Counts a copy that can write the blocks from now on."""
        self._require_live(import_)
        assert import_.state is ImportState.COPYING, f"copy while {import_.state.name}"
        import_.num_copies += 1

    def copy_ended(self, import_: Import, now: float) -> None:
        """Notes that a copy can write the blocks no more, whether it succeeded or not."""
        assert import_.num_copies > 0, "a copy ended twice"
        import_.num_copies -= 1
        if import_.state is ImportState.DRAINING:
            self._free_if_quiet(import_, now)

    def validate(self, import_: Import, now: float) -> None:
        """Notes that everything was copied: COPYING to VALIDATING."""
        self._require_live(import_)
        assert import_.num_copies == 0, "validated under a copy"
        import_.advance(ImportState.VALIDATING, now)

    def ready(self, import_: Import, now: float) -> None:
        """Notes that the Release was valid: VALIDATING to READY. The references pass to the caller."""
        self._require_live(import_)
        import_.advance(ImportState.READY, now)
        del self._imports[import_]

    def drain(self, import_: Import, now: float) -> bool:
        """Gives the import up; it is FREED at once, or when its last copy ends.

        Returns False if it is READY, or was given up before.
        """
        if import_.given_up or import_.state is ImportState.READY:
            return False
        import_.advance(ImportState.DRAINING, now)
        self._free_if_quiet(import_, now)
        return True

    def _free_if_quiet(self, import_: Import, now: float) -> None:
        if import_.num_copies == 0:
            import_.advance(ImportState.FREED, now)
            del self._imports[import_]
            self._on_freed(import_)

    def _require_live(self, import_: Import) -> None:
        if import_.given_up:
            raise Cancelled("the import was given up")
