"""Update rules on arrays of the host, computed by this machine's processor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep.updater.arguments import RuleArguments
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
    def prepare(self, form: Form) -> None:
        """Compile a rule once.

        Raises
        ------
        ArgumentError : the rule has no gradient, or keeps states in other formats than fp32.
        NearstepError : the compiler failed.
        """

    @abstractmethod
    def run(
        self,
        arguments: RuleArguments,
        arrays: Mapping[str, NDArray[Any]],
        gradient_scale: float = 1.0,
    ) -> None:
        """Run a rule once, in place.

        Parameters
        ----------
        arguments
        arrays : float32, one for each array of the rule, all of one shape, contiguous, without
            overlap. States are overwritten.
        gradient_scale : factor on the gradients, rounded to binary32; -1 maximizes.

        Raises
        ------
        ArgumentError : an argument or an array is invalid; nothing was updated.
        """

    @abstractmethod
    def blocks(
        self,
        arguments: RuleArguments,
        counts: NDArray[np.uint64],
        rows: NDArray[np.uint64],
        gradient_scale: float = 1.0,
    ) -> Callable[[], None]:
        """What runs a rule once on each of many blocks, in place.

        Addresses are not checked. Called again after Ctrl-C, it runs the rule on what was left out;
        otherwise it does nothing then.

        Parameters
        ----------
        arguments
        counts : elements of each block.
        rows : addresses of the arrays of each block, of shape (blocks, arrays), in the order of
            the rule's `arrays_in`. No two elements that are written may share memory.
        gradient_scale : as in `run`.

        Raises
        ------
        ArgumentError : an argument is invalid; nothing was updated.
        """
