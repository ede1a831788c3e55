"""Lion as an update rule of one's own; `nearstep rule check examples/lion.py` tells what it costs.

Ref: Chen et al., Symbolic Discovery of Optimization Algorithms, Algorithm 2.
"""

from nearstep_spec.rule.expr import fma, sign
from nearstep_spec.rule.rule import Rule


def _lion(p, g, m, *, decay, update_weight, m_weight, step_size):
    update = sign(fma(update_weight, g - m, m))
    return {"p": fma(step_size, update, decay * p), "m": fma(m_weight, g - m, m)}


SCALARS = ("decay", "update_weight", "m_weight", "step_size")
LION = Rule("lion", _lion, states=("p", "m"), inputs=("g",), scalars=SCALARS)


def lion_scalars(lr, betas, weight_decay):
    return dict(zip(SCALARS, (1 - lr * weight_decay, 1 - betas[0], 1 - betas[1], -lr), strict=True))
