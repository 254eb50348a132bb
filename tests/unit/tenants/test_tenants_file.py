"""Tests the tenants file: what it may say, and that everything else is refused by file, line and field."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import ConfigError
from services.router.tenants.tenant import PRIORITIES, Tenant, TenantLimits, TokenPrices
from services.router.tenants.tenants_file import read_tenants
from tests.support import ROOT

DIGEST = "ab" * 32


def read(text: str) -> dict[str, Tenant]:
    return read_tenants(text.encode(), "t.yaml")


def refused(text: str | bytes) -> str:
    with pytest.raises(ConfigError) as error:
        read_tenants(text if isinstance(text, bytes) else text.encode(), "t.yaml")
    return str(error.value)


def test_a_tenant_with_nothing_said_has_no_limits() -> None:
    (tenant,) = read("tenants:\n  acme: {}\n").values()
    assert tenant == Tenant("acme")
    assert (tenant.keys, tenant.models, tenant.priorities) == ((), None, PRIORITIES)


def test_every_field() -> None:
    (tenant,) = read(f"""
tenants:
  acme:
    keys:
      - {{id: abcd, sha256: {DIGEST}, expires: 2027-01-31}}
      - {{id: abce, sha256: "{DIGEST}", expires: 2027-01-31T12:00:00+02:00}}
    limits:
      requests_per_s: 2.5
      tokens_per_min: 60_000
      burst_tokens: 10000
      concurrent_requests: 4
      max_input_tokens: 100
      max_output_tokens: 50
    models: [one, "two/three"]
    priority: {{min: -5, max: 7}}
    weight: 0.5
    cache_namespace: team
    price: {{prompt: 0.2, output: 1e-3}}
    log_prompts: false
""").values()
    first, second = tenant.keys
    assert (first.key_id, first.digest) == ("abcd", bytes.fromhex(DIGEST))
    assert first.expires_unix_s == datetime(2027, 1, 31, tzinfo=UTC).timestamp()
    assert second.expires_unix_s == datetime(2027, 1, 31, 10, tzinfo=UTC).timestamp()
    assert tenant.limits == TenantLimits(2.5, 3, 60_000, 10_000, 4, 100, 50)
    assert (tenant.models, tenant.priorities, tenant.weight) == (frozenset({"one", "two/three"}), (-5, 7), 0.5)
    assert (tenant.cache_namespace, tenant.logs_prompts) == ("team", False)
    assert tenant.prices == TokenPrices(0.2, cached=0.2, output=0.001), "a cached token costs as any, unless said"


def test_tenants_may_share_what_one_of_them_says() -> None:
    tenants = read("tenants:\n  a: {limits: &small {tokens_per_min: 600}}\n  b: {limits: *small}\n")
    assert tenants["a"].limits == tenants["b"].limits != TenantLimits()


def test_bursts_are_a_second_and_a_minute_unless_said() -> None:
    (tenant,) = read("tenants: {a: {limits: {requests_per_s: 0.1, tokens_per_min: 600}}}").values()
    assert (tenant.limits.burst_requests, tenant.limits.burst_tokens) == (1, 600)


def test_the_example_is_a_file() -> None:
    path = ROOT / "deploy" / "tenants.example.yaml"
    tenants = read_tenants(path.read_bytes(), str(path))
    assert list(tenants) == ["shop", "search", "batch"]
    assert len(tenants["shop"].keys) == 2
    assert tenants["search"].salt("") == tenants["batch"].salt("") != tenants["shop"].salt("")


def of_tenant(line: str) -> str:
    return f"tenants:\n  acme:\n    {line}\n"


WRONG = [
    ("", "t.yaml: it is empty"),
    ("# nothing", "t.yaml: it is empty"),
    ("tenants:", "t.yaml:1: tenants: must have tenants by their names"),
    ("tenants: {}", "t.yaml:1: tenants: has no tenant: nobody could use the router"),
    ("a: 1\n", "t.yaml:1: tenants: is missing"),
    ("tenants: {a: {}}\nmore: 1", "t.yaml:2: more: is no field; here may stand tenants"),
    ("tenants:\n  Acme: {}", "t.yaml:2: tenants.Acme: a name must have 1 to 64"),
    ("tenants:\n  a/b: {}", "t.yaml:2: tenants.a/b: a name must have"),
    ("tenants:\n  a: {}\n  a: {}", "t.yaml:1: tenants: has 'a' on line 2 and on 3"),
    ("tenants:\n  b: *x", "t.yaml:2: found undefined alias"),
    ("tenants: !!python/object:os.system {}", "t.yaml:1: tenants: has no tenant"),
    ("tenants: {a: {}}\n---\nb: 1", "t.yaml:2: but found another document"),
    ("tenants:\n  ? [a]\n  : {}", "t.yaml:1: tenants: has a key that is no text"),
    ("tenants:\n\ta: {}", "t.yaml:2: found character"),
    ("tenants: {a: {}\n", "t.yaml:2: "),
    ("tenants:\n  a: \x07", "t.yaml:2: "),
    (b"tenants:\n  a\xff: {}", "t.yaml:2: it is not in UTF-8"),
    (of_tenant("models: [[[[[[[[[]]]]]]]]]"), "t.yaml:3: tenants.acme.models[0]: must be a text"),
    (of_tenant("key: 1"), "t.yaml:3: tenants.acme.key: is no field; here may stand keys, limits, models"),
    (of_tenant("keys: []\n    keys: []"), "t.yaml:2: tenants.acme: has 'keys' on line 3 and on 4"),
    (of_tenant("keys: x"), "t.yaml:3: tenants.acme.keys: must be a list of keys"),
    (of_tenant("keys: [{id: abcd}]"), "t.yaml:3: tenants.acme.keys[0].sha256: is missing"),
    (of_tenant("keys: [{id: ABCD, sha256: x}]"), "tenants.acme.keys[0].id: is 'ABCD'; it must have 4 to 32"),
    (of_tenant("keys: [{id: abcd, sha256: x}]"), "tenants.acme.keys[0].sha256: must be the key's SHA-256"),
    (
        of_tenant(f"keys:\n    - {{id: abcd, sha256: {DIGEST}}}\n    - {{id: abcd, sha256: {DIGEST}}}"),
        "t.yaml:5: tenants.acme.keys[1].id: is 'abcd', which tenants.acme.keys[0] has already",
    ),
    (of_tenant(f"keys: [{{id: abcd, sha256: {DIGEST}, expires: soon}}]"), "keys[0].expires: is 'soon'; it must be a"),
    (of_tenant(f"keys: [{{id: abcd, sha256: {DIGEST}, expires: 2027-02-30}}]"), "keys[0].expires: is '2027-02-30'"),
    (of_tenant(f"keys: [{{id: abcd, sha256: {DIGEST}, expires: 2027-02-01T00:00}}]"), "keys[0].expires: is '2027"),
    (of_tenant("limits: {requests_per_s: 0}"), "acme.limits.requests_per_s: is '0'; it must be a number in"),
    (of_tenant("limits: {requests_per_s: .inf}"), "acme.limits.requests_per_s: is '.inf'; it must be a number"),
    (of_tenant('limits: {requests_per_s: "5"}'), "acme.limits.requests_per_s: is a text in quotes"),
    (of_tenant("limits: {requests_per_s: }"), "acme.limits.requests_per_s: is empty"),
    (of_tenant("limits: {tokens_per_min: 1.5}"), "acme.limits.tokens_per_min: is '1.5'; it must be a whole number"),
    (of_tenant("limits: {burst_tokens: 5}"), "acme.limits.burst_tokens: needs tokens_per_min, whose burst it is"),
    (of_tenant("limits: {burst_requests: 5}"), "acme.limits.burst_requests: needs requests_per_s"),
    (of_tenant("limits: {concurrent_requests: 0}"), "acme.limits.concurrent_requests: is '0'"),
    (of_tenant("limits: {max_output_tokens: 0x10}"), "acme.limits.max_output_tokens: is '0x10'"),
    (of_tenant("limits: {rpm: 5}"), "acme.limits.rpm: is no field; here may stand requests_per_s, burst_requests"),
    (of_tenant("models: []"), "acme.models: has no model; leave it out to allow all"),
    (of_tenant("models: [{}]"), "acme.models[0]: must be a text"),
    (of_tenant("priority: {min: 5, max: 4}"), "acme.priority: has a min of 5, above its max of 4"),
    (of_tenant("priority: {min: -101}"), "acme.priority.min: is '-101'; it must be a whole number in [-100, 100]"),
    (of_tenant("priority: 5"), "acme.priority: must have fields, each `name: value`"),
    (of_tenant("weight: 0"), "acme.weight: is '0'; it must be a number in [0.001, 1000]"),
    (of_tenant("cache_namespace: A B"), "acme.cache_namespace: is 'A B'; it must have 1 to 64"),
    (of_tenant("price: {prompt: -1}"), "acme.price.prompt: is '-1'"),
    (of_tenant("log_prompts: no"), "acme.log_prompts: is 'no'; it must be true or false"),
]


@pytest.mark.parametrize(("text", "expected"), WRONG)
def test_what_is_wrong_is_refused_in_words(text: str | bytes, expected: str) -> None:
    message = refused(text)
    assert expected in message
    assert message.startswith("t.yaml")
    assert message.isprintable()


def outcome(data: bytes) -> str:
    """Returns why the file is refused; its own name if it is read."""
    try:
        return "t.yaml" if read_tenants(data, "t.yaml") else ""
    except ConfigError as error:
        return str(error)


@given(st.one_of(st.binary(), st.text().map(str.encode)))
def test_any_bytes_end_in_tenants_or_in_words(data: bytes) -> None:
    assert outcome(data).startswith("t.yaml")


SCALARS = st.one_of(
    st.sampled_from(["1", "-5", "0.5", "x", "true", '"1"', "2027-01-01", DIGEST, "", "~", "*a"]),
    st.integers().map(str),
    st.floats().map(str),
)
NAMES = st.sampled_from(
    [
        *("tenants", "a", "keys", "id", "sha256", "expires", "limits", "requests_per_s", "tokens_per_min", "priority"),
        *("burst_tokens", "models", "min", "max", "weight", "cache_namespace", "price", "prompt", "log_prompts"),
    ]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.dictionaries(NAMES, inner, max_size=4).map(
            lambda fields: "{" + ", ".join(f"{name}: {value}" for name, value in fields.items()) + "}"
        ),
    ),
    max_leaves=12,
)


@given(VALUES, NAMES)
def test_any_shape_ends_in_tenants_or_in_words(value: str, name: str) -> None:
    for text in (value, f"tenants: {value}", f"tenants: {{a: {value}}}", f"tenants: {{a: {{{name}: {value}}}}}"):
        assert outcome(text.encode()).startswith("t.yaml")
