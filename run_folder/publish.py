"""Everything of a run that goes elsewhere: its model card, the push to the Hugging Face Hub, curves for trackers.

None of it may ever cost the run: a push that fails is tried again, and what does not work becomes one warning.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import quote

import numpy as np
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, get_session, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import HFValidationError, httpx, validate_repo_id
from yaml import YAMLError

from common.errors import UserError, reason_of, user_errors
from common.files import write_atomically
from common.options import values_of
from run_folder.config import is_own_sampler, trackers_of, without_idle
from run_folder.folder import (
    METHOD,
    PICTURES,
    PIPELINE_FOLDERS,
    PUSHED,
    SAMPLES,
    SCORES,
    RunFolder,
    as_number,
    is_of_few_images,
)

if TYPE_CHECKING:
    from PIL import Image

    from run_folder.config import TrainingConfig
    from training.setup import TrainingState

logger = logging.getLogger(__name__)

# An allow-list: a checkpoint with its optimiser is several times the model, and useless to whoever loads the model.
UPLOADED = [*PUSHED, *(f"{folder}/**" for folder in PIPELINE_FOLDERS), f"{SAMPLES}/*.png"]
# The Hub matches a whole path with fnmatch, whose * crosses slashes: these hold two of the patterns to one folder.
NOT_UPLOADED = [f"*/{PICTURES}", f"{SAMPLES}/*/*"]

# Set in the environment of an evaluation that a training has started, which must leave the trackers alone.
IN_TRAINING = "EXACT_DDPM_IN_TRAINING"

# The results stand between these two headings of the card.
EVALUATION, AFTER_EVALUATION = "## Evaluation", "## Repeat this run"

TIMEOUT = 120.0  # seconds without a byte; the Hub's client waits for ever by itself
FIRST_WAIT = 2.0  # seconds, doubled after every attempt
PATIENCE = 600.0  # seconds after which no attempt is begun: the upload of large files retries for minutes by itself


def publish(config: TrainingConfig, state: TrainingState) -> None:
    """Write the card of a finished run and, if asked, push the run."""
    weights = "raw" if state.update.ema is None else "moving-average"
    try:
        write_model_card(config, state.step, weights, state.condition)
    except Exception as error:
        card = RunFolder(config.output_dir).card_file
        logger.warning("The model card %s could not be written: %s", card, reason_of(error))
    if config.push_to_hub and (address := push_to_hub(config, state.step)):
        logger.info("Pushed to %s", address)


def repo_id_of(config: TrainingConfig) -> str:
    return config.hub_model_id or Path(config.output_dir).resolve().name


# The model card


def write_model_card(
    config: TrainingConfig, step: int, weights: str, condition: dict[str, object] | None = None
) -> Path:
    """Write the card for the weights of `step`, over that of an earlier step if there is one."""
    # diffusers' load_or_create_model_card asks the Hub first: it fails for a folder, waits half a minute where there is
    # no network, and returns the card of an earlier push as it was. huggingface_hub's own classes need no network.
    run, repo_id = RunFolder(config.output_dir), repo_id_of(config)
    data_set = config.dataset_name or config.train_data_dir
    task, conditioned_on, examples = describe_condition(condition)
    tags = ["diffusers", "diffusers-training", task]
    data = ModelCardData(
        library_name="diffusers", license=config.hub_license, tags=tags, datasets=hub_datasets(data_set)
    )
    add_results(data, run, repo_id.split("/")[-1])
    script = "train_unconditional.py" if condition is None else "train_conditional.py"
    grid, metrics = run.newest_grid(), run.read_metrics()
    # What was trained and how; where it was stored and who pushed it is nobody's business.
    values = without_idle(values_of(config, lambda facts: facts.saved and facts.on_card))
    parameters = {name: without_folder(value) for name, value in values.items() if value is not None and value != []}
    sections = [
        f"# {repo_id.split('/')[-1]}",
        f"A denoising diffusion probabilistic model (DDPM) of `{data_set if data.datasets else Path(data_set).name}`"
        f"{conditioned_on}: the {weights} weights of step {step}.",
        f"![Samples of step {step}]({SAMPLES}/{quote(grid.name)})" if grid else "",
        f"## Usage\n\n{refusal(config) or usage(repo_id, config.ddpm_num_steps, examples)}",
        f"## Hyper-parameters\n\n{table('parameter', parameters)}",
        f"## Metrics\n\n{table('metric', metrics[-1])}" if metrics else "",
        evaluation_section(run),
        f"{AFTER_EVALUATION}\n\n```bash\n"
        f"python {script} --config THIS_FOLDER/{run.config_file.name} --output_dir ANOTHER_FOLDER\n```",
    ]
    body = "\n\n".join(section for section in sections if section)
    content = scrub(f"---\n{data.to_yaml()}\n---\n\n{body}\n", config.hub_token)
    write_atomically(run.card_file, str(ModelCard(content)))
    return run.card_file


def without_folder(value: object) -> object:
    """Return the name alone of a file or folder on this machine, or of a class in a file, and other values as is."""
    if not isinstance(value, str):
        return value
    is_local = Path(value).exists() or (is_own_sampler(value) and "/" in value)
    return Path(value).name if is_local else value


def hub_datasets(dataset_name: str) -> list[str] | None:
    """Return the data set for the card's metadata, or None if it is a folder rather than a repository of the Hub."""
    is_hub_id = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", dataset_name) and not Path(dataset_name).exists()
    return [dataset_name] if is_hub_id else None


def describe_condition(condition: dict[str, object] | None) -> tuple[str, str, list[str]]:
    """Return the task as the Hub names it, the end of a sentence, and examples of classes or prompts."""
    if condition is None:
        return "unconditional-image-generation", "", []
    if condition["condition"] == "class":
        names = condition["class_names"]
        return "class-conditional-image-generation", f" by class ({', '.join(names)})", names[:2]
    encoder = Path(condition["text_encoder"]).name
    return "text-to-image", f" by text, as {encoder} encodes it", condition["prompts"][:2]


def usage(repo_id: str, num_inference_steps: int, examples: list[str]) -> str:
    """Return a snippet that draws images, those of the examples if the model has a condition."""
    kind, trust, arguments = "DDPMPipeline", "", "batch_size=4"
    if examples:
        kind, trust = "DiffusionPipeline", ", trust_remote_code=True"
        arguments = f"{json.dumps(examples)}, guidance_scale=2.0"
    return f"""\
```python
from diffusers import {kind}

pipeline = {kind}.{load_call(repo_id)}{trust})  # or this folder; .to("cuda") with a GPU
images = pipeline({arguments}, num_inference_steps={num_inference_steps}).images  # ancestral sampling, as trained
images[0].save("sample.png")
```"""


def refusal(config: TrainingConfig) -> str:
    """Say why diffusers cannot draw images though it loads the pipeline, and what can draw them; nothing if it can."""
    if config.prediction_type == "mean":
        what = "predicts the mean of a step back (`prediction_type` mean), which no scheduler of diffusers takes"
    elif config.variance_type == "learned":
        what = "predicts the logarithm of its variance (`variance_type` learned), where diffusers wants the variance"
    else:
        return ""
    return (
        f"The network {what}: diffusers loads the pipeline, and its scheduler ends with an error that names the "
        f"prediction type. Exact DDPM draws images of it:\n\n```bash\npython generate.py THIS_FOLDER\n```"
    )


def load_call(repo_id: str) -> str:
    return f'from_pretrained("{repo_id}"'


def table(heading: str, values: dict[str, object]) -> str:
    """Return a Markdown table of names and values."""
    rows = (f"| `{name}` | {cell(value)} |" for name, value in values.items())
    return "\n".join([f"| {heading} | value |", "|---|---|", *rows])


def cell(value: object) -> str:
    """Return a value as code, so that Markdown leaves its characters alone; a bar would end the cell even there."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return "`" + " ".join(text.split()).replace("`", "'").replace("|", r"\|") + "`" if text.strip() else ""


def add_results(data: ModelCardData, run: RunFolder, name: str) -> None:
    """Put the best scores into the card's metadata, as the model-index that the Hub shows."""
    data_set = (data.datasets or ["its training images"])[0]
    names = {"dataset_type": data_set, "dataset_name": data_set, "task_type": (data.tags or ["unknown"])[-1]}
    rows = run.read_best_scores()
    varying = [name for name in METHOD if len({row.get(name) for row in rows}) > 1]
    data.eval_results = [
        EvalResult(
            **names,
            metric_type=row["metric"].partition("@")[0],
            metric_name=name_of_result(row, varying),
            metric_value=float(f"{float(row['best']):.5g}"),
        )
        for row in rows
    ] or None
    data.model_name = name if data.eval_results else None


def name_of_result(row: dict[str, str], varying: list[str]) -> str:
    """Name a score for the card, with those parts of its method that differ between scores."""
    words = {"weights": "{} weights", "settings": "{}", "reference": "against {}", "precision": "precision {}"}
    parts = [row["metric"], f"{row['sampler']} with {row['steps']} steps", f"step {row['step']}"]
    row = {**row, "reference": row["reference"].partition(",")[0]}
    return ", ".join([*parts, *(words[name].format(row[name]) for name in words if name in varying and row[name])])


def evaluation_section(run: RunFolder) -> str:
    """Return the best of every metric and method that evaluate.py has found for this run, with its curves."""
    rows = run.read_best_scores()
    if not rows:
        return ""
    lines = [EVALUATION, "", f"| {' | '.join(SCORES)} |", "|" + "---|" * len(SCORES)]
    for row in rows:
        row["best"] = f"{float(row['best']):.5g}"
        few = " (few images)" if is_of_few_images(row["metric"]) else ""
        lines.append(f"| {cell(row['metric'])}{few} | {' | '.join(cell(row[name]) for name in SCORES[1:])} |")
    drawn = [name for name in ("FID", "FD") if (run.path / f"{name}_vs_TrainingSteps.png").exists()]
    return "\n".join(lines) + "".join(f"\n\n![{name}]({name}_vs_TrainingSteps.png)" for name in drawn)


def update_evaluation(output_dir: Path) -> None:
    """Put the results into the card of a run, if it has one that can be read and written."""
    run = RunFolder(output_dir)
    try:
        _put_results(run)
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("The results are not in the model card %s: %s", run.card_file, reason_of(error))


def _put_results(run: RunFolder) -> None:
    section = evaluation_section(run)
    card = run.card_file.read_text(encoding="utf-8") if run.card_file.is_file() else ""
    before, separator, after = card.partition(AFTER_EVALUATION)
    if section and separator:
        text = f"{before.partition(EVALUATION)[0]}{section}\n\n{separator}{after}"
        with suppress(ValueError, TypeError, YAMLError):  # of metadata that somebody else wrote
            card = ModelCard(text)
            add_results(card.data, run, card.text.partition("# ")[2].partition("\n")[0])
            text = str(card)
        write_atomically(run.card_file, text)


# The push


def check_push(config: TrainingConfig) -> None:
    """Raise before the training if the push could never succeed."""
    if not config.push_to_hub:
        return
    repo_id, login = repo_id_of(config), "`hf auth login`, or a token with --hub_token, lets it push"
    with user_errors(f"--hub_model_id {repo_id}: not a name that the Hub accepts", HFValidationError):
        validate_repo_id(repo_id)
    if not (token := (config.hub_token or get_token() or "").strip()):
        raise UserError(f"--push_to_hub: nobody is logged in to the Hub on this machine: {login}")
    try:
        get_session().timeout = TIMEOUT
        HfApi(token=token).whoami()
    except OfflineModeIsEnabled as error:
        raise UserError("--push_to_hub: HF_HUB_OFFLINE forbids it; push the run later with `hf upload`") from error
    except Exception as error:  # of a Hub that may be there again at the end
        if isinstance(error, HfHubHTTPError) and error.response.status_code == 401:
            raise UserError(f"--push_to_hub: the Hub rejects the token: {login}") from error
        logger.warning("The Hub login could not be checked now: %s", scrub(reason_of(error), token))


def push_to_hub(config: TrainingConfig, step: int, attempts: int = 5) -> str | None:
    """Push the run to the Hub: return its address there, or None after one warning. It never raises."""
    start, token = time.monotonic(), config.hub_token
    for attempt in range(1, attempts + 1):
        try:
            token = (token or get_token() or "").strip()
            return upload(config, token, step)
        except Exception as error:
            reason = scrub(" ".join(f"{type(error).__name__}: {error}".split()), token)[:500].rstrip(".")
            if attempt == attempts or time.monotonic() - start > PATIENCE or not is_transient(error):
                break
            wait = FIRST_WAIT * 2 ** (attempt - 1)
            logger.info(f"Push to the Hub: attempt {attempt} of {attempts} failed, next in {wait:g} s: {reason}")
            time.sleep(wait)
    # The same push, whatever folder the command is typed in.
    folder, options = str(Path(config.output_dir).resolve()), ["--private"] if config.hub_private_repo else []
    options += [f"--include={pattern}" for pattern in UPLOADED] + [f"--exclude={pattern}" for pattern in NOT_UPLOADED]
    command = shlex.join(["hf", "upload", repo_id_of(config), folder, *options])
    logger.warning(f"The push to the Hub failed, the run is safe in {folder}: {reason}. Push it later with: {command}")
    return None


def upload(config: TrainingConfig, token: str, step: int) -> str:
    """Create the repository unless it is there, and commit what the allow-list names."""
    get_session().timeout = TIMEOUT
    api = HfApi(token=token or True)  # True: without any token the library says at once how to log in
    repo_id, run = repo_id_of(config), RunFolder(config.output_dir)
    repository = api.create_repo(repo_id, private=config.hub_private_repo or None, exist_ok=True)
    # Only the Hub knows the namespace of an id given without one; the card must load the model by its full id.
    if repo_id != repository.repo_id and run.card_file.is_file():
        text = run.card_file.read_text(encoding="utf-8")
        write_atomically(run.card_file, text.replace(load_call(repo_id), load_call(repository.repo_id)))
    api.upload_folder(
        repo_id=repository.repo_id,
        folder_path=run.path,
        allow_patterns=UPLOADED,
        ignore_patterns=list(NOT_UPLOADED),  # a copy: the library appends to it
        commit_message=f"Weights of step {step}",
    )
    return str(repository)


def is_transient(error: BaseException | None) -> bool:
    """Return whether the same push may succeed in a moment: the Hub is busy or broken, or the connection was."""
    while error is not None:
        # hf_xet, which uploads the large files, has the status in its text only.
        in_text = re.search(r"HTTP status (?:client|server) error \((\d{3})", str(error))
        if isinstance(error, HfHubHTTPError) or in_text:
            status = error.response.status_code if isinstance(error, HfHubHTTPError) else int(in_text[1])
            return status >= 500 or status in (408, 429)
        if isinstance(error, OfflineModeIsEnabled):
            return False
        # JSON that does not parse is the error page of something between here and the Hub.
        if isinstance(error, httpx.TransportError | ConnectionError | TimeoutError | json.JSONDecodeError):
            return True
        error = error.__cause__  # the upload of a large file wraps the error that has the status
    return False


def scrub(text: str, token: str | None) -> str:
    return text.replace(token, "***") if token else text


# Trackers


class TensorBoard:
    """Curves in a folder of the run. Those of steps that will be repeated are dropped."""

    name = "tensorboard"
    failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)

    def __init__(self, config: TrainingConfig, last_step: int):
        from torch.utils.tensorboard import SummaryWriter

        run = RunFolder(config.output_dir)
        self.writer = SummaryWriter(run.path / config.logging_dir, purge_step=last_step + 1)
        # As text: TensorBoard takes no lists or missing values as hyper-parameters.
        self.writer.add_text("configuration", run.config_file.read_text(encoding="utf-8"), last_step)

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def log_picture(self, name: str, picture: Image.Image, step: int) -> None:
        self.writer.add_image(name, np.asarray(picture), step, dataformats="HWC")

    def log_histogram(self, name: str, edges: np.ndarray, heights: np.ndarray, step: int) -> None:
        middles, filled = (edges[1:] + edges[:-1]) / 2, np.append((heights > 0).nonzero()[0], 0)
        # TensorBoard would stretch the outermost non-empty bars to any minimum and maximum beyond them.
        values = {"min": edges[filled[0]], "max": edges[filled.max() + 1], "num": 1}
        values |= {"sum": middles @ heights, "sum_squares": middles**2 @ heights}
        values |= {"bucket_limits": edges[1:], "bucket_counts": heights}
        self.writer.add_histogram_raw(name, **values, global_step=step)

    def finish(self) -> None:
        self.writer.close()


class Wandb:
    """Curves in wandb: a run there for each run here, however often that is resumed.

    `step` is logged as a value, against which wandb draws the others: its own step counter accepts no step twice, nor
    that of an earlier checkpoint that is measured later.
    """

    name = "wandb"
    failures: ClassVar[tuple[type[Exception], ...]] = (Exception,)  # of a service elsewhere, of any kind

    def __init__(self, config: TrainingConfig, last_step: int):
        self.module, run = importlib.import_module(self.name), RunFolder(config.output_dir)
        self.open(config, run, run.tracker_id(self.name), values_of(config, lambda facts: facts.saved))

    def open(self, config: TrainingConfig, run: RunFolder, tracker_id: str, values: dict[str, object]) -> None:
        """Open the run, with the configuration as fields."""
        logs = Path(os.environ.get("WANDB_DIR", run.path / config.logging_dir))
        logs.mkdir(parents=True, exist_ok=True)
        self.run = self.module.init(
            project=config.tracker_project_name,
            id=tracker_id,
            name=run.path.resolve().name,
            dir=str(logs),
            config=values,
            resume="allow",
            allow_val_change=True,  # a resumed run may be longer
        )
        self.run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, object], step: int) -> None:
        self.run.log({"step": step, **values})

    def log_picture(self, name: str, picture: Image.Image, step: int) -> None:
        self.log({name: self.module.Image(picture)}, step)

    def log_histogram(self, name: str, edges: np.ndarray, heights: np.ndarray, step: int) -> None:
        self.log({name: self.module.Histogram(np_histogram=(heights, edges))}, step)

    def finish(self) -> None:
        self.run.finish()


class Trackio(Wandb):
    """Curves in trackio, which has wandb's calls but knows a run by its name."""

    name = "trackio"

    def open(self, config: TrainingConfig, run: RunFolder, tracker_id: str, values: dict[str, object]) -> None:
        """Open the run, with the configuration as fields."""
        name = f"{run.path.resolve().name}-{tracker_id}"
        self.run = self.module.init(project=config.tracker_project_name, name=name, config=values, resume="allow")

    def log(self, values: dict[str, object], step: int) -> None:
        self.run.log(values, step=step)


TRACKERS = {kind.name: kind for kind in (TensorBoard, Wandb, Trackio)}


def open_trackers(config: TrainingConfig, names: list[str], last_step: int) -> list[TensorBoard | Wandb]:
    """Open the trackers of these names; the run does without one that cannot be opened."""
    trackers = []
    for name in names:
        try:
            trackers.append(TRACKERS[name](config, last_step))
        except TRACKERS[name].failures as error:
            logger.warning("Curves are not logged to %s: %s", name, reason_of(error))
    return trackers


def name_of_curves(row: Mapping[str, object]) -> str:
    """Name the folder of curves that a row of results belongs to: a curve must not join two methods."""
    words = " ".join(str(row[part]) for part in METHOD if row[part] not in (None, "", "no"))
    return "evaluation/" + re.sub(r"[^\w.=]+", "-", words)


def curves_at(run: RunFolder, step: int) -> dict[str, float]:
    """Return a step's results by the names of their curves."""
    return {
        f"{name_of_curves(row)}/{name}": number
        for row in run.read_results()
        if row.get("step") == str(step)
        for name, value in row.items()
        if "@" in name and (number := as_number(value)) is not None
    }


def log_evaluation(run: RunFolder, values: dict[str, float], step: int) -> None:
    """Add what was measured of a checkpoint to the curves of its run in wandb and trackio.

    Two processes must not write one run there: a training that has started the evaluation does this itself.
    """
    if os.environ.get(IN_TRAINING):
        return
    config = run.read_config()
    config.output_dir = str(run.path)
    for tracker in open_trackers(config, [name for name in trackers_of(config) if name != TensorBoard.name], step):
        try:
            tracker.log(values, step)
            tracker.finish()
        except tracker.failures as error:
            logger.warning("The results of step %d were not logged to %s: %s", step, tracker.name, reason_of(error))
