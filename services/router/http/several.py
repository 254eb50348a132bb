"""The prompts of one call side by side, mostly one: each is a request of its own, and all are answered or none is.

Owns: their ids, and that the first failure, or a client that goes away, ends all of them on the workers at once. Never:
another queue, another validation, another trace than gRPC's; or what is written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from services.core.errors import BatonError, InvalidRequest
from services.router.answer import Answer, Event
from services.router.http.call import Prompt
from services.router.http.reply import REQUEST_ID
from services.router.intake import Intake

Take = Callable[[int, Event], Awaitable[None]]
"""An event of the prompt with that index. Until it returns, that prompt's answer keeps what comes."""


async def answer_all(
    intake: Intake,
    prompts: Sequence[Prompt],
    request_id: str,
    take: Take,
    *,
    traceparent: str,
    timeout_s: float | None,
    stream: bool,
) -> None:
    """Raises the error of the first that fails, its field as the client wrote it."""
    # What can be refused at the door is, before a token of any of them is written.
    admitted = asyncio.Barrier(len(prompts))

    async def answer_one(index: int, prompt: Prompt) -> None:
        prompt.request.request_id = request_id if len(prompts) == 1 else f"{request_id}-{index}"
        taken = intake.answer(prompt.request, traceparent=traceparent, timeout_s=timeout_s, stream=stream)
        with _in_clients_words(prompt.params):
            async with taken as answer:
                await admitted.wait()
                if len(prompts) > 1:
                    group.create_task(heed(answer, prompt), name=f"http prompt {index}, its end")
                async for event in answer:
                    await take(index, event)

    async def heed(answer: Answer, prompt: Prompt) -> None:
        """So that a failure ends the others even while its own prompt waits for a client that does not read."""
        with _in_clients_words(prompt.params):
            await answer.settled()

    try:
        async with asyncio.TaskGroup() as group:
            for index, prompt in enumerate(prompts):
                group.create_task(answer_one(index, prompt), name=f"http prompt {index}")
    except BaseExceptionGroup as failed:
        # A defect is told rather than what may have followed from it.
        error = next((one for one in failed.exceptions if not isinstance(one, BatonError)), failed.exceptions[0])
    else:
        return
    raise error


@contextlib.contextmanager
def _in_clients_words(params: Mapping[str, str]) -> Iterator[None]:
    """What is wrong with a field is told by the name it has in the body or the headers."""
    try:
        yield
    except InvalidRequest as error:
        field = {"request_id": REQUEST_ID, **params}.get(error.field, error.field)
        raise type(error)(field, error.description) from error
