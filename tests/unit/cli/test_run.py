"""Tests when `baton run` starts a cluster, and what is asked of which."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import grpc
import pytest

from baton.v1 import inference_pb2, types_pb2
from baton_client import CallFailed, Unavailable
from services.cli import run
from services.cli.client import explain
from services.core.errors import BatonError
from services.core.process_config import DEFAULT_MODEL

NOBODY = Unavailable(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
OWN = "127.0.0.1:7"


class Cluster:
    """Stands for what is there: a router at `address`, or none until one is started at `OWN`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, address: str = "", failure: CallFailed = NOBODY) -> None:
        self.address, self.failure = address, failure
        self.asked: list[tuple[str, inference_pb2.GenerateRequest]] = []
        self.started: list[tuple[str, bool]] = []
        self.up = SimpleNamespace(stdout=iter(["stopped\n"]), wait=lambda: 0)
        self._target = ""
        monkeypatch.setattr(run, "inference", self._inference)
        monkeypatch.setattr(run, "cluster", self._cluster)
        monkeypatch.setattr(run.signal, "signal", lambda *_: None)

    @contextlib.contextmanager
    def _inference(self, target: str, tls: object = None) -> Iterator[Cluster]:
        self._target = target
        try:
            yield self
        except CallFailed as error:
            raise explain(error, target, has_tls=False) from error

    @contextlib.contextmanager
    def _cluster(self, model: str, *, stay: bool) -> Iterator[tuple[object, str]]:
        self.started.append((model, stay))
        self.address = OWN
        yield self.up, OWN
        self.address = ""

    def list_models(self, *, timeout_s: float | None = None) -> list[inference_pb2.Model]:
        if self._target != self.address:
            raise self.failure
        return [inference_pb2.Model(id="own", has_chat_template=True)]

    @contextlib.contextmanager
    def generate_stream(self, request: inference_pb2.GenerateRequest, *, timeout_s: float | None = None):
        self.asked.append((self._target, request))
        completion = inference_pb2.Completion(finish_reason=types_pb2.FINISH_REASON_STOP)
        for part in (completion.usage, completion.timings, completion.workers):
            part.SetInParent()
        yield iter([inference_pb2.GenerateStreamResponse(completion=completion)])


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_TARGET", raising=False)


def test_a_cluster_that_runs_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Cluster(monkeypatch, "127.0.0.1:50051")
    assert run.main(["Why?", "--model", "own"], "baton run") == 0
    ((target, request),) = there.asked
    assert (target, request.model, request.stopping.max_tokens) == ("127.0.0.1:50051", "own", 256)
    assert [message.content for message in request.messages.messages] == ["Why?"]
    assert not there.started


def test_where_none_runs_one_is_started_for_the_model_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Cluster(monkeypatch)
    assert run.main(["Why?"], "baton run") == 0
    assert run.main(["Why?", "--model", "folder/of/another"], "baton run") == 0
    assert there.started == [(DEFAULT_MODEL, False), ("folder/of/another", False)]
    assert [target for target, _ in there.asked] == [OWN, OWN]
    assert not there.asked[1][1].HasField("model"), "its name is not that of the folder's path"
    assert not there.address


def test_one_that_is_to_stay_does_until_it_ends_and_its_failure_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = Cluster(monkeypatch)
    assert run.main(["Why?", "--stay"], "baton run") == 0
    assert there.started == [(DEFAULT_MODEL, True)]
    assert f"the cluster stays: baton chat --target {OWN}; Ctrl-C stops it\nstopped\n" in capsys.readouterr().err
    there.up.wait = lambda: 1
    with pytest.raises(BatonError, match="the cluster has failed"):
        run.main(["Why?", "--stay"], "baton run")


@pytest.mark.parametrize(
    ("flags", "failure"),
    [
        (["--target", "far:1"], NOBODY),
        ([], Unavailable(grpc.StatusCode.UNAVAILABLE, "no ready worker", reason="NO_WORKER")),
        ([], CallFailed(grpc.StatusCode.UNAUTHENTICATED, "who are you")),
    ],
)
def test_none_is_started_for_another_address_or_beside_one_that_refuses(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], failure: CallFailed
) -> None:
    there = Cluster(monkeypatch, failure=failure)
    with pytest.raises(BatonError, match=str(failure)):
        run.main(["Why?", *flags], "baton run")
    assert not there.started
