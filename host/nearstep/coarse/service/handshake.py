"""Both ends show that they know the token, which does not cross the wire."""

from __future__ import annotations

import hmac
import secrets
from typing import Literal

import msgspec

from nearstep.coarse.service.messages import Hello

NONCE_BYTES = 32


def nonce() -> bytes:
    """What nobody has seen before."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(token: str, side: Literal["client", "service"], hello: Hello, nonce: bytes) -> bytes:
    """What only who knows the token can say.

    Parameters
    ----------
    side : who says it.
    hello : of the client, with a nonce of its own.
    nonce : of the service.
    """
    said = side.encode() + nonce + msgspec.msgpack.encode(hello)
    return hmac.digest(token.encode(), said, "sha256")
