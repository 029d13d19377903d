"""Mistakes that are answered before any work; `make mistakes` tries them all, with what they meet on the disk."""

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace

import mistakes
import pytest
import records
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
    assert 40 <= len(QUICK) <= 80
    assert len({(case.name, str(case.given)) for case in CASES}) == len(CASES)  # none is there twice


GOOD = Ended(2, "", "it.py: error: --flag x: must be y\n", 0.1)
ASKED = mistakes.Case("", "it.py --flag=x", ("--flag", "!secret"), leaves=("out/*",))


@pytest.mark.parametrize(
    ("ended", "after", "fault"),
    [
        (GOOD, {}, None),
        (GOOD, {"out/log": b""}, None),
        (replace(GOOD, code=0), {}, "exit code 0"),
        (replace(GOOD, code=None), {}, "hangs"),
        (replace(GOOD, stderr="Traceback (most recent call last)\nValueError: --flag\n"), {}, "a traceback"),
        (replace(GOOD, stderr=2 * GOOD.stderr), {}, "2 lines"),
        (replace(GOOD, stderr="it.py: error: no\n"), {}, "'--flag' is not said"),
        (replace(GOOD, stdout="the secret"), {}, "'secret' is said"),
        (GOOD, {"new": b""}, "left behind: new"),
        (GOOD, {"kept": b"other"}, "changed: kept"),
        (GOOD, {"kept": None}, "changed: kept"),
        (GOOD, {mistakes.MARKER: b""}, "planted code was executed"),
    ],
)
def test_an_answer_that_is_not_good_is_noticed(ended, after, fault):
    found = mistakes.judge(ASKED, ended, {"kept": b""}, {"kept": b"", **after})
    assert (found == []) if fault is None else (found and found[0].startswith(fault))


def test_what_is_lost_is_noticed():
    assert mistakes.judge(ASKED, GOOD, {"kept": b""}, {}) == ["lost: kept"]


@pytest.mark.parametrize("name", [name for name in records.TABLES if (records.DOCS / f"{name}.json").exists()])
def test_the_page_shows_the_records(name):
    record = json.loads((records.DOCS / f"{name}.json").read_text())
    page = records.PAGE.read_text()
    assert records.with_part(page, name, record) == page
