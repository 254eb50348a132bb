"""Tests that what a newcomer gets wrong is answered with what to do: another token, another port, a router that went
away."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from baton.v1 import control_pb2_grpc
from services.cli.main import main
from tests.support.processes import PYTHON_PATH
from tests.support.trusted import CLUSTER_TOKEN

pytestmark = pytest.mark.process

WAIT_S = 60.0
# A router that answers with one word and then, or at once, falls silent; the parent kills it.
SILENT = """
import threading
from concurrent import futures
import grpc
from baton.v1 import inference_pb2, inference_pb2_grpc

class Router(inference_pb2_grpc.InferenceServiceServicer):
    def GenerateStream(self, request, context):
        print("asked", flush=True)
        if request.text == "begin":
            yield inference_pb2.GenerateStreamResponse(chunk=inference_pb2.Chunk(text="begun "))
        threading.Event().wait()

server = grpc.server(futures.ThreadPoolExecutor(1))
inference_pb2_grpc.add_InferenceServiceServicer_to_server(Router(), server)
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
server.wait_for_termination()
"""


class Control(control_pb2_grpc.ControlServiceServicer):
    """Is a control port that knows another token."""

    def GetStatus(self, request: object, context: grpc.ServicerContext) -> object:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "it needs the cluster token; the call has another token")


@pytest.fixture
def control_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", CLUSTER_TOKEN)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    control_pb2_grpc.add_ControlServiceServicer_to_server(Control(), server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield target
    server.stop(None).wait()


def test_a_wrong_token_names_what_gives_the_token(control_port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--target", control_port]) == 1
    err = capsys.readouterr().err
    assert "; --cluster-token-file, or BATON_CLUSTER_TOKEN, must give the token that the router has\n" in err


def test_a_chat_with_a_port_that_is_not_for_clients_does_not_begin(
    control_port: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main(["chat", "--target", control_port]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{control_port}: this is not the router's port for clients (--port)" in err


def test_a_chat_with_nobody_does_not_begin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main(["chat", "--target", "127.0.0.1:1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "no Baton answers there" in err


@pytest.mark.parametrize("prompt", ["begin", "wait"])
def test_a_router_that_goes_away_under_an_answer_is_not_one_that_was_never_there(prompt: str) -> None:
    environ = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    with contextlib.ExitStack() as stack:
        silent = subprocess.Popen([sys.executable, "-c", SILENT], env=environ, stdout=subprocess.PIPE, text=True)
        router = stack.enter_context(silent)
        stack.callback(router.kill)
        assert router.stdout is not None
        target = f"127.0.0.1:{int(router.stdout.readline())}"
        # A text as it is: for a message it would first ask which models there are.
        words = ["generate", "--raw", "--target", target, "--prompt", prompt]
        command = [sys.executable, "-m", "services.cli.main", *words]
        with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as client:
            assert router.stdout.readline() == "asked\n"
            assert client.stdout is not None
            if prompt == "begin":
                assert client.stdout.read(len("begun ")) == b"begun "
            router.kill()
            _, err = client.communicate(timeout=WAIT_S)
    assert client.returncode == 1
    assert f"{target}: the connection was lost; has the router been stopped?".encode() in err
    assert b"no Baton answers" not in err
