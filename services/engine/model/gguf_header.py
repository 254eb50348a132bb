"""Checks the header of a GGUF file before the package `gguf` and transformers read it.

These believe what a header says: an array of 2^60 numbers in a file of a hundred bytes keeps them busy for ever, and a
tensor that begins beyond the end of the file is read from its beginning. So each count, length and offset is compared
with the file here, in time and memory that the file's size bounds.
The format is that of ggml (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian.
Owns: these limits. Never: what the fields mean, or which models can be converted (`gguf_conversion`).
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from services.core.errors import UnsupportedModel
from services.core.printable import printable

_VERSIONS = (2, 3)
_MOST_HEADER_BYTES = 256 << 20
_MOST_FIELDS, _MOST_TENSORS = 1 << 16, 1 << 16
_MOST_ITEMS = 1 << 22
"""Most items of all arrays together. Vocabularies of 262,144 tokens, with scores, types and merges, have 1.3 million; a
million take the package `gguf` seconds and a quarter of a gigabyte."""
_MOST_DIMENSIONS = 4
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The types of numbers, by their codes, as `struct` names them."""
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_WIDTHS = ("embedding_length", "feed_forward_length")
"""Fields of an architecture that are a dimension of some tensor."""


def check_header(path: Path) -> None:
    """Raises UnsupportedModel, with the reason, if the header says what cannot be so in a file of this size."""
    with open(path, "rb") as file:
        try:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise UnsupportedModel(f"{path} is empty") from error
        with content:
            try:
                _check(_Header(content))
            except ValueError as error:
                raise UnsupportedModel(f"{path} is damaged: {printable(str(error))}") from error


class _Header:
    """Reads numbers and texts one after the other. Its methods raise ValueError where the header would go on beyond the
    end of the file."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.place = 0
        self.num_items = 0
        """Items of all arrays so far."""

    def skip(self, num_bytes: int) -> int:
        """Goes on by a number of bytes; returns the place before them."""
        place, self.place = self.place, self.place + num_bytes
        if self.place > len(self.content):
            raise ValueError("its header ends beyond the end of the file")
        if self.place > _MOST_HEADER_BYTES:
            raise ValueError(f"its header has more than {_MOST_HEADER_BYTES >> 20} MiB")
        return place

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from(f"<{form}", self.content, self.skip(struct.calcsize(f"<{form}")))
        return int(value) if form not in "fd" else 0  # no fraction is compared with anything

    def text(self) -> str:
        length = self.number("Q")
        place = self.skip(length)
        return self.content[place : place + min(length, _MOST_HEADER_BYTES)].decode(errors="replace")

    def value(self, kind: int) -> int | str | None:
        """Returns a field's value; None for an array, which is only counted."""
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            self._pass_array()
            return None
        raise ValueError(f"a field has the unknown type {kind}")

    def _pass_array(self) -> None:
        kind, count = self.number("I"), self.number("Q")
        self.num_items += count
        if self.num_items > _MOST_ITEMS:
            raise ValueError(f"its arrays have more than {_MOST_ITEMS} items")
        if kind in _NUMBERS:
            self.skip(count * struct.calcsize(f"<{_NUMBERS[kind]}"))
        elif kind == _STRING:
            for _ in range(count):
                self.skip(self.number("Q"))
        else:
            raise ValueError(f"an array has items of type {kind}")


def _check(header: _Header) -> None:
    if header.content[header.skip(4) : 4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = header.number("I")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}, and only {' and '.join(map(str, _VERSIONS))} are read")
    num_tensors, num_fields = header.number("Q"), header.number("Q")
    if num_tensors > _MOST_TENSORS or num_fields > _MOST_FIELDS:
        raise ValueError(f"it claims {num_tensors} tensors and {num_fields} fields")
    fields: dict[str, int | str | None] = {}
    for _ in range(num_fields):
        name = header.text()
        fields[name] = header.value(header.number("I"))
    tensors = [_tensor(header) for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"it aligns tensors to {alignment} bytes")
    room = len(header.content) - -(-header.place // alignment) * alignment
    end, before = 0, ""
    for name, _, offset, num_bytes in sorted(tensors, key=lambda tensor: tensor[2]):
        if offset + num_bytes > room:
            raise ValueError(f"the tensor {name!r} ends beyond the end of the file")
        if offset % alignment:
            raise ValueError(f"the tensor {name!r} is not aligned to {alignment} bytes")
        if offset < end:  # many tensors over the same bytes would be converted to many times the file
            raise ValueError(f"the tensor {name!r} begins within {before!r}")
        end, before = offset + num_bytes, name
    _check_sizes(fields, [dimensions for _, dimensions, _, _ in tensors])


def _tensor(header: _Header) -> tuple[str, list[int], int, int]:
    """Reads the entry of a tensor; returns its name, dimensions, offset, and number of bytes."""
    name, num_dimensions = header.text(), header.number("I")
    if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
        raise ValueError(f"the tensor {name!r} has {num_dimensions} dimensions")
    dimensions = [header.number("Q") for _ in range(num_dimensions)]
    kind, offset = header.number("I"), header.number("Q")
    if kind not in set(GGMLQuantizationType):
        raise ValueError(f"the tensor {name!r} has the unknown type {kind}")
    num_weights, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if not all(dimensions) or dimensions[0] % num_weights:
        raise ValueError(f"the tensor {name!r} has dimensions {dimensions}, which are no whole blocks")
    return name, dimensions, offset, math.prod(dimensions) // num_weights * num_bytes


def _check_sizes(fields: dict[str, int | str | None], shapes: list[list[int]]) -> None:
    """Compares the sizes of the model with those of its tensors, since the model is made before they are read."""
    architecture, num_tensors = fields.get("general.architecture"), len(shapes)
    limits = {"block_count": num_tensors, **dict.fromkeys(_WIDTHS, max((max(shape) for shape in shapes), default=0))}
    # The experts of a layer are one tensor, with a dimension more, or a tensor each.
    limits["expert_count"] = max((shape[2] for shape in shapes if len(shape) > 2), default=num_tensors)
    for name, limit in limits.items():
        found = fields.get(f"{architecture}.{name}")
        if isinstance(found, int) and found > limit:
            raise ValueError(f"{architecture}.{name} is {found}, which none of its {num_tensors} tensors bears out")
