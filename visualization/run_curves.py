"""Pictures of a run: which timesteps it drew, and how it fared on them."""

import math
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import AsinhNorm, LogNorm
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file

from common.errors import UserError, reason_of, say, user_errors
from common.options import LARGEST_INT
from common.plots import drawing, single_panel
from image_data.decode import UndecodableImage, errors_as_undecodable
from image_data.sources import spread
from run_folder.checkpoints import InvalidCheckpoint, checkpoints, step_of, verify
from run_folder.config import TrainingConfig, check_timestep_sampler, is_own_sampler, scheduler_of
from run_folder.folder import QUARTERS, RunFolder
from schedulers.loss import build_sampler, sampler_state
from schedulers.timestep_samplers import LogSNRBins

EFFECTIVE_SAMPLE_SIZE = "weight_ess"
DRAWN = ("step", *(f"loss_q{quarter}" for quarter in range(QUARTERS)), EFFECTIVE_SAMPLE_SIZE)
MOST_CURVES = 8
MOST_FRAMES, MILLISECONDS = 50, 400  # of the samples over the steps
SMOOTHED_OVER = 50  # the part of a run that a running mean covers
MOST_COLUMNS = 150  # of a picture over time; lines of a long run are averaged
MOST_DENSITY = 32.0  # as a multiple of uniform: beyond it and its inverse colours stay the same
NOTHING = "#CCCCCC"


def read_run(path: Path, own_sampler: str | None = None) -> tuple[TrainingConfig, list[dict]]:
    """Read the configuration and the metrics of a run; raise if it cannot be drawn.

    A run is data: if it was trained with a sampler in a file of the user's, that is run as `own_sampler` or not at all.
    """
    run = RunFolder(path)
    if not path.is_dir():
        raise UserError(f"--run_dir {path}: there is no such folder")
    if not run.config_file.is_file():
        raise UserError(f"--run_dir {path} is not a run: there is no config.yaml in it; name a training's output_dir")
    try:
        config = run.read_config()
    except UserError as error:
        raise UserError(f"--run_dir {path}: config.yaml in it is not a valid run configuration") from error
    if own_sampler is not None:
        if not (is_own_sampler(own_sampler) and is_own_sampler(config.timestep_sampler)):
            raise UserError(f"--timestep_sampler {own_sampler}: {path} was trained with {config.timestep_sampler}")
        config.timestep_sampler = own_sampler
    elif is_own_sampler(config.timestep_sampler):
        raise UserError(
            f"--run_dir {path}: was trained with code, {config.timestep_sampler}, which is only run if you name it: if "
            f"you trust that file, add --timestep_sampler {config.timestep_sampler}"
        )
    try:
        check_timestep_sampler(config)
    except UserError as error:
        raise UserError(f"{run.config_file}: {error}") from error
    metrics = run.read_metrics()
    if not metrics:
        file = run.metrics_file.name
        raise UserError(f"--run_dir {path}: there are no metrics in it yet ({file}); let it train first")
    for line in metrics:
        values = {"step": None, **line}
        wrong = [name for name in DRAWN if name in values and not is_number(values[name])]
        if wrong or not isinstance(values["step"], int):
            name = (wrong or ["step"])[0]
            raise UserError(f"{run.metrics_file}: has a line whose {name} is {values[name]!r}, which no training wrote")
    return config, metrics


def is_number(value: object) -> bool:
    """Return whether a value that was read can be drawn."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= LARGEST_INT)


def read_densities(folder: Path, config: TrainingConfig) -> dict[int, torch.Tensor]:
    """Read the probability of every timestep at each checkpoint of a run, by step."""
    densities = {}
    scheduler = scheduler_of(vars(config))
    shape = (int(config.channels), config.resolution, config.resolution)
    for checkpoint in checkpoints(folder):
        sampler = build_sampler(vars(config), scheduler.alphas_cumprod)
        sampler.start(shape, torch.device("cpu"))
        file = checkpoint / "sampler.safetensors"
        try:
            verify(checkpoint, (file.name,))
        except InvalidCheckpoint as error:
            if checkpoint.exists():  # a run that is being trained removes old ones
                say(f"note: {checkpoint} is left out, because it is damaged: {error}")
            continue
        try:
            sampler.load_state_dict(sampler_state(load_file(file)))
        except (OSError, SafetensorError, RuntimeError, KeyError, ValueError) as error:
            raise UserError(
                f"{file} does not fit the timestep sampler {config.timestep_sampler} ({reason_of(error)})"
            ) from error
        densities[step_of(checkpoint)] = sampler.describe()
    return densities


def draw_densities(densities: dict[int, torch.Tensor], sampler_name: str, path: Path) -> Path:
    """Draw the density over t at the checkpoints, from light (early) to dark (late)."""
    steps = list(densities)
    shown = [steps[i] for i in sorted({round(i) for i in np.linspace(0, len(steps) - 1, MOST_CURVES)})]
    title, ylabel = f"Density of '{sampler_name}' over the timesteps", r"density $T\,p_t$ (uniform: 1)"
    with single_panel(path, title, "timestep $t$", ylabel, legend_title="at step", ylim=(0, None)) as axes:
        for place, step in zip(np.linspace(0.75, 0, len(shown)), shown, strict=True):
            density = densities[step]
            axes.plot(density * len(density), color=colormaps["viridis"](place), linestyle="-", label=f"{step:,}")
    return path


def read_timesteps(path: Path, config: TrainingConfig) -> tuple[list[dict], LogSNRBins]:
    """Read what the timesteps of a run did, and the bins of log-SNR by which that is told."""
    bins = LogSNRBins(scheduler_of(vars(config)).alphas_cumprod)
    run, lines = RunFolder(path), []
    for line in run.read_timesteps():
        damaged = KeyError, TypeError, ValueError, AttributeError, OverflowError
        with user_errors(f"{run.timesteps_file}: has a line that no training wrote", *damaged):
            if not same_numbers(line["log_snr"], bins.centres):
                continue  # a run that went on from a checkpoint of another schedule has lines by other bins
            tables = np.array([line["probability"], line["loss"], *line["signals"].values()], dtype=float)
            if tables.shape[1:] != (len(bins),) or not isinstance(line["step"], int):
                raise ValueError("it needs a step, and a number for every bin")
        lines.append(line)
    return lines, bins


def same_numbers(some: list[float], others: torch.Tensor) -> bool:
    return len(some) == len(others) and np.allclose(some, others, rtol=1e-5)


def draw_over_log_snr(lines: list[dict], bins: LogSNRBins, sampler_name: str, path: Path) -> Path:
    """Draw over the steps, by log-SNR, which noise levels were drawn, how the network fared, what the sampler saw."""
    uniform = (bins.counts / bins.counts.sum()).numpy()
    density = np.array([line["probability"] for line in lines]) / uniform
    tables = {"density, as a multiple of uniform $t$": density.clip(1 / MOST_DENSITY, MOST_DENSITY)}
    tables["mean loss, unweighted"] = np.array([line["loss"] for line in lines], dtype=float)
    known = (name for line in lines for name, values in line["signals"].items() if set(values) != {None})
    for name in dict.fromkeys(known):
        signal = [line["signals"].get(name, [None] * len(bins)) for line in lines]
        tables[f"signal: {name.replace('_', ' ')}"] = np.array(signal, dtype=float)
    columns = np.array_split(np.arange(len(lines)), min(MOST_COLUMNS, len(lines)))
    steps = [0] + [lines[column[-1]]["step"] for column in columns]
    layout = {"rows": len(tables), "panel_width": 8, "aspect": 0.3}
    with drawing(path, **layout, sharex=True, sharey=True) as (figure, panels):
        for axes, (title, table) in zip(panels.flat, tables.items(), strict=True):
            finite = np.ma.masked_invalid(table)
            means = np.ma.stack([finite[column].mean(0) for column in columns], axis=1).filled(np.nan)
            edges, values = bins.with_gaps(means, np.nan)
            colours, scale = (colours_around_1 if axes is panels[0, 0] else colours_for)(values)
            bar = figure.colorbar(axes.pcolormesh(steps, edges, values, **colours), ax=axes, pad=0.01, **scale)
            bar.ax.minorticks_off()
            axes.set(title=title, facecolor=NOTHING)
            axes.grid(visible=False)
        panels[-1, 0].set_xlabel("step")
        figure.supylabel("log-SNR: noise below, image above")
        figure.suptitle(f"The noise levels that '{sampler_name}' trained on (grey: none drawn, or not known yet)")
    return path


def colours_around_1(values: np.ndarray) -> tuple[dict, dict]:
    """Choose colours and a scale for factors: the same for twice and for half."""
    powers = max(1, math.ceil(np.nanmax(np.abs(np.log2(values)))))
    ticks = 2.0 ** np.arange(-powers, powers + 1)
    scale = {"ticks": ticks, "format": lambda factor, _: f"{factor:g}" if factor >= 1 else f"1/{1 / factor:g}"}
    return {"norm": LogNorm(ticks[0], ticks[-1]), "cmap": "RdBu_r"}, scale


def colours_for(values: np.ndarray) -> tuple[dict, dict]:
    """Choose colours by order of magnitude; where there are negative values, from 0 both ways."""
    if np.nanmin(values) > 0:
        return {"norm": LogNorm()}, {}
    size = np.abs(values)
    most = np.nanmax(size) or 1.0
    return {"norm": AsinhNorm(max(np.nanmedian(size), 1e-3 * most), -most, most), "cmap": "RdBu_r"}, {}


def draw_losses_by_quarter(metrics: list[dict], num_train_timesteps: int, path: Path) -> Path:
    """Draw loss_q0 .. loss_q3: the error where t is small is not the error where t is large, and moves otherwise."""
    edges = [math.ceil(quarter * num_train_timesteps / QUARTERS) for quarter in range(QUARTERS + 1)]
    title, ylabel = "Mean loss of each quarter of the timesteps", "squared error, unweighted"
    with single_panel(path, title, "step", ylabel, legend_title="timestep $t$", yscale="log") as axes:
        for quarter in range(QUARTERS):
            if any(f"loss_q{quarter}" in line for line in metrics):  # otherwise the sampler never draws there
                plot_metric(axes, metrics, f"loss_q{quarter}", f"{edges[quarter]} to {edges[quarter + 1] - 1}")
    return path


def draw_effective_sample_size(metrics: list[dict], path: Path) -> Path:
    """Draw (sum w)^2 / (n sum w^2) of the batches' weights: the share of a batch that an unweighted one would need."""
    title = "Effective sample size: what the weights leave of a batch"
    with single_panel(path, title, "step", r"$(\Sigma w)^2\,/\,(n\,\Sigma w^2)$", ylim=(0, 1.05)) as axes:
        plot_metric(axes, metrics, EFFECTIVE_SAMPLE_SIZE)
    return path


def read_samples(folder: Path) -> list[Image.Image]:
    """Read a run's sample grids in the order of their steps, evenly spread where there are many, all of one size."""
    grids, frames = list(RunFolder(folder).grids().values()), []
    for path in [grids[-1 - place] for place in reversed(spread(len(grids), MOST_FRAMES))]:
        with user_errors(f"{path} cannot be read", UndecodableImage), errors_as_undecodable():
            frames.append(Image.open(path, formats=["PNG"]).convert("RGB"))
    size = tuple(max((frame.size[side] for frame in frames), default=0) for side in (0, 1))
    same = [Image.new("RGB", size, "white") for _ in frames]  # the raw weights are drawn in the beginning only
    for frame, whole in zip(frames, same, strict=True):
        whole.paste(frame, (0, 0))
    return same


def plot_metric(axes: Axes, metrics: list[dict], name: str, label: str | None = None) -> None:
    """Plot a metric over the steps, and its running mean in front of it where there is enough for one."""
    steps, values = np.array([(line["step"], line[name]) for line in metrics if name in line]).T
    width = len(values) // SMOOTHED_OVER | 1  # odd, so that its centre is a step
    smooth = np.convolve(values, np.full(width, 1 / width), mode="valid")
    (curve,) = axes.plot(steps[width // 2 :][: len(smooth)], smooth, label=label)
    if width > 1:
        faint = {"linestyle": "-", "linewidth": 0.8, "alpha": 0.2, "zorder": 1}
        axes.plot(steps, values, color=curve.get_color(), **faint)
