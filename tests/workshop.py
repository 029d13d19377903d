"""What cases of misuse begin with: runs, images, data sets, archives, statistics, caches, as the scripts make them."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import forked
import numpy as np
from conftest import make_text_encoder, make_text_network, make_tiny_flags, make_tiny_network
from evaluation_helpers import make_vision_network
from PIL import Image

from common.files import LOCK_FILE

STEPS = "--max_train_steps=4 --checkpointing_steps=2 --save_images_steps=4".split()
SHORT = "--ddim --num_inference_steps=2 --batch_size=4".split()
CLASSES = ("cat", "dog")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "EXACT_DDPM_FAULT": "", "EXACT_DDPM_DEBUG": ""}


class Workshop:
    """A folder of things to copy, made when they are first wanted, by the scripts themselves where they make them."""

    def __init__(self, folder: Path):
        self.folder, self.cache, self.network = folder, folder / "cache", folder / "network"
        folder.mkdir(exist_ok=True)
        self._makers = {
            "network": lambda: make_tiny_network(folder / "network"),
            "text_network": lambda: make_text_network(folder / "text_network"),
            "encoder": lambda: make_text_encoder(folder / "encoder"),
            "vision": lambda: make_vision_network(folder / "vision"),
            "photos images captioned table samples.npz moments.npz parquet": self._make_images,
            "photos.zip photos.tar": self._make_archives,
            "prepared": self._make_prepared,
            "run": lambda: self._train("run", "--logger=tensorboard"),
            "learning_run": lambda: self._train("learning_run", "--timestep_sampler=loss_second_moment"),
            "class_run": lambda: self._train("class_run", script="train_conditional.py"),
            "text_run": self._make_text_run,
            "pipeline": self._make_pipeline,
            "generated": self._make_generated,
            "statistics.safetensors": self._make_statistics,
            "measured measured_too": self._make_measured,
            "cache": lambda: self.make("run", "text_run", "measured"),  # which fill it
        }
        self.things = " ".join(self._makers).split()

    def make(self, *things: str) -> None:
        """Make things, or all of them."""
        for names, make in self._makers.items():
            done = self.folder / f".{names}"
            if set(things or self.things).intersection(names.split()) and not done.exists():
                make()
                done.touch()

    def flags(self) -> list[str]:
        """The flags of a tiny run."""
        self.make("network")
        return make_tiny_flags(self.network, self.cache)

    def copy(self, thing: str, to: Path) -> None:
        self.make(thing)
        source = self.folder / thing
        if source.is_dir():
            shutil.copytree(source, to / thing, symlinks=True)
        else:
            shutil.copy2(source, to / thing)

    def run(self, *command: str) -> None:
        ended = forked.run(command, self.folder, ENVIRONMENT, timeout=300)
        assert ended.code == 0, f"{' '.join(command)}: {ended.stderr[-3000:]}"

    def _make_images(self) -> None:
        """Photos in classes; images of one size, as files, as npz, as parquet; a table of photos; captions."""
        import pyarrow
        from pyarrow import parquet

        generator = np.random.default_rng(0)
        arrays = generator.integers(0, 256, (12, 8, 8, 3), np.uint8)
        encoded = [png(array) for array in arrays]
        for number, data in enumerate(encoded):
            for path in (f"photos/{CLASSES[number % 2]}/{number:02}.png", f"images/{number:02}.png"):
                write(self.folder / path, data)
            write(self.folder / f"captioned/{number:02}.png", data)
        lines = [f'{{"file_name": "{number:02}.png", "text": "the digit one"}}\n' for number in range(12)]
        write(self.folder / "captioned/metadata.jsonl", "".join(lines).encode())
        rows = b"".join(b"%02d.png,cat\n" % number for number in range(12))
        write(self.folder / "table/photos.csv", b"file_name,label\n" + rows)
        for number, data in enumerate(encoded):
            write(self.folder / f"table/{number:02}.png", data)
        np.savez(self.folder / "samples.npz", arr_0=arrays)
        np.savez(self.folder / "moments.npz", mu=np.zeros(2048), sigma=np.eye(2048))
        rows = [{"bytes": data, "path": None} for data in encoded]
        table = pyarrow.table({"image": rows, "label": [number % 2 for number in range(12)]})
        (self.folder / "parquet").mkdir()
        parquet.write_table(table, self.folder / "parquet" / "train.parquet")

    def _make_archives(self) -> None:
        self.make("photos")
        photos = sorted((self.folder / "photos").rglob("*.png"))
        with zipfile.ZipFile(self.folder / "photos.zip", "w") as file:
            for path in photos:
                file.write(path, path.relative_to(self.folder))
        with tarfile.open(self.folder / "photos.tar", "w") as file:
            file.add(self.folder / "photos", "photos")

    def _make_prepared(self) -> None:
        self.make("photos")
        self.run("prepare_data.py", "photos", "--output=prepared", "--resolution=8", "--num_workers=0")

    def _train(self, name: str, *flags: str, script: str = "train_unconditional.py") -> None:
        self.run(script, *self.flags(), *STEPS, *flags, f"--output_dir={name}")

    def _make_text_run(self) -> None:
        self.make("encoder", "text_network")
        flags = ("--condition=text", "--text_encoder=encoder", "--model_config_name_or_path=text_network")
        self._train("text_run", *flags, script="train_conditional.py")

    def _make_pipeline(self) -> None:
        """What a run leaves for others: a pipeline and nothing else."""
        self.make("run")
        for part in ("unet", "scheduler"):
            shutil.copytree(self.folder / "run" / part, self.folder / "pipeline" / part)
        shutil.copy(self.folder / "run" / "model_index.json", self.folder / "pipeline")

    def _make_generated(self) -> None:
        self.make("run")
        self.run("generate.py", "run", *SHORT, "--num_images=4", "--output_dir=generated")

    def _make_statistics(self) -> None:
        self.make("images")
        self._evaluate("--real=images", "--resolution=8", "--save_statistics=statistics.safetensors")

    def _make_measured(self) -> None:
        self.make("run")
        for name in ("measured", "measured_too"):
            shutil.copytree(self.folder / "run", self.folder / name)
            self._evaluate(f"--run_dir={name}", *SHORT, "--num_images=10")

    def _evaluate(self, *flags: str) -> None:
        self.make("vision")
        self.run("evaluate.py", "--features=vision", f"--cache_dir={self.cache}", "--num_workers=0", *flags)


def png(array: np.ndarray, **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG", **options)
    return file.getvalue()


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def contents_of(folder: Path) -> dict[str, object]:
    """Every file, folder and link below a folder, with what tells whether it has changed."""
    found: dict[str, object] = {}
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(parent, name)
            key = str(path.relative_to(folder))
            if path.is_symlink():
                found[key] = os.readlink(path)
            elif path.is_file() and name != LOCK_FILE:  # to read it would let go of a lock
                found[key] = path.read_bytes()
            else:
                found[key] = None
    return found
