"""Checks what a worker reports of itself: the names by which it is known and dialled have a form, and every number a
range, also that of a field added later. Texts are believed: whoever registers has the cluster token."""

from __future__ import annotations

import re
from collections.abc import Collection

from google.protobuf.message import Message

from baton.v1 import control_pb2, types_pb2
from services.core.addresses import is_dialable
from services.core.config import DAY_S, LEAST_CAPACITY, MOST_CAPACITY
from services.core.errors import InvalidRequest
from services.core.ids import WORKER_ID_FORM, is_worker_id

_DIGEST = re.compile("[0-9a-f]{32}")
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
    """Raises an InvalidRequest that names the field, if a field is out of bounds."""
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
    _check_numbers(worker, "")


def check_loading(worker: control_pb2.LoadingWorker) -> None:
    """Raises an InvalidRequest that names the field, if a field of a worker that loads is out of bounds."""
    check_worker_id("loading.worker_id", worker.worker_id)
    _check_roles("loading.roles", worker.roles)
    if not 0 <= worker.ready_within_ms <= DAY_S * 1000:
        raise InvalidRequest("loading.ready_within_ms", f"is {worker.ready_within_ms}, outside [0, {DAY_S * 1000:.0f}]")


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


def _check_numbers(message: Message, prefix: str) -> None:
    for field in message.DESCRIPTOR.fields:
        name, value = prefix + field.name, getattr(message, field.name)
        if isinstance(value, Message):
            _check_numbers(value, f"{name}.")
        elif isinstance(value, int):
            least, greatest = _NUMBERS.get(name, (0, _MOST))
            if not least <= value <= greatest:
                raise InvalidRequest(f"worker.{name}", f"is {value}, outside [{least}, {greatest}]")
