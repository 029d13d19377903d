"""What CONTRIBUTING.md says it takes to add something: each is added here, and nothing else is touched.

A loss and a prediction type are added in test_loss.py, a sampler from a file of one's own in test_timesteps.py.
"""

from dataclasses import asdict, dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from common.errors import UserError
from common.options import (
    POSITIVE,
    Range,
    facts_of,
    habits,
    option,
    parse_options,
    read_config_file,
    section,
    values_of,
)
from evaluation import metrics
from evaluation.networks import FeatureNetwork
from preparation.layouts import LAYOUTS, Photo, recognise
from run_folder.config import TrainingConfig, parse_config
from schedulers.betas import BETA_SCHEDULES, constant
from schedulers.ddpm import build_scheduler
from schedulers.loss import TIMESTEP_SAMPLERS, build_sampler, build_weighting
from schedulers.timestep_samplers import TimestepSampler
from schedulers.weighting import LOSS_WEIGHTINGS

PROCESS = build_scheduler()


class Early(TimestepSampler):
    """The first timesteps alone."""

    objective = "changed"

    def __init__(self, alphas_cumprod: torch.Tensor, share: float = 0.5):
        super().__init__(alphas_cumprod)
        self.set_density((torch.arange(self.num_train_timesteps) < share * self.num_train_timesteps).float())


def test_a_timestep_sampler_is_a_class_and_a_line(monkeypatch):
    monkeypatch.setitem(TIMESTEP_SAMPLERS, "early", Early)
    options = asdict(TrainingConfig()) | {"timestep_sampler": "early", "early_share": 0.25}
    assert build_sampler(options, PROCESS.alphas_cumprod).describe().count_nonzero() == 250


def test_a_loss_weighting_is_a_function_and_a_line(monkeypatch):
    def snr_power(alphas_cumprod: torch.Tensor, prediction_type: str, power: float = 1.0) -> torch.Tensor:
        return (alphas_cumprod / (1 - alphas_cumprod)) ** power

    monkeypatch.setitem(LOSS_WEIGHTINGS, "snr_power", snr_power)
    options = asdict(TrainingConfig()) | {"loss_weighting": "snr_power", "snr_power_power": 0.0}
    assert build_weighting(options, PROCESS).eq(1).all()


def test_a_beta_schedule_is_a_function_and_a_line(monkeypatch):
    monkeypatch.setitem(BETA_SCHEDULES, "flat", lambda steps, start, end: constant(steps, start, end / 2))
    assert build_scheduler("flat").betas.eq(0.01).all()


@section("of a test")
class OwnOptions:
    width: float = option(1.5, "How wide.", POSITIVE, may_change=True)
    parts: list[str] = option([], "Which parts.", saved=False)
    even: int = option(2, "An even number.", Range("even", lambda value: value % 2 == 0))


@dataclass
class Own(OwnOptions):
    """All options of a script."""


def test_an_option_is_a_field_with_its_facts(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(habits()["accepted"], "wide", "width")
    monkeypatch.setitem(habits()["answered"], "breadth", "type --width {value}")

    def parse(*arguments: str, from_file: dict[str, list[str]] | None = None) -> Own:
        return parse_options(Own, [*arguments], description="A test.", from_file=from_file)

    assert parse() == Own(1.5, [], 2)
    assert parse("--wide", "3", "--parts", "a", "b") == Own(3.0, ["a", "b"], 2)
    for arguments, message in (
        (["--width=0"], "--width 0.0: must be greater than 0"),
        (["--even=3"], "--even 3: must be even"),
        (["--breadth=2"], "unknown flag --breadth: type --width 2"),
    ):
        with pytest.raises(UserError, match=message):
            parse(*arguments)
    file = tmp_path / "own.yaml"
    file.write_text("width: 4\nparts: [a]\n")
    assert parse("--width=5", from_file=read_config_file(file, Own)) == Own(5.0, ["a"], 2)
    assert values_of(Own(), lambda facts: facts.saved) == {"width": 1.5, "even": 2}
    assert [name for name, facts in facts_of(Own).items() if facts.may_change] == ["width"]
    with pytest.raises(SystemExit):
        parse("--help")
    assert "How wide. (default: 1.5)" in capsys.readouterr().out


def test_a_metric_is_a_function_and_an_entry(monkeypatch):
    def mean_distance(generated: torch.Tensor, reference: torch.Tensor) -> float:
        return (generated.mean(0) - reference.mean(0)).norm().item()

    entry = metrics.Metric("mean_distance", "features", mean_distance, lower_is_better=True)
    monkeypatch.setattr(metrics, "METRICS", (*metrics.METRICS, entry))
    network = FeatureNetwork("inception", "legacy_tensorflow", "", torch.nn.Identity(), scale=lambda images: images)
    features = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    moments = metrics.Moments.of_features(features)
    neighbours = metrics.Neighbourhoods.of(features, torch.device("cpu"))
    generated = SimpleNamespace(count=20, moments=moments, spatial=None, features=features, logits=None)
    reference = SimpleNamespace(
        moments=moments, spatial=None, features=features + 1, neighbourhoods=lambda count, device: neighbours
    )
    measured = metrics.measure(network, generated, reference, torch.device("cpu"))
    assert measured["mean_distance_inception@20"] == pytest.approx(2)  # of ones in four dimensions
    assert measured["fid@20"] == pytest.approx(0, abs=1e-6)
    assert metrics.metric_of("mean_distance_inception@20").lower_is_better
    assert not metrics.metric_of("precision_inception@20").lower_is_better


def test_a_layout_of_photos_is_a_function_and_a_line(monkeypatch, tmp_path):
    """Classes in the names of the files, before a dash."""

    def dashed(folder) -> list[Photo] | None:
        if not folder.images or not all("-" in name for name in folder.images):
            return None
        return [Photo(str(folder.path / name), name, name.partition("-")[0]) for name in folder.images]

    monkeypatch.setitem(LAYOUTS, "dashed", dashed)
    for name in ("cat-1.png", "cat-2.png", "dog-1.png"):
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / name)
    found = recognise(tmp_path)
    assert found.layout == "dashed"
    assert [photo.label for photo in found.photos] == ["cat", "cat", "dog"]


def test_the_paper_is_the_default():
    assert parse_config(["--dataset_name=digits"]).loss == "l2"
