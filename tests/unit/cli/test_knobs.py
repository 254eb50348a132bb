"""Tests that a knob is declared once: whoever offers it again composes that declaration."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest

from services.cli.arguments import Parser
from services.cli.calibrate import CalibrateConfig
from services.cli.child import Lifeline
from services.cli.cluster import LocalCluster
from services.cli.cluster_output import PlainOutput
from services.cli.model_cache import ResolvedModel
from services.cli.plan_cluster import PlanConfig
from services.cli.simulate import SimulateConfig
from services.cli.up import UpConfig, make_plan
from services.core import config as configuration
from services.router.config import RouterConfig
from services.store.config import StoreConfig
from services.worker.config import WorkerConfig

KINDS: tuple[type, ...] = (
    UpConfig,
    RouterConfig,
    WorkerConfig,
    StoreConfig,
    SimulateConfig,
    PlanConfig,
    CalibrateConfig,
)
OF_THEIR_OWN = {
    "host": "of baton up it is the router's alone",
    "port": "a worker's is any that is free",
    "http_port": "baton up serves HTTP unless it is told not to",
    "control_port": "that of baton up depends on --port",
    "metrics_port": "that of baton up is the first of several",
    "log_level": "baton up may draw its start instead",
    "served_model_name": "a store's is that of the workers, not its own",
    "silence_s": "each side has its own",
    "prefill": "baton simulate may have workers by the thousand",
    "decode": "as prefill",
    "mixed": "as prefill",
    "capacity": "in baton simulate each names its worker",
    "model": "baton plan and calibrate ask for one of those that are served",
    "cost_per_hour": "a profile's is 1 in any unit, a worker's is in a currency",
    "slo_ttft_ms": "baton simulate judges what no router has seen",
    "slo_tpot_ms": "as slo_ttft_ms",
    "seconds": "of a trace, or of measuring",
    "plot": "each draws something else",
}
"""Names that mean something else, or have another default, in another command, and why."""

ODD = {
    "policy": ("m=sticky",),
    "policy_file": "p.toml",
    "policy_weight": ("prefill.near=3",),
    "split": "never",
    "share_prefixes": "never",
    "isolate_long_prompts": "auto",
    "cluster_auth": "both",
    "tool_parser": ("none",),
    "reasoning_parser": ("none",),
    "kv_disk_bytes": "1GiB",
    "kv_host_bytes": "1MiB",
    "kvtransfer_bytes": "1MiB",
    "dtype": "float16",
    "kv_dtype": "float16",
    "quantization": "none",
    "transport": "tcp",
    "engine": "vllm",
    "engine_arg": ("a=b",),
    "jaeger_url": "http://localhost:1",
    "usage_log_bytes": 5000,
    "request_log_bytes": 6000,
}
"""Values unlike the defaults, where no other number or word will do."""

OF_EACH = ("prefill", "decode", "mixed", "kvtransfer", "tls_dir", "model", "device")
"""Options of `baton up` that say which processes there are, or of which each process has its own part."""


def options(kind: type) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(kind) if "help" in field.metadata}


def test_a_knob_that_several_offer_is_declared_once() -> None:
    declared: dict[str, list[dataclasses.Field[Any]]] = {}
    for kind in KINDS:
        for name, field in options(kind).items():
            if not any(field is other for other in declared.setdefault(name, [])):
                declared[name].append(field)
    assert {name for name, fields in declared.items() if len(fields) > 1} == OF_THEIR_OWN.keys()


def unlike(field: dataclasses.Field[Any]) -> Any:
    if field.name in ODD:
        return ODD[field.name]
    match field.default:
        case bool():
            return not field.default
        case int() | float():
            return field.default + 3
        case _:
            return f"{field.name}.file"


@pytest.mark.parametrize("name", [name for name in options(UpConfig) if name not in (*OF_THEIR_OWN, *OF_EACH)])
def test_what_a_cluster_is_told_reaches_all_its_processes_that_have_the_option(name: str) -> None:
    config = UpConfig(kvtransfer=1, **{name: unlike(options(UpConfig)[name])})
    plan = make_plan(config, ["mixed"], ResolvedModel("m", pathlib.Path("/m")))
    lifeline = Lifeline()
    cluster = LocalCluster(plan, lifeline, PlainOutput())
    commands = {
        RouterConfig: cluster._router_command(),
        WorkerConfig: cluster._worker_command(plan.workers[0]),
        StoreConfig: cluster._store_command(plan.stores[0]),
    }
    lifeline.close()
    told = 0
    for kind, command in commands.items():
        if name in options(kind):
            parser = Parser()
            configuration.add_arguments(parser, kind)
            arguments, _ = parser.parse_known_args(command[command.index("services.cli.main") + 2 :])
            assert getattr(configuration.load(kind, arguments, {}), name) == getattr(config, name), kind.__name__
            told += 1
    assert told
