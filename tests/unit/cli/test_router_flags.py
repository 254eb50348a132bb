"""Tests what `baton up` tells its router."""

from __future__ import annotations

import dataclasses
import pathlib

from services.cli.arguments import Parser
from services.cli.child import Lifeline
from services.cli.cluster import LocalCluster
from services.cli.cluster_output import PlainOutput
from services.cli.model_cache import ResolvedModel
from services.cli.up import UpConfig, make_plan
from services.core import config as configuration
from services.router.config import RouterConfig, TenantConfig

MODEL = ResolvedModel("m", pathlib.Path("/m"))


def test_the_router_of_a_cluster_is_told_how_to_place() -> None:
    assert make_plan(UpConfig(), ["mixed"], MODEL).router_flags == ()
    config = UpConfig(
        policy=("sticky", "m=hybrid"),
        policy_weight=("prefill.near=1",),
        policy_file="policies.toml",
        tool_parser=("hermes", "m=none"),
        reasoning_parser=("none",),
        split="never",
        share_prefixes="never",
        isolate_long_prompts="auto",
        slow_factor=2.5,
        replay_across_engines=True,
        console=False,
        drain_s=3.0,
    )
    plan = make_plan(config, ["mixed"], MODEL)
    lifeline = Lifeline()
    command = LocalCluster(plan, lifeline, PlainOutput())._router_command()
    lifeline.close()
    parser = Parser(prog="baton router")
    configuration.add_arguments(parser, RouterConfig)
    router = configuration.load(RouterConfig, parser.parse_args(command[command.index("router") + 1 :]), {})
    told = ("policy", "policy_weight", "policy_file", "tool_parser", "reasoning_parser", "split", "share_prefixes")
    told += ("isolate_long_prompts", "slow_factor", "replay_across_engines", "console", "drain_s")
    for name in told:
        assert getattr(router, name) == getattr(config, name), name
    assert (router.model, router.served_model_name) == ("/m", "m")


def test_the_router_of_a_cluster_is_told_of_tenants_and_logs() -> None:
    config = UpConfig(
        tenants="t.yaml", usage_log="/logs/u.jsonl", request_log="r.jsonl", request_log_files=3, usage_log_bytes=4096
    )
    flags = make_plan(config, ["mixed"], MODEL).router_flags
    parser = Parser(prog="baton router")
    configuration.add_arguments(parser, RouterConfig)
    router = configuration.load(RouterConfig, parser.parse_args(flags), {})
    for field in dataclasses.fields(TenantConfig):
        assert getattr(router, field.name) == getattr(config, field.name), field.name
