"""An initial RAM filesystem: an archive in cpio's format `newc`."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Initramfs:
    """Files of a guest by path, without a leading slash; missing folders are added."""

    files: dict[str, tuple[int, bytes]] = field(default_factory=dict)

    def add(self, path: str, data: bytes, *, mode: int = 0o755) -> None:
        """Add a file."""
        self._entry(path, stat.S_IFREG | mode, data)

    def link(self, path: str, target: str) -> None:
        """Add a symbolic link."""
        self._entry(path, stat.S_IFLNK | 0o777, target.encode())

    def folder(self, path: str) -> None:
        """Add a folder."""
        self._entry(path, stat.S_IFDIR | 0o755, b"")

    def _entry(self, path: str, mode: int, data: bytes) -> None:
        parent = path.rpartition("/")[0]
        if parent and parent not in self.files:
            self.folder(parent)
        self.files[path] = (mode, data)

    def archive(self) -> bytes:
        """Write the archive; equal files give equal bytes."""
        out = bytearray()
        entries: Mapping[str, tuple[int, bytes]] = {**self.files, "TRAILER!!!": (0, b"")}
        for number, (path, (mode, data)) in enumerate(entries.items(), 1):
            name = path.encode() + b"\0"
            fields = [number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name), 0]
            out += b"070701" + b"".join(b"%08X" % each for each in fields) + name
            out += bytes(-len(out) % 4)
            out += data
            out += bytes(-len(out) % 4)
        return bytes(out)
