"""Serves /tokenize and /detokenize as vLLM does: clients count tokens with them.

Texts and messages are checked as prompts are and wait for the model's tokenizer threads as these do, so that they hold
up neither the event loop nor one another; they take no place in the model's queue. Owns: the fields of both paths, and
bounds of what is given back. Never: what a tokenizer does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from baton.v1 import inference_pb2
from services.core.errors import InvalidRequest, Overloaded, forget_frames
from services.router.catalogue import Catalogue, ServedModel
from services.router.front.call import RETRY_AFTER_S, ByteBudget
from services.router.front.http.answers import Json
from services.router.front.http.body import Body, BodyLimits, as_list, as_text, no_json, read_body
from services.router.front.http.chat import read_messages
from services.router.front.http.completions import read_ids
from services.router.front.http.generation import TENANT, while_connected, with_client_names
from services.router.front.http.parameters import (
    OF_TEMPLATES,
    Neutral,
    read_special_tokens,
    refuse_unsupported,
)
from services.router.front.http.reply import Reply, http_error
from services.router.front.http.tools import name_in_chats, read_tools
from services.router.front.intake import encoding
from services.router.front.validation import check_token_ids, validate
from services.router.tenants.gate import Gate

MOST_TOKENS = 1 << 17
"""The most tokens that are given back, or taken to be made a text: more than a prompt has that any model here takes."""
_TOKEN_BYTES = 4
_NOT_SERVED: Neutral = {**OF_TEMPLATES, "truncate_prompt_tokens": ()}

Tokenising = Callable[[], Json]
"""Makes the answer, on a thread."""
ReadTokenising = Callable[[Body, ServedModel], tuple[int, Tokenising]]
"""Returns how many bytes a body is about, and what is to be done for it. Raises InvalidRequest."""


def read_tokenize(body: Body, model: ServedModel) -> tuple[int, Tokenising]:
    refuse_unsupported(body, _NOT_SERVED)
    prompt, has_messages = body.take("prompt"), body.take("messages") is not None
    if prompt is not None and has_messages:
        raise InvalidRequest("messages", "cannot be given together with prompt")
    request, params = inference_pb2.GenerateRequest(), {"text": "prompt"}
    if has_messages:
        params = read_messages(body, request)
        read_tools(body, request)
    elif prompt is not None:
        request.text = as_text(prompt, "prompt")
    else:
        raise InvalidRequest("prompt", "is missing, and so is messages")
    read_special_tokens(body, request)
    with_texts = body.boolean("return_token_strs") or False
    with with_client_names(params, name_in_chats):
        validate(request, model.facts)
    num_bytes, encode = encoding(model.text, request)

    def work() -> Json:
        return _tokens(model, encode(), with_texts)

    return num_bytes, work


def _tokens(model: ServedModel, token_ids: list[int], with_texts: bool) -> Json:
    if len(token_ids) > MOST_TOKENS:
        raise InvalidRequest("prompt", f"has {len(token_ids)} tokens; at most {MOST_TOKENS} are given back")
    names = [model.text.tokenizer.id_to_token(token_id) or "" for token_id in token_ids] if with_texts else None
    return {
        "count": len(token_ids),
        "max_model_len": model.context_tokens,
        "tokens": token_ids,
        "token_strs": names,
    }


def read_detokenize(body: Body, model: ServedModel) -> tuple[int, Tokenising]:
    value = body.take("tokens")
    if value is None:
        raise InvalidRequest("tokens", "is missing")
    tokens = inference_pb2.TokenIds()
    read_ids(tokens.ids, as_list(value, "tokens", MOST_TOKENS), "tokens", MOST_TOKENS)
    token_ids = list(tokens.ids)
    if token_ids:
        check_token_ids(token_ids, model.facts, "tokens")

    def work() -> Json:
        return {"prompt": model.token_texts.join(token_ids, with_special=True)}

    return len(token_ids) * _TOKEN_BYTES, work


class Tokenisation:
    """Serves one path (an ASGI app)."""

    def __init__(
        self, catalogue: Catalogue, gate: Gate, read_work: ReadTokenising, budget: ByteBudget, limits: BodyLimits
    ) -> None:
        """`budget` bounds all bytes of requests in the process."""
        self._catalogue = catalogue
        self._gate = gate
        self._read_work = read_work
        self._budget = budget
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        reply = Reply(send)
        if (refusal := no_json(headers)) is not None:
            await reply.failed(refusal)
            return
        try:
            tenant = scope["state"][TENANT]
            with self._gate.visit(tenant), self._budget.charge() as charge:
                body = await read_body(receive, headers, self._limits, charge)
                model = self._catalogue.get(body.text("model"), tenant)
                num_bytes, work = self._read_work(body, model)
                await while_connected(receive, self._answer(model, num_bytes, work, reply))
        except Exception as error:  # the outermost handler: whatever it is, the client gets an answer and no traceback
            answer = http_error(error)
            forget_frames(error)
            await reply.failed(answer)

    async def _answer(self, model: ServedModel, num_bytes: int, work: Tokenising, reply: Reply) -> None:
        try:
            async with asyncio.timeout(model.conductor.coordinator.config.queue_timeout_s):
                answer = await model.line.run(num_bytes, work)
        except TimeoutError as error:
            raise Overloaded("the text was not tokenised in time", retry_after_s=RETRY_AFTER_S) from error
        await reply.long_json(answer)
