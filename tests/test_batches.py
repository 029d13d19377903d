"""Which images make up which step, and the worker processes that decode them."""

import errno
import io
import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from image_helpers import GIGABYTE, ROOT, everything, image_folder, image_options, load, photos, png, prepare, write  # noqa: F401
from PIL import Image

import common.machine
from common.errors import UserError
from common.machine import default_num_workers
from conditions.condition import NoCondition
from image_data.batches import TrainingBatches, epoch_order
from image_data.store import ImageDecoder, TrainingImages
from image_data.workers import call_in_child, map_in_workers

CIFAR10 = ROOT / "../shared/data/cifar10"


# Batches


def batches_of(images, **changes):
    data = TrainingImages(images, 3, changes.pop("num_workers", 0), changes.pop("random_flip", True))
    share = SimpleNamespace(index=changes.pop("process_index", 0), count=changes.pop("num_processes", 1))
    options = {"condition": NoCondition(), "seed": 0, "total_batch_size": 6, "passes": 1, "processes": share}
    return TrainingBatches(data, **(options | changes))


@pytest.fixture
def squares(load, prepare):
    return prepare(load("digits", max_train_samples=50), channels=1)


def test_every_image_comes_once_an_epoch(squares):
    training = batches_of(squares)
    assert training.steps_per_epoch == 8  # of 6: two images are left over
    epochs = [torch.cat([training.indices(epoch * 8 + step) for step in range(8)]) for epoch in range(3)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch.tolist())) == 48
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 3
    # Over epochs the left-over images are not always the same.
    assert set(torch.cat(epochs).tolist()) == set(range(50))


def test_the_order_is_a_function_of_seed_and_epoch():
    order = epoch_order(50, 1, 2)
    assert sorted(order.tolist()) == list(range(50))
    epoch_order.cache_clear()
    assert torch.equal(order, epoch_order(50, 1, 2))
    assert not torch.equal(order, epoch_order(50, 1, 3))
    assert not torch.equal(order, epoch_order(50, 2, 2))


def take(training, count, first_step=0):
    iterator = training.from_step(first_step)
    taken = [batch.images for batch in itertools.islice(iterator, count)]
    iterator.close()
    return taken


def test_a_step_holds_the_images_it_names(squares):
    training = batches_of(squares, random_flip=False)
    for step, images in enumerate(take(training, 10)):
        assert images.shape == (6, 1, 8, 8)
        assert images.dtype == torch.uint8
        assert torch.equal(images, squares.crops(training.indices(step), torch.zeros(6, 2)))


def test_flips(squares):
    plain, flipped = (take(batches_of(squares, random_flip=flip), 40) for flip in (False, True))
    plain, flipped = torch.cat(plain), torch.cat(flipped)
    as_they_are = (plain == flipped).flatten(1).all(1)
    mirrored = (plain.flip(-1) == flipped).flatten(1).all(1)
    assert (as_they_are | mirrored).all()
    assert 80 < mirrored.sum() < 160  # of 240


@pytest.mark.parametrize("memory", [0, GIGABYTE])
@pytest.mark.parametrize(("processes", "accumulation"), [(1, 3), (2, 1), (3, 1), (3, 2), (2, 3)])
def test_the_global_batch_is_the_same_however_it_is_shared(photos, prepare, memory, processes, accumulation):
    images = prepare(photos, memory_limit_bytes=memory)
    whole = take(batches_of(images), 5)
    shares = [
        batches_of(images, process_index=index, num_processes=processes, passes=accumulation)
        for index in range(processes)
    ]
    taken = [take(share, 5) for share in shares]
    size = 6 // (processes * accumulation)
    for step in range(5):
        joined = torch.empty_like(whole[step])
        for process, share in enumerate(shares):
            assert taken[process][step].shape == (accumulation * size, 3, 8, 8)
            passes = zip(share.positions.split(size), taken[process][step].split(size), strict=True)
            for number, (positions, images) in enumerate(passes):
                start = (number * processes + process) * size
                assert positions.tolist() == list(range(start, start + size))
                joined[start : start + size] = images
        assert torch.equal(joined, whole[step])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_streaming_equals_memory(photos, prepare, num_workers):
    in_memory = take(batches_of(prepare(photos)), 7)
    streamed = take(batches_of(prepare(photos, memory_limit_bytes=0), num_workers=num_workers), 7)
    assert all(torch.equal(*pair) for pair in zip(in_memory, streamed, strict=True))


@pytest.mark.parametrize("memory", [0, GIGABYTE])
def test_a_resumed_run_continues_as_if_uninterrupted(photos, prepare, memory):
    training = batches_of(prepare(photos, memory_limit_bytes=memory))
    whole = take(training, 7)
    assert all(torch.equal(*pair) for pair in zip(whole[4:], take(training, 3, first_step=4), strict=True))


class RecordedCrops:
    """Stands in for prepared images; keeps what was asked of it."""

    def __init__(self):
        self.corners = []

    def __len__(self):
        return 64

    def crops(self, indices, corners):
        self.corners.append(corners)
        return torch.arange(4, dtype=torch.uint8).expand(len(indices), 1, 1, 4).clone()


def test_crops_and_flips_are_drawn_anew_for_every_image_and_step():
    images = RecordedCrops()
    steps = torch.stack(take(batches_of(images, total_batch_size=64), 50))
    corners = torch.stack(images.corners)
    assert corners.shape == (50, 64, 2)
    assert len(corners.unique()) > 6000  # of 6,400 numbers
    assert corners.min() >= 0
    assert corners.max() < 1
    torch.testing.assert_close(corners.mean((0, 1)), torch.tensor([0.5, 0.5]), atol=0.02, rtol=0)
    flipped = steps[:, :, 0, 0, 0] == 3
    assert len(set(map(tuple, flipped.tolist()))) == 50
    assert (flipped.float().mean(0) > 0.2).all()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_global_random_state_is_left_alone(photos, prepare, num_workers):
    training = batches_of(prepare(photos, memory_limit_bytes=0), num_workers=num_workers)
    before = torch.get_rng_state()
    take(training, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_larger_than_the_set(squares):
    with pytest.raises(UserError, match=r"batch of 51 images .* 50 images .*--total_batch_size or --train_batch_size"):
        batches_of(squares, total_batch_size=51)
    assert batches_of(squares, total_batch_size=50).steps_per_epoch == 1


def test_a_batch_that_cannot_be_shared(squares):
    with pytest.raises(UserError, match="total batch of 6 images .* 4 processes with 1 gradient accumulation steps"):
        batches_of(squares, num_processes=4)


def test_an_image_that_goes_bad_during_training(photos, prepare, tmp_path):
    training = batches_of(prepare(photos, memory_limit_bytes=0), total_batch_size=12, num_workers=1)
    (tmp_path / "photos/004.png").unlink()
    with pytest.raises(UserError, match=r"004.png has changed since the images were checked: No such file"):
        take(training, 1)


# Workers


def test_closing_the_iterator_ends_the_workers(photos, prepare):
    training = batches_of(prepare(photos, memory_limit_bytes=0), num_workers=2)
    iterator = training.from_step(0)
    next(iterator)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    iterator.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_outlive_the_signals_meant_for_the_main_process(photos, prepare, number):
    training = batches_of(prepare(photos, memory_limit_bytes=0), num_workers=2)
    expected = take(training, 12)
    iterator = training.from_step(0)
    taken = [batch.images for batch in itertools.islice(iterator, 2)]
    workers = multiprocessing.active_children()
    for worker in workers:
        os.kill(worker.pid, number)
    time.sleep(0.2)  # long enough to die of it
    taken += [batch.images for batch in itertools.islice(iterator, 10)]
    assert all(worker.is_alive() for worker in workers)
    assert all(torch.equal(*pair) for pair in zip(expected, taken, strict=True))
    iterator.close()


def test_workers_end_with_a_main_process_that_is_killed():
    reader, writer = os.pipe()
    if (main := os.fork()) == 0:
        try:
            results = map_in_workers(large, range(100), 4)
            next(results)
            time.sleep(0.5)  # until all wait for somebody to read what they have
            pids = [worker.pid for worker in multiprocessing.active_children()]
            os.write(writer, " ".join(map(str, pids)).encode())
            time.sleep(600)
        finally:
            os._exit(1)
    pids = [int(pid) for pid in os.read(reader, 1000).split()]
    assert len(pids) == 4
    assert all(map(is_running, pids))
    os.kill(main, signal.SIGKILL)
    os.waitpid(main, 0)
    end = time.monotonic() + 60
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    left = [pid for pid in pids if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def large(item: int) -> np.ndarray:
    """More than a pipe holds."""
    return np.zeros(2**21, np.uint8)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # nobody may be there to bury it
    except psutil.NoSuchProcess:
        return False


def test_without_memory_for_workers_there_are_none(photos, prepare, monkeypatch, caplog):
    def no_memory(_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    training = batches_of(prepare(photos, memory_limit_bytes=0), num_workers=2)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", no_memory)
    caplog.clear()  # the line about the images, where another test has turned such lines on
    with caplog.at_level(logging.WARNING):
        assert len(take(training, 3)) == 3
    assert caplog.messages == [
        "2 data workers could not be started ([Errno 12] Cannot allocate memory); decoding in the main process"
    ]


def test_everything_that_workers_need_can_be_pickled(photos, prepare, load):
    for source in (photos, load("digits")):
        copy = pickle.loads(pickle.dumps(source))
        assert (copy.read(3), copy.describe(3)) == (source.read(3), source.describe(3))
    decoder = pickle.loads(pickle.dumps(ImageDecoder(photos, 3, 8, False)))
    assert [decoder.decode(row).shape for row in range(2)] == [(3, 15, 8), (3, 8, 9)]
    load_step = batches_of(prepare(photos, memory_limit_bytes=0))._load
    for copied, original in zip(pickle.loads(pickle.dumps(load_step))(5), load_step(5), strict=True):
        np.testing.assert_array_equal(copied, original)


def test_workers_that_are_spawned(photos, prepare):
    training = batches_of(prepare(photos, memory_limit_bytes=0), num_workers=1)
    expected = [training.crops(step, training.indices(step)) for step in range(2)]
    before = torch.multiprocessing.get_start_method(allow_none=True)
    torch.multiprocessing.set_start_method("spawn", force=True)
    try:
        taken = take(training, 2)
    finally:
        torch.multiprocessing.set_start_method(before, force=True)
    assert all(torch.equal(*pair) for pair in zip(expected, taken, strict=True))


def square(item):
    return item**2, torch.get_num_threads()


def test_results_come_in_order_from_single_threaded_workers():
    assert list(map_in_workers(square, range(9), 2)) == [(item**2, 1) for item in range(9)]


def test_a_call_in_a_child():
    assert call_in_child(os.getpid) not in (os.getpid(), None)
    assert not multiprocessing.active_children()
    with pytest.raises(UserError, match="the folder is gone"):
        call_in_child(complain)


def complain():
    raise UserError("the folder is gone")


def test_a_child_that_is_ended_or_cannot_be_is_not_needed(monkeypatch):
    main = os.getpid()
    assert call_in_child(lambda: "here" if os.getpid() == main else os.kill(os.getpid(), signal.SIGKILL)) == "here"

    def no_memory(_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", no_memory)
    assert call_in_child(os.getpid) == main


def test_default_num_workers(monkeypatch):
    for cores, quota, processes, workers in (
        (64, [], 1, 4),
        (64, [], 16, 4),
        (64, [], 32, 2),
        (2, [], 1, 2),
        (2, [], 4, 0),
        (64, [3.5], 1, 3),
        (64, [8.0, 0.5], 1, 0),
    ):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        monkeypatch.setattr(common.machine, "_cgroup_quotas", lambda quota=quota: quota)
        assert default_num_workers(processes) == workers


def test_quotas_of_containers_and_schedulers(tmp_path):
    membership = tmp_path / "membership"
    membership.write_text("0::/slurm/job\n")
    for path, text in (("", "max 100000"), ("slurm", "400000 100000"), ("slurm/job", "150000 100000")):
        write(tmp_path / "two" / path / "cpu.max", text.encode())
    assert sorted(common.machine._cgroup_quotas(tmp_path / "two", membership)) == [1.5, 4.0]

    membership.write_text("5:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n0::/\n")
    for file, text in (("cpu.cfs_quota_us", "250000\n"), ("cpu.cfs_period_us", "100000\n")):
        write(tmp_path / "one/cpu,cpuacct" / file, text.encode())
    assert common.machine._cgroup_quotas(tmp_path / "one", membership) == [2.5]
    assert common.machine._cgroup_quotas(tmp_path, tmp_path / "nothing") == []


# CIFAR-10 itself


@pytest.mark.skipif(not CIFAR10.exists(), reason="the folder ../shared/data/cifar10 is not there")
def test_cifar10(load, prepare):
    source = load(str(CIFAR10))
    assert (len(source), source.image_column, source.detect_channels()) == (50_000, "img", 3)
    assert source.describe(17) == "row 17 of cifar10[train]"

    images = prepare(load(str(CIFAR10), max_train_samples=2000), resolution=32, num_workers=2)
    assert len(images) == 2000
    for index in (0, 1, 1999):
        decoded = np.asarray(Image.open(io.BytesIO(source.read(index * 25))))
        np.testing.assert_array_equal(everything(images)[index], decoded.transpose(2, 0, 1))
