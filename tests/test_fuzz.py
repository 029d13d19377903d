"""Files changed at random, in this process; `make fuzz` changes two thousand, of every kind that is read."""

import logging
from contextlib import ExitStack, suppress

import fuzz
import mistakes
import pytest
from conftest import run_script
from workshop import Workshop, contents_of

from common.errors import UserError

MUTATIONS = 3  # of each target
QUICK = [
    target
    for target in fuzz.TARGETS
    if target.command.startswith("prepare_data.py") and target.name != "JSON of a preparation"
]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop") / "things")


@pytest.mark.parametrize("target", QUICK, ids=lambda target: target.name)
def test_a_changed_file_is_answered(target, workshop, tmp_path, monkeypatch):
    for number in range(MUTATIONS):
        folder = tmp_path / str(number)
        case = fuzz.case_of(target, f"suite {target.name} {number}")
        with ExitStack() as held:
            mistakes.prepare(case, workshop, folder, held)
            monkeypatch.chdir(folder)
            script, *words = mistakes.words_of(case.command, workshop)
            with suppress(UserError):  # and nothing else
                run_script(script.removesuffix(".py"), *words)
            logging.getLogger().handlers.clear()
        assert mistakes.MARKER not in contents_of(folder)


def test_a_mutation_is_a_function_of_its_seed(tmp_path):
    results = []
    for seed in ("a", "a", "b"):
        (tmp_path / "file").write_bytes(bytes(range(256)) * 4)
        fuzz.mutate(tmp_path / "file", seed)
        results.append((tmp_path / "file").read_bytes())
    assert results[0] == results[1] != results[2]


def test_every_target_has_its_share():
    tried = [case.family for case, _ in fuzz.mutations(fuzz.MUTATIONS, 0, [])]
    assert len(tried) >= fuzz.MUTATIONS
    assert set(tried) == {target.name for target in fuzz.TARGETS}
