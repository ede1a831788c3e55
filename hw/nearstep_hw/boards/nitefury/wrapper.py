"""The top of the board: the card between the PCIe core and the memory controller."""

import re

from amaranth.lib import wiring

from nearstep_hw.verilog import flat_ports

__all__ = ["CARD", "PCIE_CORE", "TOP", "boxes", "wrapper"]

CARD, TOP = "smartssd_series7_card", "nitefury"
PCIE_CORE, MEMORY_CORE = "pcie_7x_0", "mig_7series_0"
PCIE_STREAM = re.compile(r"(m_axis_rx|s_axis_tx)__(\w+)")

BOARD_PORTS = """\
  input  wire [3:0]  pci_exp_rxp, pci_exp_rxn,
  output wire [3:0]  pci_exp_txp, pci_exp_txn,
  input  wire        pcie_clk_p, pcie_clk_n,
  input  wire        pcie_rst_n,
  output wire        pcie_clkreq_n,
  input  wire        sys_clk_p, sys_clk_n,
  output wire        ddr3_reset_n,
  output wire [0:0]  ddr3_ck_p, ddr3_ck_n,
  output wire [0:0]  ddr3_cke, ddr3_odt,
  output wire        ddr3_ras_n, ddr3_cas_n, ddr3_we_n,
  output wire [15:0] ddr3_addr,
  output wire [2:0]  ddr3_ba,
  output wire [1:0]  ddr3_dm,
  inout  wire [1:0]  ddr3_dqs_p, ddr3_dqs_n,
  inout  wire [15:0] ddr3_dq,
  output wire [3:0]  led
"""

DRAM_PINS = ("ddr3_reset_n", "ddr3_ck_p", "ddr3_ck_n", "ddr3_cke", "ddr3_odt", "ddr3_ras_n",
             "ddr3_cas_n", "ddr3_we_n", "ddr3_addr", "ddr3_ba", "ddr3_dm", "ddr3_dqs_p",
             "ddr3_dqs_n", "ddr3_dq")  # fmt: skip

PCIE_TIED = {
    "tx_cfg_gnt": "1'b1", "rx_np_req": "1'b1", "cfg_trn_pending": "1'b0",
    "cfg_pm_halt_aspm_l0s": "1'b0", "cfg_pm_halt_aspm_l1": "1'b0",
    "cfg_pm_force_state_en": "1'b0", "cfg_pm_force_state": "2'b0", "cfg_dsn": "64'b0",
    "cfg_pm_wake": "1'b0", "cfg_interrupt": "1'b0", "cfg_interrupt_assert": "1'b0",
    "cfg_interrupt_di": "8'b0", "cfg_interrupt_stat": "1'b0",
    "cfg_pciecap_interrupt_msgnum": "5'b0",
}  # fmt: skip
"""Unused inputs of the PCIe core, without those of interfaces disabled in `vivado.tcl`."""

DRAM_TIED = {
    "awlock": "1'b0", "awcache": "4'b0011", "awprot": "3'b0", "awqos": "4'b0",
    "arlock": "1'b0", "arcache": "4'b0011", "arprot": "3'b0", "arqos": "4'b0",
}  # fmt: skip
"""Members of AXI4 that the card lacks: normal memory, modifiable and bufferable."""

BODY = """\
  // The reference clock of the link, and its reset.
  wire pcie_refclk, perst_n;
  IBUFDS_GTE2 refclk_buffer (
    .O(pcie_refclk), .ODIV2(), .CEB(1'b0), .I(pcie_clk_p), .IB(pcie_clk_n)
  );
  IBUF perst_buffer (.O(perst_n), .I(pcie_rst_n));
  assign pcie_clkreq_n = 1'b0;

  // Two clocks, one reset: while the block or the DRAM is not ready, both sides of the card are in
  // reset; it ends in each clock by itself.
  wire user_clk, user_reset, user_lnk_up, ui_clk, ui_reset, calibrated, mmcm_locked;
  wire hold = user_reset | ui_reset | ~calibrated;
  (* ASYNC_REG = "TRUE" *) reg [3:0] user_hold = 4'hF;
  (* ASYNC_REG = "TRUE" *) reg [3:0] ui_hold = 4'hF;
  always @(posedge user_clk or posedge hold)
    if (hold) user_hold <= 4'hF; else user_hold <= {user_hold[2:0], 1'b0};
  always @(posedge ui_clk or posedge hold)
    if (hold) ui_hold <= 4'hF; else ui_hold <= {ui_hold[2:0], 1'b0};
  wire user_rst = user_hold[3];
  wire ui_rst = ui_hold[3];
  assign led = ~{calibrated, user_lnk_up, ~user_reset, ~ui_rst};
"""


def _wire(name: str, width: int) -> str:
    return f"  wire {f'[{width - 1}:0] ' if width > 1 else ''}{name};"


def _instance(module: str, name: str, ports: dict[str, str]) -> str:
    inner = ",\n".join(f"    .{port}({value})" for port, value in ports.items())
    return f"  {module} {name} (\n{inner}\n  );"


def _card_ports(card: wiring.Component) -> list[tuple[str, str, int]]:
    """Return name, direction and width of the card's ports but clocks and resets."""
    return [port for port in flat_ports(card) if port[0] not in ("clk", "rst")]


def _split(card: wiring.Component) -> tuple[dict[str, str], dict[str, str]]:
    """Return the ports of each core that connect to the card, with the names of their wires."""
    pcie, dram = {}, {}
    for name, _, _ in _card_ports(card):
        if match := PCIE_STREAM.fullmatch(name):
            pcie[f"{match[1]}_{match[2]}"] = name
        elif name.startswith("m_axi__"):
            dram[f"s_axi_{name.removeprefix('m_axi__')}"] = name
        elif not name.startswith("o_"):
            pcie[name] = name
    return pcie, dram


def wrapper(card: wiring.Component) -> str:
    """Return the Verilog of the top; ports of the cores have the names of PG054 and UG586."""
    pcie, dram = _split(card)
    ports = _card_ports(card)
    lanes = {f"pci_exp_{end}": f"pci_exp_{end}" for end in ("txp", "txn", "rxp", "rxn")}
    pcie_core = lanes | {
        "sys_clk": "pcie_refclk", "sys_rst_n": "perst_n", "user_clk_out": "user_clk",
        "user_reset_out": "user_reset", "user_lnk_up": "user_lnk_up",
        **pcie, "m_axis_rx_tkeep": "", "m_axis_rx_tlast": "", **PCIE_TIED,
    }  # fmt: skip
    dram_core = {pin: pin for pin in DRAM_PINS} | {
        "sys_clk_p": "sys_clk_p", "sys_clk_n": "sys_clk_n", "sys_rst": "1'b1",
        "ui_clk": "ui_clk", "ui_clk_sync_rst": "ui_reset", "mmcm_locked": "mmcm_locked",
        "aresetn": "~ui_rst", "init_calib_complete": "calibrated",
        "app_sr_req": "1'b0", "app_ref_req": "1'b0", "app_zq_req": "1'b0",
        **dram, **{f"s_axi_{name}": value for name, value in DRAM_TIED.items()},
    }  # fmt: skip
    own = {"clk": "ui_clk", "rst": "ui_rst", "pcie_clk": "user_clk", "pcie_rst": "user_rst"}
    parts = [
        "`default_nettype none",
        f"module {TOP} (\n{BOARD_PORTS});",
        BODY,
        "\n".join(_wire(name, width) for name, _, width in ports),
        _instance(PCIE_CORE, "pcie", pcie_core),
        _instance(MEMORY_CORE, "dram", dram_core),
        _instance(CARD, "card", own | {name: name for name, _, _ in ports}),
        "endmodule\n`default_nettype wire",
    ]
    return "\n".join(parts) + "\n"


def boxes(card: wiring.Component) -> str:
    """Return both cores as black boxes for Yosys, with the ports that the top connects."""
    pcie, dram = _split(card)
    found = {name: (direction, width) for name, direction, width in _card_ports(card)}

    def of_card(names: dict[str, str]) -> list[str]:
        lines = []
        for port, name in names.items():
            direction, width = found[name]
            lines.append(_port("output" if direction == "input" else "input", port, width))
        return lines

    def tied(values: dict[str, str], prefix: str = "") -> list[str]:
        return [
            _port("input", f"{prefix}{name}", int(text.split("'")[0]))
            for name, text in values.items()
        ]

    pcie_lines = [
        *(_port("output", f"pci_exp_{end}", 4) for end in ("txp", "txn")),
        *(_port("input", f"pci_exp_{end}", 4) for end in ("rxp", "rxn")),
        *(_port("input", name, 1) for name in ("sys_clk", "sys_rst_n")),
        *(_port("output", name, 1) for name in ("user_clk_out", "user_reset_out", "user_lnk_up")),
        _port("output", "m_axis_rx_tkeep", 16),
        _port("output", "m_axis_rx_tlast", 1),
        *of_card(pcie),
        *tied(PCIE_TIED),
    ]
    widths = {"ddr3_addr": 16, "ddr3_ba": 3, "ddr3_dm": 2, "ddr3_dqs_p": 2, "ddr3_dqs_n": 2,
              "ddr3_dq": 16}  # fmt: skip
    both_ways = ("ddr3_dqs_p", "ddr3_dqs_n", "ddr3_dq")
    dram_lines = [
        *(_port("inout" if pin in both_ways else "output", pin, widths.get(pin, 1))
          for pin in DRAM_PINS),
        *(_port("input", name, 1) for name in ("sys_clk_p", "sys_clk_n", "sys_rst", "aresetn")),
        *(_port("output", name, 1)
          for name in ("ui_clk", "ui_clk_sync_rst", "mmcm_locked", "init_calib_complete")),
        *(_port("input", name, 1) for name in ("app_sr_req", "app_ref_req", "app_zq_req")),
        *of_card(dram),
        *tied(DRAM_TIED, "s_axi_"),
    ]  # fmt: skip
    return "".join(
        f"(* blackbox *)\nmodule {name} (\n" + ",\n".join(lines) + "\n);\nendmodule\n"
        for name, lines in ((PCIE_CORE, pcie_lines), (MEMORY_CORE, dram_lines))
    )


def _port(direction: str, name: str, width: int) -> str:
    return f"  {direction} wire {f'[{width - 1}:0] ' if width > 1 else ''}{name}"
