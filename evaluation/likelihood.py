"""The negative log-likelihood of real images, in bits per dimension, as the paper counts it (Ho et al. 2020).

The bound (eq. 5) is a sum: the prior term KL(q(x_T | x_0) || N(0, 1)), KL(q(x_t-1 | x_t, x_0) || p(x_t-1 | x_t)) for
every step but the last, and for that -log p(x_0 | x_1), a Gaussian integrated over each grey level (eq. 13). Timesteps
count from 0 as elsewhere here: the step that starts at t = 0 makes the image.

Given x_t, both means of a step are the same function of x_0. So a step depends on the network only through the squared
error of the x_0 that it sees: one pass over the images gives the bound for both variances, and the distortion. A
learned variance is the network's own; its bound is summed in the same pass.

A network with a condition is given the class or the caption of each image: these are bits per dimension given that.
"""

import csv
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch

from common.errors import UserError, user_errors
from common.files import check_folder, in_turn, write_atomically
from common.machine import default_num_workers, fits_in_memory, to_device
from common.plots import COLOURS, drawing
from common.processes import Processes
from common.progress import progress_bar
from common.randomness import derive_seed, standard_normal
from conditions.condition import ClassCondition
from conditions.guidance import GenerationCondition, Guidance, prompt_condition
from evaluation.evaluate_options import EvaluationOptions
from evaluation.image_sets import EncodedImages, batches_of
from evaluation.results import as_csv, as_text
from generation.engine import InferenceSettings, Job, RunningNetwork, choose_batch_size, prefers_channels_last
from generation.generate_options import ConditionOptions
from image_data.annotations import fill_templates, find_captions, find_labels
from image_data.data_options import DataOptions
from image_data.sources import load_split, splits_of, spread
from run_folder.config import ConditionalConfig, TrainingConfig
from run_folder.folder import LIKELIHOOD_TABLE, LIKELIHOODS, RunFolder
from run_folder.saved_model import SavedModel, find_models
from schedulers.ddpm import FIXED_VARIANCES, ExactDDPMScheduler
from schedulers.denoising import DDPM, Predict
from schedulers.loss import normalise

logger = logging.getLogger(__name__)

DEFAULT_IMAGES = 10_000  # of each split
SPLITS = ("train", "test")  # the paper's Table 1 has both
NOISE_KEY = derive_seed("likelihood")
HALF_RANGE = 127.5  # grey levels in a distance of 1
IDENTITY = ("sha256", "images", "fingerprint", "num_images", "variance_type", "precision")
NUMBERS = ("nll", "standard_error", "prior", "rate", "distortion", "rmse")  # the rest of a row's columns
COLUMNS = ("step", "weights", *IDENTITY, *NUMBERS, "batch_size")
PRINTED = ("step", "weights", "images", "num_images", "variance_type", *NUMBERS)
NAMED_DATA = ("dataset_name", "dataset_config_name", "train_data_dir", "image_column", "cache_dir")


@dataclass
class Measurement:
    """What a network makes of images, each on its own, in float64 on the CPU; everything else follows."""

    prior: torch.Tensor  # bits
    decoder: torch.Tensor  # bits of the step that makes the image
    errors: torch.Tensor  # [images, T]: mean squared error of the predicted x_0
    learned: torch.Tensor  # [images, T]: bits of every step with the learned variance; [images, 0] without one


@dataclass
class Bound:
    """The variational bound for one variance, in bits per dimension: the mean over the images."""

    nll: float
    standard_error: float  # of the nll, by the choice of images
    prior: float
    terms: torch.Tensor  # of the step that starts at t, for every t; the first is the decoder's

    @property
    def distortion(self) -> float:
        """Return L_0, the bits that make the image of what came before (section 4.3)."""
        return self.terms[0].item()

    @property
    def rate(self) -> float:
        """Return L_1 + ... + L_T, all other bits."""
        return self.prior + self.terms[1:].sum().item()

    def received(self) -> torch.Tensor:
        """Return the bits that are sent until x_t is there, for every t (algorithms 3 and 4)."""
        return self.prior + self.terms.sum() - self.terms.cumsum(0)


def bound_of(found: Measurement, scheduler: ExactDDPMScheduler, variance_type: str) -> Bound:
    """Add up the bound for a variance sigma^2, with r the posterior's over it.

    With a fixed one a step costs KL = (r - 1 - ln r) / 2 and the weighted error of x_0.
    """
    if variance_type not in FIXED_VARIANCES:
        return sum_of(found, found.learned)
    # The weight is to be that of an error of x_0, whatever the network predicts.
    posterior, chosen = (
        ExactDDPMScheduler.from_config(scheduler.config, variance_type=variance, prediction_type="sample")
        for variance in ("fixed_small", variance_type)
    )
    steps = range(len(scheduler.betas))
    ratio = [posterior.variance(t, t - 1) / chosen.variance(t, t - 1) for t in steps]
    ratio = torch.tensor(ratio, dtype=torch.float64)
    terms = (ratio - 1 - ratio.log()) / (2 * math.log(2)) + chosen.divergence_weights() * found.errors
    terms[:, 0] = found.decoder
    return sum_of(found, terms)


def sum_of(found: Measurement, terms: torch.Tensor) -> Bound:
    """Add up the terms of every image and average over the images."""
    of_image = found.prior + terms.sum(1)
    standard_error = of_image.std() / len(of_image) ** 0.5
    return Bound(of_image.mean().item(), standard_error.item(), found.prior.mean().item(), terms.mean(0))


def decoder_bits(images: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor | float) -> torch.Tensor:
    """Return -log2 of a Gaussian integrated over the grey level of each pixel, the outermost to infinity (eq. 13).

    The paper's code replaces the Gaussian's distribution function by a tanh; this is the integral itself.
    """
    centred = images.double() / HALF_RANGE - 1 - mean.double()
    below = ((centred - 0.5 / HALF_RANGE) / deviation).masked_fill(images == 0, -math.inf)
    above = ((centred + 0.5 / HALF_RANGE) / deviation).masked_fill(images == 255, math.inf)
    # Mirrored to the left of the mean, where the distribution function is small and has an exact logarithm.
    on_the_right = below > 0
    below, above = torch.where(on_the_right, -above, below), torch.where(on_the_right, -below, above)
    log_above = torch.special.log_ndtr(above)
    log_probability = log_above + torch.log1p(-torch.exp(torch.special.log_ndtr(below) - log_above))
    return -log_probability.flatten(1).mean(1) / math.log(2)


def prior_bits(images: torch.Tensor, scheduler: ExactDDPMScheduler) -> torch.Tensor:
    """Return KL(q(x_T | x_0) || N(0, 1)) of each image."""
    a_t = scheduler.alphas_cumprod[-1]
    squares = (images.double() / HALF_RANGE - 1).square().flatten(1).mean(1)
    return (a_t * squares - a_t - torch.log1p(-a_t)) / (2 * math.log(2))


@torch.no_grad()  # not inference_mode, in which autocast would cast every weight anew at every step
def measure_batch(
    predict: Predict,
    scheduler: ExactDDPMScheduler,
    images: torch.Tensor,
    rows: torch.Tensor,
    on_step: Callable[[], object] = lambda: None,
) -> Measurement:
    """Measure uint8 images on the rows' device. The noise of an image at t is a function of its row and t."""
    x_0, errors, learned = normalise(to_device(images, rows.device)), [], []
    for number, t in reversed([*enumerate(torch.arange(len(scheduler.betas), device=rows.device))]):
        noise = standard_normal(NOISE_KEY, rows, number, x_0.shape[1:])
        x_t = scheduler.add_noise(x_0, noise, t.expand(len(rows)))
        output = predict(x_t, t)
        original = scheduler.predict_original(output, number, x_t)
        errors.append((original - x_0).square().flatten(1).mean(1))
        if scheduler.learns_variance:
            values, timesteps = output[:, x_0.shape[1] :], t.expand(len(rows))
            learned.append(scheduler.bits_of_step(original, values, x_0, timesteps))
        on_step()
    # The mean of the last step is the predicted x_0.
    decoder = decoder_bits(images, original.cpu(), scheduler.variance(0, -1) ** 0.5)
    errors = torch.stack(errors[::-1], dim=1).cpu().double()
    of_learned = errors[:, :0]
    if scheduler.learns_variance:
        of_learned = torch.stack(learned[::-1], dim=1).cpu().double()
        deviation = (scheduler.log_variance(values, timesteps) / 2).exp().cpu().double()
        of_learned[:, 0] = decoder_bits(images, original.cpu(), deviation)  # the integral itself
    return Measurement(prior_bits(images, scheduler), decoder, errors, of_learned)


class Likelihood:
    """The course of evaluate.py --nll: the checkpoints of a run, or a pipeline, on the splits of the data."""

    def __init__(self, options: EvaluationOptions, processes: Processes):
        self.options, self.processes = options, processes
        fetches = processes.is_local_main  # every machine fetches what is on the Hub
        models = find_models(options.run_dir, options.checkpoints, options.weights) if fetches else None
        self.models: list[SavedModel] = processes.broadcast(models)
        self.output_dir = Path(options.output_dir).expanduser() if options.output_dir else self.models[0].home
        check_folder(self.output_dir)  # what cannot be written is better known before it is measured
        workers = options.num_workers
        self.num_workers = default_num_workers(processes.local_count) if workers is None else workers
        first = self.models[0]
        run = RunFolder(first.home)
        self.config = run.read_config() if run.is_run else None
        if first.shape[0] not in (1, 3) or first.shape[1] != first.shape[2]:
            raise UserError(
                f"--nll: {first.name} makes images of {list(first.shape)}; 1 or 3 channels, square, are needed"
            )

    def measure(self) -> None:
        """Measure every model on every split, write tables and pictures, and print the table."""
        with self.processes.main_first():
            splits = self._open_splits()
        for model in self.models:
            curves = {}
            for images in splits:
                curves |= self._measure_split(model, images)
            if self.processes.is_main:
                draw(self.output_dir / LIKELIHOODS / f"{model.label}.png", curves)
        if self.processes.is_main:
            path = self.output_dir / LIKELIHOOD_TABLE
            rows = read_rows(path)
            table = as_text([list(PRINTED), *([_cell(row[name]) for name in PRINTED] for row in rows)])
            print(f"\n{table}\n\nBits per dimension; rmse in grey levels. {path} has this table.\n")

    def _open_splits(self) -> list[EncodedImages]:
        """Open the images that are named or those of the run: the split that is named, or training and test images."""
        options, (channels, size, _) = self.options, self.models[0].shape
        if options.dataset_name or options.train_data_dir:
            data = DataOptions(**{name: getattr(options, name) for name in NAMED_DATA})
            data = replace(data, interpolation=self.config.interpolation) if self.config else data
        elif self.config is not None:
            data = replace(self.config, cache_dir=options.cache_dir)
        else:
            raise UserError(f"--nll: {self.models[0].name} is not a run; name its images with --dataset_name")
        there = splits_of(data)
        splits = options.split or [split for split in SPLITS if split in there]
        if not splits:
            raise UserError(f"--nll: choose one of the splits with --split: {', '.join(there)}")
        if not options.split and len(splits) < len(SPLITS):
            logger.info("The data have no other split than %s", splits[0])
        opened = [EncodedImages(load_split(data, split), size, channels, data.interpolation) for split in splits]
        skipping = "skip" in (options.on_bad_image, data.on_bad_image)
        return [images.without_bad(self.num_workers) for images in opened] if skipping else opened

    def _measure_split(self, model: SavedModel, images: EncodedImages) -> dict[str, tuple[Bound, torch.Tensor]]:
        """Measure a model on a split, for every variance, and put that into the tables; return it by its name."""
        rows = torch.as_tensor(spread(len(images), self.options.num_images or DEFAULT_IMAGES))
        found, batch_size = self._measure_images(model, images, rows)
        if not self.processes.is_main:
            return {}
        own = [model.scheduler.config.variance_type] if model.scheduler.learns_variance else []
        bounds = {name: bound_of(found, model.scheduler, name) for name in (*FIXED_VARIANCES, *own)}
        for name, bound in bounds.items():
            logger.info("%s, %s, %s: %.4f bits per dimension", model.label, images.split, name, bound.nll)
        rmse = HALF_RANGE * found.errors.sqrt().mean(0)
        with user_errors(f"{self.output_dir}: the results cannot be written there", OSError):
            write_terms(self.output_dir / LIKELIHOODS / f"{model.label}-{images.split}.csv", bounds, rmse)
            known = {"step": model.step, "weights": model.weights, "sha256": model.sha256, "batch_size": batch_size}
            known |= {"images": str(images.files), "fingerprint": images.fingerprint, "num_images": len(rows)}
            known |= {"precision": self.options.precision, "rmse": rmse[0].item()}
            numbers = {
                name: {number: getattr(bound, number) for number in NUMBERS if number != "rmse"}
                for name, bound in bounds.items()
            }
            rows = [{**known, "variance_type": name, **numbers[name]} for name in bounds]
            add_rows(self.output_dir / LIKELIHOOD_TABLE, rows)
        return {f"{images.split}, {name}": (bound, rmse) for name, bound in bounds.items()}

    def _measure_images(
        self, model: SavedModel, images: EncodedImages, rows: torch.Tensor
    ) -> tuple[Measurement | None, int]:
        """Measure these images, shared among the processes, for the main one; return the batch size with it."""
        processes, steps = self.processes, len(model.scheduler.betas)
        if steps < 2:
            raise UserError(f"--nll: the diffusion of {model.name} has a single step, whose variance is not defined")
        channels_last = prefers_channels_last(processes.device, processes.precision)
        settings = InferenceSettings(processes.precision, channels_last=channels_last)
        condition = condition_of_images(model, self.config, images, rows, processes.device)
        job = Job(model, DDPM(model.scheduler, steps), condition)
        size = self.options.batch_size or choose_batch_size(job, len(rows), processes, settings)
        running = RunningNetwork(job, processes, replace(settings, batch_size=size))
        place = torch.zeros(len(images), dtype=torch.int64)  # of an image among those that are measured
        place[rows] = torch.arange(len(rows))
        columns = 3 + steps * (2 if model.scheduler.learns_variance else 1)
        parts = [torch.zeros(0, columns, dtype=torch.float64)]
        with fits_in_memory(processes.device, running.batch_that_fits), processes.accelerator.autocast():
            batches = -(-len(rows) // size) / processes.count
            duration = timedelta(seconds=round(math.ceil(batches) * steps * running.seconds_per_pass(size)))
            message = "%s: %d images of %s at each of %d timesteps, in batches of %d: about %s"
            logger.info(message, model.label, len(rows), images.files, steps, size, duration)
            total = math.ceil(batches) * steps
            with progress_bar(total=total, desc=images.split, unit="passes", disable=not processes.is_main) as bar:
                for indices, pixels in batches_of(images, rows, size, self.num_workers, processes):
                    # What a network makes of an image depends in its last bits on the number beside it.
                    full = torch.arange(size).clamp(max=len(indices) - 1)
                    in_batch = to_device(indices[full], processes.device)
                    predict = condition.predict_for(running.network, place[indices[full]].tolist())
                    found = measure_batch(
                        predict, model.scheduler, pixels[full, : model.shape[0]], in_batch, bar.update
                    )
                    known = [indices[full], found.prior, found.decoder]
                    known = torch.stack([one.double() for one in known], dim=1)
                    of_images = torch.cat([known, found.errors, found.learned], dim=1)
                    parts.append(of_images[: len(indices)])
        of_images = processes.gather_rows(torch.cat(parts))
        of_images = of_images[of_images[:, 0].argsort()]
        errors, learned = of_images[:, 3 : 3 + steps], of_images[:, 3 + steps :]
        found = Measurement(of_images[:, 1], of_images[:, 2], errors, learned)
        return (found if processes.is_main else None), size


def condition_of_images(
    model: SavedModel, config: TrainingConfig | None, images: EncodedImages, rows: torch.Tensor, device: torch.device
) -> GenerationCondition:
    """Return the class or the first caption of each of these images in turn, as the run's options say where it is."""
    if model.condition is None:
        return GenerationCondition()
    config, files = config or ConditionalConfig(), torch.as_tensor(images.rows)[rows]
    by_text = model.condition["condition"] == "text"
    captions = find_captions(images.files, config.caption_column) if by_text and not config.caption_template else None
    if captions is None:
        labels = find_labels(images.files, config.label_column)
        if not by_text and labels.names != model.condition["class_names"]:
            wanted = ", ".join(model.condition["class_names"][:10])
            raise UserError(f"--nll: the classes of {images.name} are not those of {model.name}: {wanted}")
        of_image = labels.of_row[files].tolist()
        if not by_text:
            logger.info("Given the class of each image")
            choices = [labels.names[label] for label in of_image]
            return GenerationCondition(ClassCondition(labels.names), choices, of_image)
        of_class = fill_templates(config.caption_template, labels.names)
        captions = [of_class[label][:1] for label in labels.of_row.tolist()]
    logger.info("Given the caption of each image, the first if it has several")
    prompts = [captions[row][0] for row in files.tolist()]
    return prompt_condition(ConditionOptions(prompt=prompts), model, Guidance(), device)


def write_terms(path: Path, bounds: dict[str, Bound], rmse: torch.Tensor) -> None:
    """Write a line for every t: the bits of its step, all that are sent until x_t is there, and what x_0 looks like."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"t": t, "rmse": value} for t, value in enumerate(rmse.tolist())]
    for name, bound in bounds.items():
        for row, bits, received in zip(rows, bound.terms.tolist(), bound.received().tolist(), strict=True):
            row |= {f"bits_{name}": bits, f"received_{name}": received}
    write_atomically(path, as_csv([*rows[0]], rows))


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the table, if there is one."""
    if not path.exists():
        return []
    damaged = user_errors(f"{path} cannot be read: move it away", OSError, ValueError, csv.Error)
    with damaged, path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError("its columns are others")
        return list(reader)


def add_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """Put rows into the table, in place of earlier ones of the same."""
    new = {tuple(str(row[name]) for name in IDENTITY) for row in rows}
    with in_turn(path.parent):
        kept = [row for row in read_rows(path) if tuple(row[name] for name in IDENTITY) not in new]
        write_atomically(path, as_csv(COLUMNS, [*kept, *rows]))


def _cell(text: str) -> str:
    """Shorten a number for a person."""
    try:
        return text if text.isdecimal() else f"{float(text):.4g}"
    except ValueError:
        return text


def draw(path: Path, curves: dict[str, tuple[Bound, torch.Tensor]]) -> None:
    """Draw what an image looks like by the bits that are there (the paper's Figure 5), and the bits of every step.

    A split has a colour and a variance a kind of line: since their curves nearly coincide, one is a wide band, on which
    the others are broken in different ways.
    """
    looks = {
        "fixed_large": {"alpha": 0.45, "linewidth": 3.5},
        "fixed_small": {"linestyle": (0, (3, 3))},
        "learned": {"linestyle": ":"},
        "learned_range": {"linestyle": "-."},
    }
    splits = list(dict.fromkeys(name.rpartition(", ")[0] for name in curves))
    with drawing(path, columns=2) as (_, (panels,)):
        for name, (bound, rmse) in curves.items():
            split, _, variance_type = name.rpartition(", ")
            look = {"color": COLOURS[splits.index(split)], "linewidth": 1.6, **looks[variance_type]}
            panels[0].plot(bound.received(), rmse, label=f"{name}: {bound.nll:.3f} bits per dimension", **look)
            panels[1].plot(range(1, len(rmse)), bound.terms[1:], **look)
        panels[0].set(title="Rate and distortion", xlabel="bits per dimension received", ylabel="RMSE, grey levels")
        panels[1].set(title="Bits of every step", xlabel="t", ylabel="bits per dimension", xscale="log")
        for axes in panels:
            axes.set_yscale("log")
        panels[0].legend(fontsize=8)
    logger.info("Drew %s", path)
