"""The table of cases for tests/mistakes.py: what is typed, what it meets, and what must be said.

A line of a family is `flags :: words`. The words are patterns, separated by ` & `; one that begins with `!` must not be
printed. The flags follow the family's command, and what the families share is in `tests/workshop.py`.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import itertools
import json
import math
import os
import pickle
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
from mistakes import MARKER, Case, Change
from workshop import png, write

TRAIN = "train_unconditional.py {tiny} {steps}"
ON_DATA = "train_unconditional.py {small} {steps} --output_dir=out"
CONDITIONAL = "train_conditional.py {tiny} {steps} --output_dir=out"
BY_TEXT = f"{CONDITIONAL} --condition=text --text_encoder=encoder --model_config_name_or_path=text_network"
GENERATE = "generate.py run --ddim --num_inference_steps=2 --num_images=4 --batch_size=4 --output_dir=out"
WITH = "generate.py --ddim --num_inference_steps=2 --num_images=4 --batch_size=4 --output_dir=out"
EVALUATE = "evaluate.py --features=vision {cache} --num_workers=0"
MEASURE_RUN = f"{EVALUATE} --ddim --num_inference_steps=2 --batch_size=4 --num_images=10"
PREPARE = "prepare_data.py --num_workers=0 --resolution=8 --source"
VISUALIZE = "visualize.py --output_dir=figures"
OUT = ("out", "out/*")

CASES: list[Case] = []


def family(name: str, command: str, lines: str, **settings: object) -> None:
    """Add a case for every line of `flags :: words`."""
    for line in filter(None, map(str.strip, lines.splitlines())):
        flags, _, words = line.partition("::")
        case = Case(name, f"{command} {flags}".strip(), tuple(filter(None, words.strip().split(" & "))), **settings)
        CASES.append(case)


def files(name: str, command: str, words: str, changes: dict[str, dict[str, Change]], **settings: object) -> None:
    """Add a case for each way in which files are changed; the words of all of them, and those of each after `::`."""
    for label, given in changes.items():
        more = label.partition("::")[2].strip()
        every = tuple(word for text in (words, more) for word in text.split(" & ") if word)
        CASES.append(Case(f"{name}, {label.partition(' ::')[0]}", command, every, given=given, **settings))


# What is done to files.


def edit(old: bytes | str, new: bytes | str) -> Callable[[Path], None]:
    old, new = (text.encode() if isinstance(text, str) else text for text in (old, new))

    def change(path: Path) -> None:
        assert old in path.read_bytes(), f"{path}: {old!r} is not there"
        path.write_bytes(path.read_bytes().replace(old, new))

    return change


def entries(**values: object) -> Callable[[Path], None]:
    """Other entries of a JSON file."""
    return lambda path: write(path, json.dumps({**json.loads(path.read_text()), **values}, indent=2).encode())


def flip(path: Path) -> None:
    """One bit in the last quarter, where the data are."""
    data = bytearray(path.read_bytes())
    data[len(data) * 7 // 8] ^= 16
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garbage(path: Path) -> None:
    write(path, np.random.default_rng(0).bytes(max(100, path.stat().st_size if path.is_file() else 0)))


def folder(path: Path) -> None:
    if path.is_file():
        path.unlink()
    path.mkdir(parents=True, exist_ok=True)


def file_instead(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    write(path, b"a file")


def link(target: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)

    return change


def pipe(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def without(name: str) -> Callable[[Path], None]:
    """The tensors of a file, but for one."""

    def change(path: Path) -> None:
        from safetensors.numpy import load, save

        tensors = load(path.read_bytes())
        del tensors[name]
        path.write_bytes(save(tensors))

    return change


def held(path: Path) -> io.IOBase:
    """Another process, this one, writes to the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a")
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def sealed(change: Callable[[Path], None] | bytes) -> Callable[[Path], None]:
    """A change to a file of a checkpoint, with a manifest that fits: somebody wants it to be loaded."""

    def apply(path: Path) -> None:
        change(path) if callable(change) else write(path, change)
        checkpoint = next(parent for parent in path.parents if parent.name.startswith("checkpoint-"))
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        data = path.read_bytes()
        name = str(path.relative_to(checkpoint))
        manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        write(checkpoint / "manifest.json", json.dumps(manifest, indent=2).encode())

    return apply


def both(*changes: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        for each in changes:
            each(path)

    return change


def has(*names: str) -> Callable[[Path], str | None]:
    return lambda place: next((f"{name} is not there" for name in names if not (place / name).exists()), None)


# What strangers send.

CODE = f'open("{MARKER}", "w").close()\n'


class Planted:
    """Whoever unpickles this makes the marker."""

    def __reduce__(self) -> tuple:
        return open, (MARKER, "w")


PLANTED_YAML = f"!!python/object/apply:os.system ['touch {MARKER}']"
THEIR_CLASSES = {"auto_map": {"AutoConfig": "it.It", "AutoModel": "it.It"}, "model_type": "mine"}
PICKLE = pickle.dumps({"mean": Planted()})


def npz(**arrays: object) -> bytes:
    file = io.BytesIO()
    np.savez(file, **{name: np.asarray(array) for name, array in arrays.items()})
    return file.getvalue()


def zipped(members: dict[str, bytes], link_to: str = "") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            if link_to:
                info.external_attr = 0o120777 << 16
                data = link_to.encode()
            archive.writestr(info, data)
    return file.getvalue()


def tarred(name: str, kind: bytes = tarfile.REGTYPE, linkname: str = "", data: bytes = b"") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.size = kind, linkname, len(data)
        archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def huge_png(width: int, height: int) -> bytes:
    """A few bytes that claim to be a very large image."""
    data = bytearray(png(np.zeros((8, 8, 3), np.uint8)))
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


PNG = png(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
NOISE = png(np.random.default_rng(1).integers(0, 256, (8, 8, 3), np.uint8))
SMALLEST = png(np.zeros((1, 1, 3), np.uint8))
GREY = png(np.zeros((8, 8), np.uint8))
TORCHSCRIPT = zipped({"archive/data.pkl": PICKLE, "archive/version": b"3"})
SAFETENSORS_BOMB = (2**62).to_bytes(8, "little") + b"{}"
BILLION_LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(9)
)

# fmt: off

# Flags that nobody knows, of every script; a secret among them is not shown.

SCRIPTS = {
    "train_unconditional.py": "--dataset_name=digits",
    "train_conditional.py": "--dataset_name=digits",
    "generate.py": "run",
    "evaluate.py": "--run_dir=run",
    "prepare_data.py": "photos --output=out",
    "visualize.py": "",
}
for script, usual in SCRIPTS.items():
    family("flags", f"{script} {usual}", """
        --nope                  :: unknown flag --nope
        --nope=7                :: unknown flag --nope
        --                      :: --
        -x                      :: -x
        stray words             :: stray|words
        --hub_tokn=hf_SECRET    :: hub_tokn & !SECRET
        --api-key hf_SECRET     :: --api-key & !SECRET
    """)
family("flags", "train_unconditional.py", """
    --hub_tokn=hf_SECRET                        :: --hub_token & !SECRET
    --hub_token                                 :: --hub_token
    --learning-rat=3                            :: --learning_rate
    --learning_rate                             :: --learning_rate
    --train_batch_siz=3                         :: --train_batch_size
    --resolutoin 8                              :: --resolution
    --condition=class                           :: condition & train_conditional & !in configs
    --config {digits} --condition=class :: condition & train_conditional & !in configs
    --class_conditional                         :: train_conditional
    --text_encoder=x                            :: train_conditional
    --config                                    :: --config
    --stratified=maybe                          :: stratified
""")
family("flags", "generate.py run", """
    --num_imags=4               :: --num_images
    --cfg=2                     :: --guidance_scale
    --eta                       :: --eta
    --prompt                    :: --prompt
    run                         :: run
""")
family("flags", "evaluate.py", """
    --run_dri=run               :: --run_dir
    --fake=images               :: nothing to measure against
                                :: nothing to measure
    --generated=images          :: nothing to measure against
    --guidance_scales           :: --guidance_scales
""")
family("flags", "prepare_data.py", """
                                :: SOURCE
    photos                      :: --output
    --check                     :: source
    photos --output             :: --output
    photos --outptu=x           :: --output
""")
family("flags", "report.py", """
                                :: name one or more runs
    run --nope                  :: unknown flag --nope
    run stray words             :: stray
    run --output=page.txt       :: --output & .html
    run --outptu=page.html      :: --output
""")

# Values of the wrong type and out of range: every option, from its own facts.


def option_classes() -> dict[str, type]:
    from evaluation.evaluate_options import EvaluationOptions
    from generation.generate_options import GenerationOptions
    from preparation.prepare_options import PrepareOptions
    from run_folder.config import ConditionalConfig, TrainingConfig
    from visualize import Options

    kinds = (TrainingConfig, ConditionalConfig, GenerationOptions, EvaluationOptions, PrepareOptions, Options)
    return dict(zip(SCRIPTS, kinds, strict=True))


def wrong_values() -> Iterator[tuple[str, str, str]]:
    """Every option with a value that it cannot have; what several scripts share is tried with the first."""
    from common.options import facts_of

    seen = set()
    for script, kind in option_classes().items():
        hints = get_type_hints(kind)
        for name, facts in facts_of(kind).items():
            kinds = {part for part in (hints[name], *get_args(hints[name])) if part is not type(None)}
            if (name, str(hints[name])) in seen:
                continue
            seen.add((name, str(hints[name])))
            if any(get_origin(part) is Literal for part in kinds):
                yield script, name, "nope"
            elif float in kinds:
                yield from ((script, name, value) for value in ("nan", "inf", "x"))
            elif int in kinds:
                # So many processes would stop the machine if they were not refused.
                yield from ((script, name, value) for value in ("1.5", "9" * 30) if "workers" not in name)
            if facts.must_be and kinds & {int, float}:
                values = (value for value in (-1, 0, 1, 2) if not facts.must_be.accepts(value))
                yield from ((script, name, str(value)) for value in itertools.islice(values, 1))


SHORT = {  # where a value is accepted, there is little to do
    "train_unconditional.py": "{tiny} --dry_run --output_dir=out",
    "train_conditional.py": "{tiny} --dry_run --output_dir=out",
    "generate.py": GENERATE.partition(" ")[2],
    "evaluate.py": f"{MEASURE_RUN} --run_dir=run".partition(" ")[2],
    "prepare_data.py": "photos --output=out",
    "visualize.py": "--output_dir=figures",
}
for script, option_name, value in wrong_values():
    said = f"--{option_name}.*(invalid|must|from|limit|{value})"
    family("values", f"{script} {SHORT[script]}", f"--{option_name}={value} :: {said}", timeout=20)
family("values", "train_unconditional.py {tiny} --dry_run --output_dir=out", """
    --resolution=8x8                            :: --resolution
    --resolution=                               :: --resolution
    --output_dir=                               :: --output_dir
    --cache_dir=' '                             :: --cache_dir
    --hub_model_id= --push_to_hub               :: --hub_model_id
    --learning_rate=1e-4,2e-4                   :: --learning_rate
    --learning_rate=-inf                        :: --learning_rate
    --in_memory_limit_gb=inf --resolution=nope  :: --resolution
    --adam_beta2=1                              :: --adam_beta2
    --seed=18446744073709551616                 :: --seed
    --num_workers=1000000            :: --num_workers
    --ddpm_num_steps=10 --ddpm_num_inference_steps=20 :: 20 & 10
    --total_batch_size=7 --train_batch_size=2   :: 7
    --cuda_graph                                :: --cuda_graph & NVIDIA
    --speed_tau=2000 --timestep_sampler=speed   :: tau & 2000
    --timestep_sampler=unifrom                  :: uniform
    --logit_normal_mean=nan --timestep_sampler=logit_normal :: logit_normal_mean
    --edm_mean=inf --timestep_sampler=edm       :: edm_mean
""", timeout=120)
family("values", GENERATE, """
    --guidance_scale=2                          :: guidance_scale
    --num_inference_steps=2000                  :: 2000 & 1000
    --interpolate 1 1                           :: interpolate
    --interpolate 1                             :: interpolate
    --interpolate -1 2                          :: interpolate
    --guidance_interval 5                       :: guidance_interval
    --ema_length=0.3                            :: ema_length & 0.288
    --ema_length=0                              :: ema_length & 0.288
    --ema_length=0.05                           :: 0.05 & ema_snapshots & --ema power
    --ema_length=0.05 --weights=raw             :: ema_length & weights
""")
family("values", "generate.py run --ddim --num_inference_steps=2 --output_dir=out", """
    --seeds=0-99999999999                       :: --seeds
    --seeds=9999999999999999999999              :: --seeds
    --seeds=5-1                                 :: backwards
    --seeds=a-b                                 :: --seeds
    --seeds=                                    :: --seeds
    --seeds=-3                                  :: --seeds
    --seeds=1,,2                                :: --seeds
    --seeds=0-                                  :: --seeds
    --seeds=0-3 --num_images=7                  :: 7
    --num_images=99999999999                    :: --num_images
    --gather_grid --num_images=5000             :: gather_grid
    --eta=1.5 --ddim                            :: --eta
    --eta=nan --ddim                            :: --eta
""", timeout=30)
family("values", f"{EVALUATE} --generated=images --real=photos", """
    --num_images=5                              :: --num_images
    --num_images=99                             :: 99 & 12
    --feature_batch_size=0                      :: feature_batch_size
""")
family("values", "evaluate.py --generated=images --real=photos", """
    --modes nope                                :: nope
    --modes clean clean                         :: twice
""")
family("values", f"{EVALUATE} --run_dir=run", """
    --guidance_scales nan                       :: guidance_scales
    --guidance_scales 1 inf                     :: guidance_scales
    --guidance_scales 2                         :: guidance_scales
    --checkpoints 99                            :: 99 & 2, 4
    --checkpoints x                             :: x
    --num_inference_steps=2000                  :: 2000
    --ema_length 0.05 0.3                       :: ema_length & 0.288
    --ema_length 0.05 0.05                      :: twice
    --ema_length 0.05 0.1                       :: 0.05 & ema_snapshots & --ema power
    --ema_length 0.05 --nll                     :: ema_length & nll
""")
family("values", f"{PREPARE} photos --output=out", """
    --eval_fraction=nan                         :: eval_fraction
    --eval_fraction=1                           :: eval_fraction
    --classes=bird                              :: bird & cat
    --captions=photo                            :: class
""")
family("values", VISUALIZE, """
    --schedules nope                            :: nope & linear
    --ddpm_num_steps=1                          ::  2
    --ddpm_num_steps=99999999999999             :: ddpm_num_steps
    --num_images=0                              :: num_images
""")

# Options that contradict each other, and options that would do nothing.

family("conflicts", "train_unconditional.py {tiny} --output_dir=out", """
    --train_data_dir=photos                     :: --train_data_dir & --dataset_name
    --logger=wandb --hub_token=hf_SECRET        :: wandb|push_to_hub & !SECRET
    --resume_from_checkpoint=nope               :: nope
    --resume_from_checkpoint=photos             :: photos
    --timestep_sampler_options width=3          :: timestep_sampler_options
    --timestep_sampler=speed --stratified --timestep_sampler_options a=1 :: timestep_sampler_options
    --timestep_sampler=ats --stratified         :: stratified
    --loss_weighting=bound --loss=l1            :: loss l1 & bound
    --variance_type=learned --loss_weighting=p2 :: loss_weighting p2 & variance_type learned
    --variance_type=learned_range --timestep_sampler=infonoise :: infonoise & squared errors
    --variance_type=learned_range --timestep_sampler=ats :: ats & squared errors
    --variance_type=learned --ddpm_num_steps=1 --ddpm_num_inference_steps=1 :: variance_type & two timesteps
    --evaluate_every=3                          :: evaluate_every 3 & multiple & checkpointing_steps
    --evaluate_every=5000 --evaluate_options=--ddim :: evaluate_options & hyphens
    --ddpm_beta_schedule=jsd                    :: jsd & prediction_type epsilon & sample or mean
    --ddpm_beta_schedule=jsd --prediction_type=sample --beta_end=0.1 :: beta_end & jsd
    --clip_per_replica=4 --gradient_accumulation_steps=2 :: clip_per_replica 4 & gradient_accumulation_steps
    --clip_per_replica=7 --total_batch_size=128 :: 7 & total_batch_size
    --clip_per_replica=4 --mixed_precision=fp16 :: clip_per_replica & fp16
""")
family("idle options", "train_unconditional.py {tiny} --max_train_steps=1 --output_dir=out", """
    --ema_power=0.5                             :: ema_power & ema_warmup
    --ema_inv_gamma=2                           :: ema_inv_gamma & ema_warmup
    --edm_mean=1                                :: edm_mean
    --edm_std=1                                 :: edm_std
    --edm_sigma_data=1                          :: edm_sigma_data
    --logit_normal_mean=1                       :: logit_normal_mean
    --speed_k=3                                 :: speed_k
    --speed_lambda=0.5 --timestep_sampler=speed :: speed_lambda
    --ats_grid=10                               :: ats_grid
    --loss_second_moment_history=5              :: loss_second_moment_history
    --p2_gamma=2                                :: p2_gamma
    --soft_min_snr_gamma=3                      :: soft_min_snr_gamma
    --snr_gamma=5 --loss_weighting=p2           :: snr_gamma
    --lr_scheduler=constant --lr_warmup_steps=7 :: lr_warmup_steps
    --ema_max_decay=0.5 --no_use_ema            :: ema_max_decay
    --ema_warmup --no_use_ema                   :: ema_
    --ema=power                                 :: ema_max_decay & --ema power
    --ema=power --no_use_ema                    :: ema & use_ema
    --hub_private_repo                          :: hub_private_repo & push_to_hub
    --tracker_project_name=x                    :: tracker_project_name & wandb
    --dataset_config_name=x                     :: dataset_config_name
    --dropout=0.3                               :: dropout
    --num_epochs=3                              :: num_epochs
    --evaluate_options num_images=12            :: evaluate_options & evaluate_every
    --save_images_epochs=2 --save_images_steps=3 :: save_images
""")
family("idle options", CONDITIONAL, """
    --caption_column=text                       :: caption_column
    --caption_template='a {class}'              :: caption_template
    --validation_prompts=x                      :: validation_prompts
    --text_encoder=encoder                      :: text_encoder
    --label_column=nope                         :: nope & label
""")
family("idle options", "generate.py run --num_images=4 --num_inference_steps=2 --output_dir=out", """
    --ddpm --ddim                               :: --ddim and --ddpm
    --ddim --scheduler=DDIMScheduler            :: choose one
    --ddpm --eta=1                              :: eta
    --ddim --variance_type=fixed_small          :: variance_type
    --scheduler=DPMSolverMultistepScheduler --skip_schedule=quadratic :: skip_schedule
    --prompt=x                                  :: prompt
    --class_labels=1                            :: class
    --prompts_file=run/config.yaml              :: prompt
    --negative_prompt=x                         :: negative_prompt
    --guidance_rescale=0.5                      :: guidance_rescale
    --guidance_interval 1 5                     :: guidance_interval
    --interpolate 1 2                           :: interpolate
    --dataset_name=digits                       :: dataset_name & nearest
    --train_data_dir=photos                     :: train_data_dir & nearest
    --nearest=2 --dataset_name=digits --train_data_dir=photos :: both
    --model=class_run                           :: model
""")
family("idle options", "generate.py run --interpolate 1 2 --num_inference_steps=2 --output_dir=out", """
    --seeds=1                                   :: interpolate
    --checkpoints=2                             :: interpolate
    --format=npz                                :: interpolate
    --gather_grid                               :: interpolate
""")
family("idle options", f"{EVALUATE} --generated=images --real=images", ":: same", code=(0, 2))
family("idle options", EVALUATE, """
    --generated=images --run_dir=run            :: --generated and --run_dir
    --generated=images --real=photos --statistics=statistics.safetensors :: --real and --statistics
    --generated=images --real=photos --eta=1    :: eta
    --generated=images --real=photos --keep_images :: keep_images
    --generated=images --real=photos --statistics_mode=clean :: statistics_mode
    --generated=images --real=photos --split=test :: split
    --generated=images --real=photos --image_column=x :: image_column
    --generated=images --real=photos --inception_weights=run/config.yaml :: inception_weights
    --generated=images --real=photos --modes clean :: modes
    --run_dir=run --resolution=16               :: resolution
    --generated=images --real=photos --watch    :: watch & run
    --run_dir=run --watch --checkpoints 2       :: checkpoints & watch
    --run_dir=run --watch --nll                 :: watch & nll
    --run_dir=run --split train train           :: split & twice
    --run_dir=run --keep_best=fd --ema_length 0.05 0.1 :: ema_length & keep_best
    --run_dir=class_run --keep_best=fd --guidance_scales 1 2 :: keep_best & guidance_scales
    --run_dir=run --keep_best=fid               :: keep_best & fd
    --run_dir=run --keep_best=loss              :: keep_best|loss & fd
    --run_dir=run --features=inception --keep_best=fd :: keep_best fd & fid
    --dataset_name=digits --resolution=8 --split train test --save_statistics=x.safetensors :: save_statistics & split
    --run_dir=run --ddpm --ddim                 :: choose one
    --save_statistics=x.safetensors --real=images :: resolution
""")
family("idle options", "evaluate.py", """
    --compare measured                          :: two runs
    --compare measured measured                 :: measured
    --compare run nope                          :: run|nope
    --compare measured photos                   :: photos
    --compare measured measured_too --num_images=10 :: num_images
""")
family("idle options", "prepare_data.py photos --output=out --num_workers=0", """
    --center_crop                               :: center_crop & resolution
    --sysu_folders                              :: sysu_folders & resolution
    --eval_fraction=0 --eval_split=validation   :: eval_split
""")
family("idle options", VISUALIZE, """
    --run_dir=run --schedules linear            :: schedules
    --run_dir=run --num_images=2                :: num_images
    --dataset_name=digits --train_data_dir=photos :: both
""")

# Configuration files.

YAML = "train_unconditional.py {tiny} --config=it.yaml --output_dir=out --dry_run"
files("YAML", YAML, "it.yaml", {
    "missing": {"other.yaml": ""},
    "a folder": {"it.yaml": folder},
    "binary": {"it.yaml": garbage},
    "another encoding": {"it.yaml": "seed: 8\n".encode("utf-16")},
    "a list": {"it.yaml": "- seed\n"},
    "a number": {"it.yaml": "7"},
    "broken": {"it.yaml": "seed: [8\n"},
    "a tab": {"it.yaml": "a:\n\t- b\n"},
    "an unknown key :: nope": {"it.yaml": "nope: 3\n"},
    "a misspelt key :: resolution": {"it.yaml": "resoluton: 8\n"},
    "a secret under a misspelt key :: hub_token & !SECRET": {"it.yaml": "hub_tokn: hf_SECRET\n"},
    "a secret under an unknown key :: nope & !SECRET": {"it.yaml": "nope: hf_SECRET\n"},
    "a key twice :: seed & twice|again|duplicate": {"it.yaml": "seed: 8\nloss: l1\nseed: 16\n"},
    "an alias and its name :: snr_gamma": {"it.yaml": "loss_weighting: min_snr\nsnr_gamma: 5\nmin_snr_gamma: 6\n"},
    "a list for a number :: seed": {"it.yaml": "seed: [8, 9]\n"},
    "a map for a number :: seed": {"it.yaml": "seed: {a: 1}\n"},
    "a number that is a key :: 5": {"it.yaml": "5: 3\n"},
    "an option of the other script :: condition": {"it.yaml": "condition: class\n"},
    "a file in a file :: config": {"it.yaml": "config: other.yaml\n"},
    "code": {"it.yaml": f"seed: {PLANTED_YAML}\n"},
    "aliases of aliases": {"it.yaml": BILLION_LAUGHS},
    "deeply nested": {"it.yaml": "[" * 5000},
    "a date": {"it.yaml": "seed: 2024-13-45\n"},
    "a sampler in a file :: mine.py": {"it.yaml": "timestep_sampler: mine.py:Mine\n", "mine.py": CODE},
})
files("YAML", YAML, "", {
    "a word for a number :: seed": {"it.yaml": "seed: large\n"},
    "a fraction for a number :: seed": {"it.yaml": "seed: 1.5\n"},
    "nan :: learning_rate": {"it.yaml": "learning_rate: .nan\n"},
    "inf :: learning_rate": {"it.yaml": "learning_rate: .inf\n"},
    "out of range :: seed": {"it.yaml": "seed: -1\n"},
    "a choice that is none :: loss": {"it.yaml": "loss: l3\n"},
    "an idle option :: edm_mean": {"it.yaml": "edm_mean: 1\n"},
    "a date for a number :: seed": {"it.yaml": "seed: 2024-01-01\n"},
    "an empty name :: image_column & it.yaml": {"it.yaml": "image_column: ''\n"},
    "a path with NUL :: logging_dir|YAML": {"it.yaml": '"logging_dir": "a\\0b"\n'},
})

# The folder of a run: nothing in it is trained over.

AGAIN = f"{TRAIN} --output_dir=run"
SAME = {"code": (0, 2), "leaves": ("run/README.md", "run/config.yaml", "run/.lock")}
files("run folder", AGAIN, "", {"finished, checkpoints deleted": {"run/checkpoint-*": None}}, **SAME)
files("run folder", AGAIN, "overwrite", {
    "every checkpoint damaged": {"run/checkpoint-*/unet_ema/*.safetensors": flip},
    "every manifest missing": {"run/checkpoint-*/manifest.json": None},
    "every checkpoint empty": {"run/checkpoint-*/manifest.json": None, "run/checkpoint-*/unet*": None},
    "metrics alone": {
        "run/checkpoint-*": None, "run/unet": None, "run/scheduler": None, "run/model_index.json": None,
        "run/samples": None,
    },
    "pipeline alone": {"run/checkpoint-*": None, "run/metrics.jsonl": None, "run/config.yaml": None},
    "configuration deleted": {"run/checkpoint-*": None, "run/config.yaml": None},
    "metrics deleted": {"run/checkpoint-*": None, "run/metrics.jsonl": None},
    "samples alone": {
        "run/checkpoint-*": None, "run/metrics.jsonl": None, "run/config.yaml": None, "run/unet": None,
        "run/scheduler": None, "run/model_index.json": None,
    },
}, leaves=("run/.lock",))
files("run folder", AGAIN, "checkpoint-4", {
    "the newest damaged": {"run/checkpoint-4/unet/*.safetensors": flip},
    "the newest cut": {"run/checkpoint-4/optimizer.safetensors": cut},
    "a file missing": {"run/checkpoint-4/state.json": None},
    "a manifest of nonsense": {"run/checkpoint-4/manifest.json": garbage},
    "a manifest of another version": {
        "run/checkpoint-4/manifest.json": edit('"format_version": 1', '"format_version": 99'),
    },
    "a state of another": {"run/checkpoint-4/state.json": edit('"step": 4', '"step": 9')},
}, code=0, leaves=("run/*",))
files("run folder", f"{AGAIN} --max_train_steps=6", "", {
    "a checkpoint of a curious name": {"run/checkpoint-²/manifest.json": "{}"},
    "a checkpoint that is a file": {"run/checkpoint-9": "text"},
    "a checkpoint of no number": {"run/checkpoint-best/manifest.json": "{}"},
    "a newer checkpoint that is empty": {"run/checkpoint-9": folder},
    "metrics that are not text": {"run/metrics.jsonl": b'{"step": 1}\n\xff\xfe\n'},
    "metrics of something else": {"run/metrics.jsonl": "[1]\n"},
    "metrics that end in the middle": {"run/metrics.jsonl": cut},
    "a checkpoint that is a link to itself": {"run/checkpoint-9": link("checkpoint-9")},
    "a checkpoint that is a link to nothing": {"run/checkpoint-9": link("nothing")},
    "a leftover of a kill": {"run/.checkpoint-6.tmp/x": "x", "run/.checkpoint-1.old/x": "x"},
}, code=(0, 2), leaves=("run/*",))
files("run folder", f"{AGAIN} --max_train_steps=6 --logger=tensorboard", "run", {
    "metrics that are a folder": {"run/metrics.jsonl": folder},
    "metrics that are a pipe": {"run/metrics.jsonl": pipe},
    "a configuration that is a pipe": {"run/config.yaml": pipe},
    "logs that are a file": {"run/logs": file_instead},
    "a configuration that is a folder": {"run/config.yaml": folder},
    "a lock that is a folder": {"run/.lock": both(Path.unlink, folder)},
}, leaves=("run/.lock",))
files("run folder", f"{AGAIN} --max_train_steps=6", "samples",
      {"samples that are a file": {"run/samples": file_instead}}, code=(0, 2), leaves=("run/*",))
files("run folder", AGAIN, "another run", {"in use": {"run/.lock": held}})
files("run folder", f"{TRAIN} --output_dir=out", "files that are not", {
    "photos in it": {"out/a.png": PNG},
    "a text in it": {"out/notes.txt": "mine"},
    "a folder in it": {"out/thesis/chapter.txt": "mine"},
    "a hidden file in it": {"out/.git/config": "mine"},
})
files("run folder", f"{TRAIN} --output_dir=out --overwrite", "files that are not",
      {"a text in it, to be overwritten": {"out/notes.txt": "mine"}})
family("run folder", TRAIN, """
    --output_dir=photos                         :: photos & files that are not
    --output_dir=run/config.yaml                :: a file
    --output_dir=run/config.yaml/x              :: a file
    --output_dir=samples.npz                    :: a file
    --output_dir=/proc/run                      :: /proc
    --output_dir=/dev/null                      :: /dev/null
    --output_dir=/dev/null/run                  :: /dev/null
    --output_dir=.                              :: home
""")
family("run folder", TRAIN, f"--output_dir={'x' * 300} :: --output_dir & long")
files("run folder", f"{TRAIN} --output_dir=loop", "loop", {"a link to itself": {"loop": link("loop")}})
files("run folder", f"{TRAIN} --output_dir=loop/run", "loop", {"below a link to itself": {"loop": link("loop")}})
files("run folder", f"{TRAIN} --output_dir=gone", "", {"a link to nothing": {"gone": link("nothing")}}, code=(0, 2),
      leaves=("nothing", "nothing/*"))
family("run folder", AGAIN, """
    --resume_from_checkpoint=none               :: holds a run & --overwrite
    --resume_from_checkpoint=checkpoint-99      :: checkpoint-99
    --resume_from_checkpoint=checkpoint-4 --overwrite :: checkpoint-4 & overwrite
    --resolution=16 --max_train_steps=6         :: resolution & 8 & 16
    --ddpm_num_steps=100 --max_train_steps=6    :: ddpm_num_steps
    --prediction_type=sample --max_train_steps=6 :: prediction_type
    --variance_type=learned_range --max_train_steps=6 :: variance_type
    --no_use_ema --max_train_steps=6            :: use_ema
    --max_train_samples=20 --max_train_steps=6  :: images
    --ddpm_beta_schedule=cosine --max_train_steps=6 :: ddpm_beta_schedule
    --model_config_name_or_path=nope --max_train_steps=6 :: nope
""", leaves=("run/.lock",))
family("run folder", AGAIN, """
                                                :: !step 4 of 2 & complete|4
    --max_train_steps=2                         :: !4 of 2
""", code=(0, 2), leaves=("run/*",))
family("run folder", f"{TRAIN} --max_train_steps=1 --output_dir=~/deep/run", "::", code=0,
       check=has("home/deep/run/README.md"))
family("run folder", "generate.py ~/run --num_images=4", " :: /run")
family("run folder", f"{CONDITIONAL.replace('=out', '=run')} --max_train_steps=6", " :: condition|run",
       leaves=("run/.lock",))
family("run folder", f"{TRAIN} --max_train_steps=6 --output_dir=class_run", " :: condition|class",
       leaves=("class_run/.lock",))

# Images to train on.

FOLDER = f"{ON_DATA} --train_data_dir=data --channels=1"
files("images", FOLDER, "data", {
    "missing": {"other/a.png": PNG},
    "a file": {"data": PNG},
    "empty": {"data": folder},
    "only text": {"data/notes.txt": "x"},
    "a link to itself": {"data": link("data")},
    "a link to nothing": {"data": link("nothing")},
    "files without rows": {"data/metadata.jsonl": ""},
})
DATA = {f"data/{number}.png": png(np.full((8, 8, 3), number * 9, np.uint8)) for number in range(20)}
files("images", FOLDER, "bad", {
    "one that is text": {**DATA, "data/bad.png": "text"},
    "one that is empty": {**DATA, "data/bad.png": b""},
    "one that is cut": {**DATA, "data/bad.png": NOISE[:100]},
    "one of noise": {**DATA, "data/bad.jpg": garbage},
    "one that claims to be huge": {**DATA, "data/bad.png": huge_png(60000, 60000)},
    "one that claims to be larger than memory": {**DATA, "data/bad.png": huge_png(2**31 - 1, 2**31 - 1)},
    "one that claims to have no size": {**DATA, "data/bad.png": huge_png(0, 0)},
    "one of a format that is not read": {**DATA, "data/bad.heic": b"\0\0\0\x18ftypheic" + bytes(100)},
    "one that is an archive": {**DATA, "data/bad.png": zipped({"a.png": PNG})},
    "one that is code": {**DATA, "data/bad.png": CODE},
}, timeout=30)
files("images", FOLDER, "bad", {
    "one that is a pipe": {**DATA, "data/bad.png": pipe},
    "one that is a link to nothing": {**DATA, "data/bad.png": link("nothing")},
    "one that is a link to itself": {**DATA, "data/bad.png": link("bad.png")},
    "one that is a device": {**DATA, "data/bad.png": link("/dev/zero")},
    "one of one pixel": {**DATA, "data/bad.png": SMALLEST},
}, code=(0, 2), leaves=OUT, timeout=30)
files("images", f"{FOLDER} --on_bad_image=skip", "bad", {
    "a bad one left out": {**DATA, "data/bad.png": "text"},
    "one left out that is not read": {**DATA, "data/bad.heic": b"\0\0\0\x18ftypheic" + bytes(100)},
}, code=0, leaves=OUT)
files("images", f"{FOLDER} --on_bad_image=skip", "bad", {
    "a pipe left out": {**DATA, "data/bad.png": pipe},
    "a device left out": {**DATA, "data/bad.png": link("/dev/zero")},
}, code=0, leaves=OUT, timeout=30)
files("images", f"{ON_DATA} --dataset_name=./data --channels=1", "bad", {
    "a data set with one of a format that is not read": {**DATA, "data/bad.heic": b"\0\0\0\x18ftypheic" + bytes(100)},
    "a data set with a link to nothing": {**DATA, "data/bad.png": link("nothing")},
})
files("images", f"{FOLDER} --on_bad_image=skip", "none of the|no images",
      {"all of them bad": {"data/a.png": "text", "data/b.png": "text"}})
files("images", FOLDER, "UTF-8 & prepare_data", {
    "a name that is not text": {
        **DATA, "data": lambda path: Path(os.fsdecode(bytes(path) + b"/\xff.png")).write_bytes(PNG),
    },
})
files("images", FOLDER, "", {
    "a name of two lines": {**DATA, "data/a\nb.png": PNG},
    "a name of patterns": {**DATA, "data/a[b]?.png": PNG},
    "folders that go round": {**DATA, "data/again": link(".")},
    "a name in another script": {**DATA, "data/猫 ü.png": PNG},
}, code=0, leaves=OUT)
files("images", FOLDER, "metadata", {
    "a table that is damaged": {**DATA, "data/metadata.jsonl": '{"file_name": "1.png"'},
    "a table that is not text": {**DATA, "data/metadata.csv": b"\xff\xfe\0"},
    "a table of files that are not there": {**DATA, "data/metadata.jsonl": '{"file_name": "nope.png"}\n'},
    "a table without names": {**DATA, "data/metadata.jsonl": '{"nope": "1.png"}\n'},
    "a table that leads out": {**DATA, "data/metadata.jsonl": '{"file_name": "../home/x.png"}\n'},
})
LOCAL = f"{ON_DATA} --dataset_name=./data --channels=1"
files("data sets", LOCAL, "data", {
    "missing": {"other/x": "x"},
    "empty": {"data": folder},
    "a file": {"data": "x"},
    "parquet of noise": {"data/train.parquet": garbage},
    "parquet that is empty": {"data/train.parquet": b""},
    "parquet that ends early": {"data/train.parquet": b"PAR1" + bytes(100) + b"PAR1"},
    "CSV without images :: image": {"data/train.csv": "a,b\n1,2\n"},
    "CSV that is binary": {"data/train.csv": garbage},
    "JSON that is broken": {"data/train.json": '{"a": '},
    "JSON without images :: image": {"data/train.jsonl": '{"a": 1}\n'},
    "a saved data set of nonsense": {"data/state.json": "{}"},
    "a saved data set that leads out": {
        "data/state.json": '{"_data_files": [{"filename": "../x"}]}', "data/dataset_info.json": "{}",
    },
    "an arrow file of noise": {"data/train.arrow": garbage},
    "code": {"data/data.py": CODE, "data/dataset_infos.json": "{}"},
    "a pickle": {"data/train.pkl": PICKLE},
    "a tar of pickles": {"data/train.tar": tarred("0.pyd", data=PICKLE)},
    "a configuration with code": {
        "data/README.md": f"---\nconfigs:\n- {PLANTED_YAML}\n---\n",
        "data/a.txt": "x",
    },
}, timeout=30)
family("data sets", ON_DATA, """
    --dataset_name=nobody/nothing               :: nobody/nothing & HF_HUB_OFFLINE
    --dataset_name=nothing                      :: nothing
    --dataset_name=../../etc                    :: etc
    --dataset_name=                             :: dataset_name
    --dataset_name=parquet/nope                 :: nope
    --dataset_name=./parquet --image_column=nope :: nope & image
    --dataset_name=./parquet --image_column=label :: label
    --dataset_name=./parquet --dataset_config_name=nope :: nope
    --train_data_dir=~/nope                     :: nope
    --train_data_dir=                           :: train_data_dir
    --train_data_dir=photos.zip                 :: file
""")
files("classes", CONDITIONAL.replace("{tiny}", "{small}") + " --train_data_dir=data --channels=1", "class", {
    "one class": {f"data/cat/{n}.png": PNG for n in range(3)},
    "no folders": DATA,
})
family("classes", CONDITIONAL.replace("{tiny}", "{small}") + " --dataset_name=./parquet", """
    --label_column=nope                         :: nope & label
    --label_column=image                        :: image
    --condition=text --caption_column=label --text_encoder=encoder --model_config_name_or_path=text_network :: label
""")
family("networks", TRAIN + " --output_dir=out", """
    --model_config_name_or_path=nope            :: nope
    --model_config_name_or_path=photos          :: photos
    --model_config_name_or_path=nobody/nothing  :: nobody/nothing & HF_HUB_OFFLINE|offline
    --model_config_name_or_path=encoder         :: encoder
""")
files("networks", f"{TRAIN} --output_dir=out --model_config_name_or_path=network", "", {
    "another class": {"network/config.json": entries(_class_name="StableDiffusionPipeline")},
    "a class of the system": {"network/config.json": entries(_class_name="os.system")},
}, code=(0, 2), leaves=OUT)
files("networks", f"{TRAIN} --output_dir=out --model_config_name_or_path=network", "network", {
    "broken": {"network/config.json": "{"},
    "a list": {"network/config.json": "[]"},
    "a wrong type": {"network/config.json": entries(block_out_channels="wide")},
    "groups that do not fit": {"network/config.json": entries(norm_num_groups=5)},
    "negative channels": {"network/config.json": entries(block_out_channels=[-8, 16])},
    "blocks that are not there": {"network/config.json": entries(down_block_types=["Nope", "Nope"])},
    "channels that are not the images'": {"network/config.json": entries(in_channels=7)},
    "another size": {"network/config.json": entries(sample_size=64)},
    "not text": {"network/config.json": b"\xff\xfe"},
    "layers without end": {"network/config.json": entries(layers_per_block=10**9)},
})

# Text encoders.

files("text encoders", BY_TEXT, "encoder", {
    "no weights": {"encoder/model.safetensors": None},
    "weights of noise": {"encoder/model.safetensors": garbage},
    "layers without end": {"encoder/config.json": entries(num_hidden_layers=10**9)},
    "weights that end early": {"encoder/model.safetensors": cut},
    "a header without end": {"encoder/model.safetensors": SAFETENSORS_BOMB},
    "pickled weights": {"encoder/model.safetensors": None, "encoder/pytorch_model.bin": PICKLE},
    "a configuration of nonsense": {"encoder/config.json": "{"},
    "a configuration of another kind": {"encoder/config.json": '{"model_type": "nope"}'},
    "code of its own": {
        "encoder/config.json": entries(**THEIR_CLASSES),
        "encoder/it.py": CODE,
    },
    "weights of another network": {
        "encoder/model.safetensors": lambda path: shutil.copy(path.parents[1] / "vision/model.safetensors", path),
        "vision/x": "",
    },
    "no tokenizer": {"encoder/tokenizer.json": None, "encoder/tokenizer_config.json": None},
    "a tokenizer of nonsense": {"encoder/tokenizer.json": "{"},
})
family("text encoders", BY_TEXT, """
    --text_encoder=nope                         :: nope
    --text_encoder=photos                       :: photos
    --text_encoder=nobody/nothing               :: nobody/nothing & offline|HF_HUB_OFFLINE
    --caption_template=none                     :: class
    --caption_column=nope                       :: nope
""")

# Timestep samplers in a file of the user's.

SAMPLER = f"{TRAIN} --output_dir=out --timestep_sampler=mine.py:Mine"
BASE = "import torch\nfrom schedulers.timestep_samplers import TimestepSampler\n\n\nclass Mine(TimestepSampler):\n"
INIT = BASE + "    def __init__(self, alphas_cumprod):\n        super().__init__(alphas_cumprod)\n        "
DRAW = BASE + "    def draw(self, batch_size, generator):\n        return "
files("samplers", SAMPLER, "mine", {
    "no such file": {"other.py": ""},
    "no such class": {"mine.py": "class Other:\n    pass\n"},
    "not a sampler": {"mine.py": "class Mine:\n    pass\n"},
    "not a class": {"mine.py": "Mine = 3\n"},
    "not Python": {"mine.py": "class Mine(:\n"},
    "an import that fails": {"mine.py": "import nothing_of_this_name\n"},
    "an error when imported": {"mine.py": "1 / 0\n"},
    "an exit when imported": {"mine.py": "raise SystemExit(0)\n"},
    "an error when built": {"mine.py": INIT + "raise ValueError('no')\n"},
    "no argument": {"mine.py": BASE + "    def __init__(self):\n        pass\n"},
    "no density set": {"mine.py": BASE + "    def __init__(self, alphas_cumprod):\n        pass\n"},
    "a density of another length": {"mine.py": INIT + "self.set_density(torch.ones(7))\n"},
    "a longer density": {"mine.py": INIT + "self.set_density(torch.ones(2000))\n"},
    "a negative density": {
        "mine.py": INIT + "self.objective = 'changed'; self.set_density(torch.linspace(-1, 1, 1000))\n",
    },
    "a density of nan": {
        "mine.py": INIT + "self.objective = 'changed'; self.set_density(torch.full((1000,), float('nan')))\n",
    },
    "an infinite density": {"mine.py": INIT + "self.set_density(torch.full((1000,), float('inf')))\n"},
    "a density of nothing": {"mine.py": INIT + "self.objective = 'changed'; self.set_density(torch.zeros(1000))\n"},
    "a density in two dimensions": {"mine.py": INIT + "self.set_density(torch.ones(1000, 2))\n"},
    "a density that is a list": {"mine.py": INIT + "self.set_density([1.0] * 1000)\n"},
    "timesteps never drawn": {"mine.py": INIT + "self.set_density((torch.arange(1000) < 500).float())\n"},
    "one draw too many": {"mine.py": DRAW + "torch.zeros(batch_size + 1, dtype=torch.long)\n"},
    "one draw too few": {"mine.py": DRAW + "torch.zeros(batch_size - 1, dtype=torch.long)\n"},
    "timesteps too large": {"mine.py": DRAW + "torch.full((batch_size,), 5000)\n"},
    "timesteps below zero": {"mine.py": DRAW + "torch.full((batch_size,), -3)\n"},
    "timesteps with fractions": {"mine.py": DRAW + "torch.full((batch_size,), 3.5)\n"},
    "timesteps that are a list": {"mine.py": DRAW + "[3] * batch_size\n"},
    "no timesteps": {"mine.py": DRAW + "None\n"},
    "an error when drawing": {"mine.py": DRAW + "1 / 0\n"},
    "an unknown objective": {"mine.py": BASE + "    objective = 'better'\n"},
})
LATER = BASE + "    drawn = 0\n\n    def {}:\n        Mine.drawn += 1; later = Mine.drawn > 9\n        return {}\n"
FOR_IMAGES = LATER.format("sample_for(self, images, positions, batch_size, generator)", "{}, torch.ones(len(images))")
DRAWS = LATER.replace("{}", "draw(self, batch_size, generator)", 1)
files("samplers", SAMPLER, "Mine", {
    "timesteps too large later": {"mine.py": DRAWS.format("torch.full((batch_size,), 5000 if later else 3)")},
    "timesteps below zero later": {"mine.py": DRAWS.format("torch.full((batch_size,), -1 if later else 3)")},
    "too few timesteps later": {"mine.py": DRAWS.format("torch.full((batch_size - later,), 3)")},
    "an exit later": {"mine.py": DRAWS.format("exit(0) if later else torch.full((batch_size,), 3)")},
}, code=1, leaves=OUT)
files("samplers", SAMPLER, "finite", {
    "timesteps too large for images later": {
        "mine.py": FOR_IMAGES.format("torch.full((len(images),), 5000 if later else 3)"),
    },
}, code=1, leaves=OUT)
family("samplers", SAMPLER, """
    --timestep_sampler_options width            :: timestep_sampler_options
    --timestep_sampler_options width=3          :: width
    --timestep_sampler_options =3               :: timestep_sampler_options
    --timestep_sampler_options a=1 a=2          :: a
    --timestep_sampler=mine.py:                 :: mine.py
    --timestep_sampler=mine.py                  :: mine.py
    --timestep_sampler=:Mine                    :: Mine
""", given={"mine.py": BASE + "    pass\n"})

# Models to generate with.

family("models", WITH, """
                                                :: run
    --model=nope                                :: nope
    --model=photos                              :: photos
    --model=samples.npz                         :: a file
    --model=nobody/nothing                      :: nobody/nothing & offline|HF_HUB_OFFLINE
    --model=                                    :: model
    --model=~/nope                              :: nope
    --model=run/checkpoint-99                   :: checkpoint-99
    --model=run/samples                         :: samples
    --model=run --checkpoints 99                :: 99 & 2, 4
    --model=run --checkpoints all nope          :: nope
    --model=run --checkpoints 2 2               :: 2 is given twice
    --model=run/checkpoint-4 --checkpoints 4    :: checkpoint
    --model=pipeline --checkpoints 4            :: 4
    --model=pipeline --weights=raw              :: raw
    --model=encoder                             :: encoder
""")
PIPELINE = f"{WITH} --model=pipeline"
UNET, WEIGHTS = "pipeline/unet/config.json", "pipeline/unet/diffusion_pytorch_model.safetensors"
SCHEDULER = "pipeline/scheduler/scheduler_config.json"
files("models", PIPELINE, "pipeline", {
    "no network": {"pipeline/unet": None},
    "no scheduler": {"pipeline/scheduler": None},
    "no weights": {WEIGHTS: None},
    "weights of noise": {WEIGHTS: garbage},
    "weights that end early": {WEIGHTS: cut},
    "weights that are empty": {WEIGHTS: b""},
    "a header without end": {WEIGHTS: SAFETENSORS_BOMB},
    "weights of another network": {
        WEIGHTS: lambda path: shutil.copy(path.parents[2] / "vision/model.safetensors", path), "vision/x": "",
    },
    "pickled weights": {WEIGHTS: None, "pipeline/unet/diffusion_pytorch_model.bin": PICKLE},
    "a pickle with the name of weights": {WEIGHTS: PICKLE},
    "a pickle in an archive": {WEIGHTS: None, "pipeline/unet/diffusion_pytorch_model.bin": TORCHSCRIPT},
    "a network that is broken": {UNET: "{"},
    "a network that is a list": {UNET: "[]"},
    "a network that is not text": {UNET: b"\xff\xfe"},
    "a network without a class": {UNET: edit('"_class_name"', '"class"')},
    "a network of an unknown class": {UNET: entries(_class_name="Nope")},
    "a network of the system": {UNET: entries(_class_name="os.system")},
    "a network that is a pipeline": {UNET: entries(_class_name="StableDiffusionPipeline")},
    "a network that is a scheduler": {UNET: entries(_class_name="DDIMScheduler")},
    "a network that is a function": {UNET: entries(_class_name="is_torch_available")},
    "a network that is a module": {UNET: entries(_class_name="utils")},
    "a network that names a number": {UNET: entries(_class_name=7)},
    "a network of code": {
        UNET: entries(_class_name="It", auto_map={"AutoModel": "it.It"}), "pipeline/unet/it.py": CODE,
    },
    "no size": {UNET: entries(sample_size=None)},
    "a size of words": {UNET: entries(sample_size="large")},
    "a size below zero": {UNET: entries(sample_size=-8)},
    "a size beyond memory": {UNET: entries(sample_size=10**7)},
    "channels of words": {UNET: entries(in_channels="three")},
    "other channels": {UNET: entries(in_channels=2)},
    "a variance too": {UNET: entries(out_channels=2)},
    "a wrong type": {UNET: entries(block_out_channels="wide")},
    "a scheduler that is broken": {SCHEDULER: "{"},
    "a scheduler that is a list": {SCHEDULER: "[]"},
    "a scheduler of words": {SCHEDULER: entries(num_train_timesteps="many")},
    "a scheduler of no steps": {SCHEDULER: entries(num_train_timesteps=0)},
    "a scheduler of too many steps": {SCHEDULER: entries(num_train_timesteps=10**14)},
    "a schedule that is not known": {SCHEDULER: entries(beta_schedule="nope")},
    "betas that are rescaled": {SCHEDULER: entries(rescale_betas_zero_snr=True)},
    "thresholding": {SCHEDULER: entries(thresholding=True)},
    "too few betas": {SCHEDULER: entries(trained_betas=[0.1] * 10)},
    "a beta of one": {SCHEDULER: entries(num_train_timesteps=2, trained_betas=[0.1, 1.0])},
    "three sides": {UNET: entries(sample_size=[8, 8, 8])},
    "a side of words": {UNET: entries(sample_size=[8, "x"])},
    "weights without one": {WEIGHTS: without("conv_out.weight")},
    "weights that are a folder": {WEIGHTS: folder},
    "weights that are a pipe": {WEIGHTS: pipe},
    "a network that is a pipe": {UNET: pipe},
    "a scheduler that is a pipe": {SCHEDULER: pipe},
    "weights that fail, and an empty folder for the images": {WEIGHTS: cut, "out": folder},
    "betas of nan": {SCHEDULER: entries(beta_start=math.nan)},
    "betas below zero": {SCHEDULER: entries(trained_betas=[-1.0, 2.0])},
    "a prediction that is not known": {SCHEDULER: entries(prediction_type="nope")},
}, timeout=30)
files("models", PIPELINE, "", {
    "code beside it": {
        "pipeline/pipeline.py": CODE, "pipeline/unet/unet.py": CODE, "pipeline/conditional_pipeline.py": CODE,
    },
    "an index that names code": {
        "pipeline/model_index.json": entries(_class_name=["pipeline", "It"]), "pipeline/pipeline.py": CODE,
    },
    "an index of nonsense": {"pipeline/model_index.json": "{"},
}, code=(0, 2), leaves=OUT)
files("models", GENERATE, "", {
    "the newest checkpoint damaged": {"run/checkpoint-4/unet_ema/*.safetensors": flip},
    "code beside it": {"run/sitecustomize.py": CODE, "run/conditional_pipeline.py": CODE, "torch.py": CODE},
}, code=0, leaves=OUT)
STATE = "run/checkpoint-4/state.json"
files("models", f"{WITH} --model=run/checkpoint-4", "checkpoint-4", {
    "damaged": {"run/checkpoint-4/unet_ema/*.safetensors": flip},
    "without a manifest": {"run/checkpoint-4/manifest.json": None},
    "a manifest that leads out": {"run/checkpoint-4/manifest.json": edit("state.json", "../x.json")},
    "a manifest without weights": {"run/checkpoint-4/manifest.json": edit("unet_ema/diffusion", "unet_ema/delusion")},
    "a step of words": {STATE: sealed(edit('"step": 4', '"step": "four"'))},
    "a state of another kind": {STATE: sealed(b"[]")},
    "a state without settings": {STATE: sealed(b'{"step": 4, "train_seconds": 1}')},
    "settings of another kind": {STATE: sealed(edit('"ddpm_num_steps": 1000', '"ddpm_num_steps": "many"'))},
    "a schedule that is not known": {
        STATE: sealed(edit('"ddpm_beta_schedule": "linear"', '"ddpm_beta_schedule": "nope"')),
    },
    "a network of the system": {"run/checkpoint-4/unet_ema/config.json": sealed(entries(_class_name="os.system"))},
    "a network that is a pipeline": {
        "run/checkpoint-4/unet_ema/config.json": sealed(entries(_class_name="DDPMPipeline")),
    },
    "a pickle for weights": {"run/checkpoint-4/unet_ema/diffusion_pytorch_model.safetensors": sealed(PICKLE)},
})
CONDITION = "class_run/checkpoint-4/condition.json"
files("models", f"{WITH} --model=class_run/checkpoint-4 --class_labels 1", "class_run|checkpoint-4", {
    "a condition of nonsense": {CONDITION: sealed(b"{")},
    "a condition of another kind": {CONDITION: sealed(b'{"condition": "nope"}')},
    "a condition that is a list": {CONDITION: sealed(b"[]")},
    "classes that are numbers": {CONDITION: sealed(entries(class_names=[1, 2]))},
    "other classes than the network's": {CONDITION: sealed(entries(class_names=["a", "b"]))},
    "a dropout of words": {CONDITION: sealed(entries(dropout="some"))},
    "a condition of text": {
        CONDITION: sealed(entries(condition="text", prompts=["x"], vocabulary=[], text_encoder="x", encoder="x")),
    },
    "a condition that is not sealed": {CONDITION: entries(class_names=["a", "b"])},
    "a condition without classes": {CONDITION: sealed(b'{"condition": "class"}')},
})
files("models", f"{WITH} --model=text_run --prompt 'the digit one'", "text_encoder|encoder", {
    "an encoder of pickles": {
        "text_run/text_encoder/model.safetensors": None, "text_run/text_encoder/pytorch_model.bin": PICKLE,
    },
    "an encoder with code": {
        "text_run/text_encoder/config.json": entries(**THEIR_CLASSES),
        "text_run/text_encoder/it.py": CODE,
    },
    "an encoder that ends early": {"text_run/text_encoder/model.safetensors": cut},
    "a tokenizer of nonsense": {"text_run/tokenizer/tokenizer.json": "{"},
})
family("models", f"{WITH} --model=class_run", """
    --class_labels nope                         :: nope
    --class_labels 99                           :: 99
    --class_labels -1                           :: -1
    --prompt x                                  :: prompt
    --guidance_scale=nan                        :: guidance_scale
    --negative_prompt=x --guidance_scale=2      :: negative_prompt
    --guidance_scale=2 --guidance_interval 5000 6000 :: guidance_interval
    --guidance_scale=2 --guidance_interval 0 1000 :: guidance_interval & 999
""")
family("models", f"{WITH} --model=text_run", """
    --class_labels 1                            :: class_labels
    --prompts_file=nope.txt                     :: nope.txt
    --prompts_file=photos                       :: photos
    --prompts_file=samples.npz                  :: samples.npz
    --prompts_file=empty.txt                    :: empty.txt
    --prompt x --prompts_file=prompts.txt       :: prompts_file
""", given={"empty.txt": "\n", "prompts.txt": "one\n"})
family("schedulers", GENERATE.replace("--ddim ", ""), """
    --scheduler=Nope                            :: Nope
    --scheduler=os.system                       :: os.system
    --scheduler=DDPMPipeline                    :: DDPMPipeline
    --scheduler=UNet2DModel                     :: UNet2DModel
    --scheduler=__doc__                         :: __doc__
    --scheduler=KarrasVeScheduler               :: KarrasVeScheduler
""")

# Where generated images go.

INTO = GENERATE.replace("=out", "=generated")
family("samples", GENERATE, """
    --output_dir=photos                         :: photos & not generated images
    --output_dir=samples.npz                    :: a file
    --output_dir=/proc/out                      :: /proc
    --output_dir=/dev/null/out                  :: /dev/null
""")
family("samples", GENERATE, f"--output_dir={'x' * 300} :: --output_dir & long")
family("samples", "generate.py run --ddim --num_inference_steps=2 --interpolate 1 2", """
    --output_dir=samples.npz                    :: a file
    --output_dir=/proc/out                      :: /proc
""")
family("samples", INTO, """
    --seeds=4-7 --num_images=4 --format=npz     :: format
    --weights=raw                               :: weights
    --eta=1                                     :: eta
    --num_inference_steps=3                     :: num_inference_steps
""", leaves=("generated/.lock",))
files("samples", INTO, "generated", {
    "a record of nonsense": {"generated/samples.json": "{"},
    "a record that is a list": {"generated/samples.json": "[]"},
    "a record that is not text": {"generated/samples.json": b"\xff\xfe"},
    "a record without entries": {"generated/samples.json": "{}"},
    "a record of words": {"generated/samples.json": entries(batch_size="large")},
    "a record that is a folder": {"generated/samples.json": folder},
    "images that are a file": {"generated/images": file_instead},
    "a record that is a pipe": {"generated/samples.json": pipe},
    "a grid that is a pipe": {"generated/grid.png": pipe},
    "a grid that is a folder": {"generated/grid.png": both(Path.unlink, folder)},
    "an image of noise": {"generated/images/000001.png": garbage},
    "in use": {"generated/.lock": held},
}, leaves=("generated/.lock",))
files("samples", f"{INTO} --overwrite", "not generated images",
      {"photos in the folder": {"generated/samples.json": None, "generated/holiday.png": PNG}},
      leaves=("generated/.lock",))
files("samples", f"{INTO}", "", {"an image of no bytes": {"generated/images/000001.png": b""}}, code=0,
      leaves=("generated/*",))
family("samples", f"{GENERATE} --nearest=2", """
    --dataset_name=nobody/nothing               :: nobody/nothing
    --train_data_dir=nope                       :: nope
    --train_data_dir=encoder                    :: encoder
""")

# What is measured, and against what.

AGAINST = f"{EVALUATE} --generated=images"
family("references", AGAINST, """
    --real=nope                                 :: nope
    --real=encoder                              :: encoder
    --real=samples.npz --resolution=16          :: samples.npz & 16
    --real=run/config.yaml                      :: npz
    --dataset_name=nobody/nothing               :: nobody/nothing
    --dataset_name=digits --split=test          :: test & train
    --train_data_dir=nope                       :: nope
    --statistics=nope.safetensors               :: nope
    --statistics=images                         :: images
    --statistics=photos.zip                     :: photos.zip
    --statistics=moments.npz                    :: statistics_mode
    --statistics=moments.npz --statistics_mode=clean :: moments.npz
    --statistics=statistics.safetensors --resolution=16 :: resolution
""")
NAMED = f"{AGAINST} --statistics=it.npz --statistics_mode=legacy_tensorflow --features=inception"
files("references", NAMED, "it.npz", {
    "nothing in it": {"it.npz": npz()},
    "other names": {"it.npz": npz(a=[1.0])},
    "nan": {"it.npz": npz(mu=np.full(2048, np.nan), sigma=np.eye(2048))},
    "other shapes": {"it.npz": npz(mu=np.zeros(3), sigma=np.eye(3))},
    "objects": {"it.npz": npz(mu=np.array([Planted()], object), sigma=np.eye(2))},
    "a pickle": {"it.npz": PICKLE},
    "noise": {"it.npz": garbage},
    "no covariance": {"it.npz": npz(mu=np.zeros(2048), sigma=-np.eye(2048))},
    "not symmetric": {"it.npz": npz(mu=np.zeros(2048), sigma=np.triu(np.ones((2048, 2048))))},
    "words": {"it.npz": npz(mu=np.array(["a"] * 2048), sigma=np.eye(2048))},
    "complex numbers": {"it.npz": npz(mu=np.zeros(2048, complex), sigma=np.eye(2048, dtype=complex))},
}, timeout=120)
STATISTICS = f"{AGAINST} --statistics=statistics.safetensors"
files("references", STATISTICS, "statistics", {
    "a changed byte": {"statistics.safetensors": flip},
    "cut": {"statistics.safetensors": cut},
    "noise": {"statistics.safetensors": garbage},
    "empty": {"statistics.safetensors": b""},
    "a header without end": {"statistics.safetensors": SAFETENSORS_BOMB},
    "a pickle": {"statistics.safetensors": PICKLE},
    "another identity": {"statistics.safetensors": edit('\\"network\\":', '\\"nutwork\\":')},
    "another network": {"statistics.safetensors": edit('\\"vision\\"', '\\"vosion\\"')},
})
files("generated", f"{EVALUATE} --real=photos --generated=it.npz", "it.npz", {
    "missing": {"other.npz": b""},
    "noise": {"it.npz": garbage},
    "empty": {"it.npz": b""},
    "cut": {"samples.npz": cut, "it.npz": lambda path: (path.parent / "samples.npz").rename(path)},
    "nothing in it": {"it.npz": npz()},
    "another name": {"it.npz": npz(pictures=np.zeros((12, 8, 8, 3), np.uint8))},
    "floats": {"it.npz": npz(arr_0=np.zeros((12, 8, 8, 3)))},
    "too few": {"it.npz": npz(arr_0=np.zeros((5, 8, 8, 3), np.uint8))},
    "none": {"it.npz": npz(arr_0=np.zeros((0, 8, 8, 3), np.uint8))},
    "seven channels": {"it.npz": npz(arr_0=np.zeros((12, 8, 8, 7), np.uint8))},
    "one dimension": {"it.npz": npz(arr_0=np.zeros(12, np.uint8))},
    "no pixels": {"it.npz": npz(arr_0=np.zeros((12, 0, 0, 3), np.uint8))},
    "objects": {"it.npz": npz(arr_0=np.array([Planted()] * 12, object))},
    "a shape beyond memory": {
        "it.npz": npz(arr_0=np.zeros((12, 8, 8, 3), np.uint8)).replace(b"(12, 8, 8, 3)", b"(9**9,8,8, 3)"),
    },
    "a shape that claims more": {
        "it.npz": npz(arr_0=np.zeros((12, 8, 8, 3), np.uint8)).replace(b"(12, 8, 8, 3)", b"(99, 8, 8, 3)"),
    },
    "a folder": {"it.npz": folder},
}, timeout=60)
files("generated", f"{EVALUATE} --real=photos --generated=images", "images", {
    "none": {"images/*.png": None},
    "too few": {"images/0*.png": None},
    "text": {"images/05.png": "text"},
    "cut": {"images/00.png": cut},
    "another size": {"images/05.png": png(np.zeros((9, 9, 3), np.uint8))},
}, timeout=30)
files("generated", f"{EVALUATE} --real=photos --generated=images", "05", {
    "a pipe": {"images/05.png": pipe},
    "a link to nothing": {"images/05.png": both(Path.unlink, link("nothing"))},
    "a format that is not read": {"images/05.png": lambda path: path.rename(path.with_suffix(".heic"))},
}, code=(0, 2), timeout=30)
files("generated", f"{EVALUATE} --real=photos --generated=parquet", "parquet", {
    "noise": {"parquet/train.parquet": garbage},
    "cut": {"parquet/train.parquet": cut},
    "empty": {"parquet/train.parquet": b""},
    "code": {"parquet/parquet.py": CODE, "parquet/train.parquet": cut},
})
files("features", f"{EVALUATE} --generated=images --real=photos --features=it", "it", {
    "missing": {"other/x": ""},
    "a folder of nothing": {"it": folder},
    "a pickle": {"it": PICKLE},
    "a pickle in an archive": {"it": TORCHSCRIPT},
    "noise": {"it": garbage},
    "code": {
        "it/config.json": '{"model_type": "mine", "auto_map": {"AutoConfig": "it.It", "AutoModel": "it.It"}}',
        "it/it.py": CODE,
    },
}, timeout=60)
files("features", f"{EVALUATE} --generated=images --real=photos", "vision", {
    "no weights": {"vision/model.safetensors": None},
    "weights of noise": {"vision/model.safetensors": garbage},
    "weights that end early": {"vision/model.safetensors": cut},
    "pickled weights": {"vision/model.safetensors": None, "vision/pytorch_model.bin": PICKLE},
    "a configuration of nonsense": {"vision/config.json": "{"},
    "layers without end": {"vision/config.json": entries(num_hidden_layers=10**9)},
    "a configuration of lists": {"vision/config.json": "[" * 100_000},
    "a size of words": {"vision/config.json": entries(hidden_size="wide")},
    "another size": {"vision/config.json": entries(hidden_size=32)},
    "a processor without size": {"vision/preprocessor_config.json": entries(size={}, crop_size={})},
    "a processor of no size": {"vision/preprocessor_config.json": entries(crop_size={"height": 0, "width": 0})},
    "a processor of negative size": {"vision/preprocessor_config.json": entries(crop_size={"height": -4, "width": 9})},
    "a processor of words": {"vision/preprocessor_config.json": entries(image_mean=["a", "b", "c"])},
    "a processor that divides by nothing": {"vision/preprocessor_config.json": entries(image_std=[0, 0, 0])},
    "no processor": {"vision/preprocessor_config.json": None},
    "a processor of nonsense": {"vision/preprocessor_config.json": "{"},
    "code": {"vision/config.json": entries(auto_map={"AutoModel": "it.It"}, model_type="mine"), "vision/it.py": CODE},
}, timeout=60)
files("features", f"{AGAINST} --real=photos --features=inception --inception_weights=it.pt", "it.pt", {
    "missing": {"other": ""},
    "a pickle": {"it.pt": PICKLE},
    "a program": {"it.pt": TORCHSCRIPT},
    "noise": {"it.pt": garbage},
    "a folder": {"it.pt": folder},
})
files("tables", MEASURE_RUN + " --run_dir=measured", "evaluation_results", {
    "noise": {"measured/evaluation_results.csv": garbage},
    "empty": {"measured/evaluation_results.csv": b""},
    "other columns": {"measured/evaluation_results.csv": "a,b\n1,2\n"},
    "words for numbers": {"measured/evaluation_results.csv": edit(",10,", ",ten,")},
    "a row too short": {"measured/evaluation_results.csv": lambda path: path.write_bytes(path.read_bytes() + b"1,2\n")},
    "a folder": {"measured/evaluation_results.csv": folder},
}, leaves=("measured/.lock",))
files("tables", "evaluate.py --compare measured measured_too", "measured", {
    "none": {"measured/evaluation_results.csv": None},
    "noise": {"measured/evaluation_results.csv": garbage},
    "words for numbers": {"measured/evaluation_results.csv": edit(",10,", ",ten,")},
    "no configuration": {"measured/config.yaml": None, "measured/evaluation_results.csv": None},
}, leaves=("comparison",))
files("runs", f"{MEASURE_RUN} --run_dir=run", "run", {
    "no configuration": {"run/config.yaml": None},
    "a configuration of nonsense": {"run/config.yaml": "{"},
    "a configuration of a list": {"run/config.yaml": "- 1\n"},
    "no checkpoints": {"run/checkpoint-*": None, "run/model_index.json": None},
    "every checkpoint damaged": {"run/checkpoint-*/unet_ema/*.safetensors": flip, "run/model_index.json": None},
    "a size of words": {"run/config.yaml": edit("resolution: 8", "resolution: large")},
    "a size of zero": {"run/config.yaml": edit("resolution: 8", "resolution: 0")},
    "channels of words": {"run/config.yaml": edit("channels: '1'", "channels: many")},
    "keys that are lists": {"run/config.yaml": edit("seed: 0", "seed: [1, 2]")},
    "code": {"run/config.yaml": f"{PLANTED_YAML}\n"},
})
files("runs", f"{MEASURE_RUN} --run_dir=run", "gone", {
    "data that are gone": {"run/config.yaml": edit("dataset_name: digits", "dataset_name: ./gone")},
})
family("runs", EVALUATE, """
    --run_dir=nope                              :: nope
    --run_dir=photos                            :: photos
    --run_dir=samples.npz                       :: samples.npz
    --run_dir=run --output_dir=run/config.yaml  :: config.yaml
    --run_dir=run --output_dir=/proc/x          :: /proc
    --generated=images --real=photos --output_dir=samples.npz :: samples.npz
    --real=photos --resolution=8 --save_statistics=/proc/x.safetensors :: /proc
    --real=photos --resolution=8 --save_statistics=run :: run
    --real=photos --resolution=8 --save_statistics=x.npz :: safetensors
    --real=photos --resolution=8 --save_statistics=x :: safetensors
    --real=photos --resolution=8 --save_statistics=x.safetensors --num_images=10 :: num_images
    --real=photos --resolution=8 --save_statistics=x.safetensors --output_dir=results :: output_dir
    --real=photos --resolution=8 --save_statistics=samples.npz/x.safetensors :: samples.npz
    --run_dir=run --checkpoints=2,4             :: checkpoints
    --run_dir=run --checkpoints=99              :: 99
    --run_dir=run --guidance_scales nan         :: guidance_scales
    --generated=images --real=photos --statistics_mode=clean :: statistics_mode
    --generated=photos.zip --real=photos        :: photos.zip
    --generated=/dev/zero --real=photos         :: /dev/zero
    --generated=images --real=/dev/zero         :: /dev/zero
""")

LONG = "x" * 300
family("runs", EVALUATE, f"""
    --run_dir={LONG}                            :: long
    --generated={LONG} --real=photos            :: long
    --generated=images --real={LONG}            :: long
    --generated=images --real=photos --output_dir={LONG} :: long
    --real=photos --resolution=8 --save_statistics={LONG}.safetensors :: long
    --generated=images --statistics={LONG}      :: long
    --generated=images --train_data_dir={LONG}  :: long
    --run_dir=run --real=photos --dataset_name=digits :: one reference
    --run_dir=pipeline                          :: pipeline
    --run_dir=run/checkpoint-4                  :: checkpoint-4
    --generated=run --real=photos               :: run
    --generated=images/00.png --real=photos     :: 00.png
    --generated=pipe --real=photos              :: pipe
    --generated=images --real=pipe              :: pipe
    --generated=images --statistics=pipe        :: pipe
    --run_dir=pipe                              :: pipe
    --generated=images --real=photos --num_images=13 :: 13 & 12
    --generated=images --real=photos --num_images=9 :: num_images
""", given={"pipe": pipe}, timeout=30)
family("features", f"{EVALUATE} --generated=images --real=photos", f"""
    --features=photos                           :: photos
    --features=run                              :: run
    --features=text_network                     :: text_network
    --features=encoder                          :: encoder
    --features=samples.npz                      :: samples.npz
    --features=nobody/nothing                   :: nobody/nothing
    --features=/dev/zero                        :: /dev/zero
    --features={LONG}                           :: long
    --inception_weights=nope                    :: inception_weights
    --features=inception --inception_weights=/dev/zero :: /dev/zero
""", timeout=30)
family("runs", "evaluate.py", """
    --compare run run                           :: twice
    --compare measured nope                     :: nope
    --compare run learning_run                  :: measure
    --compare measured measured_too --output_dir=samples.npz :: samples.npz
    --compare measured measured_too --output_dir=/proc/x :: /proc
""")

# Photos that are prepared.

MADE = ("out", "out/*")
family("preparation", PREPARE, """
    nope --output=out                           :: nope
    samples.npz --output=out                    :: samples.npz
    run/config.yaml --output=out                :: config.yaml
    photos --output=photos                      :: photos
    photos --output=.                           :: output
    photos --output=samples.npz                 :: samples.npz
    photos --output=/proc/out                   :: /proc
    photos --output=run                         :: run & not empty|something else
    encoder --output=out                        :: no image
    ~/nope --output=out                         :: nope
    photos --output=out --classes=nope          :: nope
    photos.zip --output=out --classes=nope      :: nope
    photos --output=out --captions='a photo'    :: captions & class
    /dev/zero --output=out                      :: /dev/zero
    /dev/null --output=out                      :: /dev/null
    photos --output=~/../out/../photos          :: photos|output
    photos --output=photos/cat                  :: photos/cat
    photos.zip --output=photos.zip              :: photos.zip
    photos.zip --output=photos.zip/x            :: photos.zip
    photos --output=out --eval_fraction=1       :: eval_fraction
    photos images --output=out                  :: images
""", leaves=("out",))
files("preparation", f"{PREPARE} it --output=out", "it", {
    "empty": {"it": folder},
    "only bad images": {"it/a.png": "text", "it/b.png": b""},
    "a link to itself": {"it": link("it")},
    "a pipe": {"it": pipe},
    "a pipe for an archive": {"it": pipe, "it.zip": pipe},
    "a table that is not text": {"it/a.png": PNG, "it/metadata.csv": b"\xff\xfe\0x"},
    "a table that is broken": {"it/a.png": PNG, "it/metadata.jsonl": "{"},
    "a table of lists": {"it/a.png": PNG, "it/metadata.jsonl": "[1]\n"},
    "a table without names": {"it/a.png": PNG, "it/metadata.jsonl": '{"x": 1}\n'},
    "a table that leads out": {"it/a.png": PNG, "it/metadata.jsonl": '{"file_name": "../home/x.png"}\n'},
    "a table of large fields": {"it/a.png": PNG, "it/metadata.csv": "file_name,text\na.png," + "x" * 200_000 + "\n"},
    "a table of NULs": {"it/a.png": PNG, "it/metadata.csv": "file_name\n\0a.png\n"},
    "a table that is a pipe": {"it/a.png": PNG, "it/metadata.csv": pipe},
    "only a pipe": {"it/a.png": pipe},
}, leaves=("out",), timeout=30)
files("preparation", f"{PREPARE} it.zip --output=out", "it.zip", {
    "noise": {"it.zip": garbage},
    "empty": {"it.zip": b""},
    "cut": {"photos.zip": cut, "it.zip": lambda path: (path.parent / "photos.zip").rename(path)},
    "a changed byte": {"it.zip": zipped({f"a/{n}.png": PNG for n in range(4)}).replace(PNG[60:70], b"x" * 10, 1)[:-30]},
    "a name that leads out": {"it.zip": zipped({"../../x.png": PNG})},
    "an absolute name": {"it.zip": zipped({"/tmp/x.png": PNG})},
    "a drive": {"it.zip": zipped({"C:\\x.png": PNG})},
    "links :: no image": {"it.zip": zipped({"a/x.png": b""}, link_to="/etc/passwd")},
    "nothing in it :: no image": {"it.zip": zipped({})},
    "no images :: no image": {"it.zip": zipped({"a.txt": b"x"})},
    "a pickle": {"it.zip": PICKLE},
}, leaves=("out",))
files("preparation", f"{PREPARE} it.tar --output=out", "it.tar", {
    "noise": {"it.tar": garbage},
    "cut": {"photos.tar": cut, "it.tar": lambda path: (path.parent / "photos.tar").rename(path)},
    "a name that leads out": {"it.tar": tarred("../../x.png", data=PNG)},
    "an absolute name": {"it.tar": tarred("/tmp/x.png", data=PNG)},
    "a link :: no image": {"it.tar": tarred("a/x.png", tarfile.SYMTYPE, "/etc/passwd")},
    "a hard link :: no image": {"it.tar": tarred("a/x.png", tarfile.LNKTYPE, "../../etc/passwd")},
    "a device :: no image": {"it.tar": tarred("a/x.png", tarfile.CHRTYPE)},
    "a pipe :: no image": {"it.tar": tarred("a/x.png", tarfile.FIFOTYPE)},
}, leaves=("out",))
family("preparation", "prepare_data.py", f"""
    {LONG} --output=out --num_workers=0         :: no such
    photos --output={LONG} --num_workers=0      :: long
    --check nope                                :: nope
    --check photos --output=samples.npz         :: samples.npz
    --check photos --channels=1 --output=out    :: channels
""")
files("preparation", f"{PREPARE} photos --output=out", "out", {
    "a link to itself": {"out": link("out")},
    "a link to nothing": {"out": link("nothing")},
}, leaves=("nothing",))
files("preparation", f"{PREPARE} photos --output=out", "out", {
    "photos in the output": {"out/mine.png": PNG},
    "a folder in the output": {"out/mine/x.txt": "x"},
    "a record of nonsense": {"out/prepared.json": "{"},
    "a record that is a list": {"out/prepared.json": "[]"},
    "a record that is not text": {"out/prepared.json": b"\xff\xfe"},
    "a record without settings": {"out/prepared.json": '{"images": []}'},
    "a record that is a folder": {"out/prepared.json": folder},
    "a record of deep lists": {"out/prepared.json": "[" * 100_000},
    "in use": {"out/.lock": held},
}, leaves=("out/.lock",))
family("preparation", f"{PREPARE} photos --output=prepared", """
    --resolution=16                             :: resolution 8 & 16
    --seed=5                                    :: seed
    --eval_fraction=0.5                         :: eval_fraction
""", leaves=("prepared/.lock",))
family("preparation", f"{PREPARE} photos --output=out", " :: 12", code=0, leaves=MADE,
       before=(f"{PREPARE} encoder --output=out",))
family("preparation", f"{PREPARE} photos --output=out --seed=3", " :: 12", code=0, leaves=MADE,
       before=(f"{PREPARE} photos --output=out --classes=nope",))
family("preparation", f"{PREPARE} photos.zip --output=out", " :: 12", code=0, leaves=MADE,
       before=(f"{PREPARE} broken.zip --output=out",), given={"broken.zip": garbage})
family("preparation", "prepare_data.py --check it --num_workers=0 --output=report", " :: bad", code=1,
       leaves=("report", "report/*"), given={"it/a.png": PNG, "it/bad.png": "text"})

# Pictures of runs.

family("pictures", VISUALIZE, """
    --run_dir=nope                              :: nope
    --run_dir=photos                            :: photos
    --run_dir=samples.npz                       :: samples.npz
    --train_data_dir=nope                       :: nope
    --train_data_dir=encoder                    :: encoder
    --dataset_name=nobody/nothing               :: nobody/nothing
    --output_dir=samples.npz                    :: file
    --output_dir=/proc/x                        :: /proc
    --run_dir=run --output_dir=run/config.yaml  :: file
""")
family("pictures", "visualize.py", f"""
    --run_dir={LONG}                            :: run_dir|long
    --output_dir={LONG}                         :: output_dir|long
    --train_data_dir={LONG}                     :: long
    --run_dir=run/checkpoint-4                  :: checkpoint-4
    --run_dir=run --seed=3                      :: seed
    --run_dir=run --timestep_sampler=mine.py:Mine :: uniform
    --dataset_name=./parquet --image_column=label :: label
    --schedules linear linear                   :: linear
    --schedules=                                :: schedules
""")
files("pictures", f"{VISUALIZE} --run_dir=run", "run", {
    "no metrics": {"run/metrics.jsonl": None},
    "metrics of noise": {"run/metrics.jsonl": garbage},
    "metrics that are lists": {"run/metrics.jsonl": "[1]\n"},
    "metrics of words": {"run/metrics.jsonl": '{"step": "one", "loss_q0": "small"}\n'},
    "metrics without steps": {"run/metrics.jsonl": '{"loss_q0": 1}\n'},
    "a configuration of nonsense": {"run/config.yaml": "{"},
    "a configuration of lists": {"run/config.yaml": "- 1\n"},
    "steps of words": {"run/config.yaml": edit("ddpm_num_steps: 1000", "ddpm_num_steps: many")},
    "a schedule that is not known": {"run/config.yaml": edit("ddpm_beta_schedule: linear", "ddpm_beta_schedule: nope")},
    "a sampler that is not known": {"run/config.yaml": edit("timestep_sampler: uniform", "timestep_sampler: nope")},
    "a sampler of another kind": {"run/config.yaml": edit("timestep_sampler: uniform", "timestep_sampler: ats")},
    "a sampler in a file": {
        "run/config.yaml": edit("timestep_sampler: uniform", "timestep_sampler: run/it.py:It"), "run/it.py": CODE,
    },
    "a state of noise": {"run/checkpoint-4/sampler.safetensors": garbage},
    "code": {"run/config.yaml": f"{PLANTED_YAML}\n"},
}, code=(0, 2), leaves=("figures", "figures/*"))
files("pictures", f"{VISUALIZE} --run_dir=run", "metrics.jsonl|timesteps.jsonl", {
    "metrics of endless steps": {"run/metrics.jsonl": '{"step": 1e999, "loss_q0": 1}\n'},
    "metrics of large numbers": {"run/metrics.jsonl": f'{{"step": {"9" * 400}, "loss_q0": 1}}\n'},
    "metrics that are deep": {"run/metrics.jsonl": "[" * 100_000},
    "metrics that are a folder": {"run/metrics.jsonl": folder},
    "timesteps of words": {"run/timesteps.jsonl": edit('"loss": [', '"loss": ["x", ')},
    "timesteps without bins": {"run/timesteps.jsonl": '{"step": 1}\n'},
    "timesteps of lists": {"run/timesteps.jsonl": edit('"probability": [', '"probability": [[1], ')},
})
files("pictures", f"{VISUALIZE} --run_dir=run", "run", {
    "a checkpoint without its sampler": {"run/checkpoint-4/sampler.safetensors": None},
    "a configuration that is a folder": {"run/config.yaml": folder},
}, code=(0, 2), leaves=("figures", "figures/*"))
files("pictures", f"{VISUALIZE} --run_dir=learning_run", "learning_run|sampler", {
    "the state of a sampler cut": {"learning_run/checkpoint-4/sampler.safetensors": cut},
    "the state of a sampler of nan": {"learning_run/checkpoint-4/sampler.safetensors": flip},
}, code=(0, 2), leaves=("figures", "figures/*"))
family("pictures", f"{VISUALIZE} --run_dir=run", "--timestep_sampler=run/it.py:It :: timestep_sampler|figures|run",
       given={"run/it.py": CODE}, code=(0, 2), leaves=("figures", "figures/*"))

# Caches: whatever happens to them, the numbers are the same, and something is said.


def loss_of(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def same_losses(run: str) -> Callable[[Path], str | None]:
    """The losses must be those of the run that the workshop made with the whole cache."""

    def check(place: Path) -> str | None:
        metrics = place / "out" / "metrics.jsonl"
        if not metrics.exists():
            return "nothing was trained"
        return None if loss_of(place / "out") == loss_of(place / run) else "other losses than with a whole cache"

    return check


DAMAGES = {
    "a changed byte": flip,
    "cut": cut,
    "empty": b"",
    "noise": garbage,
    "a folder": folder,
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path.name)),
}
for part, (label, damage) in itertools.product(("pixels", "index.safetensors"), DAMAGES.items()):
    files("caches", f"{TRAIN} --cache_dir=cache --output_dir=out", "cache",
          {f"{part}, {label}": {f"cache/*/{part}": damage}}, needs=("run",), code=0, leaves=(*OUT, "cache/*"),
          check=same_losses("run"))
for label, damage in DAMAGES.items():
    files("caches", f"{BY_TEXT} --cache_dir=cache", "cache|captions",
          {f"captions, {label}": {"cache/captions-*": damage}}, needs=("text_run",), code=0, leaves=(*OUT, "cache/*"),
          check=same_losses("text_run"))


def same_table(place: Path) -> str | None:
    """The numbers must be those that the workshop measured with the whole cache."""
    tables = [place / name / "evaluation_results.csv" for name in ("run", "measured")]
    if not tables[0].exists():
        return "nothing was measured"
    return None if tables[0].read_text() == tables[1].read_text() else "other numbers than with a whole cache"


for label, damage in DAMAGES.items():
    command = MEASURE_RUN.replace("{cache}", "--cache_dir=cache") + " --run_dir=run"
    files("caches", command, "statistics|cache", {f"statistics, {label}": {"cache/statistics/*": damage}},
          needs=("measured",), code=0, leaves=("run/*", "cache/*"), check=same_table)
family("caches", TRAIN + " --output_dir=out", """
    --cache_dir=samples.npz                     :: cache_dir & samples.npz
    --cache_dir=/proc/cache                     :: cache_dir & /proc
    --cache_dir=/dev/null/cache                 :: cache_dir
    --cache_dir=                                :: cache_dir
""")

# Outputs that nobody reads, or that are full: what was computed is on the disk.


for stdout in ("pipe", "full", "closed"):
    ends = {"code": (0, 1, 2) if stdout == "full" else (0, 1, 2, 141), "stdout": stdout}
    results = "results/evaluation_results.csv"
    family(f"stdout {stdout}", f"{AGAINST} --real=photos --output_dir=results", "::", leaves=("results", "results/*"),
           check=has(results), **ends)
    family(f"stdout {stdout}", f"{MEASURE_RUN} --run_dir=run", "::", leaves=("run/*",),
           check=has("run/evaluation_results.csv", "run/README.md"), **ends)
    family(f"stdout {stdout}", f"{TRAIN} --output_dir=out", "::", leaves=OUT,
           check=has("out/model_index.json", "out/README.md"), **ends)
    family(f"stdout {stdout}", f"{TRAIN} --output_dir=out --dry_run", "::", **ends)
    family(f"stdout {stdout}", GENERATE, "::", leaves=OUT, check=has("out/images/000003.png", "out/samples.json"),
           **ends)
    family(f"stdout {stdout}", f"{PREPARE} photos --output=out", "::", leaves=OUT,
           check=has("out/train/metadata.jsonl", "out/prepared.json"), **ends)
    family(f"stdout {stdout}", "prepare_data.py --check photos --num_workers=0 --output=out", "::", leaves=OUT,
           check=has("out/report.json"), **ends)
    family(f"stdout {stdout}", f"{VISUALIZE} --run_dir=run", "::", leaves=("figures", "figures/*"),
           check=has("figures/loss_by_quarter.png"), **ends)
    family(f"stdout {stdout}", "generate.py --help", "::", **ends)

# The Hub and its secrets.

family("hub", TRAIN + " --output_dir=out --push_to_hub", """
                                                :: log|token & hub
    --hub_model_id=a/b/c                        :: a/b/c
    --hub_model_id='my model'                   :: my model
    --hub_model_id=me/..                        :: me/\\.\\.
    --hub_token=                                :: hub_token|log
""", environment={"HF_TOKEN": "", "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"})


def without_the_token(place: Path) -> str | None:
    texts = [path.read_text(errors="replace") for path in place.rglob("*") if path.suffix in (".yaml", ".md", ".json")]
    return "the token is in a file" if "SECRET" in "".join(texts) else None


family("hub", TRAIN + " --output_dir=out --max_train_steps=1 --hub_token=hf_SECRET", ":: !SECRET", code=(0, 2),
       leaves=OUT,
       check=without_the_token)

# Paths and surroundings.

files("surroundings", "train_unconditional.py --config=bad\x00name", "config", {})
family("surroundings", TRAIN + " --max_train_steps=1 --output_dir=out", "::", environment={"HOME": "/nonexistent"},
       code=0, leaves=OUT)
family("surroundings", TRAIN + " --max_train_steps=2 --output_dir=out", "::", environment={"TMPDIR": "/nonexistent"},
       code=0, leaves=OUT)
family("surroundings", GENERATE, "::", environment={"HF_HOME": "/proc/nothing"}, code=0, leaves=OUT)
family("surroundings", AGAINST.replace("{cache}", "") + " --real=photos", " :: /proc/nothing",
       environment={"XDG_CACHE_HOME": "/proc/nothing"})
family("surroundings", AGAINST.replace("{cache}", "--cache_dir=samples.npz") + " --real=photos", " :: samples.npz")
family("surroundings", TRAIN + " --output_dir=Läufe/ü", "::", environment={"LC_ALL": "C", "PYTHONUTF8": "0"}, code=0,
       leaves=("Läufe", "Läufe/*"))
family("surroundings", f"{AGAINST} --real=photos", f"--output_dir={'x' * 300} :: long")
family("surroundings", f"{PREPARE} photos", f"--output={'x' * 300} :: long")
family("surroundings", "visualize.py", f"--output_dir={'x' * 300} :: long")
ROOT_USER = "permissions do not bind root" if os.geteuid() == 0 else ""
for command, path in (
    (f"{TRAIN} --output_dir=out/run", "out"),
    (f"{FOLDER}", "data/a.png"),
    (f"{GENERATE}/x", "out"),
    (f"{PREPARE} photos --output=out/x", "out"),
    (f"{VISUALIZE}/x", "figures"),
):
    files("permissions", command, "permission",
          {path: {path: both(file_instead if "." in path else folder, lambda path: path.chmod(0))}}, skip=ROOT_USER)


# Those that need no process, because they are answered before any work, and before a model is looked at.
PARSED = ("flags", "YAML", "values")
QUICK = [case for case in CASES if case.family.split(",")[0] in PARSED and "workers" not in case.command][::7]
OF_A_MODEL = ("--guidance_scale=2", "--num_inference_steps=2000", "--ema_length=0.05", "--ema_length 0.05 0.1")
QUICK = [case for case in QUICK if not any(flags in case.command for flags in OF_A_MODEL)]
