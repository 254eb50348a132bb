"""Chooses the policy of each model, by flags and by the content of a policy file. Pure.

Owns: what flags and the file may say, and which of them counts. Never: reads the file, or knows which models there are.

For one model, `--policy MODEL=NAME` counts, else `--policy NAME`, else the model's table in the file, else the top of
the file, else the default. Weights belong to the policy beside which they stand: what replaces a policy replaces its
weights, and a model's table without a policy adds its weights to those of the top. `--policy-weight` is applied last,
to every model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.core.errors import ConfigError
from services.core.printable import printable
from services.router.policy.presets import DEFAULT, preset
from services.router.policy.terms import TERMS, PolicyConfig, reweighted, weighted

_MOST_NAME_CHARS = 256
_KEYS_OF_MODEL = ("policy", "weights")
_KEYS = (*_KEYS_OF_MODEL, "models")
_PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class Chosen:
    """Names the preset of a model, with the terms and weights that it has in the end."""

    name: str
    config: PolicyConfig

    def __str__(self) -> str:
        phases = (("prefill", self.config.prefill_terms), ("decode", self.config.decode_terms))
        sums = (
            f"{phase} {' + '.join(f'{weight:g} {term.__name__}' for weight, term in terms) or 'nothing'}"
            for phase, terms in phases
        )
        return f"{self.name} ({'; '.join(sums)})"


class Selection:
    """Keeps the policies of all models."""

    def __init__(
        self,
        policies: Sequence[str] = (),
        weights: Sequence[str] = (),
        content: Mapping[str, Any] | None = None,
        path: str = "",
    ) -> None:
        """Takes the values of `--policy` and `--policy-weight`, and the content of the file at `path`, if there is one.

        Raises ConfigError, which names the flag, or the file and the field."""
        top, self._of_model = _read_file(content or {}, f"--policy-file: {printable(path)}")
        by_flag = _read_flags(policies)
        if "" in by_flag:
            top, self._of_model = by_flag.pop(""), {}
        self._of_model |= by_flag
        self._top = _with_weights(top, weights)
        self._of_model = {model_id: _with_weights(each, weights) for model_id, each in self._of_model.items()}

    def of(self, model_id: str) -> Chosen:
        """Returns the policy of a model."""
        return self._of_model.get(model_id, self._top)


def _with_weights(chosen: Chosen, weights: Sequence[str]) -> Chosen:
    return Chosen(chosen.name, weighted(chosen.config, weights, "--policy-weight"))


def _read_flags(policies: Sequence[str]) -> dict[str, Chosen]:
    """Returns the policies by model; that of all models has no name."""
    found: dict[str, Chosen] = {}
    for policy in policies:
        model_id, between, name = policy.rpartition("=")
        if between and not model_id:
            raise ConfigError(f"--policy: {policy!r} is not NAME or MODEL=NAME")
        if model_id in found:
            raise ConfigError(f"--policy: {policy!r}: {repr(model_id) if model_id else 'all models'} had one before")
        found[model_id] = Chosen(name, preset(name, "--policy"))
    return found


def _read_file(content: Mapping[str, Any], origin: str) -> tuple[Chosen, dict[str, Chosen]]:
    _check_keys(content, _KEYS, origin)
    top = _read_table(content, Chosen(DEFAULT, preset(DEFAULT, origin)), f"{origin}: ")
    models = _table(content.get("models", {}), f"{origin}: models")
    found: dict[str, Chosen] = {}
    for model_id, value in models.items():
        where = f"{origin}: models.{printable(model_id[:_MOST_NAME_CHARS])!r}"
        table = _table(value, where)
        _check_keys(table, _KEYS_OF_MODEL, where)
        found[model_id] = _read_table(table, top, f"{where}.")
    return top, found


def _read_table(table: Mapping[str, Any], chosen: Chosen, prefix: str) -> Chosen:
    """Returns what the table says, where it says something, and else what is `chosen` before."""
    if "policy" in table:
        name = table["policy"]
        if not isinstance(name, str):
            raise ConfigError(f"{prefix}policy: {_shown(name)} is no text")
        chosen = Chosen(name, preset(name, f"{prefix}policy"))
    config = chosen.config
    for phase, terms in _table(table.get("weights", {}), f"{prefix}weights").items():
        where = f"{prefix}weights.{printable(phase[:_MOST_NAME_CHARS])}"
        if phase not in _PHASES:
            raise ConfigError(f"{where}: there are {', '.join(_PHASES)}")
        for name, weight in _table(terms, where).items():
            of_term = f"{where}.{printable(name[:_MOST_NAME_CHARS])}"
            if name not in TERMS:
                raise ConfigError(f"{of_term}: there are {', '.join(TERMS)}")
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                raise ConfigError(f"{of_term}: {_shown(weight)} is no number")
            config = reweighted(config, phase, TERMS[name], weight, of_term)
    return Chosen(chosen.name, config)


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {_shown(value)} is no table")
    return value


def _check_keys(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: {_shown(key)} is none of its fields, which are {', '.join(known)}")


def _shown(value: Any) -> str:
    return printable(repr(value)[:_MOST_NAME_CHARS])
