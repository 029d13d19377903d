"""What a run is defined by, and what is known of it: its options, its plan, its result."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.race.plan import Entry, Race, points_of
from benchmarks.race.train import FINISHED, snapshot_of, snapshots_of
from common.errors import UserError
from common.files import write_atomically
from common.options import flags_by_option
from image_data.data_options import DataOptions
from run_folder.checkpoints import WEIGHTS, changed_settings
from run_folder.config import TrainingConfig, parse_config, resolve_batch_sizes, settings_of
from run_folder.folder import RunFolder
from schedulers.loss import build_loss, load_class
from training.network import check_network
from training.setup import build_process

# Options that the race itself sets, and those that all methods must share to be comparable.
OF_THE_RACE = (
    *("output_dir", "overwrite", "resume_from_checkpoint", "config", "dry_run", "push_to_hub", "seed"),
    *("max_train_steps", "max_train_seconds", "num_epochs", "checkpointing_steps", "checkpoints_total_limit"),
    *("save_images_steps", "save_images_epochs", "save_model_epochs", "eval_batch_size", "ddpm_num_inference_steps"),
)
OF_THE_DATA = (*DataOptions.__annotations__.keys() - {"random_flip", "center_crop", "num_workers"},)


# The options of a run.


def flags_for(race: Race, entry: Entry) -> list[str]:
    """Return the flags of a run: the race's, the method's, and nothing that costs time beside training."""
    length = race.time(entry.length)
    options = {"logger": "none", **race.training, **race.methods[entry.method]}
    if race.unit == "steps":  # until they count as many, as `in_full_steps` does
        length = math.ceil(length / batch_share(race, entry) + 3 / 4 * options.get("half_resolution_steps", 0))
    own = {
        "output_dir": str(race.runs / entry.name),
        "seed": entry.seed,
        f"max_train_{race.unit}": length,
        "checkpointing_steps": 10**9,
        "save_images_steps": 10**9,
        "eval_batch_size": 1,  # of the grid that the end of a run draws
        "ddpm_num_inference_steps": 1,
        "checkpoints_total_limit": 1,
    }
    return as_words({**options, **own})


def batch_share(race: Race, entry: Entry) -> float:
    """Return the images of a method's step as a share of those that the race is in steps of."""
    common, own = (
        resolve_batch_sizes(parse_config(as_words(options)), 1).total
        for options in (race.training, race.training | race.methods[entry.method])
    )
    return own / common


def as_words(options: dict[str, object]) -> list[str]:
    """Write options as the words of a command."""
    return [word for words in flags_by_option(options, TrainingConfig).values() for word in words]


def config_of(race: Race, entry: Entry) -> TrainingConfig:
    return parse_config(flags_for(race, entry))


def check_options(race: Race, file: Path) -> None:
    """Raise, before anything is trained, for options that no training takes, naming the method."""
    if not {"dataset_name", "train_data_dir"} & race.training.keys():
        raise UserError(f"{file}: training: names no data: dataset_name or train_data_dir")
    for place, options in {"training": {}, **{f"methods: {name}": own for name, own in race.methods.items()}}.items():
        try:
            for name in (*race.training, *options):
                if name in OF_THE_RACE:
                    raise UserError(f"{name} is set by the race itself")
            for name in options:
                if name in OF_THE_DATA:
                    raise UserError(f"{name} must be the same for all methods: it belongs under training")
            config = config_of(replace(race, methods={place: options}), Entry(place, race.seeds[0]))
            build_loss(vars(config), build_process(config))
            check_network(config)
            if config.max_train_steps is not None and config.max_train_steps <= config.half_resolution_steps:
                raise UserError(
                    f"half_resolution_steps: {config.half_resolution_steps}: as quarters of a step they take up the "
                    f"budget of {race.budget:g} steps, and images never grow"
                )
            for one in race.measurements:
                if one.num_inference_steps > config.ddpm_num_steps:
                    raise UserError(f"{one.name}: has more steps than the diffusion ({config.ddpm_num_steps})")
        except UserError as error:
            raise UserError(f"{file}: {place}: {error}") from error


# What makes a run the one that it is.


def definition(race: Race, entry: Entry) -> dict[str, object]:
    """Return what a run is defined by, besides its seed and its length, which are in its name."""
    return {
        "options": race.methods[entry.method],
        "training": race.training,
        "budget": {race.unit: race.budget},
        "threads": race.threads,
        "source": source_of(config_of(race, entry).timestep_sampler),
    }


def source_of(timestep_sampler: str) -> str | None:
    """Return a digest of a timestep sampler in a file of the user's, whatever its comments and docstrings say.

    All of the file counts, but for classes that it does not extend: another sampler may be added to the file.
    """
    if ".py:" not in timestep_sampler:
        return None
    kind = load_class(timestep_sampler)
    own = {one.__name__ for one in kind.__mro__ if one.__module__ == kind.__module__}
    tree = ast.parse(Path(timestep_sampler.rpartition(":")[0]).read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not isinstance(node, ast.ClassDef) or node.name in own]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def measured_with(race: Race) -> dict[str, object]:
    """Return what numbers depend on besides their measurement's name."""
    return {name: getattr(race, name) for name in ("reference_images", "mixed_precision", "compile")}


def changes(race: Race, entry: Entry, known: dict) -> list[str]:
    """Name what has changed since a plan or a result was written; what it does not say is taken to be the same."""
    now = definition(race, entry)
    settings = []
    for one in (known, now):
        try:
            config = config_of(replace(race, methods={entry.method: one["options"]}, training=one["training"]), entry)
        except UserError as error:  # of options that were good once
            return [str(error)]
        settings.append(settings_of(replace(config, total_batch_size=resolve_batch_sizes(config, 1).total)))
    changed = changed_settings(*settings)
    for name in ("budget", "threads"):
        if known.get(name, now[name]) != now[name]:
            changed.append(f"{name} {known[name]} -> {now[name]}")
    if known.get("source", now["source"]) != now["source"]:
        changed.append("the code of its timestep sampler")
    for name, value in measured_with(race).items():
        before = known.get("measured_with", {}).get(name, value)
        if before != value:
            changed.append(f"{name} {before} -> {value}")
    return changed


# Where a run stands.


def plan_file(race: Race, entry: Entry) -> Path:
    return race.runs / f"{entry.name}.plan" / "plan.json"


def is_trained(race: Race, entry: Entry) -> bool:
    return (race.runs / entry.name / FINISHED).exists()


def missing(race: Race, entry: Entry) -> list[tuple[float, str]]:
    """Return the time and name of each measurement that is still to be made."""
    points = points_of(race.result_of(entry) or {})
    wanted = [(time, one.name) for one in race.measurements for time in race.times(one, entry)]
    return sorted((time, name) for time, name in wanted if name not in points.get(time, {}))


def check_result(race: Race, entry: Entry) -> None:
    """Raise if the result that is there is not of this race, or cannot be completed."""
    result = race.result_of(entry)
    if not (result and result.get("points")):
        return
    remedy = f"remove {race.result_file(entry)} and it is trained and measured again"
    if changed := changes(race, entry, result):
        raise UserError(f"{entry.name} was measured with {'; '.join(changed)}: give it another name, or {remedy}")
    for time, name in missing(race, entry):
        weights = snapshot_of(race.runs / entry.name, time) / WEIGHTS
        if not (is_trained(race, entry) and weights.exists()):
            raise UserError(
                f"{entry.name}: {name} is missing at {time:g} {race.unit}, and the weights are gone: {remedy}"
            )


def make_plan(race: Race, entry: Entry) -> Path:
    """Write what the training needs to know; what there is of a run by another plan is removed."""
    file, run = plan_file(race, entry), race.runs / entry.name
    plan = {
        **definition(race, entry),
        "flags": flags_for(race, entry),
        "unit": race.unit,
        "batch_share": batch_share(race, entry),
        "snapshots": race.snapshot_times(entry),
    }
    if file.exists() and run.exists():
        known = json.loads(file.read_text(encoding="utf-8"))
        changed = changes(race, entry, known)
        if known["snapshots"] != plan["snapshots"]:
            changed.append("the times of its snapshots")
        if changed:
            print(f"{entry.name} begins again, its definition has changed: {'; '.join(changed)}", flush=True)
            shutil.rmtree(run)
    write_atomically(file, json.dumps(plan, indent=1) + "\n")
    return file


def summary_of(race: Race, entry: Entry) -> dict[str, object]:
    """Return a finished run's length, its speed, its sampler's share of the time, and where it drew in the end."""
    run = race.runs / entry.name
    numbers = json.loads((run / FINISHED).read_text(encoding="utf-8"))
    lines = RunFolder(run).read_metrics()
    speeds = sorted(line["images_per_second"] for line in lines)
    shares = [line.get("timestep_sampler_share", 0.0) for line in lines]
    return {
        "steps": numbers["step"],
        "train_seconds": round(numbers["train_seconds"], 3),
        "images_per_second": speeds[len(speeds) // 2],
        "timestep_sampler_share": sum(shares) / len(shares),
        "draws": draws_of(run, config_of(race, entry)),
        "machine": numbers.get("machine"),
    }


def draws_of(run: Path, config: TrainingConfig) -> dict[str, list[float | None]]:
    """Return the middles of the bins of log SNR, the share of the draws in each at the end, and its mean loss.

    The loss is that of the second half of the run, on whole images; of a bin without draws there is none.
    """
    lines = RunFolder(run).read_timesteps()
    first = config.half_resolution_steps + config.logging_steps  # of the lines that are of whole images alone
    whole = [line for line in lines[len(lines) // 2 :] if not config.half_resolution_steps or line["step"] >= first]
    by_bin = zip(*(line["loss"] for line in whole), strict=True)
    known = ([loss for loss in of_bin if loss is not None] for of_bin in by_bin)
    draws = {name: [round(value, 5) for value in lines[-1][name]] for name in ("log_snr", "probability")}
    return draws | {"loss": [round(fmean(losses), 5) if losses else None for losses in known]}


def forget_weights(race: Race, entry: Entry) -> None:
    """Remove the weights of snapshots that have been measured, but for the last."""
    waiting = {time for time, _ in missing(race, entry)}
    for folder, numbers in snapshots_of(race.runs / entry.name)[:-1]:
        if round(numbers["time"], 3) not in waiting:
            (folder / WEIGHTS).unlink(missing_ok=True)
