"""What several tests share: a run of the training script in this process, and a network small enough for it."""

import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# Before torch reads it: one thread, so that runs in this process and in others round alike.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest  # noqa: E402

ROOT = Path(__file__).parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"

# What takes longest comes first, so that no worker is left with it when the others have nothing more to take over.
LONGEST = "storm interruption processes generation pipeline conditioning inception publish condition_accuracy".split()
LONGEST += ["adaptive", "compile"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def make_tiny_network(folder: Path, **settings: object) -> Path:
    """The paper's network with few channels, for 8x8 grey images: a step takes milliseconds."""
    from diffusers import UNet2DModel

    from training.network import PAPER_ARITHMETIC

    shape = {
        "norm_num_groups": 4,
        "layers_per_block": 1,
        "sample_size": 8,
        "in_channels": 1,
        "out_channels": 1,
        "block_out_channels": (8, 16),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "dropout": 0.1,
    }
    UNet2DModel(**{**PAPER_ARITHMETIC, **shape, **settings}).save_config(folder)
    return folder


def make_text_encoder(folder: Path) -> Path:
    """An encoder with random weights and the words that captions of digits are made of."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    folder.mkdir()
    words = "[PAD] [UNK] [CLS] [SEP] a the handwritten digit zero one two three four five six seven eight nine".split()
    vocabulary = {word: number for number, word in enumerate(words)}
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    BertModel(config).save_pretrained(folder)
    BertTokenizer(vocab=vocabulary, model_max_length=512).save_pretrained(folder)
    return folder


def make_text_network(folder: Path) -> Path:
    """A network that reads text, as small as the others."""
    from diffusers import UNet2DConditionModel

    from training.network import PAPER_ARITHMETIC

    settings = {
        **PAPER_ARITHMETIC,
        "norm_num_groups": 4,
        "layers_per_block": 1,
        "attention_head_dim": 2,
        "sample_size": 8,
        "in_channels": 1,
        "out_channels": 1,
        "block_out_channels": (8, 16),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 16,
        "dropout": 0.1,
    }
    UNet2DConditionModel(**settings).save_config(folder)
    return folder


def make_tiny_flags(network: Path, cache_dir: Path) -> list[str]:
    """Digits, the tiny network, and little of everything."""
    return [
        "--dataset_name=digits",
        f"--model_config_name_or_path={network}",
        f"--cache_dir={cache_dir}",
        "--resolution=8",
        "--no_random_flip",
        "--train_batch_size=16",
        "--lr_warmup_steps=2",
        "--ema_max_decay=0.9",
        "--eval_batch_size=4",
        "--ddpm_num_inference_steps=5",
        "--logging_steps=1",
        "--logger=none",
    ]


@pytest.fixture(scope="session")
def tiny_network(tmp_path_factory) -> Path:
    return make_tiny_network(tmp_path_factory.mktemp("tiny") / "network")


@pytest.fixture(scope="session")
def network_without_dropout(tmp_path_factory) -> Path:
    """Dropout is drawn per process and pass: without it, how a batch is divided changes nothing."""
    return make_tiny_network(tmp_path_factory.mktemp("tiny") / "network", dropout=0.0)


@pytest.fixture(scope="session")
def text_encoder(tmp_path_factory) -> Path:
    return make_text_encoder(tmp_path_factory.mktemp("tiny") / "encoder")


@pytest.fixture(scope="session")
def text_network(tmp_path_factory) -> Path:
    return make_text_network(tmp_path_factory.mktemp("tiny") / "network")


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory) -> Path:
    """Decoded data of the tests, away from the user's."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def tiny_flags(tiny_network, cache_dir) -> list[str]:
    return make_tiny_flags(tiny_network, cache_dir)


def run_script(script: str, *arguments: object) -> None:
    """A script in this process, as the command line would call it."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    before, sys.argv = sys.argv, [f"{script}.py", *map(str, arguments)]
    try:
        importlib.import_module(script).main()
    finally:
        sys.argv = before


def run_training(output_dir: Path, flags: list[str], script: str = "train_unconditional") -> Path:
    """A training script in this process; the run's folder is returned."""
    run_script(script, *flags, f"--output_dir={output_dir}")
    return output_dir


def help_of(script: str) -> str:
    """What --help prints, in a process of its own, in which it must import nothing heavy.

    That is what would make it slow; a duration would depend on the machine.
    """
    heavy = ("torch", "diffusers", "datasets", "accelerate", "matplotlib")
    program = (
        "import runpy, sys\n"
        f"sys.argv = ['{script}', '--help']\n"
        f"try:\n    runpy.run_path('{script}', run_name='__main__')\n"
        "except SystemExit as stop:\n    print('exit', stop.code)\n"
        f"print('heavy', [name for name in {heavy} if name in sys.modules])\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.endswith("exit 0\nheavy []\n"), shown
    return shown


@pytest.fixture(scope="session")
def text_flags(tiny_flags, text_network, text_encoder) -> list[str]:
    """The tiny flags of a run by text, with two captions of each class."""
    captions = ["--caption_template", "a handwritten {class}", "the digit {class}"]
    network = f"--model_config_name_or_path={text_network}"
    return [*tiny_flags, "--condition=text", f"--text_encoder={text_encoder}", *captions, network]


@pytest.fixture(scope="session")
def class_run(tiny_flags, tmp_path_factory) -> Path:
    """Six steps by class, balanced."""
    flags = [*tiny_flags, "--max_train_steps=6", "--checkpointing_steps=3", "--save_images_steps=3", "--balance"]
    return run_training(tmp_path_factory.mktemp("runs") / "by class", flags, script="train_conditional")


@pytest.fixture(scope="session")
def text_run(text_flags, tmp_path_factory) -> Path:
    """Six steps by text."""
    flags = [*text_flags, "--max_train_steps=6", "--checkpointing_steps=3", "--save_images_steps=3"]
    return run_training(tmp_path_factory.mktemp("runs") / "by text", flags, script="train_conditional")


@pytest.fixture
def train(tiny_flags) -> Callable[..., Path]:
    """Run the training script with these flags over the tiny ones, or over others."""

    def run(output_dir: Path, *flags: str, base: list[str] = tiny_flags) -> Path:
        return run_training(output_dir, [*base, *flags])

    yield run
    logging.getLogger().handlers.clear()


@pytest.fixture
def train_conditional(tiny_flags) -> Callable[..., Path]:
    """As `train`, with a condition."""

    def run(output_dir: Path, *flags: str, base: list[str] = tiny_flags) -> Path:
        return run_training(output_dir, [*base, *flags], script="train_conditional")

    yield run
    logging.getLogger().handlers.clear()


def lines_of(run: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def metrics_of(run: Path) -> list[dict]:
    return lines_of(run, "metrics.jsonl")


def losses_of(run: Path) -> list[float]:
    return [line["loss"] for line in metrics_of(run)]
