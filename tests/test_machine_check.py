"""check.py: what it says of a machine, and of a script that fails on it."""

import subprocess
import sys

import pytest
from conftest import run_script

import check


def test_each_finding_is_a_line_and_problems_are_counted(capsys):
    assert check.show([("python", "3.11", ""), ("device", "no GPU", "buy one")]) == 1
    assert capsys.readouterr().out == f"  {'python':<12} 3.11\n! {'device':<12} no GPU\n{'':15}buy one\n"


def test_the_machine(monkeypatch):
    found = {what: (text, advice) for what, text, advice in check.machine()}
    assert found["packages"][0].startswith("torch 2.")
    assert all(advice == "" for _, advice in found.values())
    monkeypatch.setattr(check, "ENOUGH_DISK_GB", 1e9)
    monkeypatch.setattr(check, "OLDEST_PYTHON", (99, 0))
    problems = {what for what, _, advice in check.machine() if advice}
    assert problems == {"python", "disk"}


def test_a_script_that_fails_gives_its_last_line(tmp_path):
    what, found, advice = check.outcome("training", "train_unconditional.py --foo", {}, lambda: "fine")
    assert (what, found) == ("training", "failed")
    assert advice.startswith("train_unconditional.py: error: unknown flag --foo")


def test_a_folder_may_have_a_space_in_its_name(tmp_path):
    folder = tmp_path / "my check"
    _, _, advice = check.outcome("generation", "generate.py", {"output_dir": folder, "model": folder}, str)
    assert f"--model {folder}: there is no such folder" in advice


def test_all_of_it(monkeypatch, tmp_path, capsys):
    """With stand-ins for the three scripts, whose own tests run them."""
    ran = []

    def outcome(what, command, folders, result):
        ran.append((what, command.split()[0], folders))
        return what, "fine", ""

    monkeypatch.setattr(check, "outcome", outcome)
    monkeypatch.chdir(tmp_path)
    run_script("check", "--output_dir=run")  # the scripts run in the repository, the folder is in this one
    assert [entry[:2] for entry in ran] == [
        ("training", "train_unconditional.py"), ("generation", "generate.py"), ("evaluation", "evaluate.py"),
    ]  # fmt: skip
    assert ran[2][2]["generated"] == tmp_path / "run" / "check" / "images"
    assert "This machine is ready." in capsys.readouterr().out


def test_a_package_that_is_missing_is_told(monkeypatch):
    monkeypatch.setattr(check, "PACKAGES", ("torch", "no-such-package"))
    findings = {what: (found, advice) for what, found, advice in check.machine()}
    assert findings["packages"][0].endswith("no-such-package missing")
    assert findings["packages"][1] == "pip install -r requirements.lock"


@pytest.mark.parametrize("script", ["check.py", "evaluate.py", "train_unconditional.py", "visualize.py"])
def test_outside_the_environment_a_script_says_so_in_one_line(script):
    # -S leaves out the installed packages.
    done = subprocess.run([sys.executable, "-S", check.ROOT / script], capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{script}: error: {sys.executable} has no package ")
    assert line.endswith("or install it with pip install -r requirements.lock")
