"""Proofs run wherever the cache lies."""

from pathlib import Path
from typing import Any

import pytest
from amaranth.hdl import Assert, Module, Signal
from amaranth.lib import wiring

from nearstep_sim.bench import formal
from nearstep_sim.bench.formal import ProofError, prove
from nearstep_spec.cache import cache_dir, yowasp_dir


class Limit(wiring.Component):
    """A counter that ends at 5."""

    def __init__(self, claim: int) -> None:
        self._claim = claim
        super().__init__({"i": wiring.In(1)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        count = Signal(3)
        with m.If(self.i & (count < 5)):
            m.d.sync += count.eq(count + 1)
        m.d.comb += Assert(count <= self._claim)
        return m


@pytest.mark.formal
def test_a_proof_in_a_path_with_a_space_and_a_letter_that_is_not_ascii(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YOWASP_CACHE_DIR", str(yowasp_dir()))  # 40 s to make anew
    monkeypatch.setenv("NEARSTEP_CACHE", str(tmp_path / "é è"))
    assert prove(Limit(5), "limit", "prove", depth=4).statements == 1
    with pytest.raises(ProofError, match="expected PASS, got FAIL") as caught:
        prove(Limit(4), "limit", depth=8)
    assert caught.value.trace is not None
    assert caught.value.trace.is_relative_to(cache_dir() / "formal")

    # What is known is not proven again; a design, a mode or a depth that differs is.
    ran: list[str] = []
    run = formal._run

    def counted(*given: Any) -> tuple[str, str, Path | None]:
        ran.append(given[3])
        return run(*given)

    monkeypatch.setattr(formal, "_run", counted)
    assert prove(Limit(5), "limit", "prove", depth=4).statements == 1
    with pytest.raises(ProofError, match="expected PASS, got FAIL") as again:
        prove(Limit(4), "limit", depth=8)
    assert (again.value.trace, str(again.value)) == (caught.value.trace, str(caught.value))
    assert ran == []
    assert prove(Limit(5), "limit", "bmc", depth=4).statements == 1
    assert ran == ["bmc"]
