"""A small network, trained once on the real images, that judges whether samples show the class that was asked for."""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from common.errors import reason_of, user_errors
from common.files import load_safetensors, make_folder, save_safetensors
from common.progress import progress_bar
from common.randomness import generator_for
from schedulers.loss import normalise

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
HELD_OUT = 5  # one image of so many of every class
STEPS, BATCH_SIZE, LEARNING_RATE, EPOCHS = 800, 128, 2e-3, 15
SMALLEST_SIDE = 4  # of the last layer's maps
LARGEST_SHIFT = 1 / 8  # of the side, either way


@dataclass
class Classifier:
    """The network, and its accuracy on so many images that it had not seen."""

    network: nn.Module
    accuracy: float
    num_held_out: int

    @torch.inference_mode()
    def classes_of(self, images: torch.Tensor) -> torch.Tensor:
        """Return the class of each of some images, uint8 [n, channels, height, width]."""
        device = next(self.network.parameters()).device
        return torch.cat([self.network(normalise(part.to(device))).argmax(1).cpu() for part in images.split(512)])


def load_classifier(images: torch.Tensor, labels: torch.Tensor, cache_dir: Path, device: torch.device) -> Classifier:
    """Return the classifier of these images, uint8 [n, channels, height, width]; train it unless it is in the cache."""
    digest = hashlib.blake2b(repr((FORMAT_VERSION, images.shape)).encode(), digest_size=16)
    for tensor in (images, labels):
        digest.update(tensor.contiguous().numpy())
    path = cache_dir / f"classifier-{digest.hexdigest()}.safetensors"
    held_out = hold_out(labels)
    network = build_network(images.shape[1], images.shape[2], int(labels.max()) + 1)
    try:
        network.load_state_dict(load_safetensors(path)[0])
    except (OSError, RuntimeError) as error:
        if path.exists():
            logger.warning("%s is damaged and is made again (%s)", path, reason_of(error))
        make_folder(path.parent)  # the training can take minutes
        train(network.to(device), images[~held_out], labels[~held_out])
        with user_errors(f"--cache_dir {cache_dir}: the classifier cannot be kept there", OSError):
            save_safetensors(network.state_dict(), path)
    classifier = Classifier(network.to(device).eval(), 0.0, int(held_out.sum()))
    classifier.accuracy = (classifier.classes_of(images[held_out]) == labels[held_out]).double().mean().item()
    found = 100 * classifier.accuracy, classifier.num_held_out
    logger.info("The classifier recognises %.1f %% of %d real images it has not seen", *found)
    return classifier


def hold_out(labels: torch.Tensor) -> torch.Tensor:
    """Choose the images that are kept from the training: as large a share of every class, drawn at random."""
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    counts = labels.bincount()
    # Where no class has enough for that, one image of each that has several.
    kept = counts // HELD_OUT if counts.max() >= HELD_OUT else (counts > 1).long()
    for label in labels.unique().tolist():
        members = torch.nonzero(labels == label).flatten()
        order = torch.randperm(len(members), generator=generator_for("held out", label))
        held_out[members[order[: kept[label]]]] = True
    return held_out


def build_network(channels: int, size: int, num_classes: int) -> nn.Module:
    """Build a network with two convolutions for each halving of the image."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers, width = [], 32
        while True:
            for before in (channels, width):
                layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
            if size // 2 < SMALLEST_SIDE:
                break
            layers.append(nn.MaxPool2d(2))
            size, width = size // 2, min(2 * width, 256)
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, num_classes))


def train(network: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Train with images shifted a little and a learning rate that falls to zero."""
    device = next(network.parameters()).device
    steps = max(STEPS, EPOCHS * len(images) // BATCH_SIZE)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    network.train()
    for step in progress_bar(iterable=range(steps), desc="Training the classifier", leave=False):
        generator = generator_for("classifier", step)
        chosen = torch.randint(len(images), (BATCH_SIZE,), generator=generator)
        batch = shifted(images[chosen], generator).to(device)
        loss = nn.functional.cross_entropy(network(normalise(batch)), labels[chosen].to(device), label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def shifted(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Move all images by the same few pixels; what leaves on one side is lost."""
    most = int(images.shape[-1] * LARGEST_SHIFT)
    down, right = torch.randint(-most, most + 1, (2,), generator=generator).tolist()
    height, width = images.shape[-2:]
    padded = nn.functional.pad(images, (most, most, most, most), mode="replicate")
    return padded[:, :, most + down :, most + right :][:, :, :height, :width]
