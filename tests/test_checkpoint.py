"""A checkpoint is what was written or it is not used."""

import shutil

import pytest
from conftest import losses_of

from common.errors import UserError
from training.checkpoint import InvalidCheckpoint, verify

EVERY_FILE = [
    "unet/config.json",
    "unet/diffusion_pytorch_model.safetensors",
    "unet_ema/diffusion_pytorch_model.safetensors",
    "optimizer.safetensors",
    "sampler.safetensors",
    "state.json",
    "manifest.json",
]
FLAGS = ["--max_train_steps=4", "--checkpointing_steps=2"]


@pytest.fixture
def run(train, tmp_path):
    return train(tmp_path / "run", *FLAGS)


@pytest.fixture
def checkpoint(run):
    verify(run / "checkpoint-4")
    return run / "checkpoint-4"


@pytest.mark.parametrize("name", EVERY_FILE)
def test_a_flipped_byte_is_noticed(checkpoint, name):
    path = checkpoint / name
    content = path.read_bytes()
    for position in range(0, len(content), max(1, len(content) // 40)):
        spoiled = bytearray(content)
        spoiled[position] ^= 1
        path.write_bytes(spoiled)
        with pytest.raises(InvalidCheckpoint):
            verify(checkpoint)
    path.write_bytes(content)
    verify(checkpoint)


@pytest.mark.parametrize("damage", ["truncate", "delete", "empty"])
@pytest.mark.parametrize("name", ["optimizer.safetensors", "manifest.json"])
def test_the_newest_valid_one_is_used(train, run, name, damage, capsys):
    uninterrupted = losses_of(run)
    path = run / "checkpoint-4" / name
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 10 if damage == "truncate" else 0])
    train(run, *FLAGS)
    shown = capsys.readouterr().err
    assert "checkpoint-4 is set aside as checkpoint-4.corrupt: " in shown
    assert "Resuming from" in shown
    assert losses_of(run) == uninterrupted
    verify(run / "checkpoint-4")
    assert (run / "checkpoint-4.corrupt").is_dir()


def test_half_a_save_is_not_a_checkpoint(train, run):
    """What a process killed during a save leaves behind is neither found nor in the way."""
    shutil.copytree(run / "checkpoint-2", run / ".checkpoint-6.tmp")
    train(run, "--max_train_steps=6", "--checkpointing_steps=2")
    assert sorted(path.name for path in run.glob("*checkpoint-*")) == [f"checkpoint-{step}" for step in (2, 4, 6)]


def test_a_checkpoint_can_be_named(train, run, tmp_path):
    other = train(tmp_path / "other", *FLAGS, f"--resume_from_checkpoint={run / 'checkpoint-2'}/")
    assert losses_of(other) == losses_of(run)[2:]
    again = train(run, *FLAGS, "--resume_from_checkpoint=checkpoint-2")
    assert len(losses_of(again)) == 4


def test_a_named_one_must_be_valid(train, run, tmp_path):
    (run / "checkpoint-2" / "state.json").write_text("{}")
    with pytest.raises(UserError, match="state.json is not what was written"):
        train(tmp_path / "other", f"--resume_from_checkpoint={run / 'checkpoint-2'}")
    assert (run / "checkpoint-2").is_dir()


def test_another_network_is_refused(train, run):
    with pytest.raises(UserError, match="does not fit this configuration"):
        train(run, "--max_train_steps=6", "--no_use_ema", base=["--dataset_name=digits", "--resolution=8"])
    assert len(losses_of(run)) == 4
