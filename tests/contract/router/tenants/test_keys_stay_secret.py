"""Looks for keys, right and wrong, in everything that a router writes and answers: logs down to DEBUG, spans, status,
metrics, errors of clients, the logs of requests and of usage, and the trace of a defect."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest

from baton.v1 import control_pb2
from services.router.front.intake import Intake
from services.router.tenants.keys import key_of, new_key
from tests.support.cluster import request
from tests.support.tenants import TenantsFile, http_client, serving

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 4}


class Written(logging.Handler):
    """Keeps all that is logged, as text at once, and takes the objects out of the record, which pytest keeps: what gRPC
    logs must not outlive its call."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith("http"):  # that is this test's client
            self.texts += [self.format(record), str(vars(record))]
        record.msg, record.args, record.exc_info = record.getMessage(), None, None


@pytest.fixture
def written(caplog: pytest.LogCaptureFixture) -> Iterator[Written]:
    caplog.set_level(logging.DEBUG)
    handler = Written()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


async def test_no_key_is_found_in_what_a_router_writes_and_answers(
    model: str, tmp_path: Path, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = TenantsFile(tmp_path)
    file.write(acme={}, narrow={"models": ["another"]}, late={})
    late = file.entry("late") | {"expires": "2020-01-01"}
    file.write_text(file.path.read_text().replace(_as_json(file.entry("late")), _as_json(late)))
    right, narrow, expired, stranger = *(file.keys[name] for name in ("acme", "narrow", "late")), new_key()
    almost = f"bk_{key_of(right).key_id}_{stranger.split('_', 2)[2]}"
    keys = (right, narrow, expired, stranger, almost, f"{right}x", right[:-1])
    logs = {name: str(tmp_path / f"{name}.jsonl") for name in ("request_log", "usage_log")}
    told: list[str] = []
    async with serving(model, file, log_prompts=True, **logs) as cluster, http_client(cluster) as http:
        for role in ("prefill", "decode"):
            await cluster.add(role)

        async def ask(key: str) -> None:
            for headers in (_header(key), {"authorization": f"Basic {key}"}, {"x-api-key": key}):
                reply = await http.post(f"{COMPLETIONS}?api_key={key}", json=BODY, headers=headers)
                told.append(f"{reply.status_code} {reply.headers} {reply.text}")
            try:
                told.append(str(await cluster.inference.Generate(request(), metadata=tuple(_header(key).items()))))
            except grpc.aio.AioRpcError as error:
                told.append(f"{error} {error.trailing_metadata()}")

        for key in keys:
            await ask(key)
        with monkeypatch.context() as broken:
            broken.setattr(Intake, "_tokenise", _fail)
            await ask(right)
        status = await cluster.control.GetStatus(control_pb2.GetStatusRequest())
        told += [str(status), generate_latest(cluster.metrics()).decode()]
        told += [span.to_json() for span in cluster.spans.get_finished_spans()]
    everything = "\n".join([*told, *written.texts, *map(_text, logs.values())])
    for expected in ("acme/", "401 ", "UNAUTHENTICATED", "PERMISSION_DENIED", "has expired", "a defect"):
        assert expected in everything, "this shows that it was looked at"
    for key in keys:
        assert key.split("_", 2)[2][:20] not in everything


def _header(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _as_json(entry: dict[str, str]) -> str:
    return ", ".join(f'"{name}": "{value}"' for name, value in entry.items())


def _fail(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a defect")


def _text(path: str) -> str:
    return Path(path).read_text()
