"""`nearstep plan`: MemFerry's plan for a profile, or for a model on a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from nearstep.cli import plan_ranks
from nearstep.cli.files import check_outputs, write_timeline
from nearstep.cli.outcome import console, print_table, reported, working
from nearstep.memferry import modelled, planner, profile, work
from nearstep.memferry.cost import Costs
from nearstep.memferry.errors import PlanError
from nearstep.memferry.plan import Plan, from_json
from nearstep.memferry.planner import Planned
from nearstep.torch.budget import budget_bytes
from nearstep.work.timeline import Timeline
from nearstep_spec.platform.load import load
from nearstep_spec.platform.models import MODELS
from nearstep_spec.platform.transformer import Transformer

SYSTEMS = ("zero-offload", "memferry")


def command(
    source: Annotated[
        str,
        typer.Argument(
            help="A model, such as bert-base, or the JSON file of a profile.", show_default=False
        ),
    ],
    platform: Annotated[str, typer.Option(help="Machine that trains the model.")] = "memferry-a100",
    gpu: Annotated[str, typer.Option(help="Processor of that machine.")] = "gpu0",
    batch: Annotated[int, typer.Option(help="Sequences or images of a pass, for a model.")] = 8,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence; 0 for images.")] = 512,
    dtype: Annotated[
        str, typer.Option(help="Format of computation: fp32, tf32, fp16 or bf16.")
    ] = "tf32",
    host_rate: Annotated[
        float, typer.Option(help="Parameters that the host updates in a second.")
    ] = 7e9,
    budget: Annotated[
        str | None,
        typer.Option(
            help="GPU memory for parameters and gradients: bytes, text as 64MiB, or a share of all "
            "layers' parameters as 25%."
        ),
    ] = None,
    reserve: Annotated[
        float, typer.Option(help="Share of gradients that may be kept in GPU memory (GO-MemFerry).")
    ] = 1.0,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep-gradients", help="Write no gradients to the host (MemFerry without GO)."
        ),
    ] = False,
    by: Annotated[str, typer.Option("--planner", help="best, greedy or exact.")] = "best",
    use: Annotated[
        Path | None, typer.Option("--plan", help="Check this plan instead, and show it.")
    ] = None,
    system: Annotated[
        str, typer.Option(help="System of the timeline: memferry or zero-offload.")
    ] = "memferry",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan as JSON.")
    ] = None,
    write_profile: Annotated[
        Path | None, typer.Option("--profile", help="Write the profile as JSON.")
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            help="Shard the model over so many GPUs instead, as FSDP2 does: numbers with commas."
        ),
    ] = None,
    state: Annotated[
        str, typer.Option(help="With --ranks: where state is kept, memory or drives.")
    ] = "memory",
    network: Annotated[
        float | None,
        typer.Option(help="With --ranks: bytes a second between machines, if they have no rate."),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Chrome trace of an iteration.")] = None,
    image: Annotated[
        Path | None, typer.Option("--picture", "-p", help="The iteration as a picture.")
    ] = None,
) -> None:
    """Plan the memory of parameters and gradients and the mode of computation, layer by layer.

    Exit status: 1 if no plan is within the limits, or --plan does not fit the profile; 2 if an
    argument is invalid.
    """
    if by not in ("best", "greedy", "exact"):
        raise typer.BadParameter(f"must be best, greedy or exact, not {by!r}")
    if system not in SYSTEMS:
        raise typer.BadParameter(f"must be {' or '.join(SYSTEMS)}, not {system!r}")
    check_outputs(
        {"--output": output, "--profile": write_profile, "--trace": trace, "--picture": image}
    )
    setup = {"batch": batch, "sequence": sequence, "dtype": dtype, "gpu": gpu}
    setup["host_params_per_s"] = host_rate
    limits = {"--budget": budget is not None, "--reserve": reserve != 1.0,
              "--keep-gradients": keep, "--planner": by != "best"}  # fmt: skip
    others = {"--plan": use is not None, "--system": system != "memferry",
              "-o": output is not None, "--profile": write_profile is not None}  # fmt: skip
    for option, alone in (("--ranks", {**limits, **others}), ("--plan", limits)):
        given = [name for name, is_given in alone.items() if is_given]
        if given and {"--ranks": ranks, "--plan": use}[option] is not None:
            raise typer.BadParameter(f"{option} does not go with {', '.join(given)}")
    if ranks is not None:
        with reported(wrong=(ValueError,)):
            counts, each = plan_ranks.parse(ranks), modelled.Setup(**setup)  # type: ignore[arg-type]
            plan_ranks.show(source, platform, each, counts, state, network, trace, image)
        return
    if state != "memory" or network is not None:
        raise typer.BadParameter("--state and --network need --ranks")
    with (
        reported(wrong=(ValueError, OSError), failed=(PlanError,)),
        working("profiling", total=2) as progress,
    ):
        found = _profile(source, platform, setup)
        progress(f"planning {len(found.layers)} layers")
        made = _plan(found, use, budget, reserve, by, keep)  # type: ignore[arg-type]
    timeline = _timeline(made, system)
    show(made, timeline, system)
    if output is not None:
        output.write_text(made.plan.to_json(made.costs), encoding="utf-8")
    if write_profile is not None:
        write_profile.write_text(found.to_json(), encoding="utf-8")
    seconds = timeline.makespan / 1e12
    write_timeline(timeline, trace, image, f"{system}, {found.description}: {seconds:.4g} s")


def _profile(source: str, platform: str, options: dict[str, object]) -> profile.Profile:
    if source.endswith(".json"):
        return profile.from_json(Path(source).read_text(encoding="utf-8"))
    model = MODELS.get(source)
    if not isinstance(model, Transformer):
        known = ", ".join(name for name, each in MODELS.items() if isinstance(each, Transformer))
        raise ValueError(f"there is no model {source!r}: {known}, or a file that ends in .json")
    if options["dtype"] not in modelled.DTYPE_BYTES:
        raise ValueError(f"dtype must be of {', '.join(modelled.DTYPE_BYTES)}")
    return modelled.profile(load(platform), model, modelled.Setup(**options))  # type: ignore[arg-type]


def _plan(
    found: profile.Profile,
    use: Path | None,
    budget: str | None,
    reserve: float,
    by: Literal["best", "greedy", "exact"],
    keep: bool,
) -> Planned:
    if use is None:
        decisions: Literal["all", "keep"] = "keep" if keep else "all"
        total = sum(layer.parameter_bytes for layer in found.layers)
        nbytes = None if budget is None else budget_bytes(budget, total)
        return planner.make(found, budget=nbytes, reserve=reserve, planner=by, decisions=decisions)
    costs = Costs(found)
    plan: Plan = from_json(use.read_text(encoding="utf-8"), costs)
    total = costs.times([*plan.layers.values()]).total
    return Planned(plan, costs, total, None, {})


def _timeline(made: Planned, system: str) -> Timeline:
    if system == "memferry":
        return work.once(made.costs, made.decisions)
    return work.once(made.costs, work.native(made.costs), "all-gradients")


def show(made: Planned, timeline: Timeline, system: str) -> None:
    """Print a plan as a table, and its times and bytes; `timeline` is an iteration of `system`."""
    out = console()
    costs, source = made.costs, made.costs.profile.source
    table = Table(
        "layer",
        "mode",
        "grads",
        title=f"{costs.profile.description} ({source})",
        caption="grads: memory of gradients; load to update: ms",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ("MB", "load", "forward", "backward", "update"):
        table.add_column(name, justify="right", no_wrap=True)
    for i, (name, each) in enumerate(made.plan.layers.items()):
        loaded = costs.load[i] if each.mode.name != "DHA" else 0
        ticks = (loaded, costs.forward[i, each.index], costs.backward[i, each.index])
        gradients = ("host" if each.write else "GPU") if costs.trained[i] else "none"
        table.add_row(
            name,
            each.mode.name,
            gradients,
            f"{costs.profile.layers[i].parameter_bytes / 1e6:.2f}",
            *(f"{int(each) / 1e9:.3f}" for each in (*ticks, costs.update[i])),
        )
    print_table(table)
    base = work.native(costs)
    native_s = work.once(costs, base, "all-gradients").makespan / 1e12
    for title, seconds, decisions in (
        ("ZeRO-Offload", native_s, base),
        ("this plan", made.total / 1e12, made.decisions),
    ):
        nbytes = costs.bytes_of(decisions)
        peak = nbytes + costs.profile.activation_bytes
        out.print(
            f"{title}: {seconds:.6f} s an iteration, {nbytes} bytes of parameters and gradients "
            f"on the GPU, {peak} with activations",
            soft_wrap=True,
        )
    if made.gap is not None:
        proof = (
            "no plan is faster"
            if made.gap == 0
            else f"no plan is faster by more than {made.gap:.2%}"
        )
        out.print(f"Within its limits and the cost model {proof}.", soft_wrap=True)
    for reading, total in made.readings.items():
        there = "no plan within the limits" if total is None else f"{total / made.total - 1:+.2%}"
        out.print(f"  Algorithm 1 ({reading}): {there}", soft_wrap=True)
    share = timeline.busy(work.GPU) / max(timeline.makespan, 1)
    out.print(f"GPU busy, {system}: {share:.1%}")
