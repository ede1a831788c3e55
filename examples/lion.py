"""Lion as an optimizer of one's own: `rules=examples/lion.py:LION` in a device's name, and
`nearstep.optim.from_rule("examples/lion.py:LION", ...)`.

`nearstep rule check` tells what it costs.

Ref: Chen et al., Symbolic Discovery of Optimization Algorithms, Algorithm 2.
"""

from nearstep_spec.rule.expr import fma, sign
from nearstep_spec.rule.optimizer import Number, Numbers, Optimizer
from nearstep_spec.rule.rule import Rule


def _lion(p, g, m, *, decay, update_weight, m_weight, step_size):
    update = sign(fma(update_weight, g - m, m))
    return {"p": fma(step_size, update, decay * p), "m": fma(m_weight, g - m, m)}


def lion_scalars(lr, betas, weight_decay):
    return dict(zip(SCALARS, (1 - lr * weight_decay, 1 - betas[0], 1 - betas[1], -lr), strict=True))


SCALARS = ("decay", "update_weight", "m_weight", "step_size")
LION = Optimizer(
    rule=Rule("lion", _lion, states=("p", "m"), inputs=("g",), scalars=SCALARS),
    scalars=lion_scalars,
    hyper={"lr": Number(1e-4), "betas": Numbers((0.9, 0.99)), "weight_decay": Number(0.0)},
    state={"exp_avg": "m"},
)
