#!/usr/bin/env python
"""Write the tables of the documentation, and the pictures of docs/speed.md and docs/scaling.md, from the results.

    python -m benchmarks.tables

A table stands between `<!-- benchmarks: NAME -->` and `<!-- end -->`, and only what is between them is written. NAME is
a file of benchmarks/results, or a table of its own: those of speed are below, those of trainings in training_tables.py.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.measuring import RESULTS, ROOT, Row, Spread, read_rows
from benchmarks.training_tables import TABLES
from common.errors import run_script
from common.files import write_atomically
from common.plots import drawing, legend_beside

PAGES = (
    *("docs/speed.md", "docs/scaling.md", "README.md"),
    *("docs/adaptive.md", "docs/adaptive_experiments.md"),
    *("docs/ablations.md", "docs/ema.md", "docs/recipes.md", "docs/results.md"),
)
PICTURES = {"profile_steps": "speed_profile.png", "scaling": "scaling.png"}
MARKED = re.compile(r"(<!-- benchmarks: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
# The row of each benchmark that stands in the summary: what most users run, whatever came of it.
HEADLINES = {
    "training_step": "training step, the paper's network, batch 16",
    "sampling": "DDPM, 250 steps, 1.1M parameters at 16x16, float32",
    "evaluation_speed": "FID, KID, precision and recall, 2 x 5,000 images",
    "frechet": "Fréchet distance, 2048 dimensions",
    "streaming": "a streamed image folder, 10,000 photos, 4 epochs, 2 worker(s)",
    "scaling": "2 processes, 64 images each, CPU, 1 thread(s) each",
    "save_stall": "a save of 546 MB: the training waits",
    "memory": "memory of a training of the paper's network, batch 16",
}
SMALLEST_SHARE = 0.01  # of a step, for a kind of operations to be named


def read(results: Path, name: str) -> dict:
    """Read a result; of one that is not there, the reason."""
    path = results / f"{name}.json"
    if path.exists() and "rows" in (content := json.loads(path.read_text())):
        return content
    return {"rows": [asdict(Row(name, skipped=f"`python -m benchmarks.{name}` has not been run"))], "details": {}}


def number(value: float) -> str:
    """Write a number with three digits, and large ones whole."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}" if abs(value) >= 0.1 else f"{value:.2g}"


def with_unit(text: str, unit: str) -> str:
    return f"{text} {unit}".strip()


def measured(spread: Spread, unit: str) -> str:
    """Write a median with its range."""
    text = with_unit(number(spread.median), unit)
    return f"{text} ({number(spread.low)} to {number(spread.high)})" if spread.rounds > 1 else text


def line_of(row: Row) -> str:
    """Write a row as a line of the table."""
    if row.measured is None:
        return f"| {row.what} | not measured: {row.skipped} | | | | |"
    wanted = "" if row.to_reach is None else with_unit(f"{row.direction} {number(row.to_reach)}", row.unit)
    reached = {None: "", True: "yes", False: "**no**"}[row.reached]
    return f"| {row.what} | {row.here} | {row.peer} | {measured(row.measured, row.unit)} | {wanted} | {reached} |"


def table(rows: list[Row]) -> str:
    heading = "| what | here | compared with | measured: median (range) | target | met |\n|---|---|---|---|---|---|\n"
    return heading + "".join(line_of(row) + "\n" for row in rows)


def summary(results: Path) -> str:
    """Return the table of one figure of every benchmark, and how many figures are reached in all."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    found = {name: read_rows(content) for name, content in found.items() if {"rows", "benchmark"} <= content.keys()}
    every = [row for rows in found.values() for row in rows]
    asked = [row for row in every if row.reached is not None]
    reached = sum(row.reached for row in asked)
    missing = sum(row.measured is None for row in every)
    lines = [row for name, what in HEADLINES.items() for row in found.get(name, []) if row.what == what]
    unknown = f"; {missing} could not be measured" if missing else ""
    return f"{table(lines)}\n{reached} of the {len(asked)} targets that we set ourselves are met{unknown}.\n"


def machine(results: Path) -> str:
    """Say what the results were measured on; they should all be of one machine and one tree."""
    known: dict[str, list[str]] = {}
    for path in sorted(results.glob("*.json")):
        content = json.loads(path.read_text())
        if "rows" in content and "benchmark" in content:
            place, versions = content["machine"], content["versions"]
            on = [f"{place['cores']:g} cores of {place['processor']}", *place["gpus"]]
            packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "diffusers", "accelerate", "scipy"))
            text = f"{content['measured']}, {', '.join(on)}; {packages}; commit {versions['commit']}"
            known.setdefault(text, []).append(path.stem)
    return "".join(f"- {text}: {', '.join(names)}\n" for text, names in known.items())


def profile(results: Path) -> str:
    """Return a table of where the time of a step goes, of every network that was profiled."""
    networks = read(results, "profile_steps")["details"]
    parts = []
    for name, summary in networks.items():
        step = summary["ms_per_step"]
        lines = [
            f"| {kind} | {number(ms)} | {ms / step:.1%} |\n"
            for kind, ms in summary["ms_by_kind"].items()
            if ms / step >= SMALLEST_SHARE
        ]
        heading = f"| {name}: a step of {number(step)} ms | ms | share |\n|---|---|---|\n"
        parts.append(heading + "".join(lines))
    return "\n".join(parts)


def scaling_measured(results: Path) -> str:
    """Return what was measured of several processes, and what the model says of the same."""
    details = read(results, "scaling")["details"]
    lines = ["| processes | device | images/s in total | per process | efficiency | waiting for the exchange |\n"]
    lines.append("|---|---|---|---|---|---|\n")
    for one in details["measured"]:
        same = [
            other
            for other in details["measured"]
            if other["processes"] == 1 and all(other[name] == one[name] for name in ("device", "network", "batch"))
        ]
        rate, count = median(one["images_per_second"]), one["processes"]
        efficiency = f"{rate / count / median(same[0]['images_per_second']):.0%}" if same else ""
        device = f"{one['device']}, {one['threads']} thread(s) each" if one["device"] == "CPU" else one["device"]
        share = median(one["communication_share"])
        lines.append(f"| {count} | {device} | {number(rate)} | {number(rate / count)} | {efficiency} | {share:.1%} |\n")
    said = details["predicted"]
    if said:
        lines.append(
            f"\nFor the two processes the model, given one process's step and the time of a bare exchange of as many "
            f"bytes, says {number(said['predicted_images_per_second'])} images/s with "
            f"{said['predicted_communication_share']:.1%} of the time waiting; measured were "
            f"{number(said['measured_images_per_second'])} and {said['measured_communication_share']:.1%}.\n"
        )
    return "".join(lines)


def scaling_model(results: Path) -> str:
    """Return the tables of the model."""
    parts = []
    for one in read(results, "scaling")["details"]["model"]:
        heading = (
            "| GPUs | images a GPU | ms a step | exchange, ms (overlapped or not) | waiting | images/s | efficiency |"
        )
        heading += "\n|---|---|---|---|---|---|---|\n"
        lines = [
            f"| {row['gpus']} | {row['images_a_gpu']} | {number(row['step_ms'])} | {number(row['exchange_ms'])} | "
            f"{row['communication_share']:.1%} | {number(row['images_per_second'])} | {row['efficiency']:.0%} |\n"
            for row in one["rows"]
        ]
        what = one["what"][0].upper() + one["what"][1:]
        parts.append(f"**{what}**. Step: {one['step']}.\n\n{heading}{''.join(lines)}")
    return "\n".join(parts)


def inception_speed(results: Path) -> str:
    """Return the speed of the Inception network, as published and in three ways here."""
    path = results / "inception_speed.json"
    if not path.exists():
        return "`python benchmarks/inception_speed.py` has not been run.\n"
    found = json.loads(path.read_text())
    what = f"batches of {found['batch_size']} resized images, {found['machine']['cores']:g} cores"
    text = f"| {what} | images/s | speed-up | features differ by |\n"
    text += "|---|---|---|---|\n"
    for way, rate in found["images_per_second"].items():
        faster, off = found["times_torchscript"][way], found["difference_of_features"][way]
        text += f"| {way} | {rate:.1f} | {faster:.2f} | {f'{off:.1e}' if off else ''} |\n"
    rates = found["billion_operations_per_second"]
    text += f"\n`evaluate.py` computes {rates['evaluate.py']:.0f} billion operations a second here, where a product of "
    return text + f"two matrices of 4096 x 4096 comes to {rates['matrix product']:.0f}.\n"


OWN: dict[str, Callable[[Path], str]] = {
    "summary": summary,
    "machine": machine,
    "profile": profile,
    "scaling_measured": scaling_measured,
    "scaling_model": scaling_model,
    "inception_speed": inception_speed,
    **TABLES,
}

# Whose result each is made of: if that benchmark failed, its reason stands in the place of the table.
SOURCES = {"profile": "profile_steps", "scaling_measured": "scaling", "scaling_model": "scaling"}


def filled(page: str, results: Path) -> str:
    """Return the page with its tables written anew."""

    def replace(match: re.Match) -> str:
        name = match[2]
        rows_alone = name not in OWN or (name in SOURCES and not read(results, SOURCES[name])["details"])
        text = table(read_rows(read(results, SOURCES.get(name, name)))) if rows_alone else OWN[name](results)
        return f"{match[1]}\n{text.rstrip()}\n\n{match[3]}"

    return MARKED.sub(replace, page)


def draw_profile(results: Path, path: Path) -> None:
    """Draw the kinds of operations of each network as one bar."""
    networks = read(results, "profile_steps")["details"]
    kinds = list(dict.fromkeys(kind for summary in networks.values() for kind in summary["ms_by_kind"]))
    largest = {
        kind: max(one["ms_by_kind"].get(kind, 0) / one["ms_per_step"] for one in networks.values()) for kind in kinds
    }
    kinds = [kind for kind in kinds if largest[kind] >= SMALLEST_SHARE]
    with drawing(path, panel_width=11, aspect=0.25) as (_, panels):
        axes = panels.item()
        left = [0.0] * len(networks)
        for place, kind in enumerate(kinds):
            shares = [100 * one["ms_by_kind"].get(kind, 0) / one["ms_per_step"] for one in networks.values()]
            hatch = "" if place < 7 else "//"  # more kinds than colours
            axes.barh(list(networks), shares, left=left, label=kind, color=f"C{place % 7}", hatch=hatch)
            left = [start + share for start, share in zip(left, shares, strict=True)]
        axes.set(title="Where the time of a training step goes", xlabel="% of a step", xlim=(0, 100))
        axes.invert_yaxis()
        axes.grid(False)
        legend_beside(panels)


def draw_scaling(results: Path, path: Path) -> None:
    """Draw the efficiency over the number of GPUs, as modelled."""
    details = read(results, "scaling")["details"]
    with drawing(path, panel_width=11, aspect=0.4) as (_, panels):
        axes = panels.item()
        for one in details["model"]:
            counts = [row["gpus"] for row in one["rows"]]
            values = [100 * row["efficiency"] for row in one["rows"]]
            axes.plot(counts, values, marker="o", markersize=3, label=f"{one['what']}\n{one['step']}")
        axes.set(
            title="Efficiency on more GPUs: a model, not a measurement", xlabel="GPUs",
            ylabel="% of as many times one GPU", xscale="log", ylim=(0, 105),
        )  # fmt: skip
        axes.set_xticks([1, 8, 32, 128, 1024], ["1", "8", "32", "128", "1024"])
        axes.minorticks_off()
        legend_beside(panels)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--results", type=Path, default=RESULTS, help="folder with the JSON (default: %(default)s)")
    arguments.add_argument("--pages", type=Path, default=ROOT, help="folder with README.md and docs (default: here)")
    options = arguments.parse_args()
    for name in PAGES:
        path = options.pages / name
        before = path.read_text() if path.exists() else ""
        if MARKED.search(before):
            write_atomically(path, filled(before, options.results))
            print(f"{path} has its tables")
    for name, draw in {"profile_steps": draw_profile, "scaling": draw_scaling}.items():
        if read(options.results, name)["details"]:
            draw(options.results, options.pages / "docs" / PICTURES[name])
            print(f"{options.pages / 'docs' / PICTURES[name]} is drawn")


if __name__ == "__main__":
    run_script(main)
