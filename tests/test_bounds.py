"""Everything is checked where it comes in, before the work; what is still unexpected is one line."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import ROOT, metrics_of

import common.processes
from common import interruption
from common.errors import UserError, run_script
from common.options import facts_of
from evaluation.evaluate_options import EvaluationOptions, parse_evaluation
from generation.generate_options import GenerationOptions, parse_generation
from preparation.prepare_options import PrepareOptions, parse_prepare_options
from run_folder import publish
from run_folder.config import ConditionalConfig, TrainingConfig, parse_conditional_config, parse_config
from run_folder.folder import RunFolder
from visualize import Options as VisualizeOptions
from visualize import parse as parse_visualize

PARSERS = {
    TrainingConfig: parse_config,
    ConditionalConfig: parse_conditional_config,
    GenerationOptions: parse_generation,
    EvaluationOptions: parse_evaluation,
    PrepareOptions: parse_prepare_options,
    VisualizeOptions: parse_visualize,
}


def numbers_of(kind: type, wanted: type) -> list[str]:
    """The options of a script that are numbers of this type."""
    return [name for name in facts_of(kind) if wanted.__name__ in str(field_types(kind)[name])]


def field_types(kind: type) -> dict[str, object]:
    return {name: entry.type for name, entry in kind.__dataclass_fields__.items()}


@pytest.mark.parametrize("kind", PARSERS, ids=lambda kind: kind.__name__)
def test_every_float_is_finite_and_every_count_has_a_limit(kind):
    floats, ints = numbers_of(kind, float), numbers_of(kind, int)
    assert floats or kind is VisualizeOptions
    for name, value in [*((name, value) for name in floats for value in ("nan", "inf", "-inf")),
                        *((name, str(10**30)) for name in ints)]:  # fmt: skip
        with pytest.raises(UserError, match=f"^--{name} .*: must be "):
            PARSERS[kind]([f"--{name}={value}"])


@pytest.mark.parametrize(
    ("parse", "flags", "message"),
    [
        (parse_config, "--ema_power 0.5", "--ema_power has no effect without --ema_warmup"),
        (parse_config, "--ema_power 0.75", "--ema_power has no effect without --ema_warmup"),
        (parse_config, "--edm_mean 0", "--edm_mean has no effect without --timestep_sampler edm"),
        (parse_config, "--loss_weighting edm --edm_mean 0", "--edm_mean has no effect without --timestep_sampler edm"),
        (parse_config, "--min_snr_gamma 5", "--min_snr_gamma has no effect without --loss_weighting min_snr"),
        (parse_config, "--snr_gamma 5 --loss_weighting none", "--min_snr_gamma has no effect without"),
        (parse_config, "--speed_tau 9", "without --timestep_sampler speed or --loss_weighting speed"),
        (parse_config, "--loss_second_moment_history 5", "without --timestep_sampler loss_second_moment"),
        (parse_config, "--no_use_ema --ema_max_decay 0.9", "--ema_max_decay has no effect without --use_ema"),
        (parse_config, "--lr_scheduler constant --lr_warmup_steps 9", "no effect with --lr_scheduler constant"),
        (parse_config, "--dropout 0 --model_config_name_or_path x", "--dropout has no effect with"),
        (parse_config, "--hub_private_repo", "--hub_private_repo has no effect without --push_to_hub"),
        (parse_config, "--tracker_project_name x", "--tracker_project_name has no effect without --logger wandb"),
        (parse_conditional_config, "--text_encoder x", "--text_encoder has no effect without --condition text"),
        (parse_generation, "--interpolate 1 2 --progress_gif", "--progress_gif has no effect with --interpolate"),
        (parse_generation, "--train_data_dir x", "--train_data_dir has no effect without --nearest"),
        (parse_evaluation, "--generated a --real b --statistics_mode clean", "no effect without --statistics"),
        (parse_evaluation, "--compare a b --weights raw", "--weights needs a run"),
        (parse_evaluation, "--run_dir a --seeds 3", "--repeats N measures N sets of images"),
        (parse_prepare_options, "--check x --captions a{class}", "--captions has no effect with --check"),
        (parse_visualize, "--run_dir x --num_images 3", "--num_images has no effect with --run_dir"),
    ],
)
def test_an_option_without_effect_is_an_error(parse, flags, message):
    with pytest.raises(UserError, match=message):
        parse(flags.split())


def test_what_contradicts_itself_is_an_error():
    with pytest.raises(UserError, match="--beta_start 0.02: is larger than --beta_end 0.0001"):
        parse_config(["--beta_start=0.02", "--beta_end=0.0001"])
    parse_config(["--ddpm_beta_schedule=constant", "--beta_end=5e-5"])  # which has no first beta
    with pytest.raises(UserError, match="--lr_scheduler cosine: falls towards the last step, and --max_train_seconds"):
        parse_config(["--dataset_name=digits", "--lr_scheduler=cosine", "--max_train_seconds=60"])


def test_no_warm_up_and_what_a_file_has_left_over_are_no_mistake(tmp_path):
    assert parse_config(["--lr_scheduler=constant"]).lr_warmup_steps == 5000  # not what configs/digits.yaml says
    assert parse_config(["--lr_scheduler=constant", "--lr_warmup_steps=0"]).lr_warmup_steps == 0
    file = tmp_path / "edm.yaml"
    file.write_text("dataset_name: digits\ntimestep_sampler: edm\nedm_mean: -1\n")
    assert parse_config([f"--config={file}"]).edm_mean == -1
    assert parse_config([f"--config={file}", "--timestep_sampler=uniform"]).edm_mean == -1.2


def test_snr_gamma_means_what_it_means_in_diffusers(train, tmp_path, capsys):
    assert parse_config(["--snr_gamma=5"]).loss_weighting == "min_snr"
    assert parse_config(["--snr-gamma", "3", "--loss_weighting=min_snr"]).min_snr_gamma == 3
    (tmp_path / "c.yaml").write_text("dataset_name: digits\nsnr_gamma: 4\n")
    config = parse_config([f"--config={tmp_path / 'c.yaml'}"])
    assert (config.loss_weighting, config.min_snr_gamma) == ("min_snr", 4)
    (tmp_path / "c.yaml").write_text("dataset_name: digits\nsnr_gamma: null\n")  # as diffusers dumps its default
    assert parse_config([f"--config={tmp_path / 'c.yaml'}"]).loss_weighting == "none"
    train(tmp_path / "run", "--snr_gamma=4", "--dry_run")
    assert "! loss weights  | none" in (shown := capsys.readouterr().err)
    assert "min_snr (gamma 4)" in shown


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("resolution: 8\nseed: 1\nresolution: 16\n", [], "FILE: resolution is given twice, in line 1 and in line 3"),
        ("snr_gamma: 5\nmin_snr_gamma: 4\n", [], "FILE: snr_gamma and min_snr_gamma are one option"),
        ("learning_rate: .nan\n", [], "--learning_rate nan: must be a finite number (in FILE)"),
        ("ema_power: 0.5\n", [], "--ema_power has no effect without --ema_warmup (in FILE)"),
        ("timestep_sampler: typo\n", [], "(in FILE)"),
        ("balance: true\n", [], "--balance: is an option of train_conditional.py (in FILE)"),
        ("seed: 1\n", ["--balance"], "--balance: is an option of train_conditional.py"),
        ("learning_rate: -1\n", ["--learning_rate=-2"], "--learning_rate -2.0: must be greater than 0"),
        ("ddpm_num_steps: 10\n", ["--ddpm_num_inference_steps=20"], "more than the 10 steps"),
        ('output_dir: "a\\0b"\n', [], "--output_dir: contains the character NUL (in FILE)"),
        ("hub_token: [hf_secret]\n", [], "hub_token must be a single value"),
        ("resolution: 2026-13-45\n", [], "is not valid YAML"),
        ("? [a]\n: b\n", [], "is not valid YAML"),
        ("seed: 1\n\tresolution: 8\n", [], "is not valid YAML (line 2: found character '\\t' that cannot start any"),
    ],
)
def test_the_file_is_blamed_for_what_is_in_it(tmp_path, text, flags, message):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        parse_config([f"--config={file}", *flags])
    assert message.replace("FILE", str(file)) in str(caught.value)
    assert ("(in " in str(caught.value)) == ("(in FILE" in message)
    assert "secret" not in str(caught.value)


def test_a_configuration_that_is_nearly_named_is_offered(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match="config/digits.yaml: cannot be read .*; did you mean configs/digits.yaml?"):
        parse_config(["--config=config/digits.yaml"])


def test_a_name_that_cannot_be_read_is_said():
    with pytest.raises(UserError, match="--output_dir: is not valid UTF-8"):
        parse_config(["--output_dir=\udcd0\udcb3"])  # under LC_ALL=C PYTHONUTF8=0


def test_a_flag_corrects_the_file(tmp_path):
    (tmp_path / "c.yaml").write_text("dataset_name: digits\nlearning_rate: nan\n")
    assert parse_config([f"--config={tmp_path / 'c.yaml'}", "--learning_rate=1"]).learning_rate == 1


def test_a_home_folder_is_meant_wherever_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text("train_data_dir: ~/photos\n")
    config = parse_config(["--config=~/c.yaml", "--output_dir=~/run", "--cache_dir", "~"])
    assert config.train_data_dir == f"{tmp_path}/photos"
    assert (config.output_dir, config.cache_dir) == (f"{tmp_path}/run", str(tmp_path))
    assert parse_generation(["~/run", "--output_dir=~/x"]).output_dir == f"{tmp_path}/x"
    assert parse_generation(["--prompt=a cat ~/ a dog"]).prompt == ["a cat ~/ a dog"]


@pytest.mark.parametrize(
    "flag", ["--hub_tokn=hf_secret", "--hub_tokn hf_secret", "-hub_token=hf_secret", "tokn=hf_secret"]
)
def test_values_of_unknown_flags_are_not_echoed(flag):
    with pytest.raises(UserError) as caught:
        parse_config(flag.split())
    assert "unknown flag" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_seeds_have_a_limit():
    for seeds in ("0-99999999999", "0-1999999,5000000"):
        with pytest.raises(
            UserError, match=f"--seeds {seeds}: that is .* seeds; one call makes at most 2,000,000 images"
        ):
            parse_generation([f"--seeds={seeds}"])


# What a script does with its streams, its mistakes and its signals, with the real thing beside it.
SCRIPT = """
import signal, sys, threading
from common.errors import run_script
def main():
    if "print" in sys.argv:
        for number in range(20_000):
            print("line", number)
        print("done", file=sys.stderr)
    if "open" in sys.argv:
        with open(sys.argv[2], "w") as file:
            print("for the terminal", flush=True)
            file.write("for the file")
    if "fail" in sys.argv:
        raise KeyError("hf_abcdefghijklmnopqrstuvwxyz")
    if "thread" in sys.argv:
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
    if "hangup" in sys.argv:
        print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)
run_script(main)
"""


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run SCRIPT as $RUN in a shell."""
    run = f"{sys.executable} -c '{SCRIPT}'"
    return subprocess.run(
        ["bash", "-c", command.replace("RUN", run) + "; exit ${PIPESTATUS[0]}"],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip


def test_a_pipe_that_is_closed_ends_nothing():
    done = shell("RUN print | head -1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "line 0\n", "done\n")


def test_what_a_full_disk_does_not_take_is_shown_elsewhere():
    done = shell("RUN print > /dev/full")
    assert done.returncode == 0
    assert "standard output cannot be written (No space left on device)" in done.stderr.splitlines()[0]
    assert done.stderr.splitlines()[1:-1] == [f"line {number}" for number in range(20_000)]
    done = shell("RUN print > /dev/full 2>&1")
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_streams_are_nobody_elses(tmp_path):
    done = shell(f"RUN open {tmp_path / 'file'} >&-")
    assert (done.returncode, done.stderr) == (0, "for the terminal\n")
    assert (tmp_path / "file").read_text() == "for the file"
    assert shell(f"RUN open {tmp_path / 'file'} >&- 2>&- <&-").returncode == 0
    assert (tmp_path / "file").read_text() == "for the file"


def test_what_nobody_expected_is_one_line():
    done = shell("RUN fail")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "error: KeyError in common/errors.py, line" in done.stderr
    assert "'hf_***'" in done.stderr
    shown = shell("RUN fail", EXACT_DDPM_DEBUG="1").stderr
    assert "Traceback" in shown
    assert "hf_abc" not in shown
    shown = shell("RUN thread").stderr
    assert "a thread has ended: ZeroDivisionError" in shown
    assert shown.count("\n") == 1


def test_a_hang_up_that_is_ignored_stays_so():
    assert shell("RUN hangup").stdout == "False\n"
    assert shell("trap '' HUP; RUN hangup").stdout == "True\n"


def test_a_hang_up_saves(train, tmp_path, monkeypatch):
    """As SIGTERM does, of which tests/test_interruption.py has the rest."""
    before = {number: signal.getsignal(number) for number in interruption.STOPS}
    interruption.catch_signals()
    try:
        monkeypatch.setattr("training.tracking.Tracking.log", lambda *_: os.kill(os.getpid(), signal.SIGHUP))
        with pytest.raises(interruption.Interrupted, match="SIGHUP: saved at step [12] "):
            train(tmp_path / "run", "--max_train_steps=9")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert list((tmp_path / "run").glob("checkpoint-[12]"))


def test_the_login_is_asked_for_before_the_training(tmp_path, monkeypatch, caplog):
    def refuse(self):
        raise publish.HfHubHTTPError(
            "no", response=publish.httpx.Response(status, request=publish.httpx.Request("GET", "http://hub"))
        )

    config = TrainingConfig(output_dir=str(tmp_path / "run"), push_to_hub=True)
    monkeypatch.setattr(publish, "get_token", lambda: None)
    with pytest.raises(UserError, match="nobody is logged in"):
        publish.check_push(config)
    monkeypatch.setattr(publish, "get_token", lambda: "hf_secret")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        publish.check_push(config)  # as it is in these tests
    monkeypatch.setattr(publish.HfApi, "whoami", refuse)
    status = 401
    with pytest.raises(UserError, match="the Hub rejects the token"):
        publish.check_push(config)
    status = 503
    publish.check_push(config)
    assert "could not be checked" in caplog.text
    assert "secret" not in caplog.text


def test_a_driver_that_torch_cannot_use_is_no_reason_to_train_on_the_cpu(tmp_path, monkeypatch):
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27 21:21:55 UTC 2021\n")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    common.processes.check_cuda()
    monkeypatch.setattr(common.processes, "NVIDIA_DRIVER", driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match="an NVIDIA driver .470.82.01., but torch .* cannot use it"):
        common.processes.start_processes(SimpleNamespace(mixed_precision=None, allow_tf32=False))
    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("CUDA_VISIBLE_DEVICES", "-1"), ("ACCELERATE_USE_CPU", "true")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            common.processes.check_cuda()


def test_processes_that_were_told_to_use_the_cpu_meet_again_without_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda _: iter([(torch.distributed.HashStore(), 0, 2)]))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    backends = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **_: backends.append(backend))
    common.processes._join_again(2)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    common.processes._join_again(2)
    assert backends == ["nccl", "gloo"]


def test_a_port_in_use_is_one_line(monkeypatch):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        for name, value in (where | ranks).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=f"cannot meet at 127.0.0.1:{where['MASTER_PORT']} .*name another one"):
            common.processes.start_processes(SimpleNamespace(mixed_precision=None, allow_tf32=False))
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("name", "is_folder"),
    [("logs", False), ("samples", False), ("unet", False), ("metrics.jsonl", True), (".lock", True)],
)
def test_what_stands_where_a_run_writes_is_named(name, is_folder, train, tmp_path):
    path = tmp_path / "run" / name
    path.mkdir(parents=True) if is_folder else (path.parent.mkdir(), path.touch())
    kind = "a folder where a run has a file" if is_folder else "a file where a run has a folder"
    with pytest.raises(UserError, match=f"{name} is {kind}"):
        train(tmp_path / "run", "--max_train_steps=1")


@pytest.mark.parametrize("folder", [".", "..", "../logs", "/tmp/logs"])
def test_curves_stay_in_the_run(folder):
    with pytest.raises(UserError, match="must name a folder inside --output_dir"):
        parse_config([f"--logging_dir={folder}"])


@pytest.fixture(scope="module")
def short_run(tiny_flags, tmp_path_factory) -> Path:
    from conftest import run_training

    return run_training(tmp_path_factory.mktemp("runs") / "шесть шагов", [*tiny_flags, "--max_train_steps=2"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ddpm_num_steps", "many"),
        ("ddpm_num_steps", -5),
        ("learning_rate", [1]),
        ("prediction_type", "noise"),
        ("seed", {}),
    ],
)
def test_a_configuration_edited_by_hand_is_checked(name, value, short_run, tmp_path):
    values = yaml.safe_load((short_run / "config.yaml").read_text())
    assert RunFolder(short_run).read_config().ddpm_num_steps == 1000
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values | {name: value}))
    with pytest.raises(UserError, match=f"config.yaml is not a valid run configuration .*{name}"):
        RunFolder(tmp_path).read_config()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values | {"of another version": 1}))
    assert RunFolder(tmp_path).read_config() == RunFolder(short_run).read_config()


def test_a_line_of_metrics_that_is_damaged_is_left_out(short_run, train, tmp_path):
    import shutil

    run = shutil.copytree(short_run, tmp_path / "run")
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    (run / "metrics.jsonl").write_bytes(b"\n".join([lines[0], b'{"step": "\xff\xfe', b"3", b"[]", lines[1]]) + b"\n")
    assert [line["step"] for line in RunFolder(run).read_metrics()] == [1, 2]
    train(run, "--max_train_steps=3")
    assert [line["step"] for line in metrics_of(run)] == [1, 2, 3]


# Of the thread in which TensorBoard writes; `run_script` makes a line of it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("until", [0, 3])
def test_a_full_disk_ends_the_curves_and_not_the_run(until, train, tmp_path, monkeypatch, capsys):
    from tensorboard.summary.writer.record_writer import RecordWriter

    original, writes = RecordWriter.write, []

    def write(writer: RecordWriter, data: bytes) -> None:
        writes.append(data)
        if len(writes) > until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(writer, data)

    monkeypatch.setattr(RecordWriter, "write", write)
    run = train(tmp_path / "run", "--max_train_steps=6", "--logger=tensorboard")
    assert len(metrics_of(run)) == 6
    said = capsys.readouterr().err
    assert re.search("Curves are (not|no longer) logged to tensorboard: No space left on device", said)


def test_a_file_that_is_forbidden_is_named(capsys):
    """Raised here, since nothing is forbidden to root."""

    def main():
        raise PermissionError(13, "Permission denied", "runs/of/somebody.safetensors")

    with pytest.raises(SystemExit) as end:
        run_script(main)
    assert end.value.code == 2
    assert "error: runs/of/somebody.safetensors: no permission to use this file or folder" in capsys.readouterr().err
