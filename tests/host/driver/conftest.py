"""Devices that the driver's tests run on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

import pytest

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep.updater.device import KernelDevice

from .job import Job

SHAPE = "lanes=4&block_bytes=512&memory_bytes=1MiB"
"""Small, so that a few thousand elements are many blocks of 128 elements."""

CARD_SHAPE = SHAPE.replace("block", "chunk")
SIM_CARD_SHAPE = "lanes=4&chunk_bytes=512&memory_bytes=4MiB"
"""Of every simulated card that has everything, and of that of `tests/system/test_train_gpt.py`:
they share one build."""
ADAM = "rules=adam&gradient_formats=fp32&gradient_scale=no&copy_out_formats=&scan=no&compression="
"""What a kernel of an AXDIMM has if nothing is said."""

BLOCK = 128
BURSTS_AHEAD = 16

URLS = {
    "golden-numpy": f"golden:axdimm?{SHAPE}&engine=numpy",
    "golden-cpp": f"golden:axdimm?{SHAPE}&engine=cpp",
    "sim-ideal": f"sim:axdimm?{SHAPE}",
    "sim-halfduplex": f"sim:axdimm?{SHAPE}&memory=halfduplex&fu=native&stall=0.2&seed=7",
    "golden-card": f"golden:smartssd?{CARD_SHAPE}&{ADAM}",
    "sim-card": f"sim:smartssd?{SIM_CARD_SHAPE}",
    "sim-card-stalled": f"sim:smartssd?{CARD_SHAPE}&{ADAM}&fu=native&stall=0.2&seed=7",
    "golden-cards": f"golden:smartssd?cards=3&{CARD_SHAPE}&{ADAM}",
    "sim-cards": f"sim:smartssd?cards=2&{CARD_SHAPE}&{ADAM}&fu=native&stall=0.2&seed=7",
    "pcie-card": f"sim:smartssd?{SIM_CARD_SHAPE}&bus=pcie",
}
ADAM_ALONE = [name for name in URLS if name not in ("sim-card", "pcie-card")]
"""Those whose kernel has nothing else."""

DIMM_SHAPE = "block_bytes=512&functional_units=4"
DIMMS = {
    "golden-dimm": f"golden:axdimm?{DIMM_SHAPE}&channels=2&memory_bytes=2MiB",
    "sim-dimm": f"sim:axdimm?memory=ddr4-1600&{DIMM_SHAPE}&channels=2&fu=native",
    "sim-dimm-stalled": (
        f"sim:axdimm?memory=ddr4-1600&{DIMM_SHAPE}&channels=2&fu=native&stall=0.3&seed=7"
        "&scheduler=in-order&postpone=8"
    ),
}

WHOLE = {
    "sim-dimm-whole": (
        f"sim:axdimm?memory=ddr4-1600&{DIMM_SHAPE}&channels=2&top=whole&stall=0.3&seed=7"
    )
}
"""The module as `nearstep rtl axdimm_module` writes it, all units in it, as one Verilated object:
for deep tests. It has the shape of the others; `test_dimm_whole.py` has it as it is by default."""

RANKS = {
    "sim-dimm-two-ranks": (
        f"sim:axdimm?memory=ddr4-1600&{DIMM_SHAPE}&channels=2&fu=native&ranks=2&interleave=4096"
    )
}
"""Two ranks on each channel, by the page, so that longer arrays are cut: for deep tests."""

EVERYTHING = (
    "rules=adam,sgd,sgd_momentum,adagrad&gradient_formats=fp32,fp16,bf16&gradient_scale=yes"
    "&copy_out_formats=fp16,bf16&scan=yes&compression=fused,scatter"
)
FULL = {
    "golden-numpy": f"golden:axdimm?{SHAPE}&engine=numpy&{EVERYTHING}",
    "golden-cpp": f"golden:axdimm?{SHAPE}&{EVERYTHING}",
    "golden-dimm": f"golden:axdimm?block_bytes=512&channels=2&memory_bytes=2MiB&{EVERYTHING}",
    "golden-card": f"golden:smartssd?{CARD_SHAPE}&{EVERYTHING}",
    "sim-ideal": f"sim:axdimm?{SHAPE}&{EVERYTHING}",
    "sim-card-stalled": f"sim:smartssd?{SIM_CARD_SHAPE}&{EVERYTHING}&stall=0.2&seed=7",
    "sim-card-ecp5": f"sim:smartssd?{SIM_CARD_SHAPE}&{EVERYTHING}&stall=0.2&technology=ecp5",
    "pcie-card": f"sim:smartssd?{SIM_CARD_SHAPE}&bus=pcie&reorder=yes&stall=0.2&seed=7",
}
"""Devices whose kernels have everything that a kernel can have."""

BUILDS = {"sim-halfduplex", "sim-card-stalled", "sim-cards", "pcie-card"}
"""Of these devices only deep tests make the library; the other ones have the same hardware."""


def chosen(names: Iterable[str], deep: Collection[str]) -> list[object]:
    """Parameters of a fixture; those of `deep` are for deep tests."""
    return [pytest.param(n, marks=pytest.mark.deep) if n in deep else n for n in names]


everywhere = pytest.mark.parametrize(
    "device", chosen([*URLS, *DIMMS, *WHOLE, *RANKS], {*BUILDS, *WHOLE, *RANKS}), indirect=True
)
"""For a test that holds on every device, DIMMs included."""


each_kind = pytest.mark.parametrize(
    "device",
    chosen([*URLS, *DIMMS], {*URLS, *DIMMS} - {"golden-cpp", "golden-card", "golden-dimm"}),
    indirect=True,
)
"""For what the host finds before it turns to a device, of which no two are alike here."""


@pytest.fixture(params=chosen(URLS, BUILDS))
def device(request: pytest.FixtureRequest) -> Iterator[KernelDevice]:
    with nearstep.open((URLS | DIMMS | WHOLE | RANKS)[request.param]) as opened:
        assert isinstance(opened, KernelDevice)
        yield opened


@pytest.fixture(params=chosen(FULL, {"sim-ideal", "sim-card-ecp5", "pcie-card"}))
def full(request: pytest.FixtureRequest) -> Iterator[KernelDevice]:
    """A device whose kernels have everything."""
    with nearstep.open(FULL[request.param]) as opened:
        assert isinstance(opened, KernelDevice)
        yield opened


@pytest.fixture
def job(device: KernelDevice) -> Callable[..., Job]:
    """Make a job on the device."""
    return partial(Job, device)


@pytest.fixture(params=chosen([*DIMMS, *WHOLE, *RANKS], {*WHOLE, *RANKS}))
def dimm(request: pytest.FixtureRequest) -> Iterator[AxdimmDevice]:
    with nearstep.open((DIMMS | WHOLE | RANKS)[request.param]) as opened:
        assert isinstance(opened, AxdimmDevice)
        yield opened
