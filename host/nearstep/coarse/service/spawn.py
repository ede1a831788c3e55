"""A service in a child process."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Self

from nearstep.coarse.service.errors import ServiceLostError


class Spawned:
    """A service in a child process, which ends when this process has and all clients have left.

    Parameters
    ----------
    device : URL of the memory devices.
    options : more options of `nearstep coarse serve`, such as `--shard-bytes`.

    Attributes
    ----------
    address, token : arguments for clients.
    pid : process of the service.

    Raises
    ------
    ServiceLostError : the service did not start; the message has the reason.
    """

    def __init__(self, device: str, *options: str) -> None:
        self.token = secrets.token_hex(16)
        command = [sys.executable, "-m", "nearstep", "coarse", "serve", "--device", device]
        command += ["--listen", "unix:", "--until-eof"]
        command += ["--snapshots", "/", *options]  # clients may write as this user anyway
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(self.token + "\n")
            self._process.stdin.flush()
        said = self._process.stdout.readline()
        try:
            found = json.loads(said)
            self.pid, self.address = int(found["pid"]), str(found["address"])
        except ValueError:
            _, errors = self._process.communicate()
            raise ServiceLostError(f"no service of {device}: {errors.strip()[-2000:]}") from None

    def close(self, timeout_s: float = 5.0) -> None:
        """Ask the service to end when its clients have left; wait at most `timeout_s` seconds.

        A second call does nothing.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def token_of(path: Path) -> str:
    """Return the token in a file that only its owner can read.

    Raises
    ------
    PermissionError : group or others have permissions on the file.
    """
    if path.stat().st_mode & 0o077:
        raise PermissionError(f"{path} can be read by others: chmod 600")
    return path.read_text().strip()
