"""Random command streams: the DDR4 model and a checker that compares all pairs agree.

The checker is written from the text of the standard alone: it keeps the whole history, looks at
every earlier command for every new one, and shares no code with the model.
"""

import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from nearstep_sim.models.dram.device import Ddr4Device
from nearstep_sim.models.dram.host import BareDram, HostConfig
from nearstep_sim.models.dram.trace import TraceCommand, read_trace
from nearstep_spec.dram.command import Command
from nearstep_spec.dram.timing import dram_timing


class Numbers(NamedTuple):
    """Clocks of a part, typed from JESD79-4."""

    rrd_s: int
    rrd_l: int
    faw: int
    rfc: int
    refi: int = 6240
    rcd: int = 11
    rp: int = 11
    ras: int = 28
    rc: int = 39
    ccd_s: int = 4
    ccd_l: int = 5
    rtp: int = 6
    rtw: int = 11 - 9 + 4 + 2  # CL - CWL + BL/2 + 2
    wtr_s: int = 9 + 4 + 2  # CWL + BL/2 + tWTR_S
    wtr_l: int = 9 + 4 + 6
    wr: int = 9 + 4 + 12
    mrd: int = 8
    mod: int = 24
    zqcs: int = 128
    zqoper: int = 512


# tRRD and tFAW by page (5, 6, 25 ns; 6, 7.5, 35 ns), tRFC by density (350, 550 ns)
PARTS = {("8Gb", "x8"): Numbers(4, 5, 20, 280), ("16Gb", "x16"): Numbers(5, 6, 28, 440)}
GROUPS = {"x8": 4, "x16": 2}
# The host's view at 2.5 ns with CL 20 and CWL 6
HOST_8GB_X8 = Numbers(
    4, 4, 20, 140, 3120, 6, 6, 14, 20, 4, 5, 4, 20 - 6 + 4 + 2, 6 + 4 + 2, 6 + 4 + 4, 6 + 4 + 6
)  # fmt: skip

READS = (Command.RD, Command.RDA)
WRITES = (Command.WR, Command.WRA)
COLUMNS = READS + WRITES
QUIET = (Command.MRS, Command.ZQCS, Command.ZQCL)


class Broken(NamedTuple):
    """A broken rule: its name, the clock of the earlier command and the clocks missing."""

    rule: str
    previous: int | None
    missing: int


def naive_check(history: list[TraceCommand], new: TraceCommand, t: Numbers) -> set[Broken]:
    """Every rule that `new` breaks after `history`, which breaks none."""
    broken: set[Broken] = set()

    def need(rule: str, old_clock: int, minimum: int, shown: int | None = None) -> None:
        if new.clock - old_clock < minimum:
            clock = old_clock if shown is None else shown
            broken.add(Broken(rule, clock, minimum - (new.clock - old_clock)))

    if history and new.clock <= history[-1].clock:
        return {Broken("one command a slot", history[-1].clock, 0)}

    # Refresh: at most eight owed at any time up to now, at most nine intervals apart.
    counted, last = 0, 0
    for refresh in [c.clock for c in history if c.command is Command.REF]:
        counted = min(counted + 1, max(refresh - 1, 0) // t.refi + 8)
        last = refresh
    if new.clock - last > 9 * t.refi:
        return {Broken("tREFI", None, 0)}
    if (new.clock - 1) // t.refi - counted > 8:
        return {Broken("postponed REF", None, 0)}

    # State: what the last command that opens or closes each bank did.
    open_banks: dict[tuple[int, int], int] = {}
    for c in history:
        bank = (c.bank_group, c.bank)
        if c.command is Command.ACT:
            open_banks[bank] = c.row
        elif c.command in (Command.PRE, Command.RDA, Command.WRA):
            open_banks.pop(bank, None)
        elif c.command is Command.PREA:
            open_banks.clear()
    bank = (new.bank_group, new.bank)
    if new.command is Command.ACT and bank in open_banks:
        return {Broken("bank open", None, 0)}
    if new.command in COLUMNS and bank not in open_banks:
        return {Broken("bank closed", None, 0)}
    if new.command in (Command.REF, *QUIET) and open_banks:
        return {Broken("bank open", None, 0)}

    activates = []
    refreshes = []
    for i, old in enumerate(history):
        same_bank = (old.bank_group, old.bank) == bank
        same_group = old.bank_group == new.bank_group
        all_banks = new.command in (Command.PREA, Command.REF, *QUIET)
        if old.command is Command.MRS:
            again = new.command is Command.MRS
            need("tMRD" if again else "tMOD", old.clock, t.mrd if again else t.mod)
        if old.command is Command.ZQCS:
            need("tZQCS", old.clock, t.zqcs)
        if old.command is Command.ZQCL:
            need("tZQoper", old.clock, t.zqoper)
        if old.command is Command.REF:
            refreshes.append(old.clock)
            if new.command not in COLUMNS:
                need("tRFC", old.clock, t.rfc)
        if old.command is Command.ACT:
            activates.append(old.clock)
            if new.command is Command.ACT:
                need(
                    "tRRD_L" if same_group else "tRRD_S",
                    old.clock,
                    t.rrd_l if same_group else t.rrd_s,
                )
                if same_bank:
                    need("tRC", old.clock, t.rc)
            if new.command in COLUMNS and same_bank:
                need("tRCD", old.clock, t.rcd)
            if new.command is Command.PREA or (new.command is Command.PRE and same_bank):
                need("tRAS", old.clock, t.ras)
        if old.command in READS:
            if new.command in READS:
                need(
                    "tCCD_L" if same_group else "tCCD_S",
                    old.clock,
                    t.ccd_l if same_group else t.ccd_s,
                )
            if new.command in WRITES:
                need("tRTW", old.clock, t.rtw)
            if new.command is Command.PREA or (new.command is Command.PRE and same_bank):
                need("tRTP", old.clock, t.rtp)
        if old.command in WRITES:
            if new.command in WRITES:
                need(
                    "tCCD_L" if same_group else "tCCD_S",
                    old.clock,
                    t.ccd_l if same_group else t.ccd_s,
                )
            if new.command in READS:
                wtr = t.wtr_l if same_group else t.wtr_s
                need("tWTR_L" if same_group else "tWTR_S", old.clock, wtr)
            if new.command is Command.PREA or (new.command is Command.PRE and same_bank):
                need("tWR", old.clock, t.wr)
        if new.command in (Command.ACT, Command.REF, *QUIET):
            if old.command is Command.PREA or (
                old.command is Command.PRE and (same_bank or all_banks)
            ):
                need("tRP", old.clock, t.rp)
            if old.command in (Command.RDA, Command.WRA) and (same_bank or all_banks):
                opened = max(
                    c.clock
                    for c in history[:i]
                    if c.command is Command.ACT
                    and (c.bank_group, c.bank) == (old.bank_group, old.bank)
                )
                wait = t.rtp if old.command is Command.RDA else t.wr
                need("tRP", max(opened + t.ras, old.clock + wait), t.rp, old.clock)
    if new.command is Command.ACT and len(activates) >= 4:
        need("tFAW", activates[-4], t.faw)
    if new.command is Command.REF and len(refreshes) >= 16 and not broken:
        need("16 REF in 2 tREFI", refreshes[-16], 2 * t.refi)
    return broken


GAPS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15, 19, 20, 24, 25, 28, 36, 39, 48, 128, 280, 440, 512)
C = Command
MIXES = (
    [C.ACT] * 6 + [C.RD, C.WR] * 6 + [C.PRE] * 4 + [C.RDA, C.WRA, C.PREA, C.REF],
    [C.ACT] * 12 + [C.PRE, C.RDA, C.WRA],  # rows
    [C.ACT] * 2 + [C.RD, C.WR] * 10 + [C.PRE],  # columns
    [C.REF] * 6 + [C.ACT, C.PRE, C.PREA, C.RDA],  # refresh
    [C.MRS] * 4 + [C.ZQCS, C.ZQCL, C.REF, C.ACT, C.PRE, C.PREA],  # nothing may follow for a while
)


def random_trace(
    rng: random.Random, part: tuple[str, str], length: int, legal: float
) -> tuple[list[TraceCommand], set[Broken]]:
    """A trace that breaks a rule with its last command, or none at all.

    A command that would break a rule is mostly (`legal`) thrown away, so that traces grow long.
    """
    groups, t = GROUPS[part[1]], PARTS[part]
    mix = rng.choice(MIXES)
    gaps = rng.choice((GAPS, GAPS[:8], GAPS[:12], GAPS[3:6]))
    history: list[TraceCommand] = []
    clock = rng.randrange(1, 100)
    banks = [(rng.randrange(groups), rng.randrange(4)) for _ in range(rng.randint(1, 12))]
    tries = 0
    while len(history) < length and tries < 40 * length:
        tries += 1
        command = rng.choice(mix)
        gap = rng.choice(gaps) if rng.random() < 0.995 else rng.randrange(1, 10 * t.refi)
        group, bank = rng.choice(banks)
        if command is Command.MRS:  # MR7 is not the DRAM's
            new = TraceCommand(clock + gap, command, 0, 1, 3, rng.randrange(1 << 14))
        elif command in (Command.PREA, Command.REF, *QUIET):
            new = TraceCommand(clock + gap, command)
        else:
            row = rng.randrange(4) if command is Command.ACT else -1
            column = 8 * rng.randrange(128) if command in COLUMNS else 0
            new = TraceCommand(clock + gap, command, 0, group, bank, row, column)
        broken = naive_check(history, new, t)
        if broken and rng.random() < legal:
            if rng.random() < 0.3:
                clock += 1
            continue
        history.append(new)
        clock = new.clock
        if broken:
            return history, broken
    return history, set()


@pytest.mark.parametrize("part", PARTS, ids=" ".join)
@pytest.mark.parametrize("legal", [0.3, 0.9, 0.99, pytest.param(0.999, marks=pytest.mark.deep)])
def test_model_and_naive_checker_agree_on_random_traces(
    part: tuple[str, str], legal: float
) -> None:
    seed = 20_240_307
    print("seed", seed)
    rng = random.Random(f"{seed} {part} {legal}")
    compared = 0
    seen: set[str] = set()
    for _ in range(40 if legal > 0.9 else 150):
        trace, broken = random_trace(rng, part, 90, legal)
        device = Ddr4Device(dram_timing("DDR4-1600", *part))
        device.play(trace[:-1] if broken else trace)
        assert device.violation is None, trace
        compared += len(trace)
        if not broken:
            continue
        last = trace[-1]
        coordinates = {
            "bank_group": last.bank_group,
            "bank": last.bank,
            "row": max(last.row, 0),
            "column": last.column,
        }
        with pytest.raises(RuntimeError):
            device.issue(last.clock, last.command, **coordinates)
        found = device.violation
        assert found is not None
        worst = max(each.missing for each in broken)
        candidates = {each for each in broken if each.missing == worst}
        assert found.rule in {each.rule for each in candidates}, (trace, broken, str(found))
        if worst:
            previous = found.previous.clock if found.previous else None
            assert (found.rule, previous) in {(c.rule, c.previous) for c in candidates}, trace
        seen.add(found.rule)
    print(compared, "commands,", len(seen), "rules broken:", sorted(seen))
    assert compared > 200
    assert len(seen) >= 4


RULES = {
    *("tRCD", "tRP", "tRAS", "tRC", "tCCD_S", "tCCD_L", "tRRD_S", "tRRD_L", "tFAW", "tRTW"),
    *("tWR", "tWTR_S", "tWTR_L", "tRTP", "tRFC", "tREFI", "bank open", "bank closed"),
    *("tMRD", "tMOD", "tZQCS", "tZQoper", "postponed REF"),
}


@pytest.mark.deep
def test_random_traces_reach_every_rule() -> None:
    seed = 99
    print("seed", seed)
    rng = random.Random(seed)
    seen: set[str] = set()
    commands = 0
    for part in PARTS:
        for _ in range(2500):
            trace, broken = random_trace(rng, part, 60, rng.choice([0.5, 0.9, 0.99]))
            device = Ddr4Device(dram_timing("DDR4-1600", *part))
            try:
                device.play(trace)
            except RuntimeError:
                assert device.violation is not None
            commands += len(trace)
            found = device.violation
            assert (found is None) == (not broken), trace
            if found is not None:
                worst = max(each.missing for each in broken)
                assert found.rule in {e.rule for e in broken if e.missing == worst}, trace
                seen.add(found.rule)
    print(commands, "commands; rules broken:", sorted(seen))
    assert seen >= RULES


def test_a_host_s_traffic_passes_the_naive_checker(tmp_path: Path) -> None:
    seed = 31
    print("seed", seed)
    rng = np.random.default_rng(seed)
    checked = 0
    for scheduler in ("in-order", "fr-fcfs"):
        bare = BareDram(HostConfig(scheduler=scheduler, seed=seed, stall=0.05))
        path = tmp_path / f"{scheduler}.txt"
        bare.devices[0].trace_to(path)
        n = 250
        addresses = rng.choice(
            [0, 64, 1024, 1 << 17, 1 << 20, 192, 5 << 17], n
        ) + 256 * rng.integers(0, 40, n)
        bare.host.submit(rng.random(n) < 0.5, addresses, data=np.zeros((n, 64), np.uint8))
        bare.run(10**5)
        bare.run(4000, until_idle=False)
        bare.devices[0].trace_close()
        history: list[TraceCommand] = []
        for command in read_trace(path):
            broken = naive_check(history, command, HOST_8GB_X8)
            assert not broken, (command, broken)
            history.append(command)
        assert {c.command for c in history} >= {C.ACT, C.RD, C.WR, C.PRE, C.PREA, C.REF}
        checked += len(history)
    print(checked, "commands")
    assert checked > 700
