"""Drives without threads: parts of transfers run one at a time, in an order drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from nearstep.storage.drive import Drive, DriveTransfer

EARLY = 0.3
"""Probability that another part runs when one is queued."""


class Turns:
    """Virtual time: a turn is a part of a transfer, and nothing sleeps.

    Attributes
    ----------
    now : turns so far.
    """

    def __init__(self, rng: random.Random) -> None:
        self.now = 0
        self._rng = rng
        self._waiting: list[tuple[Drive, DriveTransfer, Any]] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """All drives take turns."""
        with (
            mock.patch.object(Drive, "submit", lambda *each: self._submit(*each)),
            mock.patch.object(DriveTransfer, "join", lambda each: self._join(each)),
        ):
            yield

    def power_off(self) -> None:
        """What has not run never runs."""
        self._waiting.clear()

    def all(self) -> None:
        """Run what waits."""
        while self._waiting:
            self._one()

    def _submit(self, drive: Drive, transfer: DriveTransfer, jobs: Any) -> None:
        self._waiting.append((drive, transfer, jobs))
        while self._waiting and self._rng.random() < EARLY:
            self._one()

    def _join(self, transfer: DriveTransfer) -> None:
        if not transfer.ended and not transfer._begun:
            transfer.begin()
        while not transfer.ended:
            self._one()

    def _one(self) -> None:
        drive, transfer, jobs = self._waiting.pop(self._rng.randrange(len(self._waiting)))
        self.now += 1
        transfer.run_part(jobs, drive._bounces)
