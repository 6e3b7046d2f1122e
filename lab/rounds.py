"""Statistics of paired rounds: the effect of a change, its interval, and what two equal versions show.

A round measures a process of each version, "other" and "this", in an order that alternates. It gives one change, so
that a drift of the machine cancels out; the effect is the median change, as in the ladder. Of two equal versions each
is as likely as the other to be ahead in a round, whatever the noise looks like. So the chance is known with which the
k-th smallest and the k-th largest change are on the same side of no change: the interval between them is that of the
sign test, and assumes nothing of the noise. The rounds are looked at several times, to stop early; the looks share the
chance of a false alarm.
"""

import math
import statistics
from typing import NamedTuple

SIDES = ("other", "this")
ALPHA = 0.05  # chance that two equal versions are told apart, in all looks together
FIRST_LOOK = 8  # rounds before the first look; before each later one half as many again


class Effect(NamedTuple):
    """The median change and its interval. noise: the largest effect that two equal versions would show.

    changes: of the rounds. equal: those between neighboring processes of one version.
    """

    change: float
    low: float
    high: float
    noise: float
    changes: list
    equal: list

    @classmethod
    def exact(cls, change, least):
        """The Effect of a change that is counted; one smaller than `least` is none."""
        change = change if abs(change) >= least else 0.0
        return cls(change, change, change, 0.0, [change], [])

    @property
    def seen(self):
        return self.low > 0 or self.high < 0

    @property
    def margin(self):
        return max(self.high - self.change, self.change - self.low)


def order(number):
    """The sides in the order in which a round, counted from 1, measures them."""
    return SIDES if number % 2 else SIDES[::-1]


def effect(change, values, k):
    """The Effect of two or more rounds. change: function of two figures. values: {side: figures}. k: of plan_looks."""
    changes = list(map(change, *(values[side] for side in SIDES)))
    equal = changes_of_equals(change, values)
    noise = max(map(abs, bounds(equal, rank(len(equal), ALPHA) or 1)))
    return Effect(statistics.median(changes), *bounds(changes, k), noise, changes, equal)


def bounds(changes, k):
    """The k-th smallest and the k-th largest change."""
    ascending = sorted(changes)
    return ascending[k - 1], ascending[-k]


def changes_of_equals(change, values):
    """The changes between neighboring processes of one version, the last of a round and the first of the next.

    In turns to the later one and to the earlier one, as in the rounds.
    """
    found = []
    for number in range(1, len(values["this"])):
        earlier, later = values[order(number)[-1]][number - 1 : number + 1]
        found.append(change(earlier, later) if number % 2 else change(later, earlier))
    return found


def plan_looks(rounds):
    """{number of rounds: k} of all looks at up to so many rounds; the k-th changes from both ends bound the interval.

    Each look may spend an equal share of ALPHA, and what those before it have left.
    """
    numbers, n = [rounds], FIRST_LOOK
    while n < rounds:
        numbers.insert(-1, n)
        n += n // 2
    spent, looks = 0.0, {}
    for count, n in enumerate(numbers, 1):
        if k := rank(n, ALPHA * count / len(numbers) - spent):
            looks[n] = k
            spent += chance_outside(n, k)
    return looks


def rank(n, chance):
    """The largest k whose interval, of n changes, misses the effect with this chance at most; 0 if there is none."""
    k = 0
    while chance_outside(n, k + 1) <= chance:
        k += 1
    return k


def chance_outside(n, k):
    """The chance that of n coins fewer than k fall on one and the same side (Conover 1999, section 3.2)."""
    return 2 * sum(math.comb(n, i) for i in range(k)) / 2**n
