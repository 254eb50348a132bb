"""All imports of one worker: the destination's side of the handoff.

Owns: the import's states, and the rule of reuse: blocks are freed only when no copy can still write them. Never: the
references behind an import, which `on_freed` makes the owner drop, exactly once; nor I/O. Pure; one thread.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from services.core.errors import Cancelled


class ImportState(enum.Enum):
    RESERVED = "reserved"
    """The blocks are set aside."""
    COPYING = "copying"
    """The fetch is open: copies may be writing."""
    VALIDATING = "validating"
    """Everything was copied; the owner of the lease is asked whether it still held."""
    READY = "ready"
    """It did. The blocks' references pass to the sequence."""
    DRAINING = "draining"
    """Given up; a copy may still be writing."""
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
    """Blocks set aside for one handoff, until a sequence has them or they are free again."""

    owner: Hashable
    """The session it belongs to and ends with."""
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
    """Every method but `drain` raises Cancelled once the import was given up: whoever was working on it stops."""

    def __init__(self, *, on_freed: Callable[[Import], None]) -> None:
        self._on_freed = on_freed
        self._imports: dict[Import, None] = {}

    def __len__(self) -> int:
        """Imports that are neither READY nor FREED."""
        return len(self._imports)

    def __iter__(self) -> Iterator[Import]:
        return iter(list(self._imports))

    def owned_by(self, owner: Hashable) -> list[Import]:
        return [import_ for import_ in self if import_.owner == owner]

    def reserve(self, *, owner: Hashable, block_ids: Sequence[int], now: float) -> Import:
        """Takes over one reference to each block."""
        import_ = Import(owner, tuple(block_ids))
        import_.entered_s[ImportState.RESERVED] = now
        self._imports[import_] = None
        return import_

    def begin(self, import_: Import, now: float) -> None:
        """The fetch opens: RESERVED to COPYING."""
        self._require_live(import_)
        import_.advance(ImportState.COPYING, now)

    def copy_started(self, import_: Import) -> None:
        """A copy is about to be able to write the blocks."""
        self._require_live(import_)
        assert import_.state is ImportState.COPYING, f"copy while {import_.state.name}"
        import_.num_copies += 1

    def copy_ended(self, import_: Import, now: float) -> None:
        """It cannot any more, whatever became of it."""
        assert import_.num_copies > 0, "a copy ended twice"
        import_.num_copies -= 1
        if import_.state is ImportState.DRAINING:
            self._free_if_quiet(import_, now)

    def validate(self, import_: Import, now: float) -> None:
        """Everything was copied: COPYING to VALIDATING."""
        self._require_live(import_)
        assert import_.num_copies == 0, "validated under a copy"
        import_.advance(ImportState.VALIDATING, now)

    def ready(self, import_: Import, now: float) -> None:
        """The Release was valid: VALIDATING to READY, and the caller owns the references."""
        self._require_live(import_)
        import_.advance(ImportState.READY, now)
        del self._imports[import_]

    def drain(self, import_: Import, now: float) -> bool:
        """Gives the import up. It is FREED at once, or when the last copy ends. False if it is READY or given up."""
        if import_.given_up or import_.state is ImportState.READY:
            return False
        import_.advance(ImportState.DRAINING, now)
        self._free_if_quiet(import_, now)
        return True

    def drain_owned(self, owner: Hashable, now: float) -> None:
        """The session is over, and all that it started."""
        for import_ in self.owned_by(owner):
            self.drain(import_, now)

    def _free_if_quiet(self, import_: Import, now: float) -> None:
        if import_.num_copies == 0:
            import_.advance(ImportState.FREED, now)
            del self._imports[import_]
            self._on_freed(import_)

    def _require_live(self, import_: Import) -> None:
        if import_.given_up:
            raise Cancelled("the import was given up")
