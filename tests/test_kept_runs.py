"""A folder that holds a run is never trained over by accident."""

import hashlib
import logging
import shutil
from pathlib import Path

import pytest
import yaml
from conftest import losses_of, metrics_of, run_training

from common.errors import UserError
from run_folder.checkpoints import checkpoints

FLAGS = ["--max_train_steps=4", "--checkpointing_steps=2", "--save_images_steps=100"]


def contents(run: Path) -> dict[str, str]:
    """The hash of every file of a run, but for the lock, which is held by whoever looks into it."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def finished(tiny_flags, tmp_path_factory) -> Path:
    run = run_training(tmp_path_factory.mktemp("runs") / "run", [*tiny_flags, *FLAGS])
    logging.getLogger().handlers.clear()
    return run


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def remove_checkpoints(run: Path) -> None:
    for folder in checkpoints(run):
        shutil.rmtree(folder)


def test_a_finished_run_without_its_checkpoints_is_finished(run, train, capsys):
    remove_checkpoints(run)
    before = contents(run)
    train(run, *FLAGS)
    assert contents(run) == before
    assert "The run is complete: step 4 of 4" in capsys.readouterr().err
    train(run, *FLAGS, "--max_train_steps=3")
    assert "it is at step 4, beyond the 3 requested now" in capsys.readouterr().err
    assert metrics_of(run)[-1]["step"] == 4


def test_a_time_budget_that_is_used_up_stays_so(train, tmp_path, capsys):
    flags = ["--max_train_steps=1000000", "--max_train_seconds=0.2", "--save_images_steps=1000000"]
    run = train(tmp_path / "run", *flags)
    remove_checkpoints(run)
    before = contents(run)
    train(run, *flags)
    assert contents(run) == before
    assert capsys.readouterr().err.count("has used up its 0.2 seconds of training") == 2
    with pytest.raises(UserError, match="no valid checkpoint to continue from"):
        train(run, *flags, "--max_train_seconds=60")


@pytest.mark.parametrize(
    ("flags", "gone"),
    [
        (["--max_train_steps=6"], []),  # more than its pipeline has
        (["--learning_rate=1e-4"], []),  # another run
        (["--resume_from_checkpoint=none"], []),
        ([], ["model_index.json"]),
        ([], ["unet"]),
        ([], ["model_index.json", "unet", "README.md"]),  # metrics alone
        ([], ["model_index.json", "unet", "README.md", "config.yaml", ".checkpoint-saved"]),
        ([], ["metrics.jsonl", "config.yaml"]),  # a pipeline alone
    ],
)
def test_what_is_left_of_a_run_is_not_trained_over(flags, gone, run, train):
    remove_checkpoints(run)
    for name in gone:
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
    before = contents(run)
    with pytest.raises(UserError, match="holds .*--overwrite") as caught:
        train(run, *FLAGS, *flags)
    if flags == ["--max_train_steps=6"]:
        assert "model_index.json, unet, README.md, metrics.jsonl up to step 4, but no valid" in str(caught.value)
        assert "continue from to step 6" in str(caught.value)
    assert contents(run) == before


def test_damaged_checkpoints_alone_are_left_as_they_are(run, train):
    for folder in checkpoints(run):
        (folder / "state.json").write_text("{}")
    before = contents(run)
    for _ in range(2):  # as a job that is queued again does
        with pytest.raises(UserError, match="checkpoint-4: state.json is not .*; checkpoint-2: .*--overwrite"):
            train(run, *FLAGS)
    assert contents(run) == before
    train(run, *FLAGS, "--overwrite", "--max_train_steps=1")
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-1"]


def test_what_was_set_aside_is_not_trained_over(run, train):
    for folder in checkpoints(run):
        folder.rename(folder.with_name(f"{folder.name}.corrupt"))
    with pytest.raises(UserError, match="holds checkpoint-2.corrupt, checkpoint-4.corrupt"):
        train(run, *FLAGS)


def test_a_run_killed_before_its_first_checkpoint_begins_again(run, train):
    expected = losses_of(run)
    remove_checkpoints(run)
    for name in ("unet", "scheduler"):
        shutil.rmtree(run / name)
    for name in ("model_index.json", "README.md", ".checkpoint-saved"):
        (run / name).unlink()
    before = contents(run)
    with pytest.raises(UserError, match="of a run with other settings .learning_rate 0.0002 -> 0.1"):
        train(run, *FLAGS, "--learning_rate=0.1")
    assert contents(run) == before
    assert losses_of(train(run, *FLAGS)) == expected


def test_a_pipeline_of_somebody_else_is_not_trained_over(run, train, tmp_path):
    pipeline = tmp_path / "pipeline"
    for name in ("unet", "scheduler"):
        shutil.copytree(run / name, pipeline / name)
    shutil.copy(run / "model_index.json", pipeline)
    before = contents(pipeline)
    with pytest.raises(UserError, match="holds model_index.json, unet, but"):
        train(pipeline, *FLAGS)
    assert contents(pipeline) == before


def test_a_complete_run_keeps_its_settings(run, train):
    before = contents(run)
    with pytest.raises(UserError, match="is complete, with other settings .learning_rate .* -> 0.1.*--max_train_steps"):
        train(run, *FLAGS, "--learning_rate=0.1")
    with pytest.raises(UserError, match="is complete, with other settings"):
        train(run, *FLAGS, "--learning_rate=0.1", "--resume_from_checkpoint=checkpoint-4")
    assert contents(run) == before


def test_a_refused_resume_renames_nothing(run, train):
    (run / "evaluation_results.csv").write_text("no table of ours\n1\n")
    before = contents(run)
    with pytest.raises(UserError, match="evaluation_results.csv cannot be read: move it away"):
        train(run, *FLAGS, "--resume_from_checkpoint=checkpoint-2")
    (run / "evaluation_results.csv").unlink()
    assert contents(run) == {name: digest for name, digest in before.items() if name != "evaluation_results.csv"}
    before = contents(run)
    with pytest.raises(UserError, match="checkpoint-2 does not fit this configuration .size mismatch for conv_out"):
        train(run, *FLAGS, "--resume_from_checkpoint=checkpoint-2", "--variance_type=learned_range")
    assert contents(run) == before


def test_a_run_is_no_checkpoint_and_no_folder_of_photos(run, train, tmp_path):
    with pytest.raises(UserError, match="is a run; name one of its checkpoints: checkpoint-2, checkpoint-4"):
        train(tmp_path / "other", *FLAGS, f"--resume_from_checkpoint={run}")
    with pytest.raises(UserError, match="is a run, not a folder of photos; to continue it, use --config .*config.yaml"):
        run_training(tmp_path / "other", [f"--train_data_dir={run}"])
    with pytest.raises(UserError, match="is inside --train_data_dir .*photos, where the run's samples would be taken"):
        run_training(tmp_path / "photos" / "runs" / "ddpm", [f"--train_data_dir={tmp_path / 'photos'}"])


def test_overwriting_leaves_nothing_of_the_old_run(run, train):
    for name in ("likelihood", "figures", "generated/step-4", "checkpoint-4.abandoned"):
        (run / name).mkdir(parents=True)
        (run / name / "old.png").touch()
    (run / "likelihood.csv").touch()
    elsewhere = run.parent / "samples elsewhere"  # as on a larger disk
    (run / "samples").rename(elsewhere)
    (run / "samples").symlink_to(elsewhere)
    train(run, *FLAGS, "--overwrite", "--max_train_steps=1")
    assert not {"likelihood", "likelihood.csv", "figures", "generated"} & {path.name for path in run.iterdir()}
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_folder_of_somebody_else_is_not_taken_for_a_run(train, tmp_path):
    for name in ("README.md", "figures/mine.png"):
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).touch()
    before = contents(tmp_path / "mine")
    with pytest.raises(UserError, match="holds files that are not of a run .figures"):
        train(tmp_path / "mine", *FLAGS, "--overwrite")
    assert contents(tmp_path / "mine") == before


def test_files_are_as_readable_as_the_umask_says(run):
    wanted = (run / "config.yaml").stat().st_mode
    weights = [*run.rglob("*.safetensors")]
    assert len(weights) > 6
    assert {file.stat().st_mode for file in weights} == {wanted}


JOBS = [
    ("SLURM_RESTART_COUNT", {"SLURM_JOB_ID": "17"}),
    ("TORCHELASTIC_RESTART_COUNT", {"TORCHELASTIC_RUN_ID": "d2c1"}),
    ("TORCHELASTIC_RESTART_COUNT", {"TORCHELASTIC_RUN_ID": "none"}),
]


@pytest.mark.parametrize(("count", "job"), JOBS)
def test_a_job_that_is_started_again_overwrites_once(count, job, run, train, monkeypatch, capsys):
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(count, "1")  # its first start ended before it came to the folder
    train(run, *FLAGS, "--overwrite", "--max_train_steps=2", "--learning_rate=1e-4")
    assert len(losses_of(run)) == 2
    monkeypatch.setenv(count, "2")
    train(run, *FLAGS, "--overwrite", "--learning_rate=1e-4")
    assert "Resuming from" in capsys.readouterr().err
    assert len(losses_of(run)) == 4
    if job.get("TORCHELASTIC_RUN_ID") != "none":
        for name in job:
            monkeypatch.setenv(name, "another")
        train(run, *FLAGS, "--overwrite", "--max_train_steps=1")
        assert len(losses_of(run)) == 1


def test_a_restarted_job_begins_its_run_once(train, tmp_path, monkeypatch, capsys):
    begin = [*FLAGS, "--resume_from_checkpoint=none"]
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    train(tmp_path / "run", *begin, "--max_train_steps=2")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    train(tmp_path / "run", *begin)
    assert "Resuming from" in capsys.readouterr().err
    assert len(losses_of(tmp_path / "run")) == 4
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    with pytest.raises(UserError, match="holds a run already"):
        train(tmp_path / "run", *begin)


@pytest.mark.parametrize("images", [8, 4])
def test_images_per_device_alone_do_not_change_the_batch_of_a_run(run, train, capsys, images):
    """As when it goes on with another number of processes: the flags are the same, and so is the batch."""
    config = (run / "config.yaml").read_text()  # of somebody's attempt with another batch, which saved nothing
    (run / "config.yaml").write_text(config.replace("total_batch_size: 16", "total_batch_size: 64"))
    train(run, *FLAGS, f"--train_batch_size={images}", "--max_train_steps=5")
    said = capsys.readouterr().err
    assert f"16 = {images} per device x 1 x {16 // images}" in said
    assert "Settings differ" not in said
    assert yaml.safe_load((run / "config.yaml").read_text())["total_batch_size"] == 16


def test_a_batch_that_cannot_stay_as_it_was_is_refused(run, train, tmp_path, capsys):
    for images in (5, 32):
        with pytest.raises(
            UserError, match=f"on 1 process.es. these are {images} images a step, but .* has 16: choose"
        ):
            train(run, *FLAGS, f"--train_batch_size={images}", "--max_train_steps=5")
    train(run, *FLAGS, "--train_batch_size=5", "--total_batch_size=5", "--max_train_steps=5")
    assert "total_batch_size 16 -> 5" in capsys.readouterr().err
    train(tmp_path / "another", *FLAGS, "--train_batch_size=5", "--max_train_steps=1")
    train(run, *FLAGS, "--train_batch_size=8", "--max_train_steps=1", "--overwrite")
    assert yaml.safe_load((run / "config.yaml").read_text())["total_batch_size"] == 8


def test_a_job_that_is_started_again_goes_back_once(run, train, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    back = [*FLAGS, "--resume_from_checkpoint=checkpoint-2", "--learning_rate=1e-4"]
    train(run, *back, "--max_train_steps=3")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    train(run, *back)
    assert [path.name for path in checkpoints(run)] == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]
    assert not (run / "checkpoint-3.abandoned").exists()


def test_a_restarted_job_goes_on_when_its_first_checkpoint_is_pruned(run, train, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    back = [*FLAGS, "--resume_from_checkpoint=checkpoint-2", "--checkpointing_steps=1", "--checkpoints_total_limit=1"]
    train(run, *back, "--max_train_steps=3")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    train(run, *back, "--max_train_steps=5")
    assert [path.name for path in checkpoints(run)] == ["checkpoint-3", "checkpoint-5"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    train(run, *back, "--max_train_steps=6")
    assert len(losses_of(run)) == 6


def test_what_a_restarted_job_asks_for_the_first_time_is_done(run, train, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    train(run, *FLAGS, "--overwrite")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # before the second command of the job has begun
    train(run, *FLAGS, "--resume_from_checkpoint=checkpoint-2", "--max_train_steps=3")
    assert [path.name for path in checkpoints(run)] == ["checkpoint-2", "checkpoint-3"]


def test_a_restarted_job_that_has_saved_nothing_goes_back_again(run, train, monkeypatch):
    shutil.copytree(run / "checkpoint-4", run / "best")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    back = [*FLAGS, "--resume_from_checkpoint=best", "--max_train_steps=6", "--checkpointing_steps=6"]
    shutil.rmtree(run / "checkpoint-4")
    with monkeypatch.context() as patched:
        patched.setattr("run_folder.checkpoints.CheckpointWriter.save", lambda *_, **__: None)
        train(run, *back)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    train(run, *back)
    assert [line["step"] for line in metrics_of(run)] == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in checkpoints(run)] == ["checkpoint-2", "checkpoint-6"]


def test_a_run_with_snapshots_of_averages_goes_back_to_its_best(tiny_flags, tmp_path):
    flags = [*(flag for flag in tiny_flags if "ema_max_decay" not in flag), *FLAGS, "--ema=power"]
    run = run_training(tmp_path / "run", flags)
    shutil.copytree(run / "checkpoint-2", run / "best")
    run_training(run, [*flags, "--resume_from_checkpoint=best", "--max_train_steps=3"])
    assert [path.name for path in checkpoints(run)] == ["checkpoint-2", "checkpoint-3"]
    assert (run / "best").is_dir()


def test_who_goes_back_twice_loses_nothing(run, train):
    first = contents(run / "checkpoint-4")
    for rate in ("1e-4", "1e-5"):
        train(run, *FLAGS, "--resume_from_checkpoint=checkpoint-2", f"--learning_rate={rate}")
    assert contents(run / "checkpoint-4.abandoned") == first
    assert contents(run / "checkpoint-4.abandoned-2").keys() == first.keys()


def test_curves_and_snapshots_of_what_is_abandoned_are_kept(run, train):
    (run / "ema_snapshots").mkdir()
    for step in (2, 4):
        (run / "ema_snapshots" / f"step-{step}.safetensors").write_text("averages")
    before = (run / "metrics.jsonl").read_bytes()
    train(run, *FLAGS, "--resume_from_checkpoint=checkpoint-2", "--max_train_steps=3")
    assert (run / "metrics.jsonl.abandoned").read_bytes() == before
    assert [line["step"] for line in metrics_of(run)] == [1, 2, 3]
    assert sorted(path.name for path in (run / "ema_snapshots").iterdir()) == [
        "step-2.safetensors", "step-4.safetensors.abandoned",
    ]  # fmt: skip


def test_grids_scores_and_the_best_of_what_is_abandoned_are_not_of_this_run(run, train):
    flags = [flag for flag in FLAGS if "images" not in flag]
    (run / "samples").mkdir(exist_ok=True)
    for step in (2, 4):
        (run / "samples" / f"step-{step}.png").write_text("a grid of the first time")
    tables = {"evaluation_results.csv": "step,images,fid@50\n2,checkpoint-2,9.0\n4,checkpoint-4,1.0\n,photos,3.0\n",
              "best_scores.csv": "metric,best,step\nfid@50,1.0,4\n"}  # fmt: skip
    for name, text in tables.items():
        (run / name).write_text(text)
    shutil.copytree(run / "checkpoint-4", run / "best")
    train(run, *flags, "--resume_from_checkpoint=checkpoint-2", "--save_images_steps=100", "--max_train_steps=3")
    assert (run / "evaluation_results.csv").read_text() == "step,images,fid@50\n2,checkpoint-2,9.0\n,photos,3.0\n"
    assert (run / "best_scores.csv").read_text() == "metric,best,step\n"
    assert {name: (run / f"{name}.abandoned").read_text() for name in tables} == tables
    assert (run / "best.abandoned" / "state.json").is_file()
    assert not (run / "best").exists()
    assert (run / "samples" / "step-4.png.abandoned").is_file()
    assert (run / "samples" / "step-2.png").read_text() == "a grid of the first time"
    assert "step-4.png" not in (run / "README.md").read_text()


def test_a_run_that_began_at_a_named_checkpoint_goes_on_from_its_own(run, train, tmp_path):
    named = [*FLAGS, f"--resume_from_checkpoint={run / 'checkpoint-2'}"]
    other = train(tmp_path / "other", *named, "--max_train_steps=3")
    train(other, *named)
    assert [line["step"] for line in metrics_of(other)] == [3, 4]
    assert [path.name for path in checkpoints(other)] == ["checkpoint-3", "checkpoint-4"]
    before = contents(other)
    with pytest.raises(UserError, match="holds another run, with checkpoint-4"):
        train(other, *FLAGS, f"--resume_from_checkpoint={run / 'checkpoint-4'}")
    remove_checkpoints(other)
    with pytest.raises(UserError, match="no valid checkpoint"):
        train(other, *named)
    assert {name for name in before if name in contents(other)} == set(contents(other))


def test_other_folders_are_no_checkpoints(run, train):
    (run / "checkpoint-²").mkdir()
    (run / "checkpoint-7").touch()
    (run / "samples" / "step-best.png").touch()
    train(run, *FLAGS, "--max_train_steps=5")
    assert [path.name for path in checkpoints(run)] == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
