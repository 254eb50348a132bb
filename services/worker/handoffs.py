"""Takes handoffs in, whatever becomes of them: what a decode leg and a store's leg have in common.

Owns: whether a handoff is admitted, that what a source seals is what the command says, and how such a leg speaks to its
router. Never: whose the blocks are afterwards.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from baton.v1 import types_pb2, worker_pb2
from services.core.config import DAY_S
from services.core.errors import BatonError, LayoutMismatch, ProtocolViolation
from services.kv.handoff_admission import AdmissionPolicy, EngineRoom, Refusal
from services.kvtransfer.client import FetchOrder, FetchOutcome, lease_may_live
from services.kvtransfer.wire import layout_from_proto
from services.rpc.logging import ids
from services.rpc.parameters import are_logprobs
from services.rpc.status import to_status
from services.worker.host import WorkerHost
from services.worker.session import RouterSession

log = logging.getLogger(__name__)

FirstTokens = tuple[types_pb2.SequenceTokens, ...]
"""The first token of each answer, by index."""


class Refused(BatonError):
    """Says that there is no room for the handoff now."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal

    def event(self, leg: int) -> worker_pb2.LegEvent:
        """Returns the event that tells the router."""
        refusal = self.refusal
        refused = worker_pb2.DecodeRefused(
            leg=leg, needed_blocks=refusal.needed_blocks, missing_blocks=refusal.missing_blocks
        )
        return worker_pb2.LegEvent(refused=refused)


@dataclass(frozen=True, slots=True)
class Expected:
    """Says what a lease must bring, by the router's command."""

    num_tokens: int
    """Tokens that its KV covers."""
    num_answers: int
    """First tokens of its seal."""
    output_base: int
    """Output position of these."""


class HandoffLeg:
    """Tells a router what becomes of a leg that takes a handoff in. The leg itself says how it is given up."""

    def __init__(
        self, host: WorkerHost, session: RouterSession, command: worker_pb2.DecodeCommand | worker_pb2.ParkCommand
    ) -> None:
        self.number = command.leg
        self._host = host
        self._session = session
        self._ids = ids(command.request_id, command.traceparent)
        self._over = False
        """Whether the router has given the leg up, or has been told that it failed: it hears no more of it."""

    def cancel(self) -> None:
        """Gives the leg up."""
        raise NotImplementedError

    def _emit(self, event: worker_pb2.LegEvent) -> None:
        self._session.emit(event)
        self._session.flush()

    def _import_failed(self, error: Exception) -> None:
        """Counts an import that failed, and tells the router unless the leg is over."""
        if not isinstance(error, BatonError):
            self._host.defect(error)
        if not self._over:
            reason = error.reason if isinstance(error, BatonError) else BatonError.reason
            self._host.tally.transfers_failed[reason.lower()] += 1
            failed = worker_pb2.ImportFailed(
                leg=self.number, lease_alive=lease_may_live(error), status=to_status(error)
            )
            self._emit(worker_pb2.LegEvent(import_failed=failed))
            self._log(logging.WARNING, f"import failed: {error}")
        # The stream that it ended keeps it, and in its traceback's frames are the stream, the leg and the import: all
        # that would stay until Python collects garbage.
        error.__traceback__ = error.__cause__ = None

    def _fail(self, error: Exception) -> None:
        if not self._over:
            failed = worker_pb2.LegFailed(leg=self.number, status=to_status(error))
            self._emit(worker_pb2.LegEvent(failed=failed))
            self._log(logging.WARNING, f"failed: {error}")
        self.cancel()

    def _log(self, level: int, what: str) -> None:
        log.log(level, "leg %d: %s", self.number, what, extra=self._ids)


class HandoffIntake:
    """Admits handoffs at one worker, and fetches them."""

    def __init__(self, host: WorkerHost, policy: AdmissionPolicy) -> None:
        self._host = host
        self._policy = policy

    def demand_layout(self, handoff: worker_pb2.Handoff) -> None:
        """Raises LayoutMismatch if the source's layout is another than this worker's."""
        mismatch = self._host.layout.mismatch(layout_from_proto(handoff.source.layout))
        if mismatch is not None:
            raise LayoutMismatch(mismatch)

    def check(
        self, handoff: worker_pb2.Handoff, needed_blocks: int, age_ms: int, room: EngineRoom, num_answers: int
    ) -> None:
        """Raises Refused if the handoff may not take this number of blocks now."""
        refusal = self._policy.decide(
            handoff.lease_id,
            needed_blocks,
            min(max(0.0, age_ms / 1000), DAY_S),
            room,
            len(self._host.imports),
            self._host.awake.now(),
            num_answers=num_answers,
        )
        if refusal is not None:
            raise Refused(refusal)

    async def fetch(self, order: FetchOrder, expected: Expected) -> FetchOutcome:
        """Fetches the blocks. Raises what `BlockFetcher.fetch` does, and ProtocolViolation if the seal contradicts the
        command; the import may be READY then."""
        outcome = await self._host.fetcher.fetch(order)
        if outcome.ready and (contradiction := self._contradiction(expected, outcome)) is not None:
            raise ProtocolViolation(contradiction)
        return outcome

    def _contradiction(self, expected: Expected, outcome: FetchOutcome) -> str | None:
        """Returns what is wrong with a source's seal, or None if nothing is.

        A wrong token or length would fail a step, and with it other sequences.
        """
        if outcome.num_tokens != expected.num_tokens:
            return f"the lease is of {outcome.num_tokens} tokens, not of {expected.num_tokens}"
        first_tokens = (outcome.first_token, *outcome.other_first_tokens)
        if len(first_tokens) != expected.num_answers:
            return f"the lease is of {len(first_tokens)} answers, not of {expected.num_answers}"
        vocab_size = self._host.engine.info.vocab_size
        for tokens in first_tokens:
            if len(tokens.token_ids) != 1 or not 0 <= tokens.token_ids[0] < vocab_size:
                return "the seal does not bring one token of the vocabulary"
            # This worker repeats what the source says, and would be taken for the one that is wrong.
            if tokens.position != expected.output_base or len(tokens.logprobs) > 1 or not are_logprobs(tokens.logprobs):
                return "the seal does not bring the first token, with log-probabilities or without"
        return None
