"""The processes that stand in for `python script.py` behave as it does."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import preloaded
import pytest

SHOWN = """
import json, os, random, sys, threading, numpy
found = [sys.argv[1:], os.path.basename(sys.path[0]), os.getcwd(), sys.stdin.read()]
found += [os.environ["GIVEN"], "PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ]
print(json.dumps([*found, os.getsid(0) == os.getpid(), __name__, threading.active_count()]))
print(json.dumps([random.random(), numpy.random.random()]), file=sys.stderr)
"""


# Of what the server has imported nothing may be the project's: a script imports that as it does for a user.
IMPORTED = """
import sys
files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
assert any("/torch/" in file for file in files)
print([file for file in files if file.startswith(sys.argv[1]) and "site-packages" not in file])
"""


def script(folder: Path, text: str) -> Path:
    (folder / "script.py").write_text(text)
    return folder / "script.py"


def test_what_a_script_finds_is_what_it_was_given(tmp_path):
    command = [script(tmp_path, SHOWN), "an argument", 2]
    drawn = []
    for _ in range(2):
        process = preloaded.Process(command, cwd=tmp_path, GIVEN="a variable")
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert json.loads(output) == [
            ["an argument", "2"], tmp_path.name, str(tmp_path), "", "a variable", False, True, "__main__", 1,
        ]  # fmt: skip
        drawn += json.loads(errors)
    assert len(set(drawn)) == 4


def test_nothing_of_the_project_is_imported_before(tmp_path):
    assert preloaded.run([script(tmp_path, IMPORTED), preloaded.ROOT]).stdout == f"{[preloaded.__file__]}\n"


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("sys.exit(75)", 75), ("sys.exit('why')", 1), ("1 / 0", 1), ("os.kill(os.getpid(), 9)", -9)],
)
def test_it_ends_as_an_interpreter_does(end, code, tmp_path):
    text = f"import atexit, os, sys\natexit.register(print, 'the end')\n{end}\n"
    process = preloaded.Process([script(tmp_path, text)])
    output, errors = process.communicate(timeout=60)
    real = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True)
    assert (process.returncode, output) == (real.returncode, real.stdout)
    assert process.returncode == code
    assert errors.splitlines()[-1:] == real.stderr.splitlines()[-1:]


def test_signals_and_the_failure_of_one(tmp_path):
    """As torchrun, which ends the others; each is told its rank."""
    text = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('ended'))\n"
        "print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n"
        "time.sleep(60)\n"
    )
    process = preloaded.Process([script(tmp_path, text)], processes=2, log=tmp_path / "log")
    end = time.monotonic() + 60
    while len((tmp_path / "log").read_text().splitlines()) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["0 of 2", "1 of 2"]
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    os.kill(process.pids[1], signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert (tmp_path / "log").read_text().splitlines()[2:] == ["ended"]
    with pytest.raises(ProcessLookupError):
        os.kill(process.pids[0], 0)
