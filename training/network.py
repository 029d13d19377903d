"""The network: the paper's U-Net as a UNet2DModel, its shapes for other sizes, and the paper's initialisation."""

from bisect import bisect
from collections.abc import Callable
from pathlib import Path

import torch
import torch.utils.checkpoint
from diffusers import ModelMixin, UNet2DModel
from diffusers.models.attention_processor import Attention
from torch import nn

from common.errors import UserError, reason_of_hub, user_errors
from common.files import check_layers
from run_folder.config import TrainingConfig
from schedulers.ddpm import LEARNED_VARIANCES

Network = ModelMixin  # a UNet2DModel or, if it reads text, a UNet2DConditionModel
# {"num_class_embeds": n} for a class, which is added to the timestep's embedding, {"cross_attention_dim": n} for text.
Conditioning = dict[str, int] | None

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
SIZES = range(min(CHANNELS), 2 * max(CHANNELS))
ATTENTION_RESOLUTION = 16
CHANNELS_OF_A_HEAD = 64  # in attention to words, of which the paper says nothing
ZERO_GAIN = 1e-5  # a variance scale of 1e-10


def channels_of_levels(resolution: int) -> tuple[int, ...]:
    """Choose the channels of each level for one of `SIZES`: those of the nearest size at or below it in `CHANNELS`.

    The last level is left out where it would leave a remainder: 28 is halved to 14 and 7.
    """
    channels = CHANNELS[max(size for size in CHANNELS if size <= resolution)]
    return channels if len(channels) == 2 or can_be_halved(resolution, channels) else channels[:-1]


def can_be_halved(resolution: int, channels: tuple[int, ...]) -> bool:
    return resolution % 2 ** (len(channels) - 1) == 0


def network_shape(resolution: int) -> tuple[tuple[int, ...], int]:
    """Choose the channels of each level, and the level with attention: the first of at most 16 pixels, or the last."""
    if resolution not in SIZES:
        raise UserError(
            f"--resolution {resolution}: networks are defined for {SIZES[0]} to {SIZES[-1]} pixels; "
            f"choose such a size or describe another network with --model_config_name_or_path"
        )
    channels = channels_of_levels(resolution)
    last = len(channels) - 1
    if not can_be_halved(resolution, channels):
        usable = [size for size in SIZES if can_be_halved(size, channels_of_levels(size))]
        above = bisect(usable, resolution)
        nearest = " or ".join(map(str, usable[above - 1 : above + 1]))
        raise UserError(f"--resolution {resolution}: the network must halve it {last} times; use {nearest}")
    attention = next(level for level in range(last + 1) if resolution >> level <= ATTENTION_RESOLUTION or level == last)
    return channels, attention


def build_unet(
    resolution: int,
    channels: int,
    dropout: float = 0.1,
    generator: torch.Generator | None = None,
    condition: Conditioning = None,
    out_channels: int | None = None,
) -> Network:
    """Build the paper's network for a size of image; at 32 pixels and 3 channels it is that of CIFAR-10.

    With a learned variance it has more channels out than in.
    """
    block_out_channels, attention = network_shape(resolution)
    levels = range(len(block_out_channels))
    settings = {
        **PAPER_ARITHMETIC,
        "sample_size": resolution,
        "in_channels": channels,
        "out_channels": out_channels or channels,
        "block_out_channels": block_out_channels,
        "down_block_types": tuple("AttnDownBlock2D" if level == attention else "DownBlock2D" for level in levels),
        "up_block_types": tuple("AttnUpBlock2D" if level == attention else "UpBlock2D" for level in reversed(levels)),
        "dropout": dropout,
        **(condition or {}),
    }
    unet = kind_of_network(condition)(**with_cross_attention(settings) if reads_text(condition) else settings)
    initialize_like_paper(unet, generator)
    return unet


def reads_text(condition: Conditioning) -> bool:
    return "cross_attention_dim" in (condition or {})


def kind_of_network(condition: Conditioning) -> type[Network]:
    """Return the class of a network with this condition; that for text takes a second to import."""
    if not reads_text(condition):
        return UNet2DModel
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel


def with_cross_attention(settings: dict[str, object]) -> dict[str, object]:
    """Add attention to the words wherever the paper's network has self-attention."""
    types = {
        name: tuple(block.replace("Attn", "CrossAttn") for block in settings[name])
        for name in ("down_block_types", "up_block_types")
    }
    types["mid_block_type"] = "UNetMidBlock2DCrossAttn"
    # The number of heads, whatever its name says.
    heads = tuple(max(1, channels // CHANNELS_OF_A_HEAD) for channels in settings["block_out_channels"])
    return {**settings, **types, "attention_head_dim": heads}


def load_network(name_or_path: str, resolution: int, condition: Conditioning = None) -> Network:
    """Load the network that a config.json describes (a file, a folder or a Hub id), and try it with one image."""
    flag = f"--model_config_name_or_path {name_or_path}"
    kind = kind_of_network(condition)
    if not Path(name_or_path).exists():
        try:
            kind.load_config(name_or_path)
        except Exception as error:  # of the Hub, or of the network
            reason = reason_of_hub(error)
            raise UserError(f"{flag}: not a file or folder, and cannot be loaded from the Hub ({reason})") from error
    with user_errors(f"{flag}: not a {kind.__name__} configuration", Exception):  # whatever a wrong entry runs into
        settings = kind.load_config(name_or_path)
        check_layers(settings)
        if reads_text(condition) and settings.get("_class_name") == "UNet2DModel":
            settings = with_cross_attention(settings)
        unet = kind.from_config(settings, **(condition or {})).eval()
        size, halvings = unet.config.sample_size, len(unet.config.block_out_channels) - 1
    if size != resolution:
        raise UserError(f"{flag}: sample_size is {size}, but --resolution is {resolution}")
    if resolution % 2**halvings:
        raise UserError(f"--resolution {resolution}: the network in {name_or_path} halves it {halvings} times")
    with torch.no_grad(), user_errors(f"{flag}: the network cannot take an image and a timestep", Exception):
        unet(torch.zeros(1, unet.config.in_channels, resolution, resolution), 0, **an_input(condition))
    return unet.train()


def an_input(condition: Conditioning) -> dict[str, torch.Tensor]:
    """Make the inputs that a network with this condition needs for one image, besides image and timestep."""
    if reads_text(condition):
        return {"encoder_hidden_states": torch.zeros(1, 1, condition["cross_attention_dim"])}
    return {"class_labels": torch.zeros(1, dtype=torch.int64)} if condition else {}


def check_network(config: TrainingConfig) -> None:
    """Raise, before any image is decoded, if there is no network for the resolution."""
    if config.model_config_name_or_path is None:
        halvings = len(network_shape(config.resolution)[0]) - 1
    else:
        # How many classes there are, or how wide the encoder is, shows later; any number will do to try the rest.
        conditions = {None: None, "class": {"num_class_embeds": 1}, "text": {"cross_attention_dim": 8}}
        condition = conditions[getattr(config, "condition", None)]
        network = load_network(config.model_config_name_or_path, config.resolution, condition)
        halvings = len(network.config.block_out_channels) - 1
    if config.half_resolution_steps and config.resolution % 2 ** (halvings + 1):
        raise UserError(
            f"--half_resolution_steps {config.half_resolution_steps}: the network halves images {halvings} times, and "
            f"those of half of --resolution {config.resolution} cannot be halved so often; use 0"
        )


def build_training_unet(
    config: TrainingConfig, channels: int, generator: torch.Generator, condition: Conditioning = None
) -> Network:
    """Build the network that a run's configuration asks for, initialised as in the paper."""
    out_channels = 2 * channels if config.variance_type in LEARNED_VARIANCES else channels
    if config.model_config_name_or_path is None:
        unet = build_unet(config.resolution, channels, config.dropout, generator, condition, out_channels)
    else:
        unet = load_described_network(config, channels, condition)
        if unet.config.out_channels != out_channels:
            unet = type(unet).from_config(unet.config, out_channels=out_channels)
        initialize_like_paper(unet, generator)
    if config.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
        for attention in (module for module in unet.modules() if isinstance(module, Attention)):
            attention.set_processor(CheckpointedAttention(attention.processor))
    return unet


class CheckpointedAttention:
    """Attention that is computed again for the gradient, as diffusers' blocks do with their convolutions alone."""

    def __init__(self, processor: Callable[..., torch.Tensor]):
        self.processor = processor

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Take what diffusers gives a processor, by the names that it looks for."""
        inputs = (attn, hidden_states, encoder_hidden_states, attention_mask, temb)
        if not torch.is_grad_enabled():
            return self.processor(*inputs)
        return torch.utils.checkpoint.checkpoint(self.processor, *inputs, use_reentrant=False)


def load_described_network(config: TrainingConfig, channels: int, condition: Conditioning) -> Network:
    """Load the network that the configuration names; raise if its channels do not match the images."""
    described = config.model_config_name_or_path
    unet = load_network(described, config.resolution, condition)
    outputs = (channels, 2 * channels) if config.variance_type in LEARNED_VARIANCES else (channels,)
    if unet.config.in_channels != channels or unet.config.out_channels not in outputs:
        raise UserError(
            f"--model_config_name_or_path {described}: the network has {unet.config.in_channels} channels in and "
            f"{unet.config.out_channels} out, but the images have {channels}; change the file or --channels"
        )
    return unet


def zero_initialized(unet: nn.Module) -> dict[str, nn.Module]:
    """Find the layers that start (nearly) at zero: the outputs that res-blocks, attentions and the network add.

    Attention to words is inside a block of its own; it is the block's output that is added.
    """
    return {
        name: module
        for name, module in unet.named_modules()
        if name.endswith((".conv2", ".to_out.0", ".proj_out"))
        and ".transformer_blocks." not in name
        or name == "conv_out"
    }


@torch.no_grad()
def initialize_like_paper(unet: nn.Module, generator: torch.Generator | None = None) -> None:
    """Draw Xavier-uniform weights, zero biases, with gain 1e-5 where `zero_initialized` (Ho et al. 2020, code).

    Embeddings of classes, which the paper has none of, are standard normal, as in its followers.
    """
    nearly_zero = zero_initialized(unet)
    for name, module in unet.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            gain = ZERO_GAIN if name in nearly_zero else 1.0
            nn.init.xavier_uniform_(module.weight, gain=gain, generator=generator)
            if module.bias is not None:  # queries, keys and values of attention to words have none
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, generator=generator)


def describe_initialization(unet: nn.Module) -> str:
    """Say for the audit what the weights show."""
    convolution = unet.conv_in.weight
    bound = (6 / (convolution[0].numel() + convolution[:, 0].numel())) ** 0.5
    xavier = 0.9 * bound < convolution.abs().max() <= bound and not unet.conv_in.bias.any()
    zero = all(layer.weight.abs().max() < 10 * ZERO_GAIN for layer in zero_initialized(unet).values())
    return f"{'Xavier-uniform' if xavier else 'other'}, {'zero' if zero else 'non-zero'} residual outputs"
