"""The scripts speak one language: the run first, the same names, --config, --version, a help with examples."""

import importlib
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, help_of

from common.errors import UserError
from common.options import VERSION, facts_of, read_config_file
from evaluation.evaluate_options import EvaluationOptions, parse_evaluation
from generation.generate_options import GenerationOptions, parse_generation
from preparation.prepare_options import PrepareOptions, parse_prepare_options
from run_folder.config import ConditionalConfig, TrainingConfig, parse_config

SCRIPTS = "prepare_data train_unconditional train_conditional generate evaluate visualize report app".split()
SCRIPTS += ["import_weights"]
# One name everywhere for what several scripts have, whatever other names are accepted besides.
OTHER_NAMES = {"output", "overwrite_output_dir", "dataloader_num_workers", "workers", "precision", "dtype", "out"}


def kinds() -> dict[str, type]:
    known = {name: importlib.import_module(name).Options for name in ("visualize", "import_weights")}
    return known | {
        "prepare_data": PrepareOptions, "train_unconditional": TrainingConfig, "train_conditional": ConditionalConfig,
        "generate": GenerationOptions, "evaluate": EvaluationOptions,
    }  # fmt: skip


def test_one_name_for_one_thing():
    for script, kind in kinds().items():
        names = facts_of(kind).keys()
        assert not OTHER_NAMES & names, script
        assert {"output_dir", "config"} <= names, script
    shared = ("mixed_precision", "compile")
    assert all(name in facts_of(kinds()[script]) for name in shared for script in SCRIPTS if script in
               ("train_unconditional", "train_conditional", "generate", "evaluate"))  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script):
    text = help_of(f"{script}.py")
    assert text.count(f"\n  python {script}.py") + text.count(f" {script}.py ") >= 2, "two examples"
    assert re.search(r"\n\s+--config FILE", text)
    assert "--version" in text
    bare = [line for line in text.splitlines() if re.fullmatch(r"  --\w+(_dir|_steps|_size|_name)", line)]
    assert not bare, "flags without the name of their value"


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_generation(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"exact-ddpm {VERSION}\n"
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == VERSION


@pytest.mark.parametrize(
    ("make", "flag"),
    [
        (lambda path: (path / "cat").mkdir(parents=True), "train_data_dir"),
        (lambda path: (path.mkdir(), (path / "metadata.parquet").touch()), "train_data_dir"),
        (lambda path: (path.mkdir(), (path / "train.parquet").touch()), "dataset_name"),
        (lambda path: ((path / "train").mkdir(parents=True), (path / "train" / "data.arrow").touch()), "dataset_name"),
        (lambda path: None, "dataset_name"),
    ],
)
def test_the_first_word_of_a_training_is_its_data(make, flag, tmp_path):
    make(tmp_path / "data")
    config = parse_config([str(tmp_path / "data"), "--resolution=8"])
    assert getattr(config, flag) == str(tmp_path / "data")
    with pytest.raises(UserError, match="two ways to say the same thing"):
        parse_config([str(tmp_path / "data"), "--dataset_name=digits"])


def test_a_recipe_may_be_the_first_word():
    assert parse_config(["configs/digits.yaml"]) == parse_config(["--config=configs/digits.yaml"])


def test_a_run_is_the_first_word(tmp_path):
    (tmp_path / "config.yaml").touch()
    assert parse_evaluation([str(tmp_path)]).run_dir == str(tmp_path)
    assert parse_generation([str(tmp_path), "--ddim"]).model == str(tmp_path)
    assert importlib.import_module("visualize").parse([str(tmp_path)]).run_dir == str(tmp_path)
    assert parse_prepare_options(["photos", "--output", "x"]).output_dir == "x"


def test_every_script_reads_a_file(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("ddim: true\nnum_images: 7\neta: 0.5\n")
    options = parse_generation([f"--config={path}", "--eta=0.25"])
    assert (options.ddim, options.num_images, options.eta) == (True, 7, 0.25)
    path.write_text("nim_images: 7\n")
    with pytest.raises(UserError, match=r"own.yaml: unknown key nim_images; did you mean num_images\?"):
        parse_evaluation([f"--config={path}"])


def test_a_file_does_not_bring_code_to_visualize(tmp_path):
    (tmp_path / "s.py").write_text("raise SystemExit")
    path = tmp_path / "own.yaml"
    path.write_text(f"timestep_sampler: {tmp_path}/s.py:S\n")
    with pytest.raises(UserError, match="names code"):
        importlib.import_module("visualize").parse([f"--config={path}"])


def test_a_run_of_before_is_read(tmp_path):
    """Its file has the names that options had then."""
    path = tmp_path / "config.yaml"
    path.write_text("dataset_name: digits\ndataloader_num_workers: 2\n")
    assert read_config_file(path, TrainingConfig)["num_workers"] == ["--num_workers=2"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("python generate.py --num_in", "--num_inference_steps"),
        ("python generate.py runs/x --skip_schedule q", "quadratic"),
        ("python other.py --num_in", ""),
    ],
)
def test_completion(words, expected):
    words = words.split()
    script = (
        f'cd {ROOT}; source completion.bash; python() {{ {ROOT}/.venv/bin/python "$@"; }}; '
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _exact_ddpm; echo ${{COMPREPLY[*]}}"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=Path(ROOT))
    assert done.stdout.strip() == expected, done.stderr
