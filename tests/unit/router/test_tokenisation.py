"""Tests the text side of a model directory."""

from __future__ import annotations

import json
import pathlib
import threading
import time

import pytest

from services.core.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from services.router.text.chat_template import ChatTemplate
from services.router.text.output.families import forms_of
from services.router.text.tokenisation import load_model_text
from tests.support.patience import HANG_S, Patience
from tests.support.text_model import CONTEXT_TOKENS, write_model


def test_facts_and_prompts(tmp_path: pathlib.Path) -> None:
    text = load_model_text(write_model(tmp_path))
    assert text.context_tokens == CONTEXT_TOKENS
    assert text.vocab_size == text.tokenizer.get_vocab_size()
    assert text.encode_text("the baton")[0] == 1, "a completion prompt gets the model's special tokens"
    ids = text.encode_messages([{"role": "user", "content": "hi"}])
    rendered = text.tokenizer.decode(ids, skip_special_tokens=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(1) == 2, "a rendered template brings its own"


def test_what_is_too_long_is_refused_before_its_ids_are_taken(tmp_path: pathlib.Path) -> None:
    text = load_model_text(write_model(tmp_path))
    assert len(text.encode_text("the baton", 9)) <= 9
    with pytest.raises(ContextLengthExceeded, match="is 3 tokens; the prompt has"):
        text.encode_text("the baton", 3)
    messages = [{"role": "user", "content": "x" * 1000}]
    with pytest.raises(ContextLengthExceeded, match=r"the prompt's \d+ characters are at least \d+$"):
        text.encode_messages(messages, 50)


def test_messages_are_judged_by_what_the_template_makes_of_them(tmp_path: pathlib.Path) -> None:
    folder = write_model(tmp_path, template="{{ messages[0].content.split('</think>')[-1] | trim }}")
    messages = [{"role": "user", "content": "x" * 5000 + "</think>hi" + " " * 5000}]
    assert load_model_text(folder).encode_messages(messages, 4)


def test_other_threads_run_while_a_text_is_tokenised(tmp_path: pathlib.Path) -> None:
    """The interpreter lock would let them only when it is over.

    The best of three counts: a machine that stands still for a moment spoils one, a lock that is held spoils all.
    """
    text = load_model_text(write_model(tmp_path))
    long = "the baton is passed from the runner that prefills " * 20_000

    def turns_meanwhile() -> int:
        begun, turns, over = threading.Event(), 0, threading.Event()

        def encode() -> None:
            begun.set()
            text.encode_text(long)
            over.set()

        thread = threading.Thread(target=encode)
        thread.start()
        begun.wait()
        patience = Patience(HANG_S)
        while not over.is_set():
            assert not patience.is_over()
            turns += 1
            time.sleep(0)  # gives the lock away; a step of this loop is far shorter than the text
        thread.join()
        return turns

    assert max(turns_meanwhile() for _ in range(3)) > 100


def test_a_template_in_the_tokenizer_configuration(tmp_path: pathlib.Path) -> None:
    write_model(tmp_path, template=None)
    with pytest.raises(InvalidRequest) as refused:
        load_model_text(tmp_path).encode_messages([{"role": "user", "content": "hi"}])
    assert refused.value.field == "messages"
    for template in ("{{ bos_token }}T", [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "T"}]):
        path = tmp_path / "tokenizer_config.json"
        path.write_text(json.dumps({"chat_template": template, "bos_token": "<|im_start|>"}))
        loaded = load_model_text(tmp_path)
        ids = loaded.encode_messages([{"role": "user", "content": "hi"}])
        assert loaded.tokenizer.decode(ids).endswith("T")


def test_a_template_for_tools_beside_the_default_one(tmp_path: pathlib.Path) -> None:
    """Models of Hermes' and Mistral's have two, by name."""
    write_model(tmp_path, template=None)
    with_tools = (
        "\n  {%- for tool in tools %}<tool_call>{{ tool.function.name }}{% endfor %}\n {{ messages[0].content }}\n"
    )
    default = "\n {{ messages[0].content }}!\n"
    named = [{"name": "default", "template": default}, {"name": "tool_use", "template": with_tools}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    loaded = load_model_text(tmp_path)
    messages, tools = [{"role": "user", "content": "hi"}], [{"name": "now"}]
    for template, given in ((default, []), (with_tools, tools)):
        assert loaded.template is not None
        assert loaded.template.render(messages, given) == ChatTemplate(template, {}).render(messages, given)
    assert forms_of(loaded.template_text, None, None).tools_name == "hermes"


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json"])
def test_a_directory_that_is_no_model(tmp_path: pathlib.Path, missing: str) -> None:
    (write_model(tmp_path) / missing).unlink()
    with pytest.raises(ConfigError, match=missing.replace(".", r"\.")):
        load_model_text(tmp_path)


def test_a_damaged_tokenizer_is_named(tmp_path: pathlib.Path) -> None:
    path = write_model(tmp_path) / "tokenizer.json"
    for text in ("", "{", "{}", '{"model": {"type": "none"}}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"{path} is no tokenizer: "):
            load_model_text(tmp_path)


def test_a_configuration_without_context(tmp_path: pathlib.Path) -> None:
    (write_model(tmp_path) / "config.json").write_text('{"vocab_size": 9}')
    with pytest.raises(ConfigError, match="how long"):
        load_model_text(tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": {"n_positions": 9}}')
    assert load_model_text(tmp_path).context_tokens == 9
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_model_text(tmp_path)


def test_template_helpers() -> None:
    template = ChatTemplate(
        "{%- for m in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\n{{ m | tojson }}{% endfor %}"
        "{{ eos_token }}{{ strftime_now('%Y')|length }}",
        {"eos_token": "</s>"},
    )
    rendered = template.render([{"role": "user", "content": "é"}, {"role": "user", "content": "x"}])
    assert rendered == '{"role": "user", "content": "é"}</s>4'


def test_what_the_assistant_has_said_may_be_tagged() -> None:
    """Templates of models that are to be trained on chats tag it."""
    source = "{%- for m in messages -%}{%- generation -%}{{- m.content + '.' -}}{%- endgeneration -%}{%- endfor -%}"
    assert ChatTemplate(source, {}).render([{"role": "assistant", "content": "a"}] * 2) == "a.a."


def test_a_template_that_is_none_is_told_when_it_is_read(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="chat template cannot be compiled"):
        load_model_text(write_model(tmp_path, template="{% for %}"))


def test_a_chat_is_bounded_by_what_is_made_of_it() -> None:
    """A client may send as many messages as it likes, and a template write each of them as often."""
    template = ChatTemplate("{% for m in messages %}{% for n in messages %}{{ n.content }}{% endfor %}{% endfor %}", {})
    few, many = ([{"role": "user", "content": "x" * 100}] * count for count in (100, 300))
    assert len(template.render(few)) == 1_000_000
    with pytest.raises(InvalidRequest, match=r"refuses them: it makes more than \d+ characters of them") as refused:
        template.render(many)
    assert refused.value.field == "messages"


def test_indented_json_is_bounded_by_what_is_made_of_it() -> None:
    nested = ", ".join(["[" * 900 + "]" * 900] * 20)
    call = {"function": {"name": "f", "arguments": '{"a": [' + nested + "]}"}}
    template = ChatTemplate("{{ (messages[0].tool_calls[0].function.arguments | tojson(indent=4)) | length }}", {})
    with pytest.raises(InvalidRequest, match="it makes more than 16777216 characters"):
        template.render([{"role": "assistant", "content": "", "tool_calls": [call]}])


def test_half_a_surrogate_pair_is_the_requests_error() -> None:
    """The arguments of a call are JSON, whose escapes can express it, and no tokenizer takes it."""
    call = {"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}", {})
    with pytest.raises(InvalidRequest, match="surrogates"):
        template.render([{"role": "assistant", "content": "", "tool_calls": [call]}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_refuses_or_misbehaves_is_the_requests_error(source: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
    assert refused.value.field == "messages"
