#!/usr/bin/env python
"""Where the time of a training step goes, read from a trace that `--profile` wrote.

    python -m benchmarks.profile_steps                # profiles the training of two networks
    python -m benchmarks.profile_steps runs/cifar10   # a run that was trained with --profile N

Every operation's own time, without the operations that it calls, is summed by kind over the profiled steps. What is
left of a step is the time in which no operation runs: Python, and on a GPU the host's part.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measuring import (
    Result,
    add_data,
    describe_network,
    describe_paper_network,
    parser,
    run_quietly,
    write_images,
    write_result,
)
from benchmarks.training_step import CASES, Case, flags_of_training
from common.errors import UserError, run_script

# The first kind with a part of the operation's name has it.
KINDS = {
    "convolutions, backward": ("convolution_backward",),
    "convolutions, forward": ("convolution", "conv2d"),
    "matrix products and attention": ("mm", "addmm", "bmm", "linear", "scaled_dot_product", "matmul", "softmax"),
    "group norm": ("group_norm",),
    "SiLU": ("silu",),
    "dropout": ("bernoulli", "dropout"),
    "Adam, clipping and moving average": ("_fused_adam", "_foreach_", "clip_grad", "linalg_vector_norm"),
    "compiled kernels": ("graph_", "CompiledFunction", "Torch-Compiled", "triton", "cpp_fused"),
    "exchange between processes": ("c10d", "nccl", "gloo"),
    "copies and sums": ("copy_", "add", "cat", "clone", "fill", "zero", "sum", "mul", "div", "upsample"),
}
OTHER, NOTHING = "everything else", "no operation: Python"
STEPS, QUICK_STEPS = 5, 1
QUICK = Case("3,000 parameters at 8x8, batch 4", 8, 4, (), (4, 8))


def kind_of(name: str) -> str:
    """Return the kind of an operation by its name."""
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), OTHER)


def own_times(events: list[dict]) -> dict[str, float]:
    """Sum the microseconds of every operation without those that it calls, by name; on the device if there is one."""
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if kernels:
        return _summed((event["name"], event["dur"]) for event in kernels)
    operations = [event for event in events if event.get("cat") == "cpu_op" and "dur" in event]
    own: list[list] = []  # name and time of each
    by_thread: dict[object, list[tuple[float, list]]] = defaultdict(list)
    for event in sorted(operations, key=lambda event: (event["ts"], -event["dur"])):
        open_ones = by_thread[event["tid"]]
        while open_ones and open_ones[-1][0] <= event["ts"]:
            open_ones.pop()
        entry = [event["name"], event["dur"]]
        if open_ones:
            open_ones[-1][1][1] -= event["dur"]
        open_ones.append((event["ts"] + event["dur"], entry))
        own.append(entry)
    return _summed(map(tuple, own))


def _summed(pairs) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for name, duration in pairs:
        total[name] += duration
    return dict(total)


def summarise(trace: Path) -> dict[str, object]:
    """Return the milliseconds of a step by kind, and the step's own."""
    events = json.loads(trace.read_text())["traceEvents"]
    steps = [event for event in events if event["name"].startswith("ProfilerStep") and "dur" in event]
    steps = [event for event in steps if event.get("cat") == "user_annotation"] or steps
    if not steps:
        raise UserError(f"{trace}: holds no steps; it must be the profile.json of a training with --profile")
    count = len({event["name"] for event in steps})
    step = sum(event["dur"] for event in steps) / count / 1000
    # The optimiser's step and others are annotations around operations; only the operations count.
    within = [event for event in events if not event.get("name", "").startswith("ProfilerStep")]
    by_kind: dict[str, float] = defaultdict(float)
    for name, microseconds in own_times(within).items():
        by_kind[kind_of(name)] += microseconds / count / 1000
    by_kind[NOTHING] = max(0.0, step - sum(by_kind.values()))
    ordered = dict(sorted(by_kind.items(), key=lambda item: -item[1]))
    return {"steps": count, "ms_per_step": step, "ms_by_kind": ordered}


def train(case: Case, folder: Path, data: Path, steps: int) -> Path:
    """Train a network long enough to profile some steps, and return the trace."""
    network = folder / f"network-{case.resolution}.json"
    if case.channels is None:
        describe_paper_network(network)
    else:
        describe_network(network, case.resolution, case.channels)
    output = folder / f"run-{case.resolution}"
    run_quietly(
        "train_unconditional.py",
        *flags_of_training(case, network, data, output),
        *(f"--profile={steps}", f"--max_train_steps={steps + 12}", "--logging_steps=1000", f"--cache_dir={folder}"),
        *("--eval_batch_size=1", "--ddpm_num_inference_steps=1", "--logger=none"),
    )
    return output / "profile.json"


def main() -> None:
    arguments = parser(__doc__)
    add_data(arguments)
    arguments.add_argument("runs", nargs="*", type=Path, help="runs that were trained with --profile")
    options = arguments.parse_args()
    details: dict[str, object] = {}
    with TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = Path(temporary)
        traces = {run.name: run / "profile.json" for run in options.runs}
        if not traces:
            data = write_images(options.data, 512, folder / "images")
            cases = [QUICK] if options.quick else [CASES[0], CASES[2]]
            traces = {case.name: train(case, folder, data, QUICK_STEPS if options.quick else STEPS) for case in cases}
        for name, trace in traces.items():
            if not trace.exists():
                raise UserError(f"{trace}: there is no such file; train with --profile N")
            details[name] = summarise(trace)
    for name, summary in details.items():
        print(f"{name}: {summary['ms_per_step']:.1f} ms a step")
        for kind, milliseconds in summary["ms_by_kind"].items():
            print(f"  {milliseconds:8.1f} ms  {milliseconds / summary['ms_per_step']:6.1%}  {kind}")
    write_result("profile_steps", Result([], details), options.output_dir)


if __name__ == "__main__":
    run_script(main)
