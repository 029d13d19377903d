#!/usr/bin/env python
"""Train on the digits by class and by text, and count how many samples are the digit that was asked for.

    python benchmarks/conditional_digits.py --seconds 180

A classifier that has read real digits it was not trained on says what a sample shows; how many of those it reads is
part of the result. The output file keeps what it says of the same models; give --folder to come back to them.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from common.files import default_cache_dir  # noqa: E402
from evaluation.classifier import Classifier, load_classifier  # noqa: E402
from image_data.annotations import class_in_words, find_labels  # noqa: E402
from image_data.data_options import DataOptions  # noqa: E402
from image_data.decode import decode_image  # noqa: E402
from image_data.sources import load_images  # noqa: E402

SAMPLERS = {"DDPM": ["--ddpm"], "DDIM-50": ["--ddim", "--num_inference_steps=50"]}
DIGITS = list("0123456789")
ASKED = {
    "class": ["--class_labels", "all"],
    "text": ["--prompt", *(f"a handwritten {class_in_words(digit)}" for digit in DIGITS)],
}


def run(script: str, *flags: str) -> None:
    subprocess.run([sys.executable, script, *flags], cwd=ROOT, check=True)


def read_digits() -> Classifier:
    source = load_images(DataOptions("digits"))
    images = torch.stack([torch.from_numpy(decode_image(source.read(row), 1, 8, True)) for row in range(len(source))])
    return load_classifier(images, find_labels(source).of_row, default_cache_dir(), torch.device("cpu"))


def measure(classifier: Classifier, folder: Path) -> dict[str, object]:
    """The image of seed s was told to show the digit s % 10."""
    with np.load(folder / "samples.npz") as file:
        images, seeds = torch.from_numpy(file["arr_0"]).permute(0, 3, 1, 2), torch.from_numpy(file["seeds"])
    asked, read = seeds % len(DIGITS), classifier.classes_of(images)
    right = asked == read
    return {
        "images": len(images),
        "condition_accuracy": right.double().mean().item(),
        "condition_accuracy_by_digit": {digit: right[asked == int(digit)].double().mean().item() for digit in DIGITS},
        "read_as": dict(zip(DIGITS, torch.bincount(read, minlength=len(DIGITS)).tolist(), strict=True)),
    }


def cell_of(row: dict[str, object]) -> tuple[str, str, float]:
    return row["condition"], row["sampler"], row["guidance_scale"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180, help="training time of each model")
    parser.add_argument("--images", type=int, default=1000, help="samples of each sampler and scale")
    parser.add_argument("--guidance_scales", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--conditions", nargs="+", choices=ASKED, default=list(ASKED))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "conditional_digits.json")
    parser.add_argument("--folder", type=Path, help="keep models and samples here; what is there is not made again")
    parser.add_argument("training", nargs="*", help="more flags of train_conditional.py, after --")
    arguments = parser.parse_args()

    classifier = read_digits()
    known = json.loads(arguments.output.read_text())["results"] if arguments.output.exists() else []
    results, models = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        for condition in arguments.conditions:
            model = folder / condition
            budget = [
                "--max_train_steps=1000000",
                f"--max_train_seconds={arguments.seconds}",
                "--save_images_steps=1000000",
                "--ddpm_num_inference_steps=10",  # of the grid at the end, which nobody looks at
            ]
            config = f"--config=configs/digits_{condition}.yaml"
            run("train_conditional.py", config, *budget, "--logger=none", *arguments.training, f"--output_dir={model}")
            last = json.loads((model / "metrics.jsonl").read_text().splitlines()[-1])
            models[condition] = {"train_seconds": last["train_seconds"], "steps": last["step"]}
            for sampler, scale in itertools.product(arguments.samplers, arguments.guidance_scales):
                samples = model / f"{sampler}-{scale:g}"
                how = [*SAMPLERS[sampler], f"--guidance_scale={scale}", "--format=npz", "--batch_size=250"]
                images = [f"--num_images={arguments.images}", f"--output_dir={samples}"]
                run("generate.py", str(model), *how, *images, *ASKED[condition])
                drawn = {"condition": condition, "sampler": sampler, "guidance_scale": scale}
                results.append({**drawn, **models[condition], **measure(classifier, samples)})
                print(
                    f"{condition}, {sampler}, guidance {scale:g}: {results[-1]['condition_accuracy']:.1%} correct",
                    flush=True,
                )
    # What the file says of other samplers still holds, if the model is the same.
    measured = {cell_of(row) for row in results}
    results += [
        row for row in known if cell_of(row) not in measured and models.get(row["condition"], {}).items() <= row.items()
    ]
    record = {
        "cores": os.cpu_count(),
        "classifier": {"accuracy": classifier.accuracy, "held_out_images": classifier.num_held_out},
        "results": sorted(results, key=cell_of),
    }
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
