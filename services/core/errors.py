"""Defines every error that Baton names, in one tree.

Owns: the errors, each with the machine-readable reason that reaches clients as `google.rpc.ErrorInfo.reason`.
Never: gRPC; the table of their statuses is `services/rpc/status.py`, and a test checks that it has every leaf.
"""

from __future__ import annotations

_MAX_QUOTED_CHARS = 200
"""Most characters of an exception's message that another error's message quotes."""


class BatonError(Exception):
    """Is the root of all errors. `reason` is stable and upper case; the message is for people."""

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
        """Returns the error in OpenAI's words, since clients look for them; `asked` says what the request wants, in
        tokens."""
        return cls(field, f"This model's maximum context length is {context_tokens} tokens; {asked}")


class ConstraintUnsatisfied(BatonError):
    """No token may follow a request's output: its constraint leaves none, or only such as the request's other
    parameters rule out."""

    reason = "CONSTRAINT_UNSATISFIED"


class Unauthenticated(BatonError):
    """The call needs the cluster token or a certificate of a role, and came without it or with another."""

    reason = "UNAUTHENTICATED"


class InvalidKey(BatonError):
    """The caller has no API key, or one that is no tenant's, or one that has expired."""

    reason = "INVALID_API_KEY"


class ModelNotAllowed(BatonError):
    """The caller's tenant may not use this model, whether it is served or not."""

    reason = "MODEL_NOT_ALLOWED"


class MalformedMessage(BatonError):
    """The bytes cannot be read as the message that was expected."""

    reason = "MALFORMED_MESSAGE"


class MessageTooLarge(BatonError):
    """The request has more bytes than one may have. Over gRPC the runtime refuses it before Baton's code sees it."""

    reason = "MESSAGE_TOO_LARGE"


class UnknownModel(BatonError):
    reason = "UNKNOWN_MODEL"


class UnknownWorker(BatonError):
    reason = "UNKNOWN_WORKER"


class UnknownRequest(BatonError):
    """Nothing is remembered of a request of that id."""

    reason = "UNKNOWN_REQUEST"


class WorkerIdInUse(BatonError):
    """Another live process has this worker id."""

    reason = "WORKER_ID_IN_USE"


class Overloaded(BatonError):
    """The queue is full or the blocks are full: the client may try again later."""

    reason = "OVERLOADED"


class QuotaExceeded(BatonError):
    """The tenant has used all that one of its limits allows. `subject` is the tenant and `limit` the limit's name."""

    reason = "QUOTA_EXCEEDED"

    def __init__(self, message: str, *, subject: str = "", limit: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.subject = subject
        self.limit = limit


class NoWorker(BatonError):
    """No worker is ready, or none became ready in time."""

    reason = "NO_WORKER"


class Draining(BatonError):
    reason = "DRAINING"


class RoleGone(BatonError):
    """Says that a worker takes no commands for a phase any more. Its router may not have learned that yet."""

    reason = "ROLE_GONE"


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
    """The engine cannot serve this model, or a worker cannot give its text side; the message says why."""

    reason = "UNSUPPORTED_MODEL"


class TransferFailed(BatonError):
    """The other end of a transfer cannot be reached, broke off or fell silent. The lease may still be alive."""

    reason = "TRANSFER_FAILED"


class CorruptBlock(BatonError):
    reason = "CHECKSUM"


class WrongOutput(BatonError):
    """The output may come from a worker that was found to compute wrong, and the client has some of it already."""

    reason = "WRONG_OUTPUT"


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


class SequencePreempted(BatonError):
    """An engine that does not compute it again has taken a sequence's blocks for others. Nobody is at fault."""

    reason = "PREEMPTED"


class ConfigError(BatonError):
    """A flag or environment variable is wrong. The message names it."""

    reason = "CONFIG"


def forget_frames(error: BaseException) -> None:
    """Drops the tracebacks of an error that has been answered, and of those it came from.

    Their frames hold the request and often the error itself, a cycle that only a full garbage collection would end.
    """
    found, seen = [error], set[int]()
    while found:
        one = found.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        found += [linked for linked in (one.__cause__, one.__context__) if linked is not None]
        if isinstance(one, BaseExceptionGroup):
            found += one.exceptions


def unforeseen(error: Exception) -> BatonError:
    """Returns the error that a request gets when Baton has a defect: a plain `BatonError`, which is INTERNAL and opaque
    to clients. It names the exception for the log but does not keep it, since its frames hold whatever the request was
    working on."""
    return BatonError(f"unforeseen: {type(error).__name__}: {str(error)[:_MAX_QUOTED_CHARS]}")
