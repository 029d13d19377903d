"""evaluate.py on conditional runs: who reads the samples, how well, and what comes of it."""

import csv
import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import preloaded
import pytest
import torch
from conftest import run_script
from evaluation_helpers import network, read_csv  # noqa: F401 (a fixture)

from common.errors import UserError
from conditions.guidance import ALL, GenerationCondition
from evaluation import classifier
from evaluation.classifier import Classifier, hold_out, load_classifier
from evaluation.condition_accuracy import (
    ConditionAccuracy,
    RequestedConditions,
    describe_classes,
    in_proportion,
    request_conditions,
)
from evaluation.evaluate_options import EvaluationOptions
from evaluation.image_sets import EncodedImages, batches_of, open_images
from evaluation.samples import Samples
from generation.generate_options import ConditionOptions
from image_data.annotations import find_labels
from image_data.data_options import DataOptions
from image_data.sources import load_images
from run_folder.folder import RunFolder

CPU = torch.device("cpu")


def pixels_of(images) -> torch.Tensor:
    return torch.cat([pixels for _, pixels in batches_of(images, torch.arange(len(images)), 256, 0)])


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    source = load_images(DataOptions("digits"))
    return pixels_of(EncodedImages(source, 8, 1)), find_labels(source).of_row


@pytest.fixture(scope="module")
def reader(digits, cache_dir) -> Classifier:
    return load_classifier(*digits, cache_dir, CPU)


@pytest.fixture(scope="module")
def evaluate(network, cache_dir, reader):  # noqa: F811
    """evaluate.py in this process, with a classifier that is there already."""

    def run(*flags: str) -> None:
        common = [f"--features={network}", f"--cache_dir={cache_dir}", "--num_workers=0", "--batch_size=50"]
        sampled = ["--checkpoints", "6", "--num_images=100", "--ddim", "--num_inference_steps=2"]
        try:
            run_script("evaluate", *common, *sampled, *flags)
        finally:
            logging.getLogger().handlers.clear()

    return run


def test_digits_are_read(reader, digits):
    images, labels = digits
    held_out = hold_out(labels)
    assert reader.num_held_out == int(held_out.sum()) == 355
    right = reader.classes_of(images[held_out]) == labels[held_out]
    assert reader.accuracy == right.double().mean().item() >= 0.97
    assert torch.bincount(labels[held_out]).tolist() == (torch.bincount(labels) // 5).tolist()


def test_a_classifier_is_trained_once(reader, digits, cache_dir, monkeypatch):
    monkeypatch.setattr(classifier, "train", lambda *_: pytest.fail("trained again"))
    assert load_classifier(*digits, cache_dir, CPU).accuracy == reader.accuracy
    images, labels = digits
    with pytest.raises(pytest.fail.Exception):
        load_classifier(images, labels.flip(0), cache_dir, CPU)


def test_a_damaged_classifier_is_trained_again(reader, digits, tmp_path, monkeypatch):
    trained = reader.network.state_dict()
    monkeypatch.setattr(classifier, "train", lambda untrained, *_: untrained.load_state_dict(trained))
    load_classifier(*digits, tmp_path, CPU)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for damaged in (b"", whole[:5000]):
        path.write_bytes(damaged)
        assert load_classifier(*digits, tmp_path, CPU).accuracy == reader.accuracy
        assert path.read_bytes() == whole


def test_a_cache_that_is_no_folder_is_said_before_training(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(classifier, "train", lambda *_: pytest.fail("trained for nothing"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file: this folder cannot be made"):
        load_classifier(*digits, tmp_path / "file", CPU)


def test_something_is_held_out_of_small_classes_too():
    labels = torch.tensor([0, 0, 0, 1, 2, 2])
    assert torch.bincount(labels[hold_out(labels)], minlength=3).tolist() == [1, 0, 1]


def test_what_is_held_out_is_not_learnt(digits, tmp_path, monkeypatch):
    learnt = []
    monkeypatch.setattr(classifier, "train", lambda _, *learning: learnt.extend(learning))
    images, labels = digits
    load_classifier(images, labels, tmp_path, CPU)
    assert torch.equal(learnt[0], images[~hold_out(labels)])
    assert torch.equal(learnt[1], labels[~hold_out(labels)])


@pytest.fixture(scope="module")
def by_class(class_run, evaluate, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    evaluate(f"--run_dir={class_run}", "--guidance_scales", "1", "3", "--keep_images", f"--output_dir={folder}")
    return folder


def test_every_guidance_scale_has_a_row(by_class, class_run, reader):
    rows = read_csv(by_class / "evaluation_results.csv")
    assert [row["settings"].split()[-1] for row in rows] == ["guidance_scale=1.0", "guidance_scale=3.0"]
    for row, kept in zip(rows, ("all-classes", "all-classes-guidance-3"), strict=True):
        (folder,) = (class_run / "generated").glob(f"*-{kept}")
        read = reader.classes_of(pixels_of(open_images(str(folder), "--generated")))
        assert float(row["condition_accuracy@100"]) == (read == torch.arange(100) % 10).double().mean().item()
        assert float(row["classifier_accuracy@355"]) == reader.accuracy
    assert (by_class / "FD_vs_Guidance.png").exists()


def test_every_class_has_a_row(by_class):
    rows = read_csv(by_class / "evaluation_per_class.csv")
    assert [row["class"] for row in rows] == [*"0123456789"] * 2
    assert {row["metric"] for row in rows} == {"fd_tiny_vision@10"}
    assert [int(row["real_images"]) for row in rows[:10]] == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    total = read_csv(by_class / "evaluation_results.csv")[1]
    assert sum(float(row["condition_accuracy"]) for row in rows[10:]) / 10 == pytest.approx(
        float(total["condition_accuracy@100"])
    )


def test_two_processes_read_what_one_reads(by_class, class_run, network, cache_dir, tmp_path):  # noqa: F811
    run = shutil.copytree(class_run, tmp_path / "run", ignore=shutil.ignore_patterns("generated"))
    flags = [f"--features={network}", f"--cache_dir={cache_dir}", f"--run_dir={run}", "--num_workers=0"]
    sampled = ["--checkpoints=6", "--num_images=100", "--batch_size=50", "--ddim", "--num_inference_steps=2"]
    preloaded.run(["evaluate.py", *flags, *sampled], processes=2)
    expected, (found,) = (read_csv(folder / "evaluation_results.csv") for folder in (by_class, run))
    assert found["condition_accuracy@100"] == expected[0]["condition_accuracy@100"]
    assert float(found["fd_tiny_vision@100"]) == pytest.approx(float(expected[0]["fd_tiny_vision@100"]), abs=1e-6)
    of_classes = [
        [row["condition_accuracy"] for row in read_csv(folder / "evaluation_per_class.csv")]
        for folder in (by_class, run)
    ]
    assert of_classes[1] == of_classes[0][:10]


def test_done_work_is_skipped_and_another_scale_is_added(by_class, class_run, evaluate):
    before = read_csv(by_class / "evaluation_per_class.csv")
    evaluate(f"--run_dir={class_run}", "--guidance_scales", "1", "2", f"--output_dir={by_class}")
    rows = read_csv(by_class / "evaluation_per_class.csv")
    assert rows[:20] == before
    assert len(rows) == 30


def test_against_a_folder_the_classes_are_those_of_the_training(class_run, evaluate, tmp_path, monkeypatch, capsys):
    """Where the training images are gone, the samples are measured all the same."""
    evaluate(f"--run_dir={class_run}", f"--output_dir={tmp_path}", "--save_statistics", str(tmp_path / "s.safetensors"))
    against = f"--statistics={tmp_path / 's.safetensors'}"
    evaluate(f"--run_dir={class_run}", against, f"--output_dir={tmp_path / 'both'}")
    (expected,), (found,) = (read_csv(path / "evaluation_results.csv") for path in (tmp_path, tmp_path / "both"))
    assert {name: found[name] for name in expected if "@" in name} == {
        name: expected[name] for name in expected if "@" in name
    }
    assert not (tmp_path / "both" / "evaluation_per_class.csv").exists()

    def gone(*given):
        raise UserError("--train_data_dir photos: there is no such folder")

    monkeypatch.setattr("evaluation.session.training_images", gone)
    evaluate(f"--run_dir={class_run}", against, f"--output_dir={tmp_path / 'alone'}")
    assert "Not checked whether samples show what was asked for: --train_data_dir photos" in capsys.readouterr().err
    (alone,) = read_csv(tmp_path / "alone" / "evaluation_results.csv")
    assert (alone["fd_tiny_vision@100"], "condition_accuracy@100" in alone) == (expected["fd_tiny_vision@100"], False)


def test_prompts_of_a_run_by_text(text_run, evaluate, tmp_path, capsys):
    evaluate(f"--run_dir={text_run}", f"--output_dir={tmp_path}")
    assert "Prompts, in turn: a handwritten zero; a handwritten one" in capsys.readouterr().err
    (row,) = read_csv(tmp_path / "evaluation_results.csv")
    assert 0 <= float(row["condition_accuracy@100"]) <= 1


@pytest.mark.parametrize("missing", ["free captions", "labels"])
def test_the_best_by_what_is_not_measured(missing, class_run, evaluate, tmp_path, monkeypatch):
    """It is said before any image is generated."""

    def without(*given):
        if missing == "labels":
            raise UserError("there are no labels")
        return RequestedConditions(ConditionOptions(class_labels=[ALL]))  # as of captions: nothing to be read

    monkeypatch.setattr("evaluation.session.request_conditions", without)
    monkeypatch.setattr("evaluation.session.Session._measure_samples", lambda *_: pytest.fail("generated"))
    run = shutil.copytree(class_run, tmp_path / "run", ignore=shutil.ignore_patterns("generated"))
    with pytest.raises(UserError, match="--keep_best condition_accuracy: is not measured here, where images have free"):
        evaluate(f"--run_dir={run}", "--keep_best=condition_accuracy")


def test_the_best_by_what_samples_show(class_run, evaluate, tmp_path):
    run = shutil.copytree(class_run, tmp_path / "run", ignore=shutil.ignore_patterns("generated"))
    evaluate(f"--run_dir={run}", "--keep_best=condition_accuracy")
    (row,) = read_csv(run / "evaluation_results.csv")
    told = json.loads((run / "best" / "best.json").read_text())
    assert (told["metric"], told["value"]) == ("condition_accuracy@100", float(row["condition_accuracy@100"]))


def test_classes_are_asked_for_in_the_proportions_of_the_data():
    sizes = torch.tensor([1446, 4863, 0, 2623])
    asked = in_proportion(sizes, 1000)
    for count in (1, 10, 99, 1000):
        had = torch.bincount(asked[:count], minlength=4)
        assert (had - sizes * count / sizes.sum()).abs().max() < 1
    assert in_proportion(torch.tensor([120, 120, 120]), 8).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_uneven_classes_are_told_and_read_in_their_proportions(class_run, digits, cache_dir, reader, monkeypatch):
    from accelerate import PartialState

    from common.processes import start_processes

    uneven = EncodedImages(load_images(DataOptions("digits")), 8, 1)
    labels = find_labels(uneven.files).of_row
    uneven.rows = torch.nonzero((labels == 3) | (torch.arange(len(labels)) < 900)).flatten().tolist()
    monkeypatch.setattr("evaluation.condition_accuracy.load_classifier", lambda *given: reader)
    told = json.loads((class_run / "condition.json").read_text())
    PartialState._reset_state()
    processes = start_processes(EvaluationOptions())
    config = RunFolder(class_run).read_config()
    requested = request_conditions(config, told, uneven, 60)
    accuracy = ConditionAccuracy(requested, uneven, 0, cache_dir, processes)
    share = [float((labels[uneven.rows] == digit).float().mean()) for digit in range(10)]
    labels = requested.options.class_labels
    assert [abs(labels.count(str(digit)) - 60 * share[digit]) < 1 for digit in range(10)] == [True] * 10
    # Samples that are what was asked for are read as such.
    images = torch.stack([digits[0][digits[1] == label][0] for label in requested.classes])
    list(accuracy.observe([(torch.arange(60), images)], range(60)))
    right = (reader.classes_of(images) == requested.classes).double().mean().item()
    assert accuracy.measure()["condition_accuracy@60"] == right > 0.9
    other = {**told, "class_names": ["cat", "dog"]}
    with pytest.raises(UserError, match="the classes of digits are not those that the run knows: 0, 1, 2"):
        request_conditions(config, other, uneven, 60)


def test_guidance_of_a_run_without_a_condition(train, evaluate, tmp_path):
    run = train(tmp_path / "run", "--max_train_steps=6", "--save_images_steps=100")
    with pytest.raises(UserError, match="--guidance_scales 1 2: .* was trained without a condition"):
        evaluate(f"--run_dir={run}", "--guidance_scales", "1", "2")


def test_a_measurement_replaces_its_own_rows_and_no_others(tmp_path):
    from dataclasses import replace

    from evaluation.condition_accuracy import add_classes
    from evaluation.results import Measured

    one = Measured(1, 2.0, "ema", "ddim", 5, "guidance_scale=1.0", 10, "checkpoint-1", "ab", "digits", "cd", "no")
    row = {"class": "cat", "metric": "fid@5", "value": 3.5, "samples": 5, "real_images": 7, "condition_accuracy": 0.5}
    add_classes(tmp_path, one, [row])
    add_classes(tmp_path, replace(one, settings="guidance_scale=2.0"), [{**row, "value": 4.5}])
    add_classes(tmp_path, one, [{**row, "value": 2.5}])
    with (tmp_path / "evaluation_per_class.csv").open(newline="") as file:
        values = [(row["settings"], row["value"]) for row in csv.DictReader(file)]
    assert values == [("guidance_scale=2.0", "4.5"), ("guidance_scale=1.0", "2.5")]
    assert describe_classes([row]) == "  cat  fid@5\u2020     3.5  against 7 real images, 50.0% correct"


def test_a_row_says_whose_captions_were_drawn(tmp_path, monkeypatch):
    """Of images of test captions and of training captions, both against the test images, there are two rows."""
    monkeypatch.setattr("evaluation.samples.default_folder", lambda *_: tmp_path)
    monkeypatch.setattr("evaluation.samples.prefers_channels_last", lambda *_: False)
    model = SimpleNamespace(step=1, train_seconds=1.0, weights="ema", name="x", sha256="x")
    method = SimpleNamespace(settings={"sampler": "ddpm", "num_inference_steps": 2})
    reference = SimpleNamespace(describe=lambda: "photos[test]", fingerprint="0")

    def settings_of(request: dict, **options: object) -> str | None:
        job = SimpleNamespace(model=model, method=method, condition=GenerationCondition(request=request))
        samples = Samples(job, range(2), EvaluationOptions(**options), SimpleNamespace(device=torch.device("cpu")))
        return samples.describe(reference).settings

    prompts, test = {"prompts": ["a dog", "a cat"]}, ["test"]
    assert settings_of(prompts, split=test) == "guidance_scale=1.0 captions=test"
    for split in ([], ["train"], ["train", "test"]):
        assert settings_of(prompts, split=split) == "guidance_scale=1.0"
    assert settings_of(prompts, split=test, real="photos") == "guidance_scale=1.0"
    assert settings_of({"labels": ["dog"]}, split=test) == "guidance_scale=1.0"
