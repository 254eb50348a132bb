"""Tests which policy a model gets, by flags and by a file, and what is said of a wrong choice."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from baton.v1 import control_pb2, types_pb2
from services.core import config as configuration
from services.core.errors import ConfigError
from services.router.config import RouterConfig
from services.router.placement_config import read_selection
from services.router.policy import PRESETS, Selection
from services.router.workers.wire import worker_info
from services.worker.config import WorkerConfig
from tests.support.router_bench import Bench

FILE = """
policy = "token_aware"
weights.decode.quick_steps = 2

[models.chat]
policy = "sticky"

[models."org/code".weights]
prefill = { prefix_cached = 8, trusted = 0 }
"""


def written(tmp_path: Path, content: str) -> str:
    path = tmp_path / "policies.toml"
    path.write_text(content)
    return str(path)


CASES: dict[str, tuple[list[str], str, dict[str, str]]] = {
    "nothing is said": ([], "", {"a": "pressure"}),
    "one for all": (["sticky"], "", {"a": "sticky", "b": "sticky"}),
    "one for one": (["a=sticky"], "", {"a": "sticky", "b": "pressure"}),
    "both, in any order": (["org/m=x=hybrid", "weighted"], "", {"org/m=x": "hybrid", "b": "weighted"}),
    "the file": ([], FILE, {"chat": "sticky", "org/code": "token_aware", "b": "token_aware"}),
    "a flag before the top of the file": (["chat=hybrid"], FILE, {"chat": "hybrid", "b": "token_aware"}),
    "a flag for all before all of the file": (["hybrid"], FILE, {"chat": "hybrid", "org/code": "hybrid"}),
}


@pytest.mark.parametrize("case", CASES)
def test_which_policy_counts(tmp_path: Path, case: str) -> None:
    flags, content, expected = CASES[case]
    selection = read_selection(flags, [], written(tmp_path, content) if content else "")
    assert {model_id: selection.of(model_id).name for model_id in expected} == expected
    if not content:
        assert all(selection.of(model_id).config == PRESETS[name] for model_id, name in expected.items())


def named(terms: tuple[tuple[float, object], ...]) -> dict[str, float]:
    return {getattr(term, "__name__", ""): weight for weight, term in terms}


def test_weights_stand_beside_their_policy_and_those_of_the_flag_come_last(tmp_path: Path) -> None:
    path = written(tmp_path, FILE)
    selection = read_selection([], ["prefill.near=3"], path)
    top, chat, code = (selection.of(name).config for name in ("any", "chat", "org/code"))
    assert named(top.decode_terms)["quick_steps"] == 2
    assert named(chat.prefill_terms) == {"conversation_place": 4, "few_requests": 1, "trusted": 1, "near": 3}
    assert named(chat.decode_terms) == named(PRESETS["sticky"].decode_terms), "the top's weights are of its policy"
    assert named(code.prefill_terms) == {"soon_computed": 4, "quick_steps": 2, "prefix_cached": 8, "near": 3}
    assert named(code.decode_terms)["quick_steps"] == 2, "a table without a policy adds to the top"
    assert (top.hash_prompts, code.hash_prompts) == (False, True)
    replaced = read_selection(["org/code=token_aware"], [], path).of("org/code").config
    assert replaced == PRESETS["token_aware"]


def test_what_is_chosen_can_be_read() -> None:
    chosen = Selection(["round_robin"], ["decode.least_recent=0", "decode.in_place=0", "decode.trusted=0"]).of("m")
    assert str(chosen) == "round_robin (prefill 1 least_recent + 1 trusted; decode nothing)"


KNOWN = ", ".join(PRESETS)
WRONG_FLAGS = {
    "robin": f"--policy: 'robin' is not one of {KNOWN}",
    "m=robin": f"--policy: 'robin' is not one of {KNOWN}",
    "m=": f"--policy: '' is not one of {KNOWN}",
    "=sticky": "--policy: '=sticky' is not NAME or MODEL=NAME",
}


@pytest.mark.parametrize("flag", WRONG_FLAGS)
def test_a_wrong_flag_is_named(flag: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Selection([flag])
    assert str(raised.value) == WRONG_FLAGS[flag]


@pytest.mark.parametrize(("twice", "what"), [(["sticky", "hybrid"], "all models"), (["m=sticky", "m=sticky"], "'m'")])
def test_a_model_has_one_policy(twice: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=f"--policy: .* {what} had one before"):
        Selection(twice)


@pytest.mark.parametrize(
    ("weight", "why"), [("prefill.near=1000001", "is not in"), ("prefill.far=1", "there are short_queue")]
)
def test_a_wrong_weight_is_named(weight: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"--policy-weight: '{weight}'.* {why}"):
        Selection(["sticky"], [weight])


WRONG_FILES = {
    "policy = 1": "policy: 1 is no text",
    'policy = "robin"': "policy: 'robin' is not one of round_robin, ",
    'policies = "sticky"': "'policies' is none of its fields, which are policy, weights, models",
    "models = 3": "models: 3 is no table",
    "models.a = 3": "models.'a': 3 is no table",
    "models.a.policy = []": "models.'a'.policy: [] is no text",
    'models.a.policy = "robin"': "models.'a'.policy: 'robin' is not one of round_robin, ",
    "models.a.models = {}": "models.'a': 'models' is none of its fields, which are policy, weights",
    "weights.near = 1": "weights.near: there are prefill, decode",
    "weights.decode = 1": "weights.decode: 1 is no table",
    "weights.decode.far = 1": "weights.decode.far: there are short_queue, ",
    "weights.decode.near = true": "weights.decode.near: True is no number",
    "weights.decode.near = '1'": "weights.decode.near: '1' is no number",
    "weights.decode.near = -1": "weights.decode.near: the weight -1 is not in [0, 1e+06]",
    "weights.decode.near = nan": "weights.decode.near: the weight nan is not in [0, 1e+06]",
    "weights.decode.near = inf": "weights.decode.near: the weight inf is not in [0, 1e+06]",
    "weights.decode.near = 1" + "0" * 400: "weights.decode.near: the weight beyond 1e300 is not in [0, 1e+06]",
    'models."\\u001b[2J".weights.prefill.near = 2e6': "models.'\\\\x1b[2J'.weights.prefill.near: the weight 2e+06 ",
    "policy = ": "Invalid value (at end of document)",
    "[" * 40_000: "",
    "x" * ((1 << 20) + 1): "it has more than 1048576 bytes",
}


@pytest.mark.parametrize("content", WRONG_FILES, ids=lambda content: content[:24])
def test_a_wrong_file_is_named_with_its_field(tmp_path: Path, content: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigError) as raised:
        read_selection([], [], path)
    assert str(raised.value).startswith(f"--policy-file: {path}: {WRONG_FILES[content]}")
    assert str(raised.value).isprintable()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b'policy = "\xe9"')
    for name, why in (("none", "No such file or directory"), (".", "Is a directory"), ("latin", "'utf-8' codec")):
        path = str(tmp_path / name)
        with pytest.raises(ConfigError) as raised:
            read_selection([], [], path)
        assert str(raised.value).startswith(f"--policy-file: {path}: {why}")


def loaded(kind: type, environ: dict[str, str]) -> object:
    return configuration.load(kind, argparse.Namespace(), environ)


def test_variables_choose_as_flags_do() -> None:
    config = loaded(RouterConfig, {"BATON_POLICY": "sticky,m=hybrid", "BATON_POLICY_WEIGHT": ""})
    assert isinstance(config, RouterConfig)
    selection = read_selection(config.policy, config.policy_weight, config.policy_file)
    assert (selection.of("a").name, selection.of("m").name) == ("sticky", "hybrid")


@pytest.mark.parametrize("capacity", ["0", "-1", "0.0001", "1000001", "inf", "nan", "x"])
def test_a_capacity_is_above_zero_and_bounded(capacity: str) -> None:
    with pytest.raises(ConfigError, match="BATON_CAPACITY: "):
        loaded(WorkerConfig, {"BATON_CAPACITY": capacity})


def test_what_a_worker_declares_reaches_policy() -> None:
    bench = Bench(policy=PRESETS["weighted"])
    for capacity in (None, 2.5):
        described = control_pb2.WorkerDescription(
            worker_id="w", roles=[types_pb2.WORKER_ROLE_PREFILL], incarnation=1, capacity=capacity
        )
        assert worker_info(described).capacity == (capacity or 1.0)
    for name, role, declared in (("p", types_pb2.WORKER_ROLE_PREFILL, 2.5), ("d", types_pb2.WORKER_ROLE_DECODE, 1.0)):
        info = worker_info(
            control_pb2.WorkerDescription(worker_id=name, roles=[role], incarnation=1, capacity=declared)
        )
        bench.join(name, info.roles, capacity=info.capacity)
    views = {view.worker_id: view for view in bench.coordinator.workers.views()}
    assert (views["p"].capacity, views["d"].capacity) == (2.5, 1.0)
    bench.submit("r")
    assert bench.coordinator.workers.cluster.views["p"].num_legs == 1
    assert bench.coordinator.workers.cluster.views["p"].num_requests == 1
