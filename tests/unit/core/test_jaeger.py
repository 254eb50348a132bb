"""Tests which addresses are taken for Jaeger's, and that links lead where its user interface looks."""

from __future__ import annotations

import argparse

import pytest

from services.core.config import load
from services.core.errors import ConfigError
from services.core.jaeger import comparison_link, is_web_address, search_link, trace_link
from services.router.config import RouterConfig


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:16686",
        "https://jaeger.example/",
        "http://[::1]:16686/jaeger/ui",
        "http://10.0.0.1",
    ],
)
def test_an_address_of_the_web_is_taken(url: str) -> None:
    assert is_web_address(url)
    assert load(RouterConfig, argparse.Namespace(jaeger_url=url)).jaeger_url == url


@pytest.mark.parametrize(
    "url",
    [
        "localhost:16686",
        "javascript:alert(1)",
        "ftp://jaeger",
        "http://",
        "http://:16686",
        "http://host:99999",
        "http://host:0",
        "http://host:port",
        "http://user:secret@host",
        "http://host/?query",
        "http://host/#fragment",
        'http://host/"><script>',
        "http://host/\n",
        "http://ho st",
        "http://[::1",
    ],
)
def test_what_is_none_is_refused_with_the_name_of_the_flag(url: str) -> None:
    assert not is_web_address(url)
    with pytest.raises(ConfigError, match=r"^--jaeger-url: .* must be an http or https address"):
        load(RouterConfig, argparse.Namespace(jaeger_url=url))
    with pytest.raises(ConfigError, match=r"^BATON_JAEGER_URL: "):
        load(RouterConfig, argparse.Namespace(), {"BATON_JAEGER_URL": url})


def test_links() -> None:
    assert search_link("http://j:16686/", "baton-router") == "http://j:16686/search?service=baton-router"
    assert search_link("http://j", "a&b c") == "http://j/search?service=a%26b%20c"
    assert trace_link("http://j/ui/", "ab12") == "http://j/ui/trace/ab12"
    assert trace_link("http://j", '"><b>/../') == "http://j/trace/%22%3E%3Cb%3E%2F..%2F"
    assert comparison_link("http://j", "ab", "cd") == "http://j/trace/ab...cd"
