"""Sums of arrays that are in 16 bits in the clients' memory, and on the wire."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from nearstep.coarse.service import Client
from nearstep.coarse.service.errors import RefusedError, UnlikeError
from nearstep.coarse.service.messages import Update
from nearstep.errors import ShapeError
from nearstep_sim.coarse.golden import GoldenPool
from nearstep_sim.golden.fp import narrow32, widen32
from nearstep_spec.fp import BF16, FP16

EXACT = "golden:coarse?groups=2&entry_phits=8&memory_bytes=4MiB&exact=fp16,bf16"
FORMS = {"bf16": BF16, "fp16": FP16}
KINDS = (
    ("sum", "fp32", 0),
    ("average", "fp32", 0),
    ("max", "fp32", 0),
    ("average", "bf16", 0),
    ("sum", "bf16", 1),
    ("average", "fp16", 1),
)
"""Operation, format on the links, addends."""


@pytest.mark.parametrize(
    ("clients", "devices", "options"),
    [
        (2, 2, {}),
        (4, 3, {"tcp": True}),
        (5, 2, {}),
        (2, 3, {"lends": False}),
    ],
)
def test_sums_in_16_bits_are_those_of_float32_rounded_once(
    serve, monkeypatch: pytest.MonkeyPatch, clients: int, devices: int, options: dict
) -> None:
    """`lends`: False as on devices whose memory is not this process's."""
    seed = 10_000 * clients + devices
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    if not options.pop("lends", True):
        monkeypatch.setattr(GoldenPool, "lend_patterns", lambda *_, **__: False)
    service = serve(url=f"{EXACT}&devices={devices}", **options)
    checked = 0
    for form, (operation, wire, addends) in product(FORMS, KINDS):
        elements = int(rng.integers(1100, 5000))  # in several shards
        wide = rng.standard_normal((clients, elements)).astype(np.float32)
        wide[:, :2] = 60000.0, 2.0**-25  # overflows, and is subnormal, in fp16
        wide[rng.integers(0, clients, 3), rng.integers(0, elements, 3)] = [np.nan, np.inf, -0.0]
        narrow = narrow32(wide, FORMS[form])
        given = {"fp32": widen32(narrow, FORMS[form]), form: narrow}

        def action(client: Client, given=given, operation=operation, wire=wire, addends=addends):
            found = {}
            for each, arrays in given.items():
                size = arrays.shape[1]
                exchange = client.exchange(size, operation, wire, addends=addends, form=each)
                found[each] = np.empty(size, arrays.dtype)
                for _ in range(2):
                    exchange.reduce(arrays[client.rank], found[each])
                exchange.close()
            return found

        for found in service.run(clients, action):
            assert (found[form] == narrow32(found["fp32"], FORMS[form])).all()
            checked += elements
    assert checked > 1100 * clients * len(FORMS) * len(KINDS)
    service.wait_idle()


def test_formats_that_differ_or_cannot_be_are_refused(serve) -> None:
    service = serve(url="golden:coarse?devices=2&rules=adam&memory_bytes=4MiB")

    def action(client: Client) -> np.ndarray:
        with pytest.raises(UnlikeError, match=r"clients \[1\]: .*, in bf16"):
            client.exchange(100, form="bf16" if client.rank else "fp32")
        client.keep("w/p", np.zeros(400, np.uint8))
        update = Update("w", "adam", "{}")
        with pytest.raises(RefusedError, match="format of an update must be fp32, not fp16"):
            client.exchange(100, "average", update=update, form="fp16")
        exchange = client.exchange(100, form="bf16")
        with pytest.raises(ShapeError):
            exchange.reduce(np.empty(100, np.float32), np.empty(100, np.float32))
        out = np.empty(100, np.uint16)
        exchange.reduce(np.full(100, 0x3F80, np.uint16), out)  # ones
        return out

    for each in service.run(2, action):
        assert (each == 0x4000).all()
