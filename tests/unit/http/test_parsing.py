"""Bodies of the OpenAI-style endpoints become GenerateRequests; what is not supported is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from baton.v1 import inference_pb2, types_pb2
from services.core import errors
from services.router.front.http import chat, completions
from services.router.front.http.answers import Ending, HttpCall, TokenTexts
from services.router.front.http.body import Body
from services.router.front.http.parameters import NOT_IN_CHAT, NOT_IN_COMPLETIONS, Neutral
from services.router.front.http.reply import KINDS, dump, http_error
from services.router.front.http.responses import call as responses
from services.router.front.http.responses.call import NOT_IN_RESPONSES
from services.rpc.status import CODES
from tests.support.text_model import byte_tokenizer


@pytest.fixture(scope="module")
def texts() -> TokenTexts:
    return TokenTexts(byte_tokenizer())


def completion(texts: TokenTexts, **fields: Any) -> HttpCall:
    return completions.read_call(Body({"prompt": "hi", **fields}), texts)


def conversation(texts: TokenTexts, **fields: Any) -> HttpCall:
    return chat.read_call(Body({"messages": [{"role": "user", "content": "hi"}], **fields}), texts)


def response(texts: TokenTexts, **fields: Any) -> responses.ResponseCall:
    return responses.read_call(Body({"input": "hi", **fields}), texts)


def only(call: HttpCall) -> inference_pb2.GenerateRequest:
    (prompt,) = call.prompts
    return prompt.request


READERS = [completion, conversation]


@pytest.mark.parametrize("read", READERS)
def test_every_shared_field_arrives(texts: TokenTexts, read: Any) -> None:
    call = read(
        texts,
        model="m",
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias={"5": -100, "6": 1.5},
        seed=-1,
        stop=["a", "b"],
        stop_token_ids=[3, 4],
        ignore_eos=True,
        min_tokens=2,
        max_tokens=9,
        priority=-3,
        cache_salt="s",
        skip_special_tokens=False,
        stream=True,
        stream_options={"include_usage": True},
        user="somebody",
    )
    prompt: dict[str, Any] = {"text": "hi"}
    if read is conversation:
        message = inference_pb2.ChatMessage(role="user", content="hi")
        prompt = {"messages": inference_pb2.ChatMessages(messages=[message])}
    assert only(call) == inference_pb2.GenerateRequest(
        **prompt,
        model="m",
        sampling=types_pb2.SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=0.75,
            logit_bias=[types_pb2.LogitBias(token_id=5, bias=-100), types_pb2.LogitBias(token_id=6, bias=1.5)],
            seed=(1 << 64) - 1,
        ),
        stopping=types_pb2.StoppingParams(
            stop=["a", "b"], stop_token_ids=[3, 4], ignore_eos=True, min_tokens=2, max_tokens=9
        ),
        response=inference_pb2.ResponseOptions(skip_special_tokens=False),
        priority=-3,
        cache_salt="s",
    )
    assert (call.options.stream, call.options.include_usage, call.options.continuous_usage) == (True, True, False)


def test_defaults_are_openais(texts: TokenTexts) -> None:
    assert only(completion(texts)).stopping.max_tokens == 16
    assert not only(conversation(texts)).stopping.HasField("max_tokens")
    assert only(conversation(texts, max_tokens=3, max_completion_tokens=5)).stopping.max_tokens == 5
    assert only(completion(texts, top_k=-1, stop="x")).stopping.stop == ["x"]
    assert only(completion(texts, logprobs=0)).response.HasField("logprobs")
    assert only(conversation(texts, logprobs=True)).response.HasField("logprobs")
    assert not only(conversation(texts, logprobs=False, top_logprobs=0)).response.HasField("logprobs")


@pytest.mark.parametrize(
    ("read", "fields"),
    [(completion, NOT_IN_COMPLETIONS), (conversation, NOT_IN_CHAT), (response, NOT_IN_RESPONSES)],
)
def test_what_is_not_supported_is_named_and_what_asks_for_nothing_accepted(
    texts: TokenTexts, read: Any, fields: Neutral
) -> None:
    for name, neutral in fields.items():
        for value in (None, *neutral):
            read(texts, **{name: value})
        with pytest.raises(errors.InvalidRequest, match="not supported") as caught:
            read(texts, **{name: "anything" if name != "suffix" else "more"})
        assert caught.value.field == name


@pytest.mark.parametrize(
    ("read_call", "prompt"),
    [
        (completions.read_call, {"prompt": "hi"}),
        (chat.read_call, {"messages": [{"role": "user", "content": "hi"}]}),
        (responses.read_call, {"input": "hi"}),
    ],
)
def test_what_one_endpoint_refuses_none_ignores(texts: TokenTexts, read_call: Any, prompt: dict[str, Any]) -> None:
    body = Body({**dict.fromkeys([*NOT_IN_COMPLETIONS, *NOT_IN_CHAT]), **prompt})
    read_call(body, texts)
    assert body.unknown() == []


@pytest.mark.parametrize("read", [completion, conversation])
def test_a_choice_is_prepared_for_each_answer(texts: TokenTexts, read: Any) -> None:
    for fields, num_answers in (({}, 1), ({"n": 1}, 1), ({"n": 3, "best_of": 3}, 3), ({"n": 16}, 16)):
        (prompt,) = read(texts, **fields).prompts
        assert len(prompt.styles) == (prompt.request.n or 1) == num_answers
    for fields in ({"n": 0}, {"n": 17}, {"n": 1 << 30}, {"n": True}, {"n": 2, "best_of": 3}, {"best_of": 2}):
        with pytest.raises(errors.InvalidRequest) as caught:
            read(texts, **fields)
        assert caught.value.field in fields


def test_several_prompts_have_all_else_in_common(texts: TokenTexts) -> None:
    fields: dict[str, Any] = {"seed": 7, "max_tokens": 9, "stop": "x", "logit_bias": {"5": 1}, "cache_salt": "s"}
    for prompts in (["one", "two", "one"], [[1, 2], [3], []]):
        together = completion(texts, prompt=prompts, **fields).prompts
        assert [entry.request for entry in together] == [
            only(completion(texts, prompt=prompt, **fields)) for prompt in prompts
        ]
        assert [entry.params["text"] for entry in together] == ["prompt[0]", "prompt[1]", "prompt[2]"]
    for prompt in ("one", [1, 2]):
        (single,), (listed,) = completion(texts, prompt=prompt).prompts, completion(texts, prompt=[prompt]).prompts
        assert (listed.request, listed.params) == (single.request, single.params)


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        (["a", [1]], "prompt[1]"),
        ([[1], [2], "a"], "prompt[2]"),
        (["a", 1], "prompt[1]"),
        (["a", None], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([None, "a"], "prompt[0]"),
        ([[1], [2, "a"]], "prompt[1][1]"),
        ([["a"]], "prompt[0]"),
        (["a", "\ud800"], "prompt[1]"),
    ],
)
def test_a_list_that_is_no_list_of_prompts_is_refused_where_it_is_none(
    texts: TokenTexts, prompt: Any, place: str
) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        completion(texts, prompt=prompt)
    assert caught.value.field == place


def test_unknown_fields_are_ignored_and_known(texts: TokenTexts) -> None:
    body = Body({"prompt": "hi", "user": "u", "x": 1})
    completions.read_call(body, texts)
    assert body.unknown() == ["user", "x"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", True),
        ("temperature", "1"),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", 1 << 31),
        ("seed", 1 << 64),
        ("stop", 5),
        ("stop_token_ids", {}),
        ("ignore_eos", 1),
        ("logit_bias", []),
        ("model", 4),
        ("prompt", 4),
        ("prompt", {}),
        ("cache_salt", "\ud800"),
    ],
)
def test_types_are_checked(texts: TokenTexts, field: str, value: Any) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        completion(texts, **{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("read", "fields", "param"),
    [
        (completion, {"prompt": [1] * ((1 << 20) + 1)}, "prompt"),
        (completion, {"prompt": [[1] * (1 << 19), [1] * (1 << 19), [1]]}, "prompt"),
        (completion, {"prompt": [[1] * ((1 << 20) + 1)]}, "prompt"),
        (completion, {"prompt": ["a"] * 65}, "prompt"),
        (completion, {"prompt": ["a"] + [[]] * 64}, "prompt"),
        (completion, {"stop": ["a"] * 17}, "stop"),
        (completion, {"stop_token_ids": [1] * 65}, "stop_token_ids"),
        (completion, {"logit_bias": dict.fromkeys(map(str, range(1025)), 0)}, "logit_bias"),
        (conversation, {"messages": [{}] * 1025}, "messages"),
        (conversation, {"messages": [{"role": "user", "content": [{}] * 257}]}, "messages[0].content"),
    ],
)
def test_lists_are_bounded_before_they_are_read(texts: TokenTexts, read: Any, fields: Any, param: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="at most") as caught:
        read(texts, **fields)
    assert caught.value.field == param


def test_errors_quote_little_of_what_was_sent(texts: TokenTexts) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        conversation(texts, messages=[{"role": "user", "content": [{"type": "x" * 10**6}]}])
    assert len(dump(http_error(caught.value).body)) < 1000


def test_what_an_assistant_has_refused_to_say_is_what_it_said(texts: TokenTexts) -> None:
    part = {"type": "refusal", "refusal": "I cannot."}
    for message in ({"content": None, "refusal": "I cannot."}, {"refusal": "I cannot."}, {"content": [part]}):
        (read,) = only(conversation(texts, messages=[{"role": "assistant", **message}])).messages.messages
        assert read.content == "I cannot."
    (item,) = response(texts, input=[{"role": "assistant", "content": [part]}]).prompts
    assert item.incoming.request.messages.messages[0].content == "I cannot."
    for read_call, field in ((conversation, "messages"), (response, "input")):
        with pytest.raises(errors.InvalidRequest, match="'refusal'") as caught:
            read_call(texts, **{field: [{"role": "user", "content": [part]}]})
        assert caught.value.field == f"{field}[0].content[0].type"


def test_a_response_may_be_asked_for_what_every_one_has(texts: TokenTexts) -> None:
    asked = response(texts, reasoning={"effort": "medium", "summary": "auto"}, max_tool_calls=3)
    assert asked.echoed["reasoning"] == {"effort": "medium", "summary": "auto"}
    assert asked.echoed["max_tool_calls"] == 3
    for reasoning in ({"effort": "high"}, {"summary": "detailed"}, {"generate_summary": "concise"}):
        with pytest.raises(errors.InvalidRequest, match="not supported") as caught:
            response(texts, reasoning=reasoning)
        assert caught.value.field == f"reasoning.{next(iter(reasoning))}"


def test_every_key_that_is_no_token_id_is_named(texts: TokenTexts) -> None:
    with pytest.raises(errors.InvalidRequest, match="'bad1', '-2'") as caught:
        completion(texts, logit_bias={"bad1": 1, "7": 1, "-2": 1})
    assert caught.value.field == "logit_bias"


def test_parts_of_text_are_lines(texts: TokenTexts) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    call = conversation(
        texts, messages=[{"role": "developer", "content": parts}, {"role": "assistant", "content": None}]
    )
    assert [(entry.role, entry.content) for entry in only(call).messages.messages] == [
        ("system", "one\ntwo"),
        ("assistant", ""),
    ]


def test_every_error_has_a_status() -> None:
    assert set(KINDS) == set(CODES)
    for kind in KINDS:
        error = kind("a.b", "what") if issubclass(kind, errors.InvalidRequest) else kind("what")
        answer = http_error(error)
        retried = answer.status in (429, 503)
        assert ("retry-after" in answer.headers) == retried, kind
        assert answer.body["error"]["message"]
    late = http_error(errors.Overloaded("full", retry_after_s=2.3))
    assert late.headers == {"retry-after": "3", "retry-after-ms": "2300"}


def test_a_wrong_output_is_told_by_its_reason() -> None:
    answer = http_error(errors.WrongOutput("a worker was found to compute wrong"))
    assert answer.status == 500
    assert answer.body["error"]["code"] == "wrong_output"
    assert answer.body["error"]["message"] == "a worker was found to compute wrong"


def test_an_unforeseen_error_is_opaque(caplog: pytest.LogCaptureFixture) -> None:
    answer = http_error(ZeroDivisionError("secret"))
    assert answer.status == 500
    assert "secret" not in json.dumps(answer.body)
    assert "ZeroDivisionError" in caplog.text


def test_tokens_have_their_own_bytes() -> None:
    tokenizer: Tokenizer = byte_tokenizer()
    texts = TokenTexts(tokenizer)
    for text in ("the baton is passed", " é €", "🏃 x", "\n\t"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(texts[token_id].data for token_id in ids) == text.encode()
    (euro, *_) = tokenizer.encode("€", add_special_tokens=False).ids
    assert texts[euro].text == "\ufffd"
    assert texts[tokenizer.token_to_id("<|im_end|>")].text == "<|im_end|>"
    assert texts[10**6].text == "", "padding of the vocabulary"


def test_events_are_single_lines() -> None:
    payload = {"text": "a\u2028b\u2029c\x85d\ne é"}
    data = dump(payload)
    assert json.loads(data) == payload
    assert len(data.decode().splitlines()) == 1
    assert "é" in data.decode()


@pytest.mark.parametrize("read", [completion, conversation, response])
def test_fields_of_vllm_that_change_the_text(texts: TokenTexts, read: Any) -> None:
    call = read(
        texts,
        allowed_token_ids=[5, 6],
        bad_words=["no", " way"],
        include_stop_str_in_output=True,
        truncate_prompt_tokens=9,
        add_special_tokens=False,
        top_p=0,
    )
    (prompt,) = call.prompts
    request = prompt.incoming.request
    assert list(request.sampling.allowed_token_ids) == [5, 6]
    assert list(request.sampling.bad_words) == ["no", " way"]
    assert request.response.include_stop_text
    assert request.truncate_prompt_tokens == 9
    assert request.HasField("add_special_tokens")
    assert not request.add_special_tokens
    assert request.sampling.HasField("top_p")
    (all_that_fits,) = read(texts, truncate_prompt_tokens=-1).prompts
    assert all_that_fits.incoming.request.truncate_prompt


def test_where_a_chat_ends(texts: TokenTexts) -> None:
    chat_ = only(conversation(texts, continue_final_message=True, add_generation_prompt=False)).messages
    assert (chat_.continue_final_message, chat_.add_generation_prompt) == (True, False)
    assert not only(conversation(texts)).messages.HasField("add_generation_prompt")
    for read in (completion, response):
        read(texts, continue_final_message=False, add_generation_prompt=True)
        for fields in ({"continue_final_message": True}, {"add_generation_prompt": False}):
            with pytest.raises(errors.InvalidRequest) as caught:
                read(texts, **fields)
            assert caught.value.field in fields


@pytest.mark.parametrize("read", [completion, conversation, response])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprob_token_ids", [1]),
        ("thinking_token_budget", 5),
        ("repetition_detection", {"max_pattern_size": 2}),
        ("regex", "a+"),
        ("ebnf", "root ::= 'a'"),
        ("grammar", "root ::= 'a'"),
        ("json_schema", {"type": "object"}),
        ("stop_regex", "a+"),
        ("mirostat", 2),
        ("typical_p", 0.5),
        ("dry_multiplier", 0.8),
        ("xtc_probability", 0.1),
        ("samplers", ["top_k"]),
        ("n_predict", 5),
        ("cache_prompt", False),
        ("do_sample", False),
        ("truncation_side", "right"),
        ("prompt_token_ids", [1, 2]),
        ("return_prompt_text", True),
        ("watermarking", True),
        ("previous_response", {"id": "resp_1"}),
        ("previous_input_messages", [{"role": "user"}]),
        ("enable_response_messages", True),
        ("extra_key", "tenant"),
        ("return_meta_info", True),
        ("return_prompt_token_ids", True),
        ("n_cmpl", 2),
        ("min_keep", 3),
        ("return_tokens", True),
        ("post_sampling_probs", True),
        ("parse_tool_calls", False),
        ("adaptive_target", 0.5),
        ("enable_thinking", False),
        ("thinking", {"type": "enabled"}),
        ("format", "json"),
        ("random_seed", 7),
        ("banned_tokens", [5]),
        ("extra_body", {"top_k": 1}),
    ],
)
def test_fields_of_other_servers_are_refused_by_name(texts: TokenTexts, read: Any, name: str, value: Any) -> None:
    with pytest.raises(errors.InvalidRequest, match="not supported") as caught:
        read(texts, **{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize("read", [completion, conversation, response])
def test_what_changes_nothing_is_accepted(texts: TokenTexts, read: Any) -> None:
    read(texts, mirostat=0, typical_p=1.0, cache_prompt=True, samplers=[], xtc_threshold=0.1, dry_base=1.75, user="me")
    read(texts, truncation_side="left", n_cmpl=1, min_keep=0, adaptive_target=-1.0, extra_body={}, id_slot=1)


@pytest.mark.parametrize(
    ("name", "value"), [("prefix", True), ("partial", True), ("tools", [{"type": "function"}]), ("audio", {"id": "a"})]
)
def test_what_would_change_a_message_is_refused_by_name(texts: TokenTexts, name: str, value: Any) -> None:
    message = {"role": "assistant", "content": "Once upon"}
    with pytest.raises(errors.InvalidRequest, match="not supported") as caught:
        conversation(texts, messages=[{**message, name: value}])
    assert caught.value.field == f"messages[0].{name}"
    for nothing in (None, *{"audio": (), "tools": ([],)}.get(name, (False,))):
        conversation(texts, messages=[{**message, name: nothing}])


def test_reasoning_is_not_asked_of_a_chat_in_the_words_of_a_response(texts: TokenTexts) -> None:
    for read in READERS:
        read(texts, reasoning={})
        with pytest.raises(errors.InvalidRequest, match="not supported") as caught:
            read(texts, reasoning={"effort": "high"})
        assert caught.value.field == "reasoning"


@pytest.mark.parametrize("read", [completion, conversation, response])
def test_errors_name_what_the_body_has(texts: TokenTexts, read: Any) -> None:
    (prompt,) = read(texts, stop="x", logit_bias={"7": 1, "99": 1}).prompts
    names = {
        "stopping.stop[0]": "stop",
        "sampling.logit_bias[1].token_id": "logit_bias.99",
        "sampling.logit_bias[0].bias": "logit_bias.7",
        "sampling.bad_token_ids": "bad_words",
    }
    assert {name: prompt.params[name] for name in names} == names
    (listed,) = read(texts, stop=["x", "y"]).prompts
    assert "stopping.stop[0]" not in listed.params


def test_ids_of_tokens_are_listed_where_vllm_lists_them(texts: TokenTexts) -> None:
    output = inference_pb2.Chunk(text="hi", token_ids=[4, 5])
    ending = Ending("stop", None)
    for read in READERS:
        call = read(texts, return_token_ids=True)
        style = call.prompts[0].style
        assert only(call).response.echo_token_ids
        style.scores.begin([7, 8])
        whole = {**style.whole(output, ending), **call.further()}
        assert (whole["token_ids"], whole["prompt_token_ids"]) == ([4, 5], [7, 8])
        style.opening()
        (first, second) = (style.delta(output), style.delta(output))
        assert first is not None
        assert second is not None
        assert {**first, **call.opening()}["prompt_token_ids"] == [7, 8]
        assert first["token_ids"] == second["token_ids"] == [4, 5]
        assert "prompt_token_ids" not in second
        assert "token_ids" not in read(texts).prompts[0].style.whole(output, ending)


def test_a_chats_log_probabilities_may_name_tokens_by_their_ids(texts: TokenTexts) -> None:
    (style,) = conversation(texts, return_tokens_as_token_ids=True, logprobs=True, top_logprobs=1).prompts[0].styles
    top = types_pb2.TopLogprob(token_id=9, logprob=-1.0)
    output = inference_pb2.Chunk(text="x", token_ids=[8], logprobs=[types_pb2.TokenLogprobs(logprob=-2.0, top=[top])])
    (entry,) = style.whole(output, Ending("stop", None))["logprobs"]["content"]
    assert (entry["token"], entry["top_logprobs"][0]["token"]) == ("token_id:8", "token_id:9")
    assert bytes(entry["bytes"]) == texts[8].data
