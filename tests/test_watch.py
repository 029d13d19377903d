"""A run that is measured while it is trained: within the training, beside it, and the best checkpoint that is kept."""

import json
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import preloaded
import psutil
import pytest
import torch
from conftest import ROOT, lines_of, losses_of, run_script
from evaluation_helpers import evaluate, metrics_in, network, read_csv, run  # noqa: F401
from safetensors.torch import load_file

from common import interruption
from common.errors import UserError
from common.interruption import Interrupted
from evaluation import watching
from run_folder.checkpoints import checkpoints, verify
from run_folder.folder import RunFolder

LENGTH = ["--max_train_steps=4", "--checkpointing_steps=2", "--save_images_steps=100", "--checkpoints_total_limit=1"]
SAMPLED = ("--num_images=12", "--ddim", "--num_inference_steps=2", "--batch_size=6")


@pytest.fixture
def measured_within(train, network, tmp_path, monkeypatch):
    """Train with --evaluate_every; evaluate.py is forked from a server that has imported everything."""
    commands = []

    def forked(command: list[str], environment: dict[str, str], patience: float) -> int:
        commands.append(command)
        log = tmp_path / "evaluate.log"
        return preloaded.Process(command[1:], cwd=Path.cwd(), log=log, **environment).wait(120)

    monkeypatch.setattr("common.processes.run_child", forked)
    options = [flag.removeprefix("--") for flag in SAMPLED]
    flags = ["--evaluate_every=2", "--evaluate_options", *options, f"features={network}", "keep_best=fd"]

    def start(name: str, *others: str) -> Path:
        return train(tmp_path / name, *LENGTH, *flags, *others)

    start.commands = commands
    return start


class TestWithin:
    def test_the_run_is_the_same_and_every_milestone_is_measured(
        self, measured_within, train, evaluate, tmp_path, monkeypatch
    ):
        from common.processes import Processes
        from training.tracking import Clock

        clocks, run_script = [], Processes.run_script
        start_clock = Clock.__init__

        def noted(clock, *given):
            clocks.append(clock)
            start_clock(clock, *given)

        def at_rest(processes, *given, **environment):
            assert clocks[-1]._since is None, "the time of an evaluation is no training time"
            return run_script(processes, *given, **environment)

        monkeypatch.setattr(Clock, "__init__", noted)
        monkeypatch.setattr(Processes, "run_script", at_rest)
        found, plain = measured_within("measured", "--logger=tensorboard"), train(tmp_path / "plain", *LENGTH)
        assert losses_of(found) == losses_of(plain)
        for name in ("unet/diffusion_pytorch_model", "unet_ema/diffusion_pytorch_model", "optimizer"):
            ours, theirs = (load_file(run / "checkpoint-4" / f"{name}.safetensors") for run in (found, plain))
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        steps = [re.search(r"--checkpoints=(\w+)", " ".join(command))[1] for command in measured_within.commands]
        assert steps == ["none", "2", "4"]
        rows = read_csv(found / "evaluation_results.csv")
        assert [row["step"] for row in rows] == ["2", "4"]
        assert list((found / "logs" / "evaluation").iterdir())
        # They are what evaluate.py says later, of the checkpoint that is still there.
        evaluate(f"--run_dir={found}", *SAMPLED, f"--output_dir={tmp_path / 'later'}")
        (later,) = read_csv(tmp_path / "later" / "evaluation_results.csv")
        assert metrics_in(later) == pytest.approx(metrics_in(rows[1]), rel=1e-9, abs=1e-9)
        # The best is there even if it was pruned, whole, and images can be made with it.
        assert [path.name for path in checkpoints(found)] == ["checkpoint-4"]
        best = min(rows, key=lambda row: float(row["fd_tiny_vision@12"]))
        told = json.loads((found / "best" / "best.json").read_text())
        assert (told["metric"], str(told["step"]), told["sha256"]) == (
            "fd_tiny_vision@12",
            best["step"],
            best["sha256"],
        )
        assert told["value"] == pytest.approx(float(best["fd_tiny_vision@12"]))
        assert verify(found / "best")["unet_ema/diffusion_pytorch_model.safetensors"] == best["sha256"]
        flags = ["--ddim", "--num_inference_steps=2", "--num_images=1", f"--output_dir={tmp_path / 'images'}"]
        run_script_here("generate", str(found / "best"), *flags)
        assert json.loads((tmp_path / "images" / "samples.json").read_text())["sha256"] == best["sha256"]

    def test_a_stop_is_passed_on_and_the_step_is_measured_later(self, measured_within, tmp_path, monkeypatch):
        forked = sys.modules["common.processes"].run_child
        asked = []

        def stopped(command, environment, patience):
            asked.append(command[-1])
            if len(asked) == 2:
                monkeypatch.setattr(interruption, "_requested", "SIGTERM")
                return interruption.EXIT_INTERRUPTED
            return 0

        monkeypatch.setattr("common.processes.run_child", stopped)
        with pytest.raises(Interrupted, match="SIGTERM: saved at step 2 in"):
            measured_within("run")
        verify(tmp_path / "run" / "checkpoint-2")
        monkeypatch.setattr("common.processes.run_child", forked)
        run = measured_within("run")
        assert asked == ["--checkpoints=none", "--checkpoints=2"]
        assert [row["step"] for row in read_csv(run / "evaluation_results.csv")] == ["2", "4"]

    def test_what_cannot_be_measured_is_an_error_at_the_start_and_a_warning_later(
        self, measured_within, monkeypatch, capsys
    ):
        codes = iter([2])
        monkeypatch.setattr("common.processes.run_child", lambda *given: next(codes))
        with pytest.raises(
            UserError, match="--evaluate_every 2: evaluate.py ended with exit code 2; a line above says why"
        ):
            measured_within("never")
        codes = iter([0, 1, 0])
        run = measured_within("run")
        assert "checkpoint-2 is not measured: evaluate.py ended with exit code 1" in capsys.readouterr().err
        assert len(lines_of(run, "metrics.jsonl")) == 4

    def test_the_training_speaks_to_wandb_alone(self, measured_within, monkeypatch):
        import importlib

        monkeypatch.syspath_prepend(str(ROOT / "tests" / "stand_ins"))
        wandb = importlib.import_module("wandb")
        measured_within("run", "--logger=wandb")
        logged = [given["data"] for name, given in wandb.CALLS if name == "log"]
        del sys.modules["wandb"]
        of_evaluation = [data for data in logged if any(name.startswith("evaluation/ema-ddim-2-") for name in data)]
        assert [data["step"] for data in of_evaluation] == [2, 4]
        assert all(name.endswith("@12") for data in of_evaluation for name in data if name != "step")

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--evaluate_every=3"], "--evaluate_every 3: checkpoints are measured, so it must be a multiple of .* 2"),
            (["--evaluate_options=-x"], "--evaluate_options -x: must look like num_images=1000"),
        ],
    )
    def test_mistakes(self, measured_within, flags, message):
        with pytest.raises(UserError, match=message):
            measured_within("run", *flags)


def run_script_here(script: str, *arguments: str) -> None:
    run_script(script, *arguments)
    logging.getLogger().handlers.clear()


CHILD = "import time; print('here', flush=True); time.sleep(60)"
PARENT = f"""
import os, sys
from common.interruption import catch_signals, run_child, stops_deferred
catch_signals()
with stops_deferred():
    sys.exit(run_child([sys.executable, "-c", {CHILD!r}], os.environ, 5) != -15)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_child_ends_with_its_parent(number, code):
    process = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"here\n"
    (child,) = psutil.Process(process.pid).children()
    process.send_signal(number)
    assert process.wait(30) == code
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running()


MEETING = """
import sys
import torch
from common.processes import start_processes
from types import SimpleNamespace
processes = start_processes(SimpleNamespace(mixed_precision="no", allow_tf32=False))
if len(sys.argv) > 1:
    for number in range(2):
        codes = processes.run_script(__file__, [], NUMBER=str(number))
        assert codes == [0, 0], codes
else:
    import os
    total = processes.all_reduce_sum(torch.tensor(processes.index + 1))
    assert total == 3 and processes.count == 2
    if processes.is_main:
        open(os.environ["NUMBER"] + ".met", "w").close()
processes.finish()
"""


def test_children_of_two_processes_find_each_other_again_and_again(tmp_path):
    (tmp_path / "meeting.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{MEETING}")
    process = preloaded.Process([tmp_path / "meeting.py", "parent"], processes=2, cwd=tmp_path)
    outputs = process.communicate(timeout=300)
    assert process.returncode == 0, outputs[1]
    assert sorted(path.name for path in tmp_path.glob("*.met")) == ["0.met", "1.met"]


class TestBeside:
    @pytest.fixture
    def growing(self, run, tmp_path, monkeypatch):
        """A copy of the run without its checkpoints, which come one by one when somebody waits for them."""
        copy = tmp_path / "run"
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoint-*", "unet", "model_index.json", "*.csv"))
        arriving = iter(checkpoints(run))

        def arrive(seconds: float) -> None:
            source = next(arriving, None)
            if source is None:
                raise Interrupted("SIGINT", "stopped; start the same command again to continue")
            shutil.copytree(source, copy / source.name)

        monkeypatch.setattr(watching, "time", type("Clock", (), {"sleep": staticmethod(arrive)}))
        return copy

    def test_every_checkpoint_is_measured_once_though_it_is_pruned(
        self, run, growing, evaluate, tmp_path, monkeypatch, capsys
    ):
        from evaluation.session import Session

        measure, measured = Session._measure_samples, []

        def pruned_meanwhile(session, samples, *given):
            measured.append(samples.job.model.name)
            shutil.rmtree(growing / samples.job.model.name)
            measure(session, samples, *given)

        monkeypatch.setattr(Session, "_measure_samples", pruned_meanwhile)
        with pytest.raises(
            Interrupted, match="SIGINT: stopped; start the same command again to continue; .* is no longer watched"
        ):
            evaluate(f"--run_dir={growing}", *SAMPLED, "--watch", "--keep_best=fd")
        assert measured == ["checkpoint-2", "checkpoint-4"]
        assert capsys.readouterr().err.count("Waiting for the next checkpoint") == 3
        monkeypatch.undo()
        evaluate(f"--run_dir={run}", *SAMPLED, f"--output_dir={tmp_path / 'plain'}")
        found, expected = (read_csv(path / "evaluation_results.csv") for path in (growing, tmp_path / "plain"))
        assert [metrics_in(row) for row in found] == [
            pytest.approx(metrics_in(row), rel=1e-9, abs=1e-9) for row in expected
        ]
        assert [row["images"] for row in found] == ["checkpoint-2", "checkpoint-4"]
        assert not list(growing.glob(".*watched*"))
        verify(growing / "best")

    def test_it_ends_with_the_run(self, growing, evaluate, capsys):
        evaluate(f"--run_dir={growing}", *SAMPLED, "--watch")
        assert "The run is complete" in capsys.readouterr().err
        assert [row["step"] for row in read_csv(growing / "evaluation_results.csv")] == ["2", "4"]
        # One that has come between the two looks is still to be measured.
        for seen, ended in ((set(), False), ({("checkpoint-2", 0)}, False), ({("checkpoint-4", 0)}, True)):
            assert watching.has_ended(RunFolder(growing), seen) is ended
        evaluate(f"--run_dir={growing}", *SAMPLED, "--watch")  # nothing is left to do
        assert capsys.readouterr().err.count("has been measured already") == 2

    def test_a_checkpoint_that_goes_while_it_is_copied_is_passed_over(self, run, tmp_path, monkeypatch, caplog):
        copy = tmp_path / "run"
        shutil.copytree(run, copy)
        link = os.link

        def pruned(source, target):
            if "checkpoint-2" in str(source):
                shutil.rmtree(copy / "checkpoint-2", ignore_errors=True)
            link(source, target)

        monkeypatch.setattr(os, "link", pruned)
        model = watching.next_checkpoint(RunFolder(copy), None, set())
        assert (model.name, model.step) == ("checkpoint-4", 4)
        assert "checkpoint-2 is not measured: it was pruned before it could be read" in caplog.text
        assert [path.name for path in copy.glob(".*watched*")] == [
            f".checkpoint-4.watched-{platform.node()}-{os.getpid()}"
        ]
        # The one that is held takes no room, and is removed once its watcher is gone.
        name = "unet_ema/diffusion_pytorch_model.safetensors"
        assert (model.path / name).samefile(copy / "checkpoint-4" / name)
        model.path.rename(copy / f".checkpoint-4.watched-{platform.node()}-{2**22 + 1}")
        elsewhere = copy / f".checkpoint-4.watched-another-machine-{2**22 + 1}"
        elsewhere.mkdir()
        watching.remove_abandoned(copy)
        assert [*copy.glob(".*watched*")] == [elsewhere]


def test_the_best_is_kept_by_its_metric(run, tmp_path):
    """A better one takes its place, a worse one does not; one that is chosen in another way does."""
    from dataclasses import asdict, replace

    from evaluation.results import Measured
    from run_folder.saved_model import find_models

    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("best"))
    two, four = find_models(str(copy), ["all"], None)
    measured = Measured(2, 1.0, "ema", "ddim", 2, None, 12, "checkpoint-2", two.sha256, "digits", "0", "no")

    def consider(model, column: str, value: float, **changes) -> int:
        this = replace(measured, step=model.step, sha256=model.sha256, **changes)
        rows = [{**asdict(this), column: value}]
        watching.BestCheckpoint(RunFolder(copy), column).consider(model, this, rows)
        verify(copy / "best")
        return json.loads((copy / "best" / "best.json").read_text())["step"]

    assert consider(two, "fid@12", 5.0) == 2
    assert consider(four, "fid@12", 6.0) == 2
    assert consider(four, "fid@12", 4.0) == 4
    assert consider(two, "is@12", 4.0) == 2
    assert consider(four, "is@12", 3.0) == 2
    assert consider(four, "is@12", 5.0) == 4
    assert consider(two, "is@12", 1.0, steps=50) == 2
    watching.BestCheckpoint(RunFolder(copy), "kid@12").consider(four, measured, [{**asdict(measured), "is@12": 9.0}])
    watching.BestCheckpoint(RunFolder(copy), "kid@12").consider(four, measured, [])
    # A pipeline, of a run whose checkpoints have been deleted, is no checkpoint: its folder is the run's own.
    row = {**asdict(measured), "kid@12": 0.0}
    watching.BestCheckpoint(RunFolder(copy), "kid@12").consider(replace(four, path=copy), measured, [row])
    assert json.loads((copy / "best" / "best.json").read_text())["step"] == 2  # what has no value is no better one
    # A kill between the two renames leaves the one before.
    (copy / "best").rename(copy / ".best.old")
    assert consider(four, "is@12", 0.5, steps=50) == 2
    assert not (copy / ".best.old").exists()


def test_what_the_best_can_be_chosen_by():
    from typing import get_args, get_type_hints

    from evaluation.evaluate_options import RunOptions, parse_evaluation
    from evaluation.metrics import METRICS

    choices = get_args(get_args(get_type_hints(RunOptions)["keep_best"])[0])
    assert set(choices) == {metric.name for metric in METRICS if metric.of_samples}
    for features, metric, other in (("inception", "kd", "kid"), ("clip", "fid", "fd")):
        flags = [f"--run_dir={ROOT}", f"--features={features}", f"--keep_best={metric}"]
        with pytest.raises(UserError, match=f"--keep_best {metric}: is not measured with .*; choose {other}"):
            parse_evaluation(flags)
    with pytest.raises(UserError, match="--ema_length has no effect with --keep_best: leave one of them out"):
        parse_evaluation([f"--run_dir={ROOT}", "--keep_best=fid", "--ema_length", "0.05", "0.1"])
