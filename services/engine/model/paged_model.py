"""Runs a transformers decoder over the paged pool (PagedAttention, Kwon et al., arXiv 2309.06180).

All tokens of a step are one row of the model's batch, without padding.
Owns: the attention function that transformers calls (it writes the step's keys and values into the pool and attends
through block tables), and the forward pass. Never: which models can be served (`servable`), sampling, scheduling.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from services.engine.attention.paged import PagedAttention, Scoring, StepLayout
from services.engine.model.inputs import StepInputs, StepTokens
from services.engine.model.kv_cache import KVCache

_NAME = "baton_paged"
"""Name of the attention function in transformers' AttentionInterface."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Keeps the numbers that the engine needs to know of a model."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    """Most tokens of a sequence, prompt and output, for which the model has positions."""
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype


class Attend(Protocol):
    """Computes attention during one forward pass, once for each layer."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        """Returns the layer's attention output, [1, num_tokens, num_heads, head_dim].

        query: [1, num_heads, num_tokens, head_dim]; key, value: [1, num_kv_heads, num_tokens, head_dim].
        kwargs: what the model's layer passes, such as scaling, sliding_window and softcap.
        """
        ...


# It is set around a forward pass. A context variable keeps the engines of one process apart, each on its own thread.
_attend: ContextVar[Attend] = ContextVar("attend")


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Makes the attention function call `attend` inside the `with` block, on this thread."""
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


def current_attention() -> Attend:
    """Returns the function given to `attending`, for modules that replace those of transformers."""
    return _attend.get()


def _attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    return _attend.get()(module, query, key, value, attention_mask, **kwargs), None


@cache
def register_attention() -> str:
    """Registers the attention function with transformers, and returns the name under which models find it."""
    # Since no mask function is registered under this name, transformers builds no mask at all.
    AttentionInterface.register(_NAME, _attention_function)
    return _NAME


class LayerAttention(Protocol):
    """Computes one layer's attention of the step's tokens, whose KV is in the pool already."""

    def __call__(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scoring: Scoring) -> Tensor:
        """Returns [num_tokens, num_heads, head_dim]. The arguments are as in `PagedAttention`."""
        ...


@dataclass(frozen=True, slots=True)
class StepAttention:
    """Computes a step's attention with a backend. It is a `LayerAttention`."""

    backend: PagedAttention
    layout: StepLayout

    def __call__(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scoring: Scoring) -> Tensor:
        return self.backend(query, key_cache, value_cache, self.layout, scoring)


class PagedForward:
    """Writes one step's KV into the pool and attends over the pool. It is an `Attend`.

    The model's layers call it in order, and each call uses the next layer of the pool.
    """

    def __init__(self, tokens: StepTokens, cache: KVCache, attention: LayerAttention) -> None:
        self.tokens = tokens
        self.cache = cache
        self.attention = attention
        self._rows: Tensor | None = None  # what `cache.rows` returns, once it is needed
        self._layer = 0

    def take_layers(self, count: int) -> int:
        """Returns the number of the next layer of the pool, and goes on after `count` of them."""
        layer = self._layer
        self._layer += count
        return layer

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        layer = self.take_layers(1)
        dtype = query.dtype
        wanted = self.cache.shape.computed_in(dtype)
        if dtype != wanted:
            query, key, value = query.to(wanted), key.to(wanted), value.to(wanted)
        if self._rows is None:
            self._rows = self.cache.rows(self.tokens.slot_blocks, self.tokens.slot_offsets)
        self.cache.write(self._rows[layer], key[0].transpose(0, 1), value[0].transpose(0, 1))
        scoring = scoring_of(query.shape[-1], kwargs)
        keys, values = self.cache.keys(layer), self.cache.values(layer)
        return self.attention(query[0].transpose(0, 1), keys, values, scoring)[None].to(dtype)


def scoring_of(head_dim: int, arguments: Mapping[str, Any]) -> Scoring:
    """Returns how a layer scores, from the keyword arguments that it passes to attention."""
    scale = arguments.get("scaling")
    return Scoring(
        scale=head_dim**-0.5 if scale is None else scale,
        sliding_window=arguments.get("sliding_window"),
        softcap=arguments.get("softcap"),
    )


class PagedModel:
    """Runs the forward pass of a transformers model, with an attention backend over the pool."""

    def __init__(self, model: PreTrainedModel, shape: ModelShape, attention: PagedAttention) -> None:
        self.shape = shape
        self.module = model
        self._attention = attention
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, cache: KVCache) -> Tensor:
        """Computes the step's tokens, writes their KV to `cache`, and returns the logits of `inputs.logit_rows`:
        [num_rows, vocab_size]."""
        return self.compute(inputs, cache, StepAttention(self._attention, inputs.layout))

    @torch.inference_mode()
    def compute(self, tokens: StepTokens, cache: KVCache, attention: LayerAttention) -> Tensor:
        """Computes the tokens as `forward` does, with this attention."""
        arguments = {"logits_to_keep": tokens.logit_rows} if self._selects_logits else {}
        with attending(PagedForward(tokens, cache, attention)):
            logits: Tensor = self.module(
                input_ids=tokens.token_ids[None], position_ids=tokens.positions[None], use_cache=False, **arguments
            ).logits[0]
        return logits if self._selects_logits else logits[tokens.logit_rows]
