"""Options of every emulated device with an update kernel, as they stand in a device name."""

from typing import Annotated, Literal

from nearstep_spec.codec import Nested, Option
from nearstep_spec.updater.config import UpdateKernelConfig

FIXED = ("address_width", "windows", "bursts_ahead")
"""Options of a kernel that an emulated device does not offer."""

Kernel = Annotated[UpdateKernelConfig, Nested(omit=FIXED)]
Engine = Annotated[
    Literal["cpp", "numpy"],
    Option(meaning="arithmetic: cpp is compiled on first use, numpy is slower"),
]
