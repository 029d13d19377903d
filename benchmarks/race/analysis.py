"""From points to a claim: monotone curves, times to named targets, and their ratios with an interval over seeds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
SHARES = (0.25, 0.5, 1.0)  # of the budget, at which the baseline's FID is a target


@dataclass(frozen=True)
class Curve:
    """A run's log FID over log time: falling, as the isotonic regression of its points, and straight between them."""

    log_times: np.ndarray
    log_values: np.ndarray

    @classmethod
    def fit(cls, times: list[float], values: list[float]) -> Curve:
        order = np.argsort(times)
        log_times, log_values = np.log(np.asarray(times)[order]), np.log(np.asarray(values)[order])
        return cls(log_times, falling(log_values))

    def at(self, time: float) -> float:
        """Return the FID at a time within the curve."""
        return float(np.exp(np.interp(np.log(time), self.log_times, self.log_values)))

    def time_to(self, value: float) -> float:
        """Return when the curve comes to a value: before its first point by that point's time, never as infinity."""
        wanted = np.log(value)
        if self.log_values[0] <= wanted:
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


def compare(method: dict[int, Curve], baseline: dict[int, Curve], budget: float, share: float) -> Speed | None:
    """Compare times to the baseline's FID at `share` of the budget, seed by seed."""
    seeds = sorted(method.keys() & baseline.keys())
    if not seeds:
        return None
    times = [method[seed].time_to(baseline[seed].at(share * budget)) for seed in seeds]
    # Who has not come there in the budget is not known to need less than that.
    reached = [time <= budget for time in times]
    logs = np.log([min(time, budget) / (share * budget) for time in times])
    low, high = interval(logs)
    return Speed(float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high)), len(seeds), sum(reached))


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean over seeds; one seed has none and is its own."""
    drawn = np.random.default_rng(0).choice(values, size=(RESAMPLES, len(values))).mean(1)
    return tuple(np.quantile(drawn, [0.025, 0.975]))


def exponent(curve: Curve) -> float:
    """Return a of FID ~ time^-a over the curve: twice the speed is an FID lower by 2^a."""
    return float(-np.polyfit(curve.log_times, curve.log_values, 1)[0])
