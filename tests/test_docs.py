"""Every command of the README, the docs and the recipes is one that its script takes."""

import importlib
import re
import shlex
from collections.abc import Iterator

import pytest
from conftest import ROOT

from common.errors import UserError
from evaluation.evaluate_options import parse_evaluation
from generation.generate_options import parse_generation
from preparation.prepare_options import parse_prepare_options
from run_folder.config import parse_conditional_config, parse_config

PARSERS = {
    "prepare_data.py": parse_prepare_options,
    "train_unconditional.py": parse_config,
    "train_conditional.py": parse_conditional_config,
    "generate.py": parse_generation,
    "evaluate.py": parse_evaluation,
    "visualize.py": importlib.import_module("visualize").parse,
    "report.py": importlib.import_module("report").parse,
}
# What a command that is right says where its files are not.
NOT_HERE = "there is no such|there is no file|no run is there|cannot be read|is not installed|names code"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "configs").glob("*.yaml"),
]


def commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        text = (
            re.sub(r"^# ? ?", "", page.read_text(), flags=re.MULTILINE) if page.suffix == ".yaml" else page.read_text()
        )
        for line in re.sub(r"\\\n\s*", " ", text).splitlines():
            scripts = "|".join(map(re.escape, PARSERS))
            found = re.match(rf"\s*(?:python|torchrun|accelerate launch)\b(?: [^#]*?)? ({scripts})\b(.*)", line)
            if found and not any(word in line for word in ("...", "ANOTHER_FOLDER")):
                yield page.name, f"{found[1]}{found[2]}"


@pytest.mark.parametrize(("page", "command"), sorted(set(commands())))
def test_its_script_takes_it(page, command, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    script, *words = shlex.split(command.removesuffix(" &"), comments=True)
    try:
        PARSERS[script](words)
    except UserError as error:
        if not re.search(NOT_HERE, str(error)):
            raise


def test_there_are_many():
    assert len(set(commands())) > 60
