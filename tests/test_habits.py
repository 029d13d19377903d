"""What people type who come from other programs is accepted with its meaning, or answered with what to type here."""

import re
import shlex

import pytest

from common.errors import UserError
from common.options import facts_of, habits, own_name
from evaluation.evaluate_options import EvaluationOptions, parse_evaluation
from generation.generate_options import GenerationOptions, parse_generation
from preparation.prepare_options import PrepareOptions
from run_folder.config import (
    ConditionalConfig,
    TrainingConfig,
    as_yaml,
    parse_conditional_config,
    parse_config,
    resolve_steps,
)
from visualize import Options as VisualizeOptions

KINDS = (TrainingConfig, ConditionalConfig, GenerationOptions, EvaluationOptions, PrepareOptions, VisualizeOptions)
PARSERS = {"train": parse_config, "generate": parse_generation, "evaluate": parse_evaluation}
SCRIPTS = {"train": TrainingConfig, "generate": GenerationOptions, "evaluate": EvaluationOptions}

# Commands as the documentation of those programs has them.
CIFAR10 = """
    --dataset_name="uoft-cs/cifar10" --resolution=32 --center_crop --random_flip --output_dir="ddpm-ema-cifar10-float64"
    --train_batch_size=16 --num_epochs=2048 --save_images_epochs=500 --gradient_accumulation_steps=1 --use_ema
    --learning_rate=2e-4 --lr_scheduler="constant_with_warmup" --lr_warmup_steps=5000 --logger="tensorboard"
    --checkpointing_steps=200000
"""
FLOWERS = """
    --dataset_name="huggan/flowers-102-categories" --resolution=64 --center_crop --random_flip
    --output_dir="ddpm-ema-flowers-64" --train_batch_size=16 --num_epochs=100 --gradient_accumulation_steps=1 --use_ema
    --learning_rate=1e-4 --lr_warmup_steps=500 --mixed_precision=no --push_to_hub
"""
# Every flag of the stock script, with a value where it takes one.
STOCK = """
    --dataset_name=x --dataset_config_name=x --model_config_name_or_path=x --train_data_dir=x --output_dir=x
    --overwrite_output_dir --cache_dir=x --resolution=64 --center_crop --random_flip --train_batch_size=16
    --eval_batch_size=16 --dataloader_num_workers=0 --num_epochs=100 --save_images_epochs=10 --save_model_epochs=10
    --gradient_accumulation_steps=1 --learning_rate=1e-4 --lr_scheduler=cosine --lr_warmup_steps=500 --adam_beta1=0.95
    --adam_beta2=0.999 --adam_weight_decay=1e-6 --adam_epsilon=1e-08 --use_ema --ema_inv_gamma=1.0 --ema_power=0.75
    --ema_max_decay=0.9999 --push_to_hub --hub_token=x --hub_model_id=x --hub_private_repo --logger=tensorboard
    --logging_dir=logs --local_rank=-1 --mixed_precision=no --prediction_type=epsilon --ddpm_num_steps=1000
    --ddpm_num_inference_steps=1000 --ddpm_beta_schedule=linear --checkpointing_steps=500 --checkpoints_total_limit=2
    --resume_from_checkpoint=latest --enable_xformers_memory_efficient_attention --preserve_input_precision
"""
# The names of every flag of the scripts of ddpm-torch and improved-diffusion.
ELSEWHERE = {
    "train": """
        config-path exp-name dataset root epochs lr beta1 beta2 batch-size num-accum block-size timesteps beta-schedule
        beta-start beta-end model-mean-type model-var-type loss-type num-workers train-device eval-device image-dir
        image-intv num-samples chkpt-dir chkpt-name chkpt-intv seed resume chkpt-path eval use-ema use-ddim
        skip-schedule subseq-size ema-decay distributed rigid-launch num-gpus dry-run num-save-images
        data_dir schedule_sampler weight_decay lr_anneal_steps batch_size microbatch ema_rate log_interval save_interval
        resume_checkpoint use_fp16 fp16_scale_growth image_size num_channels num_res_blocks num_heads num_heads_upsample
        attention_resolutions dropout learn_sigma sigma_small class_cond diffusion_steps noise_schedule use_kl
        predict_xstart rescale_timesteps rescale_learned_sigmas use_checkpoint use_scale_shift_norm
        img_size amp base_ch report-to snr-gamma
    """,
    "generate": """
        batch-size total-size config-dir chkpt-dir chkpt-path save-dir device use-ema use-ddim no_ddim eta
        skip-schedule subseq-size suffix max-workers num-gpus dataset ckpt out
        clip_denoised num_samples model_path timestep_respacing
    """,
    "evaluate": """
        dataset eval-batch-size eval-total-size num-workers nhood-size row-batch-size col-batch-size device
        precomputed-dir metrics sample-folder num-gpus ckpt out use-ddim subseq-size
    """,
}


def answer(parse, *flags: str) -> str:
    with pytest.raises(UserError) as error:
        parse([*flags])
    return str(error.value)


def test_the_cifar10_command_with_all_of_its_flags():
    config = parse_config(shlex.split(CIFAR10))
    assert (config.center_crop, config.random_flip, config.gradient_accumulation_steps) == (True, True, 1)
    assert (config.save_images_epochs, config.checkpointing_steps, config.use_ema) == (500, 200_000, True)
    assert resolve_steps(config, 50_000 // 128) == 798_720
    assert parse_config([*shlex.split(CIFAR10), "--checkpoints_total_limit=9"]).checkpoints_total_limit == 9


def test_the_command_of_the_flowers():
    config = parse_config(shlex.split(FLOWERS))
    assert (config.resolution, config.num_epochs, config.lr_warmup_steps, config.push_to_hub) == (64, 100, 500, True)


@pytest.mark.parametrize("flag", shlex.split(STOCK))
def test_every_flag_of_the_stock_script(flag, capsys):
    data = [] if flag.startswith(("--dataset_name", "--train_data_dir")) else ["--dataset_name=x"]
    needs = {"--ema_inv": ["--ema_warmup"], "--ema_power": ["--ema_warmup"], "--hub_private": ["--push_to_hub"]}
    needs |= {"--hub_token": ["--push_to_hub"]}
    more = [word for begin, words in needs.items() if flag.startswith(begin) for word in words]
    if flag == "--preserve_input_precision":
        assert "rounded to 8; leave it out" in answer(parse_config, *data, flag)
        return
    parse_config([*data, *more, flag])
    is_noted = flag.startswith(("--local_rank", "--enable_xformers"))
    assert capsys.readouterr().err.count("is not needed and ignored") == is_noted


@pytest.mark.parametrize(
    ("script", "name"), [(script, name) for script, names in ELSEWHERE.items() for name in names.split()]
)
def test_every_flag_of_other_programs(script, name):
    plain = name.replace("-", "_")
    if own_name(plain, SCRIPTS[script]) is None:
        said = answer(PARSERS[script], f"--{name}=7")
        assert said.startswith(f"unknown flag --{name}: ")
        assert "{" not in said


@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        ("train", "--num-gpus 4 --distributed", r"--num-gpus: type accelerate launch --multi_gpu --num_processes 4"),
        ("train", "--dataset celeba --num-accum 2 --distributed", "--dataset: type --dataset_name uoft-cs/cifar10"),
        ("train", "--train-device cuda:0", "type CUDA_VISIBLE_DEVICES=0 python "),
        ("train", "--use_checkpoint True", "type --gradient_checkpointing"),
        ("train", "--scale_lr", "as in --learning_rate"),
        ("train", "--use_ddim", "python generate.py --model RUN --ddim"),
        ("train", "--prompt=x", "--validation_prompts: is an option of train_conditional.py"),
        ("train", "--class_cond True", "type python train_conditional.py --condition class"),
        ("train", "--hub_tokn=hf_secret", "did you mean --hub_token?"),
        ("train", "--foo", r"unknown flag --foo \(see --help\)"),
        ("generate", "x --suffix _ddim", "for another name type --output_dir FOLDER"),
        ("evaluate", "--nhood-size 3", "neighbours are 3"),
    ],
)
def test_the_answer_is_what_to_type(script, flags, said):
    message = answer(PARSERS[script], *flags.split())
    assert re.search(said, message)
    assert "secret" not in message


def test_other_names_mean_the_same_in_both_spellings(capsys):
    command = "--chkpt-path ./chkpts/cifar10/cifar10_2040.pt --use-ddim --skip-schedule quadratic --subseq-size 100"
    options = parse_generation([*command.split(), "--total-size", "50000", "--local_rank", "0", "--save_dir=out"])
    assert (options.model, options.ddim, options.skip_schedule) == (
        "./chkpts/cifar10/cifar10_2040.pt",
        True,
        "quadratic",
    )
    assert (options.num_inference_steps, options.num_images, options.output_dir) == (100, 50_000, "out")
    assert capsys.readouterr().err.count("local_rank is not needed") == 1
    assert parse_generation(["x", "--no-ddim"]).ddpm
    config = parse_config("--data-dir=x --img-size 16 --lr 1e-4 --no_flip --epochs=3 --report-to=none".split())
    assert (config.train_data_dir, config.resolution, config.learning_rate) == ("x", 16, 1e-4)
    assert (config.random_flip, config.num_epochs, config.logger) == (False, 3, "none")
    assert parse_conditional_config("--condition=text --prompt a b".split()).validation_prompts == ["a", "b"]
    assert "--sample_folder" not in answer(parse_evaluation, "--sample-folder", "/nowhere", "--data=digits")


def test_the_keys_of_other_programs(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text("data-dir: photos\nimg_size: 64\ntimesteps: 1000\nnum_accum: 2\nlr: 1e-4\nlocal_rank: 0\n")
    config = parse_config([f"--config-path={file}"])
    assert (config.train_data_dir, config.resolution, config.gradient_accumulation_steps) == ("photos", 64, 2)
    assert "local_rank is not needed" in capsys.readouterr().err
    for text, said in {
        "amp: true": "unknown key amp: type --mixed_precision bf16",
        "base_ch: 128": "unknown key base_ch: the network is the paper's",
        "lr: 1\nlearning_rate: 1": "lr and learning_rate are one option",
        "model: {base_ch: 64}": "model: is a section",
        "config: other.yaml": "config: a file does not name another file",
        "num_epochs: 1\nmax_train_steps: 1": "--max_train_steps and --num_epochs are two ways",
    }.items():
        file.write_text(text)
        assert said in answer(parse_config, f"--config={file}")


def test_a_saved_configuration_is_not_one_that_says_a_thing_twice(tmp_path):
    (tmp_path / "c.yaml").write_text(as_yaml(parse_config(shlex.split(CIFAR10))))
    assert parse_config([f"--config={tmp_path / 'c.yaml'}"]).save_images_epochs == 500


def test_what_a_name_says_besides_can_be_said_otherwise(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("dataset_name: x\nloss_weighting: p2\np2_gamma: 2\n")
    config = parse_config([f"--config={file}", "--snr_gamma=5"])
    assert (config.loss_weighting, config.p2_gamma) == ("min_snr", 1)
    file.write_text("dataset_name: x\nsnr-gamma: 4\n")
    assert parse_config([f"--config={file}"]).loss_weighting == "min_snr"
    assert "no effect without --loss_weighting min_snr" in answer(
        parse_config, f"--config={file}", "--snr_gamma=5", "--loss_weighting=p2"
    )


def test_the_table_is_of_options_that_exist():
    for name, targets in habits()["accepted"].items():
        for target in [targets] if isinstance(targets, str) else targets:
            assert any(target in facts_of(kind) for kind in KINDS), name
    flags = {name for kind in KINDS for name in facts_of(kind)}
    flags |= {"multi_gpu", "num_processes", "nproc_per_node", "help"}
    for name, text in {**habits()["answered"], **habits()["ignored"]}.items():
        assert not [flag for flag in re.findall(r"--(\w+)", text) if flag not in flags], name
        assert re.fullmatch(r"[a-z0-9_]+=?", name)
        assert len(text.format(script="train_unconditional.py", value="N")) < 160
    # An answer that no script gives would be one that nobody reads.
    for name in habits()["answered"]:
        assert any(own_name(name, kind) is None for kind in SCRIPTS.values()), name
