"""Change files at random, every kind that is read, and say where that ends in anything but an answer.

    python tests/fuzz.py                # what `make fuzz` does; writes docs/fuzz.json
    python tests/fuzz.py 20 weights     # 20 mutations of what has this word in its name

A mutation is a function of the seed, the target and its number. None may end in a traceback, hang, run code, or change
a number in silence: where a file carries a hash, what is computed from it is what the whole file gives, or refused.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # before torch reads it
ROOT = Path(__file__).parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import forked  # noqa: E402
import mistake_cases as cases  # noqa: E402
import numpy as np  # noqa: E402
import records  # noqa: E402
from mistakes import Case, report, try_all  # noqa: E402
from PIL import Image  # noqa: E402
from workshop import Workshop, write  # noqa: E402

MUTATIONS = 2000
LONGEST = 30.0  # seconds of one command
WORDS = (
    b'nan NaN -1 0 1e999 99999999999999999999 -0.0 null true "" [] {} "x" .. ../../x /etc/passwd \xff \0 1.5 !!python'
)
NUMBERS = re.compile(rb'-?\d+(\.\d+)?|"[^"]*"|\b(null|true|false)\b')


@dataclass(frozen=True)
class Target:
    """A file that is read, and a command that reads it."""

    name: str
    file: str  # below the folder of the case; the first that this pattern names
    command: str
    make: Callable[[Path], None] | None = None  # if it is not in the workshop
    check: Callable[[Path], str | None] | None = None  # of a file with a hash: is the result that of the whole file?
    refused: bool = False  # a file with a hash that must not be used at all, unless what comes of it is checked
    needs: tuple[str, ...] = ()  # what else is to be there
    share: int = 1  # of the mutations, relative to the others


def mutate(path: Path, seed: str) -> None:
    """Change a file: some bits, some bytes, its length, or in a text a value."""
    generator, data = random.Random(seed), bytearray(path.read_bytes())
    before = bytes(data)
    while bytes(data) == before:
        place = generator.randrange(len(data) + 1)
        end = min(len(data), place + generator.choice((1, 4, 100, len(data))))
        noise = generator.randbytes(generator.choice((1, 4, 64)))
        values = list(NUMBERS.finditer(bytes(data[:100_000])))
        kind = generator.choice(
            ("bits", "bits", "bits", "bytes", "cut", "remove", "repeat", "insert", "value", "value", "header")
        )
        if kind == "bits" and data:
            for _ in range(generator.choice((1, 1, 8))):
                data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        elif kind == "bytes":
            data[place : place + len(noise)] = noise
        elif kind == "cut":
            del data[place:]
        elif kind == "remove":
            del data[place:end]
        elif kind == "repeat":
            data[place:place] = data[place:end][:10_000]
        elif kind == "insert":
            data[place:place] = noise
        elif kind == "header" and data:
            data[generator.randrange(min(len(data), 64))] = generator.randrange(256)
        elif kind == "value" and values:
            value = generator.choice(values)
            data[slice(*value.span())] = generator.choice(WORDS.split() + [PLANTED])
    path.write_bytes(data)


PLANTED = cases.PLANTED_YAML.encode()


# Files that are in no workshop.


def picture(kind: str, path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)
    for number in range(3):
        write(path.parent / f"whole{number}.png", cases.PNG)
    Image.fromarray(pixels).save(path, kind)


def compressed_tar(path: Path) -> None:
    shutil.make_archive(str(path).removesuffix(".tar.gz"), "gztar", ROOT / "docs", "digits.png")


def saved_data_set(path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_dict({"image": [{"bytes": cases.PNG, "path": None}] * 12})
    data.cast_column("image", datasets.Image(decode=False)).save_to_disk(path.parents[0])


def text(content: str | bytes) -> Callable[[Path], None]:
    return lambda path: write(path, content.encode() if isinstance(content, str) else content)


def same_images(place: Path) -> str | None:
    """The images, if there are any, must be those that the workshop generated with the whole run."""
    images = sorted((place / "out" / "images").glob("*.png"))
    same = all(path.read_bytes() == (place / "generated" / "images" / path.name).read_bytes() for path in images)
    return None if same else "other images than with the whole file"


PREPARE, TRAIN = f"{cases.PREPARE} it --output=out", cases.ON_DATA
CSV = "file_name,label,text\n" + "".join(f'{number:02}.png,"cat, dog",the digit\n' for number in range(12))
SAME_TABLE, SAME_LOSSES, SAME_TEXT = cases.same_table, cases.same_losses("run"), cases.same_losses("text_run")
CACHED_TRAINING = f"{cases.TRAIN} --cache_dir=cache --output_dir=out"
CACHED_TEXT = f"{cases.BY_TEXT} --cache_dir=cache"
CACHED_TABLE = cases.MEASURE_RUN.replace("{cache}", "--cache_dir=cache") + " --run_dir=run"
VISUALIZE = f"{cases.VISUALIZE} --run_dir=run"

TARGETS = [
    *(
        Target(f"image {kind}", f"it/mutated.{kind.lower()}", PREPARE, partial(picture, kind), share=2)
        for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "TGA", "JPEG2000")
    ),
    Target(
        "image to train on",
        "data/mutated.png",
        f"{TRAIN} --train_data_dir=data --on_bad_image=skip --channels=1 --dry_run",
        partial(picture, "PNG"),
    ),
    Target("archive zip", "photos.zip", f"{cases.PREPARE} photos.zip --output=out", share=3),
    Target("archive tar", "photos.tar", f"{cases.PREPARE} photos.tar --output=out", share=3),
    Target("archive tar.gz", "it.tar.gz", f"{cases.PREPARE} it.tar.gz --output=out", compressed_tar, share=2),
    Target("CSV of photos", "table/photos.csv", f"{cases.PREPARE} table --output=out", text(CSV), share=2),
    Target("JSON lines of photos", "captioned/metadata.jsonl", f"{cases.PREPARE} captioned --output=out", share=2),
    Target(
        "JSON lines to train on",
        "captioned/metadata.jsonl",
        f"{TRAIN} --train_data_dir=captioned --channels=1 --dry_run",
    ),
    Target("JSON of a preparation", "prepared/prepared.json", f"{cases.PREPARE} photos --output=prepared"),
    Target("npz of images", "samples.npz", f"{cases.EVALUATE} --real=photos --generated=samples.npz", share=2),
    Target(
        "npz of statistics",
        "it.npz",
        f"{cases.AGAINST} --statistics=it.npz --statistics_mode=legacy_tensorflow --modes=legacy_tensorflow",
        text(cases.npz(mu=np.zeros(16), sigma=np.eye(16))),
    ),
    Target(
        "parquet to measure", "parquet/train.parquet", f"{cases.EVALUATE} --real=photos --generated=parquet", share=2
    ),
    Target("parquet to train on", "parquet/train.parquet", f"{TRAIN} --dataset_name=./parquet --channels=1 --dry_run"),
    Target(
        "arrow",
        "saved/data-00000-of-00001.arrow",
        f"{TRAIN} --dataset_name=./saved --channels=1 --dry_run",
        saved_data_set,
    ),
    Target(
        "JSON of a saved data set",
        "saved/state.json",
        f"{TRAIN} --dataset_name=./saved --channels=1 --dry_run",
        saved_data_set,
    ),
    Target("JSON of a network", "pipeline/unet/config.json", f"{cases.PIPELINE}", share=3),
    Target("JSON of a scheduler", "pipeline/scheduler/scheduler_config.json", cases.PIPELINE, share=3),
    Target("JSON of a pipeline", "pipeline/model_index.json", cases.PIPELINE),
    Target(
        "JSON of a network to train",
        "network/config.json",
        f"{cases.TRAIN} --output_dir=out --model_config_name_or_path=network --dry_run",
        share=2,
    ),
    Target("JSON of a condition", "class_run/condition.json", f"{cases.WITH} --model=class_run --class_labels 1"),
    Target("JSON of samples", "generated/samples.json", cases.INTO, share=2),
    Target("JSON of a feature network", "vision/config.json", f"{cases.AGAINST} --real=photos"),
    Target("JSON of a processor", "vision/preprocessor_config.json", f"{cases.AGAINST} --real=photos"),
    Target("JSON of a text encoder", "encoder/config.json", f"{cases.BY_TEXT} --dry_run"),
    Target("JSON of a tokenizer", "encoder/tokenizer.json", f"{cases.BY_TEXT} --dry_run"),
    Target(
        "JSON of a manifest",
        "run/checkpoint-4/manifest.json",
        f"{cases.WITH} --model=run/checkpoint-4",
        check=same_images,  # it also has the hashes of files that are not read
        refused=True,
        needs=("generated",),
        share=3,
    ),
    Target(
        "JSON of a state",
        "run/checkpoint-4/state.json",
        f"{cases.WITH} --model=run/checkpoint-4",
        refused=True,
        share=2,
    ),
    Target(
        "weights of a checkpoint",
        "run/checkpoint-4/unet_ema/diffusion_pytorch_model.safetensors",
        f"{cases.WITH} --model=run/checkpoint-4",
        refused=True,
        share=4,
    ),
    Target("weights of a pipeline", "pipeline/unet/diffusion_pytorch_model.safetensors", cases.PIPELINE, share=3),
    Target("weights of a text encoder", "encoder/model.safetensors", f"{cases.BY_TEXT} --dry_run"),
    Target("weights of a feature network", "vision/model.safetensors", f"{cases.AGAINST} --real=photos"),
    Target("statistics", "statistics.safetensors", cases.STATISTICS, refused=True, share=3),
    Target(
        "state of a sampler",
        "learning_run/checkpoint-4/sampler.safetensors",
        f"{cases.VISUALIZE} --run_dir=learning_run",
    ),
    Target("optimiser to resume from", "run/checkpoint-4/optimizer.safetensors", f"{cases.AGAIN} --max_train_steps=5"),
    Target("cache of pixels", "cache/*/pixels", CACHED_TRAINING, check=SAME_LOSSES),
    Target("cache of an index", "cache/*/index.safetensors", CACHED_TRAINING, check=SAME_LOSSES, share=2),
    Target("cache of captions", "cache/captions-*", CACHED_TEXT, check=SAME_TEXT, share=2),
    Target("cache of statistics", "cache/statistics/*", CACHED_TABLE, check=SAME_TABLE, share=2),
    Target(
        "YAML of options",
        "it.yaml",
        "train_unconditional.py {tiny} --config=it.yaml --output_dir=out --dry_run",
        text((ROOT / "configs" / "digits.yaml").read_bytes()),
        share=3,
    ),
    Target("YAML of a run", "run/config.yaml", VISUALIZE, share=3),
    Target("YAML of a run to measure", "run/config.yaml", f"{cases.MEASURE_RUN} --run_dir=run"),
    Target("metrics", "run/metrics.jsonl", VISUALIZE, share=2),
    Target("timesteps", "run/timesteps.jsonl", VISUALIZE, share=2),
    Target("metrics to go on with", "run/metrics.jsonl", f"{cases.AGAIN} --max_train_steps=5"),
    Target(
        "CSV of results",
        "measured/evaluation_results.csv",
        "evaluate.py --compare measured measured_too",
        share=2,
    ),
    Target(
        "CSV of results to go on with", "measured/evaluation_results.csv", f"{cases.MEASURE_RUN} --run_dir=measured"
    ),
    Target(
        "prompts",
        "prompts.txt",
        f"{cases.WITH} --model=text_run --prompts_file=prompts.txt",
        text("the digit one\na zero\n"),
    ),
]


def case_of(target: Target, seed: str) -> Case:
    """One mutation of a target as a case of `mistakes.py`."""

    def change(place: Path) -> None:
        if target.make is not None:
            (place / target.file).parent.mkdir(parents=True, exist_ok=True)
            target.make(place / target.file)
        mutate(sorted(place.glob(target.file))[0], seed)

    thing = target.file.split("/")[0]
    needs = (thing, "run", "text_run", "measured") if thing == "cache" else (thing, *target.needs)
    code = {(True, True): (0, 2), (True, False): 2, (False, True): 0}.get((target.refused, target.check is not None))
    code = (0, 1, 2) if code is None else code
    return Case(
        target.name, target.command, (), code, {".": change}, needs, ("*",), check=target.check, timeout=LONGEST
    )


def mutations(count: int, seed: int, wanted: list[str]) -> list[tuple[Case, str]]:
    """So many cases over all targets by their shares, and the seed of each."""
    targets = [target for target in TARGETS if not wanted or any(word in target.name for word in wanted)]
    total, found = sum(target.share for target in targets), []
    for target in targets:
        for number in range(-(-count * target.share // total)):
            name = f"{seed} {target.name} {number}"
            found.append((case_of(target, name), name))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=MUTATIONS)
    parser.add_argument("words", nargs="*", help="only targets with one of these words in their names")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    begin = time.monotonic()
    tried = mutations(arguments.count, arguments.seed, arguments.words)
    forked.import_everything()
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder) / "workshop")
        workshop.make()
        results = try_all([case for case, _ in tried], workshop, Path(folder), arguments.jobs)
    report(results)
    bad = {name: found for (_, name), (_, found, _) in zip(tried, results, strict=True) if found}
    counts = {target.name: sum(case.family == target.name for case, _ in tried) for target in TARGETS}
    record = {
        "seed": arguments.seed,
        "mutations": len(tried),
        "fall_short": len(bad),
        "seconds": round(time.monotonic() - begin),
        "targets": counts,
        "shortfalls": bad,
    }
    if arguments.count >= MUTATIONS and not arguments.words:
        records.write("fuzz", record)
    print("\n".join(bad))
    print(f"{len(tried)} mutations in {record['seconds']} s, {len(bad)} fall short")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
