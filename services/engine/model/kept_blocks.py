"""Keeps the quantised weights of a GGUF file beside the model that it was converted to.

They are found by their values: a linear layer's rows are looked up among the dequantised rows of the file. So neither
the names of tensors nor the order in which a conversion puts rows (rotary positions have another one in GGUF files) has
to be known. Layers of which a row is not found are not kept.
Owns: the file, and that what is kept is the weight. Never: what the bytes mean (`gguf_blocks`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from gguf import GGUFReader
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from services.core.config import KEPT_BLOCKS_FILE
from services.core.errors import UnsupportedModel
from services.engine.model.gguf_blocks import KINDS, grouped_weights
from services.engine.model.grouped_weights import GroupedWeights

logger = logging.getLogger(__name__)

_AT_ONCE = 1 << 22
"""Weights that are dequantised at a time."""


def write(model: nn.Module, gguf: Path, directory: Path) -> None:
    """Writes to `directory` the blocks of all linear layers of the model, which was loaded from the file `gguf`."""
    tensors = [each for each in GGUFReader(gguf).tensors if each.tensor_type.name in KINDS and len(each.shape) == 2]
    kinds = [each.tensor_type.name for each in tensors]
    blocks = [torch.from_numpy(each.data.copy()) for each in tensors]
    places = {
        row: (number, index)
        for number, (kind, rows, each) in enumerate(zip(kinds, blocks, tensors, strict=True))
        for index, row in enumerate(_dequantised(kind, rows, int(each.shape[0])))
    }
    kept, kinds_kept = {}, {}
    for name, module in model.named_modules():
        if type(module) is not nn.Linear:
            continue
        found = [places.get(row) for row in _rows(module.weight)]
        at = [place for place in found if place is not None]
        if len(at) == len(found) and len({kinds[number] for number, _ in at}) == 1:
            kept[name] = torch.stack([blocks[number][index] for number, index in at])
            kinds_kept[name] = kinds[at[0][0]]
    logger.info("%s: the blocks of %d layers are kept", gguf.name, len(kept))
    if kept:
        save_file(kept, directory / KEPT_BLOCKS_FILE, metadata={"kinds": json.dumps(kinds_kept)})


def read(directory: Path) -> Iterator[tuple[str, str, GroupedWeights]]:
    """Yields the name of each layer whose blocks were kept, their GGUF type and the weights; nothing if there are
    none. Raises UnsupportedModel if the file makes no sense."""
    if not (directory / KEPT_BLOCKS_FILE).is_file():
        return
    try:
        yield from _read(directory / KEPT_BLOCKS_FILE)
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise UnsupportedModel(
            f"{directory / KEPT_BLOCKS_FILE} makes no sense ({type(error).__name__}): convert the file again, or give "
            "--quantization none"
        ) from error


def _read(path: Path) -> Iterator[tuple[str, str, GroupedWeights]]:
    with safe_open(path, framework="pt") as file:
        for name, kind in json.loads(file.metadata()["kinds"]).items():
            rows: Tensor = file.get_tensor(name)
            size, _ = KINDS[kind]
            weights_of_block = 256 if kind.endswith("_K") else 32
            yield name, kind, grouped_weights(kind, rows, rows.shape[1] // size * weights_of_block)


def _dequantised(kind: str, rows: Tensor, in_features: int) -> Iterator[bytes]:
    for part in rows.split(max(1, _AT_ONCE // in_features)):
        yield from _rows(grouped_weights(kind, part, in_features).dequantised())


def _rows(weight: Tensor) -> Iterator[bytes]:
    """Yields the bytes of each row in bfloat16, the type that converted models have. All zeros are positive."""
    for row in (weight.detach().bfloat16() + 0.0).contiguous().view(torch.uint8).numpy():
        yield row.tobytes()
