"""The other way to contract a sum of two products."""

from collections.abc import Mapping
from typing import cast

from nearstep_spec.rule.expr import Condition, Expression, Value
from nearstep_spec.rule.rule import Rule

__all__ = ["crossed"]


def crossed(rule: Rule) -> Rule:
    """Return `rule`, of the same name, with each fma(a, b, c * d) as fma(c, d, a * b).

    Torch's fused steps on a CPU have the first form in vectors, and the second one, which the
    compiler chose, for elements behind the last whole vector of a tensor.
    """

    def define(**leaves: Expression) -> Mapping[str, Value]:
        given = {id(each) for each in leaves.values()}  # products among these are not crossed
        made = {id(each): each for each in leaves.values()}

        def change(node: Expression) -> Expression:
            if id(node) not in made:
                operands = [change(each) for each in node.operands]
                is_sum = node.op == "fma" and id(node.operands[2]) not in given
                if is_sum and operands[2].op == "mul":
                    operands = [*operands[2].operands, Value("mul", *operands[:2])]
                kind = Condition if isinstance(node, Condition) else Value
                made[id(node)] = kind(node.op, *operands, name=node.name, bits=node.bits)
            return made[id(node)]

        found = rule.definition(**leaves)
        return {name: cast(Value, change(each)) for name, each in found.items()}

    return rule.redefined(define)
