"""What a set of real images is compared by, computed once and kept with all that it depends on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common.errors import UserError
from evaluation.features import extract
from evaluation.image_sets import batches_of
from evaluation.metrics import Moments, Neighbourhoods
from image_data.sources import spread

if TYPE_CHECKING:
    from common.processes import Processes
    from evaluation.features import Features
    from evaluation.image_sets import ImageSet
    from evaluation.networks import FeatureNetwork

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
MOST_FEATURES_KEPT = 50_000  # evenly spread; mean and covariance are of all images


@dataclass(frozen=True)
class Identity:
    """All that statistics are a function of."""

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
        split = f"[{self.split}]" if self.split else ""
        cropped = ", cropped at the centre" if self.cropped else ""
        return f"{self.images}{split}, {self.count} images of {self.width}x{self.height}{cropped}"

    @property
    def short_fingerprint(self) -> str:
        """Enough to tell data apart that are called the same."""
        return self.fingerprint[:8]


@dataclass
class Statistics:
    """Mean and covariance of all images' features, and the features themselves."""

    identity: Identity
    moments: Moments
    spatial: Moments | None = None
    features: torch.Tensor | None = None
    _neighbourhoods: dict[int, Neighbourhoods] = field(default_factory=dict)

    def neighbourhoods(self, count: int, device: torch.device) -> Neighbourhoods:
        """Of as many of the images as there are generated ones, evenly spread, as precision and recall want it."""
        if count not in self._neighbourhoods:
            chosen = torch.as_tensor(spread(len(self.features), count))
            self._neighbourhoods = {count: Neighbourhoods.of(self.features[chosen], device)}
        return self._neighbourhoods[count]


def reference_statistics(
    images: ImageSet,
    networks: list[FeatureNetwork],
    batch_size: int,
    num_workers: int,
    processes: Processes,
    cache_dir: Path,
    before: Callable[[], None],
) -> list[Statistics]:
    """Statistics of all the images in every network, from the cache where they are there; on the main process.

    `before` is called when there is something to compute.
    """
    wanted = [identity_of(images, network) for network in networks]
    found = [_from_cache(identity, cache_dir) for identity in wanted] if processes.is_main else []
    # The main process has looked: a file may come or go in between.
    missing = processes.broadcast([one is None for one in found])
    todo = [network for network, absent in zip(networks, missing, strict=True) if absent]
    if todo:
        before()
        batches = batches_of(images, torch.arange(len(images)), batch_size, num_workers, processes)
        made = iter(extract(todo, batches, len(images), batch_size, processes, f"Reference {images.name}"))
        if processes.is_main:
            for position, absent in enumerate(missing):
                if absent:
                    found[position] = statistics_of(next(made), wanted[position])
                    save_statistics(found[position], _cached(wanted[position], cache_dir))
    return found


def identity_of(images: ImageSet, network: FeatureNetwork) -> Identity:
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
        precision=str(network.precision).removeprefix("torch."),
    )


def statistics_of(features: Features, identity: Identity) -> Statistics:
    kept = torch.as_tensor(spread(features.count, MOST_FEATURES_KEPT))
    return Statistics(identity, features.moments, features.spatial, features.features[kept])


def save_statistics(statistics: Statistics, path: Path) -> None:
    tensors = {"mean": statistics.moments.mean, "covariance": statistics.moments.covariance}
    if statistics.spatial is not None:
        tensors |= {"spatial_mean": statistics.spatial.mean, "spatial_covariance": statistics.spatial.covariance}
    if statistics.features is not None:
        tensors["features"] = statistics.features
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, aside, metadata={"identity": json.dumps(asdict(statistics.identity))})
        aside.replace(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the statistics cannot be written to {path} ({error})") from error
    finally:
        aside.unlink(missing_ok=True)


def load_statistics(path: Path, device: str = "cpu") -> Statistics:
    """Statistics that `save_statistics` wrote."""
    with safe_open(path, "pt", device) as file:
        identity = Identity(**json.loads(file.metadata()["identity"]))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is not a dict
    spatial = Moments(tensors["spatial_mean"], tensors["spatial_covariance"]) if "spatial_mean" in tensors else None
    return Statistics(identity, Moments(tensors["mean"], tensors["covariance"]), spatial, tensors.get("features"))


def named_statistics(name: str, mode: str | None, network: FeatureNetwork, size: tuple[int, int]) -> Statistics:
    """The file that `--statistics` names, refused unless it is of this network, this mode and this size."""
    path = Path(name).expanduser()
    if path.suffix == ".npz":
        return _of_npz(path, mode, network, size)
    try:
        statistics = load_statistics(path)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"--statistics {name}: neither a file that --save_statistics wrote nor an .npz with mu and sigma"
        ) from error
    identity = statistics.identity
    differing = [
        f"{what} {theirs} instead of {ours}"
        for what, theirs, ours in (
            ("network", identity.network, network.name),
            ("mode", identity.mode, network.mode),
            ("weights", identity.network_sha256[:12], network.digest[:12]),
            ("precision", identity.precision, str(network.precision).removeprefix("torch.")),
            ("size", f"{identity.width}x{identity.height}", f"{size[1]}x{size[0]}"),
        )
        if theirs != ours
    ]
    if differing:
        raise UserError(f"--statistics {name} do not fit: {'; '.join(differing)}")
    return statistics


def _of_npz(path: Path, mode: str | None, network: FeatureNetwork, size: tuple[int, int]) -> Statistics:
    """mu and sigma as pytorch-fid and clean-fid save them, which do not say of what they are."""
    if mode is None:
        raise UserError(
            f"--statistics {path}: an .npz does not say how its images were resized; say it with --statistics_mode"
        )
    if (network.name, network.mode) != ("inception", mode):
        raise UserError(
            f"--statistics {path} do not fit: mode {mode} instead of {network.mode} (--modes {mode} computes that one)"
        )
    try:
        with np.load(path, allow_pickle=False) as arrays:
            mean, covariance = (torch.from_numpy(arrays[name].astype(np.float64)) for name in ("mu", "sigma"))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"--statistics {path}: not an .npz with mu and sigma ({error})") from error
    if covariance.shape != (2048, 2048) or mean.shape != (2048,):
        raise UserError(f"--statistics {path}: mu and sigma are {list(mean.shape)} and {list(covariance.shape)}")
    digest = hashlib.sha256(mean.numpy().data).hexdigest()
    identity = Identity(path.name, None, 0, *size, 3, False, digest, network.name, mode, "not known", "not known")
    return Statistics(identity, Moments(mean, covariance))


def _cached(identity: Identity, cache_dir: Path) -> Path:
    key = hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()
    return cache_dir / "statistics" / f"{key}.safetensors"


def _from_cache(identity: Identity, cache_dir: Path) -> Statistics | None:
    path = _cached(identity, cache_dir)
    with contextlib.suppress(OSError, SafetensorError, KeyError, TypeError, ValueError):
        statistics = load_statistics(path)
        if statistics.identity == identity:
            logger.info("The reference's statistics (%s) are in %s", identity.mode, path)
            return statistics
    return None
