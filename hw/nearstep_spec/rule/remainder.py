"""The other way to contract a sum of two products."""

import inspect
from collections.abc import Mapping

from nearstep_spec.rule.expr import Condition, Expression, Value
from nearstep_spec.rule.rule import Rule

__all__ = ["crossed"]


def crossed(rule: Rule) -> Rule:
    """Return `rule`, of the same name, with each fma(a, b, c * d) as fma(c, d, a * b).

    Torch's fused steps on a CPU have the first form in vectors, and the second one, which the
    compiler chose, for elements behind the last whole vector of a tensor.
    """

    def define(**leaves: Expression) -> Mapping[str, Expression]:
        made: dict[Expression, Expression] = {}

        def change(node: Expression) -> Expression:
            if node not in made:
                made[node] = _crossed(node, [change(each) for each in node.operands])
            return made[node]

        return {name: change(each) for name, each in rule.definition(**leaves).items()}

    define.__signature__ = inspect.signature(rule.definition)  # type: ignore[attr-defined]
    return Rule(
        rule.name,
        define,
        states=rule.states,
        inputs=rule.inputs,
        outputs=rule.outputs,
        scalars=rule.scalars,
        switches=rule.switches,
        formats=rule.formats,
    )


def _crossed(node: Expression, operands: list[Expression]) -> Expression:
    """Return a node with these operands in the place of its own."""
    if node.op == "fma" and operands[2].op == "mul":
        product = Value("mul", *operands[:2])
        return Value("fma", *operands[2].operands, product)
    if not operands:
        return node
    kind = Condition if isinstance(node, Condition) else Value
    return kind(node.op, *operands, name=node.name, bits=node.bits)
