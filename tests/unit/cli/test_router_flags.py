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
from services.router.config import RouterConfig
from services.router.tenant_config import TenantConfig

NO_TENANTS = (
    "--tenants=",
    "--routers=0",
    "--usage-log=",
    "--usage-log-bytes=67108864",
    "--usage-log-files=64",
    "--request-log=",
    "--request-log-bytes=67108864",
    "--request-log-files=8",
    "--request-log-text-chars=0",
    "--public-tls-cert=",
    "--public-tls-key=",
    "--tls-client-ca=",
)
"""What a router is told where nothing is said about tenants, or about TLS."""


def test_the_router_of_a_cluster_is_told_how_to_place() -> None:
    plain = make_plan(UpConfig(), ["mixed"], ResolvedModel("m", pathlib.Path("/m")))
    assert plain.router_flags == (
        "--split=always",
        "--share-prefixes=auto",
        "--isolate-long-prompts=off",
        "--slow-factor=2",
        "--no-replay-across-engines",
        "--console",
        "--jaeger-url=",
        "--no-allow-plain-token",
        *NO_TENANTS,
    )
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
    )
    plan = make_plan(config, ["mixed"], ResolvedModel("m", pathlib.Path("/m")))
    assert plan.router_flags == (
        "--split=never",
        "--share-prefixes=never",
        "--isolate-long-prompts=auto",
        "--slow-factor=2.5",
        "--replay-across-engines",
        "--console",
        "--jaeger-url=",
        "--no-allow-plain-token",
        *NO_TENANTS,
        "--policy=sticky",
        "--policy=m=hybrid",
        "--policy-weight=prefill.near=1",
        "--tool-parser=hermes",
        "--tool-parser=m=none",
        "--reasoning-parser=none",
        f"--policy-file={pathlib.Path.cwd() / 'policies.toml'}",
    )
    lifeline = Lifeline()
    command = LocalCluster(plan, lifeline, PlainOutput())._router_command()
    lifeline.close()
    parser = Parser(prog="baton router")
    configuration.add_arguments(parser, RouterConfig)
    router = configuration.load(RouterConfig, parser.parse_known_args(command[command.index("router") + 1 :])[0], {})
    assert (router.policy, router.policy_weight) == (config.policy, config.policy_weight)
    assert (router.tool_parser, router.reasoning_parser) == (config.tool_parser, config.reasoning_parser)
    assert router.split == "never"
    assert router.replay_across_engines


def test_the_router_of_a_cluster_is_told_of_tenants_and_logs_and_finds_their_files() -> None:
    config = UpConfig(
        tenants="t.yaml", usage_log="/logs/u.jsonl", request_log="r.jsonl", request_log_files=3, usage_log_bytes=4096
    )
    flags = make_plan(config, ["mixed"], ResolvedModel("m", pathlib.Path("/m"))).router_flags
    parser = Parser(prog="baton router")
    configuration.add_arguments(parser, RouterConfig)
    router = configuration.load(RouterConfig, parser.parse_args(flags), {"BATON_USAGE_LOG_FILES": "7"})
    here = pathlib.Path.cwd()
    files = {"tenants": str(here / "t.yaml"), "usage_log": "/logs/u.jsonl", "request_log": str(here / "r.jsonl")}
    for field in dataclasses.fields(TenantConfig):
        assert getattr(router, field.name) == files.get(field.name, getattr(config, field.name)), field.name
