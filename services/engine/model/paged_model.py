"""Runs a transformers decoder over the paged pool: all tokens of a step in one row, without padding.

Owns: the attention function that transformers calls (it writes the step's keys and values into the pool and attends
through block tables), and the forward pass. Never: which models can be served (`servable`), sampling, scheduling.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from services.engine.attention.paged import PagedAttention, Scoring
from services.engine.model.inputs import StepInputs
from services.engine.model.kv_cache import KVCache

_NAME = "baton_paged"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers that the engine needs to know of a model."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    """Most tokens of a sequence, prompt and output, that its positions allow."""
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype


class Attend(Protocol):
    """A function that computes attention during one forward pass."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        """Returns [1, num_tokens, heads, head_dim]; query, key and value are [1, heads, num_tokens, head_dim]."""
        ...


# Set around a forward pass. Several engines may run in one process, each on its own thread.
_attend: ContextVar[Attend] = ContextVar("attend")


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Makes the attention function call `attend` inside the `with` block."""
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
    # No mask function is registered under this name, which tells transformers to build no mask at all.
    AttentionInterface.register(_NAME, _attention_function)
    return _NAME


class PagedForward:
    """The `Attend` of one step. The model's layers call it in order, and each call uses the next layer of the pool."""

    def __init__(self, inputs: StepInputs, cache: KVCache, attention: PagedAttention) -> None:
        self._inputs = inputs
        self._cache = cache
        self._attention = attention
        self._rows = cache.rows(inputs.slot_blocks, inputs.slot_offsets)
        self._layer = 0

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        layer = self._layer
        self._layer += 1
        self._cache.write(self._rows[layer], key[0].transpose(0, 1), value[0].transpose(0, 1))
        scale = kwargs.get("scaling")
        scoring = Scoring(
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            sliding_window=kwargs.get("sliding_window"),
            softcap=kwargs.get("softcap"),
        )
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        return self._attention(query[0].transpose(0, 1), keys, values, self._inputs.layout, scoring)[None]


class PagedModel:
    """A transformers model with its shape and its attention backend."""

    def __init__(self, model: PreTrainedModel, shape: ModelShape, attention: PagedAttention) -> None:
        self.shape = shape
        self.module = model
        self._attention = attention
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, cache: KVCache) -> Tensor:
        """Computes the step's tokens and writes their KV; returns the logits of `inputs.sample_rows`: [num_samples,
        vocab_size]."""
        arguments = {"logits_to_keep": inputs.sample_rows} if self._selects_logits else {}
        with attending(PagedForward(inputs, cache, self._attention)):
            logits: Tensor = self.module(
                input_ids=inputs.token_ids[None], position_ids=inputs.positions[None], use_cache=False, **arguments
            ).logits[0]
        return logits if self._selects_logits else logits[inputs.sample_rows]
