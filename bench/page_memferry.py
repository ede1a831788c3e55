"""The section on MemFerry's planner."""

from __future__ import annotations

from collections.abc import Sequence

from page_table import Results, section, table


def memferry(results: Results) -> list[str]:
    """Planning times, greedy plans beside exact ones, and section V of the paper."""
    speed = results["speed"]
    greedy, processor = speed["greedy_s"].values(), speed["greedy_processor_s"].values()
    lines = section(
        "MemFerry's planner",
        f"Plans of random profiles, *measured*; the bench took {results['seconds']:.0f} s.",
        f"Algorithm 1 for {speed['greedy_layers']:,} layers takes {min(greedy):.2f} to",
        f"{max(greedy):.2f} s by reading, of which the processor worked {min(processor):.2f} to",
        f"{max(processor):.2f} s. The exact planner for {speed['exact_layers']} layers,",
        "where *gap* is what no plan can save beyond; processor seconds do not count what else",
        "the machine does:",
    )
    lines += table(
        ["limits", "profiles", "proven", "seconds, median", "most", "processor seconds, median",
         "most", "gap, mean", "most"],
        (
            [
                name,
                each["profiles"],
                each["proven"],
                *(f"{each['seconds'][key]:.2f}" for key in ("median", "most")),
                *(f"{each['processor_seconds'][key]:.2f}" for key in ("median", "most")),
                *(f"{each['gap_percent'][key]:.4f} %" for key in ("mean", "most")),
            ]
            for name, each in speed["exact"].items()
        ),
    )  # fmt: skip
    return lines + _greedy(results["random"], results["models"]) + _paper(results["paper"])


def _greedy(found: Results, models: Results) -> list[str]:
    low, high = found["layers"]
    lines = [
        "### Greedy beside exact",
        "",
        "How much longer an iteration takes by Algorithm 1, by reading, than by the best plan",
        f"known: {found['profiles']:,} random profiles of {low} to {high} layers,",
        f"{found['proven']:,} of them with a proven optimum, and the models of figure 9",
        "(modelled).",
        "",
    ]
    names = [name if each["proven"] else f"{name}, not proven" for name, each in models.items()]
    return lines + table(
        ["criterion, gain, base", "random, mean", "random, most", *names],
        (
            [
                reading,
                f"{each['mean']:.2f} %",
                f"{each['most']:.2f} %",
                *(f"{model['greedy_percent'][reading]:.2f} %" for model in models.values()),
            ]
            for reading, each in found["greedy_percent"].items()
        ),
    )


def _paper(found: Results) -> list[str]:
    rows: Sequence[Results] = found["rows"]
    lines = [
        "### Section V",
        "",
        "*Paper* beside *modelled*; no constant is fitted ([what is assumed](memferry.md)). Errors",
        "of percentages are differences in points.",
        "",
    ]
    lines += table(
        ["figure", "where", "paper", "modelled", "error"],
        (
            [
                row["name"],
                row["section"],
                *(f"{row[key]:.{_digits(row)}f} {row['unit']}" for key in ("paper", "modelled")),
                f"{row['error']:+.1f} points" if row["unit"] == "%" else f"{row['error']:+.1%}",
            ]
            for row in rows
        ),
    )
    memory = [row for row in rows if row["name"].startswith("Memory")]
    lines += ["What decides the rows of memory, % beside DeepSpeed:", ""]
    lines += table(
        [
            "assumption",
            *(f"{row['name'].removeprefix('Memory: ')}, {row['section']}" for row in memory),
        ],
        [
            ["*paper*", *(f"{row['paper']:.1f}" for row in memory)],
            *(
                [variant, *(f"{value:.1f}" for value in values)]
                for variant, values in found["memory"].items()
            ),
        ],
    )
    lines += ["Printed, and not modelled:", ""]
    lines += [f"- {name}: {reason}." for name, reason in found["not_modelled"].items()]
    return [*lines, ""]


def _digits(row: Results) -> int:
    return 1 if row["unit"] == "%" else 2
