"""Writes deploy/prometheus/rules-slo.yml from deploy/slo.env, and the dashboard's list of outcomes that are no errors.

`--check` fails if a file differs.

Latency alerts read the router's own verdicts (baton_slo_requests_total) and not a quantile of a histogram, which is a
guess between two bucket bounds: with all requests at 2.6 s, the bounds 2.56 and 5.12 give a p95 of 4.99 s.
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Iterator

from services.router.telemetry.slo import ENDED_BY_CLIENT, NEAR, UNFIT

DEPLOY = pathlib.Path(__file__).resolve().parents[1] / "deploy"
SETTINGS, RULES = DEPLOY / "slo.env", DEPLOY / "prometheus" / "rules-slo.yml"
OVERVIEW = DEPLOY / "grafana" / "overview.json"
AWAY, EVERY_S = "baton:away:max", 15
"""1 while no request would find a worker, at each evaluation."""
# Outcomes that are no error of ours.
NO_ERROR = "|".join(sorted({"stop", "length", *(kind.reason.lower() for kind in (*UNFIT, *ENDED_BY_CLIENT))}))
LATENCIES = {
    "ttft": ("Ttft", "BATON_SLO_TTFT_MS", "time to the first token"),
    "e2e": ("EndToEnd", "BATON_SLO_E2E_MS", "time to the last token"),
}

Settings = dict[str, str]


def read(path: pathlib.Path) -> Settings:
    """Reads NAME=VALUE lines."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def rendered(settings: Settings) -> str:
    window = settings["SLO_AVAILABILITY_WINDOW"]
    parts = [
        "# Written by scripts/slo_rules.py from ../slo.env: change that.",
        "groups:",
        "  - name: baton-slo",
        f"    interval: {EVERY_S}s",
        "    rules:",
        # An absent router is not a ready one; but before it was ever seen, nothing is known.
        f"      - record: {AWAY}",
        f"        expr: 1 - (max(baton_ready) or 0 * max(last_over_time(baton_ready[{window}])))",
        *_latencies(settings),
        *_availability(settings),
        *_errors(settings),
        *_mismatches(settings),
    ]
    return "\n".join(parts) + "\n"


def _latencies(settings: Settings) -> Iterator[str]:
    window, share = settings["SLO_LATENCY_WINDOW"], float(settings["SLO_LATENCY_SHARE"])
    for slo, (name, flag, what) in LATENCIES.items():
        everything = f'sum(increase(baton_slo_requests_total{{slo="{slo}"}}[{window}]))'
        target_ms = float(settings[flag])
        for severity, results, limit_ms in (
            ("warning", "near|missed", NEAR * target_ms),
            ("critical", "missed", target_ms),
        ):
            slow = f'sum(increase(baton_slo_requests_total{{slo="{slo}",result=~"{results}"}}[{window}]))'
            ratio = f"{slow} / {everything} > {1 - share:g}"
            summary = f"{{{{ $value | humanizePercentage }}}} of requests have a {what} above {limit_ms:g} ms"
            yield from _alert(f"Baton{name}", severity, f"{ratio} and {_enough(everything, settings)}", "2m", summary)


def _availability(settings: Settings) -> Iterator[str]:
    """Yields the alerts on availability. They count against what the whole window allows, not its part that there are
    samples of: else a new deployment, whose first seconds are spent loading, would have missed its objective."""
    window, allowed = settings["SLO_AVAILABILITY_WINDOW"], 1 - float(settings["SLO_AVAILABILITY"])
    away = f"sum_over_time({AWAY}[{window}]) * {EVERY_S} / {_seconds(window)}"
    for severity, part in (("warning", NEAR), ("critical", 1.0)):
        summary = f"{part:.0%} of the {allowed * _seconds(window):g} s in {window} that may find no worker are used up"
        yield from _alert("BatonAvailability", severity, f"{away} > {part * allowed:g}", "0m", summary)


def _errors(settings: Settings) -> Iterator[str]:
    window, allowed = settings["SLO_ERRORS_WINDOW"], float(settings["SLO_ERRORS"])
    everything = f"sum(increase(baton_requests_total[{window}]))"
    failed = f'sum(increase(baton_requests_total{{outcome!~"{NO_ERROR}"}}[{window}]))'
    for severity, part in (("warning", NEAR), ("critical", 1.0)):
        expression = f"{failed} / {everything} > {part * allowed:g} and {_enough(everything, settings)}"
        summary = f"{{{{ $value | humanizePercentage }}}} of requests failed in {window}; {allowed:.2%} may"
        yield from _alert("BatonErrors", severity, expression, "0m", summary)


def _mismatches(settings: Settings) -> Iterator[str]:
    targets = ((slo, float(settings[flag]) / 1000) for slo, (_, flag, _) in LATENCIES.items())
    expression = " or ".join(f'baton_slo_target_seconds{{slo="{slo}"}} != {target_s:g}' for slo, target_s in targets)
    summary = "The objective {{ $labels.slo }} of {{ $labels.instance }} is {{ $value }} s, and another in slo.env"
    yield from _alert("BatonSloMismatch", "warning", expression, "5m", summary)


def _seconds(window: str) -> int:
    return int(window[:-1]) * {"m": 60, "h": 3600, "d": 86400, "w": 604800}[window[-1]]


def _enough(everything: str, settings: Settings) -> str:
    return f"{everything} >= {settings['SLO_MIN_REQUESTS']}"


def _alert(name: str, severity: str, expression: str, wait: str, summary: str) -> Iterator[str]:
    yield f"      - alert: {name}"
    yield f"        expr: {expression}"
    yield f"        for: {wait}"
    yield f"        labels: {{ severity: {severity} }}"
    yield f"        annotations: {{ summary: '{summary}' }}"


def main() -> int:
    overview = re.sub(r'(?<=outcome!~\\")[^"\\]*', NO_ERROR, OVERVIEW.read_text())
    wanted = {RULES: rendered(read(SETTINGS)), OVERVIEW: overview}
    wrong = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if sys.argv[1:] != ["--check"]:
        for path in wrong:
            path.write_text(wanted[path])
        return 0
    for path in wrong:
        print(f"{path.name} is not what {SETTINGS.name} and the router say: run scripts/slo_rules.py", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
