"""Update rules on arrays of the host, computed by this machine's processor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nearstep.updater.arguments import RuleArguments
from nearstep_spec.rule.columns import Columns
from nearstep_spec.rule.optimizer import Form


class Processor(ABC):
    """Runs update rules in place; `nearstep.device.open_processor` opens it.

    Bits are those of the golden devices, and do not depend on the number of threads.

    Attributes
    ----------
    order : of the arithmetic, for `nearstep.updater.arguments.rule_arguments`.
    """

    order: str

    @abstractmethod
    def prepare(self, form: Form, columns: Columns) -> None:
        """Compile a rule once for arrays that lie in memory as `columns` say.

        Raises
        ------
        ArgumentError : the rule has no gradient.
        NearstepError : the compiler failed.
        """

    @abstractmethod
    def blocks(
        self,
        arguments: RuleArguments,
        columns: Columns,
        blocks: NDArray[np.uint64],
        *,
        gradient_scale: float = 1.0,
        seed: int = 0,
    ) -> Callable[[], None]:
        """What runs a rule once on each of many blocks, in place.

        Addresses are not checked. Called again after Ctrl-C, it runs the rule on what was left out;
        otherwise it does nothing then.

        Parameters
        ----------
        arguments
        columns : how the arrays lie in memory.
        blocks : a row for each block: its elements, the index of the first one for random bits, a
            multiple of 4, and addresses of `columns.parts` of the rule's `arrays_in`. No two
            elements that are written may share memory.
        gradient_scale : factor on the gradients, rounded to binary32; -1 maximizes.
        seed : of random bits; their step is that of the arguments.

        Raises
        ------
        ArgumentError : an argument is invalid; nothing was updated.
        """
