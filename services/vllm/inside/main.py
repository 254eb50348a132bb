"""Runs vLLM's asynchronous engine for one worker: the front.

Usage: python -m services.vllm.inside.main SOCKET ARGUMENTS, with arguments as JSON: `engine`, those of AsyncEngineArgs,
`warm_up`, lengths of prompts, and `core_environment`, of the processes that compute. It takes ADD and ABORT from the
worker and tells it of tokens. Token ids go in and come out; what is sampled is decided by `sampling`, and what becomes
of KV by `connector`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
import traceback
from typing import Any

from services.vllm import messages
from services.vllm.inside.link import Link
from services.vllm.messages import JsonMessage, Lines

_CONNECTOR, _SAMPLING = "services.vllm.inside.connector", "services.vllm.inside.sampling:BatonSampling"
_WARM_DECODES = 8
_NOT_COMPUTED_WITH = {"transformers_version", "_name_or_path"}


def main() -> None:
    path, arguments = sys.argv[1], json.loads(sys.argv[2])
    link = Link(path, messages.FRONT)
    try:
        asyncio.run(Front(link).run(path, arguments))
    except BaseException as error:
        traceback.print_exc()
        link.send(messages.BROKEN, error=f"{type(error).__name__}: {str(error)[:1000]}")
        raise


class Front:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._given_up: set[int] = set()
        """Requests that are aborted as soon as vLLM has them."""
        self._outputs: list[list[Any]] = []
        """What the worker is told when all requests of a step have been seen to: id, tokens, why it ended."""
        self._request_ids: dict[int, str] = {}
        """vLLM's names of the requests that it has."""

    async def run(self, path: str, arguments: JsonMessage) -> None:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
        if unknown := sorted(set(arguments["engine"]) - known):
            raise ValueError(f"--engine-arg: vLLM has no argument {unknown[0]}")
        args = AsyncEngineArgs(
            **arguments["engine"],
            logits_processors=[_SAMPLING],
            kv_transfer_config=KVTransferConfig(
                kv_connector="BatonConnector",
                kv_connector_module_path=_CONNECTOR,
                kv_role="kv_both",
                kv_load_failure_policy="fail",
                kv_connector_extra_config={"socket": path},
            ),
        )
        # Not for this process: its threads would be bound, and it leaves the cores to those that compute.
        os.environ.update(arguments["core_environment"])
        self._llm = AsyncLLM.from_engine_args(args, stat_loggers=[self._new_figures])
        try:
            await self._warm_up(arguments["warm_up"])
            self._link.send(messages.READY, **self._facts())
            await self._serve()
        finally:
            self._llm.shutdown()

    def _facts(self) -> JsonMessage:
        import vllm

        config = self._llm.vllm_config
        model, parallel = config.model_config, config.parallel_config
        return {
            "version": vllm.__version__,
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "vocab_size": model.get_vocab_size(),
            "num_layers": model.get_total_num_hidden_layers(),
            "num_kv_heads": model.get_total_num_kv_heads(),
            "head_dim": model.get_head_size(),
            "block_size": config.cache_config.block_size,
            "sharding": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
            "quantization": model.quantization or "none",
            # What is computed with the weights: of the files, and of --engine-arg.
            "config": [
                _configuration(model.hf_config),
                str(config.load_config.load_format),
                bool(model.disable_sliding_window),
            ],
        }

    async def _warm_up(self, lengths: list[int]) -> None:
        """Runs prompts and decodes, alone and side by side: first uses are slow, and the worker measures their
        steps."""
        vocab_size = self._llm.vllm_config.model_config.get_vocab_size()
        for length in lengths:
            prompt = [(7919 * length + 104729 * at) % vocab_size for at in range(length)]
            await self._generate_alone(f"warm-{length}", prompt)
        prompts = [[(31 * each + at) % vocab_size for at in range(16)] for each in range(4)]
        await asyncio.gather(*(self._generate_alone(f"warm-beside-{i}", each) for i, each in enumerate(prompts)))
        await self._llm.reset_prefix_cache()

    async def _generate_alone(self, name: str, prompt: list[int]) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=_WARM_DECODES, ignore_eos=True, detokenize=False)
        async for _ in self._llm.generate({"prompt_token_ids": prompt}, params, name):
            pass

    async def _serve(self) -> None:
        lines, loop = Lines(), asyncio.get_running_loop()
        # On a thread: as a stream of asyncio's the socket would not block, and sends fail while the worker is busy.
        while data := await loop.run_in_executor(None, self._link.socket.recv, 1 << 18):
            for message in lines.feed(data):
                if message["kind"] == messages.ADD:
                    task = asyncio.create_task(self._request(message), name=f"request {message['id']}")
                    self._tasks[message["id"]] = task
                else:
                    await self._abort(message["id"])

    async def _abort(self, seq_id: int) -> None:
        if (request_id := self._request_ids.get(seq_id)) is not None:
            await self._llm.abort(request_id, internal=True)
        elif seq_id in self._tasks:
            self._given_up.add(seq_id)

    async def _request(self, message: JsonMessage) -> None:
        seq_id = message["id"]
        try:
            await self._run_request(seq_id, message)
        except Exception as error:  # nobody knows what vLLM does with its blocks now
            traceback.print_exc()
            self._link.send(messages.BROKEN, error=f"request {seq_id}: {type(error).__name__}: {str(error)[:1000]}")
        finally:
            del self._tasks[seq_id]
            self._request_ids.pop(seq_id, None)
            self._given_up.discard(seq_id)

    async def _run_request(self, seq_id: int, message: JsonMessage) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=message["max_tokens"],
            stop_token_ids=message["sampling"]["stop"],
            ignore_eos=True,  # the worker says which tokens end it
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"baton": message["sampling"], "kv_transfer_params": {"id": seq_id, **message["kv"]}},
        )
        prompt: dict[str, Any] = {"prompt_token_ids": message["tokens"]}
        if message["salt"]:
            prompt["cache_salt"] = message["salt"]
        # Not `generate`: a request that is cancelled while it is added could be there, or not.
        try:
            outputs = await self._llm.add_request(str(seq_id), prompt, params)
        except ValueError as error:
            self._link.send(messages.REFUSED, id=seq_id, error=f"{type(error).__name__}: {str(error)[:500]}")
            return
        self._request_ids[seq_id] = outputs.request_id
        if seq_id in self._given_up:
            await self._llm.abort(outputs.request_id, internal=True)
        finished = False
        while not finished:
            output = outputs.get_nowait() or await outputs.get()
            finished = output.finished
            completion = output.outputs[0]
            reason = completion.finish_reason if finished else None
            self._tell([seq_id, list(completion.token_ids), reason])

    def _tell(self, output: list[Any]) -> None:
        """Tells the worker of tokens, together with those of the other requests of the step."""
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outputs.append(output)

    def _flush(self) -> None:
        outputs, self._outputs = self._outputs, []
        self._link.send(messages.OUTPUT, outputs=outputs)

    def _new_figures(self, *_: Any, **__: Any) -> Any:
        return _figures_logger(self._link)


def _configuration(config: Any) -> JsonMessage:
    """Returns the model's configuration as vLLM computes with it: the file's, or another one's, with its overrides."""
    fields = {name: value for name, value in config.to_dict().items() if name not in _NOT_COMPUTED_WITH}
    return dict(json.loads(json.dumps(fields, default=str)))


def _figures_logger(link: Link) -> Any:
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Figures(StatLoggerBase):  # type: ignore[misc]
        """Tells the worker of vLLM's own figures."""

        def __init__(self) -> None:
            self._num_queried = self._num_hit = self._num_preempted = 0
            self._told_s = 0.0

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if iteration_stats is not None:
                self._num_preempted += iteration_stats.num_preempted_reqs
            if scheduler_stats is None:
                return
            is_idle = not scheduler_stats.num_running_reqs
            self._num_queried += scheduler_stats.prefix_cache_stats.queries
            self._num_hit += scheduler_stats.prefix_cache_stats.hits
            if not is_idle and time.monotonic() - self._told_s < messages.BEAT_S:
                return
            self._told_s = time.monotonic()
            link.send(
                messages.FIGURES,
                usage=scheduler_stats.kv_cache_usage,
                queried=self._num_queried,
                hit=self._num_hit,
                preempted=self._num_preempted,
            )

        def log_engine_initialized(self) -> None:
            pass

    return Figures()


if __name__ == "__main__":
    main()
