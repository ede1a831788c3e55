"""Configuration of the board's end of the serial link."""

from dataclasses import dataclass
from typing import Annotated

from nearstep_spec.codec import Option


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """Shape of an endpoint behind a UART."""

    clock_hz: Annotated[int, Option(meaning="clock of the endpoint, Hz", low=1)] = 100_000_000
    baud: Annotated[int, Option(meaning="bits a second of the link", low=1)] = 3_000_000
    data_width: Annotated[
        int, Option(meaning="bits of a memory beat", choices=(32, 64, 128, 256, 512, 1024))
    ] = 128
    address_width: Annotated[int, Option(meaning="bits of a memory address", low=16, high=48)] = 32
    window: Annotated[int, Option(meaning="capacity of the request queue", low=1, high=255)] = 7
    timeout_cycles: Annotated[int, Option(meaning="cycles that an access may take", low=1)] = 65536
    manifest: Annotated[str, Option(meaning="description of the board, JSON")] = ""
