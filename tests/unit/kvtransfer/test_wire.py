"""Tests that announcements which carry blocks are what protobuf makes of them, and that their bytes are not copied."""

from __future__ import annotations

from typing import Any

import pytest

from baton.v1 import kvtransfer_pb2, types_pb2
from services.kvtransfer.wire import carrying, response_of

Blocks, Response = kvtransfer_pb2.FetchBlocks, kvtransfer_pb2.FetchResponse
HEAD: dict[str, Any] = {"first_block": 300, "checksums": [1, 1 << 63], "more_follow": True}
DATA = [b"a" * 5, bytes(1000), b"z" * 70_000]


@pytest.mark.parametrize("data", [DATA, DATA[:1], [b""]])
@pytest.mark.parametrize("head", [HEAD, {}])
def test_a_message_that_carries_blocks_is_protobufs_own(head: dict[str, Any], data: list[bytes]) -> None:
    wire = carrying(Blocks(**head), [memoryview(block) for block in data])
    expected = Response(blocks=Blocks(**head, data=data))
    assert Response.FromString(wire) == expected
    for each in (wire, expected.SerializeToString()):
        response, views = response_of(each)
        assert response == Response(blocks=Blocks(**head))
        assert list(map(bytes, views)) == data
        assert all(view.obj is each for view in views), "they lie where they were received"


@pytest.mark.parametrize(
    "response",
    [
        Response(),
        Response(alive=kvtransfer_pb2.FetchAlive()),
        Response(blocks=Blocks()),
        Response(blocks=Blocks(first_block=3, pool_blocks=range(300), checksums=[7] * 300)),
        Response(blocks=Blocks(num_blocks=12)),
        Response(sealed=kvtransfer_pb2.FetchSealed(num_tokens=9, first_token=types_pb2.SequenceTokens(token_ids=[4]))),
    ],
)
def test_other_messages_come_as_they_are(response: kvtransfer_pb2.FetchResponse) -> None:
    assert response_of(response.SerializeToString()) == (response, [])


@pytest.mark.parametrize("before", [b"", Response(blocks=Blocks(data=[b"first"])).SerializeToString()])
def test_a_field_of_another_version_costs_no_block(before: bytes) -> None:
    wire = before + carrying(Blocks(**HEAD), [memoryview(block) for block in DATA])
    unknown = b"\xf8\x01\x07"  # field 31 is 7
    for each in (wire, unknown + wire, wire + unknown):
        _, views = response_of(each)
        assert list(map(bytes, views)) == list(Response.FromString(each).blocks.data)


def test_what_is_cut_off_is_no_message() -> None:
    wire = carrying(Blocks(**HEAD), [b"a" * 5, b"b" * 200])
    for end in range(1, len(wire)):
        with pytest.raises(Exception):  # noqa: B017, PT011  (whatever it is, the runtime makes None of it)
            response_of(wire[:end])
    for more in (b"\xff", b"\x0f"):
        with pytest.raises(Exception):  # noqa: B017, PT011
            response_of(wire + more)
