"""The run's folder: the names of its files, how they are read and written, and checks before anything is made in it."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from common.errors import UserError, user_errors
from common.files import (
    LOCK_FILE,
    check_folder,
    first_existing,
    follow_umask,
    in_turn,
    lock,
    replace_folder,
    write_atomically,
)
from common.interruption import fault_point
from common.options import UniqueKeyLoader, facts_of, flags_of, read_options
from run_folder.checkpoints import (
    CONDITION_FILE,
    POWER_LENGTHS,
    PREFIX,
    SAVED,
    SNAPSHOTS,
    STATE,
    WEIGHTS,
    changed_settings,
    checkpoints,
    discard_snapshots,
    find_checkpoint,
    free_name,
    goes_back,
    is_own,
    named_folder,
    newest,
    read_file,
    set_aside,
    snapshot_files,
    step_in,
    step_of,
)
from run_folder.config import ConditionalConfig, TrainingConfig, settings_of

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from common.processes import Processes
    from conditions.condition import Condition

logger = logging.getLogger(__name__)

# What a run and its evaluation write, besides checkpoints and logs.
CONFIG, AUDIT, METRICS, TIMESTEPS = "config.yaml", "audit.json", "metrics.jsonl", "timesteps.jsonl"
PIPELINE, CARD, SAMPLES, REPORT = "model_index.json", "README.md", "samples", "report.html"
PROFILE_TRACE, PROFILE_TABLE = "profile.json", "profile.txt"
FEW_IMAGES = 10_000  # a Fréchet distance of fewer is far above that of many
RESULTS, BEST_SCORES, PICTURES = "evaluation_results.csv", "best_scores.csv", "*_vs_*.png"
# Two rows of results are on one line if they agree in these columns and in the number of images.
METHOD = ("weights", "sampler", "steps", "settings", "reference", "reference_fingerprint", "precision")
SCORES = ("metric", "best", "step", "weights", "sampler", "steps", "settings", "reference")  # shown of the best
# A folder of generated images; in a run they are below `generated`.
GENERATED, RECORD, NEAREST = "generated", "samples.json", "nearest.json"
LIKELIHOOD_TABLE, LIKELIHOODS, FIGURES = "likelihood.csv", "likelihood", "figures"
BEST, BEST_OF = "best", "best.json"  # the best checkpoint, and in it what it is the best of
PIPELINE_FOLDERS = ("unet", "scheduler", "text_encoder", "tokenizer")
PUSHED = (PIPELINE, CONDITION_FILE, "conditional_pipeline.py", CARD, CONFIG, AUDIT, METRICS, TIMESTEPS)
PUSHED += (RESULTS, BEST_SCORES, PICTURES)
TRACKERS = "trackers.json"  # under which names trackers know the run
BEGUN = ".begun"  # which job has overwritten a run, or gone back to an earlier step of it
NOT_PUSHED = (
    *(LOCK_FILE, f"{PREFIX}*", f".{PREFIX}*", ".*.tmp", *(f".{name}.old" for name in (*PIPELINE_FOLDERS, BEST))),
    *("evaluation_results.json", "evaluation_per_class.csv", REPORT, TRACKERS, SNAPSHOTS, BEST),
    *(PROFILE_TRACE, PROFILE_TABLE, BEGUN, f"{SAMPLES}/*.abandoned*"),
)
# What else may be in a run's folder, and does not make it one.
ADDED = (GENERATED, LIKELIHOOD_TABLE, LIKELIHOODS, FIGURES, "*.abandoned*")
PIPELINE_STEP = "_step"  # in the pipeline's index, where diffusers ignores names with a leading underscore
ROUNDING = 0.001  # seconds, of the training time in a line of metrics
QUARTERS = 4  # of the timesteps, whose losses a line of metrics tells apart: loss_q0 to loss_q3


class RunFolder:
    """A run on the disk. No other module knows the names of its files."""

    def __init__(self, path: Path | str):
        self.path = path = Path(path)
        self.config_file = path / CONFIG
        self.audit_file = path / AUDIT
        self.metrics_file = path / METRICS
        self.timesteps_file = path / TIMESTEPS
        self.samples = path / SAMPLES
        self.condition_file = path / CONDITION_FILE
        self.pipeline_file = path / PIPELINE
        self.network_folder = path / "unet"  # of the pipeline
        self.card_file = path / CARD
        self.results_file = path / RESULTS
        self.best_scores_file = path / BEST_SCORES
        self.generated = path / GENERATED
        self.best = path / BEST
        self.report_file = path / REPORT
        self.trackers_file = path / TRACKERS
        self.profile_trace, self.profile_table = path / PROFILE_TRACE, path / PROFILE_TABLE

    def grid_file(self, step: int) -> Path:
        return self.samples / f"step-{step}.png"

    def grids(self) -> dict[int, Path]:
        """Return the sample grids by their steps, in order."""
        steps = [path.stem.removeprefix("step-") for path in self.samples.glob("step-*.png")]
        return {step: self.grid_file(step) for step in sorted(int(step) for step in steps if step.isdecimal())}

    def newest_grid(self) -> Path | None:
        return next(reversed(self.grids().values()), None)

    def pipeline_step(self) -> int | None:
        """Return the step whose weights the pipeline holds, if there is one that a run wrote."""
        step = self._pipeline_index().get(PIPELINE_STEP) if (self.network_folder / WEIGHTS).is_file() else None
        return step if isinstance(step, int) else None

    @property
    def is_ours(self) -> bool:
        """Return whether this project wrote the pipeline: a run, or import_weights.py, which knows no step."""
        return PIPELINE_STEP in self._pipeline_index()

    def _pipeline_index(self) -> dict[str, object]:
        try:
            index = json.loads(self.pipeline_file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return index if isinstance(index, dict) else {}

    @property
    def is_run(self) -> bool:
        return self.metrics_file.exists() and self.config_file.exists()

    def read_config(self) -> TrainingConfig:
        """Read the options of the run, a `ConditionalConfig` if train_conditional.py wrote them."""
        try:
            values = yaml.load(self.config_file.read_text(encoding="utf-8"), UniqueKeyLoader)
            kind = ConditionalConfig if "condition" in values else TrainingConfig
            known = facts_of(kind)
            from_file = {name: flags_of(name, value, kind) for name, value in values.items() if name in known}
            return read_options(kind, from_file)
        except OSError as error:
            raise UserError(f"{self.path} is not a run: {CONFIG} cannot be read ({error.strerror})") from error
        except (yaml.YAMLError, ValueError, AttributeError, TypeError, UserError) as error:
            reason = f" ({error})" if isinstance(error, UserError) else ""
            raise UserError(f"{self.config_file} is not a valid run configuration{reason}") from error

    def read_metrics(self) -> list[dict]:
        return read_lines(self.metrics_file)

    def read_timesteps(self) -> list[dict]:
        """Read what the timesteps did, by bin of log-SNR: a line for each one of metrics."""
        return read_lines(self.timesteps_file)

    def read_results(self) -> list[dict[str, str]]:
        """Read what evaluate.py has measured of this run, but no single sets of a repeated measurement."""
        return without_parts(read_table(self.results_file, METHOD))

    def read_best_scores(self) -> list[dict[str, str]]:
        """Read the best of every metric and method that evaluate.py has found for this run."""
        rows = read_table(self.best_scores_file, SCORES)
        return [row for row in rows if as_number(row["best"]) is not None]

    def tracker_id(self, tracker: str) -> str:
        """Return the id under which a tracker knows this run; of a run that it does not know yet, a new one."""
        known = json.loads(self.trackers_file.read_text(encoding="utf-8")) if self.trackers_file.exists() else {}
        if tracker not in known:
            known[tracker] = secrets.token_hex(4)
            write_atomically(self.trackers_file, json.dumps(known) + "\n")
        return known[tracker]

    def write_condition(self, condition: Condition) -> None:
        """Write the parts of the pipeline that a condition adds and that do not change during training."""
        text = json.dumps(condition.description, indent=2)
        is_written = self.condition_file.exists() and self.condition_file.read_text(encoding="utf-8") == text
        if condition.description is None or is_written:
            return
        from conditions.condition import PIPELINE_CODE

        for name, part in condition.parts.items():
            aside = self.path / f".{name}.tmp"
            shutil.rmtree(aside, ignore_errors=True)
            part.save_pretrained(aside)
            follow_umask(aside)
            replace_folder(aside, self.path / name)
        shutil.copyfile(PIPELINE_CODE, self.path / PIPELINE_CODE.name)
        write_atomically(self.condition_file, text)  # last: its presence means that the rest is complete

    def write_pipeline(self, pipeline: DiffusionPipeline, step: int, entries: dict[str, object]) -> None:
        """Make this folder the pipeline of a step, with these entries in its index besides its own."""
        aside = self.path / ".pipeline.tmp"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            pipeline.save_pretrained(aside, safe_serialization=True)
            follow_umask(aside)
            index = add_to_index(aside, entries | {PIPELINE_STEP: step})
            for part in ("unet", "scheduler"):
                replace_folder(aside / part, self.path / part)
                fault_point("pipeline")
            index.replace(self.pipeline_file)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def add_to_index(pipeline: Path, entries: dict[str, object]) -> Path:
    """Add entries to the index of a pipeline, and return the file."""
    index = pipeline / PIPELINE
    entries = json.loads(index.read_text(encoding="utf-8")) | entries
    index.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    return index


def read_lines(path: Path) -> list[dict]:
    """Read a file of JSON lines; one that is damaged, or being written while this reads, is left out."""
    lines = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with suppress(ValueError, RecursionError):
            lines.append(json.loads(line))
    return [line for line in lines if isinstance(line, dict)]


def read_table(path: Path, needed: Iterable[str] = ()) -> list[dict[str, str]]:
    """Read a CSV file; without these columns it has no rows, and a line of another length is left out."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if None not in row and None not in row.values()]
    except (OSError, ValueError, csv.Error):
        return []
    return [row for row in rows if row.keys() >= set(needed)]


def as_number(text: object) -> float | None:
    """Return a cell as a finite number; None if it is not one."""
    try:
        return value if math.isfinite(value := float(text)) else None
    except (TypeError, ValueError, OverflowError):
        return None


def is_repeated(row: Mapping[str, object]) -> bool:
    """Return whether a row of results has means over several sets of images."""
    return re.search(r"(^| )repeats=\d+$", str(row["settings"])) is not None


def without_parts(rows: list[dict]) -> list[dict]:
    """Leave out rows of a set of images that belongs to several: these are shown by their mean."""

    def of_set(row: dict) -> tuple:
        settings = re.sub(r" ?repeats=\d+$", "", str(row["settings"] or ""))
        others = (name for name in row if "@" not in name and name not in ("settings", "images", "train_seconds"))
        return settings, *((name, row[name]) for name in sorted(others))

    means = {of_set(row) for row in rows if is_repeated(row)}
    parts = (not is_repeated(row) and of_set(row) in means for row in rows)
    return [
        row
        for row, is_part in zip(rows, parts, strict=True)
        if not is_part and not re.search(r"(^| )seeds=\d+-\d+$", str(row["settings"]))
    ]


def check_disk(config: TrainingConfig, num_parameters: int) -> None:
    """Raise if not even two checkpoints fit: the one that is kept while the next is written."""
    free = shutil.disk_usage(first_existing(Path(config.output_dir))).free
    # Raw weights, moving averages and the two moments of Adam, four bytes each.
    checkpoint = num_parameters * (20 if config.ema == "power" else 16)
    if free < 2 * checkpoint:
        raise UserError(
            f"--output_dir {config.output_dir}: {_size(free)} are free on its disk, but a checkpoint takes "
            f"{_size(checkpoint)} and two must fit; free some space or choose another disk"
        )
    kept = 0
    if config.keep_every and config.max_train_seconds is None:  # else nobody knows how many steps there will be
        kept = config.max_train_steps // math.lcm(config.keep_every, config.checkpointing_steps)
    wanted = (config.checkpoints_total_limit + 1 + kept) * checkpoint
    if config.ema == "power":
        # Two averages in float16, two bytes each.
        count, snapshot = -(-config.max_train_steps // config.checkpointing_steps), num_parameters * 4
        logger.info(
            f"--ema power: {count} snapshots of the averages of length {' and '.join(map(str, POWER_LENGTHS))}, one "
            f"every {config.checkpointing_steps} steps (--checkpointing_steps), will take {_size(count * snapshot)} "
            f"in {Path(config.output_dir) / SNAPSHOTS}; checkpoints are removed, these are not"
        )
        wanted += count * snapshot
    if free < wanted:
        logger.warning(
            f"{_size(free)} are free on the disk of {config.output_dir}; what the run will keep there takes "
            f"{_size(wanted)}: consider a lower --checkpoints_total_limit{' or a larger --keep_every' * (kept > 0)}"
        )


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GB" if count >= 2**30 else f"{count / 2**20:.0f} MB"


def check_output_dir(config: TrainingConfig) -> None:
    """Raise, before the work starts, if the run could not be written or would overwrite something else."""
    path = Path(config.output_dir)
    if not check_folder(path):
        return
    for name in (SAMPLES, BEST, *PIPELINE_FOLDERS, config.logging_dir):
        if first_existing(path / name).is_file():
            raise UserError(f"--output_dir {path}: {first_existing(path / name)} is a file where a run has a folder")
    for name in (CONFIG, METRICS, TIMESTEPS, PIPELINE, CARD, LOCK_FILE):
        if (path / name).exists() and not (path / name).is_file():  # to read a pipe would wait for ever
            kind = "a folder" if (path / name).is_dir() else "a pipe or a device"
            raise UserError(f"--output_dir {path}: {path / name} is {kind} where a run has a file")
    if not RunFolder(path).is_run:
        if foreign := sorted(entry.name for entry in path.iterdir() if not is_of_a_run(entry.name, config)):
            listed = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
            raise UserError(
                f"--output_dir {path}: holds files that are not of a run ({listed}); choose an empty or new folder"
            )
    elif config.resume_from_checkpoint == "none" and not config.overwrite:
        raise UserError(
            f"--output_dir {path} holds a run already; continue it with --resume_from_checkpoint latest, "
            f"delete it with --overwrite, or choose another folder"
        )


def is_of_a_run(name: str, config: TrainingConfig) -> bool:
    """Return whether a run writes a file or folder of this name."""
    patterns = (*PUSHED, *PIPELINE_FOLDERS, SAMPLES, *NOT_PUSHED, Path(config.logging_dir).parts[0])
    return any(fnmatch(name, pattern) for pattern in patterns)


def open_run(config: TrainingConfig, processes: Processes) -> Path | None:
    """Let the main process make or take the run's folder; return the checkpoint to go on from, if there is one."""
    checkpoint = None
    if processes.is_main:
        path = Path(config.output_dir)
        with user_errors(f"--output_dir {path}: cannot be written", OSError):
            if path.exists():
                lock(path)
            config = without_repeating(config)
            checkpoint = find_checkpoint(config)
            if config.overwrite and path.exists():
                remove_run(config)
            elif not is_own(checkpoint, config):
                check_nothing_is_trained_over(config)
            path.mkdir(parents=True, exist_ok=True)
            lock(path)
            if config.overwrite or config.resume_from_checkpoint == "none":
                write_atomically(path / BEGUN, what_begins(config))
        if checkpoint is None and RunFolder(path).is_run:
            logger.info("There is no checkpoint in %s: the run starts at step 0", path)
    checkpoint = processes.broadcast(checkpoint)
    if checkpoint is not None and not checkpoint.is_dir():
        raise UserError(f"{checkpoint}: process {processes.index} cannot see it; all processes must share this folder")
    return checkpoint


def total_batch_of_run(config: TrainingConfig) -> int | None:
    """Return the images in a step of the checkpoint that a training goes on from, if it is one of its own run."""
    config = without_repeating(config)
    if config.overwrite or config.resume_from_checkpoint == "none":
        return None
    checkpoint = named_folder(config) if goes_back(config) else newest(Path(config.output_dir))
    # One that is damaged is set aside, or an error, when it is loaded.
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        return None if checkpoint is None else read_file(checkpoint, STATE)["settings"]["total_batch_size"]
    return None


def go_on_from(checkpoint: Path | None, config: TrainingConfig) -> None:
    """Clear the run's folder, once the checkpoint is loaded, of files from later steps that it will make again."""
    path = Path(config.output_dir)
    step = step_in(checkpoint) if is_own(checkpoint, config) else 0
    if goes_back(without_repeating(config)):
        abandon_after(path, step)
        write_atomically(path / BEGUN, what_begins(config))
    discard_snapshots(path, after_step=step)
    for unfinished in RunFolder(path).samples.glob(".*.tmp"):  # of a process that was killed
        unfinished.unlink()


def without_repeating(config: TrainingConfig) -> TrainingConfig:
    """Return the configuration of a job, which must not overwrite or go back again if torchrun or SLURM restarts it."""
    path, wanted = Path(config.output_dir), config.resume_from_checkpoint
    is_restart = any(os.environ.get(name, "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    begun = path / BEGUN
    if not (is_restart and begun.is_file() and begun.read_text(encoding="utf-8") == what_begins(config)):
        return config
    if goes_back(config) and max(map(step_of, checkpoints(path)), default=0) <= step_in(named_folder(config)):
        return config  # it has not saved anything since
    begins_elsewhere = config.overwrite and wanted != "none"
    return replace(config, overwrite=False, resume_from_checkpoint=wanted if begins_elsewhere else "latest")


def what_begins(config: TrainingConfig) -> str:
    """Describe a job and what it does before its first step, in the form that the run's folder stores."""
    request = {"overwrite": config.overwrite, "resume_from_checkpoint": config.resume_from_checkpoint}
    return json.dumps({"job": this_job(), **request})


def this_job() -> str:
    """Name the job that this process belongs to, by a name that stays when the job is started again."""
    if job := os.environ.get("SLURM_JOB_ID"):
        return f"SLURM job {job}"
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # torchrun says "none" unless it is told an id
    return f"torchrun {run}" if run != "none" else f"process {os.getppid()} on {platform.node()}"


def abandon_after(path: Path, step: int) -> None:
    """Rename everything from later steps, which no longer belongs to this run once it continues from here."""
    run = RunFolder(path)
    later = [checkpoint for checkpoint in checkpoints(path) if step_of(checkpoint) > step]
    later += [grid for number, grid in run.grids().items() if number > step]
    later += [snapshot for number, snapshot in snapshot_files(path).items() if number > step]
    later += [run.best] if (run.best / STATE).is_file() and step_in(run.best) > step else []
    with in_turn(path):  # an evaluation may be about to add a row
        tables = {table: rows_up_to(step, table) for table in (run.results_file, run.best_scores_file)}
        if later:
            names = ", ".join(str(entry.relative_to(path)) for entry in later)
            logger.warning("The run goes back to step %d; renamed to .abandoned: %s", step, names)
        for entry in later:
            set_aside(entry, "abandoned")
        for table, text in tables.items():
            if text is not None:
                shutil.copyfile(table, free_name(table, "abandoned"))
                write_atomically(table, text)
        for lines in (run.metrics_file, run.timesteps_file):  # which the training itself will shorten
            if any(line.get("step", 0) > step for line in read_lines(lines)):
                shutil.copyfile(lines, free_name(lines, "abandoned"))


def rows_up_to(step: int, table: Path) -> str | None:
    """Return a table without the rows of later steps; None if there are none, or no table."""
    if not table.is_file():
        return None
    damaged = user_errors(f"{table} cannot be read: move it away", OSError, ValueError, IndexError, csv.Error)
    with damaged, table.open(encoding="utf-8", newline="") as file:
        names, *rows = csv.reader(file)
        column = names.index("step")
        kept = [row for row in rows if int(row[column] or 0) <= step]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([names, *kept])
    return text.getvalue() if len(kept) < len(rows) else None


def check_nothing_is_trained_over(config: TrainingConfig) -> None:
    """Raise if the folder holds a run without a checkpoint, unless it is this run, killed before it saved any."""
    run = RunFolder(config.output_dir)
    left = [path for path in (run.pipeline_file, run.network_folder, run.card_file) if path.exists()]
    left = [path.name for path in [*sorted(run.path.glob(f"{PREFIX}*")), *left]]
    if lines := run.read_metrics():
        had_checkpoint = (run.path / SAVED).exists() or not run.config_file.exists()
        changed = [] if had_checkpoint else changed_settings(settings_of(run.read_config()), settings_of(config))
        if left or had_checkpoint or changed:
            other = f" of a run with other settings ({'; '.join(changed)})" if changed else ""
            left.append(f"{METRICS} up to step {lines[-1].get('step')}{other}")
    if left:
        raise UserError(
            f"--output_dir {run.path} holds {', '.join(left)}, but no valid checkpoint to continue from to step "
            f"{config.max_train_steps}: restore one, choose another folder, or start over with "
            f"--overwrite, which deletes the run"
        )


def completed_step(config: TrainingConfig) -> int | None:
    """Return the step of a run that is complete, as its pipeline says, and whose checkpoints have been deleted."""
    config, run = without_repeating(config), RunFolder(config.output_dir)
    step, starts_anew = run.pipeline_step(), config.overwrite or config.resume_from_checkpoint != "latest"
    if step is None or starts_anew or not run.is_run or any(run.path.glob(f"{PREFIX}*")):
        return None
    seconds = [line["train_seconds"] for line in run.read_metrics() if line.get("step") == step]
    if not is_over(config, step, max(seconds, default=0)):
        return None
    if changed_settings(settings_of(run.read_config()), settings_of(config)):
        return None
    logger.info("%s is complete; its checkpoints have been deleted, and are not needed", run.path)
    return step


def is_over(config: TrainingConfig, step: int, train_seconds: float) -> bool:
    """Return whether a run that is at this step, after so much training, has come to its end."""
    limit = config.max_train_seconds
    return step >= config.max_train_steps or (limit is not None and train_seconds + ROUNDING >= limit)


def remove_run(config: TrainingConfig) -> None:
    """Remove what a run writes, and what other scripts add to it, and nothing else that may be in its folder."""
    run = RunFolder(config.output_dir)
    added = ADDED if run.is_run else ()
    for entry in run.path.iterdir():
        is_added = any(fnmatch(entry.name, pattern) for pattern in added)
        if entry.name != LOCK_FILE and (is_added or is_of_a_run(entry.name, config)):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def is_of_few_images(column: str) -> bool:
    """Return whether a column of the results is a Fréchet distance of too few images to compare with papers."""
    name, _, count = column.partition("@")
    return re.match(r"(s?fid|fd)(_|$)", name) is not None and count.isdecimal() and int(count) < FEW_IMAGES
