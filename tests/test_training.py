"""A run in this process: what it writes, that it repeats itself, and how it ends when something is wrong."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from conftest import lines_of, losses_of, metrics_of, run_training
from safetensors.torch import load_file

from common.errors import RunFailed, UserError
from run_folder.config import parse_config
from run_folder.folder import open_run
from run_folder.saved_model import find_models
from schedulers.loss import DiffusionLoss
from training.setup import Run

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, tiny_flags):
    """Twelve steps with a checkpoint and a grid at every fourth, with TensorBoard."""
    flags = ["--max_train_steps=12", "--checkpointing_steps=4", "--save_images_steps=4", "--logger=tensorboard"]
    return run_training(tmp_path_factory.mktemp("runs") / "twelve steps", [*tiny_flags, *flags])


def test_what_a_run_writes(finished_run):
    top = {path.name for path in finished_run.iterdir()} - {".lock", ".checkpoint-saved"}
    assert top == {
        "config.yaml", "audit.json", "metrics.jsonl", "timesteps.jsonl", "logs", "samples", "unet", "scheduler",
        "model_index.json", "README.md", "report.html", "checkpoint-4", "checkpoint-8", "checkpoint-12",
    }  # fmt: skip
    assert {path.name for path in (finished_run / "samples").iterdir()} == {f"step-{s}.png" for s in (4, 8, 12)}
    assert {path.name for path in (finished_run / "checkpoint-12").iterdir()} == {
        "unet", "unet_ema", "optimizer.safetensors", "sampler.safetensors", "state.json", "manifest.json"
    }  # fmt: skip


def test_metrics(finished_run):
    lines = metrics_of(finished_run)
    assert [line["step"] for line in lines] == list(range(1, 13))
    last = lines[-1]
    for name in ("loss", "smoothed_loss", "lr", "grad_norm", "ema_decay", "images_per_second", "data_wait_share",
                 "memory_gb", "train_seconds"):  # fmt: skip
        assert isinstance(last[name], float), name
    assert lines[0]["loss"] == pytest.approx(1, abs=0.05)
    assert lines[0]["lr"] == 0
    assert [line["lr"] for line in lines[1:]] == [1e-4] + [2e-4] * 10
    assert all(earlier["train_seconds"] < later["train_seconds"] for earlier, later in zip(lines, lines[1:]))  # noqa: B905
    quarters = [value for line in lines for name, value in line.items() if name.startswith("loss_q")]
    assert len(quarters) > 3 * len(lines)


def test_tensorboard(finished_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished_run / "logs"), size_guidance={"histograms": 0}).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 13))
    assert [event.step for event in events.Images("test_samples")] == [4, 8, 12]
    assert {"loss_q0", "lr", "grad_norm", "weight_ess", "images_per_second"} <= set(events.Tags()["scalars"])
    densities = events.Histograms("timestep_density")
    assert [event.step for event in densities] == [0, 4, 8, 12]
    assert densities[-1].histogram_value.bucket_limit == [10 * edge for edge in range(1, 101)]
    assert densities[-1].histogram_value.bucket == pytest.approx([0.01] * 100)
    lines = lines_of(finished_run, "timesteps.jsonl")
    by_bin = {name: events.Histograms(f"log_snr/{name}") for name in ("density", "loss")}
    assert {name: [event.step for event in of_run] for name, of_run in by_bin.items()} == {
        "density": [0, 4, 8, 12], "loss": [4, 8, 12],
    }  # fmt: skip
    assert by_bin["density"][-1].histogram_value.bucket == pytest.approx(lines[11]["probability"])
    for event, line in zip(by_bin["loss"], lines[3::4], strict=True):
        assert event.histogram_value.bucket == pytest.approx([loss or 0 for loss in line["loss"]])
        limits = np.array(event.histogram_value.bucket_limit)
        assert limits - np.diff(limits)[0] / 2 == pytest.approx(line["log_snr"], rel=1e-5)
        drawn = [number for number, loss in enumerate(line["loss"]) if loss is not None]
        assert event.histogram_value.max == limits[drawn[-1]]
        assert event.histogram_value.min == pytest.approx(limits[drawn[0]] - np.diff(limits)[0])


def test_the_average_in_the_pipeline_is_that_of_the_checkpoint(finished_run):
    pipeline = load_file(finished_run / "unet" / WEIGHTS)
    checkpoint = load_file(finished_run / "checkpoint-12" / "unet_ema" / WEIGHTS)
    raw = load_file(finished_run / "checkpoint-12" / "unet" / WEIGHTS)
    assert all(torch.equal(pipeline[name], checkpoint[name]) for name in pipeline)
    assert not all(torch.equal(pipeline[name], raw[name]) for name in pipeline)


def test_the_run_folder_is_a_pipeline(finished_run):
    from diffusers import DDPMPipeline, DDPMScheduler

    pipeline = DDPMPipeline.from_pretrained(finished_run)
    assert type(pipeline.scheduler) is DDPMScheduler
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(batch_size=2, num_inference_steps=3, output_type="np").images
    assert images.shape == (2, 8, 8, 1)


def test_card(finished_run):
    text = (finished_run / "README.md").read_text()
    assert "diffusers-training" in text
    assert "samples/step-12.png" in text
    assert "learning_rate" in text


def test_two_runs_agree_bit_for_bit(finished_run, train, tmp_path):
    again = train(tmp_path / "again", "--max_train_steps=12", "--checkpointing_steps=4", "--save_images_steps=4")
    assert losses_of(again) == losses_of(finished_run)
    assert_same_checkpoint(again / "checkpoint-12", finished_run / "checkpoint-12")
    for step in (4, 8, 12):
        name = f"samples/step-{step}.png"
        assert (again / name).read_bytes() == (finished_run / name).read_bytes()


def test_another_seed_is_another_run(finished_run, train, tmp_path):
    other = train(tmp_path / "other", "--max_train_steps=2", "--seed=1")
    assert all(a != b for a, b in zip(losses_of(other), losses_of(finished_run), strict=False))


def test_resumed_equals_uninterrupted(finished_run, train, tmp_path):
    flags = ["--checkpointing_steps=4", "--save_images_steps=4"]
    train(tmp_path / "run", "--max_train_steps=4", *flags)
    train(tmp_path / "run", "--max_train_steps=8", *flags)
    resumed = train(tmp_path / "run", "--max_train_steps=12", *flags)
    assert losses_of(resumed) == losses_of(finished_run)
    assert_same_checkpoint(resumed / "checkpoint-12", finished_run / "checkpoint-12")


def test_config_of_the_run_repeats_it(finished_run, train, tmp_path):
    values = yaml.safe_load((finished_run / "config.yaml").read_text())
    assert values["total_batch_size"] == 16
    assert values["channels"] == "1"
    again = train(tmp_path / "again", f"--config={finished_run / 'config.yaml'}", "--max_train_steps=3")
    assert losses_of(again) == losses_of(finished_run)[:3]


def test_accumulation_is_the_same_batch(network_without_dropout, train, tmp_path):
    flags = [
        "--max_train_steps=5",
        "--save_images_steps=100",
        f"--model_config_name_or_path={network_without_dropout}",
    ]
    whole = train(tmp_path / "whole", *flags)
    parts = train(tmp_path / "parts", *flags, "--train_batch_size=4", "--total_batch_size=16")
    assert losses_of(parts) == pytest.approx(losses_of(whole), rel=1e-5)
    assert [line["lr"] for line in metrics_of(parts)] == [line["lr"] for line in metrics_of(whole)]


@pytest.mark.parametrize(
    "flags",
    [
        ["--mixed_precision=bf16"],
        ["--no_use_ema"],
        ["--ema_warmup"],
        ["--prediction_type=v_prediction", "--loss_weighting=min_snr"],
        ["--prediction_type=sample", "--ddpm_beta_schedule=cosine"],
        ["--timestep_sampler=stratified", "--loss_weighting=p2"],
    ],
)
def test_options_train(flags, train, tiny_flags, tmp_path):
    base = [flag for flag in tiny_flags if "--no_use_ema" not in flags or "ema_max_decay" not in flag]
    run = train(tmp_path / "run", "--max_train_steps=12", *flags, base=base)
    losses = losses_of(run)
    assert sum(losses[-4:]) < sum(losses[:4])
    assert (run / "checkpoint-12" / "unet_ema").exists() is ("--no_use_ema" not in flags)


@pytest.mark.parametrize("schedule", ["linear", "warmup10"])  # one that diffusers knows, one that travels as a list
def test_other_betas_are_those_of_what_is_saved(schedule, train, tmp_path, capsys):
    from diffusers import DDPMPipeline

    flags = [f"--ddpm_beta_schedule={schedule}", "--beta_start=1e-3", "--beta_end=0.01", "--max_train_steps=2"]
    run = train(tmp_path / "run", *flags)
    (model,) = find_models(str(run), [], None)
    for betas in (model.scheduler.betas, DDPMPipeline.from_pretrained(run).scheduler.betas):
        assert betas[[0, -1]].tolist() == pytest.approx([1e-3, 0.01])
    with pytest.raises(UserError, match=r"beta_end 0\.01 -> 0\.02"):
        train(tmp_path / "run", *flags[:2], "--max_train_steps=3")


def test_time_budget_ends_a_run(train, tmp_path):
    run = train(tmp_path / "run", "--max_train_steps=1000000", "--max_train_seconds=0.5")
    steps = metrics_of(run)[-1]["step"]
    assert 1 <= steps < 1_000_000
    assert (run / f"checkpoint-{steps}").is_dir()


def test_old_checkpoints_go(train, tmp_path):
    run = train(tmp_path / "run", "--max_train_steps=5", "--checkpointing_steps=1", "--checkpoints_total_limit=2")
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]


def test_dry_run_shows_the_audit_and_makes_nothing(train, tmp_path, capsys):
    train(tmp_path / "run", "--dry_run")
    shown = capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    for line in (
        "***** Running training *****",
        "Num examples = 1797",
        "Num Epochs = 7143",
        "Instantaneous batch size per device = 16",
        "Total train batch size (w. parallel, distributed & accumulation) = 16",
        "Gradient Accumulation steps = 1",
        "Total optimization steps = 800000",
        "deviation(s) from the paper",
    ):
        assert line in shown


def test_a_loss_that_is_not_finite_stops_before_the_update(train, tmp_path, monkeypatch):
    """The prediction is spoiled at step 7; the message names it, its timestep, and the checkpoint of step 6."""
    calls, spoiled = [], []
    original = DiffusionLoss.__call__

    def spoil(loss, network, batch, timesteps):
        losses = original(loss, network, batch, timesteps)
        calls.append(timesteps)
        if len(calls) == 8:
            spoiled.append(timesteps[3].item())
            losses = torch.where(torch.arange(len(losses)) == 3, torch.nan, losses)
        return losses

    monkeypatch.setattr(DiffusionLoss, "__call__", spoil)
    updates = []
    adam = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: (adam(self), updates.append(snapshot(self))))
    with pytest.raises(RunFailed) as caught:
        train(tmp_path / "run", "--max_train_steps=20", "--checkpointing_steps=3")
    message = str(caught.value)
    assert "step 7" in message
    assert f"loss at timestep(s) {spoiled[0]} " in message
    assert "checkpoint-6" in message
    assert len(updates) == 8
    assert all(torch.equal(before, after) for before, after in zip(updates[6], updates[7], strict=True))
    assert not any(torch.equal(before, after) for before, after in zip(updates[5][:1], updates[6][:1], strict=True))
    assert not (tmp_path / "run" / "checkpoint-9").exists()


def test_a_gradient_that_is_not_finite_stops_too(train, tmp_path, monkeypatch):
    real = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args: real(*args) * torch.inf)
    with pytest.raises(RunFailed, match="step 0: the gradient.*no checkpoint yet"):
        train(tmp_path / "run", "--max_train_steps=3")


def snapshot(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resolution=9"], "--resolution"),
        (["--train_batch_size=2000"], "1797 images"),
        (["--total_batch_size=100"], "--total_batch_size 100"),
        (["--dataset_name=/nowhere/at/all"], "/nowhere/at/all"),
        (["--image_column=picture"], "needs to be one of: image"),
        (["--model_config_name_or_path=/nowhere"], "--model_config_name_or_path /nowhere"),
        (["--channels=3"], "channels"),
        (["--resume_from_checkpoint=/nowhere"], "no such folder"),
    ],
)
def test_mistakes_leave_nothing_behind(flags, message, train, tmp_path):
    with pytest.raises(UserError) as caught:
        train(tmp_path / "run", *flags)
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_places_that_cannot_be_written(train, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file, not a folder"):
        train(tmp_path / "file" / "run")
    with pytest.raises(UserError, match="cannot be written|no permission"):
        open_run(parse_config(["--output_dir=/sys/run"]), SimpleNamespace(is_main=True))  # not even for root


def test_a_full_disk_at_the_start(train, tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("run_folder.folder.shutil.disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="are free on its disk"):
        train(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_checkpoints_that_are_kept_count_too(train, tmp_path, monkeypatch, caplog):
    """Ten of them by the end, besides the newest three and the one that is written."""
    import shutil

    from run_folder.folder import check_disk

    config = parse_config(["--dataset_name=digits", f"--output_dir={tmp_path / 'run'}", "--max_train_steps=100000"])
    config.checkpointing_steps = 5000
    usage = shutil.disk_usage(tmp_path)._replace(free=10 * 16 * 10**6)
    monkeypatch.setattr("run_folder.folder.shutil.disk_usage", lambda path: usage)
    check_disk(config, 10**6)
    assert not caplog.text
    config.keep_every = 10_000
    check_disk(config, 10**6)
    assert "what the run will keep there takes 214 MB" in caplog.text
    assert "or a larger --keep_every" in caplog.text


def test_a_run_is_not_overwritten_by_accident(finished_run, train):
    before = (finished_run / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="holds a run already"):
        train(finished_run, "--resume_from_checkpoint=none")
    assert (finished_run / "metrics.jsonl").read_bytes() == before


def assert_same_checkpoint(first, second) -> None:
    for name in (f"unet/{WEIGHTS}", f"unet_ema/{WEIGHTS}", "optimizer.safetensors", "sampler.safetensors"):
        a, b = load_file(first / name), load_file(second / name)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), name


def test_a_run_that_ended_after_its_profile_and_before_its_first_metrics_begins_again(train, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.yaml", "profile.json", "profile.txt"):
        (run / name).touch()
    train(run, "--max_train_steps=1")
    assert (run / "metrics.jsonl").exists()
    train(run, "--max_train_steps=1", "--overwrite")
    assert not (run / "profile.json").exists()


def test_what_is_not_a_run_is_left_alone(train, tmp_path):
    project = tmp_path / "project"
    (project / "unet").mkdir(parents=True)
    (project / "unet" / "important.txt").write_text("mine")
    (project / "notes.txt").write_text("mine")
    for flags in ([], ["--overwrite"]):
        with pytest.raises(UserError, match="holds files that are not of a run .notes.txt"):
            train(project, "--max_train_steps=2", *flags)
    assert (project / "unet" / "important.txt").read_text() == "mine"


def test_overwriting_removes_the_run_and_nothing_else(train, tmp_path):
    run = train(tmp_path / "run", "--max_train_steps=2")
    (run / "notes.txt").write_text("mine")
    train(run, "--max_train_steps=1", "--overwrite")
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-1"]
    assert (run / "notes.txt").read_text() == "mine"
    with pytest.raises(UserError, match="would delete it"):
        train(run, "--overwrite", "--resume_from_checkpoint=checkpoint-1")


def test_another_task_does_not_continue_a_run(train, finished_run):
    with pytest.raises(UserError, match="holds a run with other settings .prediction_type epsilon -> sample"):
        train(finished_run, "--max_train_steps=20", "--prediction_type=sample")
    assert yaml.safe_load((finished_run / "config.yaml").read_text())["prediction_type"] == "epsilon"


def test_a_time_budget_is_that_of_the_whole_run(train, tmp_path, capsys):
    flags = ["--max_train_steps=1000000", "--logging_steps=10"]
    run = train(tmp_path / "run", *flags, "--max_train_seconds=0.5")
    steps = metrics_of(run)[-1]["step"]
    assert "has used up its 0.5 seconds of training" in capsys.readouterr().err
    train(run, *flags, "--max_train_seconds=0.5")
    assert metrics_of(run)[-1]["step"] == steps
    train(run, *flags, f"--max_train_seconds={metrics_of(run)[-1]['train_seconds'] + 0.5}")
    assert metrics_of(run)[-1]["step"] > steps


def test_fp16_needs_a_device_that_has_it(train, tmp_path):
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="--mixed_precision fp16: not available on cpu"):
            train(tmp_path / "run", "--mixed_precision=fp16")


@pytest.mark.parametrize(("device", "enabled"), [("mps", True), ("cuda", False)])
def test_fp16_needs_a_scaler_that_works(device, enabled, monkeypatch):
    """On Apple GPUs the fused optimiser would apply gradients that overflow."""
    from common.processes import start_processes

    scaler = SimpleNamespace(is_enabled=lambda: enabled)
    monkeypatch.setattr(
        "accelerate.Accelerator", lambda **_: SimpleNamespace(scaler=scaler, device=torch.device(device))
    )
    with pytest.raises(UserError, match=f"--mixed_precision fp16: not available on {device}; use bf16 or no"):
        start_processes(SimpleNamespace(mixed_precision="fp16", allow_tf32=False))


@pytest.mark.parametrize("known", [True, False])
def test_bf16_that_is_emulated_is_announced(train, tmp_path, monkeypatch, capsys, known):
    capabilities = {**torch.cpu.get_capabilities(), "architecture": "x86_64", "amx_bf16": False, "avx512_bf16": known}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    train(tmp_path / "run", "--mixed_precision=bf16", "--max_train_steps=1")
    assert ("cpu has no instructions for bf16: it will be slower" in capsys.readouterr().err) == (not known)


def test_the_clock_of_the_main_process_is_that_of_the_run():
    """Others wait while it writes, and their clocks go on."""
    parts = {"condition": None, "sizes": None, "batches": None, "total_steps": 10}
    state = SimpleNamespace(step=1, train_seconds=2.0)
    for is_main in (True, False):
        processes = SimpleNamespace(is_main=is_main, all_reduce_any=bool)
        assert Run(SimpleNamespace(max_train_seconds=1.0), processes, state=state, **parts).is_over() == is_main


@pytest.mark.parametrize(("steps", "betas", "is_said"), [
    (100, [], True), (1000, [], False), (100, ["--beta_end=0.2"], False), (100, ["--ddpm_beta_schedule=cosine"], False),
])  # fmt: skip
def test_a_diffusion_that_ends_with_an_image_is_warned_of(train, tmp_path, capsys, steps, betas, is_said):
    train(tmp_path / "run", f"--ddpm_num_steps={steps}", "--ddpm_num_inference_steps=2", *betas, "--dry_run")
    assert ("the last x_t still holds 60% of the image" in capsys.readouterr().err) == is_said


def test_betas_that_leave_no_signal_are_one_line(train, tmp_path):
    with pytest.raises(
        UserError, match="linear with --beta_end 0.95: choose other betas .they are too large: no signal"
    ):
        train(tmp_path / "run", "--beta_end=0.95", "--dry_run")


@pytest.mark.parametrize("prediction_type", ["mean", "sample"])
def test_the_mean_in_bf16_is_warned_of(train, tmp_path, capsys, prediction_type):
    train(tmp_path / "run", "--mixed_precision=bf16", f"--prediction_type={prediction_type}", "--max_train_steps=1")
    assert ("bf16 rounds the mean" in capsys.readouterr().err) == (prediction_type == "mean")


def test_the_gradient_scaler_of_fp16(train, tmp_path, monkeypatch):
    """The scaler itself works on a CPU too; its scale is saved."""
    import common.processes

    start = common.processes.start_processes

    def with_scaler(config):
        processes = start(config)
        processes.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        return processes

    monkeypatch.setattr(common.processes, "start_processes", with_scaler)
    run = train(tmp_path / "run", "--max_train_steps=12")
    losses = losses_of(run)
    assert sum(losses[-4:]) < sum(losses[:4])
    state = json.loads((run / "checkpoint-12" / "state.json").read_text())
    assert state["gradient_scaler"]["scale"] == 2.0**10
    train(run, "--max_train_steps=13")
    assert len(losses_of(run)) == 13
