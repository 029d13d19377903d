"""generate.py: image i is a function of seed i, however and on however many processes it is made."""

import hashlib
import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import preloaded
import pytest
import torch
from conftest import help_of, make_tiny_flags, run_script, run_training
from PIL import Image
from test_processes import TORCHRUN

from common.errors import RunFailed, UserError
from common.interruption import Interrupted
from conditions.guidance import GenerationCondition
from generation.engine import InferenceSettings, Job, RunningNetwork, choose_batch_size, divide, generate_images
from generation.engine import generate as generate_batches
from generation.generate_options import as_ranges, parse_generation, seeds_of
from image_data.grid import CAPTION_HEIGHT, image_grid
from run_folder.saved_model import find_models
from schedulers.denoising import DDIM, Predict

FAST = ["--ddim", "--num_inference_steps=5"]


@pytest.fixture(scope="module")
def run(tiny_network, cache_dir, tmp_path_factory) -> Path:
    """A run with checkpoints at steps 10 and 20."""
    flags = ["--max_train_steps=20", "--checkpointing_steps=10", "--save_images_steps=1000", "--eval_batch_size=1"]
    return run_training(tmp_path_factory.mktemp("runs") / "run", [*make_tiny_flags(tiny_network, cache_dir), *flags])


def generate(*flags: object) -> None:
    """The script in this process."""
    run_script("generate", *flags)


def hashes(folder: Path) -> dict[str, str]:
    files = sorted((folder / "images").rglob("*.png"))
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "images").rglob("*.png")}


def pixels(folder: Path) -> np.ndarray:
    return np.stack([np.asarray(Image.open(path)) for path in sorted((folder / "images").rglob("*.png"))])


def record(folder: Path) -> dict:
    return json.loads((folder / "samples.json").read_text())


@pytest.fixture(scope="module")
def reference(run, tmp_path_factory) -> Path:
    """64 images in batches of 8."""
    folder = tmp_path_factory.mktemp("reference") / "out"
    generate(run, *FAST, "--batch_size=8", f"--output_dir={folder}")
    assert len(hashes(folder)) == 64
    return folder


# The same image for the same seed.


def test_an_interrupted_job_on_two_processes_ends_in_the_same_files(run, tmp_path):
    """SIGTERM in the middle, the same command again, and the files of a single process that was left alone."""
    flags = [run, "--ddim", "--num_inference_steps=20", "--num_images=400", "--batch_size=8"]
    process = preloaded.Process([*TORCHRUN, "generate.py", *flags, f"--output_dir={tmp_path / 'two'}"])
    end = time.monotonic() + 120
    while len(hashes(tmp_path / "two")) < 16 and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=120)[1]
    there = hashes(tmp_path / "two")
    assert 16 <= len(there) < 400, errors[-3000:]
    assert "SIGTERM: stopped after" in errors
    assert not record(tmp_path / "two")["complete"]
    before = times(tmp_path / "two")

    errors = preloaded.run(["generate.py", *flags, f"--output_dir={tmp_path / 'two'}"], processes=2).stderr
    assert f"{400 - len(there)} of 400 images are missing" in errors
    assert record(tmp_path / "two")["complete"]
    assert before.items() <= times(tmp_path / "two").items()  # none was made again

    generate(*flags, f"--output_dir={tmp_path / 'one'}")
    assert hashes(tmp_path / "two") == hashes(tmp_path / "one")


@pytest.mark.parametrize("kind", ["png", "npz", "parquet"])
def test_files_that_are_late_do_not_make_a_folder_that_is_short(kind, run, tmp_path, monkeypatch):
    """Over a network the main process may not see yet what another machine has written."""
    from generation import writers

    flags = [run, "--ddim", "--num_inference_steps=2", "--num_images=6", "--batch_size=2", f"--format={kind}"]
    with monkeypatch.context() as patch:
        existing = writers.WRITERS[kind].existing
        patch.setattr(writers.WRITERS[kind], "existing", lambda writer: existing(writer) - {2, 3})
        with pytest.raises(RunFailed, match="the images of seeds 2-3 are not there, though they were made .* again"):
            generate(*flags, f"--output_dir={tmp_path / 'out'}")
    assert not record(tmp_path / "out")["complete"]
    generate(*flags, f"--output_dir={tmp_path / 'out'}")
    assert record(tmp_path / "out")["complete"]


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_between_batch_sizes_a_grey_level_here_and_there(batch_size, run, reference, tmp_path):
    generate(run, *FAST, f"--batch_size={batch_size}", f"--output_dir={tmp_path / 'out'}")
    difference = np.abs(pixels(tmp_path / "out").astype(int) - pixels(reference))
    assert difference.max() <= 1
    assert (difference > 0).mean() <= 1e-3


def test_killed_and_continued(run, reference, tmp_path):
    """kill -9 in front of the 22nd image's appearance, then the same command."""
    flags = [run, *FAST, "--batch_size=8", f"--output_dir={tmp_path / 'out'}"]
    process = preloaded.Process(["generate.py", *flags], EXACT_DDPM_FAULT="image@22")
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    there = times(tmp_path / "out")
    assert 18 <= len(there) <= 21  # a batch is there in part; four threads write
    generate(*flags)
    assert there.items() <= times(tmp_path / "out").items()  # none was written again
    assert hashes(tmp_path / "out") == hashes(reference)
    assert not list((tmp_path / "out" / "images").glob(".*"))


@pytest.mark.parametrize("image_format", ["npz", "parquet"])
def test_other_formats_are_continued_too(image_format, run, reference, tmp_path, monkeypatch):
    flags = [run, *FAST, "--batch_size=8", f"--output_dir={tmp_path / 'out'}", f"--format={image_format}"]
    with monkeypatch.context() as patched:
        batches = iter(range(1000))
        patched.setattr("generation.engine.fault_point", lambda name: next(batches) if name == "generated" else None)
        patched.setattr("generation.engine.stop_requested", lambda: "SIGTERM" if next(batches) > 30 else None)
        with pytest.raises(Interrupted, match=r"stopped after \d+ of 64 images"):
            generate(*flags)
    there = len(list((tmp_path / "out" / "parts").iterdir()))
    assert 0 < there < 8
    generate(*flags)
    expected = pixels(reference)
    if image_format == "npz":
        with np.load(tmp_path / "out" / "samples.npz") as file:
            assert file["seeds"].tolist() == list(range(64))
            assert np.array_equal(file["arr_0"][..., 0], expected)
    else:
        from datasets import load_dataset

        dataset = load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))["train"]
        assert dataset["seed"][:] == list(range(64))
        assert np.array_equal(np.stack([np.asarray(image) for image in dataset["image"]]), expected)
    assert not (tmp_path / "out" / "parts").exists()
    # More of them are added to those that are there.
    generate(*flags, "--seeds=0-69")
    assert record(tmp_path / "out")["seeds"] == "0-69"
    assert record(tmp_path / "out")["images"] == 70


def test_more_seeds_join_those_that_are_there(run, reference, tmp_path):
    flags = [run, *FAST, "--batch_size=8", f"--output_dir={tmp_path / 'out'}"]
    generate(*flags, "--seeds=3,60-63")
    assert record(tmp_path / "out")["seeds"] == "3,60-63"
    generate(*flags)
    assert hashes(tmp_path / "out") == hashes(reference)
    assert record(tmp_path / "out")["seeds"] == "0-63"


def test_many_images_go_into_folders_of_a_thousand(run, tmp_path):
    generate(run, "--ddim", "--num_inference_steps=1", "--num_images=1001", f"--output_dir={tmp_path / 'out'}")
    assert (tmp_path / "out" / "images" / "000000" / "000999.png").exists()
    assert (tmp_path / "out" / "images" / "001000" / "001000.png").exists()
    generate(run, "--ddim", "--num_inference_steps=1", "--num_images=1001", f"--output_dir={tmp_path / 'out'}")


@pytest.fixture
def alone():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from common.processes import Processes

    AcceleratorState._reset_state(reset_partial_state=True)
    return Processes(Accelerator(cpu=True))


def test_the_network_only_sees_full_batches(run, alone):
    """In memory, as evaluation uses it; and what is yielded are the images that were asked for."""
    seen = []

    class Watching(GenerationCondition):
        def predict_for(self, network: torch.nn.Module, seeds: list[int]) -> Predict:
            def predict(samples: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
                seen.append((len(samples), len(seeds)))
                return network(samples, t).sample

            return predict

    (model,) = find_models(str(run), [], None)
    method = DDIM(model.scheduler, 3)
    job, settings = Job(model, method, Watching()), InferenceSettings(batch_size=4)
    batches = [(job, batch) for batch in divide(range(10), 4)]
    made = [(seeds, images) for _, seeds, images in generate_batches(batches, alone, settings)]
    assert set(seen) == {(4, 4)}
    assert [seeds for seeds, _ in made] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    in_memory = list(generate_images(Job(model, method), range(10), alone, settings))
    for (seeds, images), (other_seeds, others) in zip(made, in_memory, strict=True):
        assert seeds == other_seeds
        assert torch.equal(images, others)
        assert images.dtype == torch.uint8


def test_the_largest_batch_that_pays(run, alone, monkeypatch):
    (model,) = find_models(str(run), [], None)
    job = Job(model, DDIM(model.scheduler, 3))

    def choose(seconds: Callable[[int], float], images: int = 10**6) -> int:
        monkeypatch.setattr(RunningNetwork, "seconds_per_pass", lambda self, size: seconds(size))
        return choose_batch_size(job, images, alone, InferenceSettings())

    def small_memory(size: int) -> float:
        if size > 100:
            raise torch.OutOfMemoryError
        return 1.0

    assert choose(lambda size: 1.0) == 1024
    assert choose(lambda size: 1.0, images=50 * 32) == 32
    assert choose(lambda size: 1.0, images=100) == 16
    assert choose(lambda size: 1.0, images=5) == 5
    assert choose(lambda size: size / 100) == 16
    assert choose(lambda size: max(1.0, size / 64)) == 64
    assert choose(lambda size: 6.0) == 16
    assert choose(small_memory) == 64
    assert choose(lambda size: small_memory(101)) == 16  # not even that fits, which the first batch says


def test_the_batch_size_that_was_chosen_is_kept(run, reference, tmp_path, monkeypatch):
    """A job that goes on is not measured again: the rest gets the bits that it would have had."""
    shutil.copytree(reference, tmp_path / "out")
    for number in range(10, 20):
        (tmp_path / "out" / "images" / f"{number:06d}.png").unlink()

    def never(*arguments: object) -> int:
        raise AssertionError("measured again")

    monkeypatch.setattr("generation.sample_folder.choose_batch_size", never)
    generate(run, *FAST, f"--output_dir={tmp_path / 'out'}")
    assert hashes(tmp_path / "out") == hashes(reference)


@pytest.mark.parametrize(("images", "is_said"), [(65, False), (1700, True)])
def test_a_batch_size_that_is_kept_for_many_images_is_said(
    run, reference, tmp_path, monkeypatch, capsys, images, is_said
):
    def stop(*arguments: object) -> None:
        raise Interrupted("SIGTERM", "stopped")

    shutil.copytree(reference, tmp_path / "out")
    monkeypatch.setattr("generation.sample_folder.generate", stop)
    with pytest.raises(Interrupted):
        generate(run, *FAST, f"--num_images={images}", f"--output_dir={tmp_path / 'out'}")
    assert (
        "remaining images are made in batches of 8, like those that are there" in capsys.readouterr().err
    ) == is_said


def test_images_that_are_not_finite_are_no_images(run, alone, monkeypatch):
    (model,) = find_models(str(run), [], None)
    method = DDIM(model.scheduler, 2)

    def step(output: torch.Tensor, number: int, sample: torch.Tensor, noise: object) -> torch.Tensor:
        sample[1] = torch.nan
        return sample

    monkeypatch.setattr(method, "step", step)
    running = RunningNetwork(Job(model, method), alone, InferenceSettings(batch_size=4))
    with pytest.raises(RunFailed, match="the images of seeds 6 are not finite"):
        running.generate([5, 6, 7], lambda *_: None)
    assert len(running.generate([5], lambda *_: None)) == 1  # what fills up the batch is nobody's image


# What is named.


def test_every_checkpoint_in_one_command(run, tmp_path):
    generate(run, "--checkpoints", "all", *FAST, "--num_images=4", f"--output_dir={tmp_path / 'out'}")
    steps = {path.name: record(path)["step"] for path in (tmp_path / "out").iterdir()}
    assert steps == {"checkpoint-10": 10, "checkpoint-20": 20}
    assert record(tmp_path / "out" / "checkpoint-10")["sha256"] != record(tmp_path / "out" / "checkpoint-20")["sha256"]
    assert hashes(tmp_path / "out" / "checkpoint-10") != hashes(tmp_path / "out" / "checkpoint-20")


def test_a_stock_pipeline(run, reference, tmp_path):
    """The folder that stock diffusers saves, and the checkpoint that it came from, give the same files."""
    from diffusers import DDPMPipeline

    DDPMPipeline.from_pretrained(run).save_pretrained(tmp_path / "stock")
    generate(tmp_path / "stock", *FAST, "--batch_size=8", f"--output_dir={tmp_path / 'out'}")
    assert hashes(tmp_path / "out") == hashes(reference)
    assert record(tmp_path / "out")["weights"] == "pipeline"
    assert record(tmp_path / "out")["step"] is None


@pytest.mark.parametrize(("file", "name", "value"), [
    ("scheduler/scheduler_config.json", "prediction_type", "v_prediction"), ("unet/config.json", "norm_eps", 1e-3),
])  # fmt: skip
def test_a_pipeline_that_was_corrected_makes_other_images(run, tmp_path, file, name, value):
    """Those that its weights made before the correction are not taken for them."""
    from diffusers import DDPMPipeline

    DDPMPipeline.from_pretrained(run).save_pretrained(tmp_path / "stock")
    flags = [tmp_path / "stock", *FAST, "--num_images=1", f"--output_dir={tmp_path / 'out'}"]
    generate(*flags)
    path = tmp_path / "stock" / file
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "_diffusers_version": "0.1"}))
    generate(*flags)
    path.write_text(json.dumps({**config, name: value}))
    with pytest.raises(UserError, match="holds images made with other settings .sha256"):
        generate(*flags)


def test_a_pipeline_of_latents_is_refused(run, tmp_path):
    from diffusers import DDPMPipeline

    DDPMPipeline.from_pretrained(run).save_pretrained(tmp_path / "stock")
    path = tmp_path / "stock" / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vqvae": ["diffusers", "VQModel"]}))
    with pytest.raises(UserError, match="stock: works on the latents of another network .vqvae., not on images"):
        generate(tmp_path / "stock", *FAST)


def test_a_model_on_the_hub(run, tmp_path, monkeypatch):
    def download(name: str, allow_patterns: list[str]) -> str:
        """Give what a repository holds that was pushed, the part of it that is asked for."""
        for path in [path for path in run.rglob("*.*") if path.is_file()]:
            inside = str(path.relative_to(run))
            if not inside.startswith("checkpoint-") and any(fnmatchcase(inside, pattern) for pattern in allow_patterns):
                (tmp_path / "hub" / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, tmp_path / "hub" / inside)
        return str(tmp_path / "hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    generate("someone/something", *FAST, "--num_images=2")
    folder = tmp_path / "runs" / "someone--something" / "generated" / "pipeline-ddim-5"
    assert record(folder)["model"] == "someone/something"


def test_the_latest_run_and_its_weights(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="train one first"):
        find_models(None, [], None)
    for age, name in ((100, "old"), (0, "new")):
        shutil.copytree(run, tmp_path / "runs" / name)
        os.utime(tmp_path / "runs" / name / "metrics.jsonl", (time.time() - age,) * 2)
    (tmp_path / "runs" / "none").mkdir()
    (newest,) = find_models(None, [], None)
    assert (newest.home.name, newest.step, newest.weights) == ("new", 20, "ema")
    # Without checkpoints, in a group of runs.
    shutil.copytree(run, tmp_path / "runs" / "group" / "newest", ignore=shutil.ignore_patterns("checkpoint-*"))
    os.utime(tmp_path / "runs" / "group" / "newest" / "metrics.jsonl", (time.time() + 9,) * 2)
    (pipeline,) = find_models(None, [], None)
    assert pipeline.home == Path("runs/group/newest")
    shutil.rmtree(tmp_path / "runs" / "group")
    (raw,) = find_models("runs/new", [], "raw")
    assert raw.sha256 != newest.sha256
    generate(*FAST, "--num_images=2")
    assert record(tmp_path / "runs/new/generated/step-20-ema-ddim-5")["images"] == 2


def test_a_checkpoint_that_is_not_there_is_told_from_a_run_that_is_not(run):
    with pytest.raises(UserError, match=r"run has no checkpoint-99; its checkpoints: 10, 20$"):
        find_models(str(run / "checkpoint-99"), [], None)


def test_a_damaged_checkpoint_is_not_used(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    weights = tmp_path / "run" / "checkpoint-20" / "unet_ema" / "diffusion_pytorch_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert [model.step for model in find_models(str(tmp_path / "run"), [], None)] == [10]
    assert [model.step for model in find_models(str(tmp_path / "run"), ["all"], None)] == [10]
    with pytest.raises(UserError, match="--checkpoints 20: .*not a valid checkpoint: .* is not what was written"):
        find_models(str(tmp_path / "run"), ["20"], None)


def test_a_run_without_the_moving_average(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    for step in (10, 20):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{step}" / "unet_ema")
    assert find_models(str(tmp_path / "run"), [], None)[0].weights == "raw"
    with pytest.raises(UserError, match="--weights ema"):
        find_models(str(tmp_path / "run"), [], "ema")


MISTAKES = [
    (["--seeds=9-5"], "9-5 runs backwards"),
    (["--seeds=a"], "'a' is neither a number nor a range"),
    (["--seeds=1,2", "--num_images=3"], "--num_images 3"),
    (["--num_inference_steps=1001"], "more than the 1000 steps"),
    (["--ddim", "--ddpm"], "choose one sampler"),
    (["--eta=0.5"], "--eta 0.5"),
    (["--ddim", "--eta=1.5"], "must be from 0 to 1"),
    (["--ddim", "--variance_type=fixed_large"], "--variance_type fixed_large"),
    (["--scheduler=DPMSolverMultistepScheduler", "--skip_schedule=quadratic"], "chooses its timesteps itself"),
    (["--scheduler=FlowMatchEulerDiscreteScheduler"], "--scheduler FlowMatchEulerDiscreteScheduler: .*DDIMScheduler"),
    (["--class_labels", "cat"], "--class_labels cat: .* without classes"),
    (["--prompt=a cat"], "--prompt 'a cat': .* without captions"),
    (["--checkpoints", "15"], "--checkpoints 15: .*it has: 10, 20"),
    (["--interpolate", "1"], "needs two different seeds"),
    (["--interpolate", "1", "1"], "needs two different seeds"),
    (["--interpolate", "1", "2", "--ddpm"], "ddpm adds noise on the way"),
    (["--step=5"], "unknown flag --step"),
    (["--batch_size=0"], "--batch_size 0"),
]


@pytest.mark.parametrize(("flags", "message"), MISTAKES, ids=[" ".join(flags) for flags, _ in MISTAKES])
def test_mistakes_are_one_line(flags, message, run, tmp_path):
    with pytest.raises(UserError, match=message):
        generate(run, *flags, f"--output_dir={tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


def test_models_that_are_none(run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    shutil.copytree(run / "checkpoint-10", tmp_path / "checkpoint-10")
    (tmp_path / "checkpoint-10" / "manifest.json").unlink()
    for name, message in [
        ("nothing", "there is no such folder"),
        ("file", "is a file"),
        ("empty", "is not a model"),
        ("checkpoint-10", "not a valid checkpoint: manifest.json is missing"),
    ]:
        with pytest.raises(UserError, match=message):
            find_models(str(tmp_path / name), [], None)
    with pytest.raises(UserError, match="could it be loaded from the Hub"):
        find_models("someone/something", [], None)
    with pytest.raises(UserError, match="name its run instead"):
        find_models(str(run / "checkpoint-10"), ["10"], None)


# Folders.


def test_other_settings_are_never_mixed_in(run, reference, tmp_path):
    shutil.copytree(reference, tmp_path / "out")
    flags = [run, *FAST, f"--output_dir={tmp_path / 'out'}"]
    for other, message in [
        (["--eta=0.5"], "eta 0.0 -> 0.5"),
        (["--weights=raw"], "weights ema -> raw"),
        (["--batch_size=16"], "batch_size 8 -> 16"),
        (["--format=npz"], "format png -> npz"),
        (["--skip_schedule=quadratic"], "skip_schedule linear -> quadratic"),
    ]:
        with pytest.raises(UserError, match=message):
            generate(*flags, *other)
    assert hashes(tmp_path / "out") == hashes(reference)
    (tmp_path / "out" / "mine.txt").touch()
    generate(*flags, "--eta=0.5", "--overwrite", "--num_images=3")
    assert len(hashes(tmp_path / "out")) == 3
    assert (tmp_path / "out" / "mine.txt").exists()


def test_what_is_not_generated_is_left_alone(run, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "mine.png").touch()
    with pytest.raises(UserError, match="holds files that are not generated images"):
        generate(run, *FAST, f"--output_dir={tmp_path / 'photos'}")
    with pytest.raises(UserError, match="holds files that are not generated images"):
        generate(run, *FAST, "--overwrite", f"--output_dir={tmp_path / 'photos'}")
    with pytest.raises(UserError, match="is a file, not a folder"):
        generate(run, *FAST, f"--output_dir={tmp_path / 'photos' / 'mine.png'}")


def test_a_full_disk_is_one_line(run, reference, tmp_path, monkeypatch):
    numbers, write_bytes = itertools.count(), Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if ".png." in path.name and path.name.endswith(".tmp") and next(numbers) >= 20:
            write_bytes(path, content[:10])
            raise OSError(28, "No space left on device")
        return write_bytes(path, content)

    flags = [run, *FAST, "--batch_size=8", f"--output_dir={tmp_path / 'out'}"]
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(RunFailed, match="No space left on device.*the same command continues"):
            generate(*flags)
    assert len(hashes(tmp_path / "out")) == 20
    assert not list((tmp_path / "out" / "images").glob(".*"))
    generate(*flags)
    assert hashes(tmp_path / "out") == hashes(reference)


# Pictures.


def test_pictures_beside_the_images(run, tmp_path):
    flags = [run, *FAST, "--num_images=9", f"--output_dir={tmp_path / 'out'}"]
    generate(*flags, "--progress_gif", "--progressive", "--nearest=3", "--gather_grid")
    with Image.open(tmp_path / "out" / "progress.gif") as gif:
        assert 1 < gif.n_frames <= 5  # those that are the same are shown as one
        assert sum(gif.seek(frame) or gif.info["duration"] for frame in range(gif.n_frames)) == 4 * 80 + 2000
    assert Image.open(tmp_path / "out" / "grid.png").size == (3 * 50 + 2, 3 * 50 + 2)
    assert (tmp_path / "out" / "nearest.png").exists()
    # A row for each image, a column for each of the few steps; what is predicted last is the image.
    progressive = Image.open(tmp_path / "out" / "progressive.png")
    files = sorted((tmp_path / "out" / "images").glob("*.png"))
    finished = image_grid(torch.stack([torch.from_numpy(np.array(Image.open(file)))[None] for file in files]), 1)
    assert progressive.height == CAPTION_HEIGHT + finished.height
    lefts = 0, progressive.width - 52
    ends = [progressive.crop((left, CAPTION_HEIGHT, left + 52, progressive.height)) for left in lefts]
    assert ends[-1].tobytes() == finished.tobytes()
    assert ends[0].tobytes() != finished.tobytes()


def test_only_exact_methods_say_what_they_see(run, tmp_path):
    flags = ["--scheduler=EulerDiscreteScheduler", "--num_inference_steps=2", "--num_images=1", "--progressive"]
    with pytest.raises(
        UserError, match="--progressive needs the estimate of x_0, which EulerDiscreteScheduler does not provide"
    ):
        generate(run, *flags, f"--output_dir={tmp_path / 'out'}")


def test_the_nearest_training_image_of_a_training_image_is_itself(run):
    from generation.pictures import find_compared, nearest
    from image_data.store import load_training_images

    (model,) = find_models(str(run), [], None)
    images = load_training_images(*find_compared(model, parse_generation([]))).images
    wanted = torch.tensor([0, 5, 1500])
    found, distances = nearest(images.crops(wanted, torch.zeros(3, 2)), images, 4)
    assert found[:, 0].tolist() == wanted.tolist()
    everything = images.crops(torch.arange(len(images)), torch.zeros(len(images), 2)).double().flatten(1)
    for index, row in zip(wanted, found, strict=True):
        distances = (everything - everything[index]).square().sum(1)
        assert torch.equal(distances[row], distances.sort().values[:4])


def test_between_two_seeds(run, reference, tmp_path):
    """The ends of the row are the images of the seeds."""
    from image_data.grid import image_grid

    generate(run, *FAST, "--interpolate", "3", "5", f"--output_dir={tmp_path / 'out'}")
    row = np.asarray(Image.open(tmp_path / "out" / "interpolation-3-5.png")).astype(int)
    for seed, left in ((3, 2), (5, row.shape[1] - 50)):
        path = reference / "images" / f"{seed:06d}.png"
        image = torch.from_numpy(np.asarray(Image.open(path)).copy())[None, None]
        tile = np.asarray(image_grid(image, columns=1))
        assert np.abs(row[2:50, left : left + 48] - tile).max() <= 1
    generate(run, *FAST, "--num_images=1", f"--output_dir={tmp_path / 'out'}")  # the picture is not in the way
    assert len(hashes(tmp_path / "out")) == 1


def test_between_two_images(run, reference, tmp_path):
    """A row for each t, the images at its ends; with one step of noise the network gives nearly the images back."""
    files = [str(reference / "images" / f"{seed:06d}.png") for seed in (3, 5)]
    flags = ["--interpolate_images", *files, "--interpolate_t", "1", "600", f"--output_dir={tmp_path / 'out'}"]
    generate(run, *flags, "--ddim", "--num_inference_steps=1000")
    picture = np.asarray(Image.open(tmp_path / "out" / "between-000003-000005.png")).astype(int)
    assert picture.shape[0] == 2 * 50 + 2
    picture = picture[:, -(13 * 50 + 2) :]  # the names of the rows are on the left
    coarse, fine = picture[2:50], picture[52:100]
    tiles = [[row[:, left : left + 48] for left in range(2, 13 * 50, 50)] for row in (coarse, fine)]
    for tile in tiles:
        assert np.array_equal(tile[0], tiles[0][0])
        assert np.array_equal(tile[-1], tiles[0][-1])
    # One step: x_1 is the image and noise of 1/100, and so is what is in the middle the mean of both.
    assert np.abs(tiles[1][1] - tiles[1][0]).max() < 15
    assert np.abs(tiles[1][-2] - tiles[1][-1]).max() < 15
    assert np.abs(tiles[1][6] - (tiles[1][0] + tiles[1][-1]) / 2).max() < 15
    assert np.abs(tiles[0][1] - tiles[0][0]).mean() > np.abs(tiles[1][1] - tiles[1][0]).mean()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--interpolate_images", "a.png"], "needs two image files"),
        (["--interpolate_images", "a.png", "b.png"], "a.png: cannot be read"),
        (["--interpolate_images", "README.md", "README.md"], "README.md: cannot be read"),
        (["--interpolate_t", "3"], "no effect without --interpolate_images"),
    ],
)
def test_mistakes_about_images_to_interpolate(run, tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        generate(run, *flags, f"--output_dir={tmp_path / 'out'}")


# Seeds as text.


@pytest.mark.parametrize(
    ("text", "seeds"), [("0-3", [0, 1, 2, 3]), ("5,0,7-9,8", [0, 5, 7, 8, 9]), (f"{2**63 - 1}", [2**63 - 1])]
)
def test_seeds(text, seeds):
    assert seeds_of(parse_generation([f"--seeds={text}"])) == seeds
    assert seeds_of(parse_generation([f"--seeds={as_ranges(seeds)}"])) == seeds


def test_help_needs_no_heavy_import():
    help_of("generate.py")
