"""Defines the flags that say how requests are placed. `baton up`, `simulate` and `plan` compose those that they have.

Owns: what these flags mean to a coordinator, and the form of the file of policies as TOML. Never: what that file may
say (`policy/selection.py`), or what a policy does (`policy`).
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.core.config import option
from services.core.errors import ConfigError
from services.core.printable import printable
from services.router.coordinator.config import CoordinatorConfig
from services.router.policy import DEFAULT_SPLIT, SHARING, PolicyConfig, Selection, Split, sharing
from services.router.policy.filter import ISOLATIONS, LongPromptConfig
from services.router.policy.outliers import OutlierConfig, is_slow_factor
from services.router.policy.presets import DEFAULT, PRESETS


@dataclass(frozen=True)
class PolicyChoice:
    """Keeps the flags that say which worker is the best for a request, and whether it takes two."""

    policy: tuple[str, ...] = option(
        (),
        f"how requests are placed, of all models, or as MODEL=NAME of one: {', '.join(PRESETS)}; repeatable "
        f"(default: {DEFAULT})",
        metavar="NAME",
    )
    policy_file: str = option(
        "", "TOML file with the policies and weights of models; --policy comes before it", metavar="FILE"
    )
    policy_weight: tuple[str, ...] = option(
        (),
        "changes or adds a term of placement, PHASE.TERM=W: prefill.prefix_cached=8 sends prompts where their "
        "beginnings are cached; of all models, whatever their policies are; repeatable",
        metavar="PHASE.TERM=W",
    )
    split: str = option(
        DEFAULT_SPLIT.value,
        "which prompts run apart from their decodes: auto (where it pays, by measured costs), always or never (where a "
        "decode worker can run the whole)",
        choices=tuple(split.value for split in Split),
    )

    def selection(self) -> Selection:
        """Returns the policies of all models. Raises ConfigError, which names the flag, or the file and the field."""
        return read_selection(self.policy, self.policy_weight, self.policy_file)

    def applied_to(self, router: CoordinatorConfig, policy: PolicyConfig) -> CoordinatorConfig:
        """Returns the configuration of a coordinator that places by these flags, and by the policy of its model."""
        return dataclasses.replace(router, policy=policy, split=Split(self.split))


@dataclass(frozen=True)
class PlacementConfig(PolicyChoice):
    """Keeps also the flags that say which workers are kept from a request."""

    isolate_long_prompts: str = option(
        LongPromptConfig.isolation,
        "auto keeps prompts of more than twice the mean length off some of the prefill workers while they are most of "
        "the work, so that short ones need not wait behind them",
        choices=ISOLATIONS,
    )
    slow_factor: float = option(
        OutlierConfig.slow_factor,
        "a worker whose steps take this many times the median of its peers' is ejected for a while; 0: never",
        check=is_slow_factor,
        must="must be 0, or above 1 and at most 1000",
        metavar="X",
    )

    def applied_to(self, router: CoordinatorConfig, policy: PolicyConfig) -> CoordinatorConfig:
        return dataclasses.replace(
            super().applied_to(router, policy),
            long_prompts=LongPromptConfig(isolation=self.isolate_long_prompts),
            outliers=OutlierConfig(slow_factor=self.slow_factor),
        )


@dataclass(frozen=True)
class RoutingConfig(PlacementConfig):
    """Keeps also the flags that no simulated cluster has."""

    share_prefixes: str = option(
        "auto",
        "auto: a worker brings the beginning of a prompt from another worker's pool, or from a store, where that costs "
        "less than to compute it, and stores keep what is computed; never: neither",
        choices=SHARING,
    )
    replay_across_engines: bool = option(
        False,
        "let a stream whose engine (torch, vllm) has no worker left that could go on with it go on with another "
        "engine; else it waits for one, and fails",
    )

    def applied_to(self, router: CoordinatorConfig, policy: PolicyConfig) -> CoordinatorConfig:
        return dataclasses.replace(
            super().applied_to(router, sharing(policy, self.share_prefixes)),
            replay_across_engines=self.replay_across_engines,
        )


_MAX_BYTES = 1 << 20
"""No policy file is larger; a mistaken path, such as a device's, may have no end."""


def read_selection(policies: Sequence[str], weights: Sequence[str], file: str) -> Selection:
    """Returns the policies by the values of --policy, --policy-weight and --policy-file. Raises ConfigError, which
    names the flag, or the file and the field."""
    return Selection(policies, weights, _content(file) if file else None, file)


def _content(file: str) -> dict[str, object]:
    origin = f"--policy-file: {printable(file)}"
    try:
        with open(Path(file), "rb") as opened:
            data = opened.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{origin}: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{origin}: it has more than {_MAX_BYTES} bytes")
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # no TOML, or no UTF-8
        raise ConfigError(f"{origin}: {printable(str(error))}") from error
