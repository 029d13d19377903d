#!/usr/bin/env python
"""FID of CIFAR-10's test images against its training images, by evaluate.py and by those whom papers used.

    python benchmarks/evaluation_parity.py uoft-cs/cifar10 --num_images 2000 10000

Everybody reads the same two folders of PNG files and does all of his own work: decoding, resizing, network, statistics
and distance. The network's weights are the same, given to each in his own format; KID, precision and recall are
compared with torch-fidelity's. evaluate.py is measured as it comes (compiled from 10,000 images on), not compiled, and
in bf16. Results are added to those in benchmarks/results/evaluation_parity.json, with the machine they were found on.
"""

import argparse
import contextlib
import csv
import io
import json
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from common.errors import run_script  # noqa: E402
from common.files import default_cache_dir, sha256, write_atomically  # noqa: E402
from common.machine import usable_cores  # noqa: E402
from common.progress import progress_bar  # noqa: E402
from evaluation.inception import build, converted, find_source  # noqa: E402
from image_data.data_options import DataOptions  # noqa: E402
from image_data.sources import load_images  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "evaluation_parity.json"
VARIANTS = {"default": [], "not compiled": ["--no_compile"], "bf16": ["--mixed_precision=bf16"]}
# The peers, and the mode of evaluate.py that does as each does.
MODES = {"torch-fidelity": "legacy_tensorflow", "clean-fid": "clean", "pytorch-fid": "legacy_pytorch"}
CPU = torch.device("cpu")


def write_folders(data: str, count: int, root: Path) -> tuple[Path, Path]:
    """The first images of both splits, as they are stored."""
    folders = root / "test", root / "train"
    for folder in folders:
        source = load_images(DataOptions(data), split=folder.name)
        folder.mkdir()
        for index in progress_bar(iterable=range(count), desc=str(folder)):
            (folder / f"{index:06d}.png").write_bytes(source.read(index))
    return folders


def by_evaluate(test: Path, train: Path, modes: list[str], flags: list[str]) -> dict[str, float]:
    """evaluate.py as a user calls it; the training images are computed too, not taken from its cache."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        cache.mkdir()
        for path in default_cache_dir().glob("inception-*"):
            (cache / path.name).symlink_to(path)
        command = [sys.executable, str(ROOT / "evaluate.py"), f"--generated={test}", f"--real={train}"]
        command += [f"--output_dir={folder}", f"--cache_dir={cache}", "--modes", *modes, *flags]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        with (Path(folder) / "evaluation_results.csv").open(newline="") as file:
            (row,) = csv.DictReader(file)
    return {name.partition("@")[0]: float(value) for name, value in row.items() if "@" in name}


def by_torch_fidelity(test: Path, train: Path, state: Path) -> dict[str, float]:
    from torch_fidelity import calculate_metrics

    metrics = calculate_metrics(
        input1=str(test),
        input2=str(train),
        feature_extractor="inception-v3-compat",
        feature_extractor_weights_path=str(state),
        **{"fid": True, "kid": True, "prc": True},
        kid_subset_size=min(1000, len(list(test.iterdir()))),
        cuda=torch.cuda.is_available(),
        cache=False,
        verbose=False,
    )
    return {
        "fid": metrics["frechet_inception_distance"],
        "kid": metrics["kernel_inception_distance_mean"],
        "precision_inception": metrics["precision"],
        "recall_inception": metrics["recall"],
    }


def by_clean_fid(
    test: Path, train: Path, network: Callable[[torch.Tensor], dict[str, torch.Tensor]]
) -> dict[str, float]:
    """Mode clean. Its own network cannot be fetched everywhere, so that this one takes its place."""
    from cleanfid.fid import compare_folders

    def features(images: torch.Tensor) -> torch.Tensor:
        return network((images - 128) / 128)["features"]

    folders = str(test), str(train)
    distance = compare_folders(*folders, features, "clean", num_workers=0, batch_size=50, device=CPU)
    return {"fid_clean": float(distance)}


def by_pytorch_fid(test: Path, train: Path, state: Path) -> dict[str, float]:
    """With the weights that it would have fetched."""
    from pytorch_fid import fid_score, inception

    inception.load_state_dict_from_url = lambda *given, **options: torch.load(state, weights_only=True)
    distance = fid_score.calculate_fid_given_paths([str(test), str(train)], 50, CPU, 2048, num_workers=0)
    return {"fid_legacy_pytorch": distance}


def quietly(action: Callable[..., dict[str, float]], *arguments: object) -> dict[str, float]:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return action(*arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="CIFAR-10 as datasets reads it: a folder or a Hub id")
    parser.add_argument("--num_images", type=int, nargs="+", default=[2000, 10_000])
    parser.add_argument("--peers", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    options = parser.parse_args()

    source = find_source(default_cache_dir())
    state = converted(source, sha256(source), default_cache_dir())
    for count in options.num_images:
        with tempfile.TemporaryDirectory() as folder:
            test, train = write_folders(options.data, count, Path(folder))
            # With a last layer, which the peers' files have and nothing here looks at.
            layer = {"fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}
            torch.save({**layer, **state}, Path(folder) / "weights.pth")
            actions = {
                "torch-fidelity": (by_torch_fidelity, Path(folder) / "weights.pth"),
                "clean-fid": (by_clean_fid, build(state).to(memory_format=torch.channels_last)),
                "pytorch-fid": (by_pytorch_fid, Path(folder) / "weights.pth"),
            }
            modes = [MODES[peer] for peer in options.peers]
            for variant in options.variants:
                ours = quietly(by_evaluate, test, train, modes, VARIANTS[variant])
                record(count, "evaluate.py", variant, ours)
            for peer in options.peers:
                action, weights = actions[peer]
                record(count, "peers", peer, quietly(action, test, train, weights))


def record(count: int, side: str, name: str, metrics: dict[str, float]) -> None:
    """Add to what is known of so many images, and print how far evaluate.py is from the others."""
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    known = results.setdefault(str(count), {"evaluate.py": {}, "peers": {}})
    known[side][name] = known[side].get(name, {}) | metrics
    known["relative_differences"] = {
        f"{metric}: {variant}, {peer}": ours[metric] / value - 1
        for peer, theirs in known["peers"].items()
        for variant, ours in known["evaluate.py"].items()
        for metric, value in theirs.items()
        if metric in ours
    }
    known["machine"] = {
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "processor": platform.processor(),
        "torch": torch.__version__,
    }
    write_atomically(RESULT, json.dumps(results, indent=2) + "\n")
    print(f"{count} images, {name}: {metrics}")
    for what, difference in known["relative_differences"].items():
        print(f"  {what}: {difference:+.2g}")


if __name__ == "__main__":
    run_script(main)
