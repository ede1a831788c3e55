"""Top of a SmartSSD card on the PCIe hard block of a 7-series device."""

from amaranth.utils import exact_log2

from nearstep_hw.pcie.series7.design import Series7Design
from nearstep_hw.pcie.series7.stream import WIDTH
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.smartssd.pcie_card import PcieCard
from nearstep_hw.updater.unit_row import UnitMaker
from nearstep_spec.pcie import MEMORY_BAR, REGISTER_BAR, REGISTER_BYTES
from nearstep_spec.smartssd.config import SmartssdConfig


class Series7Card(Series7Design):
    """A `PcieCard` behind the adapter to the 7-series integrated block: Gen2 x4, 128 bits.

    BAR 0 has 32 bits and 8 KiB; BAR 2 has 64 bits, is prefetchable, and is as large as the memory.

    Flat Verilog ports: those of `PcieCard` but `m_axis_cq` to `cfg_interrupt_msix`, and with the
    names of the block (PG054):

    - `clk`, `rst`: `user_clk_out` and `user_reset_out` of the block. With `crossed` they are the
      card's own, and those of the block `pcie_clk`, `pcie_rst`.
    - `m_axis_rx__tdata[127:0] tuser[21:0] tvalid tready`,
      `s_axis_tx__tdata[127:0] tkeep[15:0] tlast tuser[3:0] tvalid tready`, `rx_np_ok`,
    - `cfg_bus_number[7:0] cfg_device_number[4:0] cfg_function_number[2:0] cfg_command[15:0]
      cfg_dcommand[15:0] cfg_interrupt_msixenable cfg_interrupt_msixfm cfg_to_turnoff
      cfg_turnoff_ok`.

    *Timing*: that of `PcieCard` and `Series7Adapter`.

    Parameters
    ----------
    config : of the card; a beat of memory has at least 128 bits, four lanes.
    unit : see `UnitMaker`.
    crossed : the hard block has a clock of its own, the domain `pcie`.
    bar_bytes : size of the memory BAR, a power of two; None: that of the memory.

    Members
    -------
    m_axis_rx, s_axis_tx, rx_np_ok, cfg_bus_number, cfg_device_number, cfg_function_number,
        cfg_command, cfg_dcommand, cfg_interrupt_msixenable, cfg_interrupt_msixfm, cfg_to_turnoff,
        cfg_turnoff_ok : of the block, see `Series7Adapter`.
    m_axi : AXI4 to the DRAM, see `SmartssdCard`.
    o_dropped, o_failed_writes, o_failed_reads : counters of the endpoint.

    Raises
    ------
    ValueError : see `PcieCard`.
    """

    def __init__(
        self,
        config: SmartssdConfig,
        *,
        unit: UnitMaker = FunctionalUnit,
        crossed: bool = False,
        bar_bytes: int | None = None,
    ) -> None:
        card = PcieCard(config, unit=unit, width=WIDTH, crossed=crossed)
        self.config = config
        sizes = {REGISTER_BAR: REGISTER_BYTES, MEMORY_BAR: bar_bytes or config.memory_bytes}
        super().__init__(
            card,
            {bar: exact_log2(size) for bar, size in sizes.items()},
            domain="pcie" if crossed else "sync",
        )
