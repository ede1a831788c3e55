"""What stands for Linux's NVMe driver: nodes, /sys and ioctls, in front of a controller's queues.

`DriverStandIn.ioctl` is called in place of `fcntl.ioctl`; nodes are files. A guest of
`make linux --python` has the driver itself, and the same program gives the same bits there.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from pathlib import Path

from nearstep.linux.nvme.standard import Register
from nearstep.linux.passthrough import ADMIN, GET_ID, IO, PASSED, RESULT

from .guest import PAGE, Guest

NAMESPACES = {"ng0n1": (2, 3), "ng0n2": (3, 4), "ng0n3": (1, 0)}
"""NSID and command set of each node: Linux numbers nodes in the order in which it finds them."""

OTHERS = {"ng1n1": (1, 0), "ng1n2": (2, 3)}
"""Of another controller, without programs."""

MOST = 256 * 1024
"""Most bytes of a transfer; Linux has its own limit."""


class DriverStandIn:
    """Nodes below a folder, and the ioctls that a controller answers.

    Attributes
    ----------
    guest : the host of the controller; another one after a reset.
    refuses : errno of every command, if not 0.
    """

    def __init__(self, folder: Path, guest: Guest) -> None:
        self.folder, self.guest, self.refuses = folder, guest, 0
        self._prepare()
        (folder / "dev").mkdir()
        for controller, nodes in (("nvme0", NAMESPACES), ("nvme1", OTHERS)):
            for node, (nsid, command_set) in nodes.items():
                (folder / "dev" / node).touch()
                add_node(folder, controller, node, nsid, command_set)

    def _prepare(self) -> None:
        self._data, self._list = self.guest.pages(MOST // PAGE + 1), self.guest.pages(1)

    def reset(self) -> None:
        """Reset the controller, as Linux does after a timeout."""
        self.guest.write(Register.CC, 0)
        self.guest = Guest(self.guest.controller)
        self._prepare()

    def ioctl(self, fd: int, request: int, passed: bytearray | int = 0) -> int:
        """Pass a command on, as Linux does: the NSID must be that of the node."""
        node = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        nsid, _ = {**NAMESPACES, **OTHERS}[node]
        if request == GET_ID:
            return nsid
        assert isinstance(passed, bytearray)
        assert len(passed) == PASSED.size + RESULT.size
        found = PASSED.unpack_from(passed)
        opcode, flags, _, number, cdw2, cdw3, metadata, address, more, nbytes, *words, _, _ = found
        assert (flags, metadata, more) == (0, 0, 0)
        if self.refuses:
            raise OSError(self.refuses, os.strerror(self.refuses))
        if (request == IO and number != nsid) or nbytes > MOST:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        assert request in (IO, ADMIN)
        # The pages as they are in the process; Linux copies what is not aligned to words.
        ram, offset = self.guest.ram, 0 if address % 4 else address % PAGE
        first = self._data + offset
        if opcode & 1:
            ram.data[first : first + nbytes] = ctypes.string_at(address, nbytes)
        pages = -(-(offset + nbytes) // PAGE)
        if pages > 2:
            listed = (self._data + PAGE * (1 + n) for n in range(pages - 1))
            self.guest.put(self._list, struct.pack(f"<{pages - 1}Q", *listed))
        answer = self.guest.run(
            opcode, number, io=request == IO, prp1=first,
            prp2=self._list if pages > 2 else self._data + PAGE,
            dw2=cdw2, dw3=cdw3, **{f"dw{10 + n}": word for n, word in enumerate(words)},
        )  # fmt: skip
        if opcode & 2:
            ctypes.memmove(address, bytes(ram.data[first : first + nbytes]), nbytes)
        RESULT.pack_into(passed, PASSED.size, answer.result)
        return answer.status | (1 << 14 if answer.status else 0)


def add_node(folder: Path, controller: str, node: str, nsid: int, command_set: int | None) -> None:
    """Add a node to /sys, as Linux 6.12 does."""
    device = folder / "sys/devices/pci0000:00" / controller
    disk = device / node.replace("ng", "nvme")
    disk.mkdir(parents=True)
    (disk / "nsid").write_text(f"{nsid}\n")
    if command_set is not None:
        (disk / "csi").write_text(f"{command_set}\n")
    (device / node).mkdir()
    (device / node / "device").symlink_to("..")
    nodes = folder / "sys/class/nvme-generic"
    nodes.mkdir(parents=True, exist_ok=True)
    (nodes / node).symlink_to(device / node)
