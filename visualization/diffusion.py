"""Curves over t of what a run can choose: beta schedules, timestep samplers and loss weights."""

import itertools
from contextlib import suppress
from pathlib import Path

import torch
from matplotlib.axes import Axes

from common.errors import say
from common.plots import COLOURS, NOTE, drawing, legend_beside, single_panel
from common.randomness import generator_for
from run_folder.config import TrainingConfig
from schedulers.ddpm import ExactDDPMScheduler
from schedulers.loss import TIMESTEP_SAMPLERS, build_sampler
from schedulers.timestep_samplers import TimestepSampler
from schedulers.weighting import LOSS_WEIGHTINGS, signal_to_noise, weighting_table

BATCHES, BATCH_SIZE = 800, 128  # about 100,000 timesteps, drawn as a run draws them: a sampler may look at the batch
BARS = 50
TIMESTEP = "timestep $t$"
VISIBLE_WEIGHTS = (1e-4, 1e3)  # some reach 1e-9 or 1e9 where an image begins or ends, which would squeeze the rest
PREDICTIONS = {
    "epsilon": r"error of $\epsilon$", "v_prediction": "error of $v$", "sample": "error of $x_0$",
    "mean": r"error of $\tilde\mu$",
}  # fmt: skip


def draw_betas(schedulers: dict[str, ExactDDPMScheduler], path: Path) -> Path:
    """Draw beta_t of every schedule."""
    title = "How much noise each step of the forward process adds"
    with single_panel(path, title, TIMESTEP, r"$\beta_t$", yscale="log") as axes:
        for name, scheduler in schedulers.items():
            axes.plot(scheduler.betas, label=name)
    return path


def draw_snr(schedulers: dict[str, ExactDDPMScheduler], path: Path) -> Path:
    """Draw SNR_t = a_t / (1 - a_t) of every schedule: what is left of the image in x_t."""
    title = "Signal-to-noise ratio of $x_t$: how fast the image dissolves"
    with single_panel(path, title, TIMESTEP, r"SNR$_t = \bar\alpha_t\,/\,(1 - \bar\alpha_t)$", yscale="log") as axes:
        for name, scheduler in schedulers.items():
            axes.plot(signal_to_noise(scheduler.alphas_cumprod), label=name)
        axes.axhline(1, color=NOTE, linewidth=0.8, linestyle="-")
        axes.text(len(scheduler.betas), 1.3, "as much image as noise", color=NOTE, fontsize=8, ha="right")
    return path


def build_samplers(
    schedulers: dict[str, ExactDDPMScheduler], own_sampler: str | None = None
) -> dict[str, dict[str, TimestepSampler]]:
    """Return every timestep sampler for every schedule, by name and schedule; say which cannot be built.

    `own_sampler` is one more, a class in a file that the user has named, which is run.
    """
    samplers = {}
    for name, kind in TIMESTEP_SAMPLERS.items():
        try:
            samplers[name] = {schedule: kind(scheduler.alphas_cumprod) for schedule, scheduler in schedulers.items()}
        except ValueError as error:
            say(f"the timestep sampler {name} is left out: {error}")
    if own_sampler is not None:
        options = vars(TrainingConfig(timestep_sampler=own_sampler))
        samplers[Path(own_sampler).name] = {
            schedule: build_sampler(options, scheduler.alphas_cumprod) for schedule, scheduler in schedulers.items()
        }
    return samplers


def draw_samplers(samplers: dict[str, dict[str, TimestepSampler]], seed: int, path: Path) -> Path:
    """Draw the density of every sampler under every schedule, its draws, and the weights that it gives to losses."""
    columns = min(3, len(samplers))
    rows = -(-len(samplers) // columns)
    with drawing(path, rows, columns, panel_width=4, sharex=True) as (figure, panels):
        for axes, (name, by_schedule) in zip(panels.flat, samplers.items(), strict=False):
            for colour, (schedule, sampler) in zip(itertools.cycle(COLOURS), by_schedule.items(), strict=False):
                _draw_sampler(axes, sampler, seed, colour, schedule)
            remarks = ["another objective"] * (sampler.objective == "changed") + ["adapts"] * sampler.adapts
            axes.set_title(f"{name} ({', '.join(remarks)})" if remarks else name)
            axes.set_ylim(bottom=0)
        for axes in panels.flat[len(samplers) - columns : len(samplers)]:
            axes.tick_params(labelbottom=True)
        for axes in panels.flat[len(samplers) :]:
            axes.set_visible(False)
        agree = "; one curve where the schedules agree" if len(by_schedule) > 1 else ""
        figure.suptitle(f"How often each timestep is drawn, and how much its loss then counts{agree}")
        figure.supxlabel(TIMESTEP)
        figure.supylabel("relative to uniform")
        legend_beside(panels)
    return path


def _draw_sampler(axes: Axes, sampler: TimestepSampler, seed: int, colour: str, schedule: str) -> None:
    batches = [sampler.sample(BATCH_SIZE, generator_for(seed, "timesteps", step)) for step in range(BATCHES)]
    timesteps, weights = (torch.cat(parts) for parts in zip(*batches, strict=True))
    steps = sampler.num_train_timesteps
    width = max(1, steps // BARS)
    edges = torch.tensor([*range(0, steps - width + 1, width), steps])
    bars = torch.bucketize(timesteps, edges, right=True) - 1
    counts = torch.bincount(bars, minlength=len(edges) - 1)
    density = counts / len(timesteps) * steps / edges.diff()
    weight = torch.bincount(bars, weights.double(), minlength=len(edges) - 1) / counts  # nan where nothing is drawn
    axes.stairs(density, edges, fill=True, color=colour, alpha=0.25, label=f"drawn, {schedule}")
    axes.plot(sampler.describe() * steps, color=colour, linestyle="-", label=f"density $T\\,p_t$, {schedule}")
    line = {"baseline": None, "linewidth": 1.6, "linestyle": ":"}
    axes.stairs(weight, edges, color=colour, label=f"loss weight $w_t$, {schedule}", **line)


def draw_weightings(schedulers: dict[str, ExactDDPMScheduler], path: Path) -> Path:
    """Draw the table of every loss weighting, for what the network may predict and for every schedule."""
    layout = {"rows": len(schedulers), "columns": len(PREDICTIONS), "panel_width": 4}
    with drawing(path, **layout, sharex=True, sharey=True) as (figure, panels):
        for row, (schedule, scheduler) in zip(panels, schedulers.items(), strict=True):
            for axes, (prediction_type, error) in zip(row, PREDICTIONS.items(), strict=True):
                for name in LOSS_WEIGHTINGS:
                    table = torch.full_like(scheduler.alphas_cumprod, torch.nan)
                    with suppress(ValueError):  # its paper defines none for this prediction: there is no curve to draw
                        table = weighting_table(name, scheduler.alphas_cumprod, prediction_type)
                    axes.plot(table, label=name)
                axes.set(title=f"{schedule}: {error}", yscale="log")
        panels.flat[0].set_ylim(VISIBLE_WEIGHTS)
        figure.suptitle("How much the squared error counts at each timestep, by what the network predicts")
        figure.supxlabel(TIMESTEP)
        figure.supylabel("loss weight")
        legend_beside(panels)
    return path
