"""AdamW with moments in bfloat16: 20 bytes of memory traffic for each parameter instead of 28.

`ADAM_BF16` keeps the parameters in binary32. `ADAM_ALL_BF16` keeps them in bfloat16 as well: the
state that torch keeps for parameters of bfloat16, and with gradients of bfloat16 (the option
`gradient_formats=fp32,bf16`) the bits of torch's fused AdamW, at 14 bytes a parameter.

Devices: `rules=examples/adam_bf16.py:ADAM_BF16`; optimizers:
`nearstep.optim.from_rule("examples/adam_bf16.py:ADAM_BF16", ...)`.
"""

from dataclasses import replace

from nearstep_spec.rule.adam import ADAM
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.rules import OPTIMIZERS

MOMENTS = {"m": "bf16", "v": "bf16"}


def _adamw(name, formats):
    """torch's AdamW, its states in other formats."""
    rule = Rule(
        name,
        ADAM.definition,
        states=ADAM.states,
        inputs=ADAM.inputs,
        scalars=ADAM.scalars,
        switches=ADAM.switches,
        formats=formats,
    )
    adamw = OPTIMIZERS["adamw"]
    hyper = {key: value for key, value in adamw.hyper.items() if key != "amsgrad"}
    state = {key: array for key, array in adamw.state.items() if array in rule.states}
    return replace(adamw, name=name, rule=rule, hyper=hyper, state=state, forms=(), orders={})


ADAM_BF16 = _adamw("adam_bf16", MOMENTS)
ADAM_ALL_BF16 = _adamw("adam_all_bf16", {"p": "bf16", **MOMENTS})
