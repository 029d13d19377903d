#!/usr/bin/env python
"""Check on a machine with NVIDIA GPUs what could not be checked where this project was written, which has none.

    python benchmarks/gpu_check.py      # about an hour, on all GPUs; writes gpu_check.md and gpu_check.json

Each check runs scripts of the project as a user would, in a temporary folder, and ends in one line. A check that fails
does not stop the others. Send gpu_check.md in: whatever it says, it is the first of its kind.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from common.errors import UserError, run_script  # noqa: E402

LONGEST = 1800  # seconds, of one command
DIGITS = [
    *("train_unconditional.py", "--dataset_name=digits", "--resolution=8", "--no_random_flip", "--train_batch_size=64"),
    *("--ddpm_num_inference_steps=5", "--lr_warmup_steps=10", "--ema_max_decay=0.99", "--logger=none"),
]
ENDLESS = ["--max_train_steps=1000000", "--logging_steps=20", "--checkpointing_steps=1000000"]
# In step times: images a device, and flags.
SPEEDS = {
    "float32": [],
    "TF32": ["--allow_tf32"],
    "bf16": ["--mixed_precision=bf16"],
    "bf16, compiled": ["--mixed_precision=bf16", "--compile"],
    "float32, CUDA graph": ["--cuda_graph"],
    "bf16, CUDA graph": ["--mixed_precision=bf16", "--cuda_graph"],
    "bf16, compiled, CUDA graph": ["--mixed_precision=bf16", "--compile", "--cuda_graph"],
    "bf16, gradient checkpointing": ["--mixed_precision=bf16", "--gradient_checkpointing"],
}
BATCHES = (16, 128)
TIMED_STEPS, STEPS_OF_A_LINE = 150, 50
WATCHED = range(20, 40)  # steps in which waits are looked for, far from lines of metrics
COMPARED_STEPS, LARGEST_DIFFERENCE = 100, 0.05  # of losses with and without --compile, which draws another dropout
TOO_LARGE = 512  # images of 128x128 in one pass of the paper's network: some 450 GB
PASSES_TIMED = 20
Result = tuple[bool, str]


def run(*command: object, launcher: tuple[str, ...] = (), succeed: bool = True) -> subprocess.CompletedProcess:
    """Run a script of the project to its end."""
    done = subprocess.run(
        [sys.executable, *launcher, *map(str, command)],
        cwd=ROOT, capture_output=True, text=True, timeout=LONGEST, env={**os.environ, "TQDM_DISABLE": "1"},
    )  # fmt: skip
    if succeed and done.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {last_line(done.stderr)}")
    return done


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "nothing was said")


def metrics_of(folder: Path) -> list[dict]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def describe_machine() -> dict[str, object]:
    import torch

    import check

    return {
        "devices": check.describe_devices(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
    }


def check_waits(folder: Path) -> Result:
    """Look for lines of the project that wait for the device within a step; there should be none."""
    import torch

    import train_unconditional
    from training.tracking import Tracking

    found, log = Counter(), Tracking.log

    def watching(tracking, state, ending) -> None:
        log(tracking, state, ending)
        torch.cuda.set_sync_debug_mode("warn" if state.step in WATCHED else "default")

    Tracking.log = watching
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sys.argv = [*DIGITS, f"--output_dir={folder}/waits", "--max_train_steps=50", "--logging_steps=50"]
            train_unconditional.main()
    finally:
        Tracking.log = log
        torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchroniz" in str(warning.message):
            found[f"{Path(warning.filename).name}:{warning.lineno}"] += 1
    listed = ", ".join(f"{place} {count / len(WATCHED):.1f}" for place, count in found.most_common(5))
    return not found, f"waits in a step: {listed or 'none'}"


def check_training(folder: Path) -> Result:
    """Train with a moving average, a grid and a checkpoint, and go on from it."""
    run(*DIGITS, f"--output_dir={folder}/run", "--max_train_steps=200", "--logging_steps=20")
    run(*DIGITS, f"--output_dir={folder}/run", "--max_train_steps=300", "--logging_steps=20")
    losses = [line["loss"] for line in metrics_of(folder / "run")]
    return losses[-1] < losses[0], f"loss {losses[0]:.3f} to {losses[-1]:.3f} in 300 steps, with a resume at 200"


def check_losses(folder: Path) -> Result:
    """Train as it is, compiled, and as a CUDA graph: the losses should be alike."""
    fixed = [f"--max_train_steps={COMPARED_STEPS}", "--logging_steps=10", "--save_images_steps=1000"]
    losses = {}
    for name, flags in {"plain": [], "compiled": ["--compile"], "CUDA graph": ["--cuda_graph"]}.items():
        run(*DIGITS, *fixed, *flags, f"--output_dir={folder}/losses-{name.replace(' ', '-')}")
        losses[name] = [line["loss"] for line in metrics_of(folder / f"losses-{name.replace(' ', '-')}")]
    differences = {name: largest_difference(losses["plain"], losses[name]) for name in ("compiled", "CUDA graph")}
    listed = ", ".join(f"{name} {difference:.1e}" for name, difference in differences.items())
    return max(
        differences.values()
    ) < LARGEST_DIFFERENCE, f"losses differ from those of a plain run by at most {listed}"


def largest_difference(one: list[float], other: list[float]) -> float:
    """Return the largest difference of two curves, relative to the first."""
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


def check_noise(folder: Path) -> Result:
    """Draw noise on a CPU, on the GPU, and on the GPU by a compiled kernel: its integers must be the same."""
    import torch

    from common import randomness

    def drawn(device: str) -> torch.Tensor:
        rows = torch.arange(64, device=device) + 2**40
        return torch.stack(randomness.random_words(randomness.derive_seed("noise"), rows, 7, 768)).cpu()

    def noise() -> torch.Tensor:
        return randomness.standard_normal(5, torch.arange(64, device="cuda"), 7, (3, 32, 32))

    reference, plain = drawn("cpu"), noise()
    same = torch.equal(reference, drawn("cuda"))
    randomness.compile_words(torch.device("cuda"))
    same_compiled = torch.equal(plain, noise())
    said = f"words of CPU and GPU are {'the same' if same else 'NOT the same'}"
    return same and same_compiled, f"{said}, compiled noise is {'the same' if same_compiled else 'NOT the same'}"


def check_out_of_memory(folder: Path) -> Result:
    """Ask for far too large a batch, and follow the advice."""
    photos = make_photos(folder / "many photos", TOO_LARGE)
    fixed = ["train_unconditional.py", f"--train_data_dir={photos}", "--resolution=128", "--logger=none"]
    fixed += ["--max_train_steps=2", "--logging_steps=1", "--save_images_steps=1000", "--eval_batch_size=1"]
    fixed += ["--ddpm_num_inference_steps=1", "--in_memory_limit_gb=8"]
    large = run(*fixed, f"--train_batch_size={TOO_LARGE}", f"--output_dir={folder}/large", succeed=False)
    refused = last_line(large.stderr)
    flags = flags_in(refused)
    if not flags:
        return False, f"no advice came: {refused}"
    run(*fixed, *flags, f"--output_dir={folder}/advised")
    used = metrics_of(folder / "advised")[-1].get("device_memory_gb", 0)
    return True, f"{' '.join(flags)} was advised and fits, with {used:.1f} GB"


def flags_in(advice: str) -> list[str]:
    """Read the flags that a line about memory tells to use."""
    found = re.search(r"use (--train_batch_size \d+ --gradient_accumulation_steps \d+)", advice)
    return re.sub(r" (\d)", r"=\1", found[1]).split() if found else []


def check_memory_format(folder: Path) -> Result:
    """Time forward and backward passes of the paper's network with channels first and last; what is faster is news."""
    import torch

    from training.network import build_unet

    torch.backends.cudnn.benchmark = True
    found = []
    for precision in (torch.float32, torch.bfloat16):
        for batch in BATCHES:
            seconds = {}
            for layout in (torch.contiguous_format, torch.channels_last):
                unet = build_unet(32, 3).cuda().to(memory_format=layout)
                images = torch.randn(batch, 3, 32, 32, device="cuda").to(memory_format=layout)
                t = torch.zeros(batch, dtype=torch.int64, device="cuda")
                for number in range(2 * PASSES_TIMED):
                    if number == PASSES_TIMED:
                        torch.cuda.synchronize()
                        start = time.perf_counter()
                    with torch.autocast("cuda", precision, enabled=precision != torch.float32):
                        unet(images, t).sample.float().square().mean().backward()
                torch.cuda.synchronize()
                seconds[layout] = time.perf_counter() - start
            ratio = seconds[torch.contiguous_format] / seconds[torch.channels_last]
            found.append(f"{str(precision).removeprefix('torch.')} batch {batch} {ratio:.2f} x")
    return True, f"channels last, of the speed of channels first: {', '.join(found)}"


def check_repeats(folder: Path) -> Result:
    """Generate twice: the files should be the same."""
    command = ("generate.py", "--model", folder / "run", "--ddim", "--num_inference_steps=20", "--num_images=64")
    for name in ("once", "twice"):
        run(*command, "--batch_size=16", "--output_dir", folder / name)
    files = sorted((folder / "once" / "images").glob("*.png"))
    other = [file.name for file in files if file.read_bytes() != (folder / "twice" / "images" / file.name).read_bytes()]
    return bool(files) and not other, f"{len(files) - len(other)} of {len(files)} images are the same when made twice"


def check_grey_evaluation(folder: Path) -> Result:
    """Measure grey images, which once ended the process on a GPU."""
    images = ("--generated", folder / "once" / "images", "--dataset_name=digits", "--resolution=8")
    run("evaluate.py", *images, "--output_dir", folder / "results")
    return (folder / "results" / "evaluation_results.csv").exists(), "64 grey images are measured"


def check_signal(folder: Path, launcher: tuple[str, ...], lost: bool) -> Result:
    """Signal a training, or kill one of its processes: it should save, or its other processes should end."""
    name = "killed" if lost else "signalled"
    log = (folder / f"{name}.log").open("w+")
    command = [sys.executable, *launcher, *DIGITS, *ENDLESS, f"--output_dir={folder}/{name}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "TQDM_DISABLE": "1"})
    try:
        deadline = time.monotonic() + 300
        while len(metrics_of(folder / name)) < 2:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no metrics came: {last_line((folder / f'{name}.log').read_text())}")
            time.sleep(0.2)
        start = time.monotonic()
        if lost:
            os.kill(workers_of(process.pid)[-1], signal.SIGKILL)
        else:
            process.terminate()
        code = process.wait(LONGEST)
    finally:
        process.kill()
    took, text = time.monotonic() - start, (folder / f"{name}.log").read_text()
    if lost:
        # torchrun ends them by itself as soon as it sees the dead one.
        return code != 0, f"after the death of a process the others ended within {took:.0f} s"
    return "saved at step" in text, f"saved {took:.1f} s after SIGTERM, exit code {code}"


def check_shared_gpu(folder: Path) -> Result:
    """Start a process more than there are GPUs, which must be refused in a line that says so."""
    import torch

    count = torch.cuda.device_count() + 1
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}")
    said = run(*DIGITS, f"--total_batch_size={64 * count}", f"--output_dir={folder}/shared", launcher=launcher,
               succeed=False).stderr  # fmt: skip
    refused = re.search(r"error: (\d+ processes were started.*)", said)
    return refused is not None, refused[1] if refused else f"it was not refused: {last_line(said)}"


def workers_of(pid: int) -> list[int]:
    """Return the processes that torchrun has started, in order."""
    import psutil

    return [child.pid for child in psutil.Process(pid).children() if DIGITS[0] in " ".join(child.cmdline())]


def make_photos(folder: Path, count: int = 512) -> Path:
    """Write 32x32 images of noise: what is in them does not matter for the time of a step."""
    import numpy as np
    from PIL import Image

    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(count):
        Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return folder


def time_steps(folder: Path) -> Iterator[dict]:
    """Time steps of the paper's network: the median over lines of metrics after the first."""
    photos = make_photos(folder / "photos")
    for batch in BATCHES:
        for name, flags in SPEEDS.items():
            output = folder / f"{name}-{batch}".replace(", ", "-").replace(" ", "-")
            fixed = ["--resolution=32", f"--train_batch_size={batch}", f"--total_batch_size={batch}", "--logger=none"]
            fixed += [f"--max_train_steps={TIMED_STEPS}", f"--logging_steps={STEPS_OF_A_LINE}", "--eval_batch_size=1"]
            fixed += ["--ddpm_num_inference_steps=1", f"--train_data_dir={photos}", f"--output_dir={output}"]
            row = {"precision": name, "batch": batch}
            try:
                run("train_unconditional.py", *fixed, *flags)
                last = metrics_of(output)[-1]
                row |= {
                    "images_per_second": last["images_per_second"],
                    "ms_per_step": 1000 * batch / last["images_per_second"],
                    "gb": last.get("device_memory_gb"),
                }
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                row["failed"] = str(error)
            print(f"  {row}", flush=True)
            yield row


def estimates() -> dict[tuple[str, str], list[float]]:
    """Return the estimated images per second of docs/recipes.md, from and to, by GPU and precision."""
    table = json.loads((ROOT / "benchmarks" / "results" / "training_cost.json").read_text())
    images = 800_000 * 128
    return {
        (row["gpu"], row["precision"]): sorted(images / (hours * 3600) for hours in row["training_hours"])
        for row in table["hours_on_one_gpu"]
    }


def page(machine: dict[str, object], results: list[tuple[str, bool, str]], speeds: list[dict]) -> str:
    """Write the page that can be sent in."""
    lines = ["# What a GPU made of it", "", *(f"- {name}: {value}" for name, value in machine.items()), ""]
    lines += ["| check | | |", "|---|---|---|"]
    lines += [f"| {what} | {'fine' if fine else '**look at this**'} | {said} |" for what, fine, said in results]
    expected = estimates()
    model = {gpu: gpu.removeprefix("RTX ").split()[0] for gpu, _ in expected}  # as in NVIDIA's names of devices
    here = next((gpu for gpu, name in model.items() if name in str(machine["devices"])), None)
    lines += [
        "",
        "The paper's network at 32x32, one GPU; estimates are those of docs/recipes.md, made without one:",
        "",
    ]
    lines += ["| precision | batch | ms a step | images/s | estimated | GB |", "|---|---|---|---|---|---|"]
    for row in speeds:
        low, high = expected.get((here, row["precision"].partition(",")[0]), (None, None))
        estimate = f"{low:.0f} to {high:.0f}" if low else ""
        values = (
            [row["failed"], "", estimate, ""]
            if "failed" in row
            else [f"{row['ms_per_step']:.1f}", f"{row['images_per_second']:.0f}", estimate, f"{row['gb'] or 0:.1f}"]
        )
        lines.append(f"| {row['precision']} | {row['batch']} | {' | '.join(values)} |")
    if here is None:
        lines += ["", "Estimated for other GPUs, images/s:", ""]
        lines += [
            f"- {gpu}, {precision}: {low:.0f} to {high:.0f}" for (gpu, precision), (low, high) in expected.items()
        ]
    return "\n".join(lines) + "\n"


def attempt(what: str, action: Callable[..., Result], *arguments: object) -> tuple[str, bool, str]:
    """Run a check; whatever goes wrong in it is its result."""
    try:
        fine, said = action(*arguments)
    except Exception as error:
        traceback.print_exc()
        fine, said = False, f"{type(error).__name__}: {last_line(str(error))}"
    print(f"{' ' if fine else '!'} {what}: {said}", flush=True)
    return what, fine, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default=".", metavar="FOLDER", help="where gpu_check.md and .json go")
    options = parser.parse_args()

    import torch

    from common.processes import check_cuda

    check_cuda()
    if not torch.cuda.is_available():
        raise UserError("torch sees no NVIDIA GPU on this machine, and that is what is to be checked")
    output_dir, several = Path(options.output_dir), torch.cuda.device_count()
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={several}") if several > 1 else ()
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        results = [
            attempt("training", check_training, folder),
            attempt("waits", check_waits, folder),
            attempt("noise", check_noise, folder),
            attempt("compilation and CUDA graphs", check_losses, folder),
            attempt("out of memory", check_out_of_memory, folder),
            attempt("repetition", check_repeats, folder),
            attempt("grey evaluation", check_grey_evaluation, folder),
            attempt("SIGTERM", check_signal, folder, torchrun, False),
        ]
        results.append(attempt("one process too many", check_shared_gpu, folder))
        if torchrun:
            results.append(attempt("kill -9", check_signal, folder, torchrun, True))
        results.append(attempt("memory format", check_memory_format, folder))
        speeds = list(time_steps(folder))
    report = {"machine": machine, "checks": results, "speeds": speeds}
    (output_dir / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
    (output_dir / "gpu_check.md").write_text(page(machine, results, speeds))
    print(f"\n{output_dir / 'gpu_check.md'} is the page to send in")


if __name__ == "__main__":
    run_script(main)
