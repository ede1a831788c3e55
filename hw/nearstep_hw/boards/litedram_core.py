"""Generator of a LiteDRAM core without a CPU: a program that reads and writes JSON.

Only this module imports LiteX. The output must not depend on the date or the machine.
"""

import json
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

__all__ = ["MODULE", "PORT"]

MODULE = "litedram_core"
"""Name of the Verilog module."""

PORT = "memory"
"""Name of the core's port: its AXI4 signals are `user_port_memory_awvalid` and so on."""

CONTROL = "sdram_dfii_control"
PHASE = "sdram_dfii_pi0_"


def _generate(request: dict[str, Any]) -> dict[str, Any]:
    """Return the text of the core, its registers, and the first writes to them."""
    from litedram import gen, modules, phy
    from litedram.init import get_sdram_phy_init_sequence
    from litex.build.lattice import LatticePlatform
    from litex.soc.integration.builder import Builder

    if request["late_reads"]:
        phy.GENSDRPHY = _late(phy.GENSDRPHY, request["late_reads"])
    config = {
        **request["options"],
        "cpu": None,
        "sdram_module": _module(getattr(modules, request["module"]), request["options"]),
        "sdram_phy": getattr(phy, request["phy"]),
        "user_ports": {
            PORT: {
                "type": "axi",
                "data_width": request["data_width"],
                "id_width": request["id_width"],
            }
        },
    }
    with TemporaryDirectory() as name:
        folder = Path(name)
        table = folder / "registers.json"
        core = gen.LiteDRAMCore(
            LatticePlatform(request["device"], io=[], toolchain="trellis"), config
        )
        builder = Builder(
            core,
            output_dir=str(folder),
            compile_software=False,
            compile_gateware=False,
            csr_json=str(table),
        )
        builder.build(build_name=MODULE, regular_comb=False)
        verilog = (folder / "gateware" / f"{MODULE}.v").read_text()
        registers = json.loads(table.read_text())["csr_registers"]
        header = (folder / "software/include/generated/sdram_phy.h").read_text()
    settings = core.sdram.controller.settings
    sequence, _ = get_sdram_phy_init_sequence(settings.phy, settings.timing)
    addresses = {name: row["addr"] for name, row in registers.items()}
    bits = {
        name: int(value, 0) for name, value in re.findall(r"#define (DFII_\w+) (0x\w+)\n", header)
    }
    return {
        "verilog": _plain(verilog),
        "registers": {name: [row["addr"], row["size"]] for name, row in registers.items()},
        "steps": _steps(sequence, addresses, bits, sdr=request["options"]["memtype"] == "SDR"),
        "last_steps": [
            [addresses[CONTROL], bits["DFII_CONTROL_SEL"], 0],
            [addresses["ddrctrl_init_done"], 1, 0],
        ],
        "settings": {
            "lanes": settings.phy.databits // 8,
            **{
                name: getattr(settings.phy, name) or 0
                for name in ("nphases", "rdphase", "wrphase", "delays", "bitslips")
            },
        },
        "timing": {
            name: getattr(settings.timing, name)
            for name in (
                "tRP",
                "tRCD",
                "tWR",
                "tWTR",
                "tREFI",
                "tRFC",
                "tCCD",
                "tRRD",
                "tRC",
                "tRAS",
            )
        },
        "cl": settings.phy.cl,
    }


def _late(kind: Any, cycles: int) -> Any:
    """Return the PHY class of an SDRAM that samples read data `cycles` clocks later."""

    class Late(kind):
        def __init__(self, pads: Any, sys_clk_freq: float) -> None:
            kind.__init__(self, pads, sys_clk_freq, cl=_latency(sys_clk_freq) + cycles)
            self.settings.cl -= cycles  # the memory's own

    return Late


def _latency(sys_clk_freq: float) -> int:
    from litedram.common import get_default_cl

    return int(get_default_cl(memtype="SDR", tck=1 / sys_clk_freq))


def _module(kind: Any, options: dict[str, Any]) -> Any:
    """Return the memory with a refresh interval a clock shorter: the generator rounds the interval
    up, beyond the memory's limit.
    """
    given = vars(kind.technology_timings)
    names = ("tREFI", "tWTR", "tCCD", "tRRD", "tZQCS")
    timings = {name: given[name] for name in names}
    timings["tREFI"] -= 1e9 / options["sys_clk_freq"]
    technology = type(kind.technology_timings)(**timings)
    return type(kind.__name__, (kind,), {"technology_timings": technology})


def _plain(verilog: str) -> str:
    """Remove the date from the text, and make data pads bidirectional."""
    start = verilog.index("`timescale")
    end = verilog.rindex("endmodule") + len("endmodule\n")
    both = r"^    input  wire( .*\b(?:sdram_dq|ddram_dq|ddram_dqs_p)[,\n])"
    text = re.sub(both, r"    inout  wire\1", verilog[start:end], flags=re.M)
    # The tree of instances, a comment, has a random order.
    return re.sub(r"^// Hierarchy\n//-+\n+/\*.*?\*/\n", "", text, flags=re.M | re.S)


def _steps(
    sequence: list[tuple[str, int, int, str, int]],
    addresses: dict[str, int],
    bits: dict[str, int],
    *,
    sdr: bool,
) -> list[list[int]]:
    """Return address, value and cycles to wait of each write, as in LiteX's own software."""

    def value(text: str) -> int:
        return sum(bits[name] for name in text.split("|"))

    software = value("DFII_CONTROL_CKE|DFII_CONTROL_ODT|DFII_CONTROL_RESET_N")
    steps = [[addresses[CONTROL], software, 0]]
    for what, address, bank, command, cycles in sequence:
        if sdr and "Reset DLL" in what:
            continue  # an SDRAM has none: its bit is reserved
        steps.append([addresses[f"{PHASE}address"], address, 0])
        steps.append([addresses[f"{PHASE}baddress"], bank, 0])
        if command.startswith("DFII_CONTROL"):
            steps.append([addresses[CONTROL], value(command), cycles])
        else:
            steps.append([addresses[f"{PHASE}command"], value(command), 0])
            steps.append([addresses[f"{PHASE}command_issue"], 1, cycles])
    return steps


if __name__ == "__main__":
    wanted = json.load(sys.stdin)
    answer, sys.stdout = sys.stdout, sys.stderr
    json.dump(_generate(wanted), answer, sort_keys=True)
