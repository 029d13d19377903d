"""At which noise levels is one network better than another? Images by one, with the other's outputs in a band.

    python -m benchmarks.attribution benchmarks/races/cifar10_16_screen.yaml log_snr uniform

Both are runs of a race, which keeps the weights of their ends. While images are generated, the second network replaces
the first wherever log SNR is in one band; the change of FID is what its training is worth there. Every number is kept
at once, in benchmarks/results/attribution: start the same command again to go on.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.race import record
from benchmarks.race.__main__ import make_judge
from benchmarks.race.measure import snapshot_model
from benchmarks.race.plan import RESULTS, Entry, read_race, require
from benchmarks.race.train import snapshot_of
from common.errors import UserError, run_script
from common.files import write_atomically
from common.plots import COLOURS, NOTE, single_panel
from run_folder.saved_model import SavedModel

FOLDER = RESULTS / "attribution"


class Mixed(torch.nn.Module):
    """One network, but another where log SNR is from `low` to `high`."""

    def __init__(self, network: torch.nn.Module, other: torch.nn.Module, replaced: torch.Tensor):
        super().__init__()
        self.networks, self.replaced = torch.nn.ModuleList([network, other]), replaced

    def forward(self, sample: torch.Tensor, t: torch.Tensor, **inputs):
        # All images of a batch are at one timestep. This is a measurement on a CPU: it may wait for t.
        return self.networks[int(self.replaced[t.flatten()[0]])](sample, t, **inputs)

    def compile(self) -> None:
        for network in self.networks:
            network.compile()


@dataclass(frozen=True)
class MixedModel(SavedModel):
    other: SavedModel | None = None
    band: tuple[float, float] = (-math.inf, -math.inf)

    def load(self, device: torch.device) -> torch.nn.Module:
        log_snr = self.scheduler.alphas_cumprod.logit()
        replaced = (log_snr >= self.band[0]) & (log_snr < self.band[1])
        return Mixed(super().load(device), self.other.load(device), replaced)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a race that has been run")
    parser.add_argument("method", help="the method whose network draws the images")
    parser.add_argument("other", help="the method whose network takes its place in one band after another")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--edges", type=float, nargs="+", default=[-3.5, 0.0, 2.0, 4.0], help="log SNR between which bands lie"
    )
    arguments = parser.parse_args()
    race = read_race(arguments.file)
    for name in (arguments.method, arguments.other):
        require(name in race.methods, "method", name, f"one of {', '.join(race.methods)}")
    entries = [Entry(method, arguments.seed) for method in (arguments.method, arguments.other)]
    folders = [snapshot_of(race.runs / entry.name, race.time(entry.length)) for entry in entries]
    for entry, folder in zip(entries, folders, strict=True):
        if not folder.exists():
            raise UserError(f"{folder}: the race has no weights of {entry.name}; run it on this machine")
    path = FOLDER / f"{race.name}-{arguments.method}-{arguments.other}-{arguments.seed}.json"
    measurement, edges = race.measurements[0], [-math.inf, *sorted(arguments.edges), math.inf]
    bands = [(-math.inf, -math.inf), (-math.inf, math.inf), *zip(edges[:-1], edges[1:], strict=True)]
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    result = {"method": arguments.method, "other": arguments.other, "seed": arguments.seed, **known}
    result |= {"measurement": measurement.name, "measured_with": record.measured_with(race)}
    result.setdefault("bands", {})
    judge = None
    for band in bands:
        if name_of(band) in result["bands"]:
            continue
        judge = judge or make_judge(race)
        config = record.config_of(race, entries[0])
        other = snapshot_model(folders[1], config)
        model = snapshot_model(folders[0], config, MixedModel, other=other, band=band)
        result["bands"][name_of(band)] = judge.measure_model(model, measurement)
        print(f"{arguments.other} at {name_of(band)}: FID {result['bands'][name_of(band)]['fid']:.2f}", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(result, indent=1) + "\n")
    draw(result, path.with_suffix(".png"))


def name_of(band: tuple[float, float]) -> str:
    """Name a band by its edges; `none` and `all` are the two networks by themselves."""
    low, high = band
    if low == high:
        return "none"
    if math.isinf(low) and math.isinf(high):
        return "all"
    return f"below {high:g}" if math.isinf(low) else f"from {low:g}" if math.isinf(high) else f"{low:g} to {high:g}"


def draw(result: dict, path: Path) -> None:
    """Draw how much FID changes with the other network in each band."""
    bands = {name: one["fid"] for name, one in result["bands"].items()}
    alone, other = bands.pop("none"), bands.pop("all")
    title = f"{result['method']}, with {result['other']}'s network in one band"
    with single_panel(path, title, "log SNR", "change of FID") as axes:
        axes.bar(range(len(bands)), [fid - alone for fid in bands.values()], color=COLOURS[0], width=0.6)
        axes.axhline(0, color=NOTE, linewidth=0.8)
        axes.set_xticks(range(len(bands)), bands)
        note = f"FID {alone:.1f}; {result['other']} everywhere: {other:.1f}"
        note += f"\n{result['measurement']}, seed {result['seed']}"
        axes.annotate(note, (0.02, 0.96), xycoords="axes fraction", va="top", fontsize=8, color=NOTE)


if __name__ == "__main__":
    sys.argv[0] = "benchmarks.attribution"
    run_script(main)
