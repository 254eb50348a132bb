"""Tests the Prometheus endpoint and the aliases."""

from __future__ import annotations

import contextlib
import http.client
import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from services.core.errors import ConfigError
from services.rpc import names
from services.rpc.prometheus import TTFT_BUCKETS, Aliases, MetricsServer, new_registry
from tests.support.patience import HANG_S


def scrape(port: int) -> dict[str, dict[tuple, float]]:
    """Returns sample name -> labels -> value."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics") as response:
        text = response.read().decode()
    samples: dict[str, dict[tuple, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def test_the_endpoint_serves_ours_the_process_and_the_aliases():
    registry = new_registry("baton-router", "router-0")
    first_token = Histogram(names.Metric.TIME_TO_FIRST_TOKEN, "x", ["model"], buckets=TTFT_BUCKETS, registry=registry)
    tokens = Counter(names.Metric.OUTPUT_TOKENS, "x", registry=registry)
    Gauge(names.Metric.BLOCKS, "x", ["block_class"], registry=registry).labels("free").set(7)
    Aliases(registry, names.VLLM_ALIASES, {"model_name": "tiny"})
    first_token.labels("tiny").observe(0.03)
    tokens.inc(5)
    server = MetricsServer(registry)
    try:
        samples = scrape(server.port)
    finally:
        server.close()
    model_name = ("model_name", "tiny")
    assert samples["baton_blocks"] == {(("block_class", "free"),): 7}
    assert samples["baton_output_tokens_total"] == {(): 5}
    assert samples["vllm:generation_tokens_total"] == {(model_name,): 5}
    bucket = samples["vllm:time_to_first_token_seconds_bucket"]
    assert bucket[(("le", "0.02"), ("model", "tiny"), model_name)] == 0
    assert bucket[(("le", "0.04"), ("model", "tiny"), model_name)] == 1
    assert samples["baton_info"] == {(("instance", "router-0"), ("service", "baton-router")): 1}
    assert "process_resident_memory_bytes" in samples


def test_the_port_is_exclusive_and_given_back():
    registry = new_registry("baton-router", "router-0")
    server = MetricsServer(registry)
    with pytest.raises(ConfigError, match="--metrics-port"):
        MetricsServer(registry, port=server.port)
    server.close()
    MetricsServer(registry, port=server.port).close()


@pytest.mark.parametrize(
    ("bound", "host", "status"),
    [
        ("127.0.0.1", "127.0.0.1:{port}", 200),
        ("127.0.0.1", "localhost", 200),
        ("127.0.0.1", "evil.example:{port}", 403),
        ("0.0.0.0", "any.example", 200),
    ],
)
def test_on_loopback_it_answers_to_names_of_loopback_alone(bound: str, host: str, status: int) -> None:
    """A page in a browser may have its own name point at loopback."""
    server = MetricsServer(new_registry("baton-router", "router-0"), bound)
    try:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_S)
        connection.request("GET", "/metrics", headers={"Host": host.format(port=server.port)})
        assert connection.getresponse().status == status
        connection.close()
    finally:
        server.close()


@pytest.mark.parametrize(
    ("method", "accept", "body"),
    [("GET", "*/*", b""), ("GET", "application/openmetrics-text", b"# EOF\n"), ("HEAD", "*/*", b"")],
)
def test_the_endpoint_answers_as_asked(method: str, accept: str, body: bytes) -> None:
    server = MetricsServer(CollectorRegistry())
    try:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_S)
        connection.request(method, "/metrics", headers={"Accept": accept})
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, body)
        connection.close()
    finally:
        server.close()


def test_a_new_connection_takes_the_place_of_the_oldest() -> None:
    server = MetricsServer(new_registry("baton-router", "router-0"))
    try:
        with contextlib.ExitStack() as stack:
            address = ("127.0.0.1", server.port)
            held = [stack.enter_context(socket.create_connection(address, HANG_S)) for _ in range(20)]
            assert "baton_info" in scrape(server.port)
            assert held[0].recv(1) == b"", "it has ended"
            held[-1].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert held[-1].recv(12) == b"HTTP/1.0 200"
    finally:
        server.close()
