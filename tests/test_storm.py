"""A short storm: real kills of real processes. `make faults` is the long one."""

import preloaded
import pytest
from conftest import lines_of, losses_of
from storm import HANG_UP, ROOT, SCENARIOS, Scenario, differences, killed_once, run_to_the_end, storm
from test_processes import TORCHRUN

# Inside a save, between a line of metrics and its checkpoint, in the middle of a step, and at some moment.
KILLS = {
    "one process": [("save-file@8", 0), ("metrics@7", 0), ("prune@1", 0), ("", 1.0)],
    "two processes": [("update@50", 0), ("", 2.0)],
    "a budget of training time": [("grid@2", 0)],
    "generate.py": [("image@50", 0), ("generated@3", 0), (HANG_UP, 0.7)],  # which may come after a fast machine's end
    "evaluate.py": [("generated@5", 0), ("table@2", 0)],
    "prepare_data.py": [("prepare-image@100", 0)],
}


def start(command: list[str], processes: int, fault: str = "") -> preloaded.Process:
    return preloaded.Process(command, processes, EXACT_DDPM_FAULT=fault)


@pytest.mark.parametrize("scenario", [each for each in SCENARIOS if each.name in KILLS], ids=lambda each: each.name)
def test_interrupted_equals_uninterrupted(scenario, tiny_flags, tmp_path):
    result = storm(scenario, KILLS[scenario.name], tiny_flags, tmp_path, start)
    assert result["differences"] == []
    at_points = [fault for fault, _ in KILLS[scenario.name] if "@" in fault]
    assert [event for event in result["events"] if "@" in event] == [f"killed at {fault}" for fault in at_points]


def test_every_point_is_one():
    """A name that the program never passes would make the storm a calm."""
    rooms = ("training", "run_folder", "generation", "evaluation", "preparation")
    sources = "".join(path.read_text() for room in rooms for path in (ROOT / room).glob("*.py"))
    for point in {point for scenario in SCENARIOS for point in scenario.points}:
        assert f'fault_point("{point}")' in sources, point


def test_one_process_then_two_then_one(tiny_flags, network_without_dropout, tmp_path):
    """The total batch is held by accumulation; the losses are those of one process throughout."""
    command = [
        "train_unconditional.py",
        *tiny_flags,
        f"--model_config_name_or_path={network_without_dropout}",
        "--total_batch_size=16",
        "--train_batch_size=8",
        "--checkpointing_steps=4",
    ]
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    outputs = []
    for processes, steps in ((1, 4), (2, 8), (1, 12)):
        part = [*command, f"--max_train_steps={steps}", f"--output_dir={parts}"]
        outputs.append(preloaded.run(part, processes).stderr)
    preloaded.run([*command, "--max_train_steps=12", f"--output_dir={whole}"])
    assert losses_of(parts) == pytest.approx(losses_of(whole), rel=1e-5)
    by_bin = [
        [loss or 0 for line in lines_of(run, "timesteps.jsonl") for loss in line["loss"]] for run in (parts, whole)
    ]
    assert by_bin[0] == pytest.approx(by_bin[1], rel=1e-4)
    for count, output in zip((2, 1, 2), outputs, strict=True):
        assert f"Gradient Accumulation steps = {count}" in output
    assert not any("Settings differ" in output for output in outputs)


def test_a_total_that_cannot_be_held_is_an_error(tiny_flags, tmp_path):
    flags = [*tiny_flags, "--total_batch_size=16", "--train_batch_size=16", f"--output_dir={tmp_path / 'run'}"]
    done = preloaded.run(["train_unconditional.py", *flags], processes=2, succeed=False)
    assert "--total_batch_size 16 is not 16 per device" in done.stderr


def test_the_restarts_of_torchrun(tiny_flags, tmp_path):
    """One worker of two is killed; torchrun starts both again and the run ends as if nothing had been."""
    scenario = Scenario("two processes", processes=2, flags=["--max_train_steps=50"])
    reference, run = tmp_path / "reference", tmp_path / "run"
    run_to_the_end(start(scenario.command(reference, tiny_flags), 2))
    # A fault in the environment would strike every restart at the same visit, but visits start at the checkpoint.
    command = [*TORCHRUN, "--max-restarts=3", *scenario.command(run, tiny_flags)]
    assert killed_once(start(command, 1, "save-renamed@2"), "save-renamed@2", 0) == "finished before the kill"
    assert differences(run, reference) == []
