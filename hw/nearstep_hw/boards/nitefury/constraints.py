"""Pins of the board, from amaranth-boards, as constraints."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from amaranth.build import DiffPairs, Pins, Subsignal
from amaranth_boards.nitefury import NitefuryIIPlatform

__all__ = ["channels", "memory_pins", "open_pins", "pins"]

CHANNELS: Mapping[str, str] = MappingProxyType(
    {"B8": "X0Y4", "D11": "X0Y5", "B10": "X0Y6", "D9": "X0Y7"}
)
"""Transceiver of each positive receive pin, package FBG484. Source: AMD UG475, quad 216."""

MEMORY_PORTS: Mapping[str, str] = MappingProxyType(
    {
        "rst": "ddr3_reset_n", "clk": "ddr3_ck", "clk_en": "ddr3_cke", "we": "ddr3_we_n",
        "ras": "ddr3_ras_n", "cas": "ddr3_cas_n", "a": "ddr3_addr", "ba": "ddr3_ba",
        "dqs": "ddr3_dqs", "dq": "ddr3_dq", "dm": "ddr3_dm", "odt": "ddr3_odt",
    }
)  # fmt: skip
"""Ports of the memory controller by the names of amaranth-boards."""

VECTORS = frozenset({"ddr3_ck", "ddr3_cke", "ddr3_addr", "ddr3_ba", "ddr3_dqs", "ddr3_dq",
                     "ddr3_dm", "ddr3_odt"})  # fmt: skip
RESET_STANDARD = "LVCMOS15"


def _resource(name: str) -> Any:
    return next(
        each for each in NitefuryIIPlatform.resources if each.name == name and each.number == 0
    )


def _names(signal: Any) -> tuple[list[str], list[str]]:
    """Return the positive and negative pins of a signal; the latter only if differential."""
    for io in signal.ios:
        if isinstance(io, DiffPairs):
            return list(io.p.names), list(io.n.names)
        if isinstance(io, Pins):
            return list(io.names), []
    raise TypeError(f"{signal.name} must have pins")


def _signals(name: str) -> dict[str, tuple[list[str], list[str]]]:
    return {each.name: _names(each) for each in _resource(name).ios if isinstance(each, Subsignal)}


def memory_pins() -> Iterator[tuple[str, str, str]]:
    """Yield port of the memory controller, pin and IO standard of each pin of the DRAM.

    All standards are of 1.5 V: amaranth-boards has SSTL15 for data and SSTL135 for strobes, which
    cannot share a bank.
    """
    for name, (positive, negative) in _signals("ddr3").items():
        port = MEMORY_PORTS[name]
        standard = RESET_STANDARD if name == "rst" else "SSTL15"
        halves = [(f"{port}_p", positive), (f"{port}_n", negative)] if negative else []
        for half, pins_ in halves or [(port, positive)]:
            for index, pin in enumerate(pins_):
                text = f"{half}[{index}]" if port in VECTORS else half
                yield text, pin, f"DIFF_{standard}" if negative else standard


def channels() -> list[str]:
    """Return the transceiver of each lane."""
    return [CHANNELS[pin] for pin in _signals("pcie")["rx"][0]]


def _common() -> list[str]:
    """Return the constraints for both flows: pins of PCIe, clock and LEDs."""
    pcie = _signals("pcie")
    lines = []

    def place(port: str, pin: str, standard: str | None = None) -> None:
        lines.append(f"set_property PACKAGE_PIN {pin} [get_ports {{{port}}}]")
        if standard:
            lines.append(f"set_property IOSTANDARD {standard} [get_ports {{{port}}}]")

    for name, port in (("rx", "pci_exp_rx"), ("tx", "pci_exp_tx")):
        for sign, pins_ in zip("pn", pcie[name], strict=True):
            for lane, pin in enumerate(pins_):
                place(f"{port}{sign}[{lane}]", pin)
    for sign, pins_ in zip("pn", pcie["clk"], strict=True):
        place(f"pcie_clk_{sign}", pins_[0])
    place("pcie_rst_n", pcie["rst"][0][0], "LVCMOS33")
    lines.append("set_property PULLUP true [get_ports {pcie_rst_n}]")
    place("pcie_clkreq_n", pcie["clkreq"][0][0], "LVCMOS33")
    for sign, pins_ in zip("pn", _names(_resource("clk200")), strict=True):
        place(f"sys_clk_{sign}", pins_[0], "DIFF_SSTL15")
    leds = [each for each in NitefuryIIPlatform.resources if each.name == "led"]
    for index, led in enumerate(leds):
        place(f"led[{index}]", _names(led)[0][0], "LVCMOS33")
    return lines


def pins() -> str:
    """Return the constraints for Vivado; the core of the memory controller has those of the
    DRAM."""
    lines = _common()
    lines += [
        "create_clock -period 10.000 -name pcie_refclk [get_ports pcie_clk_p]",
        "set_false_path -from [get_ports pcie_rst_n]",
        "set_clock_groups -asynchronous "
        "-group [get_clocks -of_objects [get_pins pcie/user_clk_out]] "
        "-group [get_clocks -of_objects [get_pins dram/ui_clk]]",
    ]
    for lane, channel in enumerate(channels()):
        cell = f"*pipe_lane[{lane}].gt_wrapper_i/gtp_channel.gtpe2_channel_i"
        lines.append(
            f"set_property LOC GTPE2_CHANNEL_{channel} "
            f"[get_cells -hierarchical -filter {{NAME =~ {cell}}}]"
        )
    lines += [
        "set_property CFGBVS VCCO [current_design]",
        "set_property CONFIG_VOLTAGE 3.3 [current_design]",
        "set_property BITSTREAM.CONFIG.SPI_BUSWIDTH 4 [current_design]",
        "set_property BITSTREAM.CONFIG.CONFIGRATE 16 [current_design]",
        "set_property BITSTREAM.GENERAL.COMPRESS TRUE [current_design]",
    ]
    return "\n".join(lines) + "\n"


def open_pins() -> str:
    """Return the constraints for nextpnr-xilinx, with the pins of the DRAM: pins and standards
    only.
    """
    lines = _common()
    for port, pin, standard in memory_pins():
        lines.append(f"set_property PACKAGE_PIN {pin} [get_ports {{{port}}}]")
        lines.append(f"set_property IOSTANDARD {standard} [get_ports {{{port}}}]")
    return "\n".join(lines) + "\n"
