"""One option for each unit so that the sum of costs is smallest within a sum of sizes: the multiple-choice knapsack, by dynamic programming over sizes in units of their gcd.

One table answers for every capacity, and says how small a capacity keeps a cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

STATES = 1 << 18  # beyond so many sizes they are counted in coarser units, rounded up: a unit's choice may then take 1/2^18 of the range less than it could

Option = tuple[int, float]


class Knapsack:
    """Solved for all capacities at once.

    Args:
        units: for each unit its options, a size (an integer, at least 0) and a cost (finite) each; at least one.

    Attributes:
        smallest, largest: sums of the units' smallest and largest sizes.
    """

    def __init__(self, units: Sequence[Sequence[Option]]) -> None:
        self._units = units
        base = [min(size for size, _ in options) for options in units]
        self.smallest, self.largest = sum(base), sum(max(size for size, _ in options) for options in units)
        extras = [[size - least for size, _ in options] for options, least in zip(units, base, strict=True)]
        step = math.gcd(*(extra for unit in extras for extra in unit)) or 1
        self._step = max(step, -(-(self.largest - self.smallest) // STATES))
        self._extras = [[-(-extra // self._step) for extra in unit] for unit in extras]
        self._costs, self._choices = self._solve(1 + sum(max(unit) for unit in self._extras))

    def _solve(self, states: int) -> tuple[np.ndarray, np.ndarray]:
        """Smallest cost `[states]` for each capacity, and each unit's option in it `[units, states]`."""
        costs = np.zeros(states)
        choices = np.zeros((len(self._units), states), dtype=np.uint8)
        for unit, (options, extras) in enumerate(zip(self._units, self._extras, strict=True)):
            best = np.full(states, np.inf)
            for place in sorted(range(len(options)), key=extras.__getitem__):  # of equally good ones the smallest
                reached = costs[: states - extras[place]] + options[place][1]
                better = reached < best[extras[place] :]
                best[extras[place] :][better] = reached[better]
                choices[unit, extras[place] :][better] = place
            costs = best
        return costs, choices

    def _state(self, capacity: int) -> int:
        return min((capacity - self.smallest) // self._step, len(self._costs) - 1)

    def cost(self, capacity: int) -> float:
        """The smallest cost within a capacity; infinite below `smallest`."""
        return math.inf if capacity < self.smallest else float(self._costs[self._state(capacity)])

    def within(self, capacity: int) -> list[int] | None:
        """The option of each unit that costs least within a capacity; None below `smallest`."""
        return None if capacity < self.smallest else self._chosen(self._state(capacity))

    def reaching(self, cost: float) -> list[int] | None:
        """The option of each unit in the smallest capacity whose cost is at most this; None where there is none."""
        reached = np.flatnonzero(self._costs <= cost)
        return self._chosen(int(reached[0])) if len(reached) else None

    def _chosen(self, state: int) -> list[int]:
        places = []
        for unit in range(len(self._units) - 1, -1, -1):
            place = int(self._choices[unit, state])
            places.append(place)
            state -= self._extras[unit][place]
        return places[::-1]
