"""Images decoded once and held ready: bit-exact, found again, and nothing half-made."""

import errno
import io
import itertools
import multiprocessing
import os
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from image_helpers import GIGABYTE, ROOT, everything, image_folder, image_options, load, photos, png, prepare, write  # noqa: F401
from PIL import Image

from common.errors import UserError
from common.files import save_safetensors
from image_data import store
from image_data.store import InMemoryImages, StreamedImages, load_training_images


def shown(folder):
    """Everything in a folder, however deep, hidden or not."""
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


def test_cifar_like_images_come_out_bit_exact(load, prepare, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), np.uint8)
    for index, image in enumerate(pixels):
        path = tmp_path / "photos" / f"{index:03}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(path)
    images = prepare(load(train_data_dir=str(tmp_path / "photos")), resolution=32)
    assert isinstance(images, InMemoryImages)
    np.testing.assert_array_equal(everything(images).numpy(), pixels.transpose(0, 3, 1, 2))


def test_random_crops(photos, prepare):
    images = prepare(photos)
    original = np.asarray(Image.open(io.BytesIO(photos.read(3)))).transpose(2, 0, 1)  # 8 high, 11 wide
    upright = np.asarray(Image.open(io.BytesIO(photos.read(4)))).transpose(2, 0, 1)  # 15 high, 8 wide
    assert (original.shape, upright.shape) == ((3, 8, 11), (3, 15, 8))
    almost_one = 1 - 2**-24
    for corner, left in ((0, 0), (0.24, 0), (0.26, 1), (0.5, 2), (almost_one, 3)):
        crop = images.crops(torch.tensor([3]), torch.tensor([[almost_one, corner]]))[0]
        np.testing.assert_array_equal(crop, original[:, :, left : left + 8])
    for corner, top in ((0, 0), (0.5, 4), (almost_one, 7)):
        crop = images.crops(torch.tensor([4]), torch.tensor([[corner, almost_one]]))[0]
        np.testing.assert_array_equal(crop, upright[:, top : top + 8])


@pytest.mark.parametrize("center_crop", [False, True])
def test_streamed_images_are_those_in_memory(photos, prepare, center_crop):
    in_memory = prepare(photos, center_crop=center_crop)
    streamed = prepare(photos, center_crop=center_crop, memory_limit_bytes=0)
    assert isinstance(in_memory, InMemoryImages)
    assert isinstance(streamed, StreamedImages)
    assert len(in_memory) == len(streamed) == 12
    indices, corners = torch.tensor([3, 3, 0, 11]), torch.rand(4, 2)
    assert torch.equal(in_memory.crops(indices, corners), streamed.crops(indices, corners))


def test_memory_is_estimated_with_the_aspect_ratio(load, prepare, tmp_path):
    source = load(train_data_dir=str(image_folder(tmp_path / "photos", width=32, height=16)))
    needed = 12 * 3 * 8 * 16
    assert isinstance(prepare(source, memory_limit_bytes=needed), InMemoryImages)
    assert isinstance(prepare(source, memory_limit_bytes=needed - 1), StreamedImages)
    assert isinstance(prepare(source, memory_limit_bytes=needed // 2, center_crop=True), InMemoryImages)


def test_workers_make_no_difference(photos, prepare, tmp_path):
    alone = prepare(photos, cache_dir=tmp_path / "a")
    shared = prepare(photos, cache_dir=tmp_path / "b", num_workers=2)
    assert torch.equal(everything(alone), everything(shared))


def test_what_is_prepared_is_found_again(photos, prepare, monkeypatch, tmp_path):
    decoded = []
    for name in ("decode_image", "check_image"):
        function = getattr(store, name)
        monkeypatch.setattr(store, name, lambda *args, call=function: decoded.append(args) or call(*args))

    first = prepare(photos)
    assert len(decoded) == 12
    assert torch.equal(everything(prepare(photos)), everything(first))
    assert len(decoded) == 12
    prepare(photos, resolution=4)
    prepare(photos, channels=1)
    prepare(photos, center_crop=True)
    prepare(photos, interpolation="bilinear")
    prepare(photos, memory_limit_bytes=0)
    assert len(decoded) == 6 * 12
    prepare(photos, memory_limit_bytes=0)
    assert len(decoded) == 6 * 12


def test_a_changed_file_is_decoded_anew(load, prepare, tmp_path):
    folder = image_folder(tmp_path / "photos")
    before = everything(prepare(load(train_data_dir=str(folder))))
    write(folder / "class0/000.png", png(99))
    os.utime(folder / "class0/000.png", (1, 1))
    after = everything(prepare(load(train_data_dir=str(folder))))
    assert (before != after).flatten(1).any(1).tolist() == [True] + [False] * 11


def flip(path, position):
    """Damage as a disk does it: one bit, and neither the size nor the time of the file tell."""
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("memory", [0, GIGABYTE])
def test_a_damaged_cache_is_made_anew(photos, prepare, tmp_path, memory, caplog):
    before = everything(prepare(photos, memory_limit_bytes=memory)).clone()
    (folder,) = (tmp_path / "prepared").iterdir()
    pixels, index = folder / "pixels", folder / "index.safetensors"
    damages = [
        lambda: os.truncate(index, 20),
        lambda: flip(index, index.stat().st_size - 5),  # in the rows, the places or the sizes
        lambda: flip(index, 20),  # in the header
        lambda: index.write_bytes(b""),
        lambda: save_safetensors({"kept": torch.zeros(1)}, index, {"skipped": "none"}),
        pixels.unlink,
    ]
    if memory:
        damages += [lambda: os.truncate(pixels, 100), lambda: flip(pixels, 100)]
    for damage in damages:
        damage()
        caplog.clear()
        assert torch.equal(everything(prepare(photos, memory_limit_bytes=memory)), before)
        assert f"{folder}: the decoded images are not what was written there, and are made again" in caplog.text
    caplog.clear()
    prepare(photos, memory_limit_bytes=memory)
    assert caplog.text.count("made again") == 0


def test_images_that_are_enlarged_are_said(load, prepare, tmp_path, caplog):
    folder = image_folder(tmp_path / "photos")
    prepare(load(train_data_dir=str(folder)))
    assert "enlarged" not in caplog.text
    write(folder / "class0/dot.png", png(0, 1, 1))
    write(folder / "class0/small.png", png(0, 9, 7))
    prepare(load(train_data_dir=str(folder)))
    dot = folder / "class0/dot.png"
    assert f"2 of 14 images are enlarged, as a side is below 8 pixels; that of {dot} is 1" in caplog.text


@pytest.fixture
def damaged(tmp_path, load):
    """Ten images, of which numbers 3 and 7 are broken and number 8 is gone since the folder was read."""
    image_folder(tmp_path / "photos", 10)
    for index in (3, 7):
        write(tmp_path / f"photos/class1/{index:03}.png", b"broken")
    source = load(train_data_dir=str(tmp_path / "photos"))
    (tmp_path / "photos/class0/008.png").unlink()
    return source


@pytest.mark.parametrize("memory", [0, GIGABYTE])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_images_fail(damaged, prepare, tmp_path, memory, num_workers):
    gone = tmp_path / "photos/class0/008.png"
    with pytest.raises(UserError) as caught:
        prepare(damaged, memory_limit_bytes=memory, num_workers=num_workers)
    assert str(caught.value) == (
        f"cannot decode {gone}: No such file; a metadata table may still name it; repair or remove this image, "
        "or leave such images out with --on_bad_image skip"
    )
    assert shown(tmp_path / "prepared") == []


@pytest.mark.parametrize("memory", [0, GIGABYTE])
def test_bad_images_are_left_out(damaged, prepare, tmp_path, memory):
    images = prepare(damaged, memory_limit_bytes=memory, on_bad_image="skip")
    assert len(images) == 7
    assert images.skipped == [
        f"{tmp_path}/photos/class0/008.png: No such file; a metadata table may still name it",
        f"{tmp_path}/photos/class1/003.png: not an image of a known format",
        f"{tmp_path}/photos/class1/007.png: not an image of a known format",
    ]
    assert images.kept.tolist() == [0, 1, 2, 3, 5, 7, 9]  # the even images are first
    expected = [png(index) for index in (0, 2, 4, 6, 1, 5, 9)]
    for image, data in zip(everything(images), expected, strict=True):
        np.testing.assert_array_equal(image, np.asarray(Image.open(io.BytesIO(data))).transpose(2, 0, 1))

    assert prepare(damaged, memory_limit_bytes=memory, on_bad_image="skip").skipped == images.skipped
    with pytest.raises(UserError, match=r"cannot decode .*008.png: No such file"):
        prepare(damaged, memory_limit_bytes=memory, on_bad_image="fail", wait=lambda: pytest.fail("too late"))


def test_an_image_put_right_is_not_left_out_for_ever(damaged, prepare, tmp_path):
    assert len(prepare(damaged, on_bad_image="skip")) == 7
    write(tmp_path / "photos/class0/008.png", png(8))
    assert len(prepare(damaged, on_bad_image="skip")) == 8


def test_nothing_but_bad_images(load, prepare, tmp_path):
    for index in range(3):
        write(tmp_path / f"photos/{index}.png", b"broken")
    source = load(train_data_dir=str(tmp_path / "photos"))
    with pytest.raises(UserError, match=r"none of the 3 images can be decoded, the first being .*0.png: not an image"):
        prepare(source, on_bad_image="skip")
    assert shown(tmp_path / "prepared") == []


def test_a_row_without_an_image(load, prepare, tmp_path):
    rows = [{"bytes": png(0), "path": None}, None]
    features = datasets.Features(image=datasets.Image())
    datasets.Dataset.from_dict({"image": rows}, features=features).save_to_disk(str(tmp_path / "set"))
    images = prepare(load(str(tmp_path / "set")), on_bad_image="skip")
    assert images.skipped == ["row 1 of set[train]: there is no image in this row"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError])
def test_an_interruption_leaves_nothing_half_made(photos, prepare, monkeypatch, tmp_path, interruption):
    decode_image, calls = store.decode_image, itertools.count()

    def interrupted(*args):
        if next(calls) == 5:
            raise interruption
        return decode_image(*args)

    monkeypatch.setattr(store, "decode_image", interrupted)
    with pytest.raises(interruption):
        prepare(photos)
    assert shown(tmp_path / "prepared") == []


def test_a_full_disk(photos, prepare, monkeypatch, tmp_path):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError) as caught:
        prepare(photos)
    assert f"to {tmp_path}/prepared (No space left on device)" in str(caught.value)
    assert "--cache_dir" in str(caught.value)
    assert shown(tmp_path / "prepared") == []


def test_an_unwritable_cache(photos, prepare, tmp_path):
    write(tmp_path / "file", b"")
    with pytest.raises(UserError, match=r"cannot write the prepared images to .*file.*--cache_dir"):
        prepare(photos, cache_dir=tmp_path / "file")


def test_one_process_works_and_the_others_wait(photos, prepare, tmp_path):
    def until_prepared():
        events.append("waiting")
        prepare(photos, wait=lambda: events.append("published"))

    events = []
    images = prepare(photos, work_here=False, wait=until_prepared)
    assert events == ["waiting", "published"]
    assert len(images) == 12


def test_an_error_is_raised_before_the_barrier(damaged, prepare):
    with pytest.raises(UserError):
        prepare(damaged, wait=lambda: pytest.fail("the others would wait for ever"))


def test_a_cache_that_is_not_shared(photos, prepare):
    with pytest.raises(UserError, match="--cache_dir .* must be a folder that all processes of a machine share"):
        prepare(photos, work_here=False)


def test_machines_with_other_images_are_refused(photos, prepare):
    with pytest.raises(UserError, match="process 1 can use 11 of its 11 images, process 0 12 of 12, and not the same"):
        prepare(photos, all_gather=lambda found: [found, (11, 11, "another")])
    assert len(prepare(photos, all_gather=lambda found: [found, found])) == 12


def prepare_at_once(start, results, source, cache_dir):
    start.wait()
    images = load_training_images(image_options(cache_dir, channels="1", center_crop=True), source).images
    results.put((len(images), int(everything(images).sum())))


def test_two_runs_can_prepare_the_same_set_at_once(load, tmp_path):
    source = load("digits")
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(2), context.Queue()
    arguments = (start, results, source, tmp_path / "prepared")
    runs = [context.Process(target=prepare_at_once, args=arguments) for _ in range(2)]
    for run in runs:
        run.start()
    found = [results.get(timeout=60) for _ in runs]
    for run in runs:
        run.join()
    assert found[0] == found[1]
    assert found[0][0] == 1797
    assert len(list((tmp_path / "prepared").iterdir())) == 1


def test_the_second_of_two_runs_keeps_what_the_first_published(photos, prepare, monkeypatch, tmp_path):
    publish = store._publish

    def after_another(unfinished, folder):
        shutil.copytree(unfinished, folder)
        (folder / "from the other run").touch()
        publish(unfinished, folder)

    monkeypatch.setattr(store, "_publish", after_another)
    assert len(prepare(photos)) == 12
    (folder,) = (tmp_path / "prepared").iterdir()
    assert (folder / "from the other run").exists()
