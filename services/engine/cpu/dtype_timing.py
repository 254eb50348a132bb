"""Measures how fast this CPU computes a model in several ways: in the type it was saved in, in float32, and in both
over the quantised weights that it was saved with.

It is the program `python -m services.engine.cpu.dtype_timing MODEL SAVED WAY...`, a process of its own, so that its
memory is freed afterwards. It computes on one thread, counts that thread's processor time, and measures the ways in
turns. So the comparison does not depend on what else runs on this machine, or on how many cores a worker will have.
Owns: the timing, on a model of the same shapes with random weights and only as many layers as the timing needs. Never:
the choice between the ways (`services.cli.dtype_choice`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from services.core.config import KEPT_WEIGHTS, KV_DTYPES
from services.core.hashing import num_blocks_for
from services.core.lifecycle import Lifecycle
from services.engine.attention import choice
from services.engine.cpu.fast_paths import use_fast_paths
from services.engine.cpu.quantisation import quantise_alike
from services.engine.model import servable
from services.engine.model.kv_cache import KVCache, KVShape
from services.engine.model.paged_model import PagedModel, register_attention
from services.engine.model.weights import DTYPES, kv_dtype_of
from services.engine.native.bindings import kernels
from services.engine.runner import DeviceRunner
from services.engine.schedule.sequence import SampleRow, SamplingParams, ScheduledSequence, StepPlan

_SAMPLE_PARAMETERS = 48_000_000
"""Parameters of the timed model: more than the CPU's caches hold, so that a decode reads memory as the whole model's
decode will."""
_ROWS = (8, 32, 128, 512)
"""Numbers of prompt tokens of a step, tried in this order until a step takes more than `_LONG_S`."""
_LONG_S = 0.25
"""Seconds of processor time above which a step is long. A larger step is tried only after one that took at most this,
so that none takes much over a second on any CPU."""
_ROUNDS = 3
"""Number of timed rounds, of which the shortest time counts: first uses are slow, and another process may evict this
one's data from the CPU's caches."""
_BLOCK_SIZE = 16
_FEWER_BITS = (*KEPT_WEIGHTS, "int8", "int4")
_WAYS = [name + weights for name in DTYPES for weights in ("", *(f"+{bits}" for bits in _FEWER_BITS))]


class Timing(NamedTuple):
    """Keeps the processor time that the whole model takes in one way on one thread, in milliseconds."""

    ms_per_prefill_token: float
    ms_per_decode: float


def time_ways(directory: Path, saved: str, ways: Sequence[str], kv_dtype: str = "auto") -> dict[str, Any]:
    """Returns the timings of the ways for the same numbers of tokens, as the parent process reads them.

    A way is a dtype, or "DTYPE+BITS" with weights in fewer bits, as `--quantization BITS` has them; without the kernels
    in C, which make such weights worth while, the latter are left out. `kv_dtype`, the value of `--kv-dtype`, is the
    type of the KV cache. "timings" has a `Timing` for each way, "rows" the prompt tokens and "layers" the layers of the
    timed model, and "capability" torch's name of the CPU's instruction set.
    """
    if kernels() is None and any("+" not in way for way in ways):
        ways = [way for way in ways if "+" not in way]
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    num_layers, scale = _reduce(config)
    samples = {way: _Sample(config, way, saved, directory, kv_dtype) for way in ways}
    rows = min(sample.rows_worth_timing() for sample in samples.values())
    prefills: dict[str, list[float]] = {name: [] for name in samples}
    decodes: dict[str, list[float]] = {name: [] for name in samples}
    for _ in range(_ROUNDS):
        for name, sample in samples.items():
            prefills[name].append(sample.run(0, rows))
            decodes[name].append(sample.run(rows, 1))
    return {
        "timings": {
            name: Timing(min(prefills[name]) * scale * 1e3 / rows, min(decodes[name]) * scale * 1e3) for name in samples
        },
        "rows": rows,
        "layers": num_layers,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _reduce(config: PreTrainedConfig) -> tuple[int, float]:
    """Reduces `config` to as many layers as the timing needs, and the vocabulary in the same proportion.

    Returns the number of layers, and by which factor the whole model is larger.
    """
    text = config.get_text_config(decoder=True)
    whole: int = text.num_hidden_layers
    with torch.device("meta"):
        num_parameters = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    kept = max(1, min(whole, round(whole * _SAMPLE_PARAMETERS / max(num_parameters, 1))))
    text.num_hidden_layers = kept
    text.vocab_size = max(1, text.vocab_size * kept // whole)
    text.pad_token_id = None  # it may be beyond the reduced vocabulary
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(kinds := getattr(text, name, None), list):
            setattr(text, name, kinds[:kept])
    return kept, whole / kept


class _Sample:
    """Runs the reduced model in one way, as a worker runs a model."""

    def __init__(self, config: PreTrainedConfig, way: str, saved: str, directory: Path, kv_dtype: str) -> None:
        """Its weights are numbers of the type `saved`, as the model's are: in float32 they may be kept in its bits."""
        cpu, (dtype, _, weights) = torch.device("cpu"), way.partition("+")
        module = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation=register_attention())
        module = module.eval().requires_grad_(False)
        for parameter in module.parameters():
            parameter.copy_(parameter.to(DTYPES[saved]))
        if weights:
            quantise_alike(module, weights, directory)
        shape = servable.examine(module)
        kept_in = kv_dtype_of(kv_dtype, shape.dtype)
        use_fast_paths(module, kept_in)
        kv_shape = KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim, _BLOCK_SIZE, kept_in)
        heads, computed_in = (shape.num_heads, shape.num_kv_heads, shape.head_dim), kv_shape.computed_in(shape.dtype)
        _, backend = choice.select(cpu, computed_in, *heads, _BLOCK_SIZE, over_int8=kept_in == torch.int8)
        self._rows = [rows for rows in _ROWS if rows < shape.max_model_len] or [1]
        self._blocks = tuple(range(num_blocks_for(self._rows[-1] + 1, _BLOCK_SIZE)))
        self._runner = DeviceRunner(PagedModel(module, shape, backend), KVCache(kv_shape, len(self._blocks), cpu))

    def rows_worth_timing(self) -> int:
        """Returns the most prompt tokens, of those in `_ROWS`, of a step that takes at most `_LONG_S`."""
        most = self._rows[0]
        for rows in self._rows:
            if self.run(0, rows) > _LONG_S:
                break
            most = rows
        return most

    def run(self, start: int, count: int) -> float:
        """Runs a step of `count` tokens after `start` others; returns the processor time in seconds."""
        greedy = SampleRow(0, SamplingParams(temperature=0.0))
        blocks = self._blocks[: num_blocks_for(start + count, _BLOCK_SIZE)]
        part = ScheduledSequence(0, start, (0,) * count, blocks, (greedy,), is_decode=count == 1)
        started_s = time.thread_time()
        self._runner.run(StepPlan(0, (part,)))
        return time.thread_time() - started_s


def main() -> int:
    """Prints the timings as JSON and returns 0; returns 1, with the reason on stderr, if the model cannot be timed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("saved", choices=[name for name in DTYPES if name != "float32"])
    parser.add_argument("ways", nargs="+", choices=_WAYS)
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto")
    parser.add_argument("--lifeline-fd", type=int)
    arguments = parser.parse_args()
    # This process ends with the one that started it.
    Lifecycle(lifeline_fd=arguments.lifeline_fd, orphan_grace_s=0.0).watch_lifeline()
    torch.set_num_threads(1)
    try:
        found = time_ways(arguments.model, arguments.saved, arguments.ways, arguments.kv_dtype)
    except Exception as error:  # the parent process logs this line as the reason why there is no timing
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
