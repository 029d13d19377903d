"""evaluate.py from flags to tables, of images against images."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import preloaded
import pytest
import torch
from evaluation_helpers import evaluate, metrics_in, network, read_csv, run  # noqa: F401
from PIL import ExifTags, Image

from common.errors import UserError
from common.files import save_safetensors
from evaluation.evaluate_options import parse_evaluation
from evaluation.metrics import Moments, frechet_distance
from evaluation.session import Session
from evaluation.statistics import Identity, named_statistics
from image_data.data_options import DataOptions
from image_data.decode import decode_image
from image_data.sources import load_images
from run_folder.config import TrainingConfig
from run_folder.folder import RunFolder

COUNT = 24


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


def measure(evaluate, generated: Path, real: Path, output_dir: Path, *flags: str) -> dict[str, str]:
    evaluate(f"--generated={generated}", f"--real={real}", f"--output_dir={output_dir}", *flags)
    return read_csv(output_dir / "evaluation_results.csv")[-1]


@pytest.mark.parametrize("flag", ["real", "train_data_dir", "dataset_name"])
def test_images_against_themselves_are_refused(evaluate, generated, flag, monkeypatch):
    monkeypatch.chdir(generated.parent)
    with pytest.raises(UserError, match=f"--generated {generated} and --{flag} {generated.name} are the same images"):
        evaluate(f"--generated={generated}", f"--{flag}={generated.name}")


def test_statistics_that_are_no_numbers_are_refused(tmp_path):
    path, network = tmp_path / "statistics.npz", SimpleNamespace(name="inception", mode="clean")
    for mean, covariance in ((np.nan, 1.0), (0.0, np.inf)):
        np.savez(path, mu=np.full(2048, mean), sigma=np.full((2048, 2048), covariance))
        with pytest.raises(UserError, match=f"--statistics {path}: mu or sigma holds numbers that are not finite"):
            named_statistics(str(path), "clean", network, (8, 8))
    for sigma, reason in (
        (np.diag(np.linspace(-0.1, 1, 2048)), "no covariance .a covariance is symmetric and has no negative"),
        (np.eye(2048) + np.eye(2048, k=1), "no covariance .a covariance is symmetric"),
        (np.eye(2048, dtype=complex), "not an .npz with mu and sigma .its numbers are complex128"),
    ):
        np.savez(path, mu=np.zeros(2048), sigma=sigma)
        with pytest.raises(UserError, match=f"--statistics {path}: .*{reason}"):
            named_statistics(str(path), "clean", network, (8, 8))
    path = tmp_path / "statistics.safetensors"
    identity = json.dumps(dict.fromkeys(Identity.__dataclass_fields__, 0))
    for name in ("mean", "covariance", "features"):
        tensors = {"mean": torch.zeros(4), "covariance": torch.eye(4), "features": torch.zeros(3, 4)}
        tensors[name][0] = torch.nan
        save_safetensors(tensors, path, {"identity": identity})
        with pytest.raises(UserError, match=f"--statistics {path}: .* holds numbers that are not finite"):
            named_statistics(str(path), None, network, (8, 8))


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
    flags = [f"--features={network}", f"--cache_dir={tmp_path / 'cache'}", f"--generated={more}", f"--real={real}",
             "--num_workers=0", "--feature_batch_size=28", f"--output_dir={tmp_path / 'two'}"]  # fmt: skip
    preloaded.run(["evaluate.py", *flags], processes=2)
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


def test_the_images_of_a_run_are_resized_as_for_its_training(tmp_path):
    from evaluation.image_sets import EncodedImages
    from evaluation.samples import training_images

    folder = write_folder(tmp_path / "wide", draw_images(2, seed=2, size=(32, 64)))
    seen = {}
    for interpolation in ("bicubic", "bilinear"):
        options = {"resolution": 16, "channels": "3", "interpolation": interpolation}
        config = TrainingConfig(train_data_dir=str(folder), **options)
        seen[interpolation] = images = training_images(config, "train", str(tmp_path / "cache"), 0)
        expected = decode_image(images.files.read(0), 3, 16, True, interpolation)
        np.testing.assert_array_equal(images.pixels(0), expected)
    assert seen["bicubic"].fingerprint == seen["bicubic"].files.fingerprint
    # Of what tables have of a fingerprint, too, no two are the same; grey images are the same in one channel and three.
    grey = TrainingConfig(train_data_dir=str(folder), resolution=16, channels="1")
    seen["grey"] = training_images(grey, "train", str(tmp_path / "cache"), 0)
    assert len({images.fingerprint[:8] for images in seen.values()}) == 3
    digits = [EncodedImages(load_images(DataOptions("digits")), 8, channels) for channels in (1, 3)]
    assert digits[0].fingerprint == digits[1].fingerprint


def test_a_folder_that_is_named_is_resized_as_the_run_s_images(run, evaluate, tmp_path, monkeypatch):
    """The filter of the run is that of its reference, however the reference is named."""
    from dataclasses import replace

    folder, found = write_folder(tmp_path / "wide", draw_images(20, seed=2, size=(32, 64))), []
    config = replace(RunFolder(run).read_config(), interpolation="bilinear")
    monkeypatch.setattr(RunFolder, "read_config", lambda self: config)
    for name in ("real", "train_data_dir"):
        session = Session.__new__(Session)
        session.options, session.run = parse_evaluation([f"--run_dir={run}", f"--{name}={folder}"]), RunFolder(run)
        session.extractor = SimpleNamespace(num_workers=0)
        found.append(session._open_real_images((16, 16), "train"))
    expected = decode_image((folder / "000000.png").read_bytes(), 3, 16, True, "bilinear")
    for images in found:
        np.testing.assert_array_equal(images.pixels(0), expected)


def test_images_are_found_as_training_finds_them(tmp_path):
    """Links to folders are followed, and what is hidden is not looked at."""
    from evaluation.image_sets import open_images

    write_folder(tmp_path / "photos" / "cat", draw_images(2, seed=0))
    write_folder(tmp_path / "photos" / ".trash", draw_images(3, seed=1))
    write_folder(tmp_path / "elsewhere", draw_images(4, seed=2))
    (tmp_path / "photos" / "dog").symlink_to(tmp_path / "elsewhere")
    images = open_images(str(tmp_path / "photos"), "--real")
    assert [path.parent.name for path in images.files.paths] == ["cat"] * 2 + ["dog"] * 4


def test_copies_of_one_image_are_measured(real, generated, evaluate, tmp_path):
    """What is left of their covariance is rounding, of either sign."""
    copies = write_folder(tmp_path / "copies", draw_images(1, seed=3).repeat(60, axis=0))
    assert metrics_in(measure(evaluate, copies, real, tmp_path / "out"))["fd_tiny_vision@60"] > 0
    moments = Moments.of_features(torch.full((60, 64), 0.1) + torch.linspace(0, 1, 64))
    assert frechet_distance(moments, moments) == pytest.approx(0, abs=1e-6)
    worse = Moments(moments.mean, torch.diag(torch.linspace(-1e-15, 1e-16, 64, dtype=torch.float64)))
    assert worse.root.isfinite().all()


def test_a_tiff_is_turned_once(tmp_path):
    from evaluation.image_sets import open_images

    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for number in range(2):
        Image.fromarray(draw_images(1, seed=number, size=(48, 32))[0]).save(tmp_path / f"{number}.tiff", exif=exif)
    images = open_images(str(tmp_path), "--generated")
    assert tuple(images.size) == (32, 48)
    assert images.pixels(1).shape == (3, 32, 48)


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
    assert "FID of 15 images is much too high: the covariance needs at least 16 images" in capsys.readouterr().err
    evaluate(f"--generated={generated}", f"--real={real}")
    assert "much too high" not in capsys.readouterr().err


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
        np.savez(tmp_path / "flat.npz", arr_0=np.zeros((20, 0, 8, 3), np.uint8))
        (tmp_path / "text.npz").write_text("no archive")
        (tmp_path / "empty.npz").touch()
        for name, message in (
            ("flat", r"flat\.npz: arr_0 is uint8 \[20, 0, 8, 3\]"),
            ("empty", "cannot be read as an npz"),
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
            ("", "nothing to measure: name a run, as in evaluate.py runs/cifar10, or images with --generated"),
            ("--generated=a", "nothing to measure against: --dataset_name, --real"),
            ("--generated=a --run_dir=b --real=c", "--generated and --run_dir: name one thing to measure"),
            ("--generated=a --real=b --dataset_name=digits", "--real and --dataset_name: name one reference"),
            ("--generated=a --real=b --modes legacy", "--modes legacy: choose from legacy_tensorflow, clean"),
            ("--generated=a --real=b --num_images=5", "--num_images 5: must be from 10 to"),
            ("--generated=a --real=b --ddim", "--ddim needs a run"),
            ("--generated=a --real=b --skip_schedule=quadratic", "--skip_schedule needs a run"),
            ("--generated=a --real=b --guidance_scales 1 2", "--guidance_scales needs a run"),
            ("--compare a b --num_images=100", "--num_images needs a run or --generated"),
            (
                "--run_dir=a --resolution=64",
                "--resolution: for a run, real images are always resized to the resolution of the run",
            ),
            ("--compare a", "--compare needs two runs or more"),
            ("--generated=a --real=b --save_statistics=c --modes clean legacy_pytorch", "name one, and no"),
            ("--real=b --resolution=8 --save_statistics=c", "--save_statistics c: the file must be called"),
            ("--real=b --resolution=8 --save_statistics=c --num_images=10", "--num_images needs a run"),
            ("--real=b --resolution=8 --save_statistics=c --output_dir=x", "--output_dir needs a run"),
            ("--generate=a", "unknown flag --generate; did you mean --generated?"),
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

    def test_a_cache_that_cannot_be_written_loses_no_pass(self, evaluate, generated, tmp_path, monkeypatch, capsys):
        from evaluation import statistics

        real = write_folder(tmp_path / "real", draw_images(20, seed=4))
        original = statistics.save_safetensors

        def full(tensors: dict, path: Path, metadata: dict) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(statistics, "save_safetensors", full)
        assert metrics_in(measure(evaluate, generated, real, tmp_path / "out"))
        assert "the statistics cannot be written to" in capsys.readouterr().err
        with pytest.raises(UserError, match="the statistics cannot be written to .*saved.safetensors"):
            evaluate(f"--real={real}", "--resolution=16", f"--save_statistics={tmp_path / 'saved.safetensors'}")
        monkeypatch.setattr(statistics, "save_safetensors", original)

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
