"""The description of a board."""

from importlib.metadata import version
from typing import Any

from nearstep_hw.boards.litedram import LiteDramCore
from nearstep_spec.boards.design import BoardDesign
from nearstep_spec.boards.registers import board_map
from nearstep_spec.codec import to_json
from nearstep_spec.serial.manifest import Manifest


def manifest_of(config: BoardDesign, core: LiteDramCore | None) -> Manifest:
    """Return the manifest of a board; `core` is None for block RAM."""
    hashes = {name: registers.hash() for name, (_, registers) in config.maps().items()}
    controller: dict[str, Any] = {}
    if core is not None:
        kind = config.described.memory
        controller = {"controller": f"litedram-{kind}", "controller_steps": core.steps}
        if kind == "sdr":
            controller["controller_steps"] += core.last_steps
        else:  # the host calibrates its delays
            addresses = {name: address for name, (address, _) in core.registers.items()}
            controller["controller_data"] = addresses | core.settings
    return Manifest(
        board=config.board,
        family=config.family,
        config=to_json(config.inner),
        map_hashes=hashes | {"board": board_map().hash()},
        memory_bytes=config.memory_bytes,
        regions=((0, config.memory_bytes),),
        clock_hz=config.described.system_hz,
        package=version("nearstep"),
        **controller,
    )
