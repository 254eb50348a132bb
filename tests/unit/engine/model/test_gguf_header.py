"""Tests that headers of GGUF files that claim what cannot be are refused at once, with the reason."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from services.core.errors import UnsupportedModel
from services.engine.model.gguf_conversion import convert_gguf
from services.engine.model.gguf_header import check_header

F32, UINT8, UINT32, STRING, ARRAY = 0, 0, 4, 8, 9


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content.encode())) + content.encode()


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return field("a", ARRAY, struct.pack("<IQ", kind, count) + items)


def number(name: str, value: int) -> bytes:
    return field(name, UINT32, struct.pack("<I", value))


def tensor(name: str = "x", dimensions: tuple[int, ...] = (32,), kind: int = F32, offset: int = 0) -> bytes:
    count = len(dimensions)
    return text(name) + struct.pack(f"<I{count}QIQ", count, *dimensions, kind, offset)


ARCHITECTURE = field("general.architecture", STRING, text("llama"))


def header(*entries: bytes, tensors: int = 0, fields: int | None = None, version: int = 3) -> bytes:
    """Returns a header with the architecture and these entries, tensors last, and 200 bytes of data."""
    count = 1 + len(entries) - tensors if fields is None else fields
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + ARCHITECTURE + b"".join(entries) + bytes(200)


BAD = {
    "nothing": (b"", "is empty"),
    "no more than its name": (b"GGUF", "header ends beyond"),
    "another file": (b"PK\3\4" + bytes(99), "does not begin with GGUF"),
    "another version": (header(version=99), "version is 99"),
    "the other byte order": (header(version=3 << 24), "version is 50331648"),
    "too many tensors": (header(tensors=2**60, fields=1), f"{2**60} tensors"),
    "too many fields": (header(fields=2**60), f"{2**60} fields"),
    "more tensors than there are": (header(tensors=60000, fields=1), "has 0 dimensions"),
    "an endless array of numbers": (header(array(UINT8, 2**60)), "more than 4194304 items"),
    "an endless array of texts": (header(array(STRING, 2**60)), "more than 4194304 items"),
    "a long array": (header(array(UINT8, 4_000_000)), "header ends beyond"),
    "many arrays": (header(array(UINT8, 3_000_000, bytes(3_000_000)), array(UINT8, 2_000_000)), "more than 4194304"),
    "arrays of arrays": (header(array(ARRAY, 1, struct.pack("<IQ", ARRAY, 1))), "items of type 9"),
    "a long text": (header(field("a", STRING, struct.pack("<Q", 2**60))), "header ends beyond"),
    "an unknown field": (header(field("a", 77, b"")), "unknown type 77"),
    "an unknown tensor": (header(tensor(kind=4242), tensors=1), "unknown type 4242"),
    "no dimensions": (header(tensor(dimensions=()), tensors=1), "has 0 dimensions"),
    "many dimensions": (header(text("x") + struct.pack("<I", 2**32 - 1), tensors=1), "4294967295 dimensions"),
    "half a block": (header(tensor(dimensions=(31,), kind=2), tensors=1), "no whole blocks"),
    "an empty tensor": (header(tensor(dimensions=(32, 0)), tensors=1), "no whole blocks"),
    "a tensor beyond the end": (header(tensor(offset=2**50), tensors=1), "'x' ends beyond the end"),
    "an offset that wraps": (header(tensor(offset=2**64 - 32), tensors=1), "'x' ends beyond the end"),
    "dimensions that wrap": (header(tensor(dimensions=(2**32, 2**32)), tensors=1), "'x' ends beyond the end"),
    "tensors over the same bytes": (
        header(tensor("x", (16,)), tensor("y", (16,), offset=32), tensors=2),
        "'y' begins within 'x'",
    ),
    "a tensor between": (header(tensor(dimensions=(8,), offset=8), tensors=1), "'x' is not aligned to 32 bytes"),
    "no alignment": (header(number("general.alignment", 0)), "to 0 bytes"),
    "an odd alignment": (header(number("general.alignment", 3)), "to 3 bytes"),
    "a billion layers": (header(number("llama.block_count", 10**9), tensor(), tensors=1), "block_count is 1000000000"),
    "many experts": (header(number("llama.expert_count", 8000), tensor(), tensors=1), "expert_count is 8000"),
    "more experts than its tensors have": (
        header(number("llama.expert_count", 3), tensor(dimensions=(4, 4, 2)), tensors=1),
        "expert_count is 3",
    ),
    "a wide layer": (header(number("llama.embedding_length", 10**9), tensor(), tensors=1), "embedding_length is"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    content, reason = BAD[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModel, match=reason) as refused:
        convert_gguf(path, tmp_path / "out" / "model")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_names_command_no_terminal(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header(tensor(name="\x1b]0;mine\x07", offset=2**40), tensors=1))
    with pytest.raises(UnsupportedModel) as refused:
        check_header(path)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("alignment", [None, 256])
def test_what_the_package_writes_passes(tmp_path: Path, alignment: int | None) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b", "é"])
    writer.add_token_scores([0.0, 1.0, 2.0])
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, np.ones((3, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    check_header(path)
    path.write_bytes(path.read_bytes()[:-600])  # with an alignment there is more padding
    with pytest.raises(UnsupportedModel, match=r"'output.weight' ends beyond the end of the file"):
        check_header(path)
