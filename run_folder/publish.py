"""What leaves a run folder: the model card, and the push to the Hugging Face Hub.

A push comes last and must not be what loses a run. What passes is tried again; whatever else goes wrong becomes one
warning that names the folder the run is safe in and the command that pushes it later.
"""

from __future__ import annotations

import csv
import json
import logging
import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from huggingface_hub import HfApi, ModelCard, ModelCardData, get_session, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import HFValidationError, httpx, validate_repo_id

from common.errors import UserError
from common.files import write_atomically
from conditions.guidance import CONDITION_FILE
from run_folder.config import (
    ConditioningOptions,
    DataOptions,
    DiffusionOptions,
    EMAOptions,
    LengthOptions,
    NetworkOptions,
    OptimizerOptions,
)
from run_folder.folder import METRICS_FILE

if TYPE_CHECKING:
    from run_folder.config import TrainingConfig
    from training.setup import TrainingState

logger = logging.getLogger(__name__)

# An allow-list: a checkpoint with its optimiser is several times the model, and of no use to who loads the model.
UPLOADED = [
    "model_index.json",
    "unet/**",
    "scheduler/**",
    "text_encoder/**",
    "tokenizer/**",
    "conditional_pipeline.py",
    CONDITION_FILE,
    "README.md",
    "config.yaml",
    "metrics.jsonl",
    "samples/*.png",
    "evaluation_results.csv",
    "best_scores.csv",
    "*_vs_*.png",
]
# The Hub matches a whole path with fnmatch, whose * crosses slashes: these hold the two patterns above to one folder.
NOT_UPLOADED = ["*/*_vs_*.png", "samples/*/*"]

# The results stand between these two headings of the card.
EVALUATION, AFTER_EVALUATION = "## Evaluation", "## Repeat this run"

TIMEOUT = 120.0  # seconds without a byte; the Hub's client waits for ever by itself
FIRST_WAIT = 2.0  # seconds, doubled after every attempt
PATIENCE = 600.0  # seconds after which no attempt is begun: the upload of large files retries for minutes by itself


def write_model_card(
    output_dir: Path,
    *,
    repo_id: str,
    dataset_name: str,
    num_inference_steps: int,
    hyper_parameters: dict[str, object],
    step: int,
    weights: str,
    grid: Path | None,
    metrics: dict[str, float],
    tags: list[str],
    condition: dict[str, object] | None = None,
) -> Path:
    """Write `output_dir/README.md` for the weights of `step`, over the card of an earlier step if there is one."""
    # diffusers' load_or_create_model_card asks the Hub first: it fails for a folder, waits half a minute where there is
    # no network, and returns the card of an earlier push as it was. huggingface_hub's own classes need no network.
    data = ModelCardData(library_name="diffusers", tags=tags, datasets=hub_datasets(dataset_name))
    script = "train_unconditional.py" if condition is None else "train_conditional.py"
    data_set = dataset_name if data.datasets else Path(dataset_name).name
    sections = [
        f"# {repo_id.split('/')[-1]}",
        f"A denoising diffusion probabilistic model (DDPM) of `{data_set}`{told(condition)}: "
        f"the {weights} weights of step {step}.",
        f"![Samples of step {step}](samples/{quote(grid.name)})" if grid else "",
        f"## Usage\n\n{usage(repo_id, num_inference_steps, condition)}",
        f"## Hyper-parameters\n\n{table('parameter', hyper_parameters)}",
        f"## Metrics\n\n{table('metric', metrics)}" if metrics else "",
        evaluation_section(output_dir),
        f"{AFTER_EVALUATION}\n\n```bash\n"
        f"python {script} --config THIS_FOLDER/config.yaml --output_dir ANOTHER_FOLDER\n```",
    ]
    body = "\n\n".join(section for section in sections if section)
    content = scrub(f"---\n{data.to_yaml()}\n---\n\n{body}\n", str(hyper_parameters.get("hub_token") or ""))
    path = output_dir / "README.md"
    write_atomically(path, str(ModelCard(content)))
    return path


def evaluation_section(output_dir: Path) -> str:
    """The best of every metric and method that evaluate.py has found for this run, with its curves, if it has run."""
    path = output_dir / "best_scores.csv"
    if not path.exists():
        return ""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = ("metric", "best", "step", "weights", "sampler", "steps", "settings", "reference")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in rows:
        row["best"] = f"{float(row['best']):.5g}"
        lines.append("| " + " | ".join(cell(row[name]) for name in columns) + " |")
    drawn = [name for name in ("FID", "FD") if (output_dir / f"{name}_vs_TrainingSteps.png").exists()]
    curves = "".join(f"\n\n![{name}]({name}_vs_TrainingSteps.png)" for name in drawn)
    return "\n".join([EVALUATION, "", *lines]) + curves


def update_evaluation(output_dir: Path) -> None:
    """Put the results into the card of a run, if it has one."""
    card, section = output_dir / "README.md", evaluation_section(output_dir)
    if not card.is_file() or not section:
        return
    before, separator, after = card.read_text(encoding="utf-8").partition(AFTER_EVALUATION)
    if separator:
        before = before.partition(EVALUATION)[0]
        write_atomically(card, f"{before}{section}\n\n{separator}{after}")


def hub_datasets(dataset_name: str) -> list[str] | None:
    """The data set as the card's metadata lists it, or None if it is a folder rather than a repository of the Hub."""
    is_hub_id = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", dataset_name) and not Path(dataset_name).exists()
    return [dataset_name] if is_hub_id else None


def told(condition: dict[str, object] | None) -> str:
    """What the network is told of each image besides its timestep."""
    if condition is None:
        return ""
    if condition["condition"] == "class":
        return f" by class ({', '.join(condition['class_names'])})"
    return f" by text, as {Path(condition['text_encoder']).name} encodes it"


def usage(repo_id: str, num_inference_steps: int, condition: dict[str, object] | None = None) -> str:
    if condition is None:
        kind, trust, asked = "DDPMPipeline", "", "batch_size=4"
    else:
        kind, trust = "DiffusionPipeline", ", trust_remote_code=True"
        by_class = condition["condition"] == "class"
        some = condition["class_names"][:2] if by_class else condition["prompts"][:2]
        asked = f"{json.dumps(some)}, guidance_scale=2.0"
    return f"""\
```python
from diffusers import {kind}

pipeline = {kind}.{load_call(repo_id)}{trust})  # or this folder; .to("cuda") with a GPU
images = pipeline({asked}, num_inference_steps={num_inference_steps}).images  # ancestral sampling, as trained
images[0].save("sample.png")
```"""


def load_call(repo_id: str) -> str:
    return f'from_pretrained("{repo_id}"'


def table(heading: str, values: dict[str, object]) -> str:
    """A Markdown table of names and values, without the token."""
    rows = [f"| {heading} | value |", "|---|---|"]
    rows += [f"| `{name}` | {cell(value)} |" for name, value in values.items() if name != "hub_token"]
    return "\n".join(rows)


def cell(value: object) -> str:
    """A value as code, so that Markdown leaves its characters alone; a bar would end the cell even there."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return "`" + " ".join(text.split()).replace("`", "'").replace("|", r"\|") + "`" if text.strip() else ""


def push_to_hub(
    output_dir: Path, *, repo_id: str, token: str | None, private: bool | None, step: int, attempts: int = 5
) -> str | None:
    """Push the run to the Hub: its address there, or None after one warning. It never raises."""
    start = time.monotonic()
    attempt = 0
    while True:
        attempt += 1
        try:
            token = (token or get_token() or "").strip()
            return upload(output_dir, repo_id, token, private, step)
        except Exception as error:
            reason = scrub(" ".join(f"{type(error).__name__}: {error}".split()), token)[:500].rstrip(".")
            is_last = attempt >= attempts or time.monotonic() - start > PATIENCE
            if is_last or not is_transient(error):
                logger.warning(
                    "The push to the Hub failed, the run is safe in %s: %s. Push it later with: %s",
                    Path(output_dir).resolve(),
                    reason,
                    upload_command(output_dir, repo_id, private),
                )
                return None
            wait = FIRST_WAIT * 2 ** (attempt - 1)
            logger.info("Push to the Hub: attempt %d of %d failed, next in %g s: %s", attempt, attempts, wait, reason)
            time.sleep(wait)


def upload(output_dir: Path, repo_id: str, token: str, private: bool | None, step: int) -> str:
    """Create the repository unless it is there, and commit what the allow-list names."""
    get_session().timeout = TIMEOUT
    api = HfApi(token=token or True)  # True: without any token the library says at once how to log in
    repository = api.create_repo(repo_id, private=private, exist_ok=True)
    name_repository(output_dir / "README.md", repo_id, repository.repo_id)
    api.upload_folder(
        repo_id=repository.repo_id,
        folder_path=output_dir,
        allow_patterns=UPLOADED,
        ignore_patterns=list(NOT_UPLOADED),  # a copy: the library appends to it
        commit_message=f"Weights of step {step}",
    )
    return str(repository)


def name_repository(card: Path, repo_id: str, full_repo_id: str) -> None:
    """Only the Hub knows the namespace of an id given without one; the card must load the model by its full id."""
    if repo_id != full_repo_id and card.is_file():
        text = card.read_text(encoding="utf-8")
        write_atomically(card, text.replace(load_call(repo_id), load_call(full_repo_id)))


def is_transient(error: BaseException) -> bool:
    """Whether the same push may succeed in a moment: the Hub is busy or broken, or the connection was."""
    for cause in causes(error):
        status = status_code(cause)
        if status is not None:
            return status >= 500 or status in (408, 429)
        if isinstance(cause, OfflineModeIsEnabled):
            return False
        # JSON that does not parse is the error page of something between here and the Hub.
        if isinstance(cause, httpx.TransportError | ConnectionError | TimeoutError | json.JSONDecodeError):
            return True
    return False


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those behind it: the upload of a large file wraps the error that tells the status."""
    while error is not None:
        yield error
        error = error.__cause__


def status_code(error: BaseException) -> int | None:
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code
    # hf_xet, which uploads the large files, tells the status in its text only.
    found = re.search(r"HTTP status (?:client|server) error \((\d{3})", str(error))
    return int(found[1]) if found else None


def scrub(text: str, token: str | None) -> str:
    return text.replace(token, "***") if token else text


def upload_command(output_dir: Path, repo_id: str, private: bool | None) -> str:
    """The command line that makes the same push, whatever folder it is typed in."""
    command = ["hf", "upload", repo_id, str(Path(output_dir).resolve())]
    command += ["--private"] if private else []
    for option, patterns in (("--include", UPLOADED), ("--exclude", NOT_UPLOADED)):
        for pattern in patterns:
            command += [option, pattern]
    return shlex.join(command)


def check_push(config: TrainingConfig) -> None:
    """Raise before the training if the push could never succeed."""
    if config.push_to_hub:
        repo_id = config.hub_model_id or Path(config.output_dir).resolve().name
        try:
            validate_repo_id(repo_id)
        except HFValidationError as error:
            raise UserError(f"--hub_model_id {repo_id}: not a name that the Hub accepts ({error})") from error


def hyper_parameters(config: TrainingConfig) -> dict[str, object]:
    """What was trained and how; where it was stored and who pushed it is nobody's business."""
    described = [DataOptions, NetworkOptions, DiffusionOptions, OptimizerOptions, EMAOptions, LengthOptions]
    described += [ConditioningOptions] if isinstance(config, ConditioningOptions) else []
    names = [entry.name for section in described for entry in fields(section)] + ["mixed_precision", "allow_tf32"]
    private = ("cache_dir", "train_data_dir", "dataloader_num_workers", "in_memory_limit_gb", "text_encoder")
    values = {name: getattr(config, name) for name in names if name not in private}
    return {name: value for name, value in values.items() if value is not None and value != []}


def publish(config: TrainingConfig, state: TrainingState) -> None:
    """Write the card of a finished run and, if asked, push the run."""
    output_dir = Path(config.output_dir)
    repo_id = config.hub_model_id or output_dir.resolve().name
    write_model_card(
        output_dir,
        repo_id=repo_id,
        dataset_name=config.dataset_name or config.train_data_dir,
        num_inference_steps=config.ddpm_num_steps,
        hyper_parameters=hyper_parameters(config),
        step=state.step,
        weights="raw" if state.update.ema is None else "moving-average",
        grid=newest_grid(output_dir),
        metrics=last_metrics(output_dir),
        tags=["diffusers", "diffusers-training", task(state.condition)],
        condition=state.condition,
    )
    if config.push_to_hub:
        address = push_to_hub(
            output_dir,
            repo_id=repo_id,
            token=config.hub_token,
            private=config.hub_private_repo or None,
            step=state.step,
        )
        if address is not None:
            logger.info("Pushed to %s", address)


def task(condition: dict[str, object] | None) -> str:
    """The tag of the Hub."""
    if condition is None:
        return "unconditional-image-generation"
    return "text-to-image" if condition["condition"] == "text" else "class-conditional-image-generation"


def newest_grid(output_dir: Path) -> Path | None:
    grids = (output_dir / "samples").glob("step-*.png")
    return max(grids, key=lambda path: int(path.stem.removeprefix("step-")), default=None)


def last_metrics(output_dir: Path) -> dict[str, float]:
    lines = (output_dir / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    return json.loads(lines[-1]) if lines else {}
