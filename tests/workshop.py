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

STEPS = "--max_train_steps=4 --checkpointing_steps=2 --save_images_steps=4".split()
CLASSES = ("cat", "dog")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "EXACT_DDPM_FAULT": "", "EXACT_DDPM_DEBUG": ""}


class Workshop:
    """A folder of things to copy; each is made once, by the scripts themselves where they make it."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.cache = folder / "cache"
        self.network = folder / "network"
        for thing, make in (("network", make_tiny_network), ("text_network", make_text_network)):
            if not (folder / thing).exists():
                make(folder / thing)
        for thing, make in (("encoder", make_text_encoder), ("vision", make_vision_network)):
            if not (folder / thing).exists():
                make(folder / thing)
        for make in (self._make_images, self._make_archives, self._make_runs, self._make_measured):
            if not (folder / f".{make.__name__}").exists():
                make()
                (folder / f".{make.__name__}").touch()

    @property
    def things(self) -> list[str]:
        return [path.name for path in self.folder.iterdir() if not path.name.startswith(".")]

    def flags(self, cache: Path | None = None) -> list[str]:
        """The flags of a tiny run."""
        return make_tiny_flags(self.network, cache or self.cache)

    def copy(self, thing: str, to: Path) -> None:
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
        write(self.folder / "table/photos.csv", b"file_name,label\n" + b"".join(b"%02d.png,cat\n" % n for n in range(12)))
        for number, data in enumerate(encoded):
            write(self.folder / f"table/{number:02}.png", data)
        np.savez(self.folder / "samples.npz", arr_0=arrays)
        np.savez(self.folder / "moments.npz", mu=np.zeros(2048), sigma=np.eye(2048))
        rows = [{"bytes": data, "path": None} for data in encoded]
        table = pyarrow.table({"image": rows, "label": [number % 2 for number in range(12)]})
        (self.folder / "parquet").mkdir()
        parquet.write_table(table, self.folder / "parquet" / "train.parquet")

    def _make_archives(self) -> None:
        photos = sorted((self.folder / "photos").rglob("*.png"))
        with zipfile.ZipFile(self.folder / "photos.zip", "w") as file:
            for path in photos:
                file.write(path, path.relative_to(self.folder))
        with tarfile.open(self.folder / "photos.tar", "w") as file:
            file.add(self.folder / "photos", "photos")
        self.run("prepare_data.py", "photos", "--output=prepared", "--resolution=8", "--num_workers=0")

    def _make_runs(self) -> None:
        train, conditional = "train_unconditional.py", "train_conditional.py"
        self.run(train, *self.flags(), *STEPS, "--logger=tensorboard", "--output_dir=run")
        learning = "--timestep_sampler=loss_second_moment"
        self.run(train, *self.flags(), *STEPS, learning, "--output_dir=learning_run")
        self.run(conditional, *self.flags(), *STEPS, "--output_dir=class_run")
        text = ("--condition=text", "--text_encoder=encoder", "--model_config_name_or_path=text_network")
        self.run(conditional, *self.flags(), *STEPS, *text, "--output_dir=text_run")
        pipeline = self.folder / "pipeline"
        for part in ("unet", "scheduler"):
            shutil.copytree(self.folder / "run" / part, pipeline / part)
        shutil.copy(self.folder / "run" / "model_index.json", pipeline)

    def _make_measured(self) -> None:
        short = ("--ddim", "--num_inference_steps=2", "--batch_size=4")
        self.run("generate.py", "run", *short, "--num_images=4", "--output_dir=generated")
        common = ("--features=vision", f"--cache_dir={self.cache}", "--dataloader_num_workers=0")
        self.run("evaluate.py", *common, "--real=images", "--resolution=8", "--save_statistics=statistics.safetensors")
        for name in ("measured", "measured_too"):
            shutil.copytree(self.folder / "run", self.folder / name)
            self.run("evaluate.py", *common, f"--run_dir={name}", *short, "--num_images=10")


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
            elif path.is_file():
                found[key] = path.read_bytes()
            else:
                found[key] = None
    return found
