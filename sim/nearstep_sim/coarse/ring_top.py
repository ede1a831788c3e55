"""A ring of memory devices in one module: the text of `nearstep rtl coarse_device`, and a module of
its instances, wires and links.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from nearstep_hw.generate import verilog
from nearstep_sim.verilate.build import verilog_of
from nearstep_spec.coarse.config import PORTS, CoarseConfig
from nearstep_spec.codec import digest

__all__ = [
    "COMMON",
    "DEVICE",
    "SHARING",
    "TOP",
    "device_verilog",
    "numbered",
    "ports_of",
    "ring_verilog",
]

DEVICE = "coarse_device"
"""Name of the generator, and of the module that is shipped."""
TOP = "coarse_ring"

_SHARED = {
    DEVICE: ("rst", "csr__*", "s_axi__*", "m_axi__*", "link_*"),
    "coarse_fu": ("rst", "i_*", "s_*"),
}
SHARING = tuple(
    line
    for module, ports in _SHARED.items()
    for line in (
        f'no_inline -module "{module}"',
        *(f'public_flat_rw -module "{module}" -var "{port}"' for port in ports),
    )
)
"""Settings of Verilator that let all devices, and the functional units of their kernels, share
code: outer logic is not merged into them.
"""

PHIT_BITS = 130  # 128 of data, head, last: nearstep_hw.coarse.wire.LinkPhit
COMMON = ("clk", "rst")

Port = tuple[str, str, int]
"""Name, direction and width."""

_PORT = re.compile(r"^\s*(input|output)\s+(?:\[(\d+):0\]\s+)?(\w+);", re.MULTILINE)

LINK = """\
// One direction of a link: what comes in a cycle goes out {latency} cycles later.
module coarse_ring_link(clk, rst, i_valid, i_phit, o_valid, o_phit);
  input clk, rst, i_valid;
  input [{high}:0] i_phit;
  output o_valid;
  output [{high}:0] o_phit;
  reg [{high}:0] phits [0:{last}];
  reg valid [0:{last}];
  reg [31:0] at;
  integer row;
  initial begin
    at = 0;
    for (row = 0; row <= {last}; row = row + 1) valid[row] = 1'b0;
  end
  assign o_valid = valid[at];
  assign o_phit = phits[at];
  always @(posedge clk) begin
    phits[at] <= i_phit;
    valid[at] <= i_valid;
    at <= at == {last} ? 0 : at + 1;
    if (rst) begin
      at <= 0;
      for (row = 0; row <= {last}; row = row + 1) valid[row] <= 1'b0;
    end
  end
endmodule
"""


def device_verilog(config: CoarseConfig) -> Path:
    """The file that `nearstep rtl coarse_device` writes for a configuration."""
    return verilog_of(f"generator {DEVICE} {_key(config)}", lambda: verilog(DEVICE, config=config))


def ring_verilog(config: CoarseConfig, devices: int, latency: int) -> Path:
    """Return the text of a shipped device, followed by the module `TOP`.

    Port 1 of a device is connected to port 0 of the next; two devices have one link. A link accepts
    a phit a cycle, and delivers it `latency` cycles later. With `i_outside` the links are ports
    instead, and the inner links carry no data.

    Ports of device n have its number behind the first part of their name: `csr2__address`,
    `link_out0__1__valid`.

    Parameters
    ----------
    config : of each device.
    devices : 2 or more.
    latency : cycles, 1 or more.
    """
    if devices < 2 or latency < 1:
        raise ValueError(
            f"devices must be 2 or more and latency 1 or more, not {devices} and {latency}"
        )
    device = device_verilog(config)

    def make() -> str:
        text = device.read_text()
        return text + _around(ports_of(text, DEVICE), devices, latency)

    return verilog_of(f"{TOP} {devices} {latency} {_key(config)}", make, sources=[Path(__file__)])


def ports_of(text: str, module: str) -> list[Port]:
    """Return name, direction and width of each port of a module, in order of the text."""
    body = re.search(rf"^module {module}\(.*?^endmodule", text, re.MULTILINE | re.DOTALL)
    if body is None:
        raise ValueError(f"text must have a module {module}, not {text[:80]!r}")
    return [
        (name, direction, int(high or 0) + 1) for direction, high, name in _PORT.findall(body[0])
    ]


def numbered(name: str, device: int) -> str:
    """Name of a device's port at the ring."""
    first, joint, rest = name.partition("__")
    return f"{first}{device}{joint}{rest}"


def _key(config: CoarseConfig) -> str:
    rules = "" if config.updater is None else f" {digest(config.updater)}"
    return f"{digest(config)}{rules}"


def _module(
    name: str, ports: list[Port], count: int, lines: list[str], more: Sequence[Port] = ()
) -> str:
    """A module with the ports of so many instances, and `more`."""
    own = [port for port in ports if port[0] not in COMMON]
    outer = [
        *((each, "input", 1) for each in COMMON),
        *more,
        *((numbered(each, n), way, width) for n in range(count) for each, way, width in own),
    ]
    joint = ",\n  "
    text = [
        f"module {name}(\n  {joint.join(port for port, _, _ in outer)});",
        *(f"  {way} {_range(width)}{port};" for port, way, width in outer),
        *lines,
        "endmodule",
    ]
    return "\n".join(text) + "\n"


def _range(width: int) -> str:
    return "" if width == 1 else f"[{width - 1}:0] "


def _instance(
    module: str, ports: list[Port], number: int, inside: Mapping[str, str]
) -> Iterator[str]:
    """Yield an instance whose ports are the top's with its number, or as given."""
    pins = [
        f".{name}({name if name in COMMON else inside.get(name, numbered(name, number))})"
        for name, _, _ in ports
    ]
    joint = ",\n    "
    yield f"  {module} instance{number} (\n    {joint.join(pins)});"


def _around(ports: list[Port], devices: int, latency: int) -> str:
    lines = [
        *(line for n in range(devices) for line in _device(ports, n, devices)),
        *(line for n in range(devices) for line in _links(n, devices)),
    ]
    link = LINK.format(latency=latency, high=PHIT_BITS - 1, last=latency - 1)
    return link + _module(TOP, ports, devices, lines, [("i_outside", "input", 1)])


def _device(ports: list[Port], number: int, devices: int) -> Iterator[str]:
    """Yield a device whose links are inside or outside."""
    inside = {
        f"link_{way}__{port}__{member}": f"{member}_{way}{number}_{port}"
        for port in range(PORTS)
        for way, member in (("in", "valid"), ("in", "payload"), ("out", "ready"))
    }
    for port in range(PORTS):
        name = f"{number}_{port}"
        yield f"  wire came{name};"
        yield f"  wire {_range(PHIT_BITS)}phit{name};"
        if _peer(number, port, devices) is None:
            yield f"  assign came{name} = 1'b0, phit{name} = {PHIT_BITS}'b0;"
        outer = numbered(f"link_in__{port}__", number)
        ready = numbered(f"link_out__{port}__ready", number)
        yield f"  wire valid_in{name} = i_outside ? {outer}valid : came{name};"
        yield (
            f"  wire {_range(PHIT_BITS)}payload_in{name} = i_outside ? {outer}payload : phit{name};"
        )
        yield f"  wire ready_out{name} = i_outside ? {ready} : 1'b1;"
    yield from _instance(DEVICE, ports, number, inside)


def _links(number: int, devices: int) -> Iterator[str]:
    """Yield the inner links on which a device sends."""
    for port in range(PORTS):
        peer = _peer(number, port, devices)
        if peer is None:
            continue
        sent = numbered(f"link_out__{port}__", number)
        name = f"{peer}_{1 - port}"
        yield (
            f"  coarse_ring_link link{number}_{port} (.clk(clk), .rst(rst), "
            f".i_valid({sent}valid & ~i_outside), .i_phit({sent}payload), "
            f".o_valid(came{name}), .o_phit(phit{name}));"
        )


def _peer(device: int, port: int, devices: int) -> int | None:
    """Return the device at the other end of a link; two devices have one link."""
    if devices == 2 and port != 1 - device:
        return None
    return (device + (1 if port else -1)) % devices
