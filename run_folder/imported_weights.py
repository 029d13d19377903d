"""Weights of other DDPM projects as a stock pipeline: their names, their arithmetic, and the diffusion they were for.

Four kinds of names are known: those of Ho et al.'s TensorFlow code, of its port pesser/pytorch_diffusion, of
tqch/ddpm-torch, and of OpenAI's improved-diffusion. All four are the same U-Net; the port's names stand between theirs
and those of UNet2DModel.
"""

from __future__ import annotations

import logging
import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import UNet2DModel

from common.errors import UserError, user_errors
from schedulers.betas import BETA_END, BETA_START
from schedulers.ddpm import ExactDDPMScheduler, build_scheduler

logger = logging.getLogger(__name__)

Weights = dict[str, torch.Tensor]
EMA_SUFFIX = "/ExponentialMovingAverage"
ATTENTION_RESOLUTION = 16  # where all four have their first attention
LARGEST_FIXED_LARGE = 32  # pixels: the paper's variance for CIFAR-10, and fixed_small for its larger images
NETWORK_STEPS = 1000  # improved-diffusion shows its network times from 0 to 1000, whatever the number of steps


# The names in pickles of numpy numbers, such as the best FID that tqch/ddpm-torch saves; they can make nothing else.
SCALAR = np._core.multiarray.scalar
NUMBERS = [
    *(SCALAR, (SCALAR, "numpy.core.multiarray.scalar")),  # as numpy 1 called it
    *(np.dtype, *(type(np.dtype(kind)) for kind in (np.float32, np.float64, np.int64))),
]

# What UNet2DModel must be told of the arithmetic.
ORIGINAL = {"norm_eps": 1e-6, "flip_sin_to_cos": False, "freq_shift": 1, "downsample_padding": 0}
IMPROVED = {"norm_eps": 1e-5, "flip_sin_to_cos": True, "freq_shift": 0, "downsample_padding": 1}


@dataclass(frozen=True)
class Project:
    """A project that weights come from, and how its names become the port's."""

    name: str
    known_by: str  # matches a name that only its weights have
    renamed: Callable[[Weights], Weights]
    arithmetic: dict[str, object]


# Reading files, of which only tensors are taken.


def read_weights(path: Path, kind: str | None) -> Weights:
    """Read the tensors of a file, the moving average if it holds both and `kind` is not "raw"."""
    if path.suffix == ".npz":
        damaged = user_errors(f"{path} cannot be read", OSError, ValueError, TypeError, zipfile.BadZipFile)
        with damaged, np.load(path) as arrays:
            numbers = {name: array for name in arrays.files if (array := arrays[name]).dtype.kind in "fiu"}
            stored = {name: torch.from_numpy(array) for name, array in numbers.items()}
    elif path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        with user_errors(f"{path} cannot be read", OSError, SafetensorError):
            stored = load_file(path)
    else:
        stored = _read_pickle(path)
    return _chosen(stored, path, kind)


def _read_pickle(path: Path) -> dict:
    try:
        with torch.serialization.safe_globals(NUMBERS):
            stored = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(f"{path} holds more than tensors, and is not loaded: a pickle can hold code") from error
    except Exception as error:  # whatever the bytes of another file run into
        raise UserError(f"{path} is no file of weights that torch can read ({type(error).__name__})") from error
    if not isinstance(stored, dict):
        raise UserError(f"{path} holds a {type(stored).__name__}, not named tensors")
    return stored


def _chosen(stored: dict, path: Path, kind: str | None) -> Weights:
    """Find the network's tensors among what a training saved."""
    averaged = isinstance(stored.get("ema"), dict) and "shadow" in stored["ema"]  # tqch/ddpm-torch
    in_names = any(str(name).endswith(EMA_SUFFIX) for name in stored)  # TensorFlow
    if kind is not None and not (averaged or in_names):
        raise UserError(f"--weights {kind}: {path} does not hold both moving average and raw weights; leave it out")
    if averaged and kind != "raw":
        stored = stored["ema"]["shadow"]
    elif isinstance(stored.get("model"), dict):
        stored = stored["model"]
    if in_names:
        is_average = kind != "raw"
        stored = {n.removesuffix(EMA_SUFFIX): t for n, t in stored.items() if n.endswith(EMA_SUFFIX) == is_average}
    return {str(name).removeprefix("module."): t.float() for name, t in stored.items() if isinstance(t, torch.Tensor)}


# From each project's names to those of the port: down.0.block.1.conv1.weight, mid.attn_1.q.bias, up.2.upsample.conv...


def _as_they_are(weights: Weights) -> Weights:
    return weights


def _of_tensorflow(weights: Weights) -> Weights:
    """W [height, width, in, out] or [in, out], b; gamma and beta of norms."""
    parts, renamed = {"W": "weight", "b": "bias", "gamma": "weight", "beta": "bias"}, {}
    for name, tensor in weights.items():
        scope, _, part = name.removeprefix("model/").rpartition("/")
        if part in parts and scope:  # the rest is the optimiser's
            scope = re.sub(r"(down|up|block|attn)_(\d+)(?=/)", r"\1/\2", f"{scope}/").replace(
                "temb/dense", "temb/dense/"
            )
            # In the middle block_1 is a name, not a place in a list.
            scope = re.sub(r"^mid/(block|attn)/(\d)", r"mid/\1_\2", scope).replace("/", ".")
            dimensions = {4: (3, 2, 0, 1), 2: (1, 0)}.get(tensor.ndim, (0,))
            renamed[scope + parts[part]] = tensor.permute(dimensions)
    return renamed


TQCH_NAMES = (
    (r"^embed\.0\.", "temb.dense.0."),
    (r"^embed\.2\.", "temb.dense.1."),
    (r"^in_conv\.", "conv_in."),
    (r"^out_conv\.0\.", "norm_out."),
    (r"^out_conv\.2\.", "conv_out."),
    (r"^middle\.1\.", "mid.attn_1."),
    (r"^middle\.0\.", "mid.block_1."),
    (r"^middle\.2\.", "mid.block_2."),
    (r"^(down|up)samples\.level_(\d+)\.\d+\.1\.(weight|bias)$", r"\1.\2.\1sample.conv.\3"),
    (r"^(down|up)samples\.level_(\d+)\.(\d+)\.1\.", r"\1.\2.attn.\3."),
    (r"^(down|up)samples\.level_(\d+)\.(\d+)\.(0\.)?", r"\1.\2.block.\3."),
    (r"\.fc\.", ".temb_proj."),
    (r"\.skip\.", ".nin_shortcut."),
    (r"\.project_in\.", ".qkv."),
    (r"\.project_out\.", ".proj_out."),
)
IMPROVED_NAMES = (
    (r"^time_embed\.0\.", "temb.dense.0."),
    (r"^time_embed\.2\.", "temb.dense.1."),
    (r"^out\.0\.", "norm_out."),
    (r"^out\.2\.", "conv_out."),
    (r"^middle_block\.1\.", "mid.attn_1."),
    (r"^middle_block\.0\.", "mid.block_1."),
    (r"^middle_block\.2\.", "mid.block_2."),
    (r"\.in_layers\.0\.", ".norm1."),
    (r"\.in_layers\.2\.", ".conv1."),
    (r"\.emb_layers\.1\.", ".temb_proj."),
    (r"\.out_layers\.0\.", ".norm2."),
    (r"\.out_layers\.3\.", ".conv2."),
    (r"\.skip_connection\.", ".nin_shortcut."),
)


def _substituted(weights: Weights, names: tuple[tuple[str, str], ...]) -> Weights:
    renamed = {}
    for name, tensor in weights.items():
        for pattern, replacement in names:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed


def _of_tqch(weights: Weights) -> Weights:
    return _substituted(weights, TQCH_NAMES)


def _of_improved(weights: Weights) -> Weights:
    """One list of blocks on the way down and one on the way up; a change of size ends a level."""
    if any(name.startswith("label_emb.") for name in weights):
        raise UserError("the network is conditional on classes, for which an imported model has no place")
    places, level, block = [(r"^input_blocks\.0\.0\.", "conv_in.")], 0, 0
    for number in range(1, _count(weights, r"input_blocks\.(\d+)\.")):
        block_name = rf"^input_blocks\.{number}\."
        if f"input_blocks.{number}.0.op.weight" in weights:
            places.append((rf"{block_name}0\.op\.", f"down.{level}.downsample.conv."))
            level, block = level + 1, 0
        else:
            places += [(rf"{block_name}0\.", f"down.{level}.block.{block}.")]
            places += [(rf"{block_name}1\.", f"down.{level}.attn.{block}.")]
            block += 1
    block = 0
    for number in range(_count(weights, r"output_blocks\.(\d+)\.")):
        block_name = rf"^output_blocks\.{number}\."
        places += [(rf"{block_name}\d\.conv\.", f"up.{level}.upsample.conv.")]
        places += [(rf"{block_name}0\.", f"up.{level}.block.{block}.")]
        places += [(rf"{block_name}1\.", f"up.{level}.attn.{block}.")]
        block += 1
        if any(re.match(rf"{block_name}\d\.conv\.", name) for name in weights):
            level, block = level - 1, 0
    return _substituted(weights, (*places, *IMPROVED_NAMES))


def _count(weights: Weights, pattern: str) -> int:
    """Return how many numbers the names have where the pattern has its group."""
    return len({found[1] for name in weights if (found := re.match(pattern, name))})


PROJECTS = (
    Project("Ho et al.'s TensorFlow code", r"(model/)?down_0/block_0/", _of_tensorflow, ORIGINAL),
    Project("pesser/pytorch_diffusion", r"down\.0\.block\.0\.", _as_they_are, ORIGINAL),
    Project("tqch/ddpm-torch", r"downsamples\.level_0\.", _of_tqch, ORIGINAL),
    Project("openai/improved-diffusion", r"input_blocks\.0\.0\.", _of_improved, IMPROVED),
)


def project_of(weights: Weights) -> Project:
    """Recognise the project that uses these names."""
    for project in PROJECTS:
        if any(re.match(project.known_by, name) for name in weights):
            return project
    known, first = ", ".join(project.name for project in PROJECTS), ", ".join([*weights][:3]) or "none"
    raise UserError(f"the names of the tensors are of no project that is known here ({known}): {first}")


# From the port's names to UNet2DModel.


def convert(weights: Weights, project: Project, resolution: int | None, num_heads: int) -> UNet2DModel:
    """Build the UNet2DModel with these weights; raise if there is none that holds all of them."""
    weights = project.renamed(weights)
    levels = _count(weights, r"down\.(\d+)\.block\.0\.")
    channels, attention, settings = [], [], {**project.arithmetic, "dropout": 0.0}
    with user_errors(f"weights of {project.name}, but a part of the network is missing", KeyError):
        for level in range(levels):
            channels.append(len(weights[f"down.{level}.block.0.conv1.weight"]))
            attention.append(f"down.{level}.attn.0.norm.weight" in weights)
        if resolution is None and not any(attention):
            raise UserError("no level of the network has attention, which would tell its resolution: add --resolution")
        in_middle = len(weights["mid.attn_1.norm.weight"])
        projected = len(weights["down.0.block.0.temb_proj.weight"])
        in_channels, out_channels = weights["conv_in.weight"].shape[1], len(weights["conv_out.weight"])
        if in_channels == 6 and project.arithmetic is IMPROVED:
            raise UserError(
                "a network for super-resolution: its input has 6 channels, x_t and a smaller image, "
                "for which an imported model has no place"
            )
        if has_variance := out_channels == 2 * in_channels:
            for name in ("conv_out.weight", "conv_out.bias"):
                weights[name] = weights[name].chunk(2)[0]
        settings |= {
            "sample_size": resolution or ATTENTION_RESOLUTION << attention.index(True),
            "in_channels": in_channels,
            "out_channels": len(weights["conv_out.weight"]),
            "layers_per_block": _count(weights, r"down\.0\.block\.(\d+)\."),
        }
    types = ["AttnDownBlock2D" if has_attention else "DownBlock2D" for has_attention in attention]
    heads = 1 if project.arithmetic is ORIGINAL else num_heads
    settings |= {
        "block_out_channels": tuple(channels),
        "down_block_types": tuple(types),
        "up_block_types": tuple(kind.replace("Down", "Up") for kind in reversed(types)),
        "resnet_time_scale_shift": "scale_shift" if projected == 2 * channels[0] else "default",
        "attn_norm_num_groups": 32,  # of the middle, which otherwise has no norm beside scale and shift
        "attention_head_dim": _channels_of_a_head(
            {in_middle, *(width for width, has in zip(channels, attention, strict=True) if has)}, heads
        ),
    }
    with user_errors(f"weights of {project.name} in a shape that UNet2DModel does not have", Exception):
        network = UNet2DModel(**settings).eval()
    _load(network, _as_in_diffusers(weights, levels, heads), project)
    if has_variance:
        logger.info("The network predicts its variance too: that half of its output is left out")
    return network


def _channels_of_a_head(widths: set[int], heads: int) -> int | None:
    """Return UNet2DModel's one number for all attentions; None is one head in each."""
    if heads == 1:
        return None
    if len(widths) > 1 or min(widths) % heads:
        raise UserError(
            f"{heads} heads in attentions of {' and '.join(map(str, sorted(widths)))} channels: UNet2DModel has one "
            f"number of channels for all heads, so it cannot hold this network (--num_heads says how many there are)"
        )
    return min(widths) // heads


RESNET_PARTS = {"temb_proj": "time_emb_proj", "nin_shortcut": "conv_shortcut"}
ATTENTION_PARTS = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
PLACES = (
    (r"^temb\.dense\.0\.", "time_embedding.linear_1."),
    (r"^temb\.dense\.1\.", "time_embedding.linear_2."),
    (r"^norm_out\.", "conv_norm_out."),
    (r"^mid\.block_1\.", "mid_block.resnets.0."),
    (r"^mid\.attn_1\.", "mid_block.attentions.0."),
    (r"^mid\.block_2\.", "mid_block.resnets.1."),
    (r"^(down|up)\.(\d+)\.block\.(\d+)\.", r"\1_blocks.\2.resnets.\3."),
    (r"^(down|up)\.(\d+)\.attn\.(\d+)\.", r"\1_blocks.\2.attentions.\3."),
    (r"^(down|up)\.(\d+)\.(down|up)sample\.", r"\1_blocks.\2.\3samplers.0."),
    *((rf"(\.resnets\.\d+)\.{ours}\.", rf"\1.{theirs}.") for ours, theirs in RESNET_PARTS.items()),
    *((rf"(\.attentions\.\d+)\.{ours}\.", rf"\1.{theirs}.") for ours, theirs in ATTENTION_PARTS.items()),
)


def _as_in_diffusers(weights: Weights, levels: int, heads: int) -> Weights:
    """Rename the port's names; its ways up are numbered from the image, those of diffusers from the middle."""
    split = {}
    for name, tensor in weights.items():
        name = re.sub(r"^up\.(\d+)\.", lambda found: f"up.{levels - 1 - int(found[1])}.", name)
        if ".qkv." in name:
            # Queries, keys and values of each head after another; one head has each of them in one piece.
            of_heads = tensor.unflatten(0, (heads, 3, -1))
            split |= {name.replace(".qkv.", f".{part}."): of_heads[:, n].flatten(0, 1) for n, part in enumerate("qkv")}
        else:
            split[name] = tensor
    return _substituted(split, PLACES)


def _load(network: UNet2DModel, weights: Weights, project: Project) -> None:
    """Load all weights; linear layers may come as convolutions of one pixel, and the other way round."""
    expected = network.state_dict()
    for name in sorted(expected.keys() ^ weights.keys()):
        problem = "is missing" if name in expected else "has no place"
        raise UserError(f"weights of {project.name}, but UNet2DModel cannot hold this network: {name} {problem}")
    for name, tensor in weights.items():
        if expected[name].squeeze().shape != tensor.squeeze().shape:
            shapes = f"{list(tensor.shape)} where {list(expected[name].shape)} is needed"
            raise UserError(f"weights of {project.name}, but UNet2DModel cannot hold this network: {name} is {shapes}")
        weights[name] = tensor.reshape(expected[name].shape).contiguous()
    network.load_state_dict(weights)


# The diffusion.


def scheduler_for(project: Project, schedule: str, steps: int, variance_type: str) -> ExactDDPMScheduler:
    """Build the diffusion of the weights; improved-diffusion's, if longer, is visited only where its time is whole.

    Its network sees 1000 t / T: of 4000 steps every fourth is used, with the betas that lead from one to the next. Its
    linear betas are those of the paper times 1000 / T, so that as little of the image is left at the end.
    """
    if project.arithmetic is ORIGINAL or steps == NETWORK_STEPS:
        return build_scheduler(schedule, steps, variance_type)
    if steps % NETWORK_STEPS:
        raise UserError(f"--ddpm_num_steps {steps}: weights of {project.name} need a multiple of {NETWORK_STEPS}")
    scale = NETWORK_STEPS / steps
    scheduler = build_scheduler(
        schedule, steps, variance_type, beta_start=scale * BETA_START, beta_end=scale * BETA_END
    )
    logger.info(
        "Of the %d steps the pipeline visits %d, those that the network sees as 0, 1, 2, ...", steps, NETWORK_STEPS
    )
    visited = scheduler.alphas_cumprod[:: steps // NETWORK_STEPS]
    betas = 1 - visited / torch.cat([torch.ones(1, dtype=visited.dtype), visited[:-1]])
    return ExactDDPMScheduler(
        num_train_timesteps=NETWORK_STEPS, variance_type=variance_type, trained_betas=betas.tolist()
    )
