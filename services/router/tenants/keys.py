"""Makes API keys, and recognises them: `bk_<id>_<secret>`, found by the id and compared by a digest.

A secret is 256 random bits, so one SHA-256 is enough to keep it by: nobody guesses it, however fast the digest is, and
a wrong key costs the router no more than a right one. Owns: the form of a key, and which tenant has which. Never: where
keys are kept (`tenants_file.py`), or what a tenant may do.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable

from services.core.errors import InvalidKey
from services.router.tenants.tenant import ApiKey, Tenant

MOST_KEY_CHARS = 128
"""A longer text is no key, and is not looked at."""
ID_FORM = re.compile(r"[a-z0-9]{4,32}", re.ASCII)
_FORM = re.compile(r"bk_([a-z0-9]{4,32})_[A-Za-z0-9_-]{43}", re.ASCII)
_ID_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
_ID_CHARS = 12
_NOBODYS = bytes(hashlib.sha256().digest_size)
_SCHEME = "bearer "


def new_key() -> str:
    """Returns a new key. Its id is 60 random bits, and its secret 256."""
    key_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_CHARS))
    return f"bk_{key_id}_{secrets.token_urlsafe(32)}"


def key_of(key: str) -> ApiKey:
    """Returns what to keep of a key. Raises InvalidKey, which does not show it, for a text that is none."""
    found = _FORM.fullmatch(key) if len(key) <= MOST_KEY_CHARS else None
    if found is None:
        raise InvalidKey(
            "a key is bk_<id>_<secret>: an id of 4 to 32 of a-z 0-9, and a secret of 43 of A-Z a-z 0-9 _ -"
        )
    return ApiKey(found[1], hashlib.sha256(key.encode()).digest())


class KeyRing:
    """Finds the tenant that a key belongs to."""

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        """No two keys have the same id."""
        self._keys = {key.key_id: (key, tenant) for tenant in tenants for key in tenant.keys}

    def __len__(self) -> int:
        return len(self._keys)

    def tenant_of(self, authorization: str, now_unix_s: float) -> Tenant:
        """Returns the tenant whose key an `authorization` header has. Raises InvalidKey.

        The work is the same for every key of the right form, so that time tells neither which ids there are nor how
        much of a secret is right; a text of another form costs less. That a key has expired is told only to who has it.
        """
        scheme, given = authorization[: len(_SCHEME)], authorization[len(_SCHEME) : len(_SCHEME) + MOST_KEY_CHARS + 1]
        if not authorization:
            raise InvalidKey("no API key was given: send it as `authorization: Bearer bk_…`")
        if scheme.lower() != _SCHEME:
            raise InvalidKey("the authorization is not `Bearer` with an API key")
        try:
            shown = key_of(given)
        except InvalidKey:
            raise InvalidKey("the API key is not valid") from None
        key, tenant = self._keys.get(shown.key_id, (None, None))
        is_right = hmac.compare_digest(shown.digest, _NOBODYS if key is None else key.digest)
        if key is None or tenant is None or not is_right:
            raise InvalidKey("the API key is not valid")
        if key.expires_unix_s is not None and now_unix_s >= key.expires_unix_s:
            raise InvalidKey("the API key has expired")
        return tenant
