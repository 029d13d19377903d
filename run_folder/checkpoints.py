"""Checkpoints as folders: their names, and the manifest by which one knows that nothing of them is missing.

checkpoint-<step>/
    unet/  unet_ema/    what networks are in them: checkpoint_files.py writes, saved_model.py reads
    state.json          step, training time and other numbers
    manifest.json       size and SHA-256 of every other file, written last
"""

import json
from pathlib import Path

from common.files import sha256, sync, write_atomically

FORMAT_VERSION = 1
PREFIX = "checkpoint-"
MANIFEST = "manifest.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"


class InvalidCheckpoint(Exception):
    """A checkpoint that is not what was written, with the reason."""


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX))


def newest(output_dir: Path) -> Path | None:
    return next(reversed(checkpoints(output_dir)), None)


def checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first."""
    found = [path for path in output_dir.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return sorted(found, key=step_of)


def write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in [*files, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync(path)
    entries = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": sha256(path)} for path in files
    }
    write_atomically(folder / MANIFEST, as_json({"format_version": FORMAT_VERSION, "files": entries}))
    sync(folder)


def verify(folder: Path, parts: tuple[str, ...] = ("",)) -> dict[str, str]:
    """The hash of every file; InvalidCheckpoint unless each is there with the size and hash it was written with.

    `parts` are the beginnings of the names to look at, for readers that need only some of the files.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
        version, entries = manifest["format_version"], manifest["files"].items()
        wanted = {name: (entry["size"], entry["sha256"]) for name, entry in entries if name.startswith(parts)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidCheckpoint(f"manifest.json is missing or unreadable ({type(error).__name__})") from error
    if as_json(manifest) != text:
        raise InvalidCheckpoint("manifest.json is not what was written")
    if version != FORMAT_VERSION:
        raise InvalidCheckpoint(f"its format is version {version}, this program reads {FORMAT_VERSION}")
    for name, (size, digest) in wanted.items():
        path = folder / name
        if not path.is_file():
            raise InvalidCheckpoint(f"{name} is missing")
        if path.stat().st_size != size or sha256(path) != digest:
            raise InvalidCheckpoint(f"{name} is not what was written")
    return {name: digest for name, (_, digest) in wanted.items()}


def as_json(value: object) -> str:
    return json.dumps(value, indent=2)
