"""A checkpoint is what was written or it is not used."""

import errno
import os
import pickle
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import losses_of
from safetensors.torch import load_file

from common.errors import UserError
from run_folder.checkpoints import InvalidCheckpoint, checkpoints, find_checkpoint, verify

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
    names = [".checkpoint-saved", *(f"checkpoint-{step}" for step in (2, 4, 6))]
    assert sorted(path.name for path in run.glob("*checkpoint-*")) == names


def test_what_was_about_to_take_a_place_takes_it(train, run):
    """Killed between the two names of a replacement: the new checkpoint is whole and has no name yet."""
    shutil.copytree(run / "checkpoint-4", run / ".checkpoint-4.tmp")
    (run / "checkpoint-4").rename(run / ".checkpoint-4.old")
    before = losses_of(run)
    train(run, "--max_train_steps=4", "--checkpointing_steps=2")
    assert losses_of(run) == before
    assert sorted(path.name for path in run.glob("*checkpoint-?*")) == [
        ".checkpoint-saved", "checkpoint-2", "checkpoint-4"
    ]  # fmt: skip
    verify(run / "checkpoint-4")


def test_one_that_cannot_be_pruned_is_no_failed_save(train, tmp_path, monkeypatch, capsys):
    remove = shutil.rmtree

    def busy(path, *args, **options):
        if str(path).endswith("checkpoint-1.old") and not (args or options):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        remove(path, *args, **options)

    monkeypatch.setattr(shutil, "rmtree", busy)
    flags = ["--max_train_steps=3", "--checkpointing_steps=1", "--checkpoints_total_limit=1"]
    run = train(tmp_path / "run", *flags)
    shown = capsys.readouterr().err
    assert "checkpoint-1 could not be deleted" in shown
    assert "could not be saved" not in shown
    assert [path.name for path in checkpoints(run)] == ["checkpoint-3"]


def test_a_checkpoint_can_be_named(train, run, tmp_path):
    other = train(tmp_path / "other", *FLAGS, f"--resume_from_checkpoint={run / 'checkpoint-2'}/")
    assert losses_of(other) == losses_of(run)[2:]
    again = train(run, *FLAGS, "--resume_from_checkpoint=checkpoint-2", "--max_train_steps=3")
    assert len(losses_of(again)) == 3
    # The later one is of another branch now, and is not taken for the newest.
    assert [path.name for path in checkpoints(again)] == ["checkpoint-2", "checkpoint-3"]
    assert (again / "checkpoint-4.abandoned").is_dir()


def test_a_named_one_must_be_there(train, run, tmp_path):
    before = sorted(run.rglob("*"))
    with pytest.raises(UserError, match="no such folder; .*run has checkpoint-2, checkpoint-4. Without the flag"):
        train(run, *FLAGS, "--resume_from_checkpoint=checkpoint-3", "--max_train_steps=6")
    assert sorted(run.rglob("*")) == before
    with pytest.raises(UserError, match="other has no checkpoint"):
        train(tmp_path / "other", *FLAGS, "--resume_from_checkpoint=checkpoint-3")
    assert not (tmp_path / "other").exists()


def test_a_named_one_must_be_valid(train, run, tmp_path):
    (run / "checkpoint-2" / "state.json").write_text("{}")
    with pytest.raises(UserError, match="state.json is not what was written"):
        train(tmp_path / "other", f"--resume_from_checkpoint={run / 'checkpoint-2'}")
    assert (run / "checkpoint-2").is_dir()


def test_another_network_is_refused(train, run):
    with pytest.raises(
        UserError, match="does not fit this configuration .model_config_name_or_path .*network -> None.;"
    ):
        train(run, "--max_train_steps=6", base=["--dataset_name=digits", "--resolution=8", "--channels=1"])
    assert len(losses_of(run)) == 4


def test_other_settings_are_named_and_harmless_ones_are_not(train, run, capsys):
    train(run, "--max_train_steps=5", "--checkpointing_steps=3", "--eval_batch_size=2", "--num_workers=0")
    assert "Settings differ" not in capsys.readouterr().err
    train(run, "--max_train_steps=6", "--learning_rate=1e-4", "--seed=3")
    shown = capsys.readouterr().err
    assert "Settings differ from those of" in shown
    assert "learning_rate 0.0002 -> 0.0001; seed 0 -> 3. From step 5 on" in shown


def test_milestones_and_the_one_resumed_from_are_kept(train, tmp_path):
    flags = ["--checkpointing_steps=1", "--checkpoints_total_limit=1", "--keep_every=3", "--save_images_steps=100"]
    run = train(tmp_path / "run", "--max_train_steps=7", *flags)
    assert [path.name for path in checkpoints(run)] == ["checkpoint-3", "checkpoint-6", "checkpoint-7"]
    train(run, "--max_train_steps=8", *flags)
    assert [path.name for path in checkpoints(run)][-2:] == ["checkpoint-7", "checkpoint-8"]
    train(run, "--max_train_steps=10", *flags)
    assert [path.name for path in checkpoints(run)] == [f"checkpoint-{step}" for step in (3, 6, 8, 9, 10)]


class Evil:
    """Unpickled, it leaves a file behind."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return (Path.touch, (self.trace,))


def mutate(folder: Path, generator: random.Random, trace: Path) -> str:
    """Spoil one file, or two; what was done, or nothing if the content happens to be as it was."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path, other = generator.sample(files, 2)
    content = path.read_bytes()
    kind = generator.choice(["truncate", "flip", "delete", "empty", "swap", "pickle", "append", "state dict"])
    if kind == "truncate":
        path.write_bytes(content[: generator.randrange(len(content))])
    elif kind == "flip":
        spoiled = bytearray(content)
        spoiled[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(spoiled)
    elif kind == "delete":
        path.unlink()
    elif kind == "empty":
        path.write_text("{}" if path.suffix == ".json" else "")
    elif kind == "swap":
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
        if path.read_bytes() == content:  # both networks have the same configuration
            return ""
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Evil(trace)))
    elif kind == "append":
        path.write_bytes(content + b" ")
    else:
        torch.save({"weight": Evil(trace)}, path)
    return f"{kind} {path.relative_to(folder)}"


def test_five_hundred_mutations(run, tmp_path):
    """Not one is taken for a checkpoint, and none gets to run."""
    generator, trace = random.Random(0), tmp_path / "evil was here"
    shutil.rmtree(run / "checkpoint-4")
    config = SimpleNamespace(resume_from_checkpoint="latest", output_dir=str(run), overwrite=False)
    done = 0
    while done < 500:
        shutil.copytree(run / "checkpoint-2", run / "checkpoint-9")
        what = mutate(run / "checkpoint-9", generator, trace)
        if not what:
            shutil.rmtree(run / "checkpoint-9")
            continue
        assert find_checkpoint(config) == run / "checkpoint-2", what
        assert not (run / "checkpoint-9").exists(), what
        assert (run / "checkpoint-9.corrupt").exists(), what
        done += 1
    assert not trace.exists()


FIXTURE = Path(__file__).parent / "fixtures" / "checkpoint-v1"


def test_a_checkpoint_of_the_first_format_loads(train, tmp_path):
    """Made by `python tests/make_fixture.py` when the format was new; every later version must go on from it."""
    verify(FIXTURE)
    flags = [f"--model_config_name_or_path={FIXTURE / 'unet'}", "--max_train_steps=5", "--checkpointing_steps=100"]
    run = train(tmp_path / "run", *flags, f"--resume_from_checkpoint={FIXTURE}")
    assert len(losses_of(run)) == 2
    fresh = train(tmp_path / "fresh", *flags)
    assert losses_of(run) == pytest.approx(losses_of(fresh)[3:], rel=1e-4)
    name = "unet/diffusion_pytorch_model.safetensors"
    ours, theirs = (load_file(folder / "checkpoint-5" / name) for folder in (run, fresh))
    assert all(torch.allclose(ours[key], theirs[key], atol=1e-5) for key in theirs)
