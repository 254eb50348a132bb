"""The text side of a model directory."""

from __future__ import annotations

import json
import pathlib

import pytest

from services.core.errors import ConfigError, InvalidRequest
from services.router.chat_template import ChatTemplate
from services.router.tokenisation import load_model_text
from tests.text_model import CONTEXT_TOKENS, write_model


def test_facts_and_prompts(tmp_path: pathlib.Path) -> None:
    text = load_model_text(write_model(tmp_path))
    assert text.context_tokens == CONTEXT_TOKENS
    assert text.vocab_size == text.tokenizer.get_vocab_size()
    assert text.encode_text("the baton")[0] == 1, "a completion prompt gets the model's special tokens"
    ids = text.encode_messages([{"role": "user", "content": "hi"}])
    rendered = text.tokenizer.decode(ids, skip_special_tokens=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(1) == 2, "a rendered template brings its own"


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


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json"])
def test_a_directory_that_is_no_model(tmp_path: pathlib.Path, missing: str) -> None:
    (write_model(tmp_path) / missing).unlink()
    with pytest.raises(ConfigError, match=missing.replace(".", r"\.")):
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
