"""Tests that once a prompt is tokenised nothing is kept of its message but the parameters that are used later."""

from __future__ import annotations

import gc
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from baton.v1 import inference_pb2
from services.router.front.call import TOKEN_BYTES, ByteBudget, Incoming

OF_THE_PROMPT = {
    *("text", "token_ids", "messages", "tools"),
    *("truncate_prompt", "truncate_prompt_tokens", "add_special_tokens"),
}
"""Fields of no use once there are tokens."""


def _unknown(num_bytes: int) -> bytes:
    """Returns a field of bytes that no message has, with the number 2000."""
    tag, size = 2000 << 3 | 2, num_bytes
    data = bytearray()
    for number in (tag, size):
        while number >= 0x80:
            data.append(number & 0x7F | 0x80)
            number >>= 7
        data.append(number)
    return bytes(data) + b"x" * num_bytes


def _filled(message: Message, depth: int = 0) -> None:
    """Gives every field a value that is not its default, and every message in it unknown fields too."""
    for field in message.DESCRIPTOR.fields:
        value = _value(field)
        if field.message_type is not None and field.is_repeated:
            _filled(getattr(message, field.name).add(), depth + 1)
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            _filled(getattr(message, field.name), depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    if depth:
        message.MergeFromString(_unknown(5000))


def _value(field: FieldDescriptor) -> Any:
    kinds = {FieldDescriptor.CPPTYPE_STRING: "x" if field.type == field.TYPE_STRING else b"x"}
    return kinds.get(field.cpp_type, 1)


def _request() -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    _filled(request)
    request.text = "a prompt " * 10_000
    request.MergeFromString(_unknown(60_000))
    return request


def test_every_parameter_is_kept_and_nothing_else() -> None:
    """This holds for whatever fields the message has, also those that are added some day."""
    expected = _request()
    expected.DiscardUnknownFields()
    for name in OF_THE_PROMPT:
        expected.ClearField(name)
    incoming = Incoming(_request())
    incoming.tokenised(7)
    assert incoming.request == expected
    assert incoming.request.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)
    assert incoming.request.ByteSize() < 500


def test_nothing_refers_to_the_message_any_more() -> None:
    """Memory of a protobuf message is freed as a whole: one part of it that is kept keeps all of it."""
    before = _num_messages()
    incoming = Incoming(_request())
    incoming.tokenised(7)
    assert _num_messages() - before == 1
    assert incoming.request.IsInitialized()


def _num_messages() -> int:
    gc.collect()
    return sum(type(each) is inference_pb2.GenerateRequest for each in gc.get_objects())


def test_it_is_charged_for_its_tokens_and_its_constraint() -> None:
    budget = ByteBudget(200_000)
    request = _request()
    request.constraint.Clear()
    request.constraint.json_schema = "x" * 50_000
    with budget.charge() as charge:
        charge.grow(190_000)
        Incoming(request, charge).tokenised(7)
        assert 7 * TOKEN_BYTES + 50_000 < budget.used_bytes < 7 * TOKEN_BYTES + 50_010
