"""The example: trains, reports, and refuses bad arguments in plain words."""

from __future__ import annotations

import gc
import importlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

from nearstep.optim import Traffic
from nearstep.storage.store import Store
from nearstep.torch.homes.opening import OpenStore
from nearstep_sim.verilate.build import BuildError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODULES = (
    "train_gpt",
    "trainer",
    "optimizers",
    "run_figures",
    "run_report",
    "stdlib_text",
    "gpt",
    "offloading",
)


@pytest.fixture
def example(monkeypatch):
    """Import a module of the examples as `python examples/...` would."""
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def train(example, tmp_path):
    """Run the example with these arguments; return click's result and the report's folder."""
    app = typer.Typer()
    app.command()(example("train_gpt").main)

    def run(*arguments):
        result = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path)])
        return result, tmp_path

    return run


KERNEL = "sim:axdimm?lanes=4&block_bytes=512&memory_bytes=4MiB"
CARD = "sim:smartssd?lanes=4&chunk_bytes=512&memory_bytes=4MiB"
"""Small, and of the shape of the driver's tests, so that each is built once."""

SHORT = ("--size", "tiny", "--batch", "2", "--context", "32")


def figures_of(report):
    return {f"{figure['section']}: {figure['name']}": figure for figure in report["figures"]}


def check_bits(report):
    """No bit differs from torch, where its fused step has the bits of the device."""
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        figures = figures_of(report)
        assert report["loss"] == report["baseline_loss"]
        for array in ("parameters", "exp_avg", "exp_avg_sq"):
            assert figures[f"bits that differ from torch: {array}"]["value"] == 0


def check_width(output):
    table = output[output.index("figure ") : output.index("report:")]
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.parametrize(
    ("device", "steps"),
    [
        ("golden:axdimm", 3),
        (KERNEL, 1),
        *(
            pytest.param(f"sim:axdimm?memory={memory}", 2, marks=pytest.mark.deep)
            for memory in (
                *("ideal", "halfduplex"),
                *("ddr4-1600&channels=2", "ddr4-1600&channels=2&ranks=2"),
            )
        ),
    ],
)
def test_it_trains_as_torch_does_and_reports(device, steps, train):
    result, folder = train("--device", device, "--steps", str(steps), *SHORT)
    assert result.exit_code == 0, result.output
    assert "bits that differ from torch" in result.output
    report = json.loads((folder / "report.json").read_text())
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")

    configuration = report["configuration"]
    assert (configuration["device"], configuration["steps"]) == (device, steps)
    assert {"size", "parameters", "batch", "context", "lr", "seed"} <= configuration.keys()
    assert {"torch", "aten_capability", "text_sha256"} <= report["environment"].keys()
    assert len(report["loss"]) == steps
    assert all(map(math.isfinite, report["loss"]))

    figures = figures_of(report)
    assert {figure["origin"] for figure in figures.values()} == {"measured", "modelled", "paper"}
    count = configuration["parameters"]
    assert figures["host link: gradients down"]["value"] == 4 * count
    assert figures["host link: parameters up"]["value"] == 4 * count
    assert figures["host link: CPU offload in fp16"]["value"] == 4 * count
    assert figures["host link: moments down and up"]["value"] == 0
    assert figures["host link: masters down, once"]["value"] == 4 * count
    for name, size in (("nearstep: g, p", 8), ("CPU offload: g, p, m, v", 28)):
        figure = figures[f"traffic on host memory bus: {name}"]
        assert (figure["value"], figure["origin"]) == (size * count, "modelled")
    check_width(result.output)
    cycles = figures["device: cycles"]["value"]
    if device.startswith("golden"):
        assert cycles is None
        assert figures["device: throughput at 200 MHz"]["value"] is None
    else:
        beats = 4 if device == KERNEL or "ideal" in device else 7
        channels = 2 if "channels=2" in device else 1
        lanes = 4 if device == KERNEL else 16
        assert cycles >= steps * beats * count / lanes / channels
        assert ("device: of DRAM peak" in figures) == ("ddr4" in device)
    check_bits(report)


@pytest.mark.parametrize(
    ("device", "steps"),
    [
        pytest.param("golden:axdimm", 1, marks=pytest.mark.deep),
        pytest.param("sim:axdimm?memory=ddr4-1600&channels=2", 1, marks=pytest.mark.deep),
    ],
)
def test_offloaded_it_trains_in_a_quarter_of_its_parameters(device, steps, train):
    options = ("--offload", "--budget", "25%", "--batch", "2", "--context", "32")
    result, folder = train("--device", device, "--steps", str(steps), *options)
    assert result.exit_code == 0, result.output
    report = json.loads((folder / "report.json").read_text())
    figures = figures_of(report)
    here = "parameters and gradients here"
    count = report["configuration"]["parameters"]
    assert figures[f"{here}: budget"]["value"] == count
    assert 0.8 * count < figures[f"{here}: at most"]["value"] <= count
    assert figures[f"{here}: parameters fetched"]["value"] > 52 * steps
    assert figures["host link: gradients down"]["value"] == 4 * count
    assert figures["host link: masters down, once"]["value"] == 4 * count
    assert 4 * count < figures["host link: parameters up"]["value"] < 12 * count
    check_width(result.output)
    check_bits(report)


@pytest.mark.parametrize(
    ("policy", "device", "steps"),
    [
        ("memferry", "golden:axdimm", 2),
        ("prefetch", "golden:axdimm", 1),
        pytest.param(
            "memferry", "sim:axdimm?memory=ddr4-1600&channels=2", 2, marks=pytest.mark.deep
        ),
    ],
)
def test_a_plan_is_printed_and_the_last_iteration_drawn(policy, device, steps, train, tmp_path):
    image = tmp_path / "pictures" / "timeline.png"
    options = ("--offload", "--policy", policy, "--budget", "60%", "--timeline", str(image))
    result, folder = train("--device", device, "--steps", str(steps), *options, *SHORT)
    assert result.exit_code == 0, result.output
    assert image.read_bytes().startswith(b"\x89PNG")
    report = json.loads((folder / "report.json").read_text())
    assert report["configuration"]["policy"] == policy
    figures = figures_of(report)
    here = "parameters and gradients here"
    budget = int(0.6 * 4 * report["configuration"]["parameters"])
    assert figures[f"{here}: budget"]["value"] == budget
    assert 0 < figures[f"{here}: at most"]["value"] <= budget
    planned = policy == "memferry"
    for text in ("blocks.0.attention.qkv", "GFGB", "ZeRO-Offload: "):
        assert (text in result.output) == planned
    check_width(result.output)
    check_bits(report)


def test_a_timeline_and_updates_in_backward_need_an_offload(train, tmp_path):
    for option, value in (("--timeline", str(tmp_path / "a.png")), ("--updates", "in-backward")):
        result, _ = train(option, value, *SHORT)
        assert result.exit_code == 2
        assert "needs --offload" in result.output
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize(
    ("device", "steps"),
    [
        ("golden:axdimm", 1),
        pytest.param("sim:axdimm?memory=ddr4-1600&channels=2", 1, marks=pytest.mark.deep),
    ],
)
def test_state_on_drives_takes_a_quarter_of_its_memory(device, steps, train, tmp_path):
    options = ("--drives", str(tmp_path), "--memory", "25%", *SHORT)
    result, folder = train("--device", device, "--steps", str(steps), *options)
    if "direct=False" in result.output:
        pytest.skip(f"there is no O_DIRECT in {tmp_path}")
    assert result.exit_code == 0, result.output
    report = json.loads((folder / "report.json").read_text())
    figures = figures_of(report)
    here = "device memory and drives"
    count = report["configuration"]["parameters"]
    assert 3.5 * count < figures[f"{here}: memory, at most"]["value"] <= 4 * count
    # parameters at first, and everything after the step
    assert figures[f"{here}: host to drives"]["value"] == 4 * count // steps + 12 * count
    assert 0 < figures[f"{here}: drives to host"]["value"] <= 8 * count
    assert report["configuration"]["memory"] == "25%"
    check_width(result.output)
    check_bits(report)


@pytest.mark.parametrize(
    ("device", "size"),
    [
        ("golden:axdimm?channels=2", "tiny"),
        pytest.param("sim:axdimm?memory=ddr4-1600&channels=2", "small", marks=pytest.mark.deep),
    ],
)
def test_drives_offload_and_updates_in_backward_train_in_one_run(device, size, train, tmp_path):
    """Table 6 of the AXDIMM paper: the whole system of its section 5."""
    picture = tmp_path / "timeline.png"
    options = ["--drives", str(tmp_path), "--memory", "50%", "--offload", "--budget", "60%"]
    options += ["--updates", "in-backward", "--timeline", str(picture), *SHORT, "--size", size]
    result, folder = train("--device", device, "--steps", "2", *options)
    if "direct=False" in result.output:
        pytest.skip(f"there is no O_DIRECT in {tmp_path}")
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads((folder / "report.json").read_text())
    figures, count = figures_of(report), report["configuration"]["parameters"]
    assert 0 < figures["device memory and drives: memory, at most"]["value"] <= 8 * count
    budget = figures["parameters and gradients here: budget"]["value"]
    assert 0 < figures["parameters and gradients here: at most"]["value"] <= budget < 3 * count
    check_bits(report)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--memory", "1KiB"), "memory must be at least"),
        (("--max-grad-norm", "1.0"), "clip_grad_norm_"),
    ],
)
def test_what_cannot_lie_on_drives_is_said(options, text, train, tmp_path):
    device = "golden:axdimm?scan=yes&gradient_scale=yes"
    result, _ = train("--device", device, "--drives", str(tmp_path), *options, *SHORT)
    if "direct=False" in result.output:
        pytest.skip(f"there is no O_DIRECT in {tmp_path}")
    assert result.exit_code == 2
    assert text in " ".join(result.output.replace("│", " ").split())
    assert not list(tmp_path.glob("*.drive"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--budget", "25%"), "at least 133120 bytes"),
        (("--budget", "much"), "budget must be bytes"),
        (("--budget", "50%", "--compression", "0.1"), "are sent whole"),
        (("--policy", "all"), "is not one of prefetch, on-demand, memferry"),
        (("--timeline", "build/a.nothing"), "for --timeline: must end in one of"),
    ],
)
def test_what_cannot_be_offloaded_is_said(options, text, train):
    result, _ = train("--device", "golden:axdimm", "--offload", *options, *SHORT)
    assert result.exit_code == 2
    assert text in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("budget", ["25%", "much"])
def test_a_refused_budget_leaves_no_drives(budget, train, tmp_path):
    new, old = tmp_path / "new" / "drives", tmp_path / "old"
    old.mkdir()
    (old / "gpt1.drive.kept").write_text("kept")
    before = sorted(tmp_path.rglob("*"))
    for folder in (new, new, old):  # the second finds what the first left
        options = ("--drives", str(folder), "--memory", "100%", "--offload", "--budget", budget)
        result, _ = train("--device", "golden:axdimm", *options, *SHORT)
        if "direct=False" in result.output:
            pytest.skip(f"there is no O_DIRECT in {tmp_path}")
        assert result.exit_code == 2
        assert "--budget" in result.output
        assert sorted(tmp_path.rglob("*")) == before


def test_drives_of_another_run_are_kept(train, tmp_path):
    drive = tmp_path / "gpt1.drive"
    drive.write_bytes(b"kept")
    result, _ = train("--device", "golden:axdimm", "--drives", str(tmp_path), *SHORT)
    assert result.exit_code == 2
    assert "--drives" in result.output
    assert sorted(tmp_path.iterdir()) == [drive]
    assert drive.read_bytes() == b"kept"


def test_only_what_was_begun_can_be_gone_on_with(train, tmp_path):
    device = f"golden:smartssd?cards=2&drive={tmp_path}"
    options = ("--device", device, "--resume", "--no-baseline", *SHORT)
    result, folder = train(*options, "--steps", "1")
    if "direct=False" in result.output:
        pytest.skip(f"there is no O_DIRECT in {tmp_path}")
    assert result.exit_code == 0, result.output
    report = json.loads((folder / "report.json").read_text())
    assert (report["first_step"], len(report["loss"]), len(report["sha256"])) == (0, 1, 64)
    for arguments, text in (
        ((*options, "--steps", "1"), "have 1 steps already"),
        ((*options, "--steps", "2"), "must hold a step of size tiny, steps 2,"),
        ((*options, "--steps", "1", "--size", "small"), "its owner must be"),
        (("--device", "golden:smartssd", "--resume", *SHORT), "state must be on drives"),
    ):
        del result  # it holds the optimizer, and that its drives
        gc.collect()
        result, _ = train(*arguments)
        assert result.exit_code == 2
        assert text in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("where", ["cards", "host"])
def test_what_was_cut_off_before_its_first_generation_is_begun_anew(
    where, train, tmp_path, monkeypatch
):
    folder = tmp_path / "drives"
    device = f"golden:smartssd?cards=2&drive={folder}" if where == "cards" else "golden:axdimm"
    options = ["--device", device, "--resume", "--no-baseline", "--steps", "1", *SHORT]
    if where == "host":
        options += ["--drives", str(folder)]

    def kill(*_, **__):
        raise SystemExit(137)

    with monkeypatch.context() as patch:  # nobody tidies up after a process that was killed
        patch.setattr(Store, "commit", kill)
        patch.setattr(OpenStore, "give_up", lambda opened: opened.store.close())
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        result, _ = train(*options)
    if "direct=False" in result.output:
        pytest.skip(f"there is no O_DIRECT in {tmp_path}")
    assert result.exit_code == 137
    left = sorted(folder.iterdir())
    assert len(left) == 2
    result, output = train(*options)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert f"no generation was completed; remove {left[0]}, {left[1]} and begin anew" in said
    report = json.loads((output / "report.json").read_text())
    assert (report["first_step"], len(report["loss"])) == (0, 1)
    assert sorted(folder.iterdir()) == left


@pytest.mark.parametrize(
    "optimizer",
    # AdamW is what every other test trains with
    ["sgd", "adagrad", *(pytest.param(name, marks=pytest.mark.deep) for name in ("adam", "adamw"))],
)
@pytest.mark.parametrize(
    ("device", "steps"),
    [
        ("golden:axdimm?rules=adam,sgd_momentum,adagrad", 2),
        pytest.param(CARD, 2, marks=pytest.mark.deep),
    ],
)
def test_every_optimizer_trains_as_torchs_does(device, steps, optimizer, train):
    options = ("--steps", str(steps), "--optimizer", optimizer, *SHORT)
    result, folder = train("--device", device, *options)
    assert result.exit_code == 0, result.output
    report = json.loads((folder / "report.json").read_text())
    assert report["configuration"]["optimizer"] == optimizer
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        differing = [
            figure["value"]
            for figure in report["figures"]
            if figure["section"] == "bits that differ from torch"
        ]
        moments = {"sgd": 1, "adagrad": 1}.get(optimizer, 2)
        assert differing == [0] * (1 + moments)


def test_an_optimizer_of_a_file_trains(train):
    lion = f"{EXAMPLES / 'lion.py'}:LION"
    device = f"golden:axdimm?engine=numpy&rules={lion}"
    options = ("--device", device, "--steps", "3", "--optimizer", lion, "--lr", "1e-3")
    result, folder = train(*options, *SHORT)
    assert result.exit_code == 0, result.output
    report = json.loads((folder / "report.json").read_text())
    assert report["configuration"]["optimizer"] == lion
    assert report["configuration"]["baseline"] is report["baseline_loss"] is None  # torch has none
    assert len(report["loss"]) == 3
    assert report["loss"][-1] < report["loss"][0]
    parameters = report["configuration"]["parameters"]
    memory = "traffic on host memory bus: CPU offload: g, p, m"
    assert figures_of(report)[memory]["value"] == 20 * parameters


@pytest.mark.parametrize("feedback", ["--error-feedback", "--no-error-feedback"])
def test_compressed_gradients_take_fewer_bytes(feedback, train):
    device = "golden:axdimm?compression=fused"
    result, folder = train(
        "--device", device, "--steps", "3", "--compression", "0.05", feedback, *SHORT
    )
    assert result.exit_code == 0, result.output
    report = json.loads((folder / "report.json").read_text())
    figures = figures_of(report)
    count = report["configuration"]["parameters"]
    sent = figures["host link: gradients down"]
    assert sent["value"] == pytest.approx(0.05 * 8 * count, rel=0.01)
    assert figures["host link: without compression"]["value"] == 4 * count
    assert figures["host link: elements sent"]["value"] == pytest.approx(5, rel=0.01)
    assert figures["host link: parameters up"]["value"] == 4 * count
    assert report["loss"][0] == report["baseline_loss"][0]
    assert report["loss"][1:] != report["baseline_loss"][1:]
    assert report["configuration"]["error_feedback"] == (feedback == "--error-feedback")
    check_width(result.output)


@pytest.mark.parametrize(
    "optimizer",
    [
        "adam",
        *(pytest.param(name, marks=pytest.mark.deep) for name in ("sgd", "adagrad", "adamw")),
    ],
)
def test_every_optimizer_trains_with_compressed_gradients_on_a_card(optimizer, train):
    """As on the device without a clock, which sends as many bytes and gets as many bits."""
    reports = []
    for device in (CARD, CARD.replace("sim", "golden")):
        options = ("--steps", "2", "--optimizer", optimizer, "--compression", "0.01", *SHORT)
        result, folder = train("--device", device, "--no-baseline", *options)
        assert result.exit_code == 0, result.output
        reports.append(json.loads((folder / "report.json").read_text()))
    ours, golden = map(figures_of, reports)
    assert reports[0]["loss"] == reports[1]["loss"]
    for name in ("gradients down", "elements sent", "parameters up"):
        assert ours[f"host link: {name}"] == golden[f"host link: {name}"]
    count = reports[0]["configuration"]["parameters"]
    assert ours["host link: gradients down"]["value"] == pytest.approx(0.01 * 8 * count, rel=0.01)
    assert ours["device: cycles"]["value"] > 0


def test_clipping_follows_torchs(train):
    device = "golden:axdimm?scan=yes&gradient_scale=yes"
    result, folder = train("--device", device, "--steps", "3", "--max-grad-norm", "0.5", *SHORT)
    assert result.exit_code == 0, result.output
    report = json.loads((folder / "report.json").read_text())
    assert report["loss"] == pytest.approx(report["baseline_loss"], rel=1e-4)
    result, folder = train("--device", "golden:axdimm", "--steps", "3", "--no-baseline", *SHORT)
    whole = json.loads((folder / "report.json").read_text())["loss"]
    assert whole != pytest.approx(report["loss"], rel=1e-4)


def test_the_default_device_has_what_the_options_need(example):
    module = example("optimizers")
    plain = module.Choice(kind=module.KINDS["adamw"], lr=1.0)
    assert plain.device == "sim:axdimm?memory=ddr4-1600&channels=2"
    full = module.Choice(kind=module.KINDS["sgd"], lr=1.0, compression=0.1, max_grad_norm=1.0)
    options = "&rules=sgd_momentum&compression=fused&scan=yes&gradient_scale=yes"
    assert full.device == plain.device + options


def test_without_a_baseline(train):
    result, folder = train("--device", "golden:axdimm", "--steps", "1", "--no-baseline", *SHORT)
    assert result.exit_code == 0, result.output
    report = json.loads((folder / "report.json").read_text())
    assert report["baseline_loss"] is None
    assert figures_of(report)["bits that differ from torch: all"]["value"] is None
    assert (folder / "loss.png").exists()


@pytest.mark.deep
def test_the_same_seed_gives_the_same_losses_and_another_seed_others(train):
    losses = []
    for seed in ("3", "3", "4"):
        result, folder = train(
            "--device", "golden:axdimm", "--steps", "1", "--no-baseline", "--seed", seed, *SHORT
        )
        assert result.exit_code == 0, result.output
        losses.append(json.loads((folder / "report.json").read_text())["loss"])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--size", "huge"), "not one of tiny, small"),
        (("--steps", "0"), "--steps"),
        (("--steps", "many"), "valid integer"),
        (("--batch", "-1"), "--batch"),
        (("--lr", "-0.5"), "--lr"),
        (("--context", "100000000"), "--context"),
        (("--seed", "99999999999999999999999"), "--seed"),
        (("--seed", "-1"), "--seed"),
        (("--device", "axdimm"), "backend:target"),
        (("--device", "warp:axdimm"), "warp"),
        (("--device", "golden:axdimm?lane=4"), "lanes"),
        (("--device", "golden:axdimm?memory_bytes=64KiB", *SHORT), "cannot allocate"),
        (("--speed", "9"), "--speed"),
        (("--optimizer", "lamb"), "not one of adamw, adam, sgd, adagrad"),
        (("--compression", "0"), "above 0 and at most 1"),
        (("--compression", "2"), "above 0 and at most 1"),
        (("--compression", "nan"), "above 0 and at most 1"),
        (("--max-grad-norm", "-1"), "--max-grad-norm"),
        (("--max-grad-norm", "nan"), "--max-grad-norm"),
        (("--max-grad-norm", "inf"), "--max-grad-norm: inf is not finite"),
        (("--device", "sim:smartssd?channels=2"), "there is no such option"),
        (("--device", "golden:smartssd?rules=adam", "--optimizer", "sgd", *SHORT), "rules="),
        (("--device", "golden:axdimm", "--optimizer", "sgd", *SHORT), "rules="),
        (("--device", "golden:axdimm", "--compression", "0.1", *SHORT), "compression=fused"),
        (("--device", "golden:axdimm", "--max-grad-norm", "1", *SHORT), "scan=yes"),
    ],
)
def test_a_bad_argument_is_refused_in_plain_words(arguments, message, train):
    result, folder = train(*arguments)
    assert result.exit_code == 2
    words = " ".join(result.output.replace("│", " ").split())
    assert message in words
    assert "Traceback" not in result.output
    assert not list(folder.iterdir())


@pytest.mark.parametrize("case", ["no folder", "a file", "a report that is a folder"])
def test_an_output_that_cannot_be_written_is_refused_before_training(
    case, example, tmp_path, monkeypatch
):
    module = example("train_gpt")
    output = {"no folder": Path("/proc/nope"), "a file": tmp_path / "file"}.get(case, tmp_path)
    if case == "a file":
        output.write_text("kept")
    elif case == "a report that is a folder":
        (output / "report.json").mkdir()
    opened = []
    monkeypatch.setattr(module.nearstep, "open", opened.append)
    app = typer.Typer()
    app.command()(module.main)
    result = CliRunner().invoke(app, ["--output", str(output), *SHORT])
    assert result.exit_code == 2
    assert "--output" in result.output
    assert not opened
    if case == "a file":
        assert output.read_text() == "kept"


@pytest.mark.parametrize(
    "error",
    [
        BuildError(["g++"], 127, "No such file or directory: 'g++'"),
        PermissionError("a tool may not be run"),
    ],
)
def test_a_device_that_cannot_be_built_is_reported_in_plain_words(
    error, example, train, monkeypatch
):
    def fail(device):
        raise error

    monkeypatch.setattr(example("train_gpt").nearstep, "open", fail)
    result, folder = train("--device", "sim:axdimm", *SHORT)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert "nearstep doctor" in result.output
    assert str(error) in result.output
    assert not list(folder.iterdir())


def test_times_of_a_step_are_medians(example):
    """The first step warms up, so a mean of a short run would be mostly that."""
    seconds = {"step_seconds": [0.9, 0.002, 0.003], "model_seconds": [0.8, 0.004, 0.004]}
    trainer = SimpleNamespace(**seconds)
    traffic = Traffic(steps=3, elements=48, run_seconds=1.0)
    rows = {row.name: row for row in example("run_figures").seconds(traffic, trainer, trainer)}
    assert rows["step, nearstep"].value == rows["step, torch"].value == pytest.approx(3.0)
    assert rows["forward and backward"].value == pytest.approx(4.0)


def test_the_text_is_the_same_each_time_and_its_parts_do_not_overlap(example):
    text = example("stdlib_text")
    first, second = text.load_text(), text.load_text()
    assert first.sha256 == second.sha256
    assert first.files > 100
    assert len(first.training) > 10 * len(first.validation) > 1000
    batches = text.Batches(first.training, batch=3, context=8, seed=1)
    tokens = batches.draw()
    assert tokens.shape == (3, 9)
    assert tokens.dtype == torch.int64


def test_every_size_of_the_model_has_tensors_of_whole_beats(example):
    gpt = example("gpt")
    for size in gpt.SIZES:
        with torch.device("meta"):
            model = gpt.Gpt(gpt.sized(size, context=128))
        assert all(p.numel() % 16 == 0 for p in model.parameters())
    with pytest.raises(ValueError, match="multiple of heads"):
        gpt.GptConfig(layers=1, heads=3, width=16, context=8)
