"""Tests what the flags of placement mean to a coordinator, for each command that has some of them."""

from __future__ import annotations

import dataclasses

from services.router.config import RouterConfig
from services.router.coordinator.config import CoordinatorConfig
from services.router.placement_config import PlacementConfig, PolicyChoice
from services.router.policy import Split, preset, sharing

DEFAULT = CoordinatorConfig(model_context_tokens=4096)
STICKY = preset("sticky", "--policy")


def test_the_flags_of_a_router_all_reach_its_coordinators() -> None:
    config = RouterConfig(
        split="never", isolate_long_prompts="auto", slow_factor=3.0, share_prefixes="never", replay_across_engines=True
    )
    found = config.applied_to(DEFAULT, STICKY)
    assert found.policy == sharing(STICKY, "never")
    assert (found.split, found.replay_across_engines) == (Split.NEVER, True)
    assert (found.long_prompts.isolation, found.outliers.slow_factor) == ("auto", 3.0)
    told = ("policy", "split", "replay_across_engines", "long_prompts", "outliers")
    assert dataclasses.replace(found, **{name: getattr(DEFAULT, name) for name in told}) == DEFAULT, "no more is said"


def test_what_a_command_has_no_flag_for_stays_as_it_is() -> None:
    found = PolicyChoice(split="auto").applied_to(DEFAULT, STICKY)
    assert found == dataclasses.replace(DEFAULT, policy=STICKY, split=Split.AUTO)
    found = PlacementConfig(slow_factor=0.0).applied_to(DEFAULT, STICKY)
    assert found.outliers.slow_factor == 0.0
    assert (found.policy, found.replay_across_engines) == (STICKY, False)


def test_a_policy_is_chosen_by_model() -> None:
    chosen = PolicyChoice(policy=("hybrid", "m=sticky"), policy_weight=("prefill.near=1",)).selection()
    assert (chosen.of("m").name, chosen.of("other").name) == ("sticky", "hybrid")
