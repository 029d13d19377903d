"""The house stays one that a newcomer can hold in mind; `python tests/house.py` prints the measures."""

import collections

import house
import pytest


@pytest.fixture(scope="module")
def modules():
    return house.read_modules()


def test_the_training_script_reaches_few_files(modules):
    assert len(house.reached_from("train_unconditional", modules)) <= 36


def test_few_names_stand_before_the_loss(modules):
    assert len(house.names_before_loss(modules)) <= 30


def test_no_function_has_more_than_six_parameters(modules):
    assert house.wide_functions(modules) == []


def test_the_loop_fits_on_a_screen(modules):
    loop = dict(house.functions_of(modules["training.loop"]))["train"]
    assert loop.end_lineno - loop.lineno < 40
    assert house.parameters_of(loop) == 1
    call = dict(house.functions_of(modules["schedulers.loss"]))["DiffusionLoss.__call__"]
    assert call.end_lineno - call.lineno < 15


def test_no_two_files_have_one_name(modules):
    names = collections.Counter(name.rpartition(".")[2] for name in modules)
    assert [name for name, count in names.items() if count > 1 and name != "__init__"] == []


def test_no_room_imports_a_script(modules):
    scripts = {name for name in modules if "." not in name}
    rooms = {name: module for name, module in modules.items() if "." in name}
    assert not [name for name, module in rooms.items() if scripts & {*house.imports_of(module, modules).values()}]
