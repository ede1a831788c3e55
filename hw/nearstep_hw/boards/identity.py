"""What a board says of itself."""

from importlib.metadata import version

from nearstep_hw.boards.litedram import LiteDramCore
from nearstep_spec.boards.config import BoardConfig
from nearstep_spec.boards.registers import board_map
from nearstep_spec.codec import to_json
from nearstep_spec.serial.manifest import Manifest

FAMILY = "smartssd"


def manifest_of(config: BoardConfig, core: LiteDramCore | None) -> Manifest:
    """The manifest of a board with this memory controller; None for block RAM."""
    hashes = {name: registers.hash() for name, (_, registers) in config.card.maps().items()}
    controller = "none" if core is None else f"litedram-{config.described.memory}"
    return Manifest(
        board=config.board,
        family=FAMILY,
        config=to_json(config.card),
        map_hashes=hashes | {"board": board_map().hash()},
        memory_bytes=config.memory_bytes,
        regions=((0, config.memory_bytes),),
        clock_hz=config.described.system_hz,
        controller=controller,
        controller_steps=() if core is None else core.steps + core.last_steps,
        package=version("nearstep"),
    )
