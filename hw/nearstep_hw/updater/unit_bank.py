"""The port between the kernel's data path and its functional units."""

from collections.abc import Mapping, Sequence

from amaranth.lib.wiring import In, Out, Signature

ELEMENT_WIDTH = 32


class UnitBankSignature(Signature):
    """Ports of functional units in lockstep.

    The names are those of a `FunctionalUnit`; signals of each unit are concatenated, unit
    k in bits 32 k to 32 k + 31.

    Parameters
    ----------
    units : number of functional units.
    inputs, outputs : names of the arrays, in the order of the unit's ports.
    scalars : name to width of each scalar (32) and switch (1).

    Members
    -------
    i_en : clock enable of the pipelines.
    i_valid : the inputs are valid elements.
    i_<array> : 32 bits a unit.
    s_<scalar> : for all units; stable while a pipeline is not empty.
    o_valid : the outputs are valid results, of all units.
    o_<array> : 32 bits a unit.
    """

    def __init__(
        self,
        *,
        units: int,
        inputs: Sequence[str],
        outputs: Sequence[str],
        scalars: Mapping[str, int],
    ) -> None:
        super().__init__(
            {
                "i_en": Out(1),
                "i_valid": Out(1),
                **{f"i_{name}": Out(ELEMENT_WIDTH * units) for name in inputs},
                **{f"s_{name}": Out(width) for name, width in scalars.items()},
                "o_valid": In(1),
                **{f"o_{name}": In(ELEMENT_WIDTH * units) for name in outputs},
            }
        )
