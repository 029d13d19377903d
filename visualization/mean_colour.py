"""The error of an image's mean colour over t: where it is large, a short run paints in loud colours.

The mean of x_t over its D pixels is sqrt(a_t) m + sqrt((1 - a_t) / D) eta, with m the mean colour of the image. Whoever
sees only that, and knows that mean colours have the covariance S, is left with the error s S / (S + s) on every
principal axis, s = (1 - a_t) / (a_t D). A network should do no worse.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from common.errors import UserError, say
from common.plots import COLOURS, NOTE, drawing
from common.progress import progress_bar
from common.randomness import derive_seed, standard_normal
from image_data.sources import load_images, splits_of
from run_folder.config import TrainingConfig
from run_folder.saved_model import SavedModel, find_models
from schedulers.ddpm import ExactDDPMScheduler
from schedulers.denoising import Predict, network_predict
from visualization.dissolving import decode_images

KNOWN_IMAGES = 512  # whose mean colours say how much these vary
MEASURED_IMAGES = 64
TIMESTEPS = 25
MEASURED_AT_ONCE = 8  # images: enough to keep a device busy, few enough for the memory beside a training
NOISE_KEY = derive_seed("mean colour")
LOUDEST = "#D55E00"


@dataclass
class MeanColours:
    """How the mean colours of images are distributed, in float64."""

    mean: torch.Tensor  # [channels]
    covariance: torch.Tensor
    pixels: int  # of an image

    @classmethod
    def of_images(cls, images: torch.Tensor) -> "MeanColours":
        """Take them of images in [-1, 1]."""
        colours = colours_of(images)
        return cls(colours.mean(0), torch.atleast_2d(colours.T.cov()), images[0, 0].numel())

    def ideal_error(self, alphas_cumprod: torch.Tensor) -> torch.Tensor:
        """Return the least squared error at each noise level, given the mean of x_t, if they are Gaussian."""
        of_noise = ((1 - alphas_cumprod) / (alphas_cumprod * self.pixels))[:, None]
        variances = torch.linalg.eigvalsh(self.covariance).clamp(min=0)
        return (variances * of_noise / (variances + of_noise)).sum(1)


def colours_of(images: torch.Tensor) -> torch.Tensor:
    """Return the mean of every channel [n, channels], in float64."""
    return images.double().flatten(2).mean(2)


@torch.no_grad()
def colour_errors(
    predict: Predict, scheduler: ExactDDPMScheduler, images: torch.Tensor, timesteps: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the mean squared error of the mean colour of the predicted x_0, at each timestep.

    `predicted` is what the network says, `clipped` what enters a step of the sampling.
    """
    rows, errors = torch.arange(len(images), device=images.device), {"predicted": [], "clipped": []}
    unclipped = ExactDDPMScheduler.from_config(scheduler.config, clip_sample=False)
    for t in progress_bar(iterable=timesteps.tolist(), desc="Errors of mean colours", leave=False):
        for part in rows.split(MEASURED_AT_ONCE):
            noise = standard_normal(NOISE_KEY, part, t, images.shape[1:])
            x_t = scheduler.add_noise(images[part], noise, torch.full_like(part, t))
            output = predict(x_t, torch.tensor(t, device=images.device))
            seen = {
                "predicted": unclipped.predict_original(output, t, x_t),
                "clipped": scheduler.predict_original(output, t, x_t),
            }
            for name, original in seen.items():
                errors[name].append((colours_of(original) - colours_of(images[part])).square().sum(1))
    return {name: torch.cat(of_all).view(len(timesteps), -1).mean(1).cpu() for name, of_all in errors.items()}


def read_parts(path: Path, config: TrainingConfig) -> tuple[list[SavedModel], torch.Tensor, str] | None:
    """Return what the picture of a run needs, its `read_models` and `read_images`; None if some of it is not there."""
    try:
        return read_models(path), *read_images(config)
    except UserError as error:
        say(f"note: the error of the mean colour is not drawn: {error}")
        return None


def read_models(path: Path) -> list[SavedModel]:
    """Return the newest weights of a run, the moving average first."""
    (first,) = find_models(str(path), [], None)
    if first.condition is not None:
        raise UserError("the network takes a condition")
    both = first.weights == "ema" and first.step is not None
    return [first, *(find_models(str(path), [], "raw") if both else [])]


def read_images(config: TrainingConfig) -> tuple[torch.Tensor, str]:
    """Decode images of the run's data, evenly spread, of the test split if there is one; return them and its name."""
    split = "test" if "test" in splits_of(config) else "train"
    few = min(config.max_train_samples or KNOWN_IMAGES, KNOWN_IMAGES)
    source = load_images(replace(config, max_train_samples=few), split)
    images = decode_images(source, config.resolution, int(config.channels))
    if len(images) < 2 or colours_of(images).var(0).sum() == 0:
        raise UserError(f"all images of {source} have the same mean colour")
    return images, split


def draw_mean_colour(models: list[SavedModel], images: torch.Tensor, split: str, path: Path) -> Path:
    """Draw the error over t, as a share of the variance of mean colours: 1 is to know nothing of the image."""
    known, device = MeanColours.of_images(images), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scheduler = models[0].scheduler
    total = len(scheduler.betas)
    timesteps = torch.linspace(0, total - 1, min(TIMESTEPS, total)).round().long()
    measured = images[:: max(1, len(images) // MEASURED_IMAGES)][:MEASURED_IMAGES].to(device)
    variance = known.covariance.trace()
    ideal = known.ideal_error(scheduler.alphas_cumprod[timesteps]) / variance
    with drawing(path, panel_width=7) as (_, panels):
        axes = panels.item()
        for model, colour in zip(models, COLOURS, strict=False):
            network = model.load(device)
            found = colour_errors(network_predict(network), scheduler, measured, timesteps)
            share = {name: errors / variance for name, errors in found.items()}
            axes.plot(timesteps, share["clipped"], color=colour, label=f"{model.weights}, clipped as in sampling")
            axes.plot(timesteps, share["predicted"], ":", color=colour, label=f"{model.weights}, as predicted")
            if model is models[0]:
                over = share["clipped"] > 1
                axes.fill_between(timesteps, 1, share["clipped"], where=over, color=LOUDEST, alpha=0.25, linewidth=0)
        axes.axhline(1, color=NOTE, linewidth=1, linestyle="--", label="the data set's mean colour, whatever the image")
        axes.plot(
            timesteps, ideal, color="black", linewidth=1, linestyle="--", label="best from the mean of $x_t$ alone"
        )
        axes.set(yscale="log", xlabel="timestep $t$", ylabel="squared error / variance of mean colours")
        axes.set_ylim(max(ideal.min().item() / 3, 1e-6), None)
        where = f"step {models[0].step:,}" if models[0].step is not None else "the pipeline"
        axes.set_title(f"Error of the mean colour of $x_0$ at {where}, {len(measured)} images ({split})")
        axes.legend(fontsize=8)
    return path
