"""Tests several models behind one router: a worker brings one, each has its own line, and none harms another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest

from baton.v1 import control_pb2, inference_pb2
from services.core.errors import UnknownModel
from services.core.ids import new_incarnation
from services.router.catalogue import UNUSED_S
from services.router.front.call import Call, Caller, Incoming
from tests.support.cluster import CONFIG, Cluster, code_of, read, request
from tests.support.patience import HANG_S
from tests.support.scripted_worker import MODEL_ID, TEXT, ScriptedWorker
from tests.support.text_model import write_model

OTHER = "other"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("other"), template=None)


@pytest.fixture
async def several(model: str) -> AsyncIterator[Cluster]:
    """Yields a router with room for two models."""
    cluster = Cluster(replace(CONFIG, model=model, max_models=2, max_queue=3))
    await cluster.start()
    yield cluster
    for served in cluster.router.catalogue.all():
        served.conductor.coordinator.check_idle()
    await cluster.stop()


async def names(cluster: Cluster) -> list[str]:
    return [model.id for model in (await cluster.inference.ListModels(inference_pb2.ListModelsRequest())).models]


async def generate(cluster: Cluster, **fields: Any) -> str:
    return (await read(cluster.inference.GenerateStream(request(**fields))))[1]


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value


async def turned_away(cluster: Cluster, worker: ScriptedWorker) -> grpc.aio.AioRpcError:
    """Registers as workers do, which are told to come again while a text is fetched, and returns the router's last
    word."""
    wait = grpc.StatusCode.UNAVAILABLE
    async with asyncio.timeout(HANG_S):
        while code_of(error := await refused(worker.register(cluster.control_channel))) is wait:  # noqa: ASYNC110  # only asking tells
            await asyncio.sleep(0.01)
    return error


async def test_a_worker_brings_its_model(several: Cluster, text: Path) -> None:
    await several.add("mixed", worker_id="first")
    second = await several.add("mixed", worker_id="second", model_id=OTHER, text=text)
    assert await names(several) == [MODEL_ID, OTHER]
    for fields, worker in (({}, "first"), ({"model": MODEL_ID}, "first"), ({"model": OTHER}, "second")):
        events, answer = await read(several.inference.GenerateStream(request(**fields)))
        assert answer == TEXT
        assert events[0].prompt_info.prefill_worker == worker
        assert events[0].prompt_info.model == fields.get("model", MODEL_ID)
    for name in ("none", ""):
        error = await refused(generate(several, model=name))
        assert code_of(error) is grpc.StatusCode.NOT_FOUND
        assert "'tiny', 'other' are" in (error.details() or "")
    listed = (await several.inference.ListModels(inference_pb2.ListModelsRequest())).models
    assert [each.has_chat_template for each in listed] == [True, False]
    said = inference_pb2.GenerateRequest(model=OTHER)
    said.messages.messages.add(role="user", content="hi")
    error = await refused(several.inference.Generate(said))
    assert "no chat template" in (error.details() or ""), "the template is its model's, and it has none"
    assert second.num_texts_given == 1


async def test_a_chat_is_rendered_by_its_models_template(several: Cluster, tmp_path: Path) -> None:
    await several.add("mixed", worker_id="first")
    worker = await several.add(
        "mixed", worker_id="second", model_id=OTHER, text=write_model(tmp_path, template="{{ messages[0].content }}!")
    )
    said = inference_pb2.GenerateRequest(model=OTHER)
    said.messages.messages.add(role="user", content="hi")
    assert (await several.inference.Generate(said)).output.text == TEXT
    tokenizer = several.router.catalogue.get(OTHER).text.tokenizer
    assert tokenizer.decode(worker.commands[0].token_ids) == "hi!"


async def test_each_model_has_a_policy_of_its_own(model: str, text: Path) -> None:
    """One is placed by where prompts' beginnings are cached, for which they are hashed, and the other in turn."""
    policy = ("round_robin", f"{OTHER}=prefix_aware")
    cluster = Cluster(replace(CONFIG, model=model, policy=policy, share_prefixes="never"))
    await cluster.start()
    await cluster.add("mixed", worker_id="first")
    await cluster.add("mixed", worker_id="second", model_id=OTHER, text=text)
    assert [await generate(cluster), await generate(cluster, model=OTHER)] == [TEXT, TEXT]
    hashing = {
        each.model_id: each.conductor.coordinator.config.policy.hash_prompts for each in cluster.router.catalogue.all()
    }
    assert hashing == {MODEL_ID: False, OTHER: True}
    await cluster.idle()
    await cluster.stop()


async def test_no_model_waits_for_another(several: Cluster, text: Path) -> None:
    """The queue of one is full and its only worker does nothing: the other does not notice."""
    await several.add("mixed", worker_id="first")
    slow = await several.add("mixed", worker_id="second", model_id=OTHER, text=text, num_blocks=4)
    slow.prefill_gate.clear()
    slow.decode_gate.clear()
    waiting = [asyncio.create_task(generate(several, model=OTHER, text="x" * 40)) for _ in range(12)]
    await several.until(lambda: _is(any(task.done() for task in waiting)))
    for _ in range(5):
        async with asyncio.timeout(HANG_S):
            assert await generate(several) == TEXT
    slow.prefill_gate.set()
    slow.decode_gate.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    refusals = [outcome for outcome in outcomes if isinstance(outcome, grpc.aio.AioRpcError)]
    assert {code_of(error) for error in refusals} == {grpc.StatusCode.RESOURCE_EXHAUSTED}, "its queue was full"
    assert [outcome for outcome in outcomes if outcome not in refusals] == [TEXT] * (len(waiting) - len(refusals))


async def _is(value: bool) -> bool:
    return value


async def test_workers_that_come_together_bring_it_once(several: Cluster, text: Path) -> None:
    workers = [ScriptedWorker("mixed", [], worker_id=f"w{n}", model_id=OTHER, text=text) for n in range(3)]
    several.scripted += workers
    for worker in workers:
        worker.text_gate.clear()
        await worker.start()
    joining = [asyncio.create_task(worker.register(several.control_channel)) for worker in workers]
    await several.until(lambda: _is(any(worker.num_texts_given for worker in workers)))
    for worker in workers:
        worker.text_gate.set()
    await asyncio.gather(*joining)
    assert sum(worker.num_texts_given for worker in workers) == 1


async def test_whoever_waits_no_longer_leaves_the_attempt_to_go_on(several: Cluster, text: Path) -> None:
    worker = ScriptedWorker("mixed", [], model_id=OTHER, text=text)
    several.scripted.append(worker)
    worker.text_gate.clear()
    await worker.start()
    joining = asyncio.create_task(worker.register(several.control_channel))
    await several.until(lambda: _is(worker.num_texts_given > 0))
    joining.cancel()
    await asyncio.wait([joining])
    assert await names(several) == [MODEL_ID]
    worker.text_gate.set()
    await several.until(lambda: _has(several, OTHER))
    await several.join(worker)
    assert worker.num_texts_given == 1


async def _has(cluster: Cluster, name: str) -> bool:
    return name in await names(cluster)


async def test_a_model_whose_text_cannot_be_had_is_not_served(several: Cluster, text: Path, tmp_path: Path) -> None:
    """Its worker is told why, the router goes on, and a later attempt may succeed."""
    broken = write_model(tmp_path)
    (broken / "config.json").write_text("{}")
    worker = ScriptedWorker("mixed", [], model_id=OTHER)
    several.scripted.append(worker)
    await worker.start()
    for worker.text, code in (
        (None, grpc.StatusCode.FAILED_PRECONDITION),
        (broken, grpc.StatusCode.INVALID_ARGUMENT),
    ):
        worker.worker_id = f"its text is {code.name}".replace(" ", "-")  # one of the same name is asked only later
        error = await turned_away(several, worker)
        assert code_of(error) is code
        assert str(tmp_path) not in (error.details() or "")
        assert "baton-model-" not in (error.details() or ""), "where the router kept it is nobody's business"
        assert await names(several) == [MODEL_ID]
    worker.text = text
    assert code_of(await turned_away(several, worker)) is grpc.StatusCode.INVALID_ARGUMENT
    worker.incarnation = new_incarnation()
    assert code_of(await turned_away(several, worker)) is grpc.StatusCode.INVALID_ARGUMENT
    assert worker.num_texts_given == 2, "it was not asked again at once, nor as another process"
    worker.worker_id = "another"
    await several.join(worker)
    assert await names(several) == [MODEL_ID, OTHER]


async def test_there_are_no_more_than_may_be(several: Cluster, text: Path) -> None:
    """A model that no worker serves any more makes room, and nothing of it is left."""
    await several.add("mixed", worker_id="first")
    second = await several.add("mixed", worker_id="second", model_id=OTHER, text=text)
    third = ScriptedWorker("mixed", second.output[:-1], several.leases, worker_id="third", model_id="third", text=text)
    several.scripted.append(third)
    await third.start()
    error = await refused(third.register(several.control_channel))
    assert code_of(error) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "no more than 2 models may be" in (error.details() or "")
    assert third.num_texts_given == 0, "nothing was fetched in vain"
    second.cut(orderly=True)
    gone = several.router.catalogue.get(OTHER)
    await several.until(lambda: _is(not gone.conductor.links))
    assert OTHER in await names(several), "it may come back"
    assert code_of(await refused(third.register(several.control_channel))) is grpc.StatusCode.RESOURCE_EXHAUSTED
    gone.conductor.withdraw("second")  # as after the time in which it may
    several.router.catalogue.tick()
    assert OTHER in await names(several), "perhaps one is about to come"
    several.router.catalogue._unused_since_s[OTHER] -= UNUSED_S
    several.router.catalogue.tick()
    assert await names(several) == [MODEL_ID]
    late = inference_pb2.GenerateRequest(text="x")
    call = Call(Caller(), gone, Incoming(late), timeout_s=None, stream=True)
    with pytest.raises(UnknownModel):  # it was found before it was dropped, and must not wait for ever
        async with several.router._inference._intake.answer(call):
            pass
    await several.join(third)
    assert await names(several) == [MODEL_ID, "third"]
    assert await generate(several, model="third") == TEXT
    assert code_of(await refused(generate(several, model=OTHER))) is grpc.StatusCode.NOT_FOUND
    assert 'model="other"' not in generate_latest(several.metrics()).decode()


async def test_of_two_models_workers_of_one_name_only_one_joins(several: Cluster, text: Path) -> None:
    """They come together, and each sees nobody of its name while the texts are fetched."""
    workers = [
        ScriptedWorker("mixed", [], worker_id="same", model_id=model_id, text=text) for model_id in (OTHER, MODEL_ID)
    ]
    several.scripted += workers
    for worker in workers:
        await worker.start()
    other, own = workers
    other.text_gate.clear()
    joining = asyncio.create_task(other.register(several.control_channel))
    await several.until(lambda: _is(other.num_texts_given > 0))
    await several.join(own)
    other.text_gate.set()
    assert code_of(await refused(joining)) is grpc.StatusCode.ALREADY_EXISTS
    assert (own.num_sessions, other.num_sessions) == (1, 0)
    own.cut()
    served = several.router.catalogue.own.conductor
    await several.until(lambda: _is(not served.links))
    await several.join(other)
    assert not served.coordinator.workers.all(), "its name is the other's now"
    assert (await several.control.GetStatus(control_pb2.GetStatusRequest())).models[1].num_workers == 1


async def test_a_router_that_drains_takes_no_model(several: Cluster, text: Path) -> None:
    """It does not take one whose text is under way either: it would be ready again, and take requests."""
    early, late = (ScriptedWorker("mixed", [], worker_id=name, model_id=name, text=text) for name in ("early", "late"))
    several.scripted += [early, late]
    await early.start()
    await late.start()
    early.text_gate.clear()
    joining = asyncio.create_task(early.register(several.control_channel))
    await several.until(lambda: _is(early.num_texts_given > 0))
    await several.router.drain(0.1)
    early.text_gate.set()
    assert code_of(await refused(joining)) is grpc.StatusCode.UNAVAILABLE
    assert code_of(await refused(late.register(several.control_channel))) is grpc.StatusCode.UNAVAILABLE
    assert late.num_texts_given == 0
    assert [model.model_id for model in several.router.catalogue.all()] == [MODEL_ID]
    assert not several.router.catalogue.ready


async def test_a_router_that_stops_leaves_no_fetch(model: str, text: Path) -> None:
    cluster = Cluster(replace(CONFIG, model=model))
    await cluster.start()
    worker = ScriptedWorker("mixed", [], model_id=OTHER, text=text)
    cluster.scripted.append(worker)
    await worker.start()
    worker.text_gate.clear()
    joining = asyncio.create_task(worker.register(cluster.control_channel))
    await cluster.until(lambda: _is(worker.num_texts_given > 0))
    await cluster.stop()
    await asyncio.gather(joining, return_exceptions=True)
    assert not [task for task in asyncio.all_tasks() if "model" in task.get_name()]


async def test_models_that_are_being_fetched_count(several: Cluster, text: Path) -> None:
    first, second = (ScriptedWorker("mixed", [], worker_id=name, model_id=name, text=text) for name in ("a", "b"))
    several.scripted += [first, second]
    for worker in (first, second):
        await worker.start()
    first.text_gate.clear()
    joining = asyncio.create_task(first.register(several.control_channel))
    await several.until(lambda: _is(first.num_texts_given > 0))
    error = await refused(second.register(several.control_channel))
    assert code_of(error) is grpc.StatusCode.RESOURCE_EXHAUSTED
    first.text_gate.set()
    await joining


def _panicking(folder: Path, changes: dict[str, Any]) -> Path:
    """Returns a tokenizer with which the library panics, which it does by an exception that is no Exception."""
    write_model(folder, template=None)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    for name, change in changes.items():
        tokenizer[name] = {**tokenizer[name], **change}
    path.write_text(json.dumps(tokenizer))
    return folder


async def test_a_tokenizer_that_panics_when_it_is_read(several: Cluster, tmp_path: Path) -> None:
    text = _panicking(tmp_path, {"model": {"continuing_subword_prefix": "#" * 50}})
    worker = ScriptedWorker("mixed", [], model_id=OTHER, text=text)
    several.scripted.append(worker)
    await worker.start()
    assert code_of(await turned_away(several, worker)) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_tokenizer_that_panics_on_an_answer(several: Cluster, tmp_path: Path) -> None:
    """It ends that request, and no more is lost: its worker keeps its session."""
    text = _panicking(tmp_path, {"decoder": {"type": "Strip", "content": "z", "start": 1, "stop": 1}})
    worker = await several.add("mixed", model_id=OTHER, text=text)
    bad: Any = several.router.catalogue.get(OTHER).text.tokenizer.token_to_id("z")
    good = worker.output
    worker.output = [bad, bad, good[-1]]
    async with asyncio.timeout(HANG_S):
        assert code_of(await refused(generate(several, model=OTHER))) is grpc.StatusCode.INTERNAL
    worker.output = [*several.router.catalogue.get(OTHER).text.tokenizer.encode("bcd").ids[1:], good[-1]]
    assert await generate(several, model=OTHER)
    assert worker.num_sessions == 1


async def test_a_failure_to_fetch_is_told_once(several: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    worker = ScriptedWorker("mixed", [], model_id=OTHER)
    several.scripted.append(worker)
    await worker.start()
    for _ in range(3):
        await turned_away(several, worker)
    assert len([each for each in caplog.records if "cannot be served" in each.getMessage()]) == 1


async def test_a_model_has_a_name(several: Cluster, text: Path) -> None:
    worker = ScriptedWorker("mixed", [], model_id="", text=text)
    several.scripted.append(worker)
    await worker.start()
    error = await refused(worker.register(several.control_channel))
    assert code_of(error) is grpc.StatusCode.INVALID_ARGUMENT
    assert "model_id" in (error.details() or "")


async def test_a_name_is_one_workers_whatever_the_model(several: Cluster, text: Path) -> None:
    await several.add("mixed", worker_id="same")
    second = ScriptedWorker("mixed", [], worker_id="same", model_id=OTHER, text=text)
    several.scripted.append(second)
    await second.start()
    assert code_of(await refused(second.register(several.control_channel))) is grpc.StatusCode.ALREADY_EXISTS
    assert await generate(several) == TEXT


async def test_a_worker_that_may_not_join_takes_no_name_away(model: str, text: Path) -> None:
    """A worker of another model is forgotten for the sake of one that joins, and not of one that is refused."""
    cluster = Cluster(replace(CONFIG, model=model, max_models=2, max_workers=1))
    await cluster.start()
    lost = await cluster.add("mixed", worker_id="same")
    await cluster.add("mixed", worker_id="second", model_id=OTHER, text=text)
    lost.cut()
    own = cluster.router.catalogue.own.conductor
    await cluster.until(lambda: _is(not own.links))
    third = ScriptedWorker("mixed", [], worker_id="same", model_id=OTHER, text=text)
    cluster.scripted.append(third)
    await third.start()
    assert code_of(await refused(third.register(cluster.control_channel))) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert [worker.info.worker_id for worker in own.coordinator.workers.all()] == ["same"]
    await cluster.stop()


async def test_a_worker_of_another_model_is_drained(several: Cluster, text: Path) -> None:
    await several.add("mixed", worker_id="first")
    second = await several.add("mixed", worker_id="second", model_id=OTHER, text=text)
    answer = await several.control.Drain(control_pb2.DrainRequest(worker_id="second", deadline_ms=2000))
    assert (answer.num_finished, answer.num_migrated) == (0, 0)
    assert second.told_to_leave
    assert await generate(several) == TEXT
    error = await refused(several.control.Drain(control_pb2.DrainRequest(worker_id="none")))
    assert code_of(error) is grpc.StatusCode.NOT_FOUND
