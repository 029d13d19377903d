"""A race as its YAML file describes it: methods, seeds, data, budget, and how it is measured."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml

from common.errors import UserError, user_errors

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"

UNITS = ("seconds", "steps")
REQUIRED = ("budget", "seeds", "training", "methods", "measurements")
FEWEST_IMAGES = 10  # an image needs neighbours


@dataclass(frozen=True)
class Measurement:
    """Images of a run's snapshots by one denoising method, at `fractions` of the budget or at all of `snapshots`."""

    sampler: str  # ddpm or ddim
    num_inference_steps: int
    num_images: int
    fractions: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.sampler.upper()}-{self.num_inference_steps}@{self.num_images}"


@dataclass(frozen=True)
class Entry:
    """One run of the race: a method with one seed, over a multiple of the budget."""

    method: str
    seed: int
    length: float = 1.0  # in budgets

    @property
    def name(self) -> str:
        return f"{self.method}-{self.seed}" + (f"-x{self.length:g}" if self.length != 1 else "")


@dataclass(frozen=True)
class GeometricTimes:
    """Times of snapshots: `per_doubling` of them whenever the time has doubled, the budget itself among them."""

    start: float  # as a fraction of the budget
    per_doubling: int = 5  # each 1.149 times the one before

    def fractions(self, length: float) -> list[float]:
        """Return them as fractions of the budget: exact at halves and quarters, and with the end of the run."""
        first, last = (math.log2(fraction) * self.per_doubling for fraction in (self.start, length))
        numbers = range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1)
        return sorted({*(2 ** (number / self.per_doubling) for number in numbers), length})


@dataclass(frozen=True)
class Race:
    """What is raced, and the folders it works in."""

    name: str
    budget: float
    unit: str  # of the budget: "seconds" of training or optimiser "steps"
    seeds: tuple[int, ...]
    training: dict[str, object]  # options of train_unconditional.py, the same for all
    methods: dict[str, dict[str, object]]  # options of each
    measurements: tuple[Measurement, ...]
    baseline: str = "uniform"
    ours: str | None = None  # the method that race_summary.json speaks of; else the fastest
    lengths: dict[str, float] = field(default_factory=dict)  # of methods that run for other than one budget
    snapshots: GeometricTimes | None = None
    reference_images: int = 10_000
    threads: int = 2
    mixed_precision: str = "no"  # of sampling and of Inception
    compile: bool = False

    @property
    def results(self) -> Path:
        return RESULTS / "race" / self.name

    @property
    def runs(self) -> Path:
        """Return where weights are kept until they are measured."""
        return ROOT / "runs" / "race" / self.name

    @property
    def entries(self) -> list[Entry]:
        """Return all runs: seed by seed, so that what stops early has compared all methods."""
        return [Entry(method, seed, self.lengths.get(method, 1.0)) for seed in self.seeds for method in self.methods]

    def time(self, fraction: float) -> float:
        """Return a time in the budget's unit, as files and results name it."""
        return round(fraction * self.budget) if self.unit == "steps" else round(fraction * self.budget, 3)

    def times(self, measurement: Measurement, entry: Entry) -> list[float]:
        """Return when a measurement looks at a run."""
        fractions = measurement.fractions or self.snapshots.fractions(entry.length)
        return sorted({self.time(fraction) for fraction in fractions if fraction <= entry.length})

    def snapshot_times(self, entry: Entry) -> list[float]:
        """Return when weights are kept: wherever a measurement looks, and at the end."""
        looked_at = {time for measurement in self.measurements for time in self.times(measurement, entry)}
        return sorted(looked_at | {self.time(entry.length)})

    def result_file(self, entry: Entry) -> Path:
        return self.results / f"{entry.name}.json"

    def result_of(self, entry: Entry) -> dict | None:
        """Read what is known of a run."""
        path = self.result_file(entry)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def in_full_steps(step: int, half_resolution_steps: int, batch_share: float) -> float:
    """Count steps by what they take: a quarter on images of half the size, and by their share of the race's batch."""
    return batch_share * (step - 3 / 4 * min(step, half_resolution_steps))


def points_of(result: dict) -> dict[float, dict]:
    """Return what was measured of a run, by the time of its snapshots."""
    return {round(point["time"], 3): point for point in result.get("points", [])}


def read_race(path: Path) -> Race:
    """Read a race's YAML file."""
    with user_errors(f"{path} cannot be read", OSError, UnicodeDecodeError, yaml.YAMLError):
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    try:
        return race_of(values, path.stem)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def race_of(values: object, name: str) -> Race:
    """Check what a YAML file holds and make it a race."""
    if not isinstance(values, dict):
        raise UserError("is not a race: it must have the keys " + ", ".join(REQUIRED))
    known = {entry.name for entry in fields(Race)} - {"unit"}
    check_keys("", values, known, REQUIRED)
    for key in ("training", "methods", "budget", "lengths", "snapshots"):
        require(isinstance(values.get(key, {}), dict), key, values.get(key), "names with values, one a line")
    for key in ("seeds", "measurements"):
        require(isinstance(values[key], list) and values[key] != [], key, values[key], "a list")
    require(len(values["budget"]) == 1, "budget", values["budget"], "{seconds: ...} or {steps: ...}")
    ((unit, budget),) = values["budget"].items()
    require(unit in UNITS, "budget", unit, "in seconds or steps")
    check_positive(f"budget: {unit}", budget)
    require(all(type(seed) is int and seed >= 0 for seed in values["seeds"]), "seeds", values["seeds"], "whole numbers")
    methods = {str(method): options or {} for method, options in values["methods"].items()}
    for method, options in methods.items():
        require(re.fullmatch(r"[\w.+=-]+", method), "methods", method, "a name that can be part of a file's")
        require(isinstance(options, dict), f"methods: {method}", options, "options with values")
    measurements = tuple(measurement_of(one) for one in values["measurements"])
    race = Race(
        **{"name": name, **values, "budget": budget, "unit": unit, "seeds": tuple(values["seeds"]), "methods": methods,
           "measurements": measurements, "snapshots": snapshots_of(values.get("snapshots")),
           "mixed_precision": values.get("mixed_precision") or "no"}
    )  # fmt: skip
    require(race.mixed_precision in ("no", "bf16"), "mixed_precision", race.mixed_precision, "no or bf16")
    require(isinstance(race.compile, bool), "compile", race.compile, "true or false")
    for key in ("reference_images", "threads"):
        check_positive(key, getattr(race, key), int)
    named = {"baseline": [race.baseline], "ours": [race.ours or race.baseline], "lengths": race.lengths}
    for where, method in ((where, one) for where, some in named.items() for one in some):
        require(method in methods, where, method, f"one of the methods {', '.join(methods)}")
    for method, length in race.lengths.items():
        check_positive(f"lengths: {method}", length)
    for name, count in Counter(one.name for one in measurements).items():
        require(count == 1, "measurements", name, "there once, with all its fractions")
    if race.snapshots is None and not all(one.fractions for one in measurements):
        raise UserError("measurements without fractions are made of all snapshots: say when those are, with snapshots")
    return race


def measurement_of(values: dict) -> Measurement:
    require(isinstance(values, dict), "measurements", values, "names with values")
    known = [entry.name for entry in fields(Measurement)]
    check_keys("measurements: ", values, known, required=known[:3])
    one = Measurement(**{**values, "fractions": tuple(values.get("fractions", ()))})
    require(one.sampler in ("ddpm", "ddim"), "measurements: sampler", one.sampler, "ddpm or ddim")
    check_positive("measurements: num_inference_steps", one.num_inference_steps, int)
    check_positive("measurements: num_images", one.num_images, int)
    require(one.num_images >= FEWEST_IMAGES, "measurements: num_images", one.num_images, f"at least {FEWEST_IMAGES}")
    for fraction in one.fractions:
        check_positive("measurements: fractions", fraction)
    return one


def snapshots_of(values: dict | None) -> GeometricTimes | None:
    if values is None:
        return None
    check_keys("snapshots: ", values, ("from", "per_doubling"), ("from",))
    times = GeometricTimes(values["from"], values.get("per_doubling", GeometricTimes.per_doubling))
    check_positive("snapshots: from", times.start)
    check_positive("snapshots: per_doubling", times.per_doubling, int)
    require(times.start <= 1, "snapshots: from", times.start, "a fraction of the budget, at most 1")
    return times


def check_keys(where: str, values: Mapping, known: Iterable[str], required: Iterable[str]) -> None:
    for key in values:
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1)
            raise UserError(f"{where}unknown key {key}" + (f"; did you mean {nearest[0]}?" if nearest else ""))
    for key in required:
        if key not in values:
            raise UserError(f"{where}there is no {key}")


def check_positive(where: str, value: object, *kinds: type) -> None:
    is_number = type(value) in (kinds or (int, float))
    require(is_number and value > 0, where, value, f"a {'whole ' if kinds else ''}number greater than 0")


def require(condition: object, where: str, value: object, wanted: str) -> None:
    if not condition:
        raise UserError(f"{where}: {value}: must be {wanted}")
