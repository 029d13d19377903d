"""generate.py with a condition: what an image shows is a function of its seed and of what was asked for."""

import json
import shutil
from pathlib import Path

import numpy as np
import preloaded
import pytest
import torch
from conftest import run_training
from diffusers import UNet2DConditionModel, UNet2DModel
from huggingface_hub.utils import filter_repo_objects
from PIL import Image
from test_generation import generate, hashes

from common.errors import UserError
from conditions.condition import ClassCondition
from conditions.conditional_pipeline import guide
from conditions.guidance import GenerationCondition, Guidance, condition_of, label_of
from generation.generate_options import ConditionOptions, parse_generation
from run_folder.saved_model import find_models
from training.network import zero_initialized

CPU = torch.device("cpu")
FAST = ["--ddim", "--num_inference_steps=4"]


def made_to_heed(run: Path, folder: Path, network: type) -> Path:
    """The pipeline of a run whose branches, silent after so few steps, all speak: what it is told shows."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoint-*"))
    unet = network.from_pretrained(folder / "unet")
    for layer in zero_initialized(unet).values():
        torch.nn.init.xavier_uniform_(layer.weight, generator=torch.Generator().manual_seed(0))
    unet.save_pretrained(folder / "unet")
    return folder


@pytest.fixture(scope="module")
def by_class(class_run, tmp_path_factory) -> Path:
    return made_to_heed(class_run, tmp_path_factory.mktemp("heeding") / "by class", UNet2DModel)


@pytest.fixture(scope="module")
def by_text(text_run, tmp_path_factory) -> Path:
    return made_to_heed(text_run, tmp_path_factory.mktemp("heeding") / "by text", UNet2DConditionModel)


def samples(folder: Path) -> dict:
    return json.loads((folder / "samples.json").read_text())


def test_classes_take_turns(by_class, tmp_path):
    generate(by_class, *FAST, "--class_labels", "3", "7", "--num_images=6", f"--output_dir={tmp_path / 'two'}")
    generate(by_class, *FAST, "--class_labels", "7", "--seeds=1,3,5", f"--output_dir={tmp_path / 'one'}")
    two, one = hashes(tmp_path / "two"), hashes(tmp_path / "one")
    assert len(two) == 6
    assert one == {name: two[name] for name in one}
    generate(by_class, *FAST, "--class_labels", "3", "--seeds=1,3,5", f"--output_dir={tmp_path / 'other'}")
    assert not one.items() & hashes(tmp_path / "other").items()
    record = samples(tmp_path / "two")
    assert (record["labels"], record["prompts"], record["guidance_scale"]) == (["3", "7"], None, 1.0)


def test_all_classes_are_the_default_and_have_a_row_each(by_class, tmp_path, capsys):
    generate(by_class, *FAST, "--num_images=23", "--gather_grid", f"--output_dir={tmp_path / 'default'}")
    assert "Classes, in turn: 0, 1, 2" in capsys.readouterr().err
    generate(by_class, *FAST, "--num_images=23", "--class_labels", "all", f"--output_dir={tmp_path / 'all'}")
    assert hashes(tmp_path / "default") == hashes(tmp_path / "all")
    grid = np.asarray(Image.open(tmp_path / "default" / "grid.png"))
    tile = 48 + 2
    assert grid.shape[0] == 10 * tile + 2
    names = grid.shape[1] - (3 * tile + 2)
    of_seed = np.asarray(Image.open(tmp_path / "default" / "images" / "000012.png"))
    shown = grid[2 * tile + 2 : 3 * tile, names + tile + 2 : names + 2 * tile, 0]
    assert (shown == of_seed.repeat(6, 0).repeat(6, 1)).all()  # seed 12 is the second of the twos
    empty = grid[3 * tile + 2 : 4 * tile, names + 2 * tile + 2 : names + 3 * tile]
    assert (empty == 255).all()  # of threes there are two


def test_two_processes_and_an_interruption_change_nothing(by_text, tmp_path):
    flags = [*FAST, "--prompt", "a handwritten seven", "--prompt", "the digit one", "--guidance_scale=2"]
    flags += ["--num_images=40", "--batch_size=8"]
    generate(by_text, *flags, f"--output_dir={tmp_path / 'alone'}")
    preloaded.run(["generate.py", by_text, *flags, f"--output_dir={tmp_path / 'two'}"], processes=2)
    assert hashes(tmp_path / "two") == hashes(tmp_path / "alone")
    for image in ("000003", "000017"):
        (tmp_path / "alone" / "images" / f"{image}.png").unlink()
    generate(by_text, *flags, f"--output_dir={tmp_path / 'alone'}")
    assert hashes(tmp_path / "two") == hashes(tmp_path / "alone")
    with pytest.raises(UserError, match="made with other settings .guidance_scale 2.0 -> 3.0"):
        generate(by_text, *flags, "--guidance_scale=3", f"--output_dir={tmp_path / 'alone'}")


def test_prompts_from_a_file_and_words_that_were_never_seen(text_run, tmp_path, capsys):
    # With the mark that editors on Windows put at the beginning.
    text = "a purple six\na handwritten seven\n\n  the digit one  \n"
    (tmp_path / "prompts.txt").write_text(text, encoding="utf-8-sig")
    generate(
        text_run, *FAST, f"--prompts_file={tmp_path / 'prompts.txt'}", "--num_images=3",
        "--guidance_scale=2", "--negative_prompt=the sour digit", f"--output_dir={tmp_path / 'out'}",
    )  # fmt: skip
    record = samples(tmp_path / "out")
    assert record["prompts"] == ["a purple six", "a handwritten seven", "the digit one"]
    assert record["negative_prompt"] == "the sour digit"
    assert "Words that occur in no caption of the training: purple, sour" in capsys.readouterr().err


def test_a_checkpoint_away_from_its_run_finds_the_encoder_again(text_run, tmp_path):
    shutil.copytree(text_run / "checkpoint-6", tmp_path / "checkpoint-6")
    flags = [*FAST, "--prompt", "a handwritten seven", "--num_images=2"]
    generate(tmp_path / "checkpoint-6", *flags, f"--output_dir={tmp_path / 'away'}")
    generate(text_run / "checkpoint-6", *flags, f"--output_dir={tmp_path / 'at home'}")
    assert hashes(tmp_path / "away") == hashes(tmp_path / "at home")


def test_a_model_of_the_hub_is_data_and_its_code_is_not_fetched(text_run, tmp_path, monkeypatch):
    """The Hub is a folder here; of a copy that holds what is fetched and nothing else, images are drawn."""

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        files = [path.relative_to(text_run).as_posix() for path in text_run.rglob("*") if path.is_file()]
        pushed = [file for file in files if not file.startswith("checkpoint")]
        for file in filter_repo_objects(pushed, allow_patterns=allow_patterns):
            (tmp_path / "cache" / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(text_run / file, tmp_path / "cache" / file)
        return str(tmp_path / "cache")

    index = json.loads((text_run / "model_index.json").read_text())
    monkeypatch.setattr("diffusers.DiffusionPipeline.load_config", lambda name: index)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    generate("me/by-text", *FAST, "--num_images=2", f"--output_dir={tmp_path / 'out'}")
    assert len(hashes(tmp_path / "out")) == 2
    assert not list((tmp_path / "cache").rglob("*.py"))


def test_another_encoder_is_refused(text_run, tmp_path, monkeypatch):
    shutil.copytree(text_run / "checkpoint-6", tmp_path / "checkpoint-6")
    shutil.copytree(text_run / "tokenizer", tmp_path / "tokenizer")
    encoder = shutil.copytree(text_run / "text_encoder", tmp_path / "text_encoder")
    from safetensors.torch import load_file, save_file

    weights = load_file(encoder / "model.safetensors")
    name = next(iter(weights))
    save_file({**weights, name: weights[name] + 1e-3}, encoder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="is not the one that it was trained with"):
        generate(tmp_path / "checkpoint-6", *FAST, f"--output_dir={tmp_path / 'out'}")
    shutil.rmtree(encoder)
    monkeypatch.setattr("conditions.guidance.TextEncoder", nowhere)
    with pytest.raises(UserError, match="checkpoint-6: its text encoder, .*, is not beside it and cannot be loaded"):
        generate(tmp_path / "checkpoint-6", *FAST, f"--output_dir={tmp_path / 'out'}")


def nowhere(name: str, device: torch.device) -> None:
    raise UserError(f"--text_encoder {name}: not to be had")


class Network(torch.nn.Module):
    """Predicts the class it is told, whatever the samples."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, samples, t, class_labels):
        value = class_labels.float().view(-1, 1, 1, 1) * samples.std(dim=(1, 2, 3), keepdim=True)
        return type("Output", (), {"sample": value + samples})


def predict(guidance: Guidance, t: int) -> torch.Tensor:
    condition = GenerationCondition(ClassCondition(list("01234")), ["a", "b"], [3, 1], guidance)
    samples = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return condition.predict_for(Network(), [1, 0])(samples, torch.tensor(t)), samples


def test_guidance_is_that_of_diffusers_within_its_interval():
    plain, samples = predict(Guidance(), 500)
    deviation = samples.std(dim=(1, 2, 3), keepdim=True)
    # Seed 1 has the second choice, which is row 1 of the table, and seed 0 the first, row 3.
    assert torch.allclose(plain - samples, torch.tensor([1.0, 3.0]).view(2, 1, 1, 1) * deviation, atol=1e-5)
    guided, _ = predict(Guidance(2.5), 500)
    untold = samples + 5 * deviation
    assert torch.allclose(guided, untold + 2.5 * (plain - untold), atol=1e-5)
    rescaled, _ = predict(Guidance(2.5, 0.7), 500)
    assert torch.equal(rescaled, guide(plain, untold, 2.5, 0.7))
    for t, is_guided in ((99, False), (100, True), (700, True), (701, False)):
        within, _ = predict(Guidance(2.5, interval=(100, 700)), t)
        assert torch.equal(within, guided if is_guided else plain)


def test_guidance_changes_images_of_a_run(by_class, tmp_path):
    for scale in (1, 4):
        flags = ["--num_images=10", f"--guidance_scale={scale}", f"--output_dir={tmp_path / str(scale)}"]
        generate(by_class, *FAST, *flags)
    assert not hashes(tmp_path / "1").items() & hashes(tmp_path / "4").items()


def test_folders_say_what_wcondition_accuracy(class_run, text_run):
    def name(run, **flags):
        return condition_of(ConditionOptions(**flags), find_models(str(run), [], None)[0], CPU).name

    assert name(class_run) == "all-classes"
    assert name(class_run, class_labels=["3", "7"], guidance_scale=2) == "class-3-7-guidance-2"
    long = name(text_run, prompt=["a handwritten seven", "the digit one, or another"], guidance_scale=1.5)
    assert long.startswith("a-handwritten-seven-the-digit-on")
    assert long != name(text_run, prompt=["a handwritten seven", "the digit one, or a third"], guidance_scale=1.5)


def test_names_and_numbers_of_classes():
    names = ["dog", "Cat", "3", "zebra"]
    assert [label_of(name, names) for name in ("dog", "cat", "3", "0", "1")] == [0, 1, 2, 0, 1]
    with pytest.raises(UserError, match="--class_labels zebr: no such class; did you mean zebra?"):
        label_of("zebr", names)
    with pytest.raises(UserError, match="--class_labels 9: no such class; there are dog, Cat, 3, zebra"):
        label_of("9", names)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--class_labels", "dog"], "--class_labels dog: no such class; there are 0, 1"),
        (["--prompt", "a dog"], "--prompt 'a dog': .* was trained without captions"),
        (["--guidance_scale=-1"], "must be 0 or greater"),
        (["--guidance_rescale=0.5"], "--guidance_rescale has no effect without guidance"),
        (
            ["--guidance_scale=2", "--guidance_interval", "700", "100"],
            "--guidance_interval 700 100: needs two timesteps",
        ),
    ],
)
def test_mistakes_by_class(flags, message, class_run, tmp_path):
    with pytest.raises(UserError, match=message):
        generate(class_run, *flags, f"--output_dir={tmp_path / 'out'}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--class_labels", "3"], "--class_labels 3: .* was trained without classes"),
        (["--prompts_file=nowhere.txt"], "--prompts_file nowhere.txt: cannot be read"),
        (["--negative_prompt=x"], "--negative_prompt has no effect without guidance"),
    ],
)
def test_mistakes_by_text(flags, message, text_run, tmp_path):
    with pytest.raises(UserError, match=message):
        generate(text_run, *flags, f"--output_dir={tmp_path / 'out'}")


def test_guidance_needs_images_without_a_condition(tiny_flags, tmp_path):
    flags = [*tiny_flags, "--max_train_steps=1", "--condition_dropout=0", "--save_images_steps=100"]
    run = run_training(tmp_path / "run", flags, script="train_conditional")
    with pytest.raises(UserError, match="trained with --condition_dropout 0"):
        generate(run, "--guidance_scale=2")


def test_a_prompt_can_be_given_again_and_again():
    assert parse_generation(["--prompt", "a", "b", "--prompt", "c"]).prompt == ["a", "b", "c"]
    assert parse_generation([]).prompt == []
