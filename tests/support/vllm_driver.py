"""Runs the engine adapter over the real vLLM for tests: whole answers and handed over ones, and what is left after."""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens
from pathlib import Path
from typing import Any, cast

from services.engine.config import EngineConfig
from services.engine.schedule.sequence import Mode, SamplingParams
from services.kv.pool import Holder
from services.vllm.engine import VllmEngine, vllm_engine
from services.vllm.environment import vllm_python
from tests.support.engine_driver import GREEDY, EngineDriver, Output
from tests.support.models import tiny_model

BLOCK = 32
"""Tokens in a block, the fewest that vLLM has on a CPU."""
NUM_BLOCKS = 96
CHUNK = 300
IDLE_WITHIN_S = 5.0
EAGER = {"enforce_eager": "true"}
"""Compilers would take a minute for each start."""


def load(config: EngineConfig, **engine_args: str) -> VllmEngine:
    """Returns an engine as a worker makes it."""
    return vllm_engine(config, vllm_python(), {**EAGER, **engine_args})


def config_of(model: Path, **changes: Any) -> EngineConfig:
    fields = {
        "dtype": "float32",
        "block_size": BLOCK,
        "num_blocks": NUM_BLOCKS,
        "max_num_batched_tokens": CHUNK,
        "max_model_len": 2048,
        "threads": 1,
        **changes,
    }
    return EngineConfig(model_path=str(model), model_id="tested", **fields)


def tiny_for_vllm(parent: Path, family: str = "llama", **overrides: Any) -> Path:
    """Writes a tiny random model with heads of a size that vLLM's attention on a CPU takes."""
    shape = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 4096}
    return tiny_model(family, parent, **{**shape, **overrides})


class VllmDriver(EngineDriver):
    """Drives an engine with vLLM. What it leaves is checked by `idle`, and at the end of the block."""

    def __init__(self, engine: VllmEngine) -> None:
        super().__init__(cast(Any, engine))  # it has what a driver needs of an engine
        self.vllm = engine

    def whole(
        self, prompt: Tokens[int], max_tokens: int, sampling: SamplingParams = GREEDY, **fields: Any
    ) -> list[int]:
        """Returns the tokens of an answer that is computed here alone."""
        [output] = self.wait(self.submit(prompt, max_tokens, sampling, **fields))
        assert output.error is None, output.error
        return output.token_ids

    def split(
        self,
        prompt: Tokens[int],
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        *,
        into: VllmDriver | None = None,
        salt: str = "",
        decode_salt: str | None = None,
        **fields: Any,
    ) -> tuple[Output, Output]:
        """Returns the outputs of two legs: of the prompt's, here, and of the rest, to which its KV is handed over.

        `salt` is that of the prompt's leg, and `decode_salt` that of the other one: another salt, another cache.
        """
        into = into or self
        first_id = self.submit(prompt, max_tokens, sampling, mode=Mode.PREFILL_ONLY, cache_salt=salt, **fields)
        [first] = self.wait(first_id)
        assert first.error is None, first.error
        try:
            rest = into.go_on(
                prompt,
                max_tokens,
                sampling,
                source=self,
                first=first,
                cache_salt=salt if decode_salt is None else decode_salt,
                **fields,
            )
        finally:
            self.engine.release(first.block_ids, Holder.LEASE)
        return first, into.wait(rest)[0]

    def go_on(
        self,
        prompt: Tokens[int],
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        *,
        source: VllmDriver,
        first: Output,
        **fields: Any,
    ) -> int:
        """Takes over a sequence after its first token, with the KV of `source`; returns the id to wait for."""
        sequence = self._sequence(prompt, max_tokens, sampling, **fields)
        self.outputs[sequence.seq_id] = Output(sequence.mode, sequence.output_base + 1)
        engine = self.engine
        engine.hash_prompt(sequence)
        reserved = engine.reserve(sequence, lambda num_fresh, room: None)
        at = len(reserved.prefix)
        source_ids = first.block_ids[at : at + len(reserved.fresh)]
        engine.cache.write_blocks(reserved.fresh, source.engine.cache.read_blocks(source_ids))
        token_id = first.token_ids[0]
        engine.adopt(sequence, reserved.prefix, reserved.fresh, token_id, Holder.IMPORT, spare=reserved.spare)
        return sequence.seq_id

    def submit_several(self, prompt: Tokens[int], max_tokens: int, samplings: Tokens[SamplingParams]) -> list[int]:
        """Submits a prompt with several answers; returns the ids to wait for."""
        further = [self._sequence(prompt, max_tokens, each) for each in samplings[1:]]
        for each in further:
            self.outputs[each.seq_id] = Output(each.mode, 0)
        return [self.submit(prompt, max_tokens, samplings[0], further=further), *(each.seq_id for each in further)]

    def idle(self, within_s: float = IDLE_WITHIN_S) -> float:
        """Waits until nothing holds a slot or a block of vLLM's; returns the seconds that it took."""
        began_s = time.monotonic()
        while True:
            try:
                self.engine.check_idle()
                assert self.vllm.usage == 0.0, f"vLLM holds {self.vllm.usage:.1%} of its blocks"
                return time.monotonic() - began_s
            except AssertionError:
                if time.monotonic() - began_s > within_s:
                    raise
            time.sleep(0.01)
