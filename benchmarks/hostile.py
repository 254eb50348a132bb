"""Measures what running answers suffer from constraints that are made to take all time or memory, as clients see it:
the gaps between the tokens of a few streams alone, and while such constraints arrive one after the other.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time

import grpc

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from benchmarks.answers import Answer, percentile
from benchmarks.cluster import cluster, make_request
from benchmarks.figure import Figure, Findings
from benchmarks.precision import Precision
from benchmarks.streaming import stream_grpc

HOSTILE = {
    "states": types_pb2.Constraint(regex="[a-z ]*a[a-z ]{60}b.*"),
    "repetitions": types_pb2.Constraint(regex="(a{1,900}b?){900}"),
    "wildcards": types_pb2.Constraint(regex=".*" * 200 + "x"),
    "alternatives": types_pb2.Constraint(regex="|".join(f".*{number}.*" for number in range(900))),
    "intersections": types_pb2.Constraint(
        json_schema=json.dumps({"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(20)]})
    ),
    "a chain of rules": types_pb2.Constraint(
        grammar="\n".join(f"r{n}: r{n + 1}" for n in range(490)).replace("r0:", "start:") + '\nr490: "a"'
    ),
    "ambiguity": types_pb2.Constraint(grammar='start: s\ns: s s s | s s | "a" | "aa" | "aaa" | '),
    "references": types_pb2.Constraint(
        json_schema=json.dumps(
            {
                "$defs": {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 8} for n in range(20)}
                | {"d20": {"type": "string"}},
                "$ref": "#/$defs/d0",
            }
        )
    ),
}
_STREAMS, _PROMPT_TOKENS, _STREAM_TOKENS, _HOSTILE_TOKENS = 4, 64, 2048, 40
_WARM_S, _WINDOW_S = 5.0, 15.0


def measure(model: str, precision: Precision, repeats: int) -> Findings:
    """Takes the two sides in turns, on a prefill and a decode worker with a thread each."""
    alone, beside, counts = list[list[float]](), list[list[float]](), list[float]()
    with cluster(model, precision, "--prefill", "1", "--decode", "1", "--threads", "1") as up:
        for number in range(repeats):
            one, other, count = asyncio.run(_round(up.address, number))
            alone.append(one)
            beside.append(other)
            counts.append(count)
    later = [percentile(two, 99) - percentile(one, 99) for one, two in zip(alone, beside, strict=True)]
    found: Findings = [
        Figure(f"hostile constraints: gap p{percent} {side}", "ms", tuple(percentile(each, percent) for each in gaps))
        for percent in (50, 99, 100)
        for side, gaps in (("alone", alone), ("beside them", beside))
    ]
    return [
        *found,
        Figure("  gap p99 more than alone", "ms", tuple(later), "at most 20"),
        Figure("  hostile requests in a round", "", tuple(counts)),
    ]


async def _round(address: str, number: int) -> tuple[list[float], list[float], float]:
    """Returns the gaps of the streams alone and beside hostile requests, and the number of these."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        running = [Answer(time.perf_counter()) for _ in range(_STREAMS)]
        streams = [
            asyncio.create_task(stream_grpc(stub, make_request((number, at), _PROMPT_TOKENS, _STREAM_TOKENS), answer))
            for at, answer in enumerate(running)
        ]
        await stream_grpc(stub, _hostile_request(types_pb2.Constraint(regex="warm")))
        await asyncio.sleep(_WARM_S)
        begun = time.perf_counter()
        await asyncio.sleep(_WINDOW_S)
        between, num_sent = time.perf_counter(), 0
        for constraint in itertools.cycle(HOSTILE.values()):
            await stream_grpc(stub, _hostile_request(constraint))
            num_sent += 1
            if time.perf_counter() - between > _WINDOW_S and num_sent >= len(HOSTILE):
                break
        ended = time.perf_counter()
        if any(stream.done() for stream in streams):
            raise RuntimeError("a stream ended before the round did")
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    gaps = [
        [gap for each in running for gap in each.gaps_within(*when)] for when in ((begun, between), (between, ended))
    ]
    return gaps[0], gaps[1], float(num_sent)


def _hostile_request(constraint: types_pb2.Constraint) -> inference_pb2.GenerateRequest:
    request = make_request("hostile", _PROMPT_TOKENS, _HOSTILE_TOKENS)
    request.stopping.ignore_eos = False
    request.constraint.CopyFrom(constraint)
    return request
