"""No code comes from data: a marker is planted wherever a file could smuggle some in, and everything is read."""

import io
import json
import pickle
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import make_tiny_network, run_script, run_training
from image_helpers import png, write
from PIL import Image

from common.errors import UserError
from common.options import read_config_file
from conditions.text_encoder import TextEncoder
from evaluation import inception
from evaluation.image_sets import open_images
from evaluation.networks import transformers_network, vgg16_network
from evaluation.results import read_results
from evaluation.statistics import named_statistics
from generation.writers import WRITERS
from image_data.data_options import DataOptions
from image_data.decode import UndecodableImage, decode_image
from image_data.sources import load_images
from preparation.archives import unpacked
from run_folder.config import ConditionalConfig
from run_folder.folder import RunFolder
from run_folder.saved_model import find_models

CPU = torch.device("cpu")


class Planted:
    """What a pickle of this is read as runs the code."""

    def __init__(self, code: str):
        self.code = code

    def __reduce__(self):
        return exec, (self.code,)


class Marker:
    """A file that appears if any of the code runs, in whatever shape it was planted."""

    def __init__(self, path: Path):
        self.path = path
        self.code = f"open({str(path)!r}, 'w').close()"
        self.pickle = pickle.dumps(Planted(self.code))
        self.yaml = f"!!python/object/apply:builtins.exec [{json.dumps(self.code)}]"

    def appeared(self) -> bool:
        found = self.path.exists()
        self.path.unlink(missing_ok=True)
        return found


@pytest.fixture
def marker(tmp_path):
    marker = Marker(tmp_path / "the marker")
    yield marker
    assert not marker.appeared()


@pytest.fixture(scope="module")
def finished(tiny_flags, tmp_path_factory) -> Path:
    flags = ["--max_train_steps=2", "--checkpointing_steps=1", "--save_images_steps=9"]
    return run_training(tmp_path_factory.mktemp("runs") / "run", [*tiny_flags, *flags])


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def change(path: Path, **entries: object) -> None:
    read, write = (yaml.safe_load, yaml.safe_dump) if path.suffix == ".yaml" else (json.loads, json.dumps)
    path.write_text(write(read(path.read_text()) | entries))


def test_what_is_planted_would_run(marker):
    for runs in (lambda: pickle.loads(marker.pickle), lambda: yaml.unsafe_load(marker.yaml), lambda: exec(marker.code)):
        runs()
        assert marker.appeared()


def test_a_sampler_that_only_a_file_names_is_not_run(run, marker, tiny_flags, tmp_path):
    sampler = tmp_path / "sampler.py"
    sampler.write_text(f"{marker.code}\nfrom schedulers.timestep_samplers import Uniform\nclass Mine(Uniform): pass\n")
    change(run / "config.yaml", timestep_sampler=f"{sampler}:Mine")
    named = f"--timestep_sampler {sampler}:Mine"
    for command in (
        ["visualize", f"--run_dir={run}"],
        ["train_unconditional", f"--config={run / 'config.yaml'}", f"--output_dir={tmp_path / 'again'}"],
    ):
        with pytest.raises(UserError) as caught:
            run_script(*command)
        assert f"if you trust that file, add {named}" in str(caught.value)
        assert not marker.appeared()
    run_script("generate", run, "--num_images=2", "--num_inference_steps=2")
    assert not marker.appeared()
    # Who names it trusts it.
    run_script("visualize", f"--run_dir={run}", f"--timestep_sampler={sampler}:Mine")
    assert marker.appeared()
    with pytest.raises(UserError, match="was trained with"):
        run_script("visualize", f"--run_dir={run}", "--timestep_sampler=edm")
    change(run / "config.yaml", timestep_sampler="uniform")
    with pytest.raises(UserError, match="was trained with uniform"):
        run_script("visualize", f"--run_dir={run}", f"--timestep_sampler={sampler}:Mine")


def test_yaml_with_tags(run, marker, tmp_path):
    file = run / "config.yaml"
    kept = [line for line in file.read_text().splitlines() if not line.startswith("model_config_name_or_path")]
    file.write_text("\n".join([*kept, f"model_config_name_or_path: {marker.yaml}"]))
    with pytest.raises(UserError, match="is not a valid run configuration"):
        RunFolder(run).read_config()
    with pytest.raises(UserError, match="is not valid YAML"):
        read_config_file(file, ConditionalConfig)


def test_a_model_that_names_a_class_of_its_own(run, marker):
    shutil.rmtree(run / "checkpoint-1"), shutil.rmtree(run / "checkpoint-2")
    (model,) = find_models(str(run), [], None)
    model.load(CPU)
    for folder in (run, run / "unet", run / "scheduler"):
        (folder / "planted.py").write_text(marker.code)
    index = ["planted", "Planted"]
    change(run / "model_index.json", _class_name=index, unet=index, scheduler=index, planted=index)
    change(run / "scheduler" / "scheduler_config.json", _class_name="planted.Planted", auto_map={"Any": "planted.Any"})
    (model,) = find_models(str(run), [], None)
    model.load(CPU)
    assert type(model.scheduler).__name__ == "ExactDDPMScheduler"
    # diffusers has classes whose loading does more than to read a network; only those on our list are loaded.
    for name in ("planted.Planted", "DiffusionPipeline", "ModelMixin", "__builtins__", None):
        change(run / "unet" / "config.json", _class_name=name, auto_map={"AutoModel": "planted.Planted"})
        for use in (lambda: find_models(str(run), [], None), lambda: replace(model).load(CPU)):
            with pytest.raises(
                UserError, match=f"its network is a {name}; UNet2DModel and UNet2DConditionModel are loaded"
            ):
                use()


@pytest.mark.parametrize("name", ["diffusion_pytorch_model.bin", "diffusion_pytorch_model.safetensors"])
def test_pickled_weights(run, marker, name):
    shutil.rmtree(run / "checkpoint-1"), shutil.rmtree(run / "checkpoint-2")
    (run / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    torch.save(Planted(marker.code), run / "unet" / name)
    with pytest.raises(UserError, match="which is not read: pickles can hold code|cannot be loaded"):
        find_models(str(run), [], None)[0].load(CPU)


def test_a_checkpoint_that_holds_pickles(run, marker):
    """With a manifest that says they are what was written: a hash tells of damage, not of intentions."""
    from run_folder.checkpoints import MANIFEST, manifest_entry

    folder = run / "checkpoint-2"
    for file in folder.rglob("*.safetensors"):
        file.write_bytes(marker.pickle)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"] = {name: manifest_entry(folder / name) for name in manifest["files"]}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2))
    with pytest.raises(UserError, match="cannot be loaded"):
        find_models(str(run), ["2"], None)[0].load(CPU)
    with pytest.raises(UserError, match="does not fit the timestep sampler"):
        run_script("visualize", f"--run_dir={run}")


def test_a_network_configuration_that_names_code(marker, tmp_path, tiny_flags):
    network = make_tiny_network(tmp_path / "network")
    (network / "planted.py").write_text(marker.code)
    change(network / "config.json", _class_name=["planted", "Planted"], auto_map={"AutoModel": "planted.Planted"})
    flags = [flag for flag in tiny_flags if "model_config" not in flag]
    run_script("train_unconditional", *flags, f"--model_config_name_or_path={network}", "--dry_run")


def tar(path: Path, contents: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize("loaded_as", ["imagefolder", "folder", "tar"])
def test_a_data_set_with_a_script(marker, tmp_path, loaded_as):
    folder = tmp_path / "photos"
    for number in range(3):
        write(folder / f"{number}.png", png(number))
    for name in ("photos.py", "dataset.py", "__init__.py"):
        (folder / name).write_text(marker.code)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {marker.yaml}\n---\n")
    if loaded_as == "tar":
        with tarfile.open(folder / "0.tar", "w") as archive:
            for suffix, data in {
                "png": png(0),
                "pickle": marker.pickle,
                "pyd": marker.pickle,
                "pth": marker.pickle,
            }.items():
                member = tarfile.TarInfo(f"0.{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    named = {"train_data_dir" if loaded_as == "imagefolder" else "dataset_name": str(folder)}
    try:
        source = load_images(DataOptions(**named, cache_dir=str(tmp_path / "cache")))
    except UserError:
        assert loaded_as != "imagefolder"
    else:
        assert len(source) == 3


def test_archives(marker, tmp_path):
    """A program in an archive stays there, and a name that leads elsewhere is refused with all the rest."""
    output = tmp_path / "out" / "deep"
    output.mkdir(parents=True)
    archive = tar(tmp_path / "photos.tar", dict.fromkeys(["1.png", "setup.py", "x.txt"], marker.code.encode()))
    with unpacked(archive, output) as folder:
        assert sorted(path.name for path in folder.iterdir()) == ["1.png", "x.txt"]
    archive = tar(tmp_path / "photos.tar", dict.fromkeys(["1.png", "../../setup.txt"], marker.code.encode()))
    with pytest.raises(UserError, match="leads out of the folder"), unpacked(archive, output):
        pass
    assert not list(tmp_path.rglob("setup.*"))


def test_arrays_of_objects(marker, tmp_path):
    objects = np.empty(12, dtype=object)
    objects[:] = [Planted(marker.code)] * 12
    path = tmp_path / "samples.npz"
    np.savez(path, arr_0=objects, images=objects, seeds=objects, mu=objects, sigma=objects)
    with pytest.raises(UserError, match="cannot be read as an npz file"):
        open_images(str(path), "--generated")
    with pytest.raises(UserError, match="not an .npz with mu and sigma"):
        named_statistics(str(path), "clean", FakeInception, (8, 8))
    (tmp_path / "parts").mkdir()
    with pytest.raises((UserError, ValueError)):
        WRITERS["npz"](tmp_path, False).existing()


class FakeInception:
    name, mode = "inception", "clean"


def test_files_of_weights_and_statistics(marker, tmp_path):
    for name in ("pickle.pth", "pickle.safetensors", "pickle.npz", "inception-2015-12-05.pt"):
        (tmp_path / name).write_bytes(marker.pickle)
        torch.save(Planted(marker.code), tmp_path / f"torch-{name}")
        for path in (tmp_path / name, tmp_path / f"torch-{name}"):
            for read in (
                lambda path=path: inception.read_named_weights(str(path), tmp_path),
                lambda path=path: named_statistics(str(path), "clean", FakeInception, (8, 8)),
                lambda path=path: vgg16_network(path, CPU),
            ):
                with pytest.raises(UserError):
                    read()
                assert not marker.appeared()
    digest = inception.FID_HELPER
    (tmp_path / f"inception-{digest[:16]}.safetensors").write_bytes(marker.pickle)
    assert inception.read_cached(digest, tmp_path) is None
    (tmp_path / "evaluation_results.csv").write_bytes(marker.pickle)
    with pytest.raises(UserError):
        read_results(tmp_path)


@pytest.fixture
def agreeable(monkeypatch):
    """Whoever is asked by transformers whether to run the code that came with a model says yes."""
    monkeypatch.setattr("builtins.input", lambda question: "y")


@pytest.mark.usefixtures("agreeable")
@pytest.mark.parametrize("pickled", [False, True])
def test_encoders_that_bring_code(text_encoder, marker, tmp_path, pickled):
    folder = Path(shutil.copytree(text_encoder, tmp_path / "encoder"))
    TextEncoder(str(folder), CPU)
    if pickled:
        (folder / "model.safetensors").unlink()
        torch.save(Planted(marker.code), folder / "pytorch_model.bin")
    else:
        (folder / "planted.py").write_text(marker.code)
        code = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForTextEncoding"), "planted.Planted")
        change(folder / "config.json", model_type="planted", auto_map=code)
        change(
            folder / "tokenizer_config.json",
            tokenizer_class="Planted",
            auto_map={"AutoTokenizer": ["planted.Planted"] * 2},
        )
    with pytest.raises(UserError, match="--text_encoder"):
        TextEncoder(str(folder), CPU)


@pytest.mark.usefixtures("agreeable")
@pytest.mark.parametrize("pickled", [False, True])
def test_vision_models_that_bring_code(marker, tmp_path, pickled):
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    folder = tmp_path / "vision"
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    Dinov2Model(Dinov2Config(**shape)).save_pretrained(folder)
    BitImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}).save_pretrained(folder)
    transformers_network(str(folder), CPU)
    if pickled:
        (folder / "model.safetensors").unlink()
        torch.save(Planted(marker.code), folder / "pytorch_model.bin")
    else:
        (folder / "planted.py").write_text(marker.code)
        change(
            folder / "config.json", model_type="planted", auto_map={"AutoConfig": "planted.P", "AutoModel": "planted.P"}
        )
    with pytest.raises(UserError, match="--features"):
        transformers_network(str(folder), CPU)


def test_postscript_is_not_run(tmp_path):
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "EPS")
    with pytest.raises(UndecodableImage, match="PostScript, which is not run"):
        decode_image(file.getvalue(), 3, 4, center_crop=True)
