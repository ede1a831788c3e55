"""Figures 9 and 11(a) of the Smart-Infinity paper, as modelled."""

from __future__ import annotations

from pathlib import Path

from nearstep.paper.smart_infinity import Evaluation, gpt2
from nearstep.paper.smart_infinity_case import DRIVES, METHODS, Method

PHASES = ("forward", "backward", "update")
TITLES = ("forward", "backward, gradients to drives", "update, states to and from drives")
BARS = (6, 10)
LINES: tuple[Method, ...] = ("base", "su+o", "su+o+c")
GPUS = ("a5000", "a100")


def draw(evaluation: Evaluation, path: Path) -> None:
    """Draw parts of an iteration by method, and speedup over the number of drives.

    Parameters
    ----------
    path : of any kind that matplotlib writes.
    """
    from matplotlib.figure import Figure  # in the extra `torch`, which the rows do not need

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    large, names = gpt2(8.4), [f"{method.upper()}\n{n} SSDs" for n in BARS for method in METHODS]
    found = [evaluation.phases(large, method, n) for n in BARS for method in METHODS]
    bottom = [0.0] * len(found)
    for phase, title in zip(PHASES, TITLES, strict=True):
        heights = [getattr(each, phase) for each in found]
        left.bar(range(len(found)), heights, bottom=bottom, label=title)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    base = [found[i - i % len(METHODS)].total for i in range(len(found))]
    for place, (top, whole) in enumerate(zip(bottom, base, strict=True)):
        left.annotate(f"{whole / top:.2f}x", (place, top), ha="center", va="bottom", fontsize=8)
    left.set_xticks(range(len(found)), names, fontsize=7)
    left.set(ylabel="seconds, modelled", title="GPT-2 8.4B on an A5000, as figure 9")
    left.set_ylim(0, 1.25 * max(bottom))
    left.legend(fontsize=8, loc="upper center", ncols=len(TITLES), columnspacing=1.0)
    drives = range(1, DRIVES + 1)
    for gpu, style in zip(GPUS, ("o-", "s--"), strict=True):
        one = evaluation.phases(gpt2(4.0), "base", 1, gpus=(gpu,)).total
        for number, method in enumerate(LINES):
            seconds = [evaluation.phases(gpt2(4.0), method, n, gpus=(gpu,)).total for n in drives]
            label = f"{method.upper()}, {gpu.upper()}"
            rates = [one / each for each in seconds]
            right.plot(drives, rates, style, color=f"C{number}", label=label, markersize=4)
    right.set(
        xlabel="SSDs or CSDs",
        ylabel="speed over BASE with one SSD, modelled",
        title="GPT-2 4.0B, as figure 11(a)",
        ylim=(0, None),
    )
    right.set_xticks([*drives])
    right.grid(alpha=0.3)
    right.legend(fontsize=8)
    figure.savefig(path)
