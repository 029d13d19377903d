"""What a run leaves behind gives the same images in stock diffusers, in a process that has never seen this project."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_tiny_flags, make_tiny_network, run_training

from common.randomness import standard_normal
from run_folder.saved_model import find_models
from schedulers.ddpm import ExactDDPMScheduler
from schedulers.denoising import DDPM, NOISE_KEY, denoise, network_predict, to_uint8

# A stock scheduler has float32 tables; over all 1000 steps that has been measured as 0.004 of 255 grey levels.
LARGEST_DIFFERENCE = 0.05

STOCK = """
import sys
import numpy as np, torch
from diffusers import DDPMPipeline
pipeline = DDPMPipeline.from_pretrained(sys.argv[1])
pipeline.set_progress_bar_config(disable=True)
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(7)
images = pipeline(batch_size=8, num_inference_steps=1000, generator=generator, output_type="np").images
np.save(sys.argv[2], images)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory, cache_dir) -> Path:
    """A hundred steps of the least network: what matters here is taken a thousand times."""
    folder = tmp_path_factory.mktemp("pipeline")
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (8,)}
    flags = make_tiny_flags(make_tiny_network(folder / "network", **blocks), cache_dir)
    return run_training(
        folder / "run", [*flags, "--max_train_steps=100", "--learning_rate=2e-3", "--logging_steps=100"]
    )


def test_stock_diffusers_draws_the_same_images(run, tmp_path):
    from diffusers import DDPMPipeline

    subprocess.run([sys.executable, "-c", STOCK, str(run), str(tmp_path / "stock.npy")], cwd=tmp_path, check=True)
    stock = np.load(tmp_path / "stock.npy")

    pipeline = DDPMPipeline.from_pretrained(run)
    pipeline.set_progress_bar_config(disable=True)
    exact = DDPMPipeline(pipeline.unet, ExactDDPMScheduler.from_config(pipeline.scheduler.config))
    exact.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(7)
    ours = exact(batch_size=8, num_inference_steps=1000, generator=generator, output_type="np").images

    difference = np.abs(ours - stock).max() * 255
    print(f"largest difference from stock diffusers over 1000 steps: {difference:.4f} grey levels")
    assert ours.std() > 0.1  # images, not a flat field
    assert difference < LARGEST_DIFFERENCE


def test_the_denoising_loop_is_that_of_the_stock_scheduler(run, monkeypatch):
    """`denoise`, which draws the grids, against the stock scheduler's step with the same noise."""
    from diffusers import DDPMPipeline

    pipeline = DDPMPipeline.from_pretrained(run)
    seeds = torch.arange(4)
    exact = ExactDDPMScheduler.from_config(pipeline.scheduler.config)
    ours = denoise(network_predict(pipeline.unet), DDPM(exact, 1000), seeds, (1, 8, 8))

    pipeline.scheduler.set_timesteps(1000)
    samples = standard_normal(NOISE_KEY, seeds, 0, (1, 8, 8))
    for number, t in enumerate(pipeline.scheduler.timesteps, start=1):
        noise = standard_normal(NOISE_KEY, seeds, number, (1, 8, 8))
        monkeypatch.setattr("diffusers.schedulers.scheduling_ddpm.randn_tensor", lambda *args, noise=noise, **_: noise)
        with torch.no_grad():
            samples = pipeline.scheduler.step(pipeline.unet(samples, t).sample, t, samples).prev_sample
    assert (ours - samples).abs().max() * 127.5 < LARGEST_DIFFERENCE


def test_an_image_depends_on_its_seed_alone(tiny_network):
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    unet = UNet2DModel.from_config(UNet2DModel.load_config(tiny_network)).eval()
    method = DDPM(ExactDDPMScheduler(variance_type="fixed_large"), 20, "fixed_large")
    predict = network_predict(unet)
    seeds = torch.tensor([5, 0, 2**40, 7])
    together = denoise(predict, method, seeds, (1, 8, 8))
    swapped = denoise(predict, method, seeds.flip(0), (1, 8, 8))
    assert (to_uint8(together).int() - to_uint8(swapped.flip(0)).int()).abs().max() <= 1
    assert len({tuple(image.flatten().tolist()) for image in to_uint8(together)}) == 4


def test_grey_levels_are_rounded_and_not_truncated():
    values = torch.arange(256).float() / 127.5 - 1
    assert torch.equal(to_uint8(values), torch.arange(256, dtype=torch.uint8))
    assert to_uint8(torch.tensor([-2.0, 2.0])).tolist() == [0, 255]


@pytest.mark.parametrize("variance_type", ["fixed_large", "fixed_small"])
def test_a_run_and_its_pipeline_draw_with_the_variance_of_the_run(variance_type, train, tmp_path):
    run = train(tmp_path / "run", f"--variance_type={variance_type}", "--max_train_steps=1")
    for _ in range(2):
        (model,) = find_models(str(run), [], None)
        assert DDPM(model.scheduler, 1000).settings["variance_type"] == variance_type
        shutil.rmtree(run / "checkpoint-1", ignore_errors=True)  # and the pipeline is left
