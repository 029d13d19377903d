"""Flags, YAML and defaults: one source, and every mistake is one line."""

from typing import get_args, get_type_hints

import pytest
import yaml
from conftest import ROOT, help_of

from common.errors import UserError
from run_folder.config import (
    CHANGED_OBJECTIVE,
    SAME_OBJECTIVE,
    BatchSizes,
    TrainingConfig,
    as_yaml,
    parse_conditional_config,
    parse_config,
    resolve_batch_sizes,
    resolve_steps,
    with_resolved,
)

# The command of a reproduction on eight GPUs, as its author typed it.
CIFAR10_COMMAND = """
    --dataset_name=uoft-cs/cifar10 --resolution=32 --center_crop --random_flip --output_dir=somewhere
    --train_batch_size=16 --num_epochs=2048 --save_images_epochs=500 --gradient_accumulation_steps=1 --use_ema
    --learning_rate=2e-4 --lr_scheduler=constant_with_warmup --lr_warmup_steps=5000
    --logger=tensorboard --checkpointing_steps=200000
"""


def parse(*flags: str) -> TrainingConfig:
    return parse_config(["--dataset_name=digits", *flags])


def test_the_cifar10_command_means_what_its_author_meant():
    config = parse_config(CIFAR10_COMMAND.split())
    assert resolve_batch_sizes(config, num_processes=8) == BatchSizes(per_device=16, accumulation=1, total=128)
    assert resolve_steps(config, steps_per_epoch=50_000 // 128) == 798_720
    assert (config.learning_rate, config.lr_warmup_steps, config.lr_scheduler) == (2e-4, 5000, "constant_with_warmup")
    assert (config.adam_beta1, config.adam_beta2, config.adam_weight_decay, config.max_grad_norm) == (0.9, 0.999, 0, 1)
    assert (config.use_ema, config.ema_max_decay, config.ema_warmup) == (True, 0.9999, False)
    assert (config.dropout, config.variance_type, config.prediction_type) == (0.1, "fixed_large", "epsilon")
    assert (config.random_flip, config.checkpointing_steps, config.logger) == (True, 200_000, "tensorboard")


def test_the_recipe_is_the_default():
    recipe = parse_config([f"--config={ROOT / 'configs' / 'cifar10.yaml'}"])
    plain = parse_config(["--dataset_name=uoft-cs/cifar10"])
    given = {"channels", "config", "output_dir", "max_train_steps", "checkpointing_steps", "save_images_steps",
             "eval_batch_size", "keep_every"}  # fmt: skip
    assert {name for name in vars(plain) if getattr(plain, name) != getattr(recipe, name)} == given
    assert resolve_batch_sizes(recipe, 1).total == 128
    assert resolve_steps(plain, 390) == recipe.max_train_steps == 800_000


def test_no_data_named_means_the_embedded_digits():
    config = parse_config([])
    assert (config.dataset_name, config.resolution, config.random_flip) == ("digits", 8, False)


def test_flags_override_the_file(tmp_path):
    file = tmp_path / "my config.yaml"
    file.write_text("dataset_name: digits\nlearning_rate: 3e-4\nresolution: 16\nuse_ema: false\nchannels: 1\n")
    config = parse_config(["--config", str(file), "--resolution=8"])
    assert (config.learning_rate, config.resolution, config.use_ema, config.channels) == (3e-4, 8, False, "1")
    assert parse_config([f"--config={file}", "--use_ema"]).use_ema is True
    assert parse_config([f"--config={file}", "--train_data_dir=photos"]).dataset_name is None
    file.write_text("train_data_dir: photos\nmax_train_steps: 10\nsave_images_epochs: 1\nmixed_precision: no\n")
    config = parse_config([f"--config={file}", "--dataset_name=digits", "--num_epochs=3", "--save_images_steps=5"])
    assert (config.train_data_dir, config.max_train_steps, config.save_images_epochs) == (None, None, None)
    assert config.mixed_precision == "no"


def test_the_names_of_diffusers_are_accepted():
    flags = """
        --overwrite --cache_dir=c --center_crop --eval_batch_size=4
        --num_workers=0 --save_images_epochs=10 --save_model_epochs=10 --max_train_steps=5
        --gradient_accumulation_steps=2 --adam_epsilon=1e-8 --ema_warmup --ema_inv_gamma=1 --ema_power=0.75
        --push_to_hub --hub_token=t --hub_model_id=me/it --hub_private_repo --logging_dir=logs --mixed_precision=bf16
        --prediction_type=sample --ddpm_num_steps=1000 --report_to=none --ddpm_num_inference_steps=1000
        --ddpm_beta_schedule=squaredcos_cap_v2 --checkpoints_total_limit=2 --resume_from_checkpoint=latest
        --image_column=img --max_train_samples=10 --model-config-name-or-path=m
    """
    config = parse(*flags.split())
    assert (config.logger, config.model_config_name_or_path, config.center_crop) == ("none", "m", True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resoluton=32"], "did you mean --resolution?"),
        (["--lr_warmup", "5"], "type --lr_warmup_steps with a number of steps"),
        (["--no_use_emma"], "did you mean --no_use_ema?"),
        (["--batch_size=3"], "type --train_batch_size 3 for images per device"),
        (["--no_flips"], "did you mean --no_random_flip?"),
        (["--no_adam_beta1"], "did you mean --adam_beta1?"),
        (["--prompt=a cat"], "--validation_prompts: is an option of train_conditional.py"),
        (["--output_dir="], "--output_dir: is empty"),
        (["--resolution=big"], "invalid int value: 'big'"),
        (["--logger=mlflow"], "choose from"),
        (["--mixed_precision=int8"], "choose from"),
        (["--variance_type=fixed_large_log"], "choose from"),
        (["--dropout=1"], "--dropout 1.0: must be at least 0 and below 1"),
        (["--train_batch_size=0"], "--train_batch_size 0: must be greater than 0"),
        (["--learning_rate=-1"], "--learning_rate -1.0: must be greater than 0"),
        (["--ddpm_num_inference_steps=2000"], "more than the 1000 steps"),
        (["--logger=wandb", "--push_to_hub", "--hub_token=hf_secret"], "hf auth login"),
        (["--logger=wandb"], "wandb is not installed"),
        (["--config"], "needs the name"),
        (["--config=missing.yaml"], "missing.yaml: cannot be read"),
    ],
)
def test_mistakes_are_explained(flags, message, monkeypatch):
    wandb_is_there = "hf auth login" in message
    monkeypatch.setattr("run_folder.config.importlib.util.find_spec", lambda name: wandb_is_there or None)
    with pytest.raises(UserError) as caught:
        parse(*flags)
    assert message in str(caught.value)
    assert "hf_secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", "did you mean learning_rate?"),
        ("resolution: big", "invalid int value: 'big'"),
        ("resolution: [8]", "must be a single value"),
        ("- resolution", "'name: value' lines"),
        ("a: b: c", "not valid YAML"),
    ],
)
def test_mistakes_in_the_file_are_explained(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        parse_config([f"--config={tmp_path / 'c.yaml'}"])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "processes", "expected"),
    [
        ([], 1, (128, 1, 128)),
        ([], 8, (16, 1, 128)),
        (["--gradient_accumulation_steps=4"], 2, (16, 4, 128)),
        (["--train_batch_size=16"], 2, (16, 1, 32)),
        (["--train_batch_size=16", "--total_batch_size=128"], 2, (16, 4, 128)),
        (["--total_batch_size=64"], 2, (32, 1, 64)),
        (["--train_batch_size=8", "--total_batch_size=64", "--gradient_accumulation_steps=4"], 2, (8, 4, 64)),
    ],
)
def test_batch_follows_from_what_is_given(flags, processes, expected):
    assert resolve_batch_sizes(parse(*flags), processes) == BatchSizes(*expected)


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        ([], 3),
        (["--train_batch_size=16", "--total_batch_size=128"], 3),
        (["--train_batch_size=16", "--total_batch_size=8"], 1),
        (["--total_batch_size=2"], 4),
        (["--train_batch_size=8", "--total_batch_size=64", "--gradient_accumulation_steps=4"], 1),
    ],
)
def test_batch_that_does_not_work_out(flags, processes):
    with pytest.raises(UserError, match="--total_batch_size"):
        resolve_batch_sizes(parse(*flags), processes)


def test_saved_configuration_repeats_the_run(tmp_path):
    private = ["--push_to_hub", "--hub_token=hf_secret"]
    given = parse("--train_batch_size=16", "--num_epochs=3", "--learning_rate=1e-5", *private)
    resolved = with_resolved(given, resolve_batch_sizes(given, 2), resolve_steps(given, 10), channels=1, precision="no")
    (tmp_path / "config.yaml").write_text(as_yaml(resolved))
    assert "hf_secret" not in (tmp_path / "config.yaml").read_text()
    again = parse_config([f"--config={tmp_path / 'config.yaml'}"])
    for processes in (1, 2, 4, 32):  # the total stays, whatever the number of processes
        assert resolve_batch_sizes(again, processes) == BatchSizes(32 // processes, 1, 32)
    assert resolve_steps(again, 10) == 30
    repeated = with_resolved(again, resolve_batch_sizes(again, 2), resolve_steps(again, 10), channels=1, precision="no")
    assert as_yaml(repeated) == (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize("file", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda file: file.name)
def test_every_config_parses(file):
    parse = parse_conditional_config if "condition" in yaml.safe_load(file.read_text()) else parse_config
    parse([f"--config={file}"])


@pytest.mark.parametrize("script", ["train_unconditional.py", "train_conditional.py"])
def test_help_needs_no_heavy_import(script):
    shown = help_of(script)
    for heading in ("data:", "network:", "diffusion:", "optimiser:", "output:", "model card and upload to the Hub:"):
        assert heading in shown


def test_choices_are_the_registries():
    from schedulers.betas import BETA_SCHEDULES, DIFFUSERS_NAMES
    from schedulers.ddpm import VARIANCE_TYPES
    from schedulers.loss import TIMESTEP_SAMPLERS
    from schedulers.weighting import LOSS_WEIGHTINGS

    hints = get_type_hints(TrainingConfig)
    assert set(get_args(hints["ddpm_beta_schedule"])) == BETA_SCHEDULES.keys() | set(DIFFUSERS_NAMES.values())
    for names, objective in ((SAME_OBJECTIVE, "same"), (CHANGED_OBJECTIVE, "changed")):
        assert names == tuple(name for name, kind in TIMESTEP_SAMPLERS.items() if kind.objective == objective)
    assert set(get_args(hints["loss_weighting"])) == set(LOSS_WEIGHTINGS)
    assert set(get_args(hints["variance_type"])) == set(VARIANCE_TYPES)
