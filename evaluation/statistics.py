"""The statistics of real images, computed once and kept with all that they depend on."""

import hashlib
import json
import logging
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from common.errors import UserError, reason_of, user_errors
from common.files import load_safetensors, save_safetensors
from evaluation.features import FeatureExtractor
from evaluation.image_sets import ImageSet
from evaluation.metrics import Moments, Neighbourhoods
from evaluation.networks import FeatureNetwork
from image_data.sources import spread

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
UNREADABLE = (OSError, KeyError, TypeError, ValueError, RecursionError)  # of a damaged file, or one of another program
MOST_FEATURES_KEPT = 50_000  # evenly spread; mean and covariance are of all images


@dataclass(frozen=True)
class Identity:
    """Everything that statistics depend on."""

    images: str  # name of the data set or folder
    split: str | None
    count: int
    height: int
    width: int
    channels: int
    cropped: bool  # resized to the shorter side and cropped at the centre, or taken as they are
    fingerprint: str  # of the data
    network: str
    mode: str
    network_sha256: str
    precision: str
    format_version: int = FORMAT_VERSION

    def describe(self) -> str:
        """Describe the images for a person."""
        split = f"[{self.split}]" if self.split else ""
        cropped = ", cropped at the centre" if self.cropped else ""
        return f"{self.images}{split}, {self.count} images of {self.width}x{self.height}{cropped}"


@dataclass
class Statistics:
    """Mean and covariance of all images' features, and the features themselves."""

    identity: Identity
    moments: Moments
    spatial: Moments | None = None
    features: torch.Tensor | None = None
    _neighbourhoods: dict[int, Neighbourhoods] = field(default_factory=dict)

    def neighbourhoods(self, count: int, device: torch.device) -> Neighbourhoods:
        """Return those of as many evenly spread images as were generated, as precision and recall want it."""
        if count not in self._neighbourhoods:
            chosen = torch.as_tensor(spread(len(self.features), count))
            self._neighbourhoods = {count: Neighbourhoods.of(self.features[chosen], device)}
        return self._neighbourhoods[count]


def reference_statistics(
    images: ImageSet, extractor: FeatureExtractor, cache_dir: Path, later: int
) -> list[Statistics]:
    """Return on the main process the images' statistics in every network; `later` images are to be seen after them."""
    processes = extractor.processes
    wanted = [identity_of(images, network) for network in extractor.networks]
    found = [_from_cache(identity, cache_dir) for identity in wanted] if processes.is_main else []
    # Only the main process looks: a file may come or go in between.
    missing = processes.broadcast([number for number, one in enumerate(found) if one is None])
    if missing:
        extractor.prepare(len(images), images.size, later)
        batches = extractor.batches(images, torch.arange(len(images)))
        networks = [extractor.networks[number] for number in missing]
        bar = f"Reference {images.name}"
        computed = extractor.extract(batches, len(images), bar, networks, repr(wanted[0]), MOST_FEATURES_KEPT)
        if processes.is_main:
            for number, features in zip(missing, computed, strict=True):
                found[number] = Statistics(wanted[number], features.moments, features.spatial, features.features)
                try:
                    save_statistics(found[number], _path_in_cache(wanted[number], cache_dir))
                except UserError as error:  # they are at hand, and only the next evaluation would miss them
                    logger.warning("%s", error)
        processes.barrier()
        extractor.forget()
    return found


def identity_of(images: ImageSet, network: FeatureNetwork) -> Identity:
    """Return what the statistics of these images in this network depend on."""
    return Identity(
        images=images.name,
        split=images.split,
        count=len(images),
        height=int(images.size[0]),
        width=int(images.size[1]),
        channels=images.channels,
        cropped=images.resolution is not None,
        fingerprint=images.fingerprint,
        network=network.name,
        mode=network.mode,
        network_sha256=network.digest,
        precision=network.precision_name,
    )


def save_statistics(statistics: Statistics, path: Path) -> None:
    """Write statistics with their identity."""
    tensors = {"mean": statistics.moments.mean, "covariance": statistics.moments.covariance}
    if statistics.spatial is not None:
        tensors |= {"spatial_mean": statistics.spatial.mean, "spatial_covariance": statistics.spatial.covariance}
    if statistics.features is not None:
        tensors["features"] = statistics.features
    with user_errors(f"the statistics cannot be written to {path}", OSError):
        save_safetensors(tensors, path, {"identity": json.dumps(asdict(statistics.identity))})


def load_statistics(path: Path) -> Statistics:
    """Read statistics that `save_statistics` wrote."""
    tensors, metadata = load_safetensors(path)
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise ValueError("it holds numbers that are not finite")
    identity = Identity(**json.loads(metadata["identity"]))
    spatial = Moments(tensors["spatial_mean"], tensors["spatial_covariance"]) if "spatial_mean" in tensors else None
    return Statistics(identity, Moments(tensors["mean"], tensors["covariance"]), spatial, tensors.get("features"))


def named_statistics(name: str, mode: str | None, network: FeatureNetwork, size: tuple[int, int]) -> Statistics:
    """Read the file that `--statistics` names, refused unless it is of this network, this mode and this size."""
    path = Path(name).expanduser()
    if path.suffix == ".npz":
        return _of_npz(path, mode, network, size)
    failure = f"--statistics {name}: neither a file that --save_statistics wrote nor an .npz with mu and sigma"
    with user_errors(failure, *UNREADABLE):
        statistics = load_statistics(path)
        statistics.moments.check()
    identity = statistics.identity
    differing = [
        f"{what} {theirs} instead of {ours}"
        for what, theirs, ours in (
            ("network", identity.network, network.name),
            ("mode", identity.mode, network.mode),
            ("weights", identity.network_sha256[:12], network.digest[:12]),
            ("precision", identity.precision, network.precision_name),
            ("size", f"{identity.width}x{identity.height}", f"{size[1]}x{size[0]}"),
        )
        if theirs != ours
    ]
    if differing:
        raise UserError(f"--statistics {name} do not fit: {'; '.join(differing)}")
    return statistics


def _of_npz(path: Path, mode: str | None, network: FeatureNetwork, size: tuple[int, int]) -> Statistics:
    """Read mu and sigma as pytorch-fid and clean-fid save them, who do not write down what they are of."""
    if mode is None:
        missing = "an .npz does not say how its images were resized; say it with --statistics_mode"
        raise UserError(f"--statistics {path}: {missing}")
    if (network.name, network.mode) != ("inception", mode):
        differing = f"mode {mode} instead of {network.mode} (--modes {mode} computes that one)"
        raise UserError(f"--statistics {path} do not fit: {differing}")
    failure = f"--statistics {path}: not an .npz with mu and sigma"
    with user_errors(failure, Exception), np.load(path) as arrays:  # of whatever kind a damaged file runs into
        mean, covariance = (torch.from_numpy(as_reals(arrays[name])) for name in ("mu", "sigma"))
    if covariance.shape != (2048, 2048) or mean.shape != (2048,):
        raise UserError(f"--statistics {path}: mu and sigma are {list(mean.shape)} and {list(covariance.shape)}")
    if not (mean.isfinite().all() and covariance.isfinite().all()):
        raise UserError(f"--statistics {path}: mu or sigma holds numbers that are not finite")
    moments = Moments(mean, covariance)
    with user_errors(f"--statistics {path}: sigma is no covariance", ValueError):
        moments.check()
    digest = hashlib.sha256(mean.numpy().data).hexdigest()
    identity = Identity(path.name, None, 0, *size, 3, False, digest, network.name, mode, "not known", "not known")
    return Statistics(identity, moments)


def as_reals(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "fiu":
        raise ValueError(f"its numbers are {array.dtype}")
    return array.astype(np.float64)


def _path_in_cache(identity: Identity, cache_dir: Path) -> Path:
    key = hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()
    return cache_dir / "statistics" / f"{key}.safetensors"


def _from_cache(identity: Identity, cache_dir: Path) -> Statistics | None:
    path = _path_in_cache(identity, cache_dir)
    if not os.path.lexists(path):
        return None
    try:
        statistics = load_statistics(path)
        if statistics.identity != identity:
            raise ValueError("it is of other images")
    except UNREADABLE as error:
        logger.warning("%s is made again: %s", path, reason_of(error))
        return None
    logger.info("The reference's statistics (%s) are in %s", identity.mode, path)
    return statistics
