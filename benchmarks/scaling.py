#!/usr/bin/env python
"""Images a second on several processes, and a model of what more GPUs would do.

    python -m benchmarks.scaling                                  # one and two processes here, with one thread each
    torchrun --nproc_per_node 8 benchmarks/scaling.py             # eight GPUs; run it with 1, 2, 4 of them as well
    accelerate launch --multi_gpu benchmarks/scaling.py           # all GPUs of this machine

Every process trains on its own share of a batch that grows with their number, through the project's script. What is
found is added to benchmarks/results/scaling.json, together with the model, which is one: its step is measured or
estimated, and its exchange that of a ring with the bandwidths and latencies that are named here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.measuring import (  # noqa: E402
    RESULTS,
    Result,
    Row,
    Spread,
    describe_network,
    describe_paper_network,
    last_line,
    ratios,
    write_result,
)
from common.errors import RunFailed, run_script  # noqa: E402
from common.machine import usable_cores  # noqa: E402

NAME = "scaling"
STEPS, LOGGING_STEPS, ROUNDS, QUICK_STEPS = 50, 10, 3, 10
TO_REACH = 1.9  # x the images of one process, by two
EXCHANGES = 10
LONGEST = 600  # seconds, of one measurement

# The model.

FLOAT32 = 4
BUCKET = 25 * 2**20  # bytes, as DistributedDataParallel exchanges them
BACKWARD_SHARE = 2 / 3  # of a step: a backward pass costs about two forward passes
HOST_SECONDS = 0.028  # of a step that is not compiled: estimated by counting its operations, 26 to 30 ms
COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024)
IMAGES_A_GPU, PAPER_BATCH = 16, 128


@dataclass(frozen=True)
class Interconnect:
    """How GPUs are joined: bytes a second in one direction, and the seconds of one hop, within a node and between."""

    name: str
    gpus_a_node: int
    within_node: float
    between_nodes: float
    hop_within: float
    hop_between: float
    base: float
    source: str

    def all_reduce_seconds(self, size: float, count: int) -> float:
        """Return the time of a ring: 2 (n - 1) hops, in each of which every GPU sends 1 / n of the bytes."""
        if count == 1:
            return 0.0
        nodes = math.ceil(count / self.gpus_a_node)
        hops, between = 2 * (count - 1), 2 * (nodes - 1)
        bandwidth = self.within_node if nodes == 1 else min(self.within_node, self.between_nodes)
        latency = self.base + (hops - between) * self.hop_within + between * self.hop_between
        return latency + hops * size / count / bandwidth


H100_NODES = Interconnect(
    "8 x H100 a node, NVLink 4, eight ports of InfiniBand NDR",
    *(8, 450e9, 8 * 50e9, 3.4e-6, 9.6e-6, 8.4e-6),
    "NVIDIA's data sheets of H100 (900 GB/s in both directions) and DGX H100 (8 x 400 Gb/s); latencies of a ring with "
    "the protocol Simple from NCCL's src/graph/tuning.cc",
)


def exposed_seconds(exchange: float, buckets: int, backward: float) -> float:
    """Return how much longer a step is for its exchange, of equal buckets sent while the gradient is computed.

    Bucket i of b is there after i / b of the backward pass. The last one has nothing to hide behind; if sending takes
    longer than computing, the buckets queue from the first one on.
    """
    end = max(backward + exchange / buckets, backward / buckets + exchange)
    return end - backward


def model(step: float, batch: int, count: int, size: float, wires: Interconnect) -> dict[str, float]:
    """Return what a step of `count` GPUs takes, if one GPU takes `step` seconds for its `batch` images."""
    buckets = math.ceil(size / BUCKET)
    exchange = buckets * wires.all_reduce_seconds(size / buckets, count)
    exposed = 0.0 if count == 1 else exposed_seconds(exchange, buckets, BACKWARD_SHARE * step)
    return {
        "gpus": count,
        "images_a_gpu": batch,
        "step_ms": 1000 * (step + exposed),
        "exchange_ms": 1000 * exchange,
        "communication_share": exposed / (step + exposed),
        "images_per_second": count * batch / (step + exposed),
        "efficiency": step / (step + exposed),
    }


def estimated_step(gpu: str, precision: str, batch: int) -> float:
    """Return the seconds of a step by counted operations at the better end of the assumed utilisation."""
    table = json.loads((RESULTS / "training_cost.json").read_text())
    (row,) = (row for row in table["hours_on_one_gpu"] if (row["gpu"], row["precision"]) == (gpu, precision))
    seconds_an_image = min(row["training_hours"]) * 3600 / (800_000 * PAPER_BATCH)
    return seconds_an_image * batch


def paper_gradient_bytes() -> int:
    """Return the bytes of the gradient of the paper's network."""
    from training.network import PAPER_CIFAR10_PARAMETERS

    return PAPER_CIFAR10_PARAMETERS * FLOAT32


def modelled(measured: list[dict]) -> list[dict]:
    """Return the tables of the model: the paper's batch shared by more GPUs, and 16 images for each of them."""
    size = paper_gradient_bytes()
    tables = []
    for host in (HOST_SECONDS, 0.0):

        def step(batch: int, host: float = host) -> float:
            return max(host, estimated_step("H100 SXM5", "bf16", batch))

        of_host = f"at least {1000 * host:.0f} ms of the host" if host else "a host that is never waited for"
        alone = model(step(PAPER_BATCH), PAPER_BATCH, 1, size, H100_NODES)
        rows = [alone]
        for count in (count for count in COUNTS if count <= PAPER_BATCH):
            row = model(step(PAPER_BATCH // count), PAPER_BATCH // count, count, size, H100_NODES)
            row["efficiency"] = row["images_per_second"] / count / alone["images_per_second"]
            rows.append(row)
        gpu = f"H100 in bf16, estimated, {of_host}"
        tables.append({"what": f"the paper's batch of {PAPER_BATCH} divided", "step": gpu, "rows": rows})
        rows = [model(step(IMAGES_A_GPU), IMAGES_A_GPU, count, size, H100_NODES) for count in (1, *COUNTS)]
        tables.append({"what": f"{IMAGES_A_GPU} images a GPU", "step": gpu, "rows": rows})
    for one in measured:
        # On GPUs this is the table that counts: its step is measured.
        if one["processes"] == 1 and one["parameters"] * FLOAT32 == size:
            step, batch = one["batch"] / median(one["images_per_second"]), one["batch"]
            rows = [model(step, batch, count, size, H100_NODES) for count in (1, *COUNTS)]
            what = f"{batch} images a GPU"
            tables.append({"what": what, "step": f"{one['device']}, measured: {1000 * step:.0f} ms", "rows": rows})
    return tables


# The measurement.


def flags_of_training(options: argparse.Namespace, count: int, folder: Path) -> list[str]:
    """Return the flags of a training that is long enough to be timed; digits do for that."""
    folder.mkdir(parents=True, exist_ok=True)
    resolution = 32 if options.network == "paper" else 16
    network = folder / f"network-{os.getpid()}.json"  # of each process, for they all write it
    if options.network == "paper":
        describe_paper_network(network)
    else:
        describe_network(network, resolution, (4, 8, 8) if options.quick else (32, 64, 64))
    steps = QUICK_STEPS if options.quick else options.steps
    return [
        *("--dataset_name=digits", f"--resolution={resolution}", "--channels=3", "--overwrite", "--logger=none"),
        *(f"--model_config_name_or_path={network}", f"--train_batch_size={options.batch_size}"),
        *(f"--total_batch_size={options.batch_size * count}", f"--max_train_steps={steps}"),
        *(f"--logging_steps={max(1, min(LOGGING_STEPS, steps // 2))}", "--eval_batch_size=1"),
        *("--ddpm_num_inference_steps=1", f"--output_dir={folder / 'run'}", "--checkpointing_steps=1000000"),
        *(["--mixed_precision=bf16"] if options.bf16 else []),
    ]


def measure(options: argparse.Namespace, count: int, folder: Path) -> dict | None:
    """Train in this process, one of so many, and return what the main one found."""
    import torch
    import torch.distributed as dist

    import train_unconditional
    from common.processes import Processes

    flags = flags_of_training(options, count, folder)
    parameters = parameters_of(folder / f"network-{os.getpid()}.json")
    exchange: list[float] = []
    finish = Processes.finish

    def time_exchange(processes: Processes) -> None:
        """Exchange as many bytes as the gradient has, with nothing beside it, before the group is left."""
        if count > 1:
            gradient = torch.zeros(parameters, device=processes.device)
            for _ in range(EXCHANGES):
                start = time.perf_counter()
                dist.all_reduce(gradient)
                processes.synchronize_device()
                exchange.append(time.perf_counter() - start)
        finish(processes)

    sys.argv = ["train_unconditional.py", *flags]
    with patch.object(Processes, "finish", time_exchange):
        train_unconditional.main()
    if os.environ.get("RANK", "0") != "0":
        return None
    on_gpu = torch.cuda.is_available()
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    return {
        "processes": count,
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "threads": torch.get_num_threads(),
        "network": options.network,
        "parameters": parameters,
        "batch": options.batch_size,
        "precision": "bf16" if options.bf16 else "float32",
        "images_per_second": [median(line["images_per_second"] for line in lines)],
        "communication_share": [median(line["communication_share"] for line in lines)],
        "all_reduce_ms": [1000 * median(exchange)] if exchange else [],
    }


def parameters_of(network: Path) -> int:
    """Count the parameters of a network by its configuration, without giving them memory."""
    import torch
    from diffusers import UNet2DModel

    with torch.device("meta"):
        unet = UNet2DModel.from_config(json.loads(network.read_text()))
    return sum(parameter.numel() for parameter in unet.parameters())


def start(options: argparse.Namespace, count: int, folder: Path) -> dict:
    """Start so many processes of this file, with one thread each, and return what they found."""
    found = folder / f"found-{count}.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"] if count > 1 else []
    arguments = [__file__, f"--found={found}", f"--work_dir={folder}", f"--network={options.network}"]
    arguments += [f"--batch_size={options.batch_size}", f"--steps={options.steps}"]
    arguments += ["--quick"] * options.quick + ["--bf16"] * options.bf16
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, *launcher, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        _, said = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        process.terminate()  # which torchrun passes on to its processes
        process.communicate()
        raise RunFailed(f"{count} process(es): not ready after {LONGEST} seconds") from None
    if process.returncode != 0:
        raise RunFailed(f"{count} process(es): {last_line(said)}")
    return json.loads(found.read_text())


def start_apart(options: argparse.Namespace, folder: Path) -> float:
    """Start two trainings at once that know nothing of each other, and return their images a second in all."""
    folders = [folder / name for name in ("one", "other")]
    for each in folders:
        each.mkdir(exist_ok=True)
    with ThreadPoolExecutor(len(folders)) as pool:
        found = pool.map(partial(start, options, 1), folders)
    return sum(one["images_per_second"][0] for one in found)


def merged(before: list[dict], new: list[dict]) -> list[dict]:
    """Add to the list of earlier measurements, and replace those of the same kind."""

    def kind(one: dict) -> tuple:
        return tuple(one[name] for name in ("processes", "device", "threads", "network", "batch", "precision"))

    kinds = {kind(one) for one in new}
    return sorted([one for one in before if kind(one) not in kinds] + new, key=kind)


def rows_of(measured: list[dict]) -> list[Row]:
    """Compare several processes with one of the same kind."""
    rows = []
    for one in (one for one in measured if one["processes"] > 1):
        names = ("device", "threads", "network", "batch", "precision")
        alone = [other for other in measured if other["processes"] == 1 and all(other[n] == one[n] for n in names)]
        if not alone:
            continue
        count, threads = one["processes"], one["threads"]
        rates = [several["images_per_second"] for several in (one, alone[0])]
        in_turns = len(rates[0]) == len(rates[1])
        times = ratios(*rates) if in_turns else Spread.of([median(rates[0]) / median(rates[1])])
        on = f"{one['device']}, {threads} thread(s) each" if one["device"] == "CPU" else one["device"]
        rows.append(
            Row(
                f"{count} processes, {one['batch']} images each, {on}",
                f"{median(rates[0]):,.0f} images/s",
                f"one process: {median(rates[1]):,.0f} images/s",
                times,
                to_reach=TO_REACH if count == 2 else 0.95 * count,
            )
        )
    return rows


def predicted(measured: list[dict]) -> dict[str, float]:
    """Return what the model says of the two processes measured here, from one's step and the time of an exchange."""
    pairs = {one["processes"]: one for one in measured if one["device"] == "CPU" and one["network"] == "small"}
    if not {1, 2} <= pairs.keys() or not pairs[2]["all_reduce_ms"]:
        return {}
    step = pairs[1]["batch"] / median(pairs[1]["images_per_second"])
    buckets = math.ceil(pairs[1]["parameters"] * FLOAT32 / BUCKET)
    exposed = exposed_seconds(median(pairs[2]["all_reduce_ms"]) / 1000, buckets, BACKWARD_SHARE * step)
    both = 2 * pairs[2]["batch"]
    return {
        "predicted_images_per_second": both / (step + exposed),
        "measured_images_per_second": median(pairs[2]["images_per_second"]),
        "predicted_communication_share": exposed / (step + exposed),
        "measured_communication_share": median(pairs[2]["communication_share"]),
    }


def row_of_apart(apart: list[float], measured: list[dict]) -> list[Row]:
    """Compare two trainings that exchange nothing with one: more than this the machine does not allow."""
    alone = [one for one in measured if (one["processes"], one["device"], one["network"]) == (1, "CPU", "small")]
    if not apart or not alone:
        return []
    rates = alone[0]["images_per_second"]
    here, peer = f"{median(apart):,.0f} images/s", f"one process: {median(rates):,.0f} images/s"
    return [Row("2 trainings at once that exchange nothing, 1 thread each", here, peer, ratios(apart, rates))]


def write(measured: list[dict], output_dir: Path, apart: list[float] | None = None) -> None:
    """Add measurements to the file, and the model as it follows from all of them."""
    file = output_dir / f"{NAME}.json"
    before = json.loads(file.read_text())["details"] if file.exists() else {}
    everything = merged(before.get("measured", []), measured)
    apart = apart or before.get("apart_images_per_second", [])
    details = {
        "measured": everything,
        "apart_images_per_second": apart,
        "predicted": predicted(everything),
        "gradient_bytes": paper_gradient_bytes(),
        "assumptions": {
            "interconnect": asdict(H100_NODES),
            "bucket_bytes": BUCKET,
            "backward_share": BACKWARD_SHARE,
            "host_seconds": HOST_SECONDS,
        },
        "model": modelled(everything),
    }
    write_result(NAME, Result(rows_of(everything) + row_of_apart(apart, everything), details), output_dir)


def parse() -> argparse.Namespace:
    from benchmarks.measuring import parser

    made = parser(__doc__)
    made.add_argument(
        "--network", choices=("small", "paper"), help="default: on GPUs the paper's, else 1.1M parameters"
    )
    made.add_argument("--batch_size", type=int, help="images for each process (default: 16 on GPUs, else 64)")
    made.add_argument("--steps", type=int, default=STEPS, help="of each measurement (default: %(default)s)")
    made.add_argument("--rounds", type=int, default=ROUNDS, help="of one and two processes (default: %(default)s)")
    made.add_argument("--bf16", action="store_true", help="train in bf16")
    made.add_argument("--work_dir", type=Path, default=Path("runs/scaling"), help="for the runs (default: %(default)s)")
    made.add_argument("--found", type=Path, help="used by the benchmark itself")
    options = made.parse_args()
    import torch

    on_gpu = torch.cuda.is_available()
    options.network = options.network or ("paper" if on_gpu else "small")
    options.batch_size = options.batch_size or (16 if on_gpu else 64)
    return options


def main() -> None:
    options = parse()
    count = int(os.environ.get("WORLD_SIZE", 1))
    if options.found or count > 1 or "RANK" in os.environ:
        # The folder of each number of processes is its own, and the same on all of them.
        found = measure(options, count, options.work_dir / f"{count}")
        if found is not None and options.found:
            options.found.write_text(json.dumps(found))
        elif found is not None:
            write([found], options.output_dir)
            shutil.rmtree(options.work_dir / f"{count}", ignore_errors=True)
        return
    together: dict[int, dict] = {}
    apart: list[float] = []
    with TemporaryDirectory(prefix="benchmark-") as folder:
        for _ in range(1 if options.quick else options.rounds):
            for count in (1, 2):
                found = start(options, count, Path(folder))
                if count in together:
                    for name in ("images_per_second", "communication_share", "all_reduce_ms"):
                        together[count][name] += found[name]
                else:
                    together[count] = found
            apart.append(start_apart(options, Path(folder)))
    if usable_cores() < 2:
        print("This machine has one core: two processes share it, and the figures say nothing about scaling")
    write(list(together.values()), options.output_dir, apart)


if __name__ == "__main__":
    run_script(main)
