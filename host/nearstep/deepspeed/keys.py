"""Keys of DeepSpeed's configuration, and the fate of each.

Ref: https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nearstep.deepspeed.kinds import SWITCH, TABLE, Kind, number, or_null, several, text, whole

Fate = Literal["used", "ignored", "only", "off", "refused"]
"""Fate of a key: used; ignored, because no bit depends on it; accepted with some values alone;
accepted if its `enabled` is false; refused."""


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes
    ----------
    text : its use, or the reason against it.
    accepted : values of a key with the fate `only`.
    """

    kind: Kind
    fate: Fate
    text: str
    accepted: tuple[Any, ...] = ()


Keys = Mapping[str, "Key | Keys"]
"""Keys of a table; nested tables have keys of their own."""

FORMATS = ("fp32", "fp16", "bf16")
OPTIMIZERS = ("Adam", "AdamW", "SGD", "Adagrad")

SPEED = "changes the speed of DeepSpeed, not its results"
ONE = "nothing is divided between processes here"
PRINTS = "for DeepSpeed's own logs"
OPTION = "as in nearstep.optim"
TORCHS = "selects an implementation in torch, not its results"
AVERAGING = "gradients are averaged by torch.nn.parallel.DistributedDataParallel"
MASTERS = "masters and state are fp32"
NO_OFFLOAD = "parameters are not offloaded"
CHECKPOINTS = "for DeepSpeed's own checkpoints"
QUEUES = "drives have queues of their own"
CHECKED = "checked, and in the result"


def _used(kind: Kind, reason: str) -> Key:
    return Key(kind, "used", reason)


def _ignored(kind: Kind, reason: str) -> Key:
    return Key(kind, "ignored", reason)


def _only(kind: Kind, reason: str, *accepted: Any) -> Key:
    return Key(kind, "only", reason, accepted)


def _all(names: str, key: Key) -> Keys:
    """Several keys of one fate."""
    return dict.fromkeys(names.split(), key)


_RATE = number()
_COMMON: Keys = {
    **_all("lr weight_decay", _used(_RATE, OPTION)),
    "maximize": _used(SWITCH, OPTION),
    **_all("fused foreach", _ignored(or_null(SWITCH), TORCHS)),
}
_OF_ADAM: Keys = {
    **_COMMON,
    "betas": _used(several(number(below=1.0), 2), OPTION),
    "eps": _used(_RATE, OPTION),
    "amsgrad": _used(SWITCH, "as in nearstep.optim: the device needs the rule adam_amsgrad"),
    "bias_correction": _only(SWITCH, "the rule corrects the bias", True),
    "torch_adam": _used(SWITCH, "the default of weight_decay is torch's"),
    "fp32_optimizer_states": _only(SWITCH, MASTERS, True),
}
PARAMS: Mapping[str, Keys] = {
    "Adam": {
        **_OF_ADAM,
        "adam_w_mode": _used(SWITCH, "true, the default, is AdamW: decoupled weight decay"),
    },
    "AdamW": {
        **_OF_ADAM,
        "adam_w_mode": _only(SWITCH, "AdamW decouples the weight decay", True),
    },
    "SGD": {
        **_COMMON,
        **_all("momentum dampening", _used(_RATE, OPTION)),
        "nesterov": _used(SWITCH, OPTION),
    },
    "Adagrad": {
        **_COMMON,
        **_all("lr_decay initial_accumulator_value eps", _used(_RATE, OPTION)),
    },
}
"""Hyper-parameters, by optimizer."""

_DEVICES = text("none", "cpu", "nvme")
_OFFLOAD_OPTIMIZER: Keys = {
    "device": _used(_DEVICES, "nvme: state is kept on drives; else in the memory of the device"),
    "nvme_path": _used(or_null(text()), "with nvme, folder of the drives' files"),
    "buffer_count": _used(
        whole(1), "with nvme, buffers of sub_group_size elements: memory of the device"
    ),
    **_all("pin_memory fast_init", _ignored(SWITCH, SPEED)),
    "pipeline_read": _ignored(SWITCH, "arrays are read ahead in any case"),
    "pipeline_write": _ignored(SWITCH, "arrays are written behind in any case"),
    "ratio": _only(number(), "the device makes all of the step", 1.0),
}
_OFFLOAD_PARAM: Keys = {
    "device": _only(
        _DEVICES, "leave it out, and call nearstep.offload(model, optimizer, budget=...)", "none"
    ),
    "nvme_path": _ignored(or_null(text()), NO_OFFLOAD),
    **_all("buffer_count buffer_size max_in_cpu", _ignored(whole(), NO_OFFLOAD)),
    "pin_memory": _ignored(SWITCH, NO_OFFLOAD),
}
_ZERO: Keys = {
    "stage": _used(whole(0, 3), "checked beside offload_optimizer; " + ONE),
    "offload_optimizer": _OFFLOAD_OPTIMIZER,
    "offload_param": _OFFLOAD_PARAM,
    "sub_group_size": _used(whole(), "with nvme, elements of a buffer"),
    "cpu_offload": _ignored(SWITCH, "state is kept in the memory of the device"),
    "compute_grad_norm": _ignored(SWITCH, "gradient_clipping decides if the norm is computed"),
    **_all(
        "allgather_partitions overlap_comm reduce_scatter"
        " stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save",
        _ignored(SWITCH, ONE),
    ),
    **_all(
        "allgather_bucket_size reduce_bucket_size stage3_max_live_parameters"
        " stage3_max_reuse_distance stage3_prefetch_bucket_size"
        " stage3_param_persistence_threshold stage3_module_granularity_threshold",
        _ignored(whole(), ONE),
    ),
    "zero_hpz_partition_size": _ignored(whole(1), ONE),
    **_all(
        "contiguous_gradients round_robin_gradients parameter_alignment", _ignored(SWITCH, SPEED)
    ),
    "load_from_fp32_weights": _ignored(SWITCH, "checkpoints of nearstep have fp32 masters"),
    "elastic_checkpoint": _ignored(SWITCH, CHECKPOINTS),
    "ignore_unused_parameters": _ignored(SWITCH, "parameters without a gradient are left alone"),
    "log_trace_cache_warnings": _ignored(SWITCH, PRINTS),
    "save_muon_momentum_buffer_in_memory": _ignored(SWITCH, "for Muon only"),
    "zero_quantized_weights": _only(SWITCH, "parameters are not quantized", False),
    "zero_quantized_gradients": _only(
        SWITCH, "gradients are not quantized; compression= sends only the largest", False
    ),
}
_FP16: Keys = {
    "enabled": _used(SWITCH, "parameters are fp16, and the loss is scaled"),
    "auto_cast": _only(SWITCH, "inputs are the model's own: cast them", False),
    "loss_scale": _used(number(below=2.0**128), "0 is dynamic"),
    "initial_scale_power": _used(whole(), "exponent of 2 of the first dynamic scale"),
    "loss_scale_window": _used(whole(1), "steps without overflow until the scale is doubled"),
    "hysteresis": _used(whole(1), "overflows until the scale is halved"),
    "consecutive_hysteresis": _used(SWITCH, "whether these overflows must be consecutive"),
    "min_loss_scale": _used(number(), "smallest dynamic scale"),
    "fp16_master_weights_and_grads": _only(SWITCH, MASTERS, False),
}
_BF16: Keys = {
    "enabled": _used(SWITCH, "parameters are bf16"),
    **_all("bf16_master_weights_and_grads bf16_optimizer_states", _only(SWITCH, MASTERS, False)),
    "immediate_grad_update": _ignored(SWITCH, SPEED),
}
_AIO: Keys = {
    **_all("block_size queue_depth thread_count intra_op_parallelism", _ignored(whole(1), QUEUES)),
    **_all("single_submit overlap_events use_gds", _ignored(SWITCH, QUEUES)),
}
_CHECKPOINTING: Keys = {
    **_all(
        "partition_activations cpu_checkpointing contiguous_memory_optimization"
        " synchronize_checkpoint_boundary profile",
        _ignored(SWITCH, "for models that call deepspeed.checkpointing"),
    ),
    "number_checkpoints": _ignored(
        or_null(whole(1)), "for models that call deepspeed.checkpointing"
    ),
}
_OFF: Mapping[str, str] = {
    "tensorboard": "nothing is written to TensorBoard",
    "wandb": "nothing is written to Weights & Biases",
    "csv_monitor": "nothing is written to CSV files",
    "comet": "nothing is written to Comet",
    "amp": "use torch.autocast",
    "torch_autocast": "use torch.autocast",
    "autotuning": "a program of DeepSpeed",
    "elasticity": "the number of processes is fixed",
    "curriculum_learning": "the training loop chooses the data",
    "data_efficiency": "the training loop chooses the data",
    "hybrid_engine": "there is no engine for inference",
    "expert_parallel": "use torch.distributed",
}
_REFUSED: Mapping[str, str] = {
    "scheduler": "use torch.optim.lr_scheduler on the optimizer",
    "compression_training": "models are not compressed",
    "sparse_attention": "attention is the model's",
    "tensor_parallel": "use torch.distributed.tensor.parallel",
    "pipeline": "use torch.distributed.pipelining",
}
TOP: Keys = {
    **_all("train_batch_size train_micro_batch_size_per_gpu", _used(whole(1), CHECKED)),
    "gradient_accumulation_steps": _used(whole(1), "backward passes of a step"),
    "managed_gradient_accumulation": _only(
        SWITCH, "step() counts the backward passes; call optimizer.step() to do so", True
    ),
    "zero_optimization": _ZERO,
    "fp16": _FP16,
    "bf16": _BF16,
    "gradient_clipping": _used(number(), "bound on the norm of all gradients; 0 is none"),
    "communication_data_type": _used(
        or_null(text(*FORMATS)), "must be the format of the parameters: " + AVERAGING
    ),
    "data_types": {
        "grad_accum_dtype": _used(
            or_null(text(*FORMATS)), "must be the format of the parameters: torch adds gradients"
        ),
    },
    "gradient_allreduce_op": _only(text("mean", "sum"), AVERAGING, "mean"),
    "prescale_gradients": _only(SWITCH, AVERAGING, False),
    "gradient_predivide_factor": _only(number(), AVERAGING, 1.0),
    "sparse_gradients": _only(SWITCH, "gradients are dense", False),
    "disable_allgather": _ignored(SWITCH, ONE),
    "activation_checkpointing": _CHECKPOINTING,
    "aio": _AIO,
    "steps_per_print": _ignored(or_null(whole()), PRINTS),
    **_all("wall_clock_breakdown memory_breakdown dump_state", _ignored(SWITCH, PRINTS)),
    **_all("comms_logger flops_profiler", _ignored(TABLE, PRINTS)),
    "disable_python_gc": _ignored(SWITCH, SPEED),
    "zero_allow_untested_optimizer": _ignored(SWITCH, "every optimizer here is tested"),
    "zero_force_ds_cpu_optimizer": _ignored(SWITCH, "the device makes the step"),
    "checkpoint": _ignored(TABLE, CHECKPOINTS),
    **{name: Key(TABLE, "off", reason) for name, reason in _OFF.items()},
    **{name: Key(TABLE, "refused", reason) for name, reason in _REFUSED.items()},
}
"""Keys of the whole, without `optimizer`, whose keys depend on its type."""


def keys(table: Mapping[str, Any]) -> Keys:
    """Keys of a configuration, with the hyper-parameters of its optimizer."""
    optimizer = table.get("optimizer")
    named = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    title = named.lower() if isinstance(named, str) else None
    params: Key | Keys = _ignored(TABLE, "the type is unknown")
    for each, own in PARAMS.items():
        if each.lower() == title:
            params = own
    return {
        "optimizer": {"type": _used(text(*OPTIMIZERS), "the optimizer"), "params": params},
        **TOP,
    }
