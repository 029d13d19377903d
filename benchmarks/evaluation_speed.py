#!/usr/bin/env python
"""The time of a FID from two folders of PNG files, beside clean-fid and torch-fidelity.

    python -m benchmarks.evaluation_speed                       # 400 images of each, once
    python -m benchmarks.evaluation_speed --num_images 5000     # an hour on two cores

Test images of CIFAR-10 against its training images. Everybody starts a process of his own and does all the work,
imports and the weights' loading included; the weights are the same. With few images, what does not depend on their
number weighs more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.evaluation_parity import by_clean_fid, by_evaluate, by_torch_fidelity, quietly, write_folders
from benchmarks.measuring import (
    ROOT,
    Result,
    Row,
    Spread,
    add_data,
    in_turns,
    last_line,
    parser,
    ratios,
    seconds,
    write_result,
)
from common.errors import RunFailed, run_script
from common.files import default_cache_dir, sha256
from evaluation.inception import TORCH_FIDELITY, converted, find_source

HERE, CLEAN_HERE, FIDELITY, CLEAN = "evaluate.py", "evaluate.py, mode clean", "torch-fidelity", "clean-fid"
MODES = {HERE: "legacy_tensorflow", CLEAN_HERE: "clean"}
FASTER, FASTER_TOGETHER, MOST_DIFFERENCE = 2.0, 3.0, 1e-3


def as_peer(peer: str, test: Path, train: Path, weights: Path) -> dict[str, float]:
    """Measure the folders by a package, in this process."""
    if peer == FIDELITY:
        return quietly(by_torch_fidelity, test, train, weights)
    source = find_source(default_cache_dir())
    if sha256(source) == TORCH_FIDELITY:
        raise RunFailed(f"{source} is no TorchScript, and {CLEAN}'s own network is")
    script = torch.jit.load(source, map_location="cpu").eval()
    with torch.inference_mode():
        return quietly(by_clean_fid, test, train, lambda images: {"features": script(images)})


def main() -> None:
    arguments = parser(__doc__)
    add_data(arguments)
    arguments.add_argument("--num_images", type=int, default=400, help="of each folder (default: %(default)s)")
    arguments.add_argument("--rounds", type=int, default=1, help="how often everybody measures (default: %(default)s)")
    arguments.add_argument("--peer", nargs=4, help="used by the benchmark itself")
    options = arguments.parse_args()
    if options.peer:
        peer, *paths = options.peer
        print(json.dumps(as_peer(peer, *map(Path, paths))))
        return
    count = 20 if options.quick else options.num_images
    source = find_source(default_cache_dir())
    state = converted(source, sha256(source), default_cache_dir())
    metrics: dict[str, dict[str, float]] = {}
    with TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = Path(temporary)
        test, train = write_folders(options.data, count, folder)
        weights = folder / "weights.pth"
        # With a last layer, which torch-fidelity's files have and nothing here looks at.
        layer = {"fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}
        torch.save({**layer, **state}, weights)

        def measure(way: str) -> float:
            if way in MODES:
                return seconds(lambda: metrics.update({way: by_evaluate(test, train, [MODES[way]], [])}))
            command = [sys.executable, "-m", "benchmarks.evaluation_speed", "--peer", way, test, train, weights]
            done: list[subprocess.CompletedProcess] = []
            spent = seconds(lambda: done.append(subprocess.run(command, cwd=ROOT, capture_output=True, text=True)))
            if done[0].returncode != 0:
                raise RunFailed(f"{way}: {last_line(done[0].stderr)}")
            metrics[way] = json.loads(last_line(done[0].stdout))
            return spent

        ways = {way: lambda way=way: measure(way) for way in (HERE, FIDELITY, CLEAN_HERE, CLEAN)}
        times = in_turns(ways, 1 if options.quick else options.rounds, warm_up=0)

    def row(what: str, ours: str, peer: str, to_reach: float) -> Row:
        columns = f"{Spread.of(times[ours]).median:.0f} s", f"{peer}: {Spread.of(times[peer]).median:.0f} s"
        return Row(f"{what}, 2 x {count:,} images", *columns, ratios(times[peer], times[ours]), to_reach=to_reach)

    rows = [
        row("FID, KID, precision and recall", HERE, FIDELITY, FASTER_TOGETHER),
        row("FID as clean-fid computes it (here with KID, precision and recall)", CLEAN_HERE, CLEAN, FASTER),
    ]
    for ours, peer, name in ((HERE, FIDELITY, "fid"), (CLEAN_HERE, CLEAN, "fid_clean")):
        mine, theirs = metrics[ours][name], metrics[peer][name]
        columns = f"{mine:.6g}", f"{peer}: {theirs:.6g}"
        difference = Spread.of([abs(mine - theirs)])
        rows.append(Row(f"difference of that FID from {peer}'s", *columns, difference, "", MOST_DIFFERENCE, "at most"))
    write_result("evaluation_speed", Result(rows, {"seconds": times, "metrics": metrics}), options.output_dir)


if __name__ == "__main__":
    run_script(main)
