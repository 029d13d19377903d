"""evaluate.py from flags to tables, curves and cards, with a network small enough for it."""

import csv
import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, help_of, run_script, run_training
from PIL import ExifTags, Image

from common.errors import UserError
from evaluation.evaluate_options import parse_evaluation

COUNT = 24


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> Path:
    """A vision model of transformers that sees 28x28 pixels."""
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    folder = tmp_path_factory.mktemp("networks") / "tiny-vision"
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    Dinov2Model(Dinov2Config(**shape)).save_pretrained(folder)
    BitImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def evaluate(network, cache_dir):
    """evaluate.py in this process, with the tiny network unless told otherwise."""

    def run(*flags: str, features: str | None = None) -> None:
        common = [f"--features={features or network}", f"--cache_dir={cache_dir}", "--dataloader_num_workers=0"]
        try:
            run_script("evaluate", *common, *flags)
        finally:
            logging.getLogger().handlers.clear()

    return run


def draw_images(count: int, seed: int, size: tuple[int, int] = (16, 16), channels: int = 3) -> np.ndarray:
    """Blobs of colour, uint8 [n, height, width, channels]."""
    coarse = np.random.default_rng(seed).integers(0, 256, (count, 4, 4, channels), dtype=np.uint8)
    return coarse.repeat(size[0] // 4, axis=1).repeat(size[1] // 4, axis=2)


def write_folder(folder: Path, images: np.ndarray, kind: str = "png") -> Path:
    folder.mkdir(parents=True)
    for number, image in enumerate(images):
        Image.fromarray(image.squeeze()).save(folder / f"{number:06d}.{kind}")
    return folder


@pytest.fixture(scope="module")
def generated(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("images") / "generated", draw_images(COUNT, seed=0))


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("images") / "real", draw_images(COUNT + 8, seed=1))


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def metrics_in(row: dict[str, str]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if "@" in name}


def measure(evaluate, generated: Path, real: Path, output_dir: Path, *flags: str) -> dict[str, str]:
    evaluate(f"--generated={generated}", f"--real={real}", f"--output_dir={output_dir}", *flags)
    return read_csv(output_dir / "evaluation_results.csv")[-1]


def test_a_folder_against_a_folder(evaluate, generated, real, tmp_path, capsys):
    row = measure(evaluate, generated, real, tmp_path)
    metrics = metrics_in(row)
    assert set(metrics) == {
        f"{name}_tiny_vision@{COUNT}" for name in ("fd", "kd", "precision", "recall", "density", "coverage")
    } | {f"kd_tiny_vision_std@{COUNT}"}
    assert (row["num_images"], row["reference"]) == (str(COUNT), "real, 32 images of 16x16, cropped at the centre")
    printed = capsys.readouterr()
    assert f"fd_tiny_vision@{COUNT}" in printed.out
    assert f"{metrics[f'fd_tiny_vision@{COUNT}']:.5g}" in printed.out
    assert json.loads((tmp_path / "evaluation_results.json").read_text())[0]["num_images"] == COUNT
    best = {row["metric"]: row["best"] for row in read_csv(tmp_path / "best_scores.csv")}
    assert best[f"fd_tiny_vision@{COUNT}"] == row[f"fd_tiny_vision@{COUNT}"]


@pytest.mark.parametrize("kind", ["npz", "parquet", "subfolders"])
def test_whatever_the_images_are_kept_in_the_numbers_are_the_same(evaluate, generated, real, tmp_path, kind):
    images = draw_images(COUNT, seed=0)
    held = tmp_path / kind
    if kind == "npz":
        held = tmp_path / "samples.npz"
        np.savez(held, arr_0=images)
    elif kind == "parquet":
        from datasets import Dataset, Features
        from datasets import Image as ImageFeature

        rows = {"image": [Image.fromarray(image) for image in images]}
        held.mkdir()
        Dataset.from_dict(rows, features=Features(image=ImageFeature())).to_parquet(held / "train.parquet")
    else:
        write_folder(held / "000000", images[:10])
        write_folder(held / "000010", images[10:])
        (held / "000000" / ".000010.png.tmp").write_bytes(b"half")
    expected = metrics_in(measure(evaluate, generated, real, tmp_path / "expected"))
    assert metrics_in(measure(evaluate, held, real, tmp_path / "found")) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_two_processes_find_what_one_finds(evaluate, generated, real, network, cache_dir, tmp_path):
    """To float64 rounding. Of the 25 generated images, which fit in one batch, the second process gets none."""
    more = write_folder(tmp_path / "more", draw_images(25, seed=0))
    expected = metrics_in(measure(evaluate, more, real, tmp_path / "one", "--feature_batch_size=28"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "evaluate.py"]
    flags = [f"--features={network}", f"--cache_dir={tmp_path / 'cache'}", f"--generated={more}", f"--real={real}",
             "--dataloader_num_workers=0", "--feature_batch_size=28", f"--output_dir={tmp_path / 'two'}"]  # fmt: skip
    subprocess.run([*command, *flags], cwd=ROOT, check=True, capture_output=True, timeout=300)
    found = metrics_in(read_csv(tmp_path / "two" / "evaluation_results.csv")[0])
    # Normalised features have a covariance with an eigenvalue of zero, and FID takes the root of its rounding.
    distance = "fd_tiny_vision@25"
    assert found.pop(distance) == pytest.approx(expected.pop(distance), abs=1e-8)
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_real_images_are_brought_to_the_size_of_the_generated(evaluate, generated, tmp_path):
    """Shorter side and centre crop: the same reference as one prepared by hand."""
    wide = draw_images(20, seed=2, size=(32, 64))
    by_hand = [Image.fromarray(image).resize((32, 16), Image.Resampling.BICUBIC).crop((8, 0, 24, 16)) for image in wide]
    prepared = write_folder(tmp_path / "prepared", np.stack([np.asarray(image) for image in by_hand]))
    expected = metrics_in(measure(evaluate, generated, prepared, tmp_path / "expected"))
    found = measure(evaluate, generated, write_folder(tmp_path / "wide", wide), tmp_path / "found")
    assert metrics_in(found) == expected


@pytest.mark.parametrize(("orientation", "quarter_turns"), [(6, 1), (9, 0)])
def test_photos_are_as_large_as_they_are_upright(orientation, quarter_turns, tmp_path, monkeypatch):
    from evaluation.image_sets import open_images

    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation  # there is no ninth
    image = draw_images(1, seed=0, size=(32, 48))[0]
    Image.fromarray(np.rot90(image, quarter_turns)).save(tmp_path / "0.jpg", exif=exif, quality=100, subsampling=0)
    Image.fromarray(image).save(tmp_path / "1.png")
    with monkeypatch.context() as patch:
        patch.setattr("PIL.ImageFile.ImageFile.load", None)  # the size is in the header
        images = open_images(str(tmp_path), "--generated")
    assert tuple(images.size) == (32, 48)
    for index in range(2):
        np.testing.assert_allclose(images.pixels(index).transpose(1, 2, 0), image, atol=12)


def test_grey_against_colour_is_converted_and_said(evaluate, real, tmp_path, capsys):
    grey = write_folder(tmp_path / "grey", draw_images(COUNT, seed=0, channels=1))
    tripled = write_folder(tmp_path / "tripled", draw_images(COUNT, seed=0, channels=1).repeat(3, axis=-1))
    found = metrics_in(measure(evaluate, grey, real, tmp_path / "found"))
    assert "generated images are grey, the real ones in colour: both are measured as RGB" in capsys.readouterr().err
    assert found == metrics_in(measure(evaluate, tripled, real, tmp_path / "expected"))


def test_fewer_images_than_fid_needs_are_warned_of(evaluate, generated, real, capsys):
    evaluate(f"--generated={generated}", f"--real={real}", "--num_images=15")
    assert "FID of 15 images is far above that of many: its covariance wants 16 " in capsys.readouterr().err
    evaluate(f"--generated={generated}", f"--real={real}")
    assert "far above" not in capsys.readouterr().err


def test_some_of_many_images_are_evenly_spread_over_their_folders(evaluate, real, tmp_path):
    images = draw_images(COUNT, seed=0)
    chosen = [number * COUNT // 12 for number in range(12)]
    expected = measure(evaluate, write_folder(tmp_path / "chosen", images[chosen]), real, tmp_path / "expected")
    for number, part in enumerate(np.split(images, 2)):
        write_folder(tmp_path / "all" / str(number), part)
    found = measure(evaluate, tmp_path / "all", real, tmp_path / "found", "--num_images=12")
    assert metrics_in(found) == metrics_in(expected)


def test_two_sets_of_images_of_one_name_have_two_rows(evaluate, real, tmp_path):
    for seed in (0, 1):
        folder = write_folder(tmp_path / str(seed) / "samples", draw_images(COUNT, seed=seed))
        measure(evaluate, folder, real, tmp_path / "results")
        other = write_folder(tmp_path / str(seed) / "real", draw_images(20, seed=2 + seed))
        measure(evaluate, real, other, tmp_path / "references")
    assert len(read_csv(tmp_path / "results" / "evaluation_results.csv")) == 2
    assert len(read_csv(tmp_path / "references" / "evaluation_results.csv")) == 2


def test_a_network_that_cannot_be_compiled_is_used_as_it_is(evaluate, generated, real, tmp_path, monkeypatch, capsys):
    from evaluation import features

    expected = metrics_in(measure(evaluate, generated, real, tmp_path / "expected"))

    def broken(network):
        def call(*given):
            raise RuntimeError("no C compiler")

        return call

    monkeypatch.setattr(features, "WORTH_COMPILING", 10)
    monkeypatch.setattr(torch, "compile", broken)
    found = metrics_in(measure(evaluate, generated, real, tmp_path / "found"))
    assert "The feature network is not compiled: no C compiler" in capsys.readouterr().err
    assert found == expected


class TestErrors:
    def test_too_few_real_images(self, evaluate, generated, tmp_path):
        folder = write_folder(tmp_path / "few", draw_images(4, seed=0))
        with pytest.raises(UserError, match="few: 4 real images, at least 10 are needed"):
            evaluate(f"--generated={generated}", f"--real={folder}")

    def test_fewer_images_than_asked(self, evaluate, generated, real):
        with pytest.raises(UserError, match=r"--num_images 25: there are only 24 images in .*generated"):
            evaluate(f"--generated={generated}", f"--real={real}", "--num_images=25")

    def test_mixed_sizes(self, evaluate, real, tmp_path):
        folder = write_folder(tmp_path / "mixed", draw_images(COUNT, seed=0))
        Image.fromarray(draw_images(1, seed=0, size=(16, 32))[0]).save(folder / "000005.png")
        with pytest.raises(UserError, match=r"000005.png has 32x16 pixels, the first image 16x16: all images must"):
            evaluate(f"--generated={folder}", f"--real={real}")

    def test_unreadable_file(self, evaluate, generated, real, tmp_path):
        folder = write_folder(tmp_path / "damaged", draw_images(COUNT, seed=0))
        (folder / "000007.png").write_bytes((folder / "000006.png").read_bytes()[:60])
        with pytest.raises(UserError, match=r"cannot decode .*000007.png"):
            evaluate(f"--generated={folder}", f"--real={real}")
        with pytest.raises(UserError, match=r"cannot decode .*000007.png"):
            evaluate(f"--generated={generated}", f"--real={folder}")
        evaluate(f"--generated={generated}", f"--real={folder}", "--on_bad_image=skip", f"--output_dir={tmp_path}")
        assert read_csv(tmp_path / "evaluation_results.csv")[0]["reference"].startswith("damaged, 23 images")

    def test_empty_folder(self, evaluate, real, tmp_path):
        (tmp_path / "empty").mkdir()
        with pytest.raises(UserError, match=r"--generated .*empty: there are no images in this folder"):
            evaluate(f"--generated={tmp_path / 'empty'}", f"--real={real}")
        with pytest.raises(UserError, match=r"--real .*nowhere: there is no such file or folder"):
            evaluate(f"--generated={real}", f"--real={tmp_path / 'nowhere'}")

    def test_output_that_cannot_be_written_is_said_first(self, evaluate, generated, real, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match="file: this folder cannot be made"):
            evaluate(f"--generated={generated}", f"--real={real}", f"--output_dir={tmp_path}/file", features="nothing")

    def test_npz_of_something_else(self, evaluate, real, tmp_path):
        np.savez(tmp_path / "floats.npz", arr_0=np.zeros((20, 8, 8, 3)))
        np.savez(tmp_path / "other.npz", labels=np.zeros(3))
        (tmp_path / "text.npz").write_text("no archive")
        for name, message in (
            ("floats", "float64 .* uint8 .n, height, width, channels. is needed"),
            ("other", "no arr_0 and no images, only: labels"),
            ("text", "cannot be read as an npz"),
        ):
            with pytest.raises(UserError, match=message):
                evaluate(f"--generated={tmp_path / name}.npz", f"--real={real}")

    def test_unknown_features(self, evaluate, generated, real):
        with pytest.raises(UserError, match="--features inceptoin: neither inception, dinov2, clip, nor a folder"):
            evaluate(f"--generated={generated}", f"--real={real}", features="inceptoin")

    def test_file_that_is_not_vgg16(self, evaluate, generated, real, tmp_path):
        torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pth")
        with pytest.raises(UserError, match="other.pth: not the state of torchvision's VGG16"):
            evaluate(f"--generated={generated}", f"--real={real}", features=str(tmp_path / "other.pth"))

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ("", "nothing to measure: name images with --generated or a run with --run_dir"),
            ("--generated=a", "nothing to measure against: --dataset_name, --real"),
            ("--generated=a --run_dir=b --real=c", "--generated and --run_dir: name one thing to measure"),
            ("--generated=a --real=b --dataset_name=digits", "--real and --dataset_name: name one reference"),
            ("--generated=a --real=b --modes legacy", "--modes legacy: choose from legacy_tensorflow, clean"),
            ("--generated=a --real=b --num_images=5", "--num_images 5: must be at least 10"),
            ("--generated=a --real=b --ddim", "--ddim goes with --run_dir"),
            ("--generated=a --real=b --skip_schedule=quadratic", "--skip_schedule goes with --run_dir"),
            ("--generated=a --real=b --guidance_scales 1 2", "--guidance_scales goes with --run_dir"),
            ("--compare a b --num_images=100", "--num_images goes with --generated or --run_dir"),
            ("--run_dir=a --resolution=64", "--resolution: the real images are brought to the resolution of the run"),
            ("--compare a", "--compare needs two runs or more"),
            ("--generated=a --real=b --save_statistics=c --modes clean legacy_pytorch", "name one, and no"),
            ("--samples=a", "unknown flag --samples=a; did you mean --generated?"),
        ],
    )
    def test_flags(self, flags, message):
        with pytest.raises(UserError) as error:
            parse_evaluation(flags.split())
        assert message in str(error.value)


class TestStatistics:
    def test_are_found_again_and_made_again_when_the_data_change(self, evaluate, generated, tmp_path, monkeypatch):
        real = write_folder(tmp_path / "real", draw_images(20, seed=3), kind="bmp")  # whose size tells nothing
        first = metrics_in(measure(evaluate, generated, real, tmp_path / "first"))
        counted = []
        from evaluation import statistics

        original = statistics.save_statistics
        monkeypatch.setattr(statistics, "save_statistics", lambda *given: counted.append(1) or original(*given))
        assert metrics_in(measure(evaluate, generated, real, tmp_path / "second")) == first
        assert counted == []
        Image.fromarray(draw_images(1, seed=9)[0]).save(real / "000003.bmp")
        assert metrics_in(measure(evaluate, generated, real, tmp_path / "third")) != first
        assert counted == [1]

    def test_saved_ones_give_the_same_numbers(self, evaluate, generated, real, tmp_path):
        saved = tmp_path / "statistics.safetensors"
        evaluate(f"--real={real}", "--resolution=16", f"--save_statistics={saved}")
        expected = metrics_in(measure(evaluate, generated, real, tmp_path / "expected"))
        evaluate(f"--generated={generated}", f"--statistics={saved}", f"--output_dir={tmp_path / 'found'}")
        (row,) = read_csv(tmp_path / "found" / "evaluation_results.csv")
        assert metrics_in(row) == expected
        assert row["reference"].startswith("real, 32 images of 16x16")

    def test_of_another_size_or_network_are_refused(self, evaluate, generated, real, tmp_path, network):
        from transformers import AutoModel

        saved = tmp_path / "statistics.safetensors"
        evaluate(f"--real={real}", "--resolution=12", f"--save_statistics={saved}")
        with pytest.raises(UserError, match="do not fit: size 12x12 instead of 16x16"):
            evaluate(f"--generated={generated}", f"--statistics={saved}")
        other = tmp_path / "tiny-vision"
        model = AutoModel.from_pretrained(network)
        with torch.no_grad():
            model.layernorm.bias += 1
        model.save_pretrained(other)
        (other / "preprocessor_config.json").write_bytes((network / "preprocessor_config.json").read_bytes())
        with pytest.raises(UserError, match="do not fit: weights .* instead of"):
            evaluate(f"--generated={generated}", f"--statistics={saved}", features=str(other))

    def test_npz_must_be_told_its_mode(self, tmp_path):
        from evaluation.networks import FeatureNetwork
        from evaluation.statistics import named_statistics

        path = tmp_path / "cifar10.npz"
        np.savez(path, mu=np.arange(2048.0), sigma=np.eye(2048))
        seen = FeatureNetwork("inception", "clean", "digest", torch.nn.Identity(), scale=torch.nn.Identity())
        with pytest.raises(UserError, match="say it with --statistics_mode"):
            named_statistics(str(path), None, seen, (32, 32))
        with pytest.raises(UserError, match="mode legacy_pytorch instead of clean"):
            named_statistics(str(path), "legacy_pytorch", seen, (32, 32))
        statistics = named_statistics(str(path), "clean", seen, (32, 32))
        assert statistics.moments.mean[5] == 5
        assert statistics.features is None


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_flags) -> Path:
    """A run with two checkpoints."""
    flags = ["--max_train_steps=4", "--checkpointing_steps=2", "--save_images_steps=100", "--logger=tensorboard"]
    folder = run_training(tmp_path_factory.mktemp("runs") / "run", [*tiny_flags, *flags])
    logging.getLogger().handlers.clear()
    return folder


SAMPLED = ("--num_images=12", "--ddim", "--num_inference_steps=2", "--batch_size=6")


@pytest.fixture(scope="module")
def measured_run(run, evaluate) -> Path:
    evaluate(f"--run_dir={run}", *SAMPLED)
    return run


class TestRun:
    def test_every_checkpoint_has_a_row(self, measured_run):
        rows = read_csv(measured_run / "evaluation_results.csv")
        assert [row["step"] for row in rows] == ["2", "4"]
        for row in rows:
            assert (row["weights"], row["sampler"], row["steps"], row["num_images"]) == ("ema", "ddim", "2", "12")
            assert row["settings"] == "skip_schedule=linear eta=0.0"
            assert row["reference"] == "digits[train], 1797 images of 8x8, cropped at the centre"
            assert float(row["train_seconds"]) > 0
            assert len(metrics_in(row)) == 7
        assert rows[0]["sha256"] != rows[1]["sha256"]

    def test_tensorboard_and_card_have_them_too(self, measured_run):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        (folder,) = (measured_run / "logs" / "evaluation").iterdir()
        assert folder.name.startswith("ema-ddim-2-skip_schedule=linear-eta=0.0-digits-train-1797-images")
        events = EventAccumulator(str(folder)).Reload()
        assert [event.step for event in events.Scalars("fd_tiny_vision@12")] == [2, 4]
        card = (measured_run / "README.md").read_text()
        assert card.count("## Evaluation") == 1
        assert "| `fd_tiny_vision@12` |" in card
        assert "![FD](FD_vs_TrainingSteps.png)" in card
        assert card.index("## Metrics") < card.index("## Evaluation") < card.index("## Repeat this run")

    def test_done_work_is_skipped(self, measured_run, evaluate, monkeypatch, capsys):
        from evaluation.samples import Samples

        before = (measured_run / "evaluation_results.csv").read_bytes()
        monkeypatch.setattr(Samples, "generate", None)
        evaluate(f"--run_dir={measured_run}", *SAMPLED)
        assert capsys.readouterr().err.count("has been measured already") == 2
        assert (measured_run / "evaluation_results.csv").read_bytes() == before

    def test_all_images_that_are_left_decide_about_compiling(self, measured_run, evaluate, tmp_path, monkeypatch):
        from evaluation.features import FeatureExtractor

        compiled = []
        monkeypatch.setattr(FeatureExtractor, "_compile", lambda *given: compiled.append(given))
        for number, times in ((25, 0), (24, 1)):
            monkeypatch.setattr("evaluation.features.WORTH_COMPILING", number)
            evaluate(f"--run_dir={measured_run}", *SAMPLED, f"--output_dir={tmp_path / str(number)}")
            assert len(compiled) == times

    def test_to_be_stopped_loses_only_what_was_being_measured(self, measured_run, evaluate, tmp_path, monkeypatch):
        from common.interruption import Interrupted
        from evaluation.samples import Samples

        original = Samples.generate

        def stopped_at_step_4(samples, *given):
            if samples.job.model.step == 4:
                raise Interrupted("SIGTERM: stopped before there was anything to save")
            return original(samples, *given)

        monkeypatch.setattr(Samples, "generate", stopped_at_step_4)
        with pytest.raises(Interrupted, match="SIGTERM: stopped at checkpoint-4; the ones before it are in .* again"):
            evaluate(f"--run_dir={measured_run}", *SAMPLED, f"--output_dir={tmp_path}")
        assert [row["step"] for row in read_csv(tmp_path / "evaluation_results.csv")] == ["2"]

    def test_rows_of_pruned_checkpoints_stay(self, measured_run, evaluate, tmp_path):
        import shutil

        copy = tmp_path / "run"
        shutil.copytree(measured_run, copy)
        shutil.rmtree(copy / "checkpoint-2")
        evaluate(f"--run_dir={copy}", "--num_images=10", "--ddim", "--num_inference_steps=1", "--batch_size=10")
        rows = read_csv(copy / "evaluation_results.csv")
        assert [(row["step"], row["num_images"]) for row in rows] == [("2", "12"), ("4", "10"), ("4", "12")]
        assert rows[0]["fd_tiny_vision@12"]
        assert not rows[0]["fd_tiny_vision@10"]

    def test_kept_images_are_used_and_give_the_same_numbers(self, measured_run, evaluate, tmp_path, monkeypatch):
        import shutil

        from evaluation.samples import Samples

        copy = tmp_path / "run"
        shutil.copytree(measured_run, copy)
        (copy / "evaluation_results.csv").unlink()
        evaluate(f"--run_dir={copy}", *SAMPLED, "--keep_images", "--checkpoints", "4")
        expected = read_csv(measured_run / "evaluation_results.csv")[1]
        (found,) = read_csv(copy / "evaluation_results.csv")
        assert metrics_in(found) == pytest.approx(metrics_in(expected), rel=1e-9, abs=1e-9)

        # The folder is that of generate.py: measured by itself, it says what it holds.
        (folder,) = (copy / "generated").iterdir()
        evaluate(f"--generated={folder}", "--dataset_name=digits", f"--output_dir={tmp_path / 'images'}")
        (row,) = read_csv(tmp_path / "images" / "evaluation_results.csv")
        assert (row["step"], row["sampler"], row["steps"]) == ("4", "ddim", "2")
        (copy / "evaluation_results.csv").unlink()
        monkeypatch.setattr(Samples, "generate", None)
        evaluate(f"--run_dir={copy}", *SAMPLED, "--checkpoints", "4")
        assert metrics_in(read_csv(copy / "evaluation_results.csv")[0]) == metrics_in(found)

        # Not if some are gone.
        removed = folder / "images" / "000003.png"
        data = removed.read_bytes()
        removed.unlink()
        (copy / "evaluation_results.csv").unlink()
        with pytest.raises(UserError, match="holds 11 images, but 12 according to its samples.json"):
            evaluate(f"--run_dir={copy}", *SAMPLED, "--checkpoints", "4")
        removed.write_bytes(data)
        with pytest.raises(UserError, match="folder must be moved away first: .*batch_size 6 -> 4"):
            evaluate(
                f"--run_dir={copy}",
                *SAMPLED,
                "--checkpoints",
                "4",
                "--keep_images",
                "--batch_size=4",
                "--num_images=13",
            )

        # Not those of other weights.
        record = (folder / "samples.json").read_text()
        (folder / "samples.json").write_text(record.replace(found["sha256"], "0" * 64))
        with pytest.raises(TypeError, match="NoneType"):
            evaluate(f"--run_dir={copy}", *SAMPLED, "--checkpoints", "4")

    def test_a_pipeline_without_checkpoints_is_the_end_of_the_run(self, measured_run, tmp_path):
        import shutil

        from evaluation.samples import models_of
        from run_folder.folder import RunFolder

        copy = tmp_path / "run"
        shutil.copytree(measured_run, copy, ignore=shutil.ignore_patterns("checkpoint-*"))
        (model,) = models_of(RunFolder(copy), [], None)
        rows = read_csv(measured_run / "evaluation_results.csv")
        assert (str(model.step), model.sha256) == (rows[1]["step"], rows[1]["sha256"])

    def test_what_is_no_run_is_refused(self, evaluate, tmp_path):
        with pytest.raises(UserError, match="no run is there .no config.yaml."):
            evaluate(f"--run_dir={tmp_path}")


def test_curves_carry_the_names_people_look_for(tmp_path):
    from evaluation.curves import draw_run

    rows = [row_of(step, {"fid@5000": 100 / step, "kid@5000": 0.1 / step}) for step in range(1, 41)]
    drawn = {path.name for path in draw_run(tmp_path, rows, has_score=False)}
    wanted = {"FID_vs_TrainingSteps.png", "IS_vs_TrainingSteps.png", "FID_vs_TrainingSteps_First25.png",
              "IS_vs_TrainingSteps_First25.png", "FID_vs_TrainingSeconds.png", "KID_vs_TrainingSteps.png"}  # fmt: skip
    assert drawn == wanted
    for name in wanted:
        assert min(Image.open(tmp_path / name).size) > 500


def row_of(step: int, metrics: dict[str, float], **changes: object) -> dict:
    row = {
        "step": step,
        "train_seconds": 10.0 * step,
        "weights": "ema",
        "sampler": "ddpm",
        "steps": 1000,
        "settings": None,
        "images": f"checkpoint-{step}",
        "num_images": int(next(iter(metrics)).partition("@")[2]),
        "sha256": str(step),
        "reference": "cifar10[train], 50000 images of 32x32, cropped at the centre",
        "reference_fingerprint": "0123abcd",
        "precision": "no",
    }
    return {**row, **changes, **metrics}


def test_a_line_joins_points_of_one_number_of_images_and_one_method():
    from evaluation.curves import lines_of
    from evaluation.metrics import FID

    rows = [
        row_of(1, {"fid@5000": 30.0}),
        row_of(2, {"fid@5000": 20.0}),
        row_of(2, {"fid@50000": 15.0}),
        row_of(2, {"fid@5000": 18.0, "fid_clean@5000": 17.0}, sampler="ddim", steps=50),
    ]
    assert lines_of(rows, FID, "step") == {
        "fid@5000, ddpm, 1000 steps": [(1, 30.0), (2, 20.0)],
        "fid@50000, ddpm, 1000 steps": [(2, 15.0)],
        "fid@5000, ddim, 50 steps": [(2, 18.0)],
        "fid_clean@5000, ddim, 50 steps": [(2, 17.0)],
    }


def test_the_best_is_among_rows_that_were_measured_alike(tmp_path):
    rows = [
        row_of(1, {"fid@5000": 30.0}),
        row_of(2, {"fid@5000": 20.0}),
        row_of(3, {"fid@5000": 25.0}),
        row_of(1, {"fid@5000": 12.0}, settings="guidance_scale=3.0"),
        row_of(2, {"fid@5000": 15.0}, reference_fingerprint="ffff0000"),
    ]
    write_table(tmp_path, rows)
    best = [(row["metric"], row["best"], row["step"]) for row in read_csv(tmp_path / "best_scores.csv")]
    assert sorted(best) == [("fid@5000", "12.0", "1"), ("fid@5000", "15.0", "2"), ("fid@5000", "20.0", "2")]


def test_rows_of_weights_that_were_replaced_are_dropped(tmp_path):
    from evaluation.results import remove_replaced

    write_table(tmp_path, [row_of(step, {"fid@5000": 1.0 * step}) for step in (1, 2, 3)])
    remove_replaced(tmp_path, {(1, "ema"): "1", (2, "ema"): "other weights", (2, "raw"): "2"})
    assert [row["step"] for row in read_csv(tmp_path / "evaluation_results.csv")] == ["1", "3"]
    assert [row["best"] for row in read_csv(tmp_path / "best_scores.csv")] == ["1.0"]


def test_published_numbers_are_drawn_where_data_and_number_match():
    from evaluation.curves import published_for
    from evaluation.metrics import FID

    assert published_for([row_of(1, {"fid@50000": 5.0})], FID)["Ho et al. 2020"] == 3.17
    assert published_for([row_of(1, {"fid@10000": 5.0})], FID) == {}
    assert published_for([row_of(1, {"fid@50000": 5.0}), row_of(2, {"fid@50000": 4.0, "kid@10000": 0.1})], FID)
    assert published_for([row_of(1, {"fid@50000": 5.0}), row_of(2, {"fid@10000": 4.0})], FID) == {}


@pytest.mark.parametrize(
    ("reference", "same"),
    [
        ("CIFAR-10[train], 50000 images of 32x32", True),
        ("uoft-cs/cifar10[train], 50000 images of 32x32, cropped at the centre", True),
        ("cifar10[test], 10000 images of 32x32, cropped at the centre", False),
        ("cifar10[train], 50000 images of 64x64, cropped at the centre", False),
        ("cifar100[train], 50000 images of 32x32, cropped at the centre", False),
        ("uoft-cs/cifar-100[train], 50000 images of 32x32", False),
    ],
)
def test_published_numbers_are_of_cifar10_and_no_other(reference, same):
    from evaluation.curves import published_for
    from evaluation.metrics import FID

    assert bool(published_for([row_of(1, {"fid@50000": 5.0}, reference=reference)], FID)) == same


def test_distances_in_other_features_are_drawn_under_their_own_name(tmp_path):
    from evaluation.curves import draw_guidance, draw_run, lines_of
    from evaluation.metrics import FD

    rows = [
        row_of(
            step, {"fd_dinov2@1000": 500.0 / step * scale, "kd_dinov2@1000": 1.0}, settings=f"guidance_scale={scale}"
        )
        for step in range(1, 4)
        for scale in (1.0, 3.0)
    ]
    assert lines_of(rows[::2], FD, "step") == {"fd_dinov2@1000": [(1, 500), (2, 250), (3, pytest.approx(500 / 3))]}
    assert {path.name for path in draw_run(tmp_path, rows, has_score=True)} == {
        "FD_vs_TrainingSteps.png",
        "FD_vs_TrainingSteps_First25.png",
        "FD_vs_TrainingSeconds.png",
    }
    assert [path.name for path in draw_guidance(tmp_path, rows)] == ["FD_vs_Guidance.png"]
    unknown = [{name: value for name, value in row.items() if not name.startswith("fd_")} for row in rows]
    assert draw_guidance(tmp_path, unknown) == []


def write_table(folder: Path, rows: list[dict]) -> Path:
    from evaluation.results import Measured, add_result

    for row in rows:
        add_result(
            folder,
            Measured(**{name: value for name, value in row.items() if "@" not in name}),
            {name: value for name, value in row.items() if "@" in name},
        )
    return folder


def test_the_table_grows_by_columns_and_rows(tmp_path):
    from evaluation.results import read_results

    write_table(tmp_path, [row_of(2, {"fid@100": 9.0}), row_of(1, {"fid@100": 12.0, "kid@100": 0.5})])
    write_table(tmp_path, [row_of(2, {"fid_clean@100": 8.0}), row_of(2, {"fid@50": 30.0})])
    rows = read_results(tmp_path)
    assert [(row["step"], row["num_images"]) for row in rows] == [(1, 100), (2, 50), (2, 100)]
    assert (rows[2]["fid@100"], rows[2]["fid_clean@100"], rows[2]["fid@50"]) == (9.0, 8.0, None)
    best = {row["metric"]: (row["best"], row["step"]) for row in read_csv(tmp_path / "best_scores.csv")}
    assert best["fid@100"] == ("9.0", "2")
    assert best["kid@100"] == ("0.5", "1")


def test_runs_are_compared_by_the_time_to_equal_fid(tmp_path, capsys, caplog):
    from evaluation.comparison import compare_runs

    slow = write_table(tmp_path / "slow", [row_of(step, {"fid@100": 80.0 - 10 * step}) for step in range(1, 6)])
    fast = write_table(tmp_path / "fast", [row_of(step, {"fid@100": 80.0 - 20 * step}) for step in range(1, 4)])
    compare_runs([str(slow), str(fast)], tmp_path / "out")
    last = read_csv(tmp_path / "out" / "time_to_fid.csv")[-1]
    assert float(last["fid"]) == pytest.approx(30)
    assert float(last["slow seconds"]) == pytest.approx(50)
    assert float(last["fast seconds"]) == pytest.approx(25)  # half-way between 40 at 20 s and 20 at 30 s
    assert float(last["fast speed-up"]) == pytest.approx(2)
    assert (tmp_path / "out" / "FID_vs_TrainingSeconds.png").exists()
    assert "fast speed-up" in capsys.readouterr().out
    assert not caplog.records
    copied = [row_of(step, {"fid@100": 90.0 - 10 * step}, reference_fingerprint="89abcdef") for step in range(1, 6)]
    compare_runs([str(slow), str(write_table(tmp_path / "copied", copied))], tmp_path / "out")
    assert "data that are called the same, but are other files or copies" in caplog.text


def test_runs_measured_otherwise_are_not_compared(tmp_path):
    from evaluation.comparison import compare_runs

    one = write_table(tmp_path / "one", [row_of(1, {"fid@100": 80.0})])
    other = write_table(tmp_path / "other", [row_of(1, {"fid@200": 80.0})])
    with pytest.raises(UserError, match="no number of images, sampler and reference that all runs"):
        compare_runs([str(one), str(other)], tmp_path / "out")


def test_runs_are_compared_in_other_features_too(tmp_path):
    from evaluation.comparison import compare_runs

    tables = [
        write_table(tmp_path / name, [row_of(step, {"fd_dinov2@100": 500 / step}) for step in range(first, 4)])
        for name, first in (("slow", 1), ("fast", 2))
    ]
    compare_runs([str(table) for table in tables], tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "FD_vs_TrainingSeconds.png",
        "FD_vs_TrainingSteps.png",
        "time_to_fd.csv",
    }
    assert float(read_csv(tmp_path / "out" / "time_to_fd.csv")[-1]["fd"]) == pytest.approx(500 / 3)


def test_fid_is_compared_in_the_mode_of_published_numbers_first(tmp_path):
    from evaluation.comparison import find_common_rows

    metrics = {"fid@100": 9.0, "fid_clean@100": 8.0, "fd_dinov2@100": 300.0}
    assert find_common_rows({"run": [row_of(1, metrics)]})[0][0] == "fid@100"
    del metrics["fid@100"]
    assert find_common_rows({"run": [row_of(1, metrics)]})[0][0] == "fid_clean@100"
    assert find_common_rows({"run": [row_of(1, {**metrics, "fd_dinov2@200": 300.0})]})[0][0] == "fd_dinov2@200"


def test_checkpoints_of_which_no_time_is_known_are_compared_by_step_alone(tmp_path):
    from evaluation.comparison import compare_runs, line_of

    rows = [row_of(1, {"fid@100": 80.0}), row_of(2, {"fid@100": 40.0}, train_seconds=None)]
    runs = [str(write_table(tmp_path / name, rows)) for name in ("one", "other")]
    compare_runs(runs, tmp_path / "out")
    assert line_of(rows, "fid@100", "train_seconds") == [(10.0, 80.0)]
    assert line_of(rows, "fid@100", "step") == [(1, 80.0), (2, 40.0)]


def test_runs_of_one_name_are_told_apart(tmp_path, monkeypatch):
    from evaluation.comparison import compare_runs

    monkeypatch.chdir(tmp_path)
    for name in ("a/run", "run"):
        write_table(tmp_path / name, [row_of(1, {"fid@100": 80.0})])
    compare_runs(["a/run", "run"], Path("out"))
    (row,) = read_csv(tmp_path / "out" / "time_to_fid.csv")
    assert {"run seconds", f"{tmp_path}/run seconds"} < row.keys()


def test_runs_that_cannot_be_compared_are_said(tmp_path, monkeypatch):
    from evaluation.comparison import compare_runs

    write_table(tmp_path / "one", [row_of(1, {"fid@100": 80.0})])
    write_table(tmp_path / "other", [row_of(1, {"kid@100": 0.1})])
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for runs, out, message in (
        (["one", f"{tmp_path}/one"], "out", f"--compare one {tmp_path}/one: one run is named twice"),
        (["one", "~/other"], "out", "other: no FID and time of training"),
        (["one", "nowhere"], "out", "--compare nowhere: there are no measured checkpoints"),
    ):
        with pytest.raises(UserError, match=message):
            compare_runs(runs, Path(out))
    write_table(tmp_path / "other", [row_of(1, {"fid@100": 80.0})])
    with pytest.raises(UserError, match="file: this folder cannot be made"):
        compare_runs(["one", "other"], Path("file"))


def test_help_needs_no_heavy_import():
    assert "--run_dir" in help_of("evaluate.py")
