"""Tests what `baton status` says first: the figures of the last minute, the workers, and what is amiss."""

from __future__ import annotations

from baton.v1 import control_pb2, types_pb2
from services.cli.status_summary import last_minute, summary
from services.cli.top_requests import FollowedRequest
from services.rpc.plain import plain

NOW = 1000.0


def request(arrived_s: float, prompt_tokens: int, output_tokens: int, ttft_s: float, total_s: float | None):
    """Returns a request that arrived so many seconds before now; without `total_s` it lives."""
    message = control_pb2.Timeline(
        age_us=round((NOW - arrived_s) * 1e6),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        ttft_us=round(ttft_s * 1e6),
        phase=control_pb2.REQUEST_PHASE_DECODING if total_s is None else control_pb2.REQUEST_PHASE_ENDED,
        total_us=None if total_s is None else round(total_s * 1e6),
    )
    return FollowedRequest(message, plain(message), NOW)


def test_the_last_minute_counts_what_came_in_it() -> None:
    requests = [
        request(NOW - 1, 30, 10, ttft_s=0.5, total_s=None),
        request(NOW - 20, 60, 50, ttft_s=1.0, total_s=10.0),
        request(NOW - 80, 999, 40, ttft_s=0.1, total_s=40.1),  # half of its tokens came before
        request(NOW - 200, 999, 999, ttft_s=0.1, total_s=0.2),
    ]
    found = last_minute(requests, NOW, up_s=500.0, most=1000)
    assert found.seconds == 60.0
    assert found.prompt_tokens_per_s == 90 / 60
    assert round(found.output_tokens_per_s * 60, 3) == 10 + 50 + 40 * (20.1 / 40)
    assert (found.ttft_of(0.5), found.ttft_of(0.95)) == (500.0, 1000.0)


def test_it_is_no_longer_than_the_router_has_run_or_than_what_is_known_reaches_back() -> None:
    requests = [request(NOW - 4, 8, 0, ttft_s=1.0, total_s=2.0)]
    assert last_minute(requests, NOW, up_s=8.0, most=1000).prompt_tokens_per_s == 1.0
    assert last_minute(requests, NOW, up_s=500.0, most=1).prompt_tokens_per_s == 2.0
    assert last_minute([], NOW, up_s=0.0, most=1).ttft_of(0.5) is None


def test_the_lines() -> None:
    status = control_pb2.GetStatusResponse(
        ready=True, up_ms=125_000, http_port=8000, num_queued=1, num_parked=1, num_prefilling=2, num_decoding=3
    )
    status.models.add(model_id="tiny")
    for name, role, state, reason in (
        ("decode-0", types_pb2.WORKER_ROLE_DECODE, control_pb2.WORKER_STATE_DOWN, "silent for 3 s"),
        ("prefill-0", types_pb2.WORKER_ROLE_PREFILL, control_pb2.WORKER_STATE_READY, ""),
    ):
        worker = status.workers.add(state=state, reason=reason)
        worker.worker.worker_id = name
        worker.worker.roles.append(role)
        worker.load.num_running, worker.load.blocks_active, worker.load.blocks_free = 4, 10, 90
    status.components.add(name="router", state=control_pb2.COMPONENT_STATE_OK)
    status.components.add(name="queue", state=control_pb2.COMPONENT_STATE_OK)
    status.components.add(name="decode", state=control_pb2.COMPONENT_STATE_DOWN, reason="1 of 1 not ready")
    figures = last_minute([request(NOW - 1, 30, 12, ttft_s=0.5, total_s=None)], NOW, up_s=125.0, most=1000)
    lines = summary("host:50052", plain(status), figures, wall_s=1e9)
    assert lines[0].startswith("tiny  ready, up since ")
    assert lines[0].endswith(" (2 min)")
    assert lines[1:] == [
        "HTTP       http://host:8000/v1",
        "requests   5 running, 2 waiting",
        "tokens/s   0.5 in, 0.2 out  (last 60 s)",
        "TTFT       p50 500.0 ms, p95 500.0 ms  (1 request in the last 60 s)",
        "",
        "worker     role     health          running  waiting  KV in use",
        "prefill-0  prefill  ready                 4        0     10/100",
        "decode-0   decode   silent for 3 s        4        0     10/100",
        "",
        "ok         router, queue",
        "down       decode: 1 of 1 not ready",
    ]
    assert max(map(len, lines)) <= 80
