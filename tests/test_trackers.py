"""wandb and trackio get what TensorBoard gets, a resumed run goes on in the same run there, and neither can stop it."""

import importlib
import json
import logging
import sys
from pathlib import Path

import pytest
from conftest import run_script
from evaluation_helpers import network  # noqa: F401 (a fixture)

STAND_INS = Path(__file__).parent / "stand_ins"
LENGTH = ["--max_train_steps=4", "--checkpointing_steps=2", "--save_images_steps=4"]


@pytest.fixture
def services(monkeypatch) -> dict:
    """Stand-ins for both modules, which record what they are given."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.delenv("WANDB_DIR", raising=False)
    modules = {name: importlib.import_module(name) for name in ("wandb", "trackio")}
    yield modules
    for name in modules:
        del sys.modules[name]


def calls_of(module, name: str) -> list[dict]:
    return [given for called, given in module.CALLS if called == name]


def steps_of(module, value: str) -> list[int]:
    """The steps for which a value was logged."""
    logged = calls_of(module, "log")
    return [given["data"].get("step", given.get("step")) for given in logged if value in given["data"]]


def test_both_get_what_tensorboard_gets(services, train, network, cache_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    run = train(tmp_path / "run", *LENGTH, "--report-to=all", "--wandb-project=mine")
    assert list((run / "logs").glob("events*"))
    train(run, *LENGTH, "--max_train_steps=6", "--report_to=all", "--wandb_project=mine")
    wandb, trackio = services["wandb"], services["trackio"]
    first, second = calls_of(wandb, "init")
    ids = json.loads((run / "trackers.json").read_text())
    assert first["id"] == second["id"] == ids["wandb"]
    assert (first["project"], first["name"], first["resume"], first["dir"]) == (
        "mine",
        "run",
        "allow",
        str(run / "logs"),
    )
    assert "mode" not in first  # so that WANDB_MODE=offline is heard
    assert "settings" not in first
    assert (first["config"]["learning_rate"], first["config"]["adam_beta2"]) == (2e-4, 0.999)
    assert (first["config"]["max_train_steps"], second["config"]["max_train_steps"]) == (4, 6)
    assert "hf_secret" not in str(first)
    assert calls_of(wandb, "define_metric")[0] == {"name": "*", "step_metric": "step"}
    names = {given["name"] for given in calls_of(trackio, "init")}
    assert names == {f"run-{ids['trackio']}"}
    assert [given["resume"] for given in calls_of(trackio, "init")] == ["allow", "allow"]
    for module in services.values():
        assert steps_of(module, "loss") == [1, 2, 3, 4, 5, 6]
        assert steps_of(module, "images_per_second_per_device") == [1, 2, 3, 4, 5, 6]
        assert steps_of(module, "test_samples") == [4, 6]
        assert steps_of(module, "timestep_density")[0] == 0
        assert len(calls_of(module, "finish")) == 2

    flags = [
        f"--features={network}",
        f"--cache_dir={cache_dir}",
        "--num_workers=0",
        "--checkpoints",
        "2",
        "4",
    ]
    sampled = ["--num_images=12", "--batch_size=12", "--ddim", "--num_inference_steps=2"]
    run_script("evaluate", f"--run_dir={run}", *flags, *sampled)
    logging.getLogger().handlers.clear()
    assert {given["id"] for given in calls_of(wandb, "init")} == {ids["wandb"]}
    for module in services.values():
        (name,) = {
            name for given in calls_of(module, "log") for name in given["data"] if name.endswith("/fd_tiny_vision@12")
        }
        assert name.startswith("evaluation/ema-ddim-2-")
        assert steps_of(module, name) == [2, 4]


def test_a_run_that_starts_anew_is_another_run_there(services, train, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    run = train(tmp_path / "run", *LENGTH, "--logger=wandb")
    train(run, *LENGTH, "--logger=wandb", "--overwrite")
    train(tmp_path / "other", *LENGTH, "--logger=wandb", f"--resume_from_checkpoint={run / 'checkpoint-2'}")
    given = calls_of(services["wandb"], "init")
    assert len({call["id"] for call in given}) == 3
    assert {call["dir"] for call in given} == {str(tmp_path / "elsewhere")}
    assert not (run / "logs").exists()


@pytest.mark.parametrize(
    ("failing", "said"), [("init", "Curves are not logged to wandb"), ("log", "Curves are no longer logged to wandb")]
)
def test_a_service_that_fails_does_not_stop_the_run(services, train, tmp_path, monkeypatch, capsys, failing, said):
    monkeypatch.setattr(services["wandb"], "FAILING", {failing})
    run = train(tmp_path / "run", *LENGTH, "--logger=all")
    shown = capsys.readouterr().err
    assert shown.count(said) == 1
    assert f"{said}: the server does not answer" in shown
    assert steps_of(services["trackio"], "loss") == [1, 2, 3, 4]
    assert (run / "checkpoint-4").exists()
