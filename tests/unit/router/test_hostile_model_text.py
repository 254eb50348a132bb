"""Tests what a model's tokenizer and chat template cannot do to the router that reads them."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from services.core.errors import ConfigError, InvalidRequest
from services.router.text.chat_template import ChatTemplate
from services.router.text.tokenisation import load_model_text
from tests.support.text_model import write_model

HUGE = {
    "a power": "{{ 7 ** 5000000 }}",
    "a power of what is asked": "{{ messages|length ** 99999999 if false else (messages|length + 6) ** 5000000 }}",
    "a negative power": "{{ 7 ** -5000000 }}",
    "a product of a text": "{{ 'a' * 200000000 }}",
    "a product of a list": "{{ ([1] * 200000000)|length }}",
    "products of products": "{% set x = 'a' * 1000000 %}{{ x * 1000000 }}",
    "a width": "{{ '%0900000000d' % 1 }}",
    "a width that is given": "{{ '%*d' % (900000000, 1) }}",
    "the filter format": "{{ '%0900000000d'|format(1) }}",
    "the method format": "{{ '{:>900000000}'.format(1) }}",
    "a width in a width": "{{ '{:>{}}'.format(1, 900000000) }}",
    "center": "{{ 'x'|center(900000000) }}",
    "indent": "{{ 'x\\ny'|indent(900000000) }}",
    "ljust": "{{ 'x'.ljust(900000000) }}",
    "zfill": "{{ 'x'.zfill(900000000) }}",
}


@pytest.mark.parametrize("template", HUGE.values(), ids=HUGE.keys())
def test_a_template_makes_nothing_huge_in_one_operation(template: str) -> None:
    """Such an operation holds the interpreter lock, and with it the event loop; some would be folded at load."""
    compiled = ChatTemplate(template, {})
    with pytest.raises(InvalidRequest, match="too large"):
        compiled.render([{"role": "user", "content": "x"}])


def test_templates_may_compute() -> None:
    template = ChatTemplate(
        "{{ 7 % 2 }} {{ '-' * 3 }} {{ 2 ** 10 }} {{ 3 * 1.5 }} {{ '%s: %05.2f' % ('a', 1.5) }}"
        " {{ '{:>4}|{}'.format(1, 'b') }} {{ 'x'|center(3) }} {{ 'a'.rjust(2) }} {{ 'a-b'.split('-', 1)|join('+') }}"
        " {{ [1] * 2 }} {{ 'a'|indent(4, true) }} {{ 12345678901234|string }}",
        {},
    )
    assert template.render([]) == "1 --- 1024 4.5 a: 01.50    1|b  x   a a+b [1, 1]     a 12345678901234"


def replace(content: str, pattern: Any = "a") -> dict[str, Any]:
    return {
        "type": "Replace",
        "pattern": {"String": pattern} if isinstance(pattern, str) else pattern,
        "content": content,
    }


@pytest.mark.parametrize("where", ["decoder", "normalizer"])
def test_a_tokenizer_that_makes_texts_grow_is_refused(tmp_path: pathlib.Path, where: str) -> None:
    """Nests six replacements, which would make a terabyte of a token in one call that cannot be stopped."""
    kinds = {"decoder": "decoders", "normalizer": "normalizers"}
    path = write_model(tmp_path) / "tokenizer.json"
    content = json.loads(path.read_text())
    content[where] = {"type": "Sequence", kinds[where]: [replace("a" * 100)] * 6}
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"its {where} makes texts 1e\\+12 times as long"):
        load_model_text(tmp_path)
