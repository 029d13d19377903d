#!/usr/bin/env python
"""Check that a machine is ready: versions, device, driver, a few steps of training, sampling, a metric.

python check.py
python check.py --output_dir check     # keep the run that it makes
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from common.errors import RunFailed, UserError, run_script
from common.files import make_folder

ROOT = Path(__file__).resolve().parent
OLDEST_PYTHON = (3, 11)
PACKAGES = ("torch", "torchvision", "diffusers", "accelerate", "transformers", "datasets")
ENOUGH_DISK_GB = 10
STEPS, IMAGES = 20, 32

TRAIN = "train_unconditional.py --config configs/digits.yaml --logger none --ddpm_num_inference_steps 10"
TRAIN += f" --max_train_steps {STEPS} --lr_warmup_steps 5 --logging_steps {STEPS}"
GENERATE = f"generate.py --ddim --num_inference_steps 5 --num_images {IMAGES}"
EVALUATE = "evaluate.py --dataset_name digits --resolution 8"

Finding = tuple[str, str, str]  # what, what was found, and what to do about it if anything


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output_dir", metavar="FOLDER", help="keep what is trained here (default: a temporary folder)"
    )
    options = parser.parse_args()
    if options.output_dir and Path(options.output_dir).exists():
        raise UserError(f"--output_dir {options.output_dir}: already exists; choose a new folder")
    if options.output_dir:
        make_folder(Path(options.output_dir))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.output_dir) if options.output_dir else Path(temporary) / "run"
        failed = show([*machine(), *trial(folder.resolve())])  # the scripts run in the repository
    if options.output_dir:
        print(f"\nLook at {options.output_dir}/samples/step-{STEPS}.png: still noise after {STEPS} steps, as expected.")
    if failed:
        raise RunFailed(f"{failed} of these need your attention")
    print("\nThis machine is ready.")


def show(findings: Iterator[Finding] | list[Finding]) -> int:
    """Print the table line by line and return how many findings ask for something to be done."""
    failed = 0
    for what, found, advice in findings:
        failed += bool(advice)
        print(f"{'!' if advice else ' '} {what:<12} {found}" + (f"\n{'':15}{advice}" if advice else ""), flush=True)
    return failed


def machine() -> Iterator[Finding]:
    """Look at what is installed and at the hardware."""
    import torch

    from common.machine import usable_cores
    from common.processes import check_cuda

    wanted = ".".join(map(str, OLDEST_PYTHON))
    too_old = sys.version_info < OLDEST_PYTHON
    yield "python", f"{platform.python_version()} on {platform.platform()}", f"needs {wanted}" if too_old else ""
    installed = {name: version_of(name) for name in PACKAGES}
    missing = [name for name, version in installed.items() if version is None]
    found = ", ".join(f"{name} {version or 'missing'}" for name, version in installed.items())
    yield "packages", found, "pip install -r requirements.lock" if missing else ""

    memory = f"{usable_memory_gb():.0f} GB of memory"
    yield "processor", f"{usable_cores():g} cores, {torch.get_num_threads()} threads, {memory}", ""
    try:
        check_cuda()
        problem = ""
    except UserError as error:
        problem = str(error)
    yield "device", describe_devices(), problem
    free = shutil.disk_usage(".").free / 1e9
    low = f"the checkpoints of a run of the paper's network take {ENOUGH_DISK_GB} GB" if free < ENOUGH_DISK_GB else ""
    yield "disk", f"{free:,.0f} GB free here", low


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def usable_memory_gb() -> float:
    import psutil

    return psutil.virtual_memory().total / 1e9


def describe_devices() -> str:
    """Name the accelerators that torch can use, with their driver's CUDA version and NCCL."""
    import torch

    if not torch.accelerator.is_available():
        return "no GPU; training runs on the CPU"
    kind, count = torch.accelerator.current_accelerator().type, torch.accelerator.device_count()
    if kind != "cuda":
        return f"{count} x {kind}"
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    memory = min(torch.cuda.get_device_properties(index).total_memory for index in range(count)) / 1e9
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    return f"{count} x {', '.join(names)}, {memory:.0f} GB; CUDA {torch.version.cuda}, NCCL {nccl}"


def trial(run: Path) -> Iterator[Finding]:
    """Train a few steps on the embedded digits, generate images and measure a distance, each with its own script."""
    yield outcome("training", TRAIN, {"output_dir": run}, lambda: speed_of(run))
    images, table = run / "check", run / "results"
    found = f"{IMAGES} images and a grid"
    yield outcome("generation", GENERATE, {"model": run, "output_dir": images}, lambda: found)
    folders = {"generated": images / "images", "output_dir": table}
    yield outcome("evaluation", EVALUATE, folders, lambda: distance_in(table))


def outcome(what: str, command: str, folders: dict[str, Path], result: Callable[[], str]) -> Finding:
    """Run a script on folders; return what it achieved, or the last line that it said."""
    words = [sys.executable, *command.split(), *(f"--{name}={path}" for name, path in folders.items())]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "TQDM_DISABLE": "1"})
    if done.returncode == 0:
        return what, result(), ""
    last = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
    return what, "failed", last


def speed_of(run: Path) -> str:
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return f"{STEPS} steps, loss {last['loss']:.2f}, {last['images_per_second']:.0f} images per second (8x8 digits)"


def distance_in(folder: Path) -> str:
    import csv

    with (folder / "evaluation_results.csv").open() as file:
        row = list(csv.DictReader(file))[-1]
    return f"KID {float(row[f'kid@{IMAGES}']):.3f} of {IMAGES} images to the digits, far from 0 after {STEPS} steps"


if __name__ == "__main__":
    run_script(main)
