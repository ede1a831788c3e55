"""RMSprop as an optimizer of one's own; `nearstep rule check examples/rmsprop.py` checks it.

Not centered, without momentum, in the order of `torch.optim.RMSprop`; v has torch's bits, and p
where torch's square root is the nearest one.
"""

from nearstep_spec.rule.expr import fma, select, sqrt
from nearstep_spec.rule.optimizer import Number, Optimizer
from nearstep_spec.rule.rule import Rule


def _rmsprop(p, g, v, *, decay, v_decay, v_weight, eps, step_size, decays):
    g = select(decays, fma(decay, p, g), g)
    v = fma(v_weight * g, g, v_decay * v)
    return {"p": p + step_size * g / (sqrt(v) + eps), "v": v}


def rmsprop_scalars(lr, alpha, eps, weight_decay):
    values = dict(zip(NAMES, (weight_decay, alpha, 1 - alpha, eps, -lr), strict=True))
    return values | {"decays": int(weight_decay != 0)}


NAMES = ("decay", "v_decay", "v_weight", "eps", "step_size")
HYPER = {"lr": Number(1e-2), "alpha": Number(0.99), "eps": Number(1e-8), "weight_decay": Number(0)}
RULE = Rule("rmsprop", _rmsprop, states=("p", "v"), inputs=("g",), scalars=NAMES,
            switches=("decays",))  # fmt: skip
RMSPROP = Optimizer(rule=RULE, scalars=rmsprop_scalars, hyper=HYPER, state={"square_avg": "v"},
                    counts=True)  # fmt: skip
