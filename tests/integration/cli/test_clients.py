"""Tests generate, chat, status and health against a scripted router."""

from __future__ import annotations

import io
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import IO

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2
from services.cli.main import main
from tests.support.processes import PYTHON_PATH
from tests.support.trusted import CLUSTER_TOKEN

pytestmark = pytest.mark.process

WAIT_S = 30.0


class Router(inference_pb2_grpc.InferenceServiceServicer, control_pb2_grpc.ControlServiceServicer):
    """Answers with the prompt's words. `hang` never ends; `refuse` is refused."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.cancelled = threading.Event()
        self.target = ""
        self.reason = "silent for 3 s"

    def GenerateStream(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateStreamResponse]:
        self.requests.append(request)
        text = request.messages.messages[-1].content if request.HasField("messages") else request.text
        if text == "refuse":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "sampling.temperature: must not be negative")
        if text.startswith("refuse"):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "must not be " + text.removeprefix("refuse"))
        if text == "hang":
            context.add_callback(self.cancelled.set)
        request_id = request.request_id or "req-1"
        yield inference_pb2.GenerateStreamResponse(prompt_info=inference_pb2.PromptInfo(request_id=request_id))
        words = text.split(" ") if text else ["tokens"]
        for position, word in enumerate(words):
            chunk = inference_pb2.Chunk(text=word + " ", token_ids=[position])
            if request.response.HasField("logprobs"):
                chunk.logprobs.add(logprob=-0.5).top.add(token_id=position, logprob=-0.5)
            yield inference_pb2.GenerateStreamResponse(chunk=chunk)
        if text == "hang":
            self.cancelled.wait(WAIT_S)
            return
        yield inference_pb2.GenerateStreamResponse(completion=completion(len(words)))

    def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(id="tiny")])

    def GetStatus(
        self, request: control_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> control_pb2.GetStatusResponse:
        assert dict(context.invocation_metadata())["authorization"] == f"Bearer {CLUSTER_TOKEN}"
        status = control_pb2.GetStatusResponse(router_pid=42, ready=True, num_queued=3)
        status.models.add(model_id="tiny", ready=True)
        worker = status.workers.add(state=control_pb2.WORKER_STATE_READY, load_age_ms=7, has_session=True)
        worker.worker.worker_id = "decode-0"
        worker.worker.roles.append(types_pb2.WORKER_ROLE_DECODE)
        worker.worker.pid, worker.worker.address = 77, "127.0.0.1:5000"
        worker.load.blocks_free, worker.load.blocks_cached = 10, 5
        lost = status.workers.add(state=control_pb2.WORKER_STATE_DOWN, reason=self.reason)
        lost.worker.worker_id = "prefill-0"
        return status

    def ListTimelines(
        self, request: control_pb2.ListTimelinesRequest, context: grpc.ServicerContext
    ) -> control_pb2.ListTimelinesResponse:
        return control_pb2.ListTimelinesResponse(router_incarnation=1)


def completion(num_tokens: int) -> inference_pb2.Completion:
    return inference_pb2.Completion(
        finish_reason=types_pb2.FINISH_REASON_STOP,
        stop_token_id=2,
        usage=inference_pb2.Usage(prompt_tokens=5, output_tokens=num_tokens),
        timings=types_pb2.PhaseTimings(ttft_ms=12.5, transfer_bytes=1 << 40, transport=types_pb2.TRANSPORT_SHM),
        workers=inference_pb2.Workers(prefill="prefill-0", decode="decode-0"),
    )


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", CLUSTER_TOKEN)


@pytest.fixture
def router() -> Iterator[Router]:
    fake = Router()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server)
    control_pb2_grpc.add_ControlServiceServicer_to_server(fake, server)
    checks = health.HealthServicer()
    checks.set("baton.v1.InferenceService", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    fake.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield fake
    fake.cancelled.set()
    server.stop(None).wait()


def test_generate_prints_text_and_a_summary(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--target", router.target, "--prompt", "hello there"]) == 0
    out, err = capsys.readouterr()
    assert out == "hello there \n"
    assert err == "req-1 | 5 tokens in (0 cached), 2 out | stop | prefill-0 -> decode-0 | first token 12 ms\n"
    assert not router.requests[0].HasField("request_id")
    assert not router.requests[0].sampling.HasField("temperature")


def test_generate_json_is_the_whole_answer(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--max-tokens",
        "4",
        "--temperature",
        "0",
        "--seed",
        "18446744073709551615",
        "--logprobs",
        "1",
        "--stop",
        "x",
    ]
    arguments = ["generate", "--target", router.target, "--prompt", "a b", "--request-id", "mine", "--json", *flags]
    assert main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {
        "request_id": "mine",
        "text": "a b ",
        "token_ids": [0, 1],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 5, "output_tokens": 2, "cached_tokens": 0, "reasoning_tokens": 0},
        "timings": {"ttft_ms": 12.5, "transfer_bytes": 1 << 40, "transport": "shm"},
        "workers": {"prefill": "prefill-0", "decode": "decode-0", "retries": 0},
        "logprobs": [{"logprob": -0.5, "top": [{"token_id": n, "logprob": -0.5}]} for n in (0, 1)],
    }
    request = router.requests[0]
    assert (request.stopping.max_tokens, request.sampling.temperature, list(request.stopping.stop)) == (4, 0.0, ["x"])
    assert request.sampling.seed == 2**64 - 1


def test_generate_from_token_ids_file_and_stdin(
    router: Router, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("from a file")
    assert main(["generate", "--target", router.target, "--token-ids", "1,2,3"]) == 0
    assert main(["generate", "--target", router.target, "--prompt-file", str(prompt)]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped"))
    assert main(["generate", "--target", router.target, "--prompt-file", "-", "--chat", "--system", "be brief"]) == 0
    tokens, file, piped = router.requests
    assert list(tokens.token_ids.ids) == [1, 2, 3]
    assert file.text == "from a file"
    assert [(message.role, message.content) for message in piped.messages.messages] == [
        ("system", "be brief"),
        ("user", "piped"),
    ]


def test_refusal_is_one_line(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--target", router.target, "--prompt", "refuse"]) == 1
    reason = "INVALID_ARGUMENT: sampling.temperature: must not be negative"
    assert capsys.readouterr().err == f"baton generate: error: {router.target}: {reason}\n"


def test_timeout_is_the_deadline(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--target", router.target, "--prompt", "hang", "--timeout", "0.3"]) == 1
    assert "DEADLINE_EXCEEDED" in capsys.readouterr().err
    assert router.cancelled.wait(WAIT_S)


def test_status(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--target", router.target]) == 0
    out = capsys.readouterr().out
    assert "tiny  ready" in out
    assert "requests   0 running, 3 waiting" in out
    row = next(" ".join(line.split()) for line in out.splitlines() if line.startswith("prefill-0"))
    assert row == "prefill-0 - silent for 3 s - - -"
    assert main(["status", "--target", router.target, "--verbose"]) == 0
    out = capsys.readouterr().out
    assert f"router {router.target}  pid 42  model tiny  ready" in out
    assert "queued 3" in out
    assert "prefill-0: silent for 3 s" in out
    row = [" ".join(line.split()) for line in out.splitlines() if line.startswith("decode-0")][-1]
    assert row == "decode-0 decode ready 77 127.0.0.1:5000 0 0 0 0 0 5 10 yes 7 ms"


def test_status_of_a_port_that_is_not_for_it(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    for command in (["status"], ["drain", "prefill-0"]):
        assert main([*command, "--target", target]) == 1
        assert f"{target}: this is not the router's control port (--control-port)" in capsys.readouterr().err
    server.stop(None).wait()


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["explain", "--request", "r"],
        ["drain", "prefill-0"],
        ["calibrate", "--out", "OUT"],
        ["plan", "--live", "--slo", "ttft_p95=1s"],
    ],
)
def test_a_port_that_never_answers_is_told(
    command: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        out = str(tmp_path / "profile.json")
        command = [out if each == "OUT" else each for each in command]
        assert main([*command, "--target", target, "--timeout", "0.3"]) in (1, 3)  # 1 of `plan` is an answer
    told = capsys.readouterr().err
    assert f"{target}: no answer within 0.3 s (--timeout); is this the router's control port (--control-port)" in told


def test_a_prompt_for_a_port_that_is_not_for_clients(capsys: pytest.CaptureFixture[str]) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    assert main(["generate", "--target", target, "--prompt", "hi"]) == 1
    assert f"{target}: this is not the router's port for clients (--port)" in capsys.readouterr().err
    server.stop(None).wait()


CONTROLS = "\x1b[2J\x1b]0;title\x07 \r\n\x9b31m \u202e \u2028 \x7f"


def test_what_a_peer_says_does_not_speak_to_the_terminal(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    router.reason = CONTROLS
    assert main(["status", "--target", router.target, "--verbose"]) == 0
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.splitlines())
    assert r"prefill-0: \x1b[2J\x1b]0;title\x07 \r\n\x9b31m \u202e \u2028 \x7f" in out
    assert main(["generate", "--target", router.target, "--prompt", "refuse\x1b[2J"]) == 1
    err = capsys.readouterr().err
    assert err.rstrip("\n").isprintable()
    assert r"must not be \x1b[2J" in err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_answer_does_not_speak_to_the_terminal(
    router: Router, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A model says what its prompt makes it say. Into a file it goes as it is."""
    text = "a\x1b]0;title\x07\tb"
    for terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{text}\n"))
        prompt = ["--prompt", text] if command == "generate" else []
        assert main([command, "--target", router.target, *prompt]) == 0
        expected = "a\\x1b]0;title\\x07\tb" if terminal else text
        assert expected in capsys.readouterr().out


def test_status_json(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--target", router.target, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["workers"][0]["worker"]["roles"] == ["decode"]
    assert status["workers"][0]["load"]["blocks_leased"] == 0
    assert status["workers"][1]["state"] == "down"


@pytest.mark.parametrize(
    ("flags", "status", "out"),
    [
        ([], 0, "SERVING\n"),
        (["--service", "baton.v1.InferenceService"], 1, "NOT_SERVING\n"),
        (["--service", "baton.v1.Unknown"], 1, ""),
    ],
)
def test_health(router: Router, capsys: pytest.CaptureFixture[str], flags: list[str], status: int, out: str) -> None:
    assert main(["health", "--target", router.target, *flags]) == status
    assert capsys.readouterr().out == out


def start_chat(router: Router) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "services.cli.main", "chat", "--target", router.target, "--system", "s"],
        env={**os.environ, "PYTHONPATH": PYTHON_PATH},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )


def read_until(stream: IO[bytes], end: bytes) -> None:
    text = b""
    while not text.endswith(end):
        assert select.select([stream], [], [], WAIT_S)[0], f"nothing after {text!r}"
        text += stream.read(1) or pytest.fail(f"ended after {text!r}")


def interrupt_until_heard(chat: subprocess.Popen[bytes]) -> None:
    """A signal between the prompt and the read behind it is seen only with the next one: no person is that quick."""
    for _ in range(100):
        chat.send_signal(signal.SIGINT)
        if select.select([chat.stdout], [], [], 0.3)[0]:
            return
    pytest.fail("the chat does not hear SIGINT")


def test_chat_keeps_the_conversation(router: Router) -> None:
    with start_chat(router) as chat:
        out, err = chat.communicate(b"one two\nrefuse\nthree\n/exit\n", timeout=WAIT_S)
    assert out == b"> one two \n> > three \n> "
    assert b"INVALID_ARGUMENT" in err
    assert chat.returncode == 0
    roles = [[message.role for message in request.messages.messages] for request in router.requests]
    assert roles == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user", "assistant", "user"],  # what was refused is forgotten
    ]


def test_ctrl_c_cancels_the_answer_not_the_chat(router: Router) -> None:
    with start_chat(router) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write(b"hang\n")
        read_until(chat.stdout, b"> hang ")
        chat.send_signal(signal.SIGINT)
        read_until(chat.stdout, b"(cancelled)\n> ")
        assert router.cancelled.wait(WAIT_S)
        interrupt_until_heard(chat)
        read_until(chat.stdout, b"leaves)\n> ")
        chat.stdin.write(b"still here\n")
        read_until(chat.stdout, b"still here \n> ")
        chat.stdin.close()
        assert chat.wait(WAIT_S) == 0


@pytest.mark.parametrize(
    ("flags", "is_terminal", "is_told"),
    [([], True, True), ([], False, False), (["--quiet"], True, False), (["--stats"], False, True)],
)
def test_chat_says_how_fast_an_answer_was_and_by_whom(
    router: Router,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    is_terminal: bool,
    is_told: bool,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one two three\n"))
    assert main(["chat", "--target", router.target, *flags]) == 0
    out, err = capsys.readouterr()
    if is_terminal:
        first, _, out = out.partition("\n")
        assert first.startswith("tiny  /help lists commands, ")
    assert out == "> one two three \n> \n"
    assert err == ("3 tokens | first token 12 ms | prefill-0 -> decode-0: 1024.0 GiB by shm\n" if is_told else "")
