"""Tests every error of the command line: one line on stderr, a non-zero status, no traceback."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from services.cli.main import COMMANDS
from tests.support.processes import PYTHON_PATH, ROOT
from tests.support.trusted import CLUSTER_TOKEN

pytestmark = pytest.mark.process

NO_ONE = "127.0.0.1:1"  # nothing listens there
NOBODY = f"{NO_ONE}: no Baton answers there; is one running (baton up), and is this its port (--target)? UNAVAILABLE: "


def baton(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return tokenless(*arguments, BATON_CLUSTER_TOKEN=CLUSTER_TOKEN, **environ)


def tokenless(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return subprocess.run(
        [sys.executable, "-m", "services.cli.main", *arguments],
        env={**clean, "PYTHONPATH": PYTHON_PATH, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nope"], 2, "'nope' is not a command"),
        (["up", "--prefill", "x"], 2, "--prefill: 'x' is not a whole number"),
        (["up", "--prefill", "1", "--decode", "0"], 2, "--decode: without a decode or a mixed worker"),
        (["up", "--port", "70000"], 2, "--port: 70000 must be in [0, 65535]"),
        (["up", "--metrics-port", "65535"], 2, "--metrics-port: "),
        (["up", "--port", "0", "--model", "/no/such/model"], 2, "--model: '/no/such/model'"),
        (["up", "--host", "host.invalid"], 2, "--host: host.invalid does not resolve here"),
        (["up", "--port", "0", "--trace-file", "/no/folder/t"], 2, "--trace-file: /no/folder/t: No such file"),
        (["up", "--transport", "pigeon"], 2, "--transport: 'pigeon' is not one of auto, shm, nixl, tcp, grpc"),
        (["up", "--device", "tpu"], 2, "--device: 'tpu' must be cpu, cuda, or one GPU such as cuda:0"),
        (["decode", "--device", "cuda:99", "--model", "/no/such/model"], 2, "--device: cuda:99"),
        (["decode", "--device", "cuda:x"], 2, "--device: 'cuda:x' must be cpu, cuda, or one GPU such as cuda:0"),
        (["prefill", "--shm-dir", "/no/folder"], 2, "--shm-dir: /no/folder is no folder that this process may write"),
        (["up", "--unknown"], 2, "there is no --unknown"),
        (["up", "--prefil", "2"], 2, "there is no --prefil (did you mean --prefill?)"),
        (["generatee"], 2, "'generatee' is not a command (did you mean generate?)"),
        (["prefill", "--block-size", "1025"], 2, "--block-size: 1025 must be in [0, 1024]"),
        (["decode", "--kv-blocks", "1"], 2, "--kv-blocks: 1 must be 0, or at least 2"),
        (["up", "--kv-blocks", "1"], 2, "--kv-blocks: 1 must be 0, or at least 2"),
        (["prefill", "--router", "router"], 2, "--router: 'router' is not HOST:PORT of a router's control port"),
        (["decode", "--router", "127.0.0.1:1", "--router", "router:0"], 2, "--router: 'router:0' is not HOST:PORT"),
        (["mixed", "--router", "router:70000"], 2, "--router: 'router:70000' is not HOST:PORT"),
        (["prefill", "--router", "a..b:50052"], 2, "--router: 'a..b:50052' is not HOST:PORT"),
        (["prefill", "--router", "0.0.0.0:50052"], 2, "--router: '0.0.0.0:50052' is not HOST:PORT"),
        (["prefill", "--advertise", "myhost"], 2, "--advertise: 'myhost' is not HOST:PORT that others can dial"),
        (["decode", "--advertise", "[::]:50051"], 2, "--advertise: '[::]:50051' is not HOST:PORT that others"),
        (["decode", "--worker-id", "../x"], 2, "--worker-id: '../x' is no worker's name: 1 to 128 of"),
        (["router", "--silence-s", "0"], 2, "--silence-s: 0.0 must be in [0.001, 86400]"),
        (["prefill", "--ready-fd", "987"], 2, "file descriptor 987 is not open"),
        (["generate"], 2, "one of the arguments --prompt --prompt-file --token-ids is required"),
        (
            ["generate", "--target", NO_ONE, "--prompt", "hi"],
            1,
            NOBODY,
        ),
        (["generate", "--target", NO_ONE, "--prompt-file", "/no/file"], 2, "--prompt-file: "),
        (["generate", "--target", NO_ONE, "--token-ids", "1,x"], 2, "--token-ids: "),
        (["generate", "--target", NO_ONE, "--prompt", "hi", "--seed", "-1"], 2, "--seed: "),
        (["generate", "--target", NO_ONE, "--token-ids", "1", "--chat"], 2, "--chat needs text"),
        (["status", "--target", "nowhere"], 2, "--target: 'nowhere' is not HOST:PORT"),
        (
            ["status", "--target", NO_ONE, "--cluster-token-file", "/no/file"],
            2,
            "--cluster-token-file: there is no /no",
        ),
        (
            ["router", "--control-port", "0", "--cluster-token-file", "/dev/null"],
            2,
            "--cluster-token-file: /dev/null is not a regular file",
        ),
        (["router", "--control-port", "70000"], 2, "--control-port: 70000 must be in [0, 65535]"),
        (["up", "--control-port", "9400"], 2, "--control-port: 9400 is also "),
        (
            ["status", "--target", NO_ONE],
            1,
            NOBODY,
        ),
        (["explain", "--target", NO_ONE], 1, NOBODY),
        (["explain", "--request", "r", "--router", "nowhere"], 2, "'nowhere' is not HOST:PORT"),
        (["explain", "--request", "r", "--target", NO_ONE], 1, NOBODY),
        (["health", "--target", NO_ONE, "--timeout", "0"], 2, "--timeout: "),
        (
            ["health", "--target", NO_ONE],
            1,
            NOBODY,
        ),
        (["models"], 2, "required: list|pull"),
        (["models", "pull", "/no/such/model"], 2, "--model: "),
    ],
)
def test_one_line_and_a_status(arguments: list[str], status: int, words: str) -> None:
    process = baton(*arguments)
    assert words in process.stderr
    assert process.stderr.count("\n") == 1, process.stderr
    assert process.stderr.startswith("baton")
    assert process.returncode == status
    assert process.stdout == ""


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("router", "--port"),
        ("router", "--control-port"),
        ("router", "--http-port"),
        ("router", "--metrics-port"),
        ("prefill", "--port"),
        ("mixed", "--metrics-port"),
    ],
)
def test_a_service_tells_a_port_that_is_taken_before_it_loads_anything(command: str, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        free = [word for name in ("--port", "--control-port") if command == "router" for word in (name, "0")]
        process = baton(command, *free, flag, str(port), "--model", "/no/such/model")
    words = f"{flag}: cannot listen on 127.0.0.1:{port}: Address already in use; 0 picks a free one"
    assert process.stderr == f"baton {command}: error: {words}\n"
    assert process.returncode == 2


@pytest.mark.parametrize("command", [["up", "--port", "0"], ["mixed", "--port", "0"]])
@pytest.mark.parametrize("has_index", [False, True])
def test_missing_weights_are_told_at_once(tmp_path: pathlib.Path, command: list[str], has_index: bool) -> None:
    (tmp_path / "config.json").write_text("{}")
    missing = "*.safetensors"
    if has_index:
        (tmp_path / "there.safetensors").touch()
        files = {"a": "there.safetensors", "b": "missing.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        missing = "missing.safetensors"
    process = baton(*command, "--model", str(tmp_path))
    assert f"{tmp_path} lacks weights: there is no {missing}, and no other format is loaded\n" in process.stderr
    assert process.stderr.count("\n") == 1, process.stderr
    assert process.returncode == 1


@pytest.mark.parametrize("environ", [{"BATON_CLUSTER_TOKEN": CLUSTER_TOKEN}, {}])
def test_a_home_that_cannot_be_written_names_the_variable(tmp_path: pathlib.Path, environ: dict[str, str]) -> None:
    """The home is needed first for the token, or for the model if there is a token."""
    (tmp_path / "file").touch()
    process = tokenless("up", "--port", "0", BATON_HOME=str(tmp_path / "file"), **environ)
    assert process.returncode in (1, 2)
    assert "set BATON_HOME to a folder that can be written" in process.stderr
    assert process.stderr.count("\n") == 1, process.stderr


def test_environment_variables_are_named_in_errors() -> None:
    process = baton("up", BATON_PORT="many")
    assert process.stderr == "baton up: error: BATON_PORT: 'many' is not a whole number\n"
    assert process.returncode == 2


def test_unforeseen_error_is_one_line_too() -> None:
    """The error of a command whose module has no `main` is told like any other."""
    code = (
        "from services.cli import main as m; m.COMMANDS['models'] = ('json', ''); raise SystemExit(m.main(['models']))"
    )

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, cwd=ROOT, env=os.environ | more, capture_output=True, text=True, check=False)

    process = run()
    assert process.returncode == 1
    assert process.stderr.count("\n") == 1
    assert "BATON_DEBUG=1" in process.stderr
    assert "Traceback" in run(BATON_DEBUG="1").stderr


@pytest.mark.parametrize(("given", "found"), [({}, "NONE"), ({"GRPC_VERBOSITY": "DEBUG"}, "DEBUG")])
def test_grpcs_own_log_is_silent_unless_it_is_asked_for(given: dict[str, str], found: str) -> None:
    code = """
import os, sys
from services.cli import main as m
before = os.environ.get("GRPC_VERBOSITY")
m.COMMANDS["models"] = ("json", "")  # a command that ends at once
m.main(["models"])
print(before, os.environ["GRPC_VERBOSITY"], "grpc" in sys.modules)
"""
    clean = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=clean | given, capture_output=True, text=True, check=True
    )
    assert process.stdout.split() == [str(given.get("GRPC_VERBOSITY")), found, "False"]


def test_help_lists_every_command_and_loads_none() -> None:
    code = "import sys; from services.cli.main import main; main(['--help']); print(sorted(sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    usage, _, modules = process.stdout.rpartition("\n[")
    assert all(f"  {command} " in usage for command in COMMANDS)
    assert not {"'torch'", "'grpc'", "'asyncio'", "'argparse'"} & set(modules.split(", "))


@pytest.mark.parametrize("command", ["up", "generate", "chat", "status", "health", "models", "prefill", "decode"])
def test_every_command_has_help(command: str) -> None:
    process = baton(command, "--help")
    assert process.returncode == 0
    assert process.stdout.startswith(f"usage: baton {command}")


def test_models_list_of_an_empty_cache(tmp_path: pathlib.Path) -> None:
    process = baton("models", "list", BATON_HOME=str(tmp_path))
    assert process.stdout == "smollm2-135m-instruct  (not fetched: baton models pull)\n"
    assert baton("models", "list", "--json", BATON_HOME=str(tmp_path)).stdout == "[]\n"
