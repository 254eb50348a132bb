"""Dashboards and alert rules ask for metrics that Baton has, by the names a scrape shows."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import yaml
from prometheus_client import CollectorRegistry

from scripts import metrics_table
from services.router.config import RouterConfig
from services.router.coordinator import Coordinator
from services.router.coordinator.config import CoordinatorConfig
from services.router.telemetry.metrics import RouterMetrics
from tests.support.compose import DEPLOY, load
from tests.support.models import tiny_model
from tests.support.promql import metrics_of, of_dashboard, of_rules
from tests.support.workers import MIXED, running_worker, worker_config, worker_metrics

DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
RULES = sorted((DEPLOY / "prometheus").glob("rules*.yml"))
CONFIG = DEPLOY / "prometheus" / "prometheus.yml"
_SAMPLES = {
    "counter": ("_total", "_created"),
    "histogram": ("_bucket", "_count", "_sum", "_created"),
    "summary": ("", "_count", "_sum", "_created"),
    "info": ("_info",),
}
# What Prometheus itself adds to each target, and what it makes of alerts.
_PROMETHEUS = {"up", "scrape_duration_seconds", "scrape_samples_scraped", "ALERTS", "ALERTS_FOR_STATE"}


def samples_of(registry: CollectorRegistry) -> Iterator[str]:
    """Yields the names of all samples that a scrape can show, those of labels that have not occurred included."""
    for family in registry.collect():
        for suffix in _SAMPLES.get(family.type, ("",)):
            yield family.name + suffix
        yield from (sample.name for sample in family.samples)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def exported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Returns the names that a real router's registry and a real worker's export."""
    router = RouterMetrics(
        RouterConfig(tenants="t.yaml", usage_log="u.jsonl", request_log="r.jsonl", tenants_store="redis://h"),
        instance="router",
    )
    router.of("m").observe(Coordinator(CoordinatorConfig(model_context_tokens=1024)))
    names = set(samples_of(router.registry))
    router.close()
    model = tiny_model("llama", tmp_path_factory.mktemp("models"))
    async with running_worker(worker_config(model), MIXED) as host:
        worker = worker_metrics(host)
        names |= set(samples_of(worker.registry))
        worker.close()
    return names | _PROMETHEUS | {name for path in RULES for name in of_rules(path)[1]}


@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_scrape_shows(exported: set[str]) -> None:
    assert {"baton_requests_total", "baton_blocks", "baton_info", "process_resident_memory_bytes"} <= exported
    assert "baton_requests" not in exported, "a counter's sample has its suffix"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
async def test_dashboards_name_metrics_that_exist(path: Path, exported: set[str]) -> None:
    expressions = list(of_dashboard(path))
    assert any(map(metrics_of, expressions)), "no query at all"
    for expression in expressions:
        assert metrics_of(expression) <= exported, expression


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
async def test_rules_name_metrics_that_exist(path: Path, exported: set[str]) -> None:
    expressions, _ = of_rules(path)
    assert expressions
    for expression in expressions:
        assert metrics_of(expression) <= exported, expression


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("baton_blocks", {"baton_blocks"}),
        ('sum by (class) (baton_blocks{class=~"free|cached", instance="$worker"})', {"baton_blocks"}),
        ("rate(baton_steps_total[$__rate_interval]) > bool 0.5", {"baton_steps_total"}),
        (
            "histogram_quantile(0.95, sum(rate(a_bucket[5m])) by (le)) / on (instance) group_left (service) b_info",
            {"a_bucket", "b_info"},
        ),
        ("vllm:num_requests_waiting offset 5m unless on() absent(up)", {"vllm:num_requests_waiting", "up"}),
        ("1 - (sum(rate(x_total[5m])) or vector(0)) / 1e3 # of y_total", {"x_total"}),
        (
            "max_over_time(deriv(a_seconds[10m])[1h:1m]) and on(job) time() - b_created > 300",
            {"a_seconds", "b_created"},
        ),
        ('label_replace(x, "a", "$1", "b", "(y{z}.*)")', {"x"}),
    ],
)
def test_names_are_found_in_promql(expression: str, names: set[str]) -> None:
    assert metrics_of(expression) == names


def test_expressions_are_found_wherever_a_dashboard_hides_them(tmp_path: Path) -> None:
    dashboard = tmp_path / "d.json"
    dashboard.write_text(
        '{"templating": {"list": [{"type": "query", "query": {"query": "label_values(a, instance)"}},'
        ' {"type": "custom", "query": "p50,p95"}, {"type": "query", "definition": "label_values(job)"}]},'
        ' "panels": [{"panels": [{"targets": [{"expr": "rate(b_total[5m])"}]}]}]}'
    )
    assert set().union(*map(metrics_of, of_dashboard(dashboard))) == {"a", "b_total"}


def test_rule_files_and_names_are_those_that_compose_gives() -> None:
    config = yaml.safe_load(CONFIG.read_text())
    assert config["rule_files"] == ["rules*.yml"]
    ports = {sd["port"] for job in config["scrape_configs"] for sd in job["dns_sd_configs"]}
    names = {name for job in config["scrape_configs"] for sd in job["dns_sd_configs"] for name in sd["names"]}
    services = load()["services"]
    networks = [each["networks"]["default"] for each in services.values() if "networks" in each]
    aliases = {alias for network in networks for alias in network["aliases"]}
    assert ports == {9400}
    assert names <= set(services) | aliases
    assert names == {"router", "worker"}


def test_data_sources_are_services() -> None:
    path = DEPLOY / "grafana" / "provisioning" / "datasources" / "baton.yaml"
    services = load()["services"]
    for source in yaml.safe_load(path.read_text())["datasources"]:
        assert source["url"].removeprefix("http://").partition(":")[0] in services
    uids = {source["uid"] for source in yaml.safe_load(path.read_text())["datasources"]}
    for dashboard in DASHBOARDS:
        for name in _uids(yaml.safe_load(dashboard.read_text())):
            assert name in uids or name.startswith(("$", "-- ")) or name == "grafana", f"{dashboard.name}: {name}"


def _uids(node: object) -> Iterator[str]:
    """Yields the uid of every data source that a dashboard names."""
    if isinstance(node, dict):
        source = node.get("datasource")
        if isinstance(source, dict) and isinstance(source.get("uid"), str):
            yield source["uid"]
        for value in node.values():
            yield from _uids(value)
    elif isinstance(node, list):
        for item in node:
            yield from _uids(item)


@pytest.mark.process
@pytest.mark.parametrize(
    "check",
    [["check", "config", str(CONFIG)], *(["check", "rules", str(path)] for path in RULES)],
    ids=lambda check: f"{check[1]} {Path(check[2]).name}",
)
def test_promtool_agrees(check: list[str]) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not on this machine")
    result = subprocess.run(["promtool", *check], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.asyncio(loop_scope="module")
async def test_the_reference_lists_what_processes_export() -> None:
    text = metrics_table.DOCUMENT.read_text()
    assert metrics_table.updated(text, await metrics_table.exported()) == text, "run scripts/metrics_table.py"
