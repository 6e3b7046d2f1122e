"""Gains are told from noise with the promised error rate, and are not hidden by one bad round."""

import math

import numpy as np
import pytest

from lab.measure import stats, summary, turns

ROWS, ROUNDS = 15, turns.ROUNDS  # those of a table, by default


def table(random, gain=1.0, jitter=0.04, rounds=ROUNDS):
    """{(row, the one that it is compared with): Interval} of a ladder whose row 7 is `gain` times as fast as row 6.

    The noise is that of the tables in results/: processes of a row differ by `jitter`, one in 50 is 1.2 to 1.45 times
    slower, and the machine drifts from round to round.
    """
    slow = np.log(random.uniform(1.2, 1.45, (ROWS, rounds))) * (random.random((ROWS, rounds)) < 0.02)
    logs = random.normal(0, 1, (ROWS, rounds)) * np.broadcast_to(jitter, ROWS)[:, None] + slow
    logs += random.normal(0, 0.04, rounds)
    logs[7:] -= math.log(gain)
    pairs = [(row, other) for row in range(1, ROWS) for other in {0, row - 1}]
    return stats.intervals({(row, other): logs[other] - logs[row] for row, other in pairs})


def share_of_tables(found, n=500, **options):
    random = np.random.default_rng(0)
    return sum(map(bool, (found(table(random, **options)) for _ in range(n)))) / n


def any_seen(intervals):
    return any(interval.significant for interval in intervals.values())


def test_a_whole_table_of_noise_shows_a_gain_at_most_once_in_20():
    assert share_of_tables(any_seen) <= 0.05


def test_a_gain_of_1_2_is_seen_nine_times_in_ten():
    assert share_of_tables(lambda intervals: intervals[7, 6].low > 0, gain=1.2) >= 0.9


ON_A_GPU = [0.005] * 10 + [0.1] * 5  # the noise of rows: those that wait for the host differ by 10 %


@pytest.mark.parametrize(("rounds", "most"), [(3, 0.2), (ROUNDS, 0.12)])
def test_tables_whose_rows_are_unequally_noisy_are_seldom_wrong(rounds, most):
    assert share_of_tables(any_seen, jitter=ON_A_GPU, rounds=rounds) <= most


def test_three_rounds_show_a_gain_of_8_in_a_noisy_row_beside_quiet_ones():
    noisy = {"gain": 8.0, "jitter": [*ON_A_GPU[:7], *[0.1] * 5, *ON_A_GPU[7:10]], "rounds": 3}
    assert share_of_tables(lambda intervals: intervals[7, 0].low > 0, **noisy) >= 0.9


def rows_of(seconds):
    """Gains of a ladder, {stage: its gains}, from {stage: seconds by round}."""
    rounds = {name: {number: [one] for number, one in enumerate(each)} for name, each in seconds.items()}
    rows = [{"name": name, "rounds": each, "turns": 0} for name, each in rounds.items()]
    summary.add_gains(rows, "ladder")
    return {row["name"]: row.get("gains", {}) for row in rows}


def test_two_rounds_have_no_interval():
    seconds = {"naive": [0.250, 0.254, 0.252], "allocator": [0.185, 0.187, 0.186]}
    assert rows_of(seconds)["allocator"]["naive"].significant
    assert not any(rows_of({name: each[:2] for name, each in seconds.items()}).values())


@pytest.mark.parametrize("bad", range(5))
def test_one_slow_round_of_naive_hides_no_gain_and_makes_none(bad):
    seconds = {"naive": np.array([0.250, 0.254, 0.252, 0.257, 0.253])}
    paces = {"set_to_none": 0.252, "allocator": 0.185, "amp": 0.189, "flash": 0.177, "checkpointing": 0.209}
    for number, (name, pace) in enumerate(paces.items()):
        seconds[name] = pace * np.roll([1.0, 1.02, 0.99, 1.01, 0.98], number)
    seconds["naive"][bad] *= 1.3
    gains = {name: each["naive"] for name, each in rows_of(seconds).items() if each}
    assert [name for name, gain in gains.items() if not gain.significant] == ["set_to_none"]
    for name, gain in gains.items():
        assert gain.low <= math.log(0.253 / paces[name]) <= gain.high


def test_the_width_of_a_row_s_interval_depends_on_its_own_rounds():
    quiet, noisy = [0.10, 0.11, 0.09, 0.10, 0.11], [0.10, 0.30, -0.10, 0.25, -0.05]
    alike = stats.intervals(dict.fromkeys("abcdef", quiet))
    assert len(set(alike.values())) == 1 and alike["a"].significant
    mixed = stats.intervals(dict.fromkeys("abcde", quiet) | {"f": noisy})
    assert not mixed["f"].significant and mixed["f"].high - mixed["f"].low > 4 * (mixed["a"].high - mixed["a"].low)


def test_rows_of_fewer_rounds_have_wider_intervals_and_equal_rounds_none():
    random = np.random.default_rng(3)
    found = stats.intervals({n: random.normal(0, 0.01, 2 + n % 4) for n in range(12)})
    widths = [np.median([found[n].high - found[n].low for n in range(k, 12, 4)]) for k in range(4)]
    assert widths == sorted(widths, reverse=True)
    assert stats.intervals({"a": [0.2] * 3})["a"] == pytest.approx((0.2, 0.2, 0.2))
    assert stats.intervals({}) == {}


@pytest.mark.parametrize("most", [6, 8, 9, 24, 200])
def test_all_looks_share_the_chance_of_a_false_alarm(most):
    numbers, level = stats.looks(most)
    assert numbers == sorted(set(numbers)) and numbers[-1] == most and numbers[0] == min(most, 8)
    assert len(numbers) * (1 - level) == pytest.approx(1 - stats.LEVEL)


def test_a_gain_is_printed_with_its_interval():
    assert stats.times(stats.Interval(*map(math.log, (1.84, 1.81, 1.87)))) == "1.84× (1.81–1.87)"
    assert stats.times(stats.Interval(*map(math.log, (1.02, 0.98, 1.06)))) == "≈ 1 (0.98–1.06)"
