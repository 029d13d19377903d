#!/usr/bin/env python
"""Generating images beside DDPMPipeline and DDIMPipeline of diffusers, from the same model and noise.

    python -m benchmarks.sampling

A small network is trained for a minute, and its run loaded by all. Timed are whole batches, from noise to uint8, each
way in a process of its own that has drawn a batch before. Compared are images of the same seeds: the pipelines are
given the project's noise for that, DDIM the timesteps that DDIMPipeline takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.measuring import (
    Orders,
    Result,
    Row,
    Spread,
    Worker,
    add_data,
    describe_network,
    in_turns,
    parser,
    ratios,
    run_quietly,
    seconds,
    write_images,
    write_result,
)
from common.errors import RunFailed, run_script
from common.machine import usable_cores

BATCH, COMPARED = 32, 32
PIPELINES = {"ddpm": "DDPMPipeline", "ddim": "DDIMPipeline"}
# Flags of generate.py, and what to reach against the pipeline in float32.
WAYS = {
    "float32": ([], None),
    "float32, `--compile`": (["--compile"], 1.5),
    "bf16, `--compile`": (["--compile", "--mixed_precision=bf16"], 2.0),
}
TIMED_STEPS = {"ddpm": 250, "ddim": 50}
COMPARED_STEPS = {"ddpm": 1000, "ddim": 50}
QUICK_STEPS = {"ddpm": 5, "ddim": 5}
ROUNDS = 5
EQUAL_SHARE = 99.9  # per cent of values within one grey level


def train(data: Path, folder: Path, quick: bool) -> Path:
    """Train a small network so that what is compared are images and not noise."""
    network = describe_network(folder / "network.json", 16, (4, 8, 8) if quick else (32, 64, 64))
    steps = 2 if quick else 300
    run_quietly(
        *("train_unconditional.py", f"--dataset_name={data}", "--resolution=16", "--train_batch_size=64"),
        *(f"--model_config_name_or_path={network}", "--learning_rate=1e-3", "--lr_warmup_steps=50"),
        *("--ema_max_decay=0.98", f"--max_train_steps={steps}", "--logger=none", "--ddpm_num_inference_steps=10"),
        *(f"--output_dir={folder / 'run'}", f"--cache_dir={folder}"),
    )
    return folder / "run"


def here(run: Path, flags: list[str]) -> Callable[[str, int, bool], np.ndarray]:
    """Return a function that generates with a method and a number of steps, as generate.py does."""
    from common.processes import start_processes
    from generation.engine import InferenceSettings, Job, RunningNetwork
    from generation.generate_options import parse_generation
    from generation.methods import build_method
    from run_folder.saved_model import find_models

    options = parse_generation([str(run), *flags])
    processes = start_processes(options)
    (model,) = find_models(str(run), [], None)
    settings = InferenceSettings(processes.precision, compile=options.compile, batch_size=BATCH)
    running = RunningNetwork(Job(model, build_method(options, model)), processes, settings)

    def generate(method: str, steps: int, as_pipeline: bool) -> np.ndarray:
        flags = [f"--{method}", f"--num_inference_steps={steps}"]
        running.job = Job(model, build_method(parse_generation([str(run), *flags]), model))
        if as_pipeline and method == "ddim":
            running.job.method.timesteps = list(range(1000 - 1000 // steps, -1, -(1000 // steps)))
        return running.generate(list(range(BATCH)), lambda number, samples: None).numpy()

    return generate


def there(run: Path) -> Callable[[str, int, bool], np.ndarray]:
    """Return a function that does the same with the pipelines of diffusers."""
    from unittest.mock import patch

    from diffusers import DDIMPipeline, DDIMScheduler, DDPMPipeline

    from common.randomness import standard_normal
    from schedulers.denoising import NOISE_KEY

    if "OMP_NUM_THREADS" not in os.environ:  # as the project does; whatever else it sets up is its own
        torch.set_num_threads(max(1, int(usable_cores())))
    ddpm = DDPMPipeline.from_pretrained(run)
    ddim = DDIMPipeline(ddpm.unet, DDIMScheduler.from_config(ddpm.scheduler.config))
    for pipeline in (ddpm, ddim):
        pipeline.set_progress_bar_config(disable=True)
    seeds = torch.arange(BATCH)

    def draw(method: str, steps: int) -> np.ndarray:
        more = {"use_clipped_model_output": True} if method == "ddim" else {}
        pipeline = ddim if method == "ddim" else ddpm
        with torch.no_grad():
            images = pipeline(batch_size=BATCH, num_inference_steps=steps, output_type="np", **more).images
        return (images * 255).round().astype(np.uint8).transpose(0, 3, 1, 2)

    def generate(method: str, steps: int, as_here: bool) -> np.ndarray:
        if not as_here:
            return draw(method, steps)
        numbers = iter(range(steps + 1))

        def noise(shape: tuple[int, ...], **_: object) -> torch.Tensor:
            return standard_normal(NOISE_KEY, seeds, next(numbers), tuple(shape[1:]))

        places = ["pipelines.ddpm.pipeline_ddpm", "schedulers.scheduling_ddpm", "pipelines.ddim.pipeline_ddim"]
        with ExitStack() as stack:
            for place in places:
                stack.enter_context(patch(f"diffusers.{place}.randn_tensor", noise))
            return draw(method, steps)

    return generate


def work(way: str, run: Path) -> None:
    """Serve a `Worker`: an order is a method and a number of steps, or with a file those and images to compare."""
    orders = Orders()
    generate = here(run, WAYS[way][0]) if way in WAYS else there(run)
    generate("ddim", 2, False)
    orders.answer()
    while True:
        method, steps, *file = orders.next().split("\t")
        if file:
            np.save(file[0], generate(method, int(steps), True))
            orders.answer()
        else:
            orders.answer(seconds=seconds(lambda: generate(method, int(steps), False)))  # noqa: B023


def main() -> None:
    arguments = parser(__doc__)
    add_data(arguments)
    arguments.add_argument("--worker", nargs=2, help="used by the benchmark itself")
    options = arguments.parse_args()
    if options.worker:
        work(options.worker[0], Path(options.worker[1]))
    result = Result()
    timed, compared = (QUICK_STEPS, QUICK_STEPS) if options.quick else (TIMED_STEPS, COMPARED_STEPS)
    rounds = 1 if options.quick else ROUNDS
    with TemporaryDirectory(prefix="benchmark-") as temporary, ExitStack() as stack:
        folder = Path(temporary)
        run = train(
            write_images(options.data, 256 if options.quick else 10_000, folder / "images"), folder, options.quick
        )
        ways = [way for way in (*WAYS, "diffusers") if not (options.quick and "--compile" in way)]
        starting = [
            Worker(way, "benchmarks.sampling", ["--worker", way, run], folder / f"{number}.log")
            for number, way in enumerate(ways)
        ]
        workers, failures = {}, {}
        for worker in starting:
            stack.enter_context(closing(worker))
            try:
                worker.answer()
                workers[worker.name] = worker
            except RunFailed as error:
                failures[worker.name] = str(error)
        if "diffusers" not in workers:
            raise RunFailed(failures["diffusers"])
        for method, pipeline in PIPELINES.items():
            turns = {
                way: lambda worker=worker, method=method: worker.order(f"{method}\t{timed[method]}")["seconds"]
                for way, worker in workers.items()
            }
            times = in_turns(turns, rounds)
            images = {}
            for number, (way, worker) in enumerate(workers.items()):
                file = folder / f"{method}-{number}.npy"
                worker.order(f"{method}\t{compared[method]}\t{file}")
                images[way] = np.load(file).astype(int)
            result.details[method] = {"steps": timed[method], "batch": BATCH, "seconds": times}
            there = f"{pipeline}: {BATCH / Spread.of(times['diffusers']).median:.1f} images/s"
            for way, (_, to_reach) in WAYS.items():
                what = f"{method.upper()}, {timed[method]} steps, 1.1M parameters at 16x16, {way}"
                if way not in workers:
                    result.rows.append(Row(what, skipped=failures.get(way, "not tried with --quick")))
                    continue
                speed = f"{BATCH / Spread.of(times[way]).median:.1f} images/s"
                result.rows.append(Row(what, speed, there, ratios(times["diffusers"], times[way]), to_reach=to_reach))
                difference = np.abs(images[way] - images["diffusers"])
                share = 100 * float((difference <= 1).mean())
                result.rows.append(
                    Row(
                        f"its values within one grey level of {pipeline}'s, {compared[method]} steps",
                        f"largest difference {difference.max()}",
                        "",
                        Spread.of([share]),
                        "%",
                        None if "bf16" in way else EQUAL_SHARE,
                    )
                )
    write_result("sampling", result, options.output_dir)


if __name__ == "__main__":
    run_script(main)
