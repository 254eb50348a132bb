"""Sends requests to a router and notes when each token arrives: over gRPC, and over HTTP as plainly as it can be done.

A client shares the machine with what it measures, so it does nothing but wait, take a time and count.
"""

from __future__ import annotations

import asyncio
import json
import time

import grpc

from baton.v1 import inference_pb2, inference_pb2_grpc
from benchmarks.answers import Answer


async def stream_grpc(
    stub: inference_pb2_grpc.InferenceServiceStub,
    request: inference_pb2.GenerateRequest,
    answer: Answer | None = None,
    *,
    timeout_s: float | None = None,
    metadata: tuple[tuple[str, str], ...] = (),
) -> Answer:
    """Returns the answer. It is `answer`, if one is given, and grows while tokens arrive."""
    answer = Answer(time.perf_counter()) if answer is None else answer
    try:
        async for event in stub.GenerateStream(request, timeout=timeout_s, metadata=metadata):
            if event.WhichOneof("event") == "chunk":
                answer.token_times_s += [time.perf_counter()] * len(event.chunk.token_ids)
    except grpc.aio.AioRpcError as error:
        answer.refused = error.code().name
    return answer


async def stream_http(host: str, port: int, model: str, prompt: list[int], max_tokens: int) -> Answer:
    """Returns the answer of `POST /v1/completions` with `stream`. Raises RuntimeError unless it has `max_tokens`.

    Each event counts as a token; the last, which has no text, says how many there were.
    """
    asked = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    answer = Answer(time.perf_counter())
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    usage = None
    async for line in reader:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            if event["choices"]:
                answer.token_times_s.append(time.perf_counter())
    writer.close()
    if usage is None or usage["completion_tokens"] != max_tokens:
        raise RuntimeError(f"the HTTP stream ended with {usage}, not with {max_tokens} tokens")
    return answer
