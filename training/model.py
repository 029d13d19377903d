"""The network: the paper's U-Net as a UNet2DModel, its shapes for other sizes, and the paper's initialisation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from common.errors import UserError

if TYPE_CHECKING:
    from diffusers import UNet2DModel

    from training.config import TrainingConfig

# What differs from UNet2DModel's defaults. With the defaults, five of these give another network
# with the same number of parameters (docs/reproduction.md).
PAPER_ARITHMETIC = {
    "layers_per_block": 2,
    "attention_head_dim": None,
    "downsample_padding": 0,
    "norm_eps": 1e-6,
    "norm_num_groups": 32,
    "flip_sin_to_cos": False,
    "freq_shift": 1,
}
PAPER_CIFAR10 = {
    **PAPER_ARITHMETIC,
    "sample_size": 32,
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": (128, 256, 256, 256),
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    "dropout": 0.1,
}
PAPER_CIFAR10_PARAMETERS = 35_746_307

# Channels of each level by image size: 32 and 256 are the paper's, the others follow them.
CHANNELS = {
    8: (32, 64),
    16: (64, 128, 128),
    32: (128, 256, 256, 256),
    64: (128, 256, 256, 256),
    128: (128, 128, 256, 256, 512),
    256: (128, 128, 256, 256, 512, 512),
}
ATTENTION_RESOLUTION = 16
ZERO_GAIN = 1e-5  # a variance scale of 1e-10


def network_shape(resolution: int) -> tuple[tuple[int, ...], int]:
    """Channels of each level and the level with attention, for a size from 8 to 511.

    The image is halved as often as in the nearest size at or below it in `CHANNELS`, or once less when that
    division leaves a remainder (28 is halved to 14 and 7); attention is at the first level of at most 16 pixels.
    """
    if not min(CHANNELS) <= resolution < 2 * max(CHANNELS):
        raise UserError(
            f"--resolution {resolution}: networks are defined for {min(CHANNELS)} to {2 * max(CHANNELS) - 1} pixels; "
            f"choose such a size or describe another network with --model_config_name_or_path"
        )
    channels = CHANNELS[max(size for size in CHANNELS if size <= resolution)]
    halvings = len(channels) - 1
    if resolution % 2**halvings and halvings > 1:
        channels, halvings = channels[:-1], halvings - 1
    if resolution % 2**halvings:
        below = resolution // 2 ** (halvings + 1) * 2 ** (halvings + 1)
        above = below + 2 ** (halvings + 1)
        raise UserError(
            f"--resolution {resolution}: the network cannot halve it {halvings} times; "
            f"use {' or '.join(str(size) for size in (below, above) if size >= min(CHANNELS))}"
        )
    attention = next(
        level for level in range(len(channels)) if resolution >> level <= ATTENTION_RESOLUTION or level == halvings
    )
    return channels, attention


def build_unet(
    resolution: int, channels: int, dropout: float = 0.1, generator: torch.Generator | None = None
) -> UNet2DModel:
    """The paper's network for a size of image; at 32 pixels and 3 channels it is that of CIFAR-10."""
    from diffusers import UNet2DModel

    block_out_channels, attention = network_shape(resolution)
    levels = range(len(block_out_channels))
    unet = UNet2DModel(
        **PAPER_ARITHMETIC,
        sample_size=resolution,
        in_channels=channels,
        out_channels=channels,
        block_out_channels=block_out_channels,
        down_block_types=tuple("AttnDownBlock2D" if level == attention else "DownBlock2D" for level in levels),
        up_block_types=tuple("AttnUpBlock2D" if level == attention else "UpBlock2D" for level in reversed(levels)),
        dropout=dropout,
    )
    initialize_like_paper(unet, generator)
    return unet


def load_network_config(name_or_path: str, resolution: int) -> dict:
    """Somebody's UNet2DModel configuration: a config.json, a folder or a Hub id."""
    from diffusers import UNet2DModel

    flag = f"--model_config_name_or_path {name_or_path}"
    try:
        config = UNet2DModel.load_config(name_or_path)
        halvings = len(config["block_out_channels"]) - 1
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{flag}: not a UNet2DModel configuration ({first_line(error)})") from error
    if config["sample_size"] != resolution:
        raise UserError(f"{flag}: sample_size is {config['sample_size']}, but --resolution is {resolution}")
    if resolution % 2**halvings:
        raise UserError(f"--resolution {resolution}: the network in {name_or_path} halves it {halvings} times")
    return config


def build_unet_from_config(
    name_or_path: str, resolution: int, channels: int, generator: torch.Generator | None = None
) -> UNet2DModel:
    """The network of a configuration, initialised as in the paper."""
    from diffusers import UNet2DModel

    unet = UNet2DModel.from_config(load_network_config(name_or_path, resolution))
    if (unet.config.in_channels, unet.config.out_channels) != (channels, channels):
        raise UserError(
            f"--model_config_name_or_path {name_or_path}: the network has {unet.config.in_channels} channels in and "
            f"{unet.config.out_channels} out, but the images have {channels}; change the file or --channels"
        )
    initialize_like_paper(unet, generator)
    return unet


def check_network(config: TrainingConfig) -> None:
    """Raise, before any image is decoded, if there is no network for the resolution."""
    if config.model_config_name_or_path is None:
        network_shape(config.resolution)
    else:
        load_network_config(config.model_config_name_or_path, config.resolution)


def build_training_unet(config: TrainingConfig, channels: int, generator: torch.Generator) -> UNet2DModel:
    """The network that a run's configuration asks for."""
    if config.model_config_name_or_path is None:
        return build_unet(config.resolution, channels, config.dropout, generator)
    return build_unet_from_config(config.model_config_name_or_path, config.resolution, channels, generator)


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def zero_initialized(unet: nn.Module) -> dict[str, nn.Module]:
    """The layers that start (nearly) at zero: what a res-block, an attention and the whole network add."""
    return {
        name: module
        for name, module in unet.named_modules()
        if name.endswith((".conv2", ".to_out.0")) or name == "conv_out"
    }


@torch.no_grad()
def initialize_like_paper(unet: nn.Module, generator: torch.Generator | None = None) -> None:
    """Xavier-uniform weights, zero biases, and gain 1e-5 where `zero_initialized` (Ho et al. 2020, code)."""
    nearly_zero = zero_initialized(unet)
    for name, module in unet.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            gain = ZERO_GAIN if name in nearly_zero else 1.0
            nn.init.xavier_uniform_(module.weight, gain=gain, generator=generator)
            nn.init.zeros_(module.bias)


def describe_initialization(unet: nn.Module) -> str:
    """What the weights show, for the audit."""
    convolution = unet.conv_in.weight
    bound = (6 / (convolution[0].numel() + convolution[:, 0].numel())) ** 0.5
    xavier = 0.9 * bound < convolution.abs().max() <= bound and not unet.conv_in.bias.any()
    zero = all(layer.weight.abs().max() < 10 * ZERO_GAIN for layer in zero_initialized(unet).values())
    return f"{'Xavier-uniform' if xavier else 'other'}, {'zero' if zero else 'non-zero'} residual outputs"


def save_unet(unet: UNet2DModel, folder: Path) -> None:
    """A diffusers folder in safetensors; `unet` may be an accelerator's, whose forward is wrapped."""
    unet.save_pretrained(folder, safe_serialization=True)
