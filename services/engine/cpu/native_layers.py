"""Computes all decoder layers of a model in one call of layers.c, on CPUs: between kernels, Python takes a good part of
a step.

This is only an optimisation. The layers are joined if kernels of this project compute all of their parts, if the model
calls them one after the other, and if the joined ones, on random input, write the same to the pool and return the same
as one by one, bit by bit. They still run one by one where the pool keeps another type than theirs, and in steps whose
chunks another kernel attends to.
Owns: the joining and this comparison. Never: what a layer computes (`decoder_layer`, layers.c).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from services.engine.attention.native import NativeAttention, arguments_of
from services.engine.attention.paged import StepLayout
from services.engine.cpu.decoder_layer import NativeDecoderLayer
from services.engine.cpu.packed_linear import NativeLinear
from services.engine.cpu.quantised_linear import QuantisedLinear
from services.engine.model.inputs import StepTokens
from services.engine.model.kv_cache import KVCache, KVShape
from services.engine.model.paged_model import PagedForward, StepAttention, attending, current_attention, scoring_of
from services.engine.native.bindings import Kernels, attends_to
from services.engine.native.layer_arguments import Layer, Layers, Norm, Product, place

logger = logging.getLogger(__name__)

_CONTEXTS = (1, 5, 19)
"""Tokens of the sequences of the trial, each of which decodes one."""
_BLOCK_SIZE = 16


class NativeLayers(nn.Module):
    """Takes the place of all decoder layers of a model."""

    def __init__(self, layers: list[NativeDecoderLayer], native: Kernels, products: list[list[Product]]) -> None:
        """Takes the layers, and the linear layers of each as calls for layers.c."""
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.native, self._products = native, products
        self._layers_in_c = (Layer * len(layers))(
            *(
                Layer(*(Norm(norm.weight.data_ptr(), norm.epsilon, norm.offset) for norm in layer.norms), *calls)
                for layer, calls in zip(layers, products, strict=True)
            )
        )
        self._first = (layers[0],)  # in a tuple, so that it is no second child
        self._dtype = layers[0].input_layernorm.weight.dtype

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **unused: Any) -> Tensor:
        """Returns the output of the last layer, [1, num_tokens, hidden_size]; for the arguments see
        `NativeDecoderLayer`."""
        step = current_attention()
        if self._runs_at_once(step, hidden_states):
            return self._at_once(hidden_states.clone(memory_format=torch.contiguous_format), position_embeddings, step)
        return self.one_by_one(hidden_states, position_embeddings)

    def one_by_one(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the same as `forward`, by calling one layer after the other."""
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings=position_embeddings)
        return hidden_states

    def _runs_at_once(self, step: object, hidden_states: Tensor) -> TypeGuard[PagedForward]:
        return (
            isinstance(step, PagedForward)
            and isinstance(step.attention, StepAttention)
            and isinstance(step.attention.backend, NativeAttention)
            and hidden_states.dtype == self._dtype == step.cache.shape.dtype
            and step.attention.backend.reads_in_place(self._dtype, step.attention.layout)
        )

    def _at_once(self, sums: Tensor, position_embeddings: tuple[Tensor, Tensor], step: PagedForward) -> Tensor:
        """Changes `sums`, the input of the first layer, to the output of the last, and returns it."""
        (first,), num_tokens, dim = self._first, sums.shape[1], sums.shape[2]
        heads, kv_heads, head_dim = first.num_heads, first.num_kv_heads, first.head_dim
        inner = first.inner_size
        widths: tuple[int, ...] = (dim, dim, (heads + 2 * kv_heads) * head_dim, heads * head_dim, 2 * inner, inner)
        memory = sums.new_empty(num_tokens * sum(widths))
        normed, more, qkv, mixed, gates, gated = memory.split([num_tokens * width for width in widths])
        cosines, sines = (each.to(self._dtype).contiguous() for each in position_embeddings)
        layout, tokens = cast(StepAttention, step.attention).layout, step.tokens
        at = step.take_layers(len(self._layers_in_c))
        keys, values = step.cache.keys(at), step.cache.values(at)
        query = qkv.view(num_tokens, -1, head_dim)[:, :heads]
        output, scoring = mixed.view(num_tokens, heads, head_dim), scoring_of(head_dim, first.of_attention)
        attention = arguments_of(query, keys, values, output, layout, scoring)
        places = tokens.slot_blocks * keys.stride(0) + tokens.slot_offsets * keys.stride(1)
        values_at = (values.data_ptr() - keys.data_ptr()) // keys.itemsize
        self.native.layers(
            self._dtype,
            Layers(
                layers=ctypes.addressof(self._layers_in_c),
                attention=ctypes.addressof(attention),
                keys=place(attention, "keys"),
                values=place(attention, "values"),
                pool=keys.data_ptr(),
                places=places.data_ptr(),
                count=len(self._layers_in_c),
                key_stride=2 * values_at,
                values_at=values_at,
                x=sums.data_ptr(),
                cosines=cosines.data_ptr(),
                sines=sines.data_ptr(),
                normed=normed.data_ptr(),
                more=more.data_ptr(),
                qkv=qkv.data_ptr(),
                mixed=mixed.data_ptr(),
                gates=gates.data_ptr(),
                gated=gated.data_ptr(),
                rows=num_tokens,
                dim=dim,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                inner=inner,
            ),
        )
        return sums


@torch.inference_mode()
def join_layers(model: nn.Module, native: Kernels) -> int:
    """Replaces every list of decoder layers in the model by one that computes them in one call, where that computes the
    same; returns how many layers are computed so."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            joined = _joined(child, native) if isinstance(child, nn.ModuleList) else None
            if joined is None or not _same_as_one_by_one(joined):
                continue
            if _runs_in_order(model, lambda: setattr(parent, name, nn.ModuleList([joined]))):  # noqa: B023
                count += len(joined.layers)
            else:
                setattr(parent, name, child)
    return count


def _joined(layers: nn.ModuleList, native: Kernels) -> NativeLayers | None:
    """Returns the layers as one module, or None if layers.c cannot compute them."""
    if not len(layers) or not all(isinstance(layer, NativeDecoderLayer) for layer in layers):
        return None
    found = cast(list[NativeDecoderLayer], list(layers))
    first, dtype = found[0], found[0].input_layernorm.weight.dtype
    if not attends_to(first.num_heads, first.head_dim):
        return None
    if any(each.alike != first.alike for each in found):
        return None
    products = [[_product(linear, dtype) for linear in layer.linears] for layer in found]
    if any(None in calls for calls in products):
        return None
    return NativeLayers(found, native, cast(list[list[Product]], products))


def _product(linear: nn.Module, dtype: torch.dtype) -> Product | None:
    return linear.product(dtype) if isinstance(linear, NativeLinear | QuantisedLinear) else None


def _same_as_one_by_one(joined: NativeLayers) -> bool:
    """Returns whether one decode of a few sequences is the same in both ways, to the last bit, on a pool of random
    numbers."""
    first = cast(NativeDecoderLayer, joined.layers[0])
    dtype, generator = first.input_layernorm.weight.dtype, torch.Generator().manual_seed(0)
    shape = KVShape(len(joined.layers), first.num_kv_heads, first.head_dim, _BLOCK_SIZE, dtype)
    tables = tuple((2 * number, 2 * number + 1) for number in range(len(_CONTEXTS)))
    last = [length - 1 for length in _CONTEXTS]
    slots = [(table[at // _BLOCK_SIZE], at % _BLOCK_SIZE) for table, at in zip(tables, last, strict=True)]
    slot_blocks, slot_offsets = torch.tensor(slots).T
    positions = torch.tensor(last)
    layout = StepLayout(tables, (1,) * len(_CONTEXTS), _CONTEXTS)
    tokens = StepTokens(positions, positions, slot_blocks, slot_offsets, positions)
    hidden = torch.randn(1, len(_CONTEXTS), len(first.input_layernorm.weight), generator=generator).to(dtype)
    angles = torch.rand(1, len(_CONTEXTS), first.head_dim // 2, generator=generator).repeat(1, 1, 2) * 6
    embeddings = angles.cos().to(dtype), angles.sin().to(dtype)
    pool = torch.randn(2 * len(_CONTEXTS), *shape.dimensions, generator=generator).to(dtype)

    def run(compute: Callable[..., Tensor]) -> tuple[Tensor, bytes]:
        cache = KVCache(shape, len(pool), torch.device("cpu"))
        try:
            cache.write_blocks(range(len(pool)), [block.view(torch.uint8).numpy().data for block in pool])
            with attending(PagedForward(tokens, cache, StepAttention(NativeAttention(joined.native), layout))):
                output = compute(hidden, position_embeddings=embeddings)
            return output, b"".join(cache.read_blocks(range(len(pool))))
        finally:
            cache.close()

    (found, written), (expected, wanted) = run(joined), run(joined.one_by_one)
    if torch.equal(found, expected) and written == wanted:
        return True
    logger.warning("decoder layers in one call differ from those one by one, and are not used")
    return False


def _runs_in_order(model: nn.Module, replace: Callable[[], None]) -> bool:
    """Calls `replace`; returns whether the model's output for some tokens is the same before and after."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        group = query.shape[1] // key.shape[1]
        return (query + (key + value).repeat_interleave(group, dim=1)).transpose(1, 2).contiguous()

    def run() -> Tensor:
        tokens = torch.arange(1, 5)[None]
        with attending(attend):
            logits: Tensor = model(input_ids=tokens, position_ids=tokens - 1, use_cache=False).logits
        return logits

    try:
        before = run()
        replace()
        return torch.equal(before, run())
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        logger.info("decoder layers are not computed in one call: %s", error)
        return False
