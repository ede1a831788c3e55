"""Sections on drives and on offloaded training."""

from __future__ import annotations

from collections.abc import Callable

from page_table import Results, section, table


def storage(results: Results) -> list[str]:
    """Rates beside fio and a plain loop."""
    rows, crc = results["rows"], results["crc"]
    first = rows[0]
    lines = section(
        "Drives",
        f"Sequential reads and writes of {first['bytes'] >> 20} MiB in blocks of",
        f"{first['block'] >> 10} KiB with O_DIRECT, on one file, all in turn in one run; MB/s,",
        f"medians of {results['rounds']} rounds. `loop` is one thread, `drive` is `Drive`, `store`",
        "is `Store`, which makes and compares CRCs. Ratios are medians of those of each round.",
        f"CRC-32 of {crc['engine']}: {crc['bytes_per_s'] / 1e9:.1f} GB/s on one core.",
    )
    lines += table(
        ["", "depth", "loop", "fio", "drive", "store", "drive / fio", "store / fio"],
        (
            [
                row["action"],
                row["depth"],
                *(
                    _or_dash(row[f"{who}_bytes_per_s"], lambda rate: f"{rate / 1e6:.0f}")
                    for who in ("loop", "fio", "drive", "store")
                ),
                *(
                    _or_dash(row[name], lambda ratio: f"{ratio:.2f}")
                    for name in ("drive_over_fio", "store_over_fio")
                ),
            ]
            for row in rows
        ),
    )
    lines += [results["fio"] or "fio was not on this machine.", ""]
    return lines


def overflow(results: Results) -> list[str]:
    """A step with state on drives, beside torch's with moments on mapped files."""
    seconds, moved = results["seconds"], results["bytes_per_parameter"]
    lines = section(
        "State on drives",
        f"A step of AdamW on {results['parameters'] / 1e6:.1f} million parameters,",
        f"{results['state_bytes'] >> 20} MiB of parameters, gradients and state, in turn in one",
        f"run; seconds, medians of {results['steps']} steps, *measured* (this machine).",
        f"*Drives*: `golden:axdimm` with {results['memory'] >> 20} MiB of memory, and all state on",
        f"{results['drives']} files{' with O_DIRECT' if results['direct'] else ''}, a generation",
        f"after each step: {moved['to_drives']:.0f} bytes a parameter are written, and",
        f"{moved['from_drives']:.0f} read. *Mapped*: torch's fused step, its moments on files that",
        "are mapped into memory, where the page cache holds all of them. *msync*: the same, and",
        "these 8 bytes a parameter are flushed after each step.",
    )
    names = {"drives": "drives", "mapped": "mapped", "mapped_msync": "mapped, msync"}
    lines += table(
        ["", "s a step", "drives over it"],
        (
            [names[name], f"{took:.3f}", _times(seconds["drives"], took)]
            for name, took in seconds.items()
        ),
    )
    return lines


def cards(results: Results) -> list[str]:
    """A step with state on the drives of golden cards, beside what moves the same bytes."""
    seconds, moved = results["seconds"], results["bytes_per_parameter"]
    count = results["cards"]
    lines = section(
        "State on the drives of cards",
        f"A step of AdamW on {results['parameters'] / 1e6:.1f} million parameters whose state lies",
        f"on {count} file{'s' * (count > 1)}, in turn in one run; seconds, medians of",
        f"{results['steps']} steps, *measured* (this machine, {results['cores']} cores). *Cards*:",
        f"`golden:smartssd?cards={count}&drive=`, subgroups of {results['subgroup']} elements; for",
        f"each parameter {moved['drives_to_cards']:.0f} bytes are read and",
        f"{moved['cards_to_drives']:.0f} written, and a generation outlasts a power cut.",
        "*Storage*: `nearstep.storage` reads and writes the same bytes in the same pieces, and",
        "commits. *Mapped*: torch's fused step, its moments on mapped files that the page cache",
        "holds, flushed after each step: a third of the bytes, and no whole state after a cut.",
        "Rounds alternate in their order; the ratio is that of the two in one round, its interval",
        f"that of the median. The step has {_ratio(results['rate_of_storage_alone'])} of the rate",
        f"of storage alone. The process holds {results['memory_over_subgroup']:.2f} x D x 16",
        f"bytes beside the model, D the elements of a subgroup. {_paced(results['paced'])}".strip(),
    )
    if "deepspeed" not in seconds:
        lines += [f"Without DeepSpeed's CPU Adam on NVMe: {results['deepspeed']}.", ""]
    else:
        lines += [
            "*DeepSpeed*, by itself before the others: a model in bf16 whose fp32 parameters and",
            "moments lie on files, pipelined, and no whole state after a cut.",
            "",
        ]
    names = {"cards": "cards", "storage": "storage alone", "mapped": "mapped, flushed"}
    if "deepspeed" in seconds:
        names["deepspeed"] = f"DeepSpeed {results['deepspeed']}, ZeRO-3, NVMe, CPU Adam"
    lines += table(
        ["", "s a step", "cards over it"],
        (
            [names[name], f"{took:.3f}", _times(seconds["cards"], took)]
            for name, took in seconds.items()
        ),
    )
    return lines


def _ratio(found: Results) -> str:
    low, high = found["interval"]
    return f"{found['median']:.1%} (95 % interval {low:.1%} to {high:.1%})"


def _paced(found: Results | None) -> str:
    if found is None:
        return ""
    return (
        f"On a drive that takes one transfer after the other at {found['bytes_per_s'] / 1e9:g} "
        f"GB/s, of {found['parameters'] / 1e6:.1f} million parameters, it has "
        f"{_ratio(found['rate'])}."
    )


def offload(results: Results) -> list[str]:
    """An iteration of an offloaded stack of layers, with overlap and without."""
    lines = section(
        "Offload",
        "Backward and update of a stack of equal layers in a budget of a few of them, on",
        f"`{results['device']}`: transfers and updates in RTL cycles (*measured*), computation as",
        "long as on a V100 (*modelled*). *Ratio*: by what is busy longest at the same time; *of",
        "serial*: by what is busy longest without overlap, where no operation waits for the host's",
        "accesses to others; *gain*: by the time without overlap. Bits equal those of training",
        "that is not offloaded.",
    )
    lines += table(
        [
            *("layers", "parameters", "rows", "budget", "cycles", "busy longest"),
            *("ratio", "of serial", "gain"),
        ],
        (
            [
                row["layers"],
                row["parameters"],
                row["rows"],
                f"{row['budget'] / 4 / row['parameters']:.0%}",
                row["cycles"],
                max(row["busy"], key=row["busy"].get),
                f"{row['ratio']:.3f}",
                f"{row['ratio_of_bounds']:.3f}",
                f"{row['gain']:.2f}",
            ]
            for row in results["rows"]
        ),
    )
    return lines


def _times(drives: float, took: float) -> str:
    return "" if took == drives else f"{drives / took:.1f} times"


def _or_dash(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)
