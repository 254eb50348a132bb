"""Tests the alert rules: they follow the one file of objectives, and fire when they should (rules_test.yml).

That the rules in the repository are made of the present file is checked by `make lint`.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from scripts import slo_rules
from services.router.config import RouterConfig
from services.rpc.status import CODES
from tests.support.compose import DEPLOY, env_file, services

RULES = DEPLOY / "prometheus" / "rules-slo.yml"
TESTS = Path(__file__).with_name("rules_test.yml")


def test_another_objective_makes_other_rules() -> None:
    settings = slo_rules.read(slo_rules.SETTINGS)
    text = slo_rules.rendered(
        {**settings, "BATON_SLO_TTFT_MS": "1000", "SLO_ERRORS": "0.05", "SLO_LATENCY_WINDOW": "7m"}
    )
    rules = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    assert any('{slo="ttft"} != 1 ' in rule["expr"] for rule in rules)
    assert any(rule["expr"].count("[7m]") and "above 800 ms" in rule["annotations"]["summary"] for rule in rules[1:])
    assert [rule["expr"].split()[-5] for rule in rules if rule.get("alert") == "BatonErrors"] == ["0.04", "0.05"]


def test_the_router_has_the_objectives_of_the_file() -> None:
    """It has them by default and in compose."""
    settings = env_file(slo_rules.SETTINGS)
    config = RouterConfig()
    assert float(settings["BATON_SLO_TTFT_MS"]) == config.slo_ttft_ms
    assert float(settings["BATON_SLO_E2E_MS"]) == config.slo_e2e_ms
    assert services()["router"]["env_file"] == ["slo.env"]


def test_errors_are_all_outcomes_but_a_clients_own() -> None:
    """Each new reason must be decided about: here, and in services/router/telemetry/slo.py."""
    ours = {kind.reason.lower() for kind in CODES} - set(slo_rules.NO_ERROR.split("|"))
    assert ours >= {"overloaded", "no_worker", "draining", "worker_failed", "step_failed", "config"}
    assert not ours & {"cancelled", "deadline_exceeded", "invalid_parameter", "unknown_model"}
    assert "context_length_exceeded" not in ours


def test_each_objective_warns_and_pages() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    severities: dict[str, set[str]] = {}
    for rule in rules:
        if "alert" in rule:
            severities.setdefault(rule["alert"], set()).add(rule["labels"]["severity"])
    assert severities.pop("BatonSloMismatch") == {"warning"}
    assert set(severities) == {"BatonTtft", "BatonEndToEnd", "BatonAvailability", "BatonErrors"}
    assert all(both == {"warning", "critical"} for both in severities.values())


def test_every_alert_is_tested() -> None:
    named = {
        rule["alert"]
        for path in (DEPLOY / "prometheus").glob("rules-*.yml")
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    cases = [case for test in yaml.safe_load(TESTS.read_text())["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} >= named - {"BatonEndToEnd"}
    assert {case["alertname"] for case in cases} == named


@pytest.mark.process
def test_when_they_speak_and_when_not() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not on this machine")
    result = subprocess.run(["promtool", "test", "rules", str(TESTS)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
