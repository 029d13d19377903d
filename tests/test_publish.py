"""The model card, and pushes by a real client to a Hub on this machine."""

import errno
import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import USER, HubServer
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import filter_repo_objects, httpx

from run_folder import publish
from run_folder.config import TrainingConfig

ROOT = Path(publish.__file__).parents[1]
TOKEN = "hf_aSecretThatMustNotLeak"
TAGS = ["diffusers", "diffusers-training", "unconditional-image-generation"]
PUSHED = [
    "README.md",
    "best_scores.csv",
    "config.yaml",
    "evaluation_results.csv",
    "fid_vs_step.png",
    "metrics.jsonl",
    "model_index.json",
    "samples/step-5.png",
    "scheduler/scheduler_config.json",
    "unet/config.json",
    "unet/diffusion_pytorch_model.safetensors",
]
KEPT = [
    "README.md.tmp",
    "checkpoint-5/config.yaml",
    "checkpoint-5/loss_vs_step.png",
    "checkpoint-5/optimizer.safetensors",
    "checkpoint-5/samples/step-5.png",
    "checkpoint-5/unet/diffusion_pytorch_model.safetensors",
    "checkpoint-5/unet_ema/config.json",
    "logs/events.out.tfevents.1",
    "logs/fid_vs_step.png",
    "optimizer.bin",
    "samples/all/0.png",
    "train.log",
]

# huggingface_hub reads its environment when it is imported, so a push runs in a process of its own. No wait is waited
# out, neither of the push nor of the client below it.
DRIVER = """
import json, logging, sys, time

waits, warnings = [], []
time.sleep = waits.append

class Listener(logging.Handler):
    def emit(self, record):
        warnings.append(record.getMessage())

from run_folder import publish
from run_folder.config import TrainingConfig

logging.basicConfig(level=logging.INFO)
for name in ("", "huggingface_hub"):
    logging.getLogger(name).addHandler(Listener(logging.WARNING))
arguments = json.loads(sys.argv[1])
publish.TIMEOUT, step = arguments.pop("timeout"), arguments.pop("step")
url = publish.push_to_hub(TrainingConfig(**arguments), step)
print(json.dumps({"url": url, "waits": waits, "warnings": warnings}))
"""


@pytest.fixture
def hub():
    with HubServer(TOKEN) as server:
        yield server


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder, as far as a push can tell: bytes that do not compress."""
    folder = tmp_path / "my run"
    for number, name in enumerate(PUSHED + KEPT):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.Random(number).randbytes(200_000 if name.endswith(".safetensors") else 100))
    (folder / "best_scores.csv").write_text(
        "metric,best,step,weights,sampler,steps,settings,reference\nfid@10000,3.17251,5,ema,ddpm,1000,,cifar10[train]\n"
    )
    (folder / "metrics.jsonl").write_text('{"fid@10000": 20.5}\n{"fid@10000": 12.25}\n')
    write_card(folder)
    return folder


def write_card(folder: Path, step: int = 5, **options: object) -> Path:
    given = {"hub_model_id": "my-run", "dataset_name": "uoft-cs/cifar10", **options}
    return publish.write_model_card(TrainingConfig(output_dir=str(folder), **given), step, "EMA")


def environment(hub: HubServer, tmp_path: Path, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return {
        **inherited,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf_home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def execute(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)


def push(hub: HubServer, run: Path, environment_variables: dict[str, str] | None = None, **changes: object) -> dict:
    """Push in a process of its own, and check what holds for every push: it ends well and the token stays secret."""
    arguments = {"hub_model_id": "my-run", "hub_token": TOKEN, "step": 5, "timeout": 60.0, **changes}
    command = [sys.executable, "-c", DRIVER, json.dumps({"output_dir": str(run), **arguments})]
    process = execute(command, environment(hub, run.parent, **(environment_variables or {})))
    assert process.returncode == 0, process.stderr
    assert "hf_aSecret" not in process.stdout + process.stderr
    assert TOKEN not in "".join(request.path for request in hub.requests)
    assert not [path for path in run.parent.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    return json.loads(process.stdout.splitlines()[-1])


def check_failed(result: dict, run: Path) -> None:
    assert result["url"] is None
    assert len(result["warnings"]) == 1
    assert str(run) in result["warnings"][0]
    assert "hf upload my-run" in result["warnings"][0]


def check_pushed(hub: HubServer, run: Path) -> None:
    files = hub.repositories[f"{USER}/my-run"].files
    assert sorted(files) == PUSHED
    assert all(content == (run / path).read_bytes() for path, content in files.items())


def test_allow_list_holds_back_checkpoints():
    names = sorted(PUSHED + KEPT)
    matched = filter_repo_objects(names, allow_patterns=publish.UPLOADED, ignore_patterns=publish.NOT_UPLOADED)
    assert list(matched) == PUSHED


def test_push_delivers_the_allow_list(hub: HubServer, run: Path):
    # As a shell's $(cat file) or a secret store may hand it over.
    result = push(hub, run, hub_token=f"{TOKEN}\n", hub_private_repo=True)
    assert result == {"url": f"{hub.url}/{USER}/my-run", "waits": [], "warnings": []}
    check_pushed(hub, run)
    repository = hub.repositories[f"{USER}/my-run"]
    assert repository.private
    assert repository.commits == ["Weights of step 5"]
    # Xet storage must never see the token of the Hub.
    storage = {request.authorization for request in hub.requests if request.path.startswith(("/v1/", "/v2/"))}
    assert storage == {"Bearer xet-token"}
    # The id was given without the namespace, which only the Hub knows.
    assert f'from_pretrained("{USER}/my-run")' in repository.files["README.md"].decode()


def test_second_push_updates_the_repository(hub: HubServer, run: Path):
    push(hub, run, hub_model_id=f"{USER}/my-run")
    write_card(run, hub_model_id=f"{USER}/my-run", step=9)
    (run / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(random.Random(9).randbytes(300_000))
    result = push(hub, run, hub_model_id=f"{USER}/my-run", step=9)
    assert result == {"url": f"{hub.url}/{USER}/my-run", "waits": [], "warnings": []}
    check_pushed(hub, run)
    assert hub.repositories[f"{USER}/my-run"].commits == ["Weights of step 5", "Weights of step 9"]


def test_login_is_the_default_token(hub: HubServer, run: Path):
    result = push(hub, run, {"HF_TOKEN": TOKEN, "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}, hub_token=None)
    assert result["url"] == f"{hub.url}/{USER}/my-run"


@pytest.mark.parametrize("fault", ["two 503", "error page", "rate limit", "dropped"])
def test_transient_failure_is_tried_again(hub: HubServer, run: Path, fault: str):
    if fault == "two 503":
        hub.fail_next(2, status=503, path="/repos/create")
    elif fault == "error page":
        hub.fail_next(1, status=502, path="/validate-yaml")
    elif fault == "rate limit":
        hub.fail_next(1, status=429, path="/repos/create")
    else:
        hub.drop_next(1, path="/validate-yaml")
    result = push(hub, run)
    assert result["url"] == f"{hub.url}/{USER}/my-run"
    assert result["waits"] == ([2.0, 4.0] if fault == "two 503" else [2.0])
    assert result["warnings"] == []
    check_pushed(hub, run)


def test_silence_is_a_transient_failure(hub: HubServer, run: Path):
    hub.stall_next(1, path="/repos/create")
    result = push(hub, run, timeout=1.0)
    assert result["url"] == f"{hub.url}/{USER}/my-run"
    assert result["waits"]


def test_without_xet_a_dropped_upload_and_commit_are_tried_again(hub: HubServer, run: Path):
    hub.drop_next(1, path="/lfs/", method="PUT")
    hub.drop_next(1, path="/commit/")
    result = push(hub, run, {"HF_HUB_DISABLE_XET": "1"})
    assert result["url"] == f"{hub.url}/{USER}/my-run"
    check_pushed(hub, run)
    assert "PUT" in {request.method for request in hub.requests}


@pytest.mark.parametrize("fault", ["wrong token", "403", "404", "403 from Xet"])
def test_permanent_failure_is_not_tried_again(hub: HubServer, run: Path, fault: str):
    if fault == "wrong token":
        hub.token = "hf_another"
    elif fault == "403":
        hub.fail_next(9, status=403, path="/repos/create")
    elif fault == "404":
        hub.fail_next(9, status=404, path="/preupload/")
    else:
        hub.fail_next(9, status=403, path="/xet-write-token/")
    result = push(hub, run)
    check_failed(result, run)
    assert result["waits"] == []
    assert len([request for request in hub.requests if request.path == "/api/repos/create"]) == 1
    assert fault == "wrong token" or fault[:3] in result["warnings"][0]


def test_offline_push_warns_once(hub: HubServer, run: Path):
    result = push(hub, run, {"HF_HUB_OFFLINE": "1"})
    check_failed(result, run)
    assert result["waits"] == []
    assert hub.requests == []


def test_push_without_a_token_says_how_to_log_in(hub: HubServer, run: Path):
    result = push(hub, run, hub_token=None)
    check_failed(result, run)
    assert "hf auth login" in result["warnings"][0]


def test_the_command_of_the_warning_makes_the_push(hub: HubServer, run: Path):
    warning = push(hub, run, {"HF_HUB_OFFLINE": "1"}, hub_private_repo=True)["warnings"][0]
    program, *arguments = shlex.split(warning[warning.index("hf upload") :])
    hf = Path(sys.executable).with_name(program)
    process = execute([str(hf), *arguments], environment(hub, run.parent, HF_TOKEN=TOKEN))
    assert process.returncode == 0, process.stderr
    check_pushed(hub, run)
    assert hub.repositories[f"{USER}/my-run"].private


def test_attempts_end(run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    waits: list[float] = []
    monkeypatch.setattr(publish.time, "sleep", waits.append)

    def fail(*arguments: object) -> None:
        raise ConnectionError(f"reset by peer, sent: Bearer {TOKEN}")

    monkeypatch.setattr(publish, "upload", fail)
    config = TrainingConfig(output_dir=str(run), hub_model_id="my-run", hub_token=TOKEN)
    assert publish.push_to_hub(config, step=5, attempts=4) is None
    assert waits == [2.0, 4.0, 8.0]
    assert TOKEN not in caplog.text
    assert [record.levelname for record in caplog.records].count("WARNING") == 1

    # A client that has retried by itself for long enough gets no further attempt.
    caplog.clear()
    waits.clear()
    monkeypatch.setattr(publish, "PATIENCE", -1.0)
    assert publish.push_to_hub(config, step=5) is None
    assert waits == []
    assert len(caplog.records) == 1


def http_error(status: int) -> HfHubHTTPError:
    return HfHubHTTPError("", response=httpx.Response(status, request=httpx.Request("GET", "http://hub")))


def wrapped(cause: Exception) -> Exception:
    error = RuntimeError("Error while uploading")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (http_error(500), True),
        (http_error(503), True),
        (http_error(408), True),
        (http_error(429), True),
        (http_error(400), False),
        (http_error(401), False),
        (http_error(403), False),
        (http_error(404), False),
        (wrapped(http_error(503)), True),
        (wrapped(http_error(403)), False),
        (httpx.ReadTimeout(""), True),
        (httpx.ConnectError(""), True),
        (ConnectionError("Network error: error sending request"), True),
        (ConnectionError("Request error: HTTP status client error (401 Unauthorized)"), False),
        (ConnectionError("Request error: HTTP status server error (503 Service Unavailable)"), True),
        (json.JSONDecodeError("", "", 0), True),
        (OfflineModeIsEnabled(), False),
        (ValueError("Invalid metadata in README.md."), False),
        (FileNotFoundError("run"), False),
    ],
    ids=repr,
)
def test_is_transient(error: Exception, transient: bool):
    assert publish.is_transient(error) is transient


def test_model_card(tmp_path: Path):
    (tmp_path / "README.md").write_text("---\ntags: [stale]\n---\n# An older card\n")
    (tmp_path / "metrics.jsonl").write_text('{"fid@10000": 20.5}\n{"fid@10000": 12.25}\n')
    (tmp_path / "samples").mkdir()
    for step in (5, 10):
        (tmp_path / "samples" / f"step-{step}.png").touch()
    path = write_card(
        tmp_path,
        hub_model_id="me/my-run",
        hub_token=TOKEN,
        dataset_config_name="a|b\nc`d",
        model_config_name_or_path=f"a name with {TOKEN} in it",
    )
    assert path == tmp_path / "README.md"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["README.md", "metrics.jsonl", "samples"]

    card = ModelCard.load(path)
    assert card.data.to_dict() == {
        "library_name": "diffusers", "license": "unknown", "tags": TAGS, "datasets": ["uoft-cs/cifar10"]
    }  # fmt: skip
    assert card.text.startswith("\n# my-run\n")
    assert "`uoft-cs/cifar10`: the EMA weights of step 5." in card.text
    assert "](samples/step-10.png)" in card.text
    assert 'DDPMPipeline.from_pretrained("me/my-run")' in card.text
    assert "num_inference_steps=1000" in card.text
    assert "| `learning_rate` | `0.0002` |" in card.text
    assert r"| `dataset_config_name` | `a\|b c'd` |" in card.text
    assert "| `fid@10000` | `12.25` |" in card.text
    assert "python train_unconditional.py --config THIS_FOLDER/config.yaml" in card.text
    assert "older card" not in str(card)
    assert "token` |" not in str(card)
    assert "| `model_config_name_or_path` | `a name with *** in it` |" in card.text
    assert TOKEN not in str(card)


def test_results_are_in_the_metadata(tmp_path: Path):
    path = write_card(tmp_path, dataset_name="uoft-cs/cifar10")
    assert ModelCard.load(path).data.eval_results is None
    row = "metric,best,step,weights,sampler,steps,settings,reference\nfid@10000,{},5,ema,ddpm,1000,,cifar10\n"
    for best in ("3.17", "3.15"):  # the later table replaces the one before
        (tmp_path / "best_scores.csv").write_text(row.format(best))
        publish.update_evaluation(tmp_path)
        (result,) = ModelCard.load(path).data.eval_results
        assert (result.metric_type, result.metric_value, result.dataset_name) == ("fid", float(best), "uoft-cs/cifar10")
        assert result.metric_name == "fid@10000, ddpm with 1000 steps, step 5"
    header, first = row.format("3.15").splitlines()
    others = ["fid@10000,5.1,5,ema,ddpm,1000,,\"cifar10[test], 10000 images\"",
              "fid@10000,9.5,5,raw,ddpm,1000,guidance_scale=2,cifar10"]  # fmt: skip
    (tmp_path / "best_scores.csv").write_text("\n".join([header, first, *others]))
    publish.update_evaluation(tmp_path)
    assert {result.metric_name: result.metric_value for result in ModelCard.load(path).data.eval_results} == {
        "fid@10000, ddpm with 1000 steps, step 5, ema weights, against cifar10": 3.15,
        "fid@10000, ddpm with 1000 steps, step 5, ema weights, against cifar10[test]": 5.1,
        "fid@10000, ddpm with 1000 steps, step 5, raw weights, guidance_scale=2, against cifar10": 9.5,
    }
    path.write_text(path.read_text().replace("library_name:", "- library_name:"))
    publish.update_evaluation(tmp_path)
    assert "| `fid@10000` | `3.15` |" in path.read_text()


@pytest.mark.parametrize(
    "table",
    [
        b"metric;best;step\nfid@10000;3,17;5\n",  # as a spreadsheet saves it
        b"metric,best,step,weights,sampler,steps,settings,reference\nfid@10000,3.17\n",
        b"metric,best,step,weights,sampler,steps,settings,reference\nfid@10000,bad,5,ema,ddpm,9,,cifar10\n",
        b"\xff\xfe",
    ],
)
def test_a_damaged_table_costs_no_card(tmp_path: Path, table: bytes):
    (tmp_path / "best_scores.csv").write_bytes(table)
    assert publish.EVALUATION not in write_card(tmp_path).read_text()


def test_a_card_that_cannot_be_written_costs_no_push(train, tmp_path: Path, monkeypatch, capsys):
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    pushed = []
    monkeypatch.setattr("training.setup.check_push", lambda config: None)
    monkeypatch.setattr(publish, "push_to_hub", lambda config, step: pushed.append(step))
    monkeypatch.setattr(publish, "write_atomically", full)
    run = train(tmp_path / "run", "--max_train_steps=1", "--push_to_hub")
    assert pushed == [1]
    assert f"The model card {run / 'README.md'} could not be written: No space left" in capsys.readouterr().err


def test_results_that_the_card_cannot_take_are_no_error(tmp_path: Path, caplog):
    write_card(tmp_path)
    (tmp_path / "best_scores.csv").write_text(
        "metric,best,step,weights,sampler,steps,settings,reference\nfid@10000,3.17,5,ema,ddpm,1000,,cifar10\n"
    )
    (tmp_path / "README.md").write_bytes(b"\xff\xfe")
    publish.update_evaluation(tmp_path)
    assert f"The results are not in the model card {tmp_path / 'README.md'}" in caplog.text


def test_the_card_tells_the_objective_and_no_paths(tmp_path: Path):
    network = tmp_path / "secret" / "network.json"
    network.parent.mkdir()
    network.write_text("{}")
    options = {"timestep_sampler": "saturating_bound", "loss_weighting": "min_snr"}
    card = write_card(tmp_path, model_config_name_or_path=str(network), **options).read_text()
    for row in ("timestep_sampler` | `saturating_bound", "saturating_bound_scale` | `100", "min_snr_gamma` | `5"):
        assert f"| `{row}` |" in card
    assert "edm_mean" not in card
    assert "secret" not in card
    assert "`network.json`" in card
    own = write_card(tmp_path, timestep_sampler="/home/me/secret/mine.py:Mine").read_text()
    assert "`mine.py:Mine`" in own
    assert "secret" not in own


def test_model_card_of_a_folder_without_samples_or_metrics(tmp_path: Path):
    card = ModelCard.load(write_card(tmp_path, dataset_name=None, train_data_dir="/home/me/secret/birds"))
    assert card.data.datasets is None
    assert "of `birds`" in card.text
    assert "secret" not in card.text
    assert "![" not in card.text
    assert "Metrics" not in card.text


@pytest.mark.parametrize("name", ["data/birds", "birds"])
def test_a_folder_is_not_listed_as_a_data_set_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    (tmp_path / "data" / "birds").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert publish.hub_datasets(name) is None


def test_the_snippet_of_the_card_loads_what_was_pushed(hub: HubServer, tmp_path: Path):
    import diffusers  # here, for the other tests start seconds sooner without it

    run = tmp_path / "run"
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (8,)}
    unet = diffusers.UNet2DModel(sample_size=4, layers_per_block=1, norm_num_groups=4, **blocks)
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()).save_pretrained(run)
    write_card(run)
    # Without Xet, whose blocks the server can unpack only if they are not compressed, as weights are.
    assert push(hub, run, {"HF_HUB_DISABLE_XET": "1"})["url"]

    card = hub.repositories[f"{USER}/my-run"].files["README.md"].decode()
    snippet = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1].replace("=1000", "=2")
    snippet = f"import os\nos.chdir({str(tmp_path)!r})\n{snippet}"
    process = execute([sys.executable, "-c", snippet], environment(hub, tmp_path))
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "sample.png").exists()


def check_ended(run: Path, output: str) -> None:
    """The weights are there and the token is nowhere."""
    assert TOKEN not in output
    assert not [path for path in run.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert (run / "unet" / "diffusion_pytorch_model.safetensors").exists()


def test_a_run_ends_with_a_push(hub: HubServer, tiny_flags: list[str], tmp_path: Path):
    """The training script, from flags to the Hub."""
    flags = [*tiny_flags, "--max_train_steps=2", f"--output_dir={tmp_path / 'good'}", "--push_to_hub"]
    # The test's Hub does not unpack what Xet compresses, as it does weights so near to zero.
    variables = environment(hub, tmp_path, HF_HUB_DISABLE_XET="1")
    done = execute([sys.executable, "train_unconditional.py", *flags, f"--hub_token={TOKEN}"], variables)
    assert done.returncode == 0, done.stderr
    check_ended(tmp_path / "good", done.stdout + done.stderr)
    assert "the run is safe in" not in done.stderr
    pushed = hub.repositories[f"{USER}/good"].files
    assert {"model_index.json", "README.md", "config.yaml", "metrics.jsonl", "samples/step-2.png"} <= set(pushed)
    assert not [name for name in pushed if "checkpoint" in name or "optimizer" in name]


def test_a_run_outlives_a_failed_push(train, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture):
    """It is offline here, as all tests are; the question before the training met a Hub that was busy."""

    def busy(api: HfApi) -> None:
        raise http_error(503)

    monkeypatch.setattr(publish.HfApi, "whoami", busy)
    train(tmp_path / "run", "--max_train_steps=2", "--push_to_hub", f"--hub_token={TOKEN}")
    shown = capsys.readouterr()
    check_ended(tmp_path / "run", shown.out + shown.err)
    assert "The Hub login could not be checked now" in shown.err
    assert "the run is safe in" in shown.err
