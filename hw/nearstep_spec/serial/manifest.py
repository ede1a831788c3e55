"""The description of a board: the text behind `Space.MANIFEST`.

Compact JSON in UTF-8: the family of its driver, the configuration as written by the codec, the hash
of every register map, and properties outside of the family's configuration.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self

from nearstep_spec.errors import NearstepError

FORMAT = 1


class ManifestError(NearstepError, ValueError):
    """The text is not a manifest of this format."""


class Step(NamedTuple):
    """A register of the memory controller to be written before memory can be used.

    Attributes
    ----------
    address : in `Space.CONTROLLER`.
    cycles : least number of device cycles before the next step.
    """

    address: int
    value: int
    cycles: int = 0


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A description of a board.

    Attributes
    ----------
    board : name, such as `ulx3s_85f`; for an emulated device its device name.
    family : of the driver, such as `smartssd` or `coarse`.
    config : of the family, see `nearstep_spec.codec.to_json`.
    map_hashes : hash of each register block, by name.
    memory_bytes : size of the device's memory.
    regions : first byte and bytes of each memory channel.
    clock_hz : of device cycles; 0 if there is no clock.
    controller : initialisation of the memory controller behind `Space.CONTROLLER`, `none` if not
        needed.
    controller_steps : first writes to the controller, in order.
    controller_data : addresses of its registers and other numbers for further steps, by name.
    package : version of nearstep that wrote the manifest.
    digest : of the configuration, `nearstep_spec.codec.digest`, if it was made from files whose
        names do not identify their contents; otherwise empty.
    format : version of the format.
    """

    board: str
    family: str
    config: Mapping[str, Any]
    map_hashes: Mapping[str, int]
    memory_bytes: int
    regions: tuple[tuple[int, int], ...]
    clock_hz: int = 0
    controller: str = "none"
    controller_steps: tuple[Step, ...] = ()
    controller_data: Mapping[str, int] = field(default_factory=dict)
    package: str = ""
    digest: str = ""
    format: int = field(default=FORMAT)

    def encode(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def decode(cls, text: bytes) -> Self:
        """Parse a manifest.

        Raises
        ------
        ManifestError : the text is not a manifest, or has another format.
        """
        try:
            found = json.loads(text)
            if found["format"] != FORMAT:
                raise ManifestError(f"format must be {FORMAT}, not {found['format']!r}")
            regions = tuple((int(first), int(size)) for first, size in found.pop("regions"))
            steps = tuple(Step(*map(int, step)) for step in found.pop("controller_steps", ()))
            return cls(**found, regions=regions, controller_steps=steps)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ManifestError(f"not a manifest of format {FORMAT}: {error}") from error
