"""Loss after training with gradients of which shares are kept, with error feedback or without."""

import itertools
from dataclasses import dataclass
from typing import Annotated, Any

from harness import Results, option, plot, report, script
from training import Text, summary, train, trained

import nearstep

DEVICE = "golden:axdimm?compression=fused&rules=adam,sgd"
SHARES = (0.005, 0.01, 0.025, 0.05)
OPTIMIZERS: dict[str, dict[str, float]] = {
    "AdamW": {"lr": 2e-3, "weight_decay": 0.1},
    "SGD": {"lr": 0.1, "weight_decay": 0.0},
}
LAST_STEPS = 20


@dataclass(frozen=True)
class Case:
    """What is trained with. A share of None is whole gradients."""

    optimizer: str
    share: float | None = None
    error_feedback: bool = False


CASES = [
    Case(optimizer, share, feedback)
    for optimizer in OPTIMIZERS
    for share, feedback in [(None, False), *itertools.product(SHARES, (True, False))]
]


def row(case: Case, text: Text, device: nearstep.Device, steps: int, seeds: int) -> Results:
    hyper = dict(OPTIMIZERS[case.optimizer])
    decay = hyper.pop("weight_decay")
    hyper |= {"compression": case.share, "error_feedback": case.error_feedback}

    def made(model: Any) -> Any:
        kind = getattr(nearstep.optim, case.optimizer)
        return kind(model.decay_groups(decay), device=device, **hyper)

    runs = []
    for seed in range(1, seeds + 1):
        found, optimizer = train(made, text, steps=steps, seed=seed, last=LAST_STEPS)
        traffic = optimizer.traffic
        sent = traffic.gradients_down / traffic.steps
        runs.append({**found, "gradient_bytes_per_step": sent})
    return {**vars(case), "gradient_bytes_per_step": sent, **summary(runs)}


def draw(rows: list[Results]) -> None:
    options = {"figsize": (8, 3.8), "sharey": True, "dpi": 150}
    with plot("compression.png", 1, len(OPTIMIZERS), **options) as (_, axes):
        for axis, optimizer in zip(axes, OPTIMIZERS, strict=True):
            whole, *mine = [row for row in rows if row["optimizer"] == optimizer]
            axis.axhline(whole["validation_loss"], color="#888888", label="whole gradients")
            for fed, style in ((True, "o-"), (False, "s--")):
                line = [row for row in mine if row["error_feedback"] == fed]
                values = [[run["validation_loss"] for run in row["runs"]] for row in line]
                means = [row["validation_loss"] for row in line]
                below = [m - min(v) for m, v in zip(means, values, strict=True)]
                above = [max(v) - m for m, v in zip(means, values, strict=True)]
                name = f"{'with' if fed else 'without'} error feedback"
                axis.errorbar([100 * row["share"] for row in line], means, yerr=[below, above],
                              fmt=style, capsize=3, label=name)  # fmt: skip
            axis.set_xscale("log")
            axis.set_xticks([100 * share for share in SHARES], [f"{100 * s:g}" for s in SHARES])
            axis.minorticks_off()
            axis.set_xlabel("elements kept, %")
            axis.set_title(optimizer, loc="left", fontsize=11)
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("validation loss, nats per byte")
        axes[-1].legend(frameon=False)


@script
def main(
    steps: Annotated[int, option("Steps of each training run.", min=1)] = 300,
    seeds: Annotated[int, option("Runs of each case.", min=1)] = 3,
) -> None:
    """Train, print, and write build/bench/compression.json and compression.png."""
    with nearstep.open(DEVICE) as device:
        found = trained(
            CASES, lambda case, text: row(case, text, device, steps, seeds), steps, seeds
        )
    for each in found["rows"]:
        whole = next(r for r in found["rows"] if r["optimizer"] == each["optimizer"])
        sent = "gradient_bytes_per_step"
        share, fed = each["share"], "yes" if each["error_feedback"] else "no"
        each["kept"] = "all" if share is None else f"{100 * share:g} %"
        each["fed"] = "" if share is None else fed
        each["of_whole"] = each[sent] / whole[sent]
        each["above_whole"] = each["validation_loss"] - whole["validation_loss"]
    draw(found["rows"])
    report("compression", device=DEVICE, optimizers=OPTIMIZERS, **found)
