"""Tells a waiting client where its request is: as a message over gRPC, as a comment of an event stream over HTTP."""

from __future__ import annotations

from baton.v1 import inference_pb2
from services.router.coordinator.progress import LiveProgress, ProgressState

_STATES = {state: f"PROGRESS_STATE_{state.name}" for state in ProgressState}


def message(progress: LiveProgress) -> inference_pb2.Progress:
    return inference_pb2.Progress(state=_STATES[progress.state], position=progress.position, of=progress.of)


def words(progress: LiveProgress) -> str:
    """Returns it as one line."""
    position, of = progress.position, progress.of
    match progress.state:
        case ProgressState.QUEUED:
            return f"waiting, {_ordinal(position or 1)} of {of}"
        case ProgressState.PREFILLING:
            return f"prefilling, {of} tokens" if position is None else f"prefilling, {position} of {of}"
        case ProgressState.HANDOFF:
            return f"waiting for a decode worker, {position} tokens"
        case ProgressState.DECODING:
            return f"decoding, {position} tokens"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
