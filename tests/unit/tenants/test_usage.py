"""Tests what a request is charged, what that costs, and how many series tenants can make."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from baton.v1 import inference_pb2
from services.router.answer import Answer
from services.router.config import RouterConfig
from services.router.coordinator.events import EmitStarted
from services.router.telemetry.metrics import RouterMetrics
from services.router.telemetry.usage import MOST_TENANTS, OTHERS, RequestUsage, UsageMetrics
from services.router.tenants.tenant import TokenPrices, TokenUsage
from tests.support.text_model import byte_tokenizer

USAGE = RequestUsage("acme", "m", "r", TokenUsage(prompt=10, cached=4, output=3), 0.5, "stop")

counts = st.integers(min_value=0, max_value=1_000_000)
prices = st.floats(min_value=0, max_value=1_000_000)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"baton_tenant_{name}_total", {"tenant": "acme", "model": "m"} | labels)


@given(computed=counts, cached=counts, output=counts, prompt_price=prices, cached_price=prices, output_price=prices)
def test_each_token_costs_one_price(
    computed: int, cached: int, output: int, prompt_price: float, cached_price: float, output_price: float
) -> None:
    of = TokenPrices(prompt_price, cached_price, output_price).cost
    whole = of(TokenUsage(computed + cached, cached, output))
    parts = of(TokenUsage(computed)) + of(TokenUsage(cached, cached)) + of(TokenUsage(output=output))
    assert whole == pytest.approx(parts)
    assert of(TokenUsage(1000)) == pytest.approx(prompt_price)
    assert of(TokenUsage(1000, 1000)) == pytest.approx(cached_price)
    assert of(TokenUsage(output=1000)) == pytest.approx(output_price)
    assert TokenUsage(computed + cached, cached, output).total == computed + cached + output


def test_an_answer_is_charged_its_prompt_once_and_all_outputs() -> None:
    """Nothing is charged before a worker has begun."""
    asked = inference_pb2.GenerateRequest(text="x", n=2)
    answer = Answer(asked, [1, 2, 3], request_id="r", model_id="m", tokenizer=byte_tokenizer(), tokenize_ms=None)
    assert answer.usage == TokenUsage()
    answer.started(EmitStarted("r", "prefill", 2))
    assert answer.usage == TokenUsage(prompt=3, cached=2)
    answer.tokens([70, 71], [], 0)
    answer.tokens([72], [], 1)
    assert answer.usage == TokenUsage(prompt=3, cached=2, output=3)


def test_series_of_a_tenant() -> None:
    registry = CollectorRegistry()
    metrics = UsageMetrics(registry)
    metrics.ended(USAGE)
    metrics.ended(replace(USAGE, outcome="cancelled"))
    metrics.ended(replace(USAGE, model="", tokens=TokenUsage(), cost=0.0, outcome="quota_exceeded"))
    assert [value(registry, "requests", outcome=outcome) for outcome in ("stop", "cancelled")] == [1, 1]
    assert value(registry, "requests", model="", outcome="quota_exceeded") == 1
    assert [value(registry, "tokens", kind=kind) for kind in ("prompt", "cached", "output")] == [20, 8, 6]
    assert value(registry, "cost") == 1.0
    metrics.forget("m")
    assert value(registry, "cost") is None
    assert value(registry, "requests", model="", outcome="quota_exceeded") == 1, "of no model"


def test_tenants_after_the_first_share_their_series() -> None:
    registry = CollectorRegistry()
    metrics = UsageMetrics(registry)
    for number in range(MOST_TENANTS + 50):
        metrics.ended(replace(USAGE, tenant=f"tenant-{number}"))
    num_series = generate_latest(registry).count(b"baton_tenant_cost_total{")
    metrics.ended(replace(USAGE, tenant="yet-another"))
    assert generate_latest(registry).count(b"baton_tenant_cost_total{") == num_series == MOST_TENANTS + 1
    assert value(registry, "requests", tenant=OTHERS, outcome="stop") == 51
    metrics.ended(replace(USAGE, tenant="tenant-0"))
    assert value(registry, "requests", tenant="tenant-0", outcome="stop") == 2


@pytest.mark.parametrize(("tenants", "shown"), [("", False), ("tenants.yaml", True)])
def test_without_tenants_there_are_no_such_series(tenants: str, shown: bool) -> None:
    metrics = RouterMetrics(RouterConfig(tenants=tenants), instance="router")
    names = {family.name for family in metrics.registry.collect()}
    assert ({"baton_tenant_requests", "baton_tenant_tokens", "baton_tenant_cost"} <= names) is shown
    assert any(name.startswith("baton_tenant") for name in names) is shown
    metrics.close()
