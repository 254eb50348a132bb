"""Computes a whole Llama-like decoder layer in a dozen calls instead of fifty, on CPUs.

This is only an optimisation. A layer of any class is replaced if it has the submodules of a Llama layer and if, on
random input, the replacement passes the same tensors to attention and has the same output. A feature that is not
supported here (a norm of heads, another gate) adds a submodule or makes a difference, and such a layer stays.
Owns: the replacement and this comparison. Never: which layers of a model are tried (`fast_paths`).
"""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import Tensor, nn

from services.engine.cpu.native_modules import NativeGatedMLP, NativeRMSNorm
from services.engine.cpu.quantised_linear import QuantisedLinear, side_by_side
from services.engine.cpu.replacement import largest_difference, relative_difference
from services.engine.model.paged_model import attending, current_attention
from services.engine.native.bindings import Kernels

logger = logging.getLogger(__name__)

_TOLERANCE = 2.0
"""How many times as much as a part a layer may differ: it rounds more often."""
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NUM_TOKENS = 5
"""Tokens of the random input."""


class NativeDecoderLayer(nn.Module):
    """Computes x += o(attend(rotate(qkv(norm(x))))), then x += down(silu(gate(norm(x))) * up(norm(x))), on a copy of
    its input x. Linear layers with the same input are joined into one."""

    def __init__(self, layer: nn.Module, native: Kernels, head_dim: int, of_attention: dict[str, Any]) -> None:
        """Takes the weights of `layer`, whose norms and MLP are native already.

        of_attention: the keyword arguments that the layer passes to the attention function.
        """
        super().__init__()
        attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
        query, key, value = (_linear(attention, f"{part}_proj") for part in "qkv")
        self._native, self.of_attention = native, of_attention
        self.head_dim = head_dim
        self.num_heads, self.num_kv_heads = (linear.out_features // head_dim for linear in (query, key))
        self.input_layernorm = cast(NativeRMSNorm, layer.get_submodule("input_layernorm"))
        self.post_attention_layernorm = cast(NativeRMSNorm, layer.get_submodule("post_attention_layernorm"))
        self.qkv_proj: nn.Module = _side_by_side(query, key, value)
        self.o_proj: nn.Module = _linear(attention, "o_proj")
        self.gate_up_proj: nn.Module = _side_by_side(_linear(mlp, "gate_proj"), _linear(mlp, "up_proj"))
        self.down_proj: nn.Module = _linear(mlp, "down_proj")
        self.inner_size = _linear(mlp, "down_proj").in_features

    @property
    def linears(self) -> tuple[nn.Module, ...]:
        """Returns the linear layers, in the order in which they compute."""
        return self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj

    @property
    def norms(self) -> tuple[NativeRMSNorm, NativeRMSNorm]:
        """Returns the norms, in the order in which they compute."""
        return self.input_layernorm, self.post_attention_layernorm

    @property
    def alike(self) -> tuple[object, ...]:
        """Returns what layers must share to be computed in one call."""
        return self.num_heads, self.num_kv_heads, self.head_dim, self.inner_size, self.of_attention

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **unused: Any) -> Tensor:
        """Returns the layer's output, [1, num_tokens, hidden_size].

        hidden_states: the same shape. position_embeddings: cosines and sines, [1, num_tokens, head_dim] each.
        """
        num_tokens, num_heads, num_kv_heads = hidden_states.shape[1], self.num_heads, self.num_kv_heads
        sums = hidden_states.clone()
        rows = self.qkv_proj(self.input_layernorm(sums))[0]
        self._native.rotate(rows, num_heads + num_kv_heads, *position_embeddings)
        heads = rows.view(1, num_tokens, -1, self.head_dim).transpose(1, 2)
        query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        mixed = current_attention()(self, query, key, value, None, **self.of_attention)
        attended = self.o_proj(mixed.reshape(1, num_tokens, -1))
        norm = self.post_attention_layernorm
        inner = self._native.add_rms_norm(sums, attended, norm.weight, norm.epsilon, norm.offset)
        gates, inputs = self.gate_up_proj(inner).chunk(2, dim=-1)
        return sums.add_(self.down_proj(self._native.silu_gate(gates, inputs)))


def layer_for(layer: nn.Module, native: Kernels) -> NativeDecoderLayer | None:
    """Returns a replacement for the module, or None if it is no such layer or the replacement's results differ."""
    if {name for name, _ in layer.named_children()} != _LAYER_PARTS:
        return None
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    parts = dict(attention.named_children())
    norms = [layer.get_submodule(f"{place}_layernorm") for place in ("input", "post_attention")]
    head_dim = getattr(attention, "head_dim", None)
    if set(parts) != _ATTENTION_PARTS or not isinstance(head_dim, int) or not isinstance(mlp, NativeGatedMLP):
        return None
    linears = {type(part) for part in (*parts.values(), *mlp.children())}
    if linears not in ({nn.Linear}, {QuantisedLinear}) or not all(isinstance(norm, NativeRMSNorm) for norm in norms):
        return None
    try:
        expected = _Trial(layer, head_dim)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        logger.info("decoder layers are not replaced: they do not run with the arguments of a Llama layer (%s)", error)
        return None
    candidate = NativeDecoderLayer(layer, native, head_dim, expected.options)
    rounds_inputs = QuantisedLinear in linears
    return candidate if _Trial(candidate, head_dim).agrees_with(expected, rounds_inputs=rounds_inputs) else None


def _linear(module: nn.Module, name: str) -> nn.Linear:
    return cast(nn.Linear, module.get_submodule(name))


def _side_by_side(*linears: nn.Linear) -> nn.Module:
    """Returns one linear layer whose output is the outputs of these, joined along the last dimension."""
    if type(linears[0]) is not nn.Linear:
        return side_by_side(cast(tuple[QuantisedLinear, ...], linears))
    weight = torch.cat([linear.weight.detach() for linear in linears])
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if any(linear.bias is not None for linear in linears):
        biases = tuple(torch.zeros_like(each.weight[:, 0]) if each.bias is None else each.bias for each in linears)
        joined.bias = nn.Parameter(torch.cat(biases).detach(), requires_grad=False)
    return joined


class _Trial:
    """Runs a layer once on random input, and records what it passes to attention and its output.

    In place of attention it computes query + value - key, so that each of them has an effect on the output.
    """

    def __init__(self, layer: nn.Module, head_dim: int) -> None:
        self.options: dict[str, Any] = {}
        self._tensors: list[Tensor] = []
        generator = torch.Generator().manual_seed(0)
        weight = layer.get_submodule("input_layernorm").get_parameter("weight")
        inputs = torch.randn(1, _NUM_TOKENS, len(weight), generator=generator).to(weight.dtype)
        angles = torch.rand(1, _NUM_TOKENS, head_dim // 2, generator=generator).repeat(1, 1, 2) * 6
        with attending(self._attend):
            output = layer(inputs, position_embeddings=(angles.cos().to(weight.dtype), angles.sin().to(weight.dtype)))
        self._tensors.append(output)

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        self.options = {name: kwargs.get(name) for name in ("scaling", "sliding_window", "softcap")}
        self._tensors = [query.clone(), key.clone(), value.clone()]
        group = query.shape[1] // key.shape[1]
        mixed = query + value.repeat_interleave(group, dim=1) - key.repeat_interleave(group, dim=1)
        return mixed.transpose(1, 2).contiguous()

    def agrees_with(self, expected: _Trial, *, rounds_inputs: bool) -> bool:
        """Returns whether the inputs of attention and the output are the same, except for roundings."""
        return all(
            found.shape == wanted.shape
            and relative_difference(found, wanted)
            <= _TOLERANCE * largest_difference(found.dtype, rounds_inputs=rounds_inputs)
            for found, wanted in zip(self._tensors, expected._tensors, strict=True)
        )
