"""One page of a run, or of several side by side: a file that needs no other file and no network.

A run is data from elsewhere. What it says goes into the page as JSON, which the page's script shows as text only, and
the page's policy lets the browser run that one script, named by its hash, and load nothing from anywhere.
"""

import base64
import hashlib
import html
import json
import math
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common.errors import UserError, say
from common.files import printable, write_atomically
from common.options import LARGEST_INT, values_of
from image_data.sources import spread
from run_folder.config import TrainingConfig, scheduler_of
from run_folder.folder import METHOD, NEAREST, RECORD, RunFolder, as_number
from schedulers.timestep_samplers import LogSNRBins

PARTS = Path(__file__).parent  # page.html, page.css and page.js
CURVES = ("loss", "smoothed_loss", "lr", "grad_norm", "images_per_second")
# How large a page may get. Pictures are embedded as they are.
MOST_POINTS = 2000  # of a curve: neighbouring lines of a longer run are averaged
MOST_COLUMNS = 120  # of a picture of the noise levels over the steps, averaged likewise
MOST_GRIDS, MOST_GALLERIES, MOST_IMAGES = 40, 3, 64
MOST_BYTES = 12 * 2**20  # of the grids of a run, and of each of its galleries
PNG = b"\x89PNG\r\n\x1a\n"


def write_report(folders: Sequence[Path], path: Path) -> None:
    """Write the page of these runs."""
    write_atomically(path, render(describe_runs(folders)))


def describe_runs(folders: Sequence[Path]) -> list[dict]:
    """Gather what the page shows of each run, under the names of their folders, or the paths of namesakes."""
    names = [folder.resolve().name for folder in folders]
    names = [str(folder) if names.count(name) > 1 else name for folder, name in zip(folders, names, strict=True)]
    described = [describe_run(RunFolder(folder)) for folder in folders]
    return [{"name": printable(name)} | run for name, run in zip(names, described, strict=True)]


def describe_run(run: RunFolder) -> dict:
    """Gather what the page shows of a run; what is not there is left out."""
    if not run.config_file.is_file():
        raise UserError(f"{run.path} is not a run: there is no {run.config_file.name} in it")
    config = run.read_config()
    options = values_of(config, lambda facts: facts.saved)
    return {
        "options": {name: str(value) for name, value in options.items() if value not in (None, [])},
        "audit": read_audit(run),
        "curves": read_curves(run),
        "grids": read_grids(run),
        "timesteps": read_timesteps(run, config),
        "evaluation": read_evaluation(run),
        "galleries": read_galleries(run),
        "total_steps": config.max_train_steps if config.max_train_seconds is None else None,  # else nobody knows
    }


def read_json(path: Path) -> Any:
    """Read a file of JSON; None if there is none, or one that is damaged."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def read_audit(run: RunFolder) -> list[list[str]]:
    """Read the rows of the audit: what, the paper, this run."""
    rows = read_json(run.audit_file)
    rows = rows if isinstance(rows, list) else []
    return [[str(cell) for cell in row] for row in rows if isinstance(row, list) and len(row) == 3]


def number(value: object) -> float | None:
    """Return what can be drawn: a finite number, with six digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(f"{value:.6g}") if math.isfinite(value) else None
    except OverflowError:  # of a whole number
        return None


def mean(values: Iterable[float | None]) -> float | None:
    """Average the values that are there."""
    known = [value for value in values if value is not None]
    return number(sum(known) / len(known)) if known else None


def in_parts(lines: list, most: int) -> list[list]:
    """Divide lines into at most so many parts, in order."""
    size = -(-len(lines) // most) or 1
    return [lines[start : start + size] for start in range(0, len(lines), size)]


def with_steps(lines: list[dict]) -> list[dict]:
    """Return the lines that say their step, in order."""
    known = (line for line in lines if type(line.get("step")) is int and 0 <= line["step"] <= LARGEST_INT)
    return sorted(known, key=lambda line: line["step"])


def read_curves(run: RunFolder) -> dict[str, list[float | None]]:
    """Read the curves of a training, with the steps and seconds of their points."""
    parts = in_parts(with_steps(run.read_metrics()), MOST_POINTS)
    ends = {"step": [part[-1]["step"] for part in parts]}
    ends["train_seconds"] = [number(part[-1].get("train_seconds")) for part in parts]
    means = {name: [mean(number(line.get(name)) for line in part) for part in parts] for name in CURVES}
    curves = ends | means
    return {name: values for name, values in curves.items() if any(value is not None for value in values)}


def read_timesteps(run: RunFolder, config: TrainingConfig) -> dict | None:
    """Read over the steps, for each bin of log-SNR, how often it was drawn and how large the loss was there."""
    bins = LogSNRBins(scheduler_of(vars(config)).alphas_cumprod)
    uniform, lines = (bins.counts / bins.counts.sum()).tolist(), []
    for line in with_steps(run.read_timesteps()):
        rows = {}
        for name in ("log_snr", "probability", "loss"):
            values = line.get(name)
            rows[name] = [number(value) for value in values] if isinstance(values, list) else []
        # A run that went on from a checkpoint of another schedule has lines by other bins.
        known = all(len(row) == len(bins) for row in rows.values()) and None not in rows["log_snr"]
        if known and all(abs(a - b) < 1e-3 for a, b in zip(rows["log_snr"], bins.centres.tolist(), strict=True)):
            lines.append({"step": line["step"], **rows})
    if not lines:
        return None
    parts = in_parts(lines, MOST_COLUMNS)

    def table(name: str) -> list[list[float | None]]:
        return [[mean(values) for values in zip(*(line[name] for line in part), strict=True)] for part in parts]

    density = [
        [None if p is None else number(p / q) for p, q in zip(row, uniform, strict=True)]
        for row in table("probability")
    ]
    levels = {tuple(f"{value:.3g}" for value in row if value is not None) for row in density}
    return {
        "sampler": config.timestep_sampler,
        "edges": [[number(edge) for edge in edges] for edges in bins.edges.tolist()],
        "steps": [part[-1]["step"] for part in parts],
        "density": density,
        "is_uniform": all(set(row) == {"1"} for row in levels),
        "loss": table("loss"),
    }


def read_grids(run: RunFolder) -> list[dict]:
    """Embed the sample grids, evenly spread over the run where there are many."""
    grids = list(run.grids().items())
    grids = [grids[-1 - place] for place in reversed(spread(len(grids), MOST_GRIDS))]  # the last is always shown
    while len(grids) > 1 and sum(size_of(path) for _, path in grids) > MOST_BYTES:
        grids = grids[::-2][::-1]
    for _, path in grids:
        if size_of(path) > MOST_BYTES:
            say(f"note: {path} is not on the page, because it has more than {MOST_BYTES // 2**20} MiB")
    pictures = [(step, embed(path)) for step, path in grids]
    return [{"step": step} | picture for step, picture in pictures if picture]


def size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def embed(path: Path) -> dict | None:
    """Return a PNG as a data URI with its size; None for anything else, whatever its name."""
    if not 24 <= size_of(path) <= MOST_BYTES:
        return None
    data = path.read_bytes()
    if data[:8] != PNG or data[12:16] != b"IHDR":
        return None
    width, height = struct.unpack(">II", data[16:24])
    return {"src": "data:image/png;base64," + base64.b64encode(data).decode(), "width": width, "height": height}


def read_evaluation(run: RunFolder) -> dict | None:
    """Read the table of evaluate.py, and the best number of each metric, with what it was measured against."""
    rows = run.read_results()
    columns = [name for name in rows[0] if name and "@" in name] if rows else []
    if not columns:
        return None
    for row in rows:
        for name in ("step", "train_seconds", "steps", "num_images", *columns):
            row[name] = as_number(row.get(name))
    best = [[row["metric"], as_number(row["best"]), row["reference"]] for row in run.read_best_scores()]
    return {"columns": columns, "rows": rows, "best": best, "method": METHOD}


def read_galleries(run: RunFolder) -> list[dict]:
    """Embed the first images of the folders of generated ones, those of the latest step first."""
    records = {path.parent: read_json(path) for path in run.generated.glob(f"*/{RECORD}")}
    steps = {path: record.get("step", 0) for path, record in records.items() if type(record) is dict}
    # Images of the finished pipeline are of no step.
    folders = [(math.inf if step is None else as_number(step) or 0, path) for path, step in steps.items()]
    galleries = [describe_gallery(path, records[path]) for _, path in sorted(folders, reverse=True)[:MOST_GALLERIES]]
    return [gallery for gallery in galleries if gallery["images"] or gallery["grid"]]


def describe_gallery(folder: Path, record: dict) -> dict:
    """Embed the first images of a folder with their seeds, or its grid if its images are in one file."""
    files = sorted(path for path in folder.glob("images/**/*.png") if path.stem.isdecimal())
    choices = record.get("labels") or record.get("prompts")
    choices = [str(choice) for choice in choices] if isinstance(choices, list) else []
    images, left = [], MOST_BYTES
    for path in files[:MOST_IMAGES]:
        left -= size_of(path)
        if left > 0 and (image := embed(path)):
            seed = int(path.stem)
            shows = {"shows": choices[seed % len(choices)]} if choices else {}
            images.append({"seed": seed} | shows | image)
    return {
        "name": folder.name,
        "count": len(files),
        "images": images,
        "grid": None if images else embed(folder / "grid.png"),
        "nearest": describe_nearest(folder),
    }


def describe_nearest(folder: Path) -> dict | None:
    """Embed the picture of the nearest training images, with the seeds of its rows if these are known."""
    picture, record = embed(folder / "nearest.png"), read_json(folder / NEAREST)
    if picture is None:
        return None
    record = record if isinstance(record, dict) else {}
    seeds, distances = record.get("seeds"), record.get("distances")
    rows = zip(seeds, distances, strict=False) if isinstance(seeds, list) and isinstance(distances, list) else ()
    nearest = [(number(seed), number(row[0])) for seed, row in rows if isinstance(row, list) and row]
    return picture | {"rows": [{"seed": seed, "distance": near} for seed, near in nearest if seed is not None]}


def render(runs: list[dict]) -> str:
    """Put style, script and runs into the page."""
    style, script = ((PARTS / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    hashes = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (style, script)]
    policy = (
        f"default-src 'none'; img-src data:; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "title": html.escape(", ".join(run["name"] for run in runs)),
        "policy": policy,
        "style": style,
        # Within JSON < stands only in strings; so written it can neither end the element nor begin another.
        "data": json.dumps(runs, allow_nan=False).replace("<", "\\u003c"),
        "script": script,
    }
    page = (PARTS / "page.html").read_text(encoding="utf-8")
    before, *pieces = page.split("{{")
    for piece in pieces:
        name, _, after = piece.partition("}}")
        before += parts[name] + after
    return before
