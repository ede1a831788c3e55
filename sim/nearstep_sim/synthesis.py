"""Area of plain Verilog after synthesis with Yosys."""

import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .build import BuildError, tool_environment

__all__ = ["ultrascale_plus_cells"]


def ultrascale_plus_cells(verilog: str, top: str) -> Mapping[str, int]:
    """Cells of `synth_xilinx -family xcup`, by type: `DSP48E2`, `LUT6`, `CARRY4`, `FDRE`...

    Yosys packs no registers into DSP48E2, so that flip-flops read high. Takes about a minute for a
    functional unit.

    Raises
    ------
    BuildError
        With the end of Yosys's output.
    """
    with tempfile.TemporaryDirectory() as folder:
        # YoWASP sees the working directory, and not every absolute path.
        Path(folder, "top.v").write_text(verilog)
        script = (
            f"read_verilog top.v; synth_xilinx -family xcup -top {top} -flatten; "
            "tee -q -o stat.json stat -json"
        )
        environment = tool_environment()
        command = [environment["YOSYS"], "-q", "-p", script]
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise BuildError(command, done.returncode, done.stdout)
        text = Path(folder, "stat.json").read_text()
    cells = json.loads(text[text.index("{") :])["design"]["num_cells_by_type"]
    return {name: int(count) for name, count in sorted(cells.items())}
