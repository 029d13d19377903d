"""Mistakes that are answered before any work; `make mistakes` tries them all, with what they meet on the disk."""

import shutil
from contextlib import ExitStack

import mistakes
import pytest
from conftest import run_script
from forked import Ended
from mistake_cases import CASES, QUICK
from workshop import Workshop, contents_of

from common.errors import UserError


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Workshop:
    """As far as these cases look: a run is a folder with a configuration."""
    workshop = Workshop(tmp_path_factory.mktemp("workshop") / "things")
    workshop.make("network", "photos")
    (workshop.folder / "run").mkdir()
    (workshop.folder / "run" / "config.yaml").touch()
    (workshop.folder / ".run").touch()
    return workshop


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_it_is_answered_in_one_line(case, workshop, tmp_path, monkeypatch):
    folder = tmp_path / "case"
    monkeypatch.chdir(tmp_path)
    with ExitStack() as held:
        mistakes.prepare(case, workshop, folder, held)
        before = contents_of(folder)
        script, *words = mistakes.words_of(case.command, workshop)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("HOME", str(folder / "home"))
        with pytest.raises(UserError) as error:
            run_script(script.removesuffix(".py"), *words)
    said = f"{script}: error: {' '.join(str(error.value).split())}\n"
    assert mistakes.judge(case, Ended(error.value.exit_code, "", said, 0.0), before, contents_of(folder)) == []
    shutil.rmtree(folder)


def test_there_are_enough():
    assert len(CASES) >= 300
    assert 40 <= len(QUICK) <= 70
    assert len({(case.name, str(case.given)) for case in CASES}) == len(CASES)  # none is there twice
