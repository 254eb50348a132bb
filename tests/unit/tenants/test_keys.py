"""Tests API keys: their form, how they are kept, and which of them open."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import InvalidKey
from services.router.tenants.keys import MOST_KEY_CHARS, KeyRing, key_of, new_key
from services.router.tenants.tenant import ApiKey, Tenant

KEY, SECOND, LATE = new_key(), new_key(), new_key()
EXPIRES_S = 1_800_000_000.0


def kept(key: str, expires_unix_s: float | None = None) -> ApiKey:
    return ApiKey(key_of(key).key_id, key_of(key).digest, expires_unix_s)


ACME = Tenant("acme", keys=(kept(KEY), kept(SECOND)))
OTHER = Tenant("other", keys=(kept(LATE, EXPIRES_S),))
RING = KeyRing([ACME, OTHER])


def test_a_new_key_has_its_form_and_is_not_kept() -> None:
    assert len(key_of(KEY).key_id) == 12
    assert key_of(KEY).digest == hashlib.sha256(KEY.encode()).digest()
    assert len({new_key() for _ in range(1000)}) == 1000
    assert KEY.split("_", 2)[2] not in repr(key_of(KEY))


def test_each_of_a_tenants_keys_opens() -> None:
    assert RING.tenant_of(f"Bearer {KEY}", 0.0) is ACME
    assert RING.tenant_of(f"bearer {SECOND}", 0.0) is ACME
    assert RING.tenant_of(f"BEARER {LATE}", EXPIRES_S - 1) is OTHER


def test_a_key_expires() -> None:
    with pytest.raises(InvalidKey, match="has expired"):
        RING.tenant_of(f"Bearer {LATE}", EXPIRES_S)
    wrong = LATE[:-1] + ("a" if LATE[-1] != "a" else "b")
    with pytest.raises(InvalidKey, match="is not valid"):
        RING.tenant_of(f"Bearer {wrong}", EXPIRES_S)


WRONG = {
    "nothing": "",
    "no scheme": KEY,
    "another scheme": f"Basic {KEY}",
    "no key": "Bearer ",
    "one character less": f"Bearer {KEY[:-1]}",
    "one character more": f"Bearer {KEY}a",
    "a blank more": f"Bearer  {KEY}",
    "another secret": f"Bearer bk_{key_of(KEY).key_id}_{'a' * 43}",
    "another id": f"Bearer bk_aaaaaaaaaaaa_{KEY.rpartition('_')[2]}",
    "another tenant's id": f"Bearer bk_{key_of(LATE).key_id}_{KEY[-43:]}",
    "not ASCII": "Bearer bk_é_é",
    "a surrogate": "Bearer bk_\ud800",
    "a megabyte": "Bearer bk_" + "a" * (1 << 20),
}


@pytest.mark.parametrize("authorization", WRONG.values(), ids=WRONG)
def test_a_wrong_key_is_refused_and_not_shown(authorization: str) -> None:
    with pytest.raises(InvalidKey) as refused:
        RING.tenant_of(authorization, 0.0)
    assert KEY[-43:] not in str(refused.value)
    assert len(str(refused.value)) < 200


@given(st.text())
def test_no_text_opens_by_chance(text: str) -> None:
    with pytest.raises(InvalidKey):
        RING.tenant_of(f"Bearer {text}", 0.0)
    with pytest.raises(InvalidKey):
        RING.tenant_of(text, 0.0)


def test_a_text_that_is_no_key_is_not_kept() -> None:
    for text in ("", "bk_", "sk-1234", KEY + "\n", "bk_" + "a" * MOST_KEY_CHARS):
        with pytest.raises(InvalidKey, match="a key is bk_<id>_<secret>"):
            key_of(text)
