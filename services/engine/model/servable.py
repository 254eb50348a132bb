"""Decides whether a model can be served, from its configuration and from what its layers pass to attention.

Owns: the rules, and the reasons in UnsupportedModel. Never: whether the served model computes the right numbers, which
`verification` checks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig, PreTrainedModel

from services.core.errors import UnsupportedModel
from services.engine.model.paged_model import ModelShape, attending

logger = logging.getLogger(__name__)

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_SUPPORTED_ARGUMENTS = {"scaling", "sliding_window", "softcap"}
"""Arguments of the attention function that `attention.paged.Scoring` carries."""
_IGNORED_ARGUMENTS = {
    "dropout",  # zero outside of training
    "is_causal",
    "position_ids",  # applied before attention
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "token_type_ids",
    "position_bias_cache",
}
"""Arguments of the attention function that change nothing when a trained model serves."""


def check_config(config: PreTrainedConfig) -> None:
    """Raises UnsupportedModel if the configuration alone shows that the model cannot be served."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{config.model_type} is an encoder-decoder model")
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", False):
        raise UnsupportedModel(f"{config.model_type} attends to later tokens")
    other = sorted(set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES)
    if other:
        raise UnsupportedModel(f"{config.model_type} has layers of type {', '.join(other)}")
    if getattr(text, "num_kv_shared_layers", 0):
        raise UnsupportedModel(f"{config.model_type} shares keys and values across layers")
    if "dynamic" in _rope_types(text):
        raise UnsupportedModel(
            f"{config.model_type} scales its rotary embedding with the length of the batch (dynamic)"
        )


def examine(model: PreTrainedModel) -> ModelShape:
    """Runs a few tokens through the model, and returns its shape, as the calls of the attention function show it.

    Raises UnsupportedModel if the model does not run, or passes to attention what the engine does not support.
    """
    kind = model.config.model_type
    if not model._supports_attention_backend:
        raise UnsupportedModel(f"{kind} does not support transformers' attention interface")
    observer = _Observer(kind)
    device = model.device
    tokens = torch.arange(1, 5, device=device)[None]
    try:
        with torch.inference_mode(), attending(observer):
            logits = model(input_ids=tokens, position_ids=tokens - 1, use_cache=False).logits
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise UnsupportedModel(f"{kind} cannot run a sequence with given positions: {error}") from error
    text = model.config.get_text_config(decoder=True)
    num_layers = len(observer.calls)
    if num_layers != text.num_hidden_layers:
        raise UnsupportedModel(f"{kind}: {num_layers} of {text.num_hidden_layers} layers use the attention interface")
    if len(set(observer.calls)) != 1:
        raise UnsupportedModel(f"{kind} has layers of different heads or dimensions: {sorted(set(observer.calls))}")
    num_heads, num_kv_heads, head_dim = observer.calls[0]
    return ModelShape(
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=logits.shape[-1],
        max_model_len=_max_model_len(text),
        eos_token_ids=_eos_token_ids(model),
        dtype=model.dtype,
    )


@dataclass(slots=True)
class _Observer:
    """Records the calls of attention in one forward pass, and attends over the tokens of that pass. It is an `Attend`.

    A call raises UnsupportedModel if it needs what the engine's attention does not do.
    """

    kind: str
    """The model's type, for error messages."""
    calls: list[tuple[int, int, int]] = field(default_factory=list)
    """Numbers of each call: (query heads, key heads, head dimension)."""
    _keys: list[Tensor] = field(default_factory=list)
    """Keys of each call, by which layers that share them are found."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        unknown = sorted(
            name
            for name, given in kwargs.items()
            if given is not None and name not in _SUPPORTED_ARGUMENTS | _IGNORED_ARGUMENTS
        )
        if unknown:
            raise UnsupportedModel(f"{self.kind} passes unsupported arguments to attention: {', '.join(unknown)}")
        if mask is not None or not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
            raise UnsupportedModel(f"{self.kind} has attention that is not plainly causal")
        if query.shape[-1] != key.shape[-1] or key.shape != value.shape:
            shapes = ", ".join(str(tuple(part.shape[1::2])) for part in (query, key, value))
            raise UnsupportedModel(
                f"{self.kind} has queries, keys and values of different heads or dimensions: {shapes}"
            )
        if any(key is other for other in self._keys):
            raise UnsupportedModel(f"{self.kind} shares keys and values across layers")
        self._keys.append(key)
        self.calls.append((query.shape[1], key.shape[1], key.shape[-1]))
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2)


def _rope_types(text: PreTrainedConfig) -> set[str]:
    parameters = getattr(text, "rope_parameters", None) or {}
    # A model has either one set of parameters, or one for each type of layer.
    sets = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    return {str(part["rope_type"]) for part in sets if "rope_type" in part}


def _max_model_len(text: PreTrainedConfig) -> int:
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise UnsupportedModel(f"{text.model_type} does not say how many positions it has")
    if "longrope" in _rope_types(text):
        # In a longer sequence transformers uses other factors for all its tokens (LongRoPE, arXiv 2402.13753), and the
        # keys in the pool, which were computed with the first ones, would be wrong.
        original = text.rope_parameters.get("original_max_position_embeddings") or positions
        logger.info("positions are limited to %d, where longrope changes its factors", original)
        return int(min(positions, original))
    return positions


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    for source in (model.generation_config, model.config.get_text_config(decoder=True)):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return (eos,) if isinstance(eos, int) else tuple(eos)
    return ()
