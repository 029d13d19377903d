"""Configurations that nobody wrote down: whatever is valid trains and resumes to the bit, whatever is not is a line.

`make fuzz` tries many more than the suite, which sets EXACT_DDPM_EXAMPLES.
"""

import inspect
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from conftest import run_training
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.options import Facts, facts_of
from run_folder.config import TrainingConfig, parse_config
from schedulers.ddpm import LEARNED_VARIANCES
from schedulers.loss import TIMESTEP_SAMPLERS
from schedulers.weighting import LOSS_WEIGHTINGS

FACTS, TYPES = facts_of(TrainingConfig), get_type_hints(TrainingConfig)
EXAMPLES = int(os.environ.get("EXACT_DDPM_EXAMPLES", 6))
TRIED = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)

# What a run of two steps can be told besides its sampler and its weights, in values that a person might choose.
ORDINARY = {
    "loss": st.sampled_from(get_args(TYPES["loss"])),
    "ddpm_beta_schedule": st.sampled_from(get_args(TYPES["ddpm_beta_schedule"])),
    "ddpm_num_steps": st.sampled_from([100, 1000]),
    "variance_type": st.sampled_from(get_args(TYPES["variance_type"])),
    "prediction_type": st.sampled_from(get_args(TYPES["prediction_type"])),
    "total_batch_size": st.sampled_from([16, 32]),
    "learning_rate": st.floats(1e-6, 1e-2),
    "lr_scheduler": st.sampled_from([name for name in get_args(TYPES["lr_scheduler"]) if name != "constant"]),
    "adam_beta1": st.floats(0, 0.999),
    "adam_beta2": st.floats(0, 0.9999),
    "adam_weight_decay": st.floats(0, 1),
    "adam_epsilon": st.floats(1e-12, 1e-2),
    "max_grad_norm": st.floats(1e-3, 100),
    "seed": st.integers(0, 2**31),
    "max_train_samples": st.integers(32, 100),
    "channels": st.sampled_from(["auto", "1"]),
    "in_memory_limit_gb": st.sampled_from([0.0, 8.0]),
    "center_crop": st.booleans(),
    "random_flip": st.booleans(),
    "logging_steps": st.integers(1, 3),
    "save_images_steps": st.integers(1, 3),
    "eval_batch_size": st.integers(1, 5),
    "ddpm_num_inference_steps": st.integers(1, 3),
    "mixed_precision": st.sampled_from(["no", "bf16"]),
}
EMA = {"ema_max_decay": st.floats(0, 0.9999)}
EMA_WARMUP = {"ema_inv_gamma": st.floats(0.1, 10), "ema_power": st.floats(0.1, 2)}


def own_options(name: str, kind: object) -> list[str]:
    """The options of a sampler or a weighting: `mean` of `edm` is `edm_mean`."""
    return [option for argument in inspect.signature(kind).parameters if (option := f"{name}_{argument}") in FACTS]


def near(facts: Facts, default: object) -> st.SearchStrategy:
    """Values not far from the default of an option, and in its range."""
    accepts = facts.must_be.accepts if facts.must_be else lambda value: True
    if isinstance(default, int):
        return st.integers(max(1, default // 2), 2 * default).filter(accepts)
    return st.floats(default - abs(default) / 2, default + abs(default)).filter(accepts)


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, object]:
    """Options that go together."""
    sampler = draw(st.sampled_from(sorted(TIMESTEP_SAMPLERS)))
    weighting = draw(st.sampled_from(["none", *sorted(LOSS_WEIGHTINGS)]))
    options: dict[str, st.SearchStrategy] = dict(ORDINARY)
    for name, kind in ((sampler, TIMESTEP_SAMPLERS[sampler]), (weighting, LOSS_WEIGHTINGS.get(weighting, dict))):
        owned = [option for option in own_options(name, kind) if FACTS[option].default is not None]
        options |= {option: near(FACTS[option], FACTS[option].default) for option in owned}
    use_ema, warmup = draw(st.booleans()), draw(st.booleans())
    options |= EMA if use_ema else {}
    options |= EMA_WARMUP if use_ema and warmup else {}
    chosen = draw(st.lists(st.sampled_from(sorted(options)), unique=True, max_size=12))
    values = {name: draw(options[name]) for name in sorted(chosen)}
    if warmup and use_ema:
        values["ema_warmup"] = True
    if weighting == "bound":
        values.pop("loss", None)
    if weighting not in ("none", "bound") or sampler == "ats" or TIMESTEP_SAMPLERS[sampler].needs_squared_errors:
        values |= {"variance_type": "fixed_small"} if values.get("variance_type") in LEARNED_VARIANCES else {}
    if sampler not in ("ats", "stratified") and draw(st.booleans()):
        values["stratified"] = True
    if values.get("ats_features", 0) > values.get("ats_grid", FACTS["ats_grid"].default):
        del values["ats_features"]
    return {"timestep_sampler": sampler, "loss_weighting": weighting, "use_ema": use_ema, **values}


def fitting(tiny_flags: list[str], options: dict[str, object]) -> list[str]:
    """The flags of a tiny run without those that the options leave nothing to do."""
    left_out = ["--train_batch_size=16"] if "total_batch_size" in options else []
    left_out += [] if options["use_ema"] else ["--ema_max_decay=0.9"]
    return [flag for flag in tiny_flags if flag not in left_out]


def as_flags(options: dict[str, object]) -> list[str]:
    words = {True: "yes", False: "no"}
    return [f"--{name}={words[value] if isinstance(value, bool) else value}" for name, value in options.items()]


def last_checkpoint(run: Path) -> dict[str, object]:
    """All of the second step but how long it took."""
    folder = run / "checkpoint-2"
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}
    return files | {"state": {**json.loads((folder / "state.json").read_text()), "train_seconds": 0}}


@settings(TRIED, phases=[Phase.generate])  # to make a failure smaller would take minutes
@given(options=configurations())
def test_any_valid_configuration_trains_and_resumes_to_the_bit(options, tiny_flags):
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        flags = [*fitting(tiny_flags, options), "--max_train_steps=2", "--checkpointing_steps=1", *as_flags(options)]
        try:
            run_training(run, flags)
            whole = last_checkpoint(run)
            shutil.rmtree(run / "checkpoint-2")
            run_training(run, flags)
        finally:
            logging.getLogger().handlers.clear()
        resumed = last_checkpoint(run)
    assert [name for name in whole if whole[name] != resumed[name]] == []


def outside(facts: Facts) -> list[object]:
    return [value for value in (-1, 0, 1, 2, -0.5, 1.5) if facts.must_be and not facts.must_be.accepts(value)]


@st.composite
def mistakes(draw: st.DrawFn) -> tuple[str, object]:
    """An option and a value that it cannot have."""
    kinds = {name: {TYPES[name], *get_args(TYPES[name])} for name in FACTS}
    ways = {
        "nan": [name for name in FACTS if float in kinds[name]],
        "range": [name for name in FACTS if outside(FACTS[name])],
        "word": [name for name in FACTS if kinds[name] & {int, float, bool}],
        "choice": [name for name in FACTS if any(get_origin(kind) is Literal for kind in kinds[name])],
        "name": sorted(FACTS),
    }
    way = draw(st.sampled_from(sorted(ways)))
    name = draw(st.sampled_from(ways[way]))
    if way == "name":
        place = draw(st.integers(0, len(name) - 1))
        misspelt = name[:place] + draw(st.sampled_from("qxz")) + name[place:]
        return misspelt, "hf_SECRET"
    if way == "range":
        value = draw(st.sampled_from(outside(FACTS[name])))
        return name, value if float in kinds[name] or isinstance(value, int) else draw(st.just(-1))
    values = {"nan": ["nan", "inf", "-inf"], "word": ["x", "1,5", "", "0x8", "١x"], "choice": ["", "nope"]}[way]
    return name, draw(st.sampled_from(values))


@settings(TRIED, max_examples=20 * EXAMPLES)
@given(options=configurations(), mistake=mistakes(), in_file=st.booleans())
def test_any_invalid_configuration_is_one_line(options, mistake, in_file, tiny_flags):
    name, value = mistake
    flags = [*fitting(tiny_flags, options), "--output_dir=nowhere", *as_flags(options)]
    with tempfile.TemporaryDirectory() as folder:
        if in_file:
            file = Path(folder, "options.yaml")
            file.write_text(yaml.safe_dump({name: value}))
            flags = [f"--config={file}", *(flag for flag in flags if not flag.startswith(f"--{name}="))]
        else:
            flags.append(f"--{name}={value}")
        # In a file an empty value means that nothing is said.
        with pytest.raises(UserError) as error:
            parse_config(flags)
    assert error.value.exit_code == 2
    assert name in str(error.value)
    assert "SECRET" not in str(error.value)
