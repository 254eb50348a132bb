"""Tests what `baton status` shows of workers whose names are as long as they may be."""

from __future__ import annotations

from baton.v1 import control_pb2, types_pb2
from services.cli.status import text
from services.rpc.plain import plain


def worker(worker_id: str, model_id: str, reason: str = "") -> control_pb2.WorkerStatus:
    description = control_pb2.WorkerDescription(
        worker_id=worker_id,
        address="host:1",
        layout=types_pb2.KVLayout(model_id=model_id),
        roles=[types_pb2.WORKER_ROLE_DECODE],
        fingerprint=types_pb2.Fingerprint(kv="5c" * 16, numerics="none"),
        kernels="plain",
    )
    return control_pb2.WorkerStatus(worker=description, reason=reason)


def test_one_long_name_leaves_the_others_on_the_screen() -> None:
    long_name, long_model = "w" * 128, "字" * 256
    models = [control_pb2.ModelStatus(model_id=name) for name in ("tiny", long_model)]
    status = control_pb2.GetStatusResponse(
        workers=[worker("decode-0", "tiny"), worker(long_name, long_model, reason="x" * 5000)], models=models
    )
    shown = text("target", plain(status))
    assert long_name not in shown
    assert long_model not in shown
    assert "w" * 40 in shown
    assert "decode-0" in shown
    assert max(map(len, shown.splitlines())) <= 400
    assert max(len(line) for line in shown.splitlines() if "decode-0" in line) < 250


def test_many_workers_are_counted_where_they_are_listed() -> None:
    status = control_pb2.GetStatusResponse(workers=[worker(f"decode-{number}", "tiny") for number in range(40)])
    assert "decode-15 and 24 more: " in text("target", plain(status))


def test_a_declared_capacity_is_shown_unless_it_is_the_usual_one() -> None:
    workers = [worker(f"decode-{number}", "tiny") for number in range(3)]
    assert "capacity" not in text("target", plain(control_pb2.GetStatusResponse(workers=workers)))
    workers[0].worker.capacity, workers[1].worker.capacity, workers[2].worker.capacity = 2.5, 1.0, 2.5
    lines = text("target", plain(control_pb2.GetStatusResponse(workers=workers))).splitlines()
    assert [line for line in lines if "capacity" in line] == ["decode-0, decode-2: capacity 2.5"]


def test_what_is_not_taken_to_move_kv_is_shown_with_the_reason() -> None:
    workers = [worker(f"decode-{number}", "tiny") for number in range(3)]
    for each in workers[1:]:
        each.worker.withheld = "nixl: it does not encrypt"
    lines = text("target", plain(control_pb2.GetStatusResponse(workers=workers))).splitlines()
    assert [line for line in lines if "nixl" in line] == [
        "decode-1, decode-2: KV is not moved by nixl: it does not encrypt"
    ]


def test_from_which_prompt_on_splitting_pays_is_shown() -> None:
    found = {"prefill": "prefill-0", "decode": "decode-1"}
    models = [
        control_pb2.ModelStatus(model_id="chat", split_break_even=control_pb2.SplitBreakEven(**found, tokens=64)),
        control_pb2.ModelStatus(model_id="code", split_break_even=control_pb2.SplitBreakEven(**found, tokens=0)),
        control_pb2.ModelStatus(model_id="slow", split_break_even=control_pb2.SplitBreakEven(**found)),
        control_pb2.ModelStatus(model_id="always"),
    ]
    models[0].split_break_even.handoff_ms = 12.25
    lines = text("target", plain(control_pb2.GetStatusResponse(models=models))).splitlines()
    assert [line for line in lines if "split" in line] == [
        "chat: split pays from about 64 uncached tokens on: prefill-0 -> decode-1 (handoff 12.2 ms)",
        "code: split pays for every prompt: prefill-0 -> decode-1 (handoff not measured yet)",
        "slow: split pays for no prompt now: prefill-0 -> decode-1 (handoff not measured yet)",
    ]
    alone = text("target", plain(control_pb2.GetStatusResponse(models=models[:1]))).splitlines()
    assert "split pays from about 64 uncached tokens on: prefill-0 -> decode-1 (handoff 12.2 ms)" in alone


def test_what_requests_are_placed_by_is_shown_once_for_all_models_alike() -> None:
    models = [
        control_pb2.ModelStatus(model_id=name, policy=policy)
        for name, policy in (("chat", "sticky (…)"), ("code", "pressure (…)"), ("big", "sticky (…)"))
    ]
    lines = text("target", plain(control_pb2.GetStatusResponse(models=models))).splitlines()
    assert [line for line in lines if "placed by" in line] == [
        "chat, big: placed by sticky (…)",
        "code: placed by pressure (…)",
    ]


def test_workers_of_two_engines_are_shown_apart_and_told_to_be_alike_only_within_each() -> None:
    workers = [worker(name, "tiny") for name in ("t", "v", "w")]
    for each in workers[1:]:
        each.worker.layout.engine = "vllm"
    groups = [control_pb2.KVGroup(kv=name * 16, engine=engine) for name, engine in (("aa", "torch"), ("bb", "vllm"))]
    groups[0].worker_ids[:], groups[1].worker_ids[:] = ["t"], ["v", "w"]
    model = control_pb2.ModelStatus(model_id="tiny", kv_groups=groups)
    lines = text("target", plain(control_pb2.GetStatusResponse(workers=workers, models=[model]))).splitlines()
    assert "t: torch; none; plain" in lines, "who names no engine is of torch"
    assert "v, w: vllm; none; plain" in lines
    assert lines[-1] == "pair within their engine: t (torch aaaaaaaa) | v, w (vllm bbbbbbbb)"
    model.kv_groups.add(kv="cc" * 16, engine="vllm", worker_ids=["x"])
    lines = text("target", plain(control_pb2.GetStatusResponse(workers=workers, models=[model]))).splitlines()
    assert lines[-2].startswith("cannot pair, by fingerprint: t (torch aaaaaaaa) | v, w (vllm bbbbbbbb) | x (vllm cc")
    assert lines[-1].startswith("to pair, workers need the same engine, weights")
