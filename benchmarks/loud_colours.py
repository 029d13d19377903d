#!/usr/bin/env python
"""Measure how loud the colours of short runs are, and what helps.

    python -m benchmarks.loud_colours digits --steps 300
    python -m benchmarks.loud_colours cifar10_16 --steps 300

The number is the variance of the mean colours of generated images over that of the training images: 1 is right, more is
loud. Trainings differ in one option each; averages of the weights and sampling methods are tried on the first of them.
The numbers go to benchmarks/results/loud_colours.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.ema_length import kept_beside
from benchmarks.short_runs import DATA, QUIET, ShortRunJudge, method_of, train_short
from common.files import write_atomically
from run_folder.saved_model import SavedModel, find_models
from training.setup import Run
from training.update import ExactEMA, PowerEMA

RESULTS = Path(__file__).parent / "results" / "loud_colours.json"
OWN_DECAY = 0.99  # of all trainings: it looks back 100 steps
TRAININGS = {
    "as it is": [],
    "log_snr": ["--timestep_sampler=log_snr", "--stratified"],
    "more mass at large t (beta 2, 1)": ["--timestep_sampler=beta", "--beta_alpha=2"],
    "v_prediction": ["--prediction_type=v_prediction"],
    "cosine schedule": ["--ddpm_beta_schedule=cosine"],
    "no warm-up of the learning rate": ["--lr_warmup_steps=0"],
}
DECAYS = (0.9, 0.98, 0.995, 0.999, 0.9999)
SAMPLERS = ("DDPM-100", "DDIM-20", "DDIM-200")


def track_more(run: Run) -> None:
    """Track other averages beside the run's own."""
    run.state.update.averages += [ExactEMA(run.state.unet, beta=one, min_value=one) for one in DECAYS]
    ramp = {"beta": 0.9999, "min_value": 0.0, "inv_gamma": 1.0, "power": 0.75}
    run.state.update.averages += [ExactEMA(run.state.unet, **ramp), PowerEMA(run.state.unet, 0.1)]


def without_clipping(model: SavedModel) -> SavedModel:
    """Return a model whose x_0 is taken as it is predicted."""
    # diffusers takes its own default for whatever is named here, whatever stands beside it.
    config = {name: value for name, value in model.scheduler_config.items() if name != "_use_default_values"}
    return replace(model, scheduler_config={**config, "clip_sample": False})


def variants_of(run: Run, model: SavedModel, folder: Path) -> Iterator[tuple[str, str, SavedModel, str]]:
    """Yield what is tried on one training: the kind, its name, the model, the sampling method."""
    for sampler in SAMPLERS:
        yield "sampling", sampler, model, sampler
    yield "sampling", "DDIM-50 without clipping", without_clipping(model), "DDIM-50"
    yield "average", "raw weights", find_models(str(folder), [], "raw")[0], "DDIM-50"
    labels = [*(f"constant {one}" for one in DECAYS), "ramp up to 0.9999", "power function of length 0.1"]
    for option, average in zip(labels, run.state.update.averages[1:], strict=True):
        kept = folder / "others" / option.replace(" ", "-")
        average.ema_model.save_pretrained(kept, safe_serialization=True)
        yield "average", option, kept_beside(model, kept), "DDIM-50"


def measure(name: str, steps: int, images: int) -> Iterator[list[dict[str, object]]]:
    """Train one run for each option and measure it; yield all rows after each."""
    rows, length = [], [f"--max_train_steps={steps}", f"--checkpointing_steps={steps}"]
    for number, (label, flags) in enumerate(TRAININGS.items()):
        folder = Path("runs") / "loud_colours" / f"{name}-{number}"
        # What is given twice counts as given last.
        given = [*DATA[name], *length, f"--ema_max_decay={OWN_DECAY}", *QUIET, *flags, f"--output_dir={folder}"]
        run = train_short(given, track_more if number == 0 else lambda run: None)
        judge = ShortRunJudge(run.config, distances=False)
        (model,) = find_models(str(folder), [], None)
        found = judge.measure(model, method_of("DDIM-50", model), images)
        seconds = round(run.state.train_seconds, 1)
        rows.append({"what": "training", "option": label, "sampler": "DDIM-50", "train_seconds": seconds, **found})
        yield rows
        for what, option, variant, sampler in variants_of(run, model, folder) if number == 0 else ():
            found = judge.measure(variant, method_of(sampler, variant), images)
            rows.append({"what": what, "option": option, "sampler": sampler, **found})
            yield rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=DATA)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--images", type=int, default=250)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for rows in measure(arguments.data, arguments.steps, arguments.images):
        results[f"{arguments.data}, {arguments.steps:,} steps"] = {"images": arguments.images, "rows": rows}
        write_atomically(RESULTS, json.dumps(results, indent=1) + "\n")
        print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
