"""Proof of both ends that they know the token, which is never sent."""

from __future__ import annotations

import hmac
import secrets
from typing import Literal

import msgspec

from nearstep.coarse.service.messages import Hello


def nonce() -> bytes:
    """Return random bytes that are used once."""
    return secrets.token_bytes(32)


def proof(token: str, side: Literal["client", "service"], hello: Hello, nonce: bytes) -> bytes:
    """Return the HMAC-SHA256, keyed by the token, of side, nonce and `hello`.

    Parameters
    ----------
    side : the end that proves its knowledge.
    hello : the client's first message, with its own nonce.
    nonce : the service's nonce.
    """
    said = side.encode() + nonce + msgspec.msgpack.encode(hello)
    return hmac.digest(token.encode(), said, "sha256")
