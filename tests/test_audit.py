"""The audit reads what trains, and marks every deviation and nothing else."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from run_folder.config import parse_config, resolve_batch_sizes
from training.audit import audit, describe_clip, format_audit
from training.network import build_unet
from training.setup import build_process
from training.update import build_averages, build_optimizer


@pytest.fixture(scope="module")
def paper_unet():
    return build_unet(32, 3)


def rows_of(unet, *flags: str, processes: int = 1):
    config = parse_config(["--dataset_name=uoft-cs/cifar10", *flags])
    run = SimpleNamespace(
        config=replace(config, mixed_precision=config.mixed_precision or "no"),
        sizes=resolve_batch_sizes(config, processes),
        batches=SimpleNamespace(images=range(50_000)),
        processes=SimpleNamespace(count=processes),
        state=SimpleNamespace(
            unet=unet,
            loss=SimpleNamespace(process=build_process(config)),
            update=SimpleNamespace(averages=build_averages(config, unet), optimizer=build_optimizer(config, unet)),
        ),
    )
    return audit(run)


def deviations(*args, **kwargs) -> list[str]:
    return [row.what for row in rows_of(*args, **kwargs) if row.deviates]


def test_the_paper_does_not_deviate_from_itself(paper_unet):
    assert deviations(paper_unet) == []
    assert "No deviation from the paper's CIFAR-10 run" in format_audit(rows_of(paper_unet))
    assert deviations(paper_unet, "--train_batch_size=16", processes=8) == []


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--train_batch_size=8"], "batch"),
        (["--ddpm_beta_schedule=cosine"], "schedule"),
        (["--ddpm_num_steps=2000"], "schedule"),
        (["--beta_end=0.01"], "schedule"),
        (["--variance_type=fixed_small"], "variance"),
        (["--prediction_type=v_prediction"], "prediction"),
        (["--timestep_sampler=stratified"], "timesteps"),
        (["--loss=huber"], "loss"),
        (["--loss_weighting=min_snr"], "loss weights"),
        (["--adam_beta1=0.95"], "optimiser"),
        (["--adam_weight_decay=1e-6"], "optimiser"),
        (["--max_grad_norm=2"], "optimiser"),
        (["--clip_per_replica=4"], "optimiser"),
        (["--learning_rate=1e-4"], "learning rate"),
        (["--lr_scheduler=cosine"], "learning rate"),
        (["--lr_warmup_steps=500"], "learning rate"),
        (["--no_use_ema"], "EMA"),
        (["--ema_max_decay=0.999"], "EMA"),
        (["--ema_warmup"], "EMA"),
        (["--ema=power"], "EMA"),
        (["--mixed_precision=bf16"], "precision"),
        (["--no_random_flip"], "flips"),
        (["--input_perturbation=0.1"], "loss"),
    ],
)
def test_every_deviation_is_marked(paper_unet, flags, what):
    assert deviations(paper_unet, *flags) == [what]
    table = format_audit(rows_of(paper_unet, *flags))
    assert [line.split()[1] for line in table.splitlines() if line.startswith("  !")] == [what.split()[0]]
    assert "1 deviation(s)" in table


def test_the_clip_of_the_original_is_named(paper_unet):
    assert deviations(paper_unet, "--clip_per_replica=8") == []
    config = parse_config(["--dataset_name=digits"])
    assert "the original's code clips those of 8 parts of it (--clip_per_replica 8)" in describe_clip(config)
    assert describe_clip(replace(config, clip_per_replica=8)) == ""


def test_the_library_network_is_marked_though_its_size_is_the_same(paper_unet):
    from diffusers import UNet2DModel

    from training.network import PAPER_CIFAR10, PAPER_CIFAR10_PARAMETERS

    wrong = {"norm_eps": 1e-5, "attention_head_dim": 8, "downsample_padding": 1, "freq_shift": 0,
             "flip_sin_to_cos": True}  # fmt: skip
    stock = UNet2DModel(**(PAPER_CIFAR10 | wrong))
    assert stock.num_parameters() == PAPER_CIFAR10_PARAMETERS
    row = next(row for row in rows_of(stock) if row.what == "network")
    assert row.deviates
    for name in wrong:
        assert name in row.this_run
    assert deviations(stock) == ["network", "init"]  # never initialised as in the paper either


def test_dropout_is_read_off_the_network():
    assert "dropout" in deviations(build_unet(8, 1, dropout=0.0))


def test_tf32_is_read_off_the_backend(paper_unet):
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert deviations(paper_unet) == ["precision"]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_other_data_is_a_deviation(paper_unet):
    row = next(row for row in rows_of(paper_unet) if row.what == "data")
    assert not row.deviates
    assert replace(row, this_run="1,541 images").deviates
