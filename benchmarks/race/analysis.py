"""From points to a claim: monotone curves, times to named targets, and their ratios with an interval over seeds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
SHARES = (0.25, 0.5, 1.0)  # of the budget, at which the baseline's FID is a target
# A snapshot is kept after the step in which its time comes, so that a curve may begin a little late.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Curve:
    """A run's log FID over log time: falling, as the isotonic regression of its points, and straight between them."""

    log_times: np.ndarray
    log_values: np.ndarray
    log_others: np.ndarray  # the points' steps if times are in seconds, and the other way round

    @classmethod
    def fit(cls, times: list[float], values: list[float], others: list[float] | None = None) -> Curve:
        order = np.argsort(times)
        log_times, log_values, log_others = (np.log(np.asarray(one)[order]) for one in (times, values, others or times))
        return cls(log_times, falling(log_values), log_others)

    @property
    def end(self) -> float:
        return float(np.exp(self.log_times[-1]))

    def covers(self, time: float) -> bool:
        """Tell whether there are points on both sides: nothing is read off beyond them."""
        return self.log_times[0] - TOLERANCE <= np.log(time) <= self.log_times[-1] + TOLERANCE

    def at(self, time: float) -> float:
        """Return the FID at a time within the curve."""
        return float(np.exp(np.interp(np.log(time), self.log_times, self.log_values)))

    def other_at(self, time: float) -> float:
        """Return the steps at a time in seconds, or the other way round."""
        return float(np.exp(np.interp(np.log(time), self.log_times, self.log_others)))

    def begins_below(self, value: float) -> bool:
        """Tell whether the first point is there already, so that `time_to` is no more than a bound."""
        return bool(self.log_values[0] <= np.log(value))

    def time_to(self, value: float) -> float:
        """Return when the curve comes to a value: its first time if it begins there, infinity if it never does."""
        wanted = np.log(value)
        if self.begins_below(value):
            return float(np.exp(self.log_times[0]))
        if self.log_values[-1] > wanted:
            return float("inf")
        after = int(np.argmax(self.log_values <= wanted))
        low, high = self.log_values[after - 1], self.log_values[after]
        part = (low - wanted) / (low - high)
        return float(np.exp(self.log_times[after - 1] + part * (self.log_times[after] - self.log_times[after - 1])))


def falling(values: np.ndarray) -> np.ndarray:
    """Return the nearest sequence that never rises, by pooling adjacent violators (least squares)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, size = float(value), 1
        while blocks and blocks[-1][0] < mean:
            other, others = blocks.pop()
            mean, size = (mean * size + other * others) / (size + others), size + others
        blocks.append((mean, size))
    return np.concatenate([np.full(size, mean) for mean, size in blocks])


@dataclass(frozen=True)
class Speed:
    """How much of the baseline's time a method needs to come to the baseline's FID at a share of the budget."""

    ratio: float
    low: float
    high: float
    seeds: int
    reached: int  # by how many seeds; a run that does not get there counts as its whole budget
    bounds: int  # of how many seeds the first point is already there: they may have been sooner
    other: float  # the ratio in steps if the race is in seconds, and the other way round


def compare(method: dict[int, Curve], baseline: dict[int, Curve], budget: float, share: float) -> Speed | None:
    """Compare times to the baseline's FID at `share` of the budget, seed by seed."""
    time = share * budget
    seeds = [seed for seed in sorted(method.keys() & baseline.keys()) if baseline[seed].covers(time)]
    if not seeds:
        return None
    logs, others, reached, bounds = [], [], 0, 0
    for seed in seeds:
        own, base = method[seed], baseline[seed]
        target = base.at(time)
        own_time, base_time = own.time_to(target), base.time_to(target)  # both as they are read off curves: a tie is 1
        reached += own_time < np.inf
        bounds += own.begins_below(target) and own is not base
        # Who has not come there is not known to need less than the budget, or than it had if that was more.
        own_time = own_time if own_time < np.inf else max(budget, own.end)
        logs.append(np.log(own_time / base_time))
        others.append(np.log(own.other_at(own_time) / base.other_at(base_time)))
    low, high = interval(np.array(logs))
    ratio, other = np.exp(np.mean(logs)), np.exp(np.mean(others))
    return Speed(float(ratio), float(np.exp(low)), float(np.exp(high)), len(seeds), reached, bounds, float(other))


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean over seeds; one seed has none and is its own."""
    drawn = np.random.default_rng(0).choice(values, size=(RESAMPLES, len(values))).mean(1)
    return tuple(np.quantile(drawn, [0.025, 0.975]))


def exponent(curve: Curve) -> float:
    """Return a of FID ~ time^-a over the curve: twice the speed is an FID lower by 2^a."""
    return float(-np.polyfit(curve.log_times, curve.log_values, 1)[0])
