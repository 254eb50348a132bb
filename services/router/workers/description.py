"""Checks what a worker reports of itself: every string and number of a registration has a bound, and every name a form.

A field added to the messages is bounded here without further code: its text like other text, its numbers like others.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from google.protobuf.message import Message

from baton.v1 import control_pb2, types_pb2
from services.core.addresses import is_dialable
from services.core.config import DAY_S, LEAST_CAPACITY, MOST_CAPACITY
from services.core.errors import InvalidRequest
from services.core.ids import WORKER_ID_FORM, is_worker_id

_DIGEST = re.compile("[0-9a-f]{32}")
_MAX_CHARS = 256
_CHARS = {
    "worker_id": 128,
    "address": 262,
    "shm_socket": 108,
    "host_id": 128,
    "device": 64,
    "fingerprint.numerics": 200,
    "layout.engine": 32,
    "kernels": 512,
}
"""The most characters of fields that have a bound of their own.

The kernel takes 108 bytes for a Unix socket's address.
"""
_MAX_ENTRIES = 64
_MAX_OFFERS = 16
_NUMBERS = {
    "num_blocks": (1, 1 << 30),
    "num_tier_blocks": (0, 1 << 30),
    "max_model_len": (1, 1 << 30),
    "max_num_seqs": (1, 1 << 20),
    "layout.block_size": (1, 1024),
}
_MOST = (1 << 64) - 1
_ROLES = (types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE, types_pb2.WORKER_ROLE_STORE)


def check_description(worker: control_pb2.WorkerDescription) -> None:
    """Raises an InvalidRequest that names the field, if a field is out of bounds.

    Unknown fields of the message are dropped, since they would be kept, and sent on, as long as the worker is known.
    """
    worker.DiscardUnknownFields()
    check_worker_id("worker.worker_id", worker.worker_id)
    _check_roles("worker.roles", worker.roles)
    if not is_dialable(worker.address):
        raise InvalidRequest("worker.address", "is not HOST:PORT that others can dial")
    if not worker.incarnation:
        raise InvalidRequest("worker.incarnation", "is missing")
    if not worker.layout.model_id or worker.layout.model_id != worker.layout.model_id.strip():
        raise InvalidRequest("worker.layout.model_id", "is missing, or has blanks at an end")
    if not _DIGEST.fullmatch(worker.fingerprint.kv):
        raise InvalidRequest("worker.fingerprint.kv", "must be 32 hex digits")
    if worker.HasField("capacity") and not LEAST_CAPACITY <= worker.capacity <= MOST_CAPACITY:
        raise InvalidRequest(
            "worker.capacity", f"is {worker.capacity:g}, outside [{LEAST_CAPACITY:g}, {MOST_CAPACITY:.0f}]"
        )
    _check_fields(worker, "")


def check_loading(worker: control_pb2.LoadingWorker) -> None:
    """Raises an InvalidRequest that names the field, if a field of a worker that loads is out of bounds."""
    check_worker_id("loading.worker_id", worker.worker_id)
    _check_roles("loading.roles", worker.roles)
    if not 0 <= worker.ready_within_ms <= DAY_S * 1000:
        raise InvalidRequest("loading.ready_within_ms", f"is {worker.ready_within_ms}, outside [0, {DAY_S * 1000:.0f}]")
    _check_texts(worker, "loading.")


def _check_roles(field: str, roles: Collection[types_pb2.WorkerRole]) -> None:
    if not roles or len(set(roles)) < len(roles):
        raise InvalidRequest(field, "is empty, or names a role twice")
    if any(role not in _ROLES for role in roles):
        raise InvalidRequest(field, "names an unknown role")
    if types_pb2.WORKER_ROLE_STORE in roles and len(roles) > 1:
        raise InvalidRequest(field, "has another beside that of a store")


def check_worker_id(field: str, worker_id: str) -> None:
    if not is_worker_id(worker_id):
        raise InvalidRequest(field, f"is no worker's name: {WORKER_ID_FORM}")


def check_source(source: types_pb2.KVSource) -> None:
    """Raises an InvalidRequest that names the field, if a text in a worker's KVSource is out of bounds.

    The message is kept with the lease, sent on to another worker, and logged there. Unknown fields are dropped.
    """
    source.DiscardUnknownFields()
    if len(source.offers) > _MAX_OFFERS:
        raise InvalidRequest("source.offers", f"has more than {_MAX_OFFERS} entries")
    _check_texts(source, "source.")


def _check_texts(message: Message, prefix: str) -> None:
    for field, value in message.ListFields():
        for part in value if field.is_repeated else [value]:
            if isinstance(part, Message):
                _check_texts(part, f"{prefix}{field.name}.")
            elif isinstance(part, str):
                _check_text(prefix + field.name, part, _CHARS.get(field.name, _MAX_CHARS))


def _check_fields(message: Message, prefix: str) -> None:
    for field in message.DESCRIPTOR.fields:
        name = prefix + field.name
        value: Any = getattr(message, field.name)
        values = value if field.is_repeated else [value]
        if len(values) > _MAX_ENTRIES:
            raise InvalidRequest(f"worker.{name}", f"has more than {_MAX_ENTRIES} entries")
        for part in values:
            _check(name, part)


def _check(name: str, value: Any) -> None:
    match value:
        case Message():
            _check_fields(value, f"{name}.")
        case str() | bytes():
            _check_text(f"worker.{name}", value, _CHARS.get(name, _MAX_CHARS))
        case int():
            least, greatest = _NUMBERS.get(name, (0, _MOST))
            if not least <= value <= greatest:
                raise InvalidRequest(f"worker.{name}", f"is {value}, outside [{least}, {greatest}]")


def _check_text(name: str, value: str | bytes, most: int) -> None:
    if len(value) > most:
        raise InvalidRequest(name, f"is longer than {most}")
    if isinstance(value, str) and not value.isprintable():
        raise InvalidRequest(name, "has characters that cannot be shown")
