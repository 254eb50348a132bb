"""Merging tokens into a request's output by position: nothing lost, nothing repeated. Pure."""

from __future__ import annotations

from services.router.coordinator.book import Book
from services.router.coordinator.events import FinishReason, Tokens
from services.router.coordinator.requests import Request
from services.router.policy import Role


def fits(request: Request, event: Tokens, vocab_size: int) -> bool:
    """Tokens of the model, no gap, what it repeats is what was received, and nothing follows a finish."""
    end = event.position + len(event.token_ids)
    received = request.output[event.position : end]
    return (
        0 <= event.position <= len(request.output)
        and list(event.token_ids[: len(received)]) == received
        and end <= request.max_tokens
        and all(0 <= token_id < vocab_size for token_id in event.token_ids)
        and (event.finish is None or end >= len(request.output))
        and len(event.logprobs) in (0, len(event.token_ids))
    )


def receive(book: Book, request: Request, event: Tokens, now: float) -> bool:
    """Takes what is new; True if anything was."""
    have = len(request.output)
    fresh = event.token_ids[have - event.position :]
    if not fresh:
        return False
    request.output.extend(fresh)
    if request.first_token_s is None:
        request.first_token_s = now
    book.emit_tokens(request, have, fresh, event.logprobs[have - event.position :])
    return True


def finish_if_over(book: Book, request: Request, event: Tokens, now: float) -> None:
    if event.finish is not None:
        note_timings(request, event.finish.timings)
        book.finish(request, event.finish.reason, event.finish.stop_token_id, now)
    elif len(request.output) >= request.max_tokens:
        book.finish(request, FinishReason.LENGTH, None, now)


def made_progress(request: Request, role: Role) -> None:
    request.crashes = [crash for crash in request.crashes if crash.role is not role]


def note_timings(request: Request, timings: object) -> None:
    if timings is not None:
        request.worker_timings.append(timings)
