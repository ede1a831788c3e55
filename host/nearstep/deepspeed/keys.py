"""Keys of DeepSpeed's configuration, and the fate of each.

Ref: https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nearstep.deepspeed.kinds import Kind, Number, OrNull, Several, Switch, Table, Text, Whole

Fate = Literal["used", "ignored", "only", "off", "refused"]
"""Fate of a key: used; ignored, because no bit depends on it; accepted with some values alone;
accepted if its `enabled` is false; refused."""


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes
    ----------
    text : its use, or the reason against it.
    accepted : of `only`.
    """

    kind: Kind
    fate: Fate
    text: str
    accepted: tuple[Any, ...] = ()


Keys = Mapping[str, "Key | Keys"]
"""Keys of a table; those that are tables have keys again."""

FORMATS = ("fp32", "fp16", "bf16")
OPTIMIZERS = ("Adam", "AdamW", "SGD", "Adagrad")

SPEED = "it changes how fast DeepSpeed is, not what it computes"
ONE = "nothing is divided between processes here"
PRINTS = "it is for DeepSpeed's own logs"
OPTION = "as in nearstep.optim"
TORCHS = "it chooses how torch computes, not what"
AVERAGING = "gradients are averaged by torch.nn.parallel.DistributedDataParallel"
MASTERS = "masters and state are fp32"


def _used(kind: Kind, text: str) -> Key:
    return Key(kind, "used", text)


def _ignored(kind: Kind, text: str) -> Key:
    return Key(kind, "ignored", text)


def _only(kind: Kind, text: str, *accepted: Any) -> Key:
    return Key(kind, "only", text, accepted)


def _off(text: str) -> Key:
    return Key(Table(), "off", text)


def _refused(text: str) -> Key:
    return Key(Table(), "refused", text)


_RATE = Number()
_OF_ADAM: Keys = {
    "lr": _used(_RATE, OPTION),
    "betas": _used(Several(Number(below=1.0), 2), OPTION),
    "eps": _used(_RATE, OPTION),
    "weight_decay": _used(_RATE, OPTION),
    "amsgrad": _used(Switch(), "as in nearstep.optim: the device needs the rule adam_amsgrad"),
    "maximize": _used(Switch(), OPTION),
    "bias_correction": _only(Switch(), "the rule corrects the bias", True),
    "torch_adam": _used(Switch(), "the default of weight_decay is torch's"),
    "fused": _ignored(OrNull(Switch()), TORCHS),
    "foreach": _ignored(OrNull(Switch()), TORCHS),
    "fp32_optimizer_states": _only(Switch(), MASTERS, True),
}
_COMMON: Keys = {
    "maximize": _used(Switch(), OPTION),
    "fused": _ignored(OrNull(Switch()), TORCHS),
    "foreach": _ignored(OrNull(Switch()), TORCHS),
}
PARAMS: Mapping[str, Keys] = {
    "Adam": {
        **_OF_ADAM,
        "adam_w_mode": _used(Switch(), "true, the default, is AdamW: decoupled weight decay"),
    },
    "AdamW": {
        **_OF_ADAM,
        "adam_w_mode": _only(Switch(), "AdamW decouples the weight decay", True),
    },
    "SGD": {
        **_COMMON,
        "lr": _used(_RATE, OPTION),
        "momentum": _used(_RATE, OPTION),
        "dampening": _used(_RATE, OPTION),
        "weight_decay": _used(_RATE, OPTION),
        "nesterov": _used(Switch(), OPTION),
    },
    "Adagrad": {
        **_COMMON,
        "lr": _used(_RATE, OPTION),
        "lr_decay": _used(_RATE, OPTION),
        "weight_decay": _used(_RATE, OPTION),
        "initial_accumulator_value": _used(_RATE, OPTION),
        "eps": _used(_RATE, OPTION),
    },
}
"""Hyper-parameters, by optimizer."""

_OFFLOAD_OPTIMIZER: Keys = {
    "device": _used(
        Text(("none", "cpu", "nvme")),
        "nvme: state lies on drives; else in the memory of the device",
    ),
    "nvme_path": _used(OrNull(Text()), "with nvme, folder of the drives' files"),
    "buffer_count": _used(
        Whole(1), "with nvme, buffers of sub_group_size elements: memory of the device"
    ),
    "pin_memory": _ignored(Switch(), SPEED),
    "pipeline_read": _ignored(Switch(), "arrays are read ahead in any case"),
    "pipeline_write": _ignored(Switch(), "arrays are written behind in any case"),
    "fast_init": _ignored(Switch(), SPEED),
    "ratio": _only(Number(), "the device makes all of the step", 1.0),
}
_OFFLOAD_PARAM: Keys = {
    "device": _only(
        Text(("none", "cpu", "nvme")),
        "leave it out, and call nearstep.offload(model, optimizer, budget=...)",
        "none",
    ),
    "nvme_path": _ignored(OrNull(Text()), "parameters are not offloaded"),
    "buffer_count": _ignored(Whole(), "parameters are not offloaded"),
    "buffer_size": _ignored(Whole(), "parameters are not offloaded"),
    "max_in_cpu": _ignored(Whole(), "parameters are not offloaded"),
    "pin_memory": _ignored(Switch(), "parameters are not offloaded"),
}
_ZERO: Keys = {
    "stage": _used(Whole(0, 3), "checked beside offload_optimizer; " + ONE),
    "offload_optimizer": _OFFLOAD_OPTIMIZER,
    "offload_param": _OFFLOAD_PARAM,
    "sub_group_size": _used(Whole(), "with nvme, elements of a buffer"),
    "cpu_offload": _ignored(Switch(), "state lies in the memory of the device"),
    "allgather_partitions": _ignored(Switch(), ONE),
    "allgather_bucket_size": _ignored(Whole(), ONE),
    "compute_grad_norm": _ignored(Switch(), "the norm is computed where gradient_clipping asks"),
    "overlap_comm": _ignored(Switch(), ONE),
    "reduce_scatter": _ignored(Switch(), ONE),
    "reduce_bucket_size": _ignored(Whole(), ONE),
    "contiguous_gradients": _ignored(Switch(), SPEED),
    "load_from_fp32_weights": _ignored(Switch(), "checkpoints of nearstep have fp32 masters"),
    "round_robin_gradients": _ignored(Switch(), SPEED),
    "parameter_alignment": _ignored(Switch(), SPEED),
    "elastic_checkpoint": _ignored(Switch(), "it is for DeepSpeed's own checkpoints"),
    "ignore_unused_parameters": _ignored(Switch(), "parameters without a gradient are left alone"),
    "log_trace_cache_warnings": _ignored(Switch(), PRINTS),
    "save_muon_momentum_buffer_in_memory": _ignored(Switch(), "it is for Muon alone"),
    "stage3_max_live_parameters": _ignored(Whole(), ONE),
    "stage3_max_reuse_distance": _ignored(Whole(), ONE),
    "stage3_prefetch_bucket_size": _ignored(Whole(), ONE),
    "stage3_param_persistence_threshold": _ignored(Whole(), ONE),
    "stage3_module_granularity_threshold": _ignored(Whole(), ONE),
    "stage3_gather_16bit_weights_on_model_save": _ignored(Switch(), ONE),
    "stage3_gather_fp16_weights_on_model_save": _ignored(Switch(), ONE),
    "zero_hpz_partition_size": _ignored(Whole(1), ONE),
    "zero_quantized_weights": _only(Switch(), "parameters are not quantized", False),
    "zero_quantized_gradients": _only(
        Switch(), "gradients are not quantized; compression= sends the largest alone", False
    ),
}
_FP16: Keys = {
    "enabled": _used(Switch(), "parameters are fp16, and the loss is scaled"),
    "auto_cast": _only(Switch(), "inputs are the model's own: cast them", False),
    "loss_scale": _used(Number(below=2.0**128), "0 is dynamic"),
    "initial_scale_power": _used(Whole(), "the first dynamic scale is 2 to it"),
    "loss_scale_window": _used(Whole(1), "steps without overflow until the scale is doubled"),
    "hysteresis": _used(Whole(1), "overflows until the scale is halved"),
    "consecutive_hysteresis": _used(Switch(), "whether those have to be in a row"),
    "min_loss_scale": _used(Number(), "the scale is not halved below it"),
    "fp16_master_weights_and_grads": _only(Switch(), MASTERS, False),
}
_BF16: Keys = {
    "enabled": _used(Switch(), "parameters are bf16"),
    "bf16_master_weights_and_grads": _only(Switch(), MASTERS, False),
    "bf16_optimizer_states": _only(Switch(), MASTERS, False),
    "immediate_grad_update": _ignored(Switch(), SPEED),
}
_AIO: Keys = {
    name: _ignored(kind, "drives have queues of their own")
    for name, kind in {
        "block_size": Whole(1),
        "queue_depth": Whole(1),
        "thread_count": Whole(1),
        "intra_op_parallelism": Whole(1),
        "single_submit": Switch(),
        "overlap_events": Switch(),
        "use_gds": Switch(),
    }.items()
}
_CHECKPOINTING: Keys = {
    name: _ignored(kind, "it is for models that call deepspeed.checkpointing")
    for name, kind in {
        "partition_activations": Switch(),
        "cpu_checkpointing": Switch(),
        "contiguous_memory_optimization": Switch(),
        "number_checkpoints": OrNull(Whole(1)),
        "synchronize_checkpoint_boundary": Switch(),
        "profile": Switch(),
    }.items()
}
TOP: Keys = {
    "train_batch_size": _used(Whole(1), "checked, and in the result"),
    "train_micro_batch_size_per_gpu": _used(Whole(1), "checked, and in the result"),
    "gradient_accumulation_steps": _used(Whole(1), "backward passes of a step"),
    "managed_gradient_accumulation": _only(
        Switch(), "step() counts the backward passes; call optimizer.step() to do so", True
    ),
    "zero_optimization": _ZERO,
    "fp16": _FP16,
    "bf16": _BF16,
    "gradient_clipping": _used(Number(), "bound on the norm of all gradients; 0 is none"),
    "scheduler": _refused("use torch.optim.lr_scheduler on the optimizer"),
    "communication_data_type": _used(
        OrNull(Text(FORMATS)), "must be the format of the parameters: " + AVERAGING
    ),
    "data_types": {
        "grad_accum_dtype": _used(
            OrNull(Text(FORMATS)), "must be the format of the parameters: torch adds gradients"
        ),
    },
    "gradient_allreduce_op": _only(Text(("mean", "sum")), AVERAGING, "mean"),
    "prescale_gradients": _only(Switch(), AVERAGING, False),
    "gradient_predivide_factor": _only(Number(), AVERAGING, 1.0),
    "sparse_gradients": _only(Switch(), "gradients are dense", False),
    "disable_allgather": _ignored(Switch(), ONE),
    "activation_checkpointing": _CHECKPOINTING,
    "aio": _AIO,
    "steps_per_print": _ignored(OrNull(Whole()), PRINTS),
    "wall_clock_breakdown": _ignored(Switch(), PRINTS),
    "memory_breakdown": _ignored(Switch(), PRINTS),
    "dump_state": _ignored(Switch(), PRINTS),
    "disable_python_gc": _ignored(Switch(), SPEED),
    "zero_allow_untested_optimizer": _ignored(Switch(), "every optimizer here is tested"),
    "zero_force_ds_cpu_optimizer": _ignored(Switch(), "the device makes the step"),
    "comms_logger": _ignored(Table(), PRINTS),
    "flops_profiler": _ignored(Table(), PRINTS),
    "tensorboard": _off("nothing is written to TensorBoard"),
    "wandb": _off("nothing is written to Weights & Biases"),
    "csv_monitor": _off("nothing is written to CSV files"),
    "comet": _off("nothing is written to Comet"),
    "checkpoint": _ignored(Table(), "it is for DeepSpeed's own checkpoints"),
    "amp": _off("use torch.autocast"),
    "torch_autocast": _off("use torch.autocast"),
    "autotuning": _off("it is a program of DeepSpeed's"),
    "elasticity": _off("the number of processes is fixed"),
    "compression_training": _refused("models are not compressed"),
    "curriculum_learning": _off("data are the loop's"),
    "data_efficiency": _off("data are the loop's"),
    "hybrid_engine": _off("there is no engine for inference"),
    "sparse_attention": _refused("attention is the model's"),
    "tensor_parallel": _refused("use torch.distributed.tensor.parallel"),
    "expert_parallel": _off("use torch.distributed"),
    "pipeline": _refused("use torch.distributed.pipelining"),
}
"""Keys of the whole, without `optimizer`, whose keys depend on its type."""


def keys(table: Mapping[str, Any]) -> Keys:
    """Keys of a configuration, with the hyper-parameters of its optimizer."""
    optimizer = table.get("optimizer")
    named = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    title = named.lower() if isinstance(named, str) else None
    params: Key | Keys = _ignored(Table(), "the type is unknown")
    for each, own in PARAMS.items():
        if each.lower() == title:
            params = own
    return {
        "optimizer": {"type": _used(Text(OPTIMIZERS), "the optimizer"), "params": params},
        **TOP,
    }
