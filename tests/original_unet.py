"""The U-Net of Ho et al. (2020) in plain PyTorch, read line by line from the authors' TensorFlow code
(`diffusion_tf/models/unet.py` and `diffusion_tf/nn.py` of hojonathanho/diffusion). It is the reference that
the diffusers network is compared with, so the two share no code.

Layers carry the names of the TensorFlow variable scopes, as in "down_1/block_0".
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def timestep_embedding(timesteps: Tensor, embedding_dim: int) -> Tensor:
    """Sines, then cosines; the lowest frequency is exactly 1/10000, hence the divisor half_dim - 1."""
    half_dim = embedding_dim // 2
    frequencies = torch.exp(torch.arange(half_dim, dtype=torch.float32) * -(math.log(10000) / (half_dim - 1)))
    angles = timesteps.float()[:, None] * frequencies[None, :]
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, embedding_dim % 2))


def normalize(channels: int) -> nn.GroupNorm:
    # The defaults of tf.contrib.layers.group_norm; PyTorch's own epsilon is 1e-5.
    return nn.GroupNorm(32, channels, eps=1e-6)


class Nin(nn.Module):
    """The original's "network in network": one linear map of the channels at every pixel."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels))
        self.bias = nn.Parameter(torch.zeros(out_channels))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bchw,dc->bdhw", x, self.weight) + self.bias[:, None, None]


class Downsample(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        # TensorFlow's "SAME" at stride 2 on an even size pads only at the bottom and the right.
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        # The original resizes with align_corners=True; at a factor of 2 that still repeats each pixel.
        return self.conv(x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3))


class ResnetBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, temb_channels: int, dropout: float):
        super().__init__()
        self.norm1 = normalize(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.temb_proj = nn.Linear(temb_channels, out_channels)
        self.norm2 = normalize(out_channels)
        self.dropout = dropout
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.nin_shortcut = Nin(in_channels, out_channels) if in_channels != out_channels else nn.Identity()

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.temb_proj(F.silu(temb))[:, :, None, None]
        h = F.dropout(F.silu(self.norm2(h)), self.dropout, self.training)
        return self.nin_shortcut(x) + self.conv2(h)


class AttnBlock(nn.Module):
    """Self-attention between all pixels, with a single head as wide as the layer."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = normalize(channels)
        self.q = Nin(channels, channels)
        self.k = Nin(channels, channels)
        self.v = Nin(channels, channels)
        self.proj_out = Nin(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        h = self.norm(x)
        w = torch.einsum("bchw,bcHW->bhwHW", self.q(h), self.k(h)) * channels**-0.5
        w = w.reshape(batch, height, width, height * width).softmax(dim=-1)
        w = w.reshape(batch, height, width, height, width)
        return x + self.proj_out(torch.einsum("bhwHW,bcHW->bchw", w, self.v(h)))


class OriginalUNet(nn.Module):
    """The defaults are `unet2d16b2` of `scripts/run_cifar.py`: CIFAR-10, 35.7M parameters."""

    def __init__(
        self,
        ch: int = 128,
        ch_mult: Sequence[int] = (1, 2, 2, 2),
        num_res_blocks: int = 2,
        attn_resolutions: Sequence[int] = (16,),
        dropout: float = 0.1,
        in_channels: int = 3,
        out_channels: int = 3,
        resolution: int = 32,
    ):
        super().__init__()
        self.ch = ch
        self.num_resolutions = len(ch_mult)
        self.num_res_blocks = num_res_blocks
        self.attn_resolutions = attn_resolutions
        temb_channels = ch * 4
        layers = {}

        layers["temb/dense0"] = nn.Linear(ch, temb_channels)
        layers["temb/dense1"] = nn.Linear(temb_channels, temb_channels)

        layers["conv_in"] = nn.Conv2d(in_channels, ch, 3, padding=1)
        channels = ch
        skip_channels = [channels]
        for level, multiplier in enumerate(ch_mult):
            for block in range(num_res_blocks):
                layers[f"down_{level}/block_{block}"] = ResnetBlock(channels, ch * multiplier, temb_channels, dropout)
                channels = ch * multiplier
                if resolution >> level in attn_resolutions:
                    layers[f"down_{level}/attn_{block}"] = AttnBlock(channels)
                skip_channels.append(channels)
            if level != self.num_resolutions - 1:
                layers[f"down_{level}/downsample"] = Downsample(channels)
                skip_channels.append(channels)

        layers["mid/block_1"] = ResnetBlock(channels, channels, temb_channels, dropout)
        layers["mid/attn_1"] = AttnBlock(channels)
        layers["mid/block_2"] = ResnetBlock(channels, channels, temb_channels, dropout)

        for level, multiplier in reversed(list(enumerate(ch_mult))):
            for block in range(num_res_blocks + 1):
                layers[f"up_{level}/block_{block}"] = ResnetBlock(
                    channels + skip_channels.pop(), ch * multiplier, temb_channels, dropout
                )
                channels = ch * multiplier
                if resolution >> level in attn_resolutions:
                    layers[f"up_{level}/attn_{block}"] = AttnBlock(channels)
            if level != 0:
                layers[f"up_{level}/upsample"] = Upsample(channels)

        layers["norm_out"] = normalize(channels)
        layers["conv_out"] = nn.Conv2d(channels, out_channels, 3, padding=1)
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        layers = self.layers

        temb = timestep_embedding(t, self.ch)
        temb = layers["temb/dense0"](temb)
        temb = layers["temb/dense1"](F.silu(temb))

        hs = [layers["conv_in"](x)]
        for level in range(self.num_resolutions):
            for block in range(self.num_res_blocks):
                h = layers[f"down_{level}/block_{block}"](hs[-1], temb)
                if h.shape[2] in self.attn_resolutions:
                    h = layers[f"down_{level}/attn_{block}"](h)
                hs.append(h)
            if level != self.num_resolutions - 1:
                hs.append(layers[f"down_{level}/downsample"](hs[-1]))

        h = hs[-1]
        h = layers["mid/block_1"](h, temb)
        h = layers["mid/attn_1"](h)
        h = layers["mid/block_2"](h, temb)

        for level in reversed(range(self.num_resolutions)):
            for block in range(self.num_res_blocks + 1):
                h = layers[f"up_{level}/block_{block}"](torch.cat([h, hs.pop()], dim=1), temb)
                if h.shape[2] in self.attn_resolutions:
                    h = layers[f"up_{level}/attn_{block}"](h)
            if level != 0:
                h = layers[f"up_{level}/upsample"](h)
        assert not hs

        return layers["conv_out"](F.silu(layers["norm_out"](h)))


def diffusers_scopes(num_resolutions: int, num_res_blocks: int) -> dict[str, str]:
    """For each scope of the original, the module of a diffusers UNet2DModel that holds the same layer."""
    scopes = {
        "temb/dense0": "time_embedding.linear_1",
        "temb/dense1": "time_embedding.linear_2",
        "conv_in": "conv_in",
        "mid/block_1": "mid_block.resnets.0",
        "mid/attn_1": "mid_block.attentions.0",
        "mid/block_2": "mid_block.resnets.1",
        "norm_out": "conv_norm_out",
        "conv_out": "conv_out",
    }
    for level in range(num_resolutions):
        down = f"down_blocks.{level}"
        # The original numbers the upward levels by resolution, diffusers in the order they run.
        up = f"up_blocks.{num_resolutions - 1 - level}"
        for block in range(num_res_blocks):
            scopes[f"down_{level}/block_{block}"] = f"{down}.resnets.{block}"
            scopes[f"down_{level}/attn_{block}"] = f"{down}.attentions.{block}"
        for block in range(num_res_blocks + 1):
            scopes[f"up_{level}/block_{block}"] = f"{up}.resnets.{block}"
            scopes[f"up_{level}/attn_{block}"] = f"{up}.attentions.{block}"
        scopes[f"down_{level}/downsample"] = f"{down}.downsamplers.0"
        scopes[f"up_{level}/upsample"] = f"{up}.upsamplers.0"
    return scopes


DIFFUSERS_LAYERS = {
    "norm1": "norm1",
    "conv1": "conv1",
    "temb_proj": "time_emb_proj",
    "norm2": "norm2",
    "conv2": "conv2",
    "nin_shortcut": "conv_shortcut",
    "norm": "group_norm",
    "q": "to_q",
    "k": "to_k",
    "v": "to_v",
    "proj_out": "to_out.0",
    "conv": "conv",
}


def diffusers_name(diffusers_scope: str, name: str) -> str:
    layer, _, kind = name.rpartition(".")
    return f"{diffusers_scope}.{DIFFUSERS_LAYERS[layer]}.{kind}" if layer else f"{diffusers_scope}.{kind}"


def load_from_diffusers(original: OriginalUNet, state_dict: Mapping[str, Tensor]) -> None:
    """Copies the weights of a diffusers UNet2DModel; each of its tensors has to be used exactly once."""
    scopes = diffusers_scopes(original.num_resolutions, original.num_res_blocks)
    unused = dict(state_dict)
    for scope, module in original.layers.items():
        for name, parameter in module.named_parameters():
            source = diffusers_name(scopes[scope], name)
            if source not in unused:
                raise KeyError(f"{scope}/{name} needs {source}, which the diffusers network does not have")
            tensor = unused.pop(source)
            if name == "nin_shortcut.weight":
                tensor = tensor.squeeze(3).squeeze(2)  # diffusers writes this linear map as a 1x1 convolution
            if tensor.shape != parameter.shape:
                raise ValueError(f"{source} is {list(tensor.shape)}, {scope}/{name} {list(parameter.shape)}")
            parameter.data.copy_(tensor)
    if unused:
        raise KeyError(f"the original network has no place for {sorted(unused)}")


@torch.no_grad()
def randomize(weights: Iterable[tuple[str, Tensor]]) -> None:
    """The paper's initialisation silences every residual branch; here each of them, and each bias, speaks."""
    random = torch.Generator().manual_seed(1)
    for name, tensor in weights:
        if tensor.ndim > 1:
            nn.init.xavier_normal_(tensor, generator=random)
        else:
            tensor.normal_(1 if name.endswith("weight") else 0, 0.1, generator=random)
