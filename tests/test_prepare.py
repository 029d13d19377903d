"""prepare_data.py from end to end: what it writes, again and interrupted."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pytest
from conftest import ROOT
from photo_helpers import collection, contents, encoded, manifest_of, names_in, pets, picture, put, run, table  # noqa: F401
from PIL import Image

from common.errors import UserError
from common.interruption import EXIT_INTERRUPTED, Interrupted, catch_signals
from evaluation.image_sets import open_images
from image_data.data_options import DataOptions
from image_data.decode import decode_image
from image_data.sources import load_images
from preparation import image_folder
from preparation.layouts import recognise
from run_folder.config import parse_config


def test_what_is_prepared_trains_as_the_originals_would(pets, run, tmp_path):
    """Prepared images are the very pixels that training would have made of the originals."""
    run(pets, tmp_path / "out", "--resolution=8", "--captions=a photo of a {class}")
    out = tmp_path / "out"
    source_of = {image["file"]: pets / image["source"] for image in manifest_of(out)["images"]}
    assert len(source_of) == 24
    for split, count in (("train", 22), ("test", 2)):
        source = load_images(DataOptions(train_data_dir=str(out), cache_dir=str(tmp_path / "cache")), split)
        assert len(source) == count
        for row in range(count):
            original = source_of[str(Path(source.describe(row)).relative_to(out))].read_bytes()
            for crop in (False, True):
                expected = decode_image(original, 3, 8, crop)
                np.testing.assert_array_equal(decode_image(source.read(row), 3, 8, crop), expected)


def test_datasets_loads_labels_and_captions(pets, run, tmp_path):
    run(pets, tmp_path / "out", "--resolution=8", "--captions=a photo of a {class}", "--eval_fraction=0.25")
    loaded = datasets.load_dataset("imagefolder", data_dir=str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 18, "test": 6}
    for rows in loaded.values():
        assert rows.column_names == ["image", "label", "caption"]
        for row in rows:
            assert Path(row["image"].filename).parent.name == row["label"]
            assert row["caption"] == f"a photo of a {row['label']}"
            assert min(row["image"].size) == 8
            assert row["image"].mode in ("L", "RGB")


def test_squares_and_channels(pets, run, tmp_path):
    run(pets, tmp_path / "out", "--resolution=8", "--center_crop", "--channels=3", "--eval_fraction=0")
    assert names_in(tmp_path / "out")[0] == ".lock"
    images = [Image.open(path) for path in (tmp_path / "out").rglob("*.png")]
    assert {(image.size, image.mode) for image in images} == {((8, 8), "RGB")}
    assert len(images) == 24
    assert not (tmp_path / "out" / "test").exists()


def test_the_filter_is_one_of_the_settings_of_a_folder(pets, run, tmp_path):
    run(pets, tmp_path / "out", "--resolution=8", "--interpolation=bilinear")
    for image in manifest_of(tmp_path / "out")["images"]:
        expected = decode_image((pets / image["source"]).read_bytes(), 3, 8, False, "bilinear")
        np.testing.assert_array_equal(
            decode_image((tmp_path / "out" / image["file"]).read_bytes(), 3, 8, False), expected
        )
    with pytest.raises(UserError, match="was prepared with interpolation bilinear and not bicubic"):
        run(pets, tmp_path / "out", "--resolution=8")


def test_without_a_resolution_plain_files_are_copied(pets, run, tmp_path):
    run(pets, tmp_path / "out", "--eval_fraction=0")
    for image in manifest_of(tmp_path / "out")["images"]:
        original, copy = pets / image["source"], tmp_path / "out" / image["file"]
        mode = Image.open(original).mode
        if mode in ("CMYK", "RGBA"):
            assert copy.suffix == ".png"
            assert Image.open(copy).mode == "RGB"
            size = min(Image.open(original).size)
            expected = decode_image(original.read_bytes(), 3, size, False)
            np.testing.assert_array_equal(decode_image(copy.read_bytes(), 3, size, False), expected)
        else:
            assert copy.read_bytes() == original.read_bytes()


def test_the_three_folders_of_sysu(run, tmp_path):
    names = [f"{label}/images/{n}.jpg" for label in ("boat", "car") for n in range(10)]
    source = tmp_path / "clone"
    for seed, name in enumerate(names):
        put(source / name, encoded(picture(seed, (40, 24), "L" if seed % 2 else "RGB"), "JPEG"))
    run(source, tmp_path / "out", "--resolution=16", "--sysu_folders", "--eval_fraction=0.2")
    assert len(table(tmp_path / "out/train_data")) == 16
    assert len(table(tmp_path / "out/eval_data")) == 4
    for row, other in zip(table(tmp_path / "out/eval_data"), table(tmp_path / "out/normalized_eval_data"), strict=True):
        assert row == other
        photo = Image.open(tmp_path / "out/eval_data" / row["file_name"])
        square = Image.open(tmp_path / "out/normalized_eval_data" / row["file_name"])
        assert (photo.size, square.size, square.mode) == ((27, 16), (16, 16), "RGB")
        np.testing.assert_array_equal(np.asarray(photo.convert("RGB"))[:, 5:21], np.asarray(square))
    measured_against = open_images(str(tmp_path / "out/normalized_eval_data"), "--real")
    assert (len(measured_against), tuple(measured_against.size)) == (4, (16, 16))
    again = recognise(tmp_path / "out")
    assert len(again.photos) == 20
    assert {photo.split for photo in again.photos} == {"train", "test"}


def test_only_some_classes(pets, run, tmp_path):
    run(pets, tmp_path / "out", "--classes", "cat")
    assert {row["label"] for row in table(tmp_path / "out/train")} == {"cat"}
    with pytest.raises(UserError, match="--classes cow: there is no such class; there are: cat, dog"):
        run(pets, tmp_path / "other", "--classes", "cat", "cow")


def test_the_split_of_the_source_is_kept_unless_another_is_asked_for(run, tmp_path):
    folders = ("train/a", "train/b", "val/a", "val/b")
    source = collection(tmp_path / "in", [f"{folder}/{n}.png" for folder in folders for n in range(5)])
    run(source, tmp_path / "out")
    assert {len(table(tmp_path / "out" / split)) for split in ("train", "validation")} == {10}
    run(source, tmp_path / "other", "--eval_fraction=0.2")
    assert (len(table(tmp_path / "other/train")), len(table(tmp_path / "other/test"))) == (16, 4)


def test_captions_of_a_table_come_before_the_template(run, tmp_path):
    source = collection(tmp_path / "in", ["1.png", "2.png", "3.png"])
    rows = [{"file_name": f"{n}.png", "label": "fire_truck", "caption": "mine" if n == 1 else None} for n in (1, 2, 3)]
    (source / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(source, tmp_path / "out", "--captions={class}!", "--eval_fraction=0")
    assert [row["caption"] for row in table(tmp_path / "out/train")] == ["mine", "fire truck!", "fire truck!"]
    run(source, tmp_path / "other", "--eval_fraction=0")
    assert [row["caption"] for row in table(tmp_path / "other/train")] == ["mine", "", ""]


def test_several_captions_of_an_image(run, tmp_path):
    source = collection(tmp_path / "in", ["1.png", "2.png", "3.png"])
    captions = [["one", "uno"], "two", None]
    rows = [{"file_name": f"{n}.png", "caption": caption} for n, caption in enumerate(captions, start=1)]
    (source / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(source, tmp_path / "out", "--eval_fraction=0")
    loaded = load_images(DataOptions(train_data_dir=str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))).dataset
    assert loaded["caption"][:] == [["one", "uno"], ["two"], [""]]


def test_names_whose_hashes_are_equal_are_two_files(run, tmp_path):
    """Among a million photos of one name about a hundred pairs agree in 32 bits; these two do."""
    name_of, names = {}, []
    for name in (f"{number:07}/кот.png" for number in range(10**6)):
        names = name_of.setdefault(image_folder._hash(name), name), name
        if names[0] != name:
            break
    source = collection(tmp_path / "in", names)
    rows = [{"file_name": name, "text": name} for name in names]
    (source / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for _ in range(2):
        run(source, tmp_path / "out", "--eval_fraction=0")
        written = {row["caption"]: row["file_name"] for row in table(tmp_path / "out/train")}
        assert sorted(written) == sorted(names)
        assert len(set(written.values())) == 2
        assert all((tmp_path / "out/train" / file).exists() for file in written.values())


@pytest.mark.parametrize(("count", "batch"), [(12, 9), (200, None)])
def test_the_next_command_can_be_typed_as_it_is(run, tmp_path, capsys, count, batch):
    photos = collection(tmp_path / "my photos", [f"{number}.png" for number in range(count)])
    run(photos, tmp_path / "data" / "mine", "--resolution=32", "--eval_fraction=0.25")
    (command,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: ")]
    config = parse_config(shlex.split(command)[3:])
    assert (config.train_data_dir, config.output_dir) == (str(tmp_path / "data" / "mine"), "runs/mine")
    assert (config.resolution, config.max_train_steps, config.total_batch_size) == (32, 20_000, batch)


def test_a_second_call_does_only_what_is_missing(pets, run, tmp_path, capsys):
    out = tmp_path / "out"
    run(pets, out, "--resolution=8", "--eval_fraction=0")
    assert "24 images written, 0 already there" in capsys.readouterr().out
    before, times = contents(out), {path: path.stat().st_ino for path in out.rglob("*.png")}
    run(pets, out, "--resolution=8", "--eval_fraction=0")
    assert "0 images written, 24 already there" in capsys.readouterr().out
    assert contents(out) == before
    assert {path: path.stat().st_ino for path in out.rglob("*.png")} == times

    lost = next((out / "train/dog").glob("11*.png"))
    lost.unlink()
    changed = pets / "cat/00.png"
    changed.write_bytes(encoded(picture(77)))
    os.utime(changed, (1e9, 1e9))
    (pets / "dog/00.png").unlink()
    put(pets / "dog/new.png")
    run(pets, out, "--resolution=8", "--eval_fraction=0")
    assert "3 images written, 21 already there" in capsys.readouterr().out
    assert len(list(out.rglob("*.png"))) == 24
    rows = [image for image in manifest_of(out)["images"] if image["source"] == "cat/00.png"]
    np.testing.assert_array_equal(
        decode_image((out / rows[0]["file"]).read_bytes(), 3, 8, False), decode_image(changed.read_bytes(), 3, 8, False)
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resolution=16"], "was prepared with resolution 8 and not 16"),
        (["--resolution=8", "--seed=1"], "was prepared with seed 0 and not 1"),
        (["--resolution=8", "--center_crop"], "was prepared with center_crop False and not True"),
    ],
)
def test_settings_are_never_mixed(pets, run, tmp_path, flags, message):
    run(pets, tmp_path / "out", "--resolution=8")
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match=message):
        run(pets, tmp_path / "out", *flags)
    assert contents(tmp_path / "out") == before


def test_other_photos_are_never_mixed_in(pets, run, tmp_path):
    run(pets, tmp_path / "out", "--resolution=8")
    with pytest.raises(UserError, match="was prepared with source .*pets and not .*others"):
        run(collection(tmp_path / "others", ["1.png"]), tmp_path / "out", "--resolution=8")
    put(tmp_path / "full/photo.png")
    with pytest.raises(UserError, match="is not empty .photo.png. and was not made by this script"):
        run(pets, tmp_path / "full")


def test_an_interruption_leaves_nothing_half_written(pets, run, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    run(pets, whole, "--resolution=8")
    out, written = tmp_path / "out", []

    def interrupted(*arguments):
        written.append(arguments)
        if len(written) == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(image_folder, "fault_point", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    catch_signals()
    try:
        with pytest.raises(Interrupted, match="SIGTERM: stopped at 16 of 24 images; the same command goes on"):
            run(pets, out, "--resolution=8")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(list(out.rglob("*.png"))) == 16
    assert not list(out.rglob("*.tmp"))
    monkeypatch.undo()
    run(pets, out, "--resolution=8")
    assert {name: data for name, data in contents(out).items() if "prepared" not in name} == {
        name: data for name, data in contents(whole).items() if "prepared" not in name
    }


def command(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "prepare_data.py", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_kill_and_signal_a_real_process_with_workers(run, tmp_path):
    source = tmp_path / "in"
    data = encoded(picture(0, (300, 300)), "JPEG")
    for number in range(600):
        put(source / f"{'ab'[number % 2]}/{number:03}.jpg", data)
    out, flags = tmp_path / "out", [source, "--output", tmp_path / "out", "--resolution", "64"]
    killed = command(*flags, "--num_workers", "0", EXACT_DDPM_FAULT="prepare-image@40")
    assert killed.wait(120) == -signal.SIGKILL
    assert len(list(out.rglob("*.png"))) == 40
    assert not list(out.rglob("metadata.jsonl"))

    process = command(*flags, "--num_workers", "2")
    end = time.monotonic() + 120
    while len(list(out.rglob("*.png"))) < 150:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == EXIT_INTERRUPTED, errors
    assert "SIGINT: stopped at" in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert not list(out.rglob("*.tmp"))
    for path in out.rglob("*.png"):
        Image.open(path).load()

    run(source, out, "--resolution=64")
    assert len(list(out.rglob("*.png"))) == len(manifest_of(out)["images"]) == 600


def test_what_a_killed_process_left_is_cleared_away(pets, run, tmp_path):
    put(tmp_path / "out/train/cat/.00-12345678.png.4711.tmp", b"half")
    (tmp_path / "out/prepared.json").write_text(json.dumps({"settings": {}, "images": []}))
    run(pets, tmp_path / "out", "--resolution=8")  # there is no image of whatever that was to be
    manifest = manifest_of(tmp_path / "out")
    (tmp_path / "out/prepared.json").write_text(json.dumps(manifest | {"settings": {}, "images": []}))
    with pytest.raises(UserError, match="was prepared with"):
        run(pets, tmp_path / "out", "--resolution=8")
    (tmp_path / "out/prepared.json").write_text(json.dumps(manifest))
    put(tmp_path / "out/train/cat/.00-12345678.png.4711.tmp", b"half")
    run(pets, tmp_path / "out", "--resolution=8")
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_a_full_disk_is_one_line(pets, run, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(image_folder, "write_atomically", full)
    with pytest.raises(UserError, match="--output_dir .*out: No space left on device"):
        run(pets, tmp_path / "out", "--resolution=8")
    monkeypatch.undo()
    monkeypatch.setattr(image_folder, "_encode", full)
    with pytest.raises(UserError, match="cannot be written to .No space left on device."):
        run(pets, tmp_path / "out", "--resolution=8")


def test_the_output_may_lie_in_the_source_but_not_around_it(pets, run, tmp_path):
    run(pets, pets / "prepared", "--resolution=8", "--eval_fraction=0")
    run(pets, pets / "prepared", "--resolution=8", "--eval_fraction=0")
    assert len(table(pets / "prepared/train")) == 24
    run(pets, pets / "smaller", "--resolution=4", "--eval_fraction=0")  # nor are the results of other calls photos
    assert len(table(pets / "smaller/train")) == 24
    for output in (pets, pets.parent):
        with pytest.raises(UserError, match="must not be the folder of the photos itself, or one around it"):
            run(pets, output)


# After a mistake


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("flags", [["--classes", "bird"], ["--check", "--classes", "bird"]])
def test_a_mistake_leaves_nothing_behind(pets, run, tmp_path, there, flags):
    output = tmp_path / "made" / "out"
    if there:
        output.mkdir(parents=True)
    with pytest.raises(UserError, match="--classes bird: there is no such class; there are: cat, dog"):
        run(pets, output, *flags)
    assert output.exists() == there
    assert not list(tmp_path.glob("made/**/*")) or list(tmp_path.glob("made/**/*")) == [output]
    run(pets, output, "--classes", "cat")
    assert {image["source"].partition("/")[0] for image in manifest_of(output)["images"]} == {"cat"}


def test_a_folder_of_somebody_elses_is_left_as_it_was(pets, run, tmp_path):
    """A lock would hide the photos in it from the next preparation of what is around it."""
    before = sorted((pets / "cat").iterdir())
    with pytest.raises(UserError, match="is not empty .00.png. and was not made by this script; name a new folder"):
        run(tmp_path / "pets" / "dog", pets / "cat")
    assert sorted((pets / "cat").iterdir()) == before


def test_photos_of_which_none_can_be_used_do_not_block_others(pets, run, tmp_path):
    put(tmp_path / "bad" / "1.png", b"no picture")
    with pytest.raises(UserError, match="there is no image that can be used"):
        run(tmp_path / "bad", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run(pets, tmp_path / "out")
    assert len(manifest_of(tmp_path / "out")["images"]) == 24


def test_an_archive_is_not_left_unpacked_by_a_mistake(pets, run, tmp_path):
    archive = shutil.make_archive(str(tmp_path / "pets"), "zip", pets)
    (tmp_path / "out").mkdir()
    put(tmp_path / "out" / ".mine", b"a file of the user's")
    with pytest.raises(UserError, match="there is no such class"):
        run(archive, tmp_path / "out", "--classes", "bird")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".mine"]


def test_a_mistake_keeps_the_images_that_are_there(pets, run, tmp_path, monkeypatch):
    """They are found again by the same command."""
    write = image_folder.PreparedFolder._write_image
    ended_at = recognise(pets).photos[5].path

    def write_some(self, target):
        if target.photo.path == ended_at:
            raise UserError("no room")
        return write(self, target)

    monkeypatch.setattr(image_folder.PreparedFolder, "_write_image", write_some)
    with pytest.raises(UserError, match="no room"):
        run(pets, tmp_path / "out")
    assert list((tmp_path / "out").rglob("*.png"))
    assert (tmp_path / "out" / "prepared.json").exists()


@pytest.mark.parametrize("record", ["{", "[]", '{"images": []}', "[" * 100_000])
def test_a_record_that_cannot_be_read_is_not_written_over(pets, run, tmp_path, record):
    put(tmp_path / "out" / "prepared.json", record.encode())
    with pytest.raises(UserError, match=r"prepared\.json cannot be read \(.*\); name a new folder"):
        run(pets, tmp_path / "out")
    assert contents(tmp_path / "out") == {"prepared.json": record.encode()}


@pytest.mark.parametrize("pipe", ["photos", "photos.zip", "folder/metadata.csv"])
def test_a_pipe_is_not_waited_for(pets, run, tmp_path, pipe):
    put(tmp_path / "folder" / "1.png")
    os.mkfifo(tmp_path / pipe)
    with pytest.raises(UserError, match=f"{pipe}: is n"):
        run((tmp_path / pipe).parent if "folder" in pipe else tmp_path / pipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_has_been_prepared_outlives_a_mistake(pets, run, tmp_path):
    run(pets, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match="was prepared with resolution None and not 8"):
        run(pets, tmp_path / "out", "--resolution=8")
    assert contents(tmp_path / "out") == before
    assert (tmp_path / "out" / ".lock").exists()


def test_classes_of_photos_without_any(run, tmp_path):
    put(tmp_path / "photos" / "1.png")
    with pytest.raises(UserError, match="--classes cat: there is no such class; these photos have no classes"):
        run(tmp_path / "photos", tmp_path / "out", "--classes", "cat")
