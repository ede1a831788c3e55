"""What a board says of itself."""

from importlib.metadata import version
from typing import Any

from nearstep_hw.boards.litedram import LiteDramCore
from nearstep_spec.boards.config import BoardConfig
from nearstep_spec.boards.registers import board_map
from nearstep_spec.codec import to_json
from nearstep_spec.serial.manifest import Manifest

FAMILY = "smartssd"


def manifest_of(config: BoardConfig, core: LiteDramCore | None) -> Manifest:
    """The manifest of a board with this memory controller; None for block RAM."""
    hashes = {name: registers.hash() for name, (_, registers) in config.card.maps().items()}
    controller: dict[str, Any] = {}
    if core is not None:
        kind = config.described.memory
        controller = {"controller": f"litedram-{kind}", "controller_steps": core.steps}
        if kind == "sdr":
            controller["controller_steps"] += core.last_steps
        else:  # whose delays the host finds
            addresses = {name: address for name, (address, _) in core.registers.items()}
            controller["controller_data"] = addresses | core.settings
    return Manifest(
        board=config.board,
        family=FAMILY,
        config=to_json(config.card),
        map_hashes=hashes | {"board": board_map().hash()},
        memory_bytes=config.memory_bytes,
        regions=((0, config.memory_bytes),),
        clock_hz=config.described.system_hz,
        package=version("nearstep"),
        **controller,
    )
