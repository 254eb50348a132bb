"""Bytes counted before they are parsed: protobuf messages, JSON bodies, and the budget of them all."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import inference_pb2
from services.core.errors import InvalidRequest, MalformedMessage, Overloaded
from services.router.front.call import TOKEN_BYTES, ByteBudget, Incoming
from services.router.front.http import body as http_body
from services.rpc import wire_count

DESCRIPTOR = inference_pb2.GenerateRequest.DESCRIPTOR
LIMITS = wire_count.MessageLimits(fields=100, elements=1000, unknown_bytes=50)
FILL = wire_count.SMALL_BYTES


def check(data: bytes, limits: wire_count.MessageLimits = LIMITS) -> None:
    wire_count.check(data, DESCRIPTOR, limits)


def large(**fields: Any) -> inference_pb2.GenerateRequest:
    """Returns a request that is beyond what is small, in one field."""
    return inference_pb2.GenerateRequest(text="x" * FILL, **fields)


def test_a_request_within_the_limits_passes() -> None:
    request = large(request_id="r", priority=-5, truncate_prompt=True)
    request.stopping.stop.extend(["a"] * 10)
    request.stopping.stop_token_ids.extend(range(500))
    request.sampling.temperature = 0.5
    request.sampling.seed = (1 << 64) - 1
    for token_id in range(10):
        request.sampling.logit_bias.add(token_id=token_id, bias=1.5)
    check(request.SerializeToString())


def test_fields_are_counted_at_every_depth() -> None:
    request = large()
    request.stopping.stop.extend([""] * 97)  # with the text, the group and this: 99
    check(request.SerializeToString())
    request.stopping.stop.extend([""] * 3)
    with pytest.raises(InvalidRequest, match="more than 100 fields"):
        check(request.SerializeToString())


def test_packed_numbers_are_counted_whatever_their_length() -> None:
    ids = [5] * 400 + [70_000] * 300 + [-1] * 300
    request = inference_pb2.GenerateRequest(session="x" * FILL, token_ids=inference_pb2.TokenIds(ids=ids))
    check(request.SerializeToString())
    request.token_ids.ids.append(70_000)
    with pytest.raises(InvalidRequest, match="more than 1000 numbers"):
        check(request.SerializeToString())


def test_unknown_fields_are_counted_by_their_bytes_wherever_they_are() -> None:
    unknown = b"\xc2\x0c" + bytes([40]) + b"x" * 40  # field 200
    check(large().SerializeToString() + unknown)
    inside = b"\x3a" + bytes([len(unknown)]) + unknown  # in the stopping parameters
    for data in (unknown + unknown, inside + unknown):
        with pytest.raises(InvalidRequest, match="more than 50 bytes in fields that are not known"):
            check(large().SerializeToString() + data)


def test_what_is_small_is_not_walked_through() -> None:
    check(b"\x2a\x00" * (FILL // 2))
    with pytest.raises(InvalidRequest):
        check(b"\x2a\x00" * (FILL // 2 + 1))


@given(st.binary(max_size=300), st.sampled_from(["before", "after", "inside"]))
def test_any_bytes_are_refused_or_parsed(data: bytes, place: str) -> None:
    text = large().SerializeToString()
    if place == "inside":
        data = b"\x32" + bytes([len(data) & 0x7F | 0x80, len(data) >> 7]) + data
    whole = text + data if place == "after" else data + text
    try:
        check(whole, wire_count.MessageLimits())
    except (InvalidRequest, MalformedMessage):
        return
    try:
        inference_pb2.GenerateRequest.FromString(whole)
    except Exception:  # bad UTF-8, or a number that is too long: the parser says so
        return


# JSON


def body(value: Any) -> bytes:
    return json.dumps({"prompt": value}).encode()


def json_check(data: bytes, max_text_bytes: int = 1 << 20) -> None:
    http_body.check_counts(data, max_text_bytes)


def test_what_stands_in_strings_is_no_list() -> None:
    json_check(body("[{," * 100_000))
    json_check(body('\\"[[[[' * 50_000))
    json_check(body([[1, 2, 3], "x" * http_body.SMALL_BYTES]))


@pytest.mark.parametrize("entry", [{}, [], [[]], {"a": {}}], ids=str)
def test_lists_and_objects_are_counted(entry: Any) -> None:
    with pytest.raises(MalformedMessage, match="more than 16384 lists and objects"):
        json_check(body([entry] * 40_000))


def test_nesting_is_counted() -> None:
    for data in (b"[" * 100_000, b'{"a":' * 100_000):
        with pytest.raises(MalformedMessage, match="lists and objects"):
            json_check(data)


def test_strings_are_counted() -> None:
    for many in ([""] * 40_000, dict.fromkeys(map(str, range(20_000)), 0)):
        with pytest.raises(MalformedMessage, match="more than 16384 strings"):
            json_check(body(many))


def test_entries_are_counted() -> None:
    json_check(body([1] * (1 << 20)))
    with pytest.raises(MalformedMessage, match=f"more than {http_body.MAX_ENTRIES} entries"):
        json_check(body([1] * (http_body.MAX_ENTRIES + 2)))


@given(st.text(max_size=50), st.booleans())
def test_a_string_is_never_taken_for_longer_than_it_is(piece: str, ascii_only: bool) -> None:
    """Therefore nothing is refused here that would be accepted."""
    text = (piece or "x") * 2000
    data = json.dumps({"prompt": text}, ensure_ascii=ascii_only).encode()
    json_check(data, len(text.encode(errors="surrogatepass")))


def test_a_string_that_is_too_long_however_it_is_written() -> None:
    for text in ("x" * 100_000, "\n" * 100_000, "é" * 100_000):
        for ascii_only in (False, True):
            with pytest.raises(MalformedMessage, match="a string of more than 50000 bytes"):
                json_check(json.dumps({"prompt": text}, ensure_ascii=ascii_only).encode(), 50_000)


@pytest.mark.parametrize("end", [b"", b"\\", b'\\"', b'\\\\\\"', b'"', b'", "b": "'])
def test_what_ends_too_early_is_left_to_the_parser(end: bytes) -> None:
    json_check(b'{"prompt": "' + b"x" * http_body.SMALL_BYTES + end)


@given(st.binary(max_size=300))
def test_any_bytes_come_to_an_end(data: bytes) -> None:
    try:
        json_check(data + b'"\\' * (http_body.SMALL_BYTES // 2) + data)
    except MalformedMessage:
        return


# Memory

MIB = 1 << 20
SHAPES: dict[str, bytes] = {
    "objects": body([{}] * (MIB // 4)),
    "lists": body([[]] * (MIB // 4)),
    "nested": b'{"prompt": ' + b"[" * MIB,
    "strings": body(["ab"] * (MIB // 6)),
    "keys": json.dumps(dict.fromkeys(map(str, range(MIB // 8)), 0)).encode(),
    "a text": body("x" * MIB),
    "escapes": body("\n" * (MIB // 2)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_refused_takes_little_more_than_its_bytes(shape: str) -> None:
    """Parsed, it would take up to thirty times as much."""
    assert _peak_bytes(lambda: json_check(SHAPES[shape], MIB // 4)) < 3 * len(SHAPES[shape])


def test_a_message_that_is_refused_takes_little_more_than_its_bytes() -> None:
    stops = inference_pb2.GenerateRequest()
    stops.stopping.stop.extend([""] * (MIB // 2))
    for data in (stops.SerializeToString(), b"\xc2\x0c\x00" * (MIB // 3)):
        assert _peak_bytes(lambda data=data: check(data)) < 2 * len(data)  # type: ignore[misc]


def _peak_bytes(reading: Callable[[], None]) -> int:
    tracemalloc.start()
    try:
        with pytest.raises((InvalidRequest, MalformedMessage)):
            reading()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# The budget


def test_charges_share_one_budget_and_give_back_what_they_had() -> None:
    freed: list[int] = []
    budget = ByteBudget(4 << 20, freed=lambda: freed.append(budget.used_bytes))
    with budget.charge() as one, budget.charge() as other:
        one.grow(3 << 20)
        other.grow(1 << 20)
        with pytest.raises(Overloaded) as refused:
            other.grow(1)
        assert refused.value.retry_after_s
        assert other.num_bytes == 1 << 20, "as before"
        one.become(10)
        assert budget.used_bytes == (1 << 20) + 10
        other.grow(1)
    assert budget.used_bytes == 0
    assert len(freed) == 2, "of what is small nobody is told"


def test_a_tokenised_request_has_its_parameters_and_nothing_else() -> None:
    budget = ByteBudget(1 << 20)
    request = inference_pb2.GenerateRequest(text="x" * 1000, request_id="r", model="m", priority=0, session="s")
    request.sampling.temperature = 0.5
    request.stopping.stop.append("end")
    request.response.echo_token_ids = True
    sampled = inference_pb2.GenerateRequest.FromString(request.SerializeToString() + b"\x32\x03\xc2\x0c\x00")
    with budget.charge() as charge:
        incoming = Incoming(sampled, charge)
        incoming.tokenised(10)
        assert budget.used_bytes == 10 * TOKEN_BYTES
    request.ClearField("text")
    assert incoming.request == request
    assert incoming.request.SerializeToString(deterministic=True) == request.SerializeToString(deterministic=True)
    assert incoming.request.HasField("priority"), "what was said is still said"
    assert {field.name for field, _ in incoming.request.ListFields()} == {
        *("request_id", "model", "priority", "session", "sampling", "stopping", "response")
    }


def test_a_text_beyond_the_limit_is_refused_by_its_length_alone() -> None:
    """Its bytes are no UTF-8 even: nobody has looked at them."""
    num_bytes = wire_count.SMALL_BYTES + 1
    size = bytes([num_bytes & 0x7F | 0x80, num_bytes >> 7 & 0x7F | 0x80, num_bytes >> 14])
    number = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name["text"].number
    data = bytes([number << 3 | 2]) + size + b"\xff" * num_bytes
    check(data, wire_count.MessageLimits(text_bytes=num_bytes))
    with pytest.raises(InvalidRequest, match="bytes of text"):
        check(data, wire_count.MessageLimits(text_bytes=num_bytes - 1))
