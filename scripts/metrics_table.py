"""Writes the table of metrics in docs/metrics.md from what router and worker export. `--check` fails if they differ.

The worker is a real one, with a tiny model, so that nothing is listed that no process has.
"""

from __future__ import annotations

import asyncio
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the tests' tiny model

from services.router.config import RouterConfig  # noqa: E402
from services.router.coordinator import Coordinator  # noqa: E402
from services.router.coordinator.config import CoordinatorConfig  # noqa: E402
from services.router.telemetry.metrics import RouterMetrics  # noqa: E402
from tests.support.models import tiny_model  # noqa: E402
from tests.support.workers import MIXED, running_worker, worker_config, worker_metrics  # noqa: E402

DOCUMENT = ROOT / "docs" / "metrics.md"
BEGIN, END = "<!-- metrics: written by scripts/metrics_table.py -->", "<!-- end of metrics -->"
_SUFFIX = {"counter": "_total", "info": "_info"}
# Labels of metrics that have no sample until there is something to count, or a device.
_LABELS = {
    "baton_device_memory_bytes": ["kind"],
    "baton_tenant_requests": ["model", "outcome", "tenant"],
    "baton_tenant_tokens": ["kind", "model", "tenant"],
    "baton_tenant_cost": ["model", "tenant"],
}

Families = dict[str, tuple[Metric, set[str]]]
"""By name, with the processes that export it."""


async def exported() -> Families:
    families: Families = {}
    router = RouterMetrics(
        RouterConfig(tenants="t.yaml", usage_log="u.jsonl", request_log="r.jsonl", tenants_store="redis://h"),
        instance="router",
    )
    router.of("m").observe(Coordinator(CoordinatorConfig(model_context_tokens=1024)))
    _add(families, router.registry, "router")
    with tempfile.TemporaryDirectory() as folder:
        config = worker_config(tiny_model("llama", pathlib.Path(folder)), kv_host_bytes="1MiB")
        async with running_worker(config, MIXED) as host:
            worker = worker_metrics(host)
            _add(families, worker.registry, "worker")
            worker.close()
    router.close()
    return families


def table(families: Families) -> str:
    rows = ["| metric | type | labels | of | meaning |", "|---|---|---|---|---|"]
    for name in sorted(families, key=_order):
        family, processes = families[name]
        labels = ", ".join(f"`{label}`" for label in _labels(family))
        rows.append(
            f"| `{name}` | {family.type} | {labels} | {', '.join(sorted(processes))} | {family.documentation} |"
        )
    return "\n".join(rows)


def updated(document: str, families: Families) -> str:
    """Returns the document's text with the table as it should be."""
    if BEGIN not in document or END not in document:
        raise SystemExit(f"docs/metrics.md lacks the lines {BEGIN!r} and {END!r}")
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n\n{table(families)}\n\n{END}", document, flags=re.DOTALL)


def _add(families: Families, registry: CollectorRegistry, process: str) -> None:
    for family in registry.collect():
        name = family.name + _SUFFIX.get(family.type, "")
        families.setdefault(name, (family, set()))[1].add(process)


def _labels(family: Metric) -> Iterable[str]:
    found = {label for sample in family.samples for label in sample.labels} - {"le"}
    return sorted(found) or _LABELS.get(family.name, [])


def _order(name: str) -> tuple[int, str]:
    """Returns the sort key of a name: the conventions' names come first, then ours, the process's and the aliases."""
    prefixes = ("gen_ai_", "baton_", "process_", "vllm:")
    return next(place for place, prefix in enumerate(prefixes) if name.startswith(prefix)), name


def main() -> int:
    text = DOCUMENT.read_text()
    wanted = updated(text, asyncio.run(exported()))
    if sys.argv[1:] == ["--check"]:
        if wanted == text:
            return 0
        print("docs/metrics.md's table is stale: run scripts/metrics_table.py", file=sys.stderr)
        return 1
    DOCUMENT.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
