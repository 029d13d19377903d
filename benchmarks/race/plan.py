"""A race as its YAML file describes it: methods, seeds, data, budget, and how it is measured."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from common.errors import UserError, user_errors

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Measurement:
    """Images of every snapshot at `fractions` of the budget, by one denoising method."""

    sampler: str  # ddpm or ddim
    num_inference_steps: int
    num_images: int
    fractions: tuple[float, ...]

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
class Race:
    """What is raced, and the folders it works in."""

    name: str
    budget: float
    unit: str  # of the budget: "seconds" of training or optimiser "steps"
    seeds: tuple[int, ...]
    training: dict[str, object]  # options of train_unconditional.py, the same for all
    methods: dict[str, dict[str, object]]  # options of each
    measurements: tuple[Measurement, ...]
    baseline: str
    lengths: dict[str, float] = field(default_factory=dict)  # of methods that run for other than one budget
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

    def entries(self) -> list[Entry]:
        """Return all runs: seed by seed, so that what stops early has compared all methods."""
        return [Entry(method, seed, self.lengths.get(method, 1.0)) for seed in self.seeds for method in self.methods]

    def snapshots(self, entry: Entry) -> list[float]:
        """Return when weights are kept, in the budget's unit: wherever a measurement looks."""
        fractions = {fraction for one in self.measurements for fraction in one.fractions}
        within = {fraction for fraction in fractions if fraction <= entry.length}
        return sorted(fraction * self.budget for fraction in within | {entry.length})

    def result_file(self, entry: Entry) -> Path:
        return self.results / f"{entry.name}.json"

    def results_of(self, entry: Entry) -> dict | None:
        """Read what is known of a run."""
        path = self.result_file(entry)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def read_race(path: Path) -> Race:
    """Read a race's YAML file."""
    with user_errors(f"{path} is not a race", OSError, ValueError, TypeError, KeyError, AttributeError):
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        ((unit, budget),) = values.pop("budget").items()
        if unit not in ("seconds", "steps"):
            raise UserError(f"{path}: budget: {unit}: must be seconds or steps")
        measurements = tuple(
            Measurement(**{**one, "fractions": tuple(one["fractions"])}) for one in values.pop("measurements")
        )
        methods = {name: options or {} for name, options in values.pop("methods").items()}
        seeds, baseline = tuple(values.pop("seeds")), values.pop("baseline", "uniform")
        race = Race(
            name=values.pop("name", path.stem), budget=budget, unit=unit, seeds=seeds, methods=methods,
            measurements=measurements, baseline=baseline, **values,
        )  # fmt: skip
    if baseline not in methods:
        raise UserError(f"{path}: baseline: {baseline}: is none of the methods {', '.join(methods)}")
    return race
