"""The network is that of Ho et al. (2020): its arithmetic, size, initialisation and first loss."""

import copy
import math

import pytest
import torch
from diffusers import UNet2DModel
from original_unet import OriginalUNet, load_from_diffusers, randomize
from torch import Tensor

from common.errors import UserError
from training.network import build_unet, initialize_like_paper, load_network

TIMESTEPS = (0, 10, 300, 999)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def relative_error(output: Tensor, expected: Tensor) -> float:
    return ((output - expected).abs().max() / expected.abs().max()).item()


@pytest.fixture(scope="module")
def initialized_unet() -> UNet2DModel:
    torch.manual_seed(0)
    return build_unet(resolution=32, channels=3, dropout=0.1)


@pytest.fixture(scope="module")
def random_unet(initialized_unet) -> UNet2DModel:
    unet = copy.deepcopy(initialized_unet).eval()
    randomize(unet.named_parameters())
    return unet


@pytest.fixture(scope="module")
def random_original(random_unet) -> OriginalUNet:
    original = OriginalUNet().eval()
    load_from_diffusers(original, random_unet.state_dict())
    return original


@pytest.fixture(scope="module")
def noisy_images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=generator(2))


# The arithmetic


@pytest.mark.parametrize("timestep", TIMESTEPS)
@torch.no_grad()
def test_output_equals_the_original(random_unet, random_original, noisy_images, timestep):
    t = torch.full((2,), timestep)
    expected = random_original(noisy_images, t)
    assert expected.std() > 0.1
    assert relative_error(random_unet(noisy_images, t).sample, expected) < 1e-5


@torch.no_grad()
def test_each_image_has_its_own_timestep(random_unet, random_original, noisy_images):
    t = torch.tensor([999, 10])
    assert relative_error(random_unet(noisy_images, t).sample, random_original(noisy_images, t)) < 1e-5


def dropout_by_position(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout whose mask depends on the order of the calls alone; PyTorch's follows the memory format."""
    if not training or p == 0:
        return x
    return x * (torch.rand(x.shape) >= p) / (1 - p)


@torch.no_grad()
def test_dropout_has_the_place_and_rate_of_the_original(random_unet, random_original, noisy_images, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "dropout", dropout_by_position)
    t = torch.full((2,), 300)
    torch.manual_seed(3)
    output = copy.deepcopy(random_unet).train()(noisy_images, t).sample
    torch.manual_seed(3)
    expected = copy.deepcopy(random_original).train()(noisy_images, t)

    assert relative_error(expected, random_original(noisy_images, t)) > 0.05
    assert relative_error(output, expected) < 1e-5


@torch.no_grad()
def test_the_original_can_be_built_in_another_shape():
    unet = UNet2DModel(
        sample_size=16,
        in_channels=1,
        out_channels=2,
        block_out_channels=(32, 96),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=None,
        downsample_padding=0,
        norm_eps=1e-6,
        flip_sin_to_cos=False,
        freq_shift=1,
    ).eval()
    randomize(unet.named_parameters())
    original = OriginalUNet(32, (1, 3), 1, (8,), 0.0, in_channels=1, out_channels=2, resolution=16).eval()
    load_from_diffusers(original, unet.state_dict())
    images, t = torch.randn(2, 1, 16, 16, generator=generator(2)), torch.tensor([0, 300])
    assert relative_error(unet(images, t).sample, original(images, t)) < 1e-5


def test_loading_the_original_uses_every_tensor(random_unet):
    original, weights = OriginalUNet(), random_unet.state_dict()
    with pytest.raises(KeyError, match="no place for .*surplus"):
        load_from_diffusers(original, {**weights, "surplus.weight": torch.zeros(1)})
    with pytest.raises(KeyError, match="needs conv_out.bias"):
        load_from_diffusers(original, {name: w for name, w in weights.items() if name != "conv_out.bias"})
    with pytest.raises(ValueError, match="conv_out.bias is"):
        load_from_diffusers(original, {**weights, "conv_out.bias": torch.zeros(1)})


# The library's defaults


def test_number_of_parameters(initialized_unet, random_original):
    assert sum(parameter.numel() for parameter in initialized_unet.parameters()) == 35_746_307
    assert sum(parameter.numel() for parameter in random_original.parameters()) == 35_746_307


@pytest.mark.parametrize(
    ("name", "default", "least_error"),
    [
        ("norm_eps", 1e-5, 2e-5),
        ("attention_head_dim", 8, 0.05),
        ("downsample_padding", 1, 0.3),
        ("freq_shift", 0, 0.05),
        ("flip_sin_to_cos", True, 0.1),
    ],
)
@torch.no_grad()
def test_library_default_is_another_network_of_the_same_size(
    random_unet, random_original, noisy_images, name, default, least_error
):
    """The weights load without a complaint and the parameters add up; only the output tells."""
    assert random_unet.config[name] != default
    with torch.device("meta"):
        wrong_unet = UNet2DModel.from_config({**random_unet.config, name: default})
    wrong_unet.load_state_dict(random_unet.state_dict(), assign=True)
    assert wrong_unet.num_parameters() == random_unet.num_parameters()

    t = torch.full((2,), 300)
    output = wrong_unet.eval()(noisy_images, t).sample
    assert relative_error(output, random_original(noisy_images, t)) > least_error


# The initialisation


def assert_initialized_like_paper(unet: UNet2DModel) -> None:
    """Judged under the original's names, where `init_scale=0.` stands at conv2, proj_out and conv_out."""
    original = OriginalUNet()
    load_from_diffusers(original, unet.state_dict())
    silenced = 0
    for name, parameter in original.named_parameters():
        layer, kind = name.split(".")[-2:]
        if kind == "bias":
            assert parameter.count_nonzero() == 0, name
        elif "norm" in layer:
            assert (parameter == 1).all(), name
        else:
            gain = 1e-5 if layer in ("conv2", "proj_out", "conv_out") else 1
            silenced += gain != 1
            fan_out, fan_in = parameter.shape[:2]
            bound = gain * math.sqrt(6 / ((fan_in + fan_out) * parameter[0, 0].numel()))
            assert 0.99 * bound < parameter.abs().max() <= bound * (1 + 1e-6), name
            assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.04), name
    residual_blocks, attention_blocks, output_convolutions = 22, 6, 1
    assert silenced == residual_blocks + attention_blocks + output_convolutions


def test_built_network_is_initialized_like_the_paper(initialized_unet):
    assert_initialized_like_paper(initialized_unet)


def test_initialization_replaces_that_of_the_library(initialized_unet):
    unet = UNet2DModel.from_config(initialized_unet.config)
    with pytest.raises(AssertionError):
        assert_initialized_like_paper(unet)
    initialize_like_paper(unet, generator(4))
    assert_initialized_like_paper(unet)


def test_initialization_follows_its_generator(initialized_unet):
    first, second = copy.deepcopy(initialized_unet), copy.deepcopy(initialized_unet)
    initialize_like_paper(first, generator(4))
    initialize_like_paper(second, generator(4))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    initialize_like_paper(second, generator(5))
    assert not torch.equal(first.conv_in.weight, second.conv_in.weight)


@torch.no_grad()
def test_first_loss_is_one(initialized_unet):
    """A silent network predicts zero, and the mean square of the noise is one."""
    random = generator(6)
    images = torch.rand(8, 3, 32, 32, generator=random) * 2 - 1
    noise = torch.randn(8, 3, 32, 32, generator=random)
    t = torch.randint(0, 1000, (8,), generator=random)
    alphas_cumprod = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0)
    signal = alphas_cumprod[t].sqrt().float()[:, None, None, None]
    sigma = (1 - alphas_cumprod[t]).sqrt().float()[:, None, None, None]

    prediction = copy.deepcopy(initialized_unet).train()(signal * images + sigma * noise, t).sample
    assert (prediction - noise).square().mean().item() == pytest.approx(1.00, abs=0.02)


def test_a_network_that_is_nowhere_says_where_it_was_looked_for(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        UserError, match=r"x: not a file or folder, and cannot be loaded from the Hub \(HF_HUB_OFFLINE is set"
    ):
        load_network("nobody/x", 8)
