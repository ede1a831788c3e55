"""The report of a training run: figures with unit and origin, as JSON, plot and table."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.table import Table

Origin = Literal["measured", "modelled", "paper"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number of the report; `value` is None where this run has none, `note` says why."""

    section: str
    name: str
    value: float | int | None
    unit: str
    origin: Origin
    note: str = ""

    def text(self) -> str:
        """The value for people, with its unit."""
        if self.value is None:
            return "none"
        if isinstance(self.value, int) or self.value >= 1e4:
            return f"{self.value:,.0f} {self.unit}".rstrip()
        return f"{self.value:.4g} {self.unit}".rstrip()


@dataclass(kw_only=True)
class Report:
    """Everything that a run leaves behind.

    `loss` and `baseline_loss` are training losses in nats by step, behind the first `first_step`;
    the latter is None without a baseline run. `sha256` is of all bits of parameters and state.
    """

    configuration: dict[str, Any]
    environment: dict[str, Any]
    loss: list[float]
    baseline_loss: list[float] | None
    first_step: int = 0
    sha256: str = ""
    figures: list[Figure] = field(default_factory=list)

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def table(self) -> Table:
        """Figures by section, with their origin."""
        title = f"{self.configuration['steps']} steps on {self.configuration['device']}"
        table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("figure", no_wrap=True)
        table.add_column("value", justify="right", no_wrap=True)
        table.add_column("origin")
        table.add_column("note", style="dim")
        for section, figures in itertools.groupby(self.figures, lambda figure: figure.section):
            table.add_row(f"[bold]{section}")
            for figure in figures:
                table.add_row(f"  {figure.name}", figure.text(), figure.origin, figure.note)
        return table


def plot_loss(report: Report, path: Path) -> None:
    """Draw the loss curves, and below them their difference, to `path` (PNG)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    steps = range(report.first_step + 1, report.first_step + len(report.loss) + 1)
    device = report.configuration["device"]
    baseline = report.baseline_loss
    figure, axes = plt.subplots(
        2 if baseline else 1,
        1,
        figsize=(8, 5.4 if baseline else 4.2),
        sharex=True,
        squeeze=False,
        height_ratios=[3, 1] if baseline else [1],
        layout="constrained",
    )
    curves = axes[0][0]
    if baseline:
        curves.plot(
            steps, baseline, color="#c9b28f", linewidth=5, label=report.configuration["baseline"]
        )
    curves.plot(steps, report.loss, color="#1f4e79", linewidth=1.4, label=f"nearstep on {device}")
    curves.set_ylabel("training loss, nats per byte")
    curves.legend(frameon=False)
    model = report.configuration["parameters"]
    curves.set_title(
        f"GPT of {model:,} parameters on Python's standard library", loc="left", fontsize=11
    )
    if baseline:
        difference = [a - b for a, b in zip(report.loss, baseline, strict=True)]
        lower = axes[1][0]
        lower.plot(steps, difference, color="#1f4e79", linewidth=1.2)
        if not any(difference):
            lower.set_ylim(-1e-7, 1e-7)
            lower.text(
                0.99, 0.85, "zero at every step", ha="right", va="top", transform=lower.transAxes
            )
        lower.set_ylabel("nearstep - torch")
    for (axis,) in axes:
        axis.grid(alpha=0.3, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[-1][0].set_xlabel("optimizer step")
    figure.savefig(path, dpi=150)
    plt.close(figure)
