"""The one tree of errors.

Owns: every failure Baton names, with the machine-readable reason that reaches clients as
`google.rpc.ErrorInfo.reason`. Never: gRPC; the leaf-to-status table is `services/rpc/status.py`, and a test
checks that each leaf is in it.
"""

from __future__ import annotations


class BatonError(Exception):
    """Root. `reason` is stable and upper case; the message is for people."""

    reason = "INTERNAL"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class InvalidRequest(BatonError):
    """A parameter is out of range or malformed. `field` is its path in the request message."""

    reason = "INVALID_PARAMETER"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.description = message


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output would be longer than any sequence may be."""

    reason = "CONTEXT_LENGTH_EXCEEDED"

    @classmethod
    def of(cls, field: str, context_tokens: int, asked: str) -> ContextLengthExceeded:
        """`asked`: what the request wants, in tokens. OpenAI's words come first: clients look for them in messages."""
        return cls(field, f"This model's maximum context length is {context_tokens} tokens; {asked}")


class MalformedMessage(BatonError):
    """The bytes are not the message they should be."""

    reason = "MALFORMED_MESSAGE"


class MessageTooLarge(BatonError):
    """More bytes than a request may have. Over gRPC the runtime refuses it before anyone sees it."""

    reason = "MESSAGE_TOO_LARGE"


class UnknownModel(BatonError):
    reason = "UNKNOWN_MODEL"


class UnknownWorker(BatonError):
    reason = "UNKNOWN_WORKER"


class DuplicateRequest(BatonError):
    reason = "DUPLICATE_REQUEST"


class Overloaded(BatonError):
    """Queue full, blocks full or quota spent: try later."""

    reason = "OVERLOADED"


class NoWorker(BatonError):
    """No worker is ready, or none became ready in time."""

    reason = "NO_WORKER"


class Draining(BatonError):
    reason = "DRAINING"


class WorkerFailed(BatonError):
    """Workers kept failing under this request."""

    reason = "WORKER_FAILED"


class LeaseInvalid(BatonError):
    """The lease is unknown, over, or held by a higher leg."""

    reason = "LEASE_INVALID"


class StaleIncarnation(BatonError):
    reason = "STALE_INCARNATION"


class LeaseNotSealed(BatonError):
    reason = "LEASE_NOT_SEALED"


class LayoutMismatch(BatonError):
    reason = "LAYOUT_MISMATCH"


class UnsupportedModel(BatonError):
    """The engine cannot serve this model; the message says why."""

    reason = "UNSUPPORTED_MODEL"


class TransferFailed(BatonError):
    """The other end of a transfer cannot be reached, broke off or fell silent. The lease may still be alive."""

    reason = "TRANSFER_FAILED"


class CorruptBlock(BatonError):
    reason = "CHECKSUM"


class DeadlineExceeded(BatonError):
    reason = "DEADLINE_EXCEEDED"


class Cancelled(BatonError):
    reason = "CANCELLED"


class ProtocolViolation(BatonError):
    """A peer broke the session protocol (a gap in positions, a second hello)."""

    reason = "PROTOCOL_VIOLATION"


class StepFailed(BatonError):
    """A device step raised; only its sequences are affected."""

    reason = "STEP_FAILED"


class ConfigError(BatonError):
    """A flag or environment variable is wrong. The message names it."""

    reason = "CONFIG"
