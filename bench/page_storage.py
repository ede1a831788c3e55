"""The section on drives."""

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


def _or_dash(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)
