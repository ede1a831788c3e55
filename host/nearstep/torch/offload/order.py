"""The order of uses of parameters, predicted from the previous step."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

Use = tuple[int, bool]
"""The key of a parameter, and whether it is used in backward."""


class UseOrder:
    """Predicts that each period, from one step to the next, repeats the period before.

    An unexpected use is no error: its key is searched from the last match on, then from the
    beginning.

    Parameters
    ----------
    expected : for the first period, keys in order of use, each with whether that is in backward.
    most : number of uses after which a period ends without a step.

    Attributes
    ----------
    is_known : whether the expected order has been observed.
    """

    def __init__(self, expected: Sequence[Use], most: int) -> None:
        self._most = most
        self._seen: list[Use] = []
        self._used: set[int] = set()
        self.is_known = False
        self._expect(expected)

    def _expect(self, uses: Sequence[Use]) -> None:
        self._expected = list(uses)
        self._positions: defaultdict[int, list[int]] = defaultdict(list)
        for position, (key, _) in enumerate(self._expected):
            self._positions[key].append(position)
        self._at = 0
        self._next: dict[int, int] = {}

    def used(self, key: int, in_backward: bool) -> None:
        """Record a use of a parameter."""
        self._seen.append((key, in_backward))
        self._used.add(key)
        positions = self._positions.get(key)
        if positions:
            found = bisect_left(positions, self._at)
            if found == len(positions):
                found = 0
                self._next.clear()
            self._at = positions[found] + 1
        if len(self._seen) >= self._most:
            self.end_period()

    def was_used(self, key: int) -> bool:
        """Return whether a parameter has been used in this period."""
        return key in self._used

    def distance(self, key: int) -> int:
        """Return the number of expected uses before the parameter's next one; more than of any
        other parameter if no use is expected."""
        place = self._next.get(key, -1)
        if place < self._at:
            positions = self._positions.get(key)
            if not positions:
                return 2 * len(self._expected) + 1
            found = bisect_left(positions, self._at)
            later = found < len(positions)
            place = positions[found] if later else positions[0] + len(self._expected)
            self._next[key] = place
        return place - self._at

    def upcoming(self) -> Sequence[Use]:
        """Return the uses expected until the period ends; no further, as the step then changes
        parameters fetched before."""
        return self._expected[self._at :]

    def end_period(self) -> None:
        """End the period: predict that the next one repeats its uses."""
        if self._seen:
            self._expect(self._seen)
            self.is_known = True
        self._seen = []
        self._used.clear()
