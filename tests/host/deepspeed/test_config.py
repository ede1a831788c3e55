"""Configurations in DeepSpeed's spelling: every key is used, ignored for a reason, or refused."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nearstep.deepspeed.config import LossScaling, check, load
from nearstep.deepspeed.errors import (
    AutoValueError,
    ConfigError,
    RepeatedKeyError,
    UnknownKeyError,
    UnsupportedKeyError,
)
from nearstep.deepspeed.keys import PARAMS, TOP, Key, Keys

ADAM: dict[str, Any] = {
    "lr": 1e-3,
    "betas": [0.8, 0.999],
    "eps": 1e-8,
    "weight_decay": 3e-7,
    "amsgrad": False,
    "maximize": False,
    "bias_correction": True,
    "torch_adam": False,
    "fused": None,
    "foreach": None,
    "fp32_optimizer_states": True,
    "adam_w_mode": True,
}
FULL: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "managed_gradient_accumulation": True,
    "optimizer": {"type": "Adam", "params": ADAM},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "buffer_count": 4,
            "pin_memory": True,
            "pipeline_read": False,
            "pipeline_write": False,
            "fast_init": False,
            "ratio": 1.0,
        },
        "offload_param": {
            "device": "none",
            "nvme_path": None,
            "buffer_count": 5,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
            "pin_memory": True,
        },
        "sub_group_size": 1e9,
        "cpu_offload": False,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "compute_grad_norm": True,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 500000000,
        "contiguous_gradients": True,
        "load_from_fp32_weights": True,
        "round_robin_gradients": False,
        "parameter_alignment": False,
        "elastic_checkpoint": False,
        "ignore_unused_parameters": True,
        "log_trace_cache_warnings": False,
        "save_muon_momentum_buffer_in_memory": False,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_prefetch_bucket_size": 5e8,
        "stage3_param_persistence_threshold": 1e5,
        "stage3_module_granularity_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_gather_fp16_weights_on_model_save": True,
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "zero_quantized_gradients": False,
    },
    "fp16": {
        "enabled": True,
        "auto_cast": False,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 500,
        "hysteresis": 3,
        "consecutive_hysteresis": True,
        "min_loss_scale": 2,
        "fp16_master_weights_and_grads": False,
    },
    "bf16": {
        "enabled": False,
        "bf16_master_weights_and_grads": False,
        "bf16_optimizer_states": False,
        "immediate_grad_update": True,
    },
    "gradient_clipping": 1.0,
    "communication_data_type": "fp16",
    "data_types": {"grad_accum_dtype": None},
    "gradient_allreduce_op": "mean",
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "sparse_gradients": False,
    "disable_allgather": False,
    "activation_checkpointing": {
        "partition_activations": False,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": False,
        "number_checkpoints": None,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
    },
    "aio": {
        "block_size": 1048576,
        "queue_depth": 8,
        "thread_count": 1,
        "intra_op_parallelism": 1,
        "single_submit": False,
        "overlap_events": True,
        "use_gds": False,
    },
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
    "memory_breakdown": False,
    "dump_state": False,
    "disable_python_gc": False,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "comms_logger": {"enabled": True},
    "flops_profiler": {"enabled": True, "profile_step": 1},
    "wandb": {"enabled": False, "project": "x"},
    "checkpoint": {"tag_validation": "Warn"},
    **{
        name: {"enabled": False}
        for name in (
            *("tensorboard", "csv_monitor", "comet", "amp", "torch_autocast", "autotuning"),
            *("elasticity", "curriculum_learning", "data_efficiency", "hybrid_engine"),
            "expert_parallel",
        )
    },
}
"""Every key that is not always refused, with a value that is taken."""

LEAST = {"optimizer": {"type": "AdamW"}}
TABLES_OF_OTHERS = {name for name, each in TOP.items() if isinstance(each, Key)}


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Paths of values, as the report has them."""
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in TABLES_OF_OTHERS:
            yield from leaves(value, f"{key}.")
        else:
            yield key


def tables(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Paths of tables with keys that are looked at."""
    yield prefix
    for name, value in table.items():
        key = f"{prefix}.{name}".strip(".")
        if isinstance(value, Mapping) and key not in TABLES_OF_OTHERS:
            yield from tables(value, key)


def at(table: dict[str, Any], path: str) -> dict[str, Any]:
    for name in filter(None, path.split(".")):
        table = table[name]
    return table


def changed(key: str, value: Any, base: Mapping[str, Any] = FULL) -> dict[str, Any]:
    table = copy.deepcopy(dict(base))
    path, _, name = key.rpartition(".")
    at(table, path)[name] = value
    return table


def known(table: Keys, prefix: str = "") -> Iterator[tuple[str, Key]]:
    for name, each in table.items():
        if isinstance(each, Key):
            yield f"{prefix}{name}", each
        else:
            yield from known(each, f"{prefix}{name}.")


LEAVES, TABLES = list(leaves(FULL)), list(tables(FULL))


def test_every_key_of_the_table_is_among_the_examples() -> None:
    every = {*known(TOP), *known(PARAMS["Adam"], "optimizer.params.")}
    assert {key for key, each in every if each.fate != "refused"} | {"optimizer.type"} == set(
        LEAVES
    )
    assert len(LEAVES) > 100


def test_each_key_is_in_the_report_with_its_fate() -> None:
    found = load(FULL)
    assert [row.key for row in found.rows] == LEAVES
    assert {row.fate for row in found.rows} == {"used", "ignored"}
    assert all(row.text for row in found.rows)
    assert json.loads(json.dumps([vars(row) for row in found.rows]))[0]["value"] == 32


def test_what_a_configuration_asks_for() -> None:
    found = load(FULL)
    assert found.optimizer == "AdamW"
    used = ("lr", "eps", "weight_decay", "amsgrad", "maximize")
    assert found.hyper == {"betas": (0.8, 0.999)} | {name: ADAM[name] for name in used}
    assert (found.format, found.gradient_clipping) == ("fp16", 1.0)
    assert found.loss_scaling == LossScaling(
        scale=65536.0, dynamic=True, window=500, hysteresis=3, consecutive=True, least=2.0
    )
    assert found.nvme is not None
    assert (found.nvme.path, found.nvme.buffers) == (Path("/local_nvme"), 4)
    assert (found.nvme.elements, found.nvme.stated) == (10**9, True)
    least = load(LEAST)
    assert (least.format, least.gradient_clipping, least.nvme) == ("fp32", None, None)
    assert (least.loss_scaling, least.gradient_accumulation_steps) == (None, 1)
    static = load(changed("fp16.loss_scale", 128)).loss_scaling
    assert static is not None
    assert (static.scale, static.dynamic) == (128.0, False)
    assert load(changed("gradient_clipping", 0)).gradient_clipping is None


@pytest.mark.parametrize(
    ("kind", "params", "optimizer", "hyper"),
    [
        ("Adam", {}, "AdamW", {"weight_decay": 0.0}),
        ("adam", {"lr": 1}, "AdamW", {"lr": 1.0, "weight_decay": 0.0}),
        ("Adam", {"adam_w_mode": False, "weight_decay": 1}, "Adam", {"weight_decay": 1.0}),
        ("Adam", {"adam_w_mode": False}, "Adam", {}),
        ("AdamW", {"torch_adam": True}, "AdamW", {}),
        ("Adam", {"torch_adam": True}, "AdamW", {}),
        ("AdamW", {"amsgrad": True}, "AdamW", {"amsgrad": True, "weight_decay": 0.0}),
        ("SGD", {"momentum": 0.9, "nesterov": True}, "SGD", {"momentum": 0.9, "nesterov": True}),
        ("Adagrad", {"eps": 0}, "Adagrad", {"eps": 0.0}),
    ],
)
def test_which_optimizer_a_type_is(
    kind: str, params: dict[str, Any], optimizer: str, hyper: dict[str, Any]
) -> None:
    found = load({"optimizer": {"type": kind, "params": params}})
    assert (found.optimizer, found.hyper) == (optimizer, hyper)


def misspelt(name: str, draw: st.DrawFn) -> str:
    """A name with a character left out, doubled or replaced."""
    where = draw(st.integers(0, len(name) - 1))
    other = draw(st.sampled_from(["", 2 * name[where], "q", "_"]))
    return name[:where] + other + name[where + 1 :]


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_unknown_key_is_refused_by_name_with_the_nearest(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(TABLES))
    own = at(copy.deepcopy(FULL), path)
    intended = data.draw(st.sampled_from(sorted(name for name in own if len(name) > 3)))
    name = misspelt(intended, data.draw)
    assume(name not in {*own, *TOP})
    key = f"{path}.{name}".strip(".")
    with pytest.raises(UnknownKeyError) as caught:
        load(changed(key, 1))
    assert caught.value.key == key
    assert caught.value.actual == name
    assert intended in caught.value.near
    assert intended in str(caught.value)


def mistyped(good: object) -> list[Any]:
    """Values of other types than a good one, or that no key takes."""
    never = [math.nan, math.inf, -math.inf, -1, -0.5, 10**400, {"a": [math.nan]}, [[1]], "\0"]
    if isinstance(good, bool):
        return [*never, 0, 1, "true", "false", [], {}]
    if isinstance(good, int | float):
        return [*never, True, False, "1", "", [1], {}, None]
    if isinstance(good, str):
        return [*never, True, 3, [good], {}, ""]
    if isinstance(good, list):
        return [*never, True, 0.5, [], [0.5], [0.5] * 3, [True, 0.5], [0.5, "0.9"], "0.9", None]
    if good is None:
        return [*never, {}]
    return [*never, True, 3, "enabled", [], None]


@settings(max_examples=250, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_mistyped_value_is_refused_by_its_key(data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(LEAVES))
    path, _, name = key.rpartition(".")
    value = data.draw(st.sampled_from(mistyped(at(FULL, path)[name])))
    with pytest.raises(ConfigError) as caught:
        load(changed(key, value))
    assert caught.value.key == key or caught.value.key.startswith((f"{key}[", f"{key}."))
    assert caught.value.key in str(caught.value)
    assert caught.value.expected
    assert not isinstance(caught.value, UnknownKeyError)


@pytest.mark.parametrize("path", [each for each in TABLES if each])
def test_what_is_no_table_is_refused(path: str) -> None:
    for value in (True, 3, "x", [], None):
        with pytest.raises(ConfigError, match="a table") as caught:
            load(changed(path, value))
        assert caught.value.key == path


def test_what_is_not_supported_is_refused_with_the_reason() -> None:
    others: dict[str, Any] = {
        "managed_gradient_accumulation": False,
        "optimizer.params.bias_correction": False,
        "optimizer.params.fp32_optimizer_states": False,
        "zero_optimization.offload_optimizer.ratio": 0.3,
        "zero_optimization.offload_param.device": "cpu",
        "zero_optimization.zero_quantized_weights": True,
        "zero_optimization.zero_quantized_gradients": True,
        "fp16.auto_cast": True,
        "fp16.fp16_master_weights_and_grads": True,
        "bf16.bf16_master_weights_and_grads": True,
        "bf16.bf16_optimizer_states": True,
        "gradient_allreduce_op": "sum",
        "prescale_gradients": True,
        "gradient_predivide_factor": 2,
        "sparse_gradients": True,
    }
    every = dict([*known(TOP), *known(PARAMS["Adam"], "optimizer.params.")])
    assert set(others) == {key for key, each in every.items() if each.fate == "only"} - {
        "optimizer.params.adam_w_mode"
    }
    for key, each in every.items():
        if each.fate == "off":
            for value in ({"enabled": True}, {}):
                with pytest.raises(UnsupportedKeyError) as caught:
                    load(changed(key, value))
                assert (caught.value.key, caught.value.reason) == (f"{key}.enabled", each.text)
        elif each.fate == "refused":
            others[key] = {"type": "x"}
    for key, value in others.items():
        with pytest.raises(UnsupportedKeyError) as caught:
            load(changed(key, value))
        assert (caught.value.key, caught.value.reason) == (key, every[key].text)
        assert caught.value.reason in str(caught.value)
    assert len(others) >= 19


def fp16(**more: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, **more}}


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def zero(device: str = "nvme", path: str | None = "/x", **more: Any) -> dict[str, Any]:
    offload = {"device": device} | ({} if path is None else {"nvme_path": path})
    return {"zero_optimization": {**more, "offload_optimizer": offload}}


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"optimizer": None}, "optimizer", "a table"),
        ({"optimizer": {}}, "optimizer.type", "must be given, not missing"),
        (optimizer("Lamb"), "optimizer.type", "Adam, AdamW, SGD, Adagrad, not 'Lamb'"),
        (optimizer("SGD", betas=[0, 0]), "optimizer.params.betas", "dampening"),
        (optimizer("AdamW", adam_w_mode=False), "optimizer.params.adam_w_mode", "decouples"),
        ({**fp16(), "bf16": {"enabled": True}}, "bf16.enabled", "false where"),
        ({"communication_data_type": "fp16"}, "communication_data_type", "fp32"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype", "fp32"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "from 0 to 3"),
        (zero("cpu", None), "zero_optimization.stage", "1, 2 or 3 with"),
        (zero(stage=2), "zero_optimization.stage", "3 with"),
        (
            zero(path=None, stage=3),
            "zero_optimization.offload_optimizer.nvme_path",
            "given with",
        ),
        (
            zero(stage=3, sub_group_size=0),
            "zero_optimization.sub_group_size",
            "at least 1",
        ),
        (fp16(initial_scale_power=128), "fp16.initial_scale_power", "127"),
        (fp16(min_loss_scale=0), "fp16.min_loss_scale", "above 0"),
        (
            fp16(initial_scale_power=3, min_loss_scale=9),
            "fp16.min_loss_scale",
            "at most 2 to 3",
        ),
    ],
)
def test_keys_that_contradict_each_other(changes: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load({**LEAST, **changes})
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("whole", "micro", "steps", "world", "expected"),
    [
        (None, None, None, 1, (None, None, 1)),
        (32, None, None, 1, (32, 32, 1)),
        (32, None, None, 4, (32, 8, 1)),
        (32, 4, None, 2, (32, 4, 4)),
        (32, None, 8, 2, (32, 2, 8)),
        (None, 4, 8, 2, (64, 4, 8)),
        (None, None, 8, 2, (None, None, 8)),
        (64, 4, 8, 2, (64, 4, 8)),
        (63, 4, 8, 2, None),
        (128, 4, 8, 2, None),
        (33, 4, None, 1, None),
        (33, None, None, 2, None),
        (4, None, 8, 1, None),
    ],
)
def test_sizes_of_batches(
    whole: int | None,
    micro: int | None,
    steps: int | None,
    world: int,
    expected: tuple[int | None, int | None, int] | None,
) -> None:
    table: dict[str, Any] = dict(LEAST)
    names = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    )
    table.update({n: v for n, v in zip(names, (whole, micro, steps), strict=True) if v is not None})
    if expected is None:
        with pytest.raises(ConfigError, match=rf"{world} processes, not {whole}") as caught:
            load(table, world_size=world)
        assert caught.value.key == "train_batch_size"
        return
    found = load(table, world_size=world)
    assert expected == (
        found.train_batch_size,
        found.train_micro_batch_size_per_gpu,
        found.gradient_accumulation_steps,
    )


def test_auto_is_given_by_the_caller_or_refused_by_name() -> None:
    table = changed("optimizer.params.lr", "auto")
    with pytest.raises(AutoValueError, match=r"auto=\{'optimizer\.params\.lr': \.\.\.\}") as caught:
        load(table)
    assert caught.value.key == "optimizer.params.lr"
    found = load(table, auto={"optimizer.params.lr": 0.25})
    assert found.hyper["lr"] == 0.25
    assert next(r for r in found.rows if r.key == "optimizer.params.lr").value == 0.25
    with pytest.raises(ConfigError, match="finite number of at least 0") as caught:
        load(table, auto={"optimizer.params.lr": -1})
    assert caught.value.key == "optimizer.params.lr"
    with pytest.raises(ConfigError, match='"auto" to be in auto=') as caught:
        load(FULL, auto={"optimizer.params.lr": 1.0})
    assert caught.value.key == "optimizer.params.lr"
    ignored = load(changed("zero_optimization.reduce_bucket_size", "auto"))
    assert "auto" in [row.value for row in ignored.rows if row.fate == "ignored"]
    typed = changed("optimizer", {"type": "auto", "params": {"momentum": 0.5}})
    assert load(typed, auto={"optimizer.type": "SGD"}).hyper == {"momentum": 0.5}


def test_what_the_caller_leaves_out() -> None:
    table = changed("scheduler", {"type": "WarmupLR"})
    found = load(table, ignore=["scheduler", "fp16", "communication_data_type"])
    assert found.format == "fp32"
    left = [row.key for row in found.rows if row.fate == "left out"]
    assert left == ["fp16", "communication_data_type", "scheduler"]
    with pytest.raises(ConfigError, match="to be in ignore=") as caught:
        load(table, ignore=["scheduler", "shceduler"])
    assert caught.value.key == "shceduler"
    with pytest.raises(ConfigError, match="several paths"):
        load(table, ignore="scheduler")


def test_all_that_is_wrong_is_in_the_report() -> None:
    table = changed("scheduler", {"type": "x"}, changed("fp16.hysteresis", 0))
    found = check(table)
    assert [error.key for error in found.problems] == ["fp16.hysteresis", "scheduler"]
    assert [row.key for row in found.rows if row.fate == "refused"] == [
        "fp16.hysteresis",
        "scheduler",
    ]


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("", "", "must be JSON"),
        ("[1]", "", "a table"),
        ('{"optimizer": {"type": "Adam"}, "optimizer": {"type": "SGD"}}', "optimizer", "twice"),
        (
            '{"optimizer": {"type": "Adam", "params": {"lr": 1, "eps": 1, "lr": 2}}}',
            "optimizer.params.lr",
            "twice",
        ),
        ('{"optimizer": {"type": "Adam", "params": {"lr": NaN}}}', "optimizer.params.lr", "finite"),
        (
            '{"optimizer": {"type": "Adam"}, "aio": {"block_size": 1e999}}',
            "aio.block_size",
            "finite",
        ),
        (
            '{"optimizer": {"type": "Adam"}, "checkpoint": {"a": [0, -Infinity]}}',
            "checkpoint.a[1]",
            "NaN or an infinity",
        ),
        ("[" * 100_000, "", "JSON"),
        ('{"train_batch_size": ' + "1" * 5000 + "}", "", "JSON"),
        ("\xff", "", "JSON"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, key: str, message: str) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=message) as caught:
        load(file)
    assert caught.value.key == key
    assert isinstance(caught.value, RepeatedKeyError) == (message == "twice")


def test_a_file_that_cannot_be_read_and_what_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "nothing.json")
    with pytest.raises(ConfigError, match="a table"):
        load(3)  # type: ignore[arg-type]
    with pytest.raises(UnknownKeyError):
        load({**LEAST, 3: 4})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="world_size"):
        load(LEAST, world_size=0)
    (tmp_path / "ds_config.json").write_text(json.dumps(FULL))
    assert load(str(tmp_path / "ds_config.json")).optimizer == "AdamW"
