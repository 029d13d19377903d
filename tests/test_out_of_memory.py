"""Out of memory: one line with the batch that would fit, by an estimate from what small batches take."""

import re
import resource
import threading
import weakref
from functools import partial

import psutil
import pytest
import torch
from conftest import losses_of, make_tiny_flags, run_script, run_training
from diffusers import UNet2DModel
from evaluation_helpers import evaluate, network  # noqa: F401
from test_evaluation import generated, real  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensorMode

from common import machine
from common.errors import UserError
from common.machine import fits_in_memory, images_within, largest_batch, peak_of_tensors
from training.network import build_unet

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
GRADIENT, IMAGE, GIB = 143 * 10**6, 56 * 10**6, 2**30


# The estimate.


@pytest.mark.parametrize(("fixed", "per_image", "memory"), [(700, 30, 10_000), (0, 7, 6), (500, 1, 400)])
def test_two_batches_give_the_line(fixed, per_image, memory):
    taken = [(images, fixed + per_image * images) for images in (8, 16)]
    assert images_within(memory, *taken) == max(0, (memory - fixed) // per_image)


def test_bytes_of_tensors_are_counted_while_they_live():
    weights = torch.zeros(1000)

    def action() -> torch.Tensor:
        first = torch.zeros(250)  # 1,000 bytes
        second = first * 2  # 2,000
        del first  # 1,000
        third = torch.cat([second, second])  # 3,000
        weights.mul_(2).view(10, 100)  # which was there before
        return third[:1]

    assert peak_of_tensors(action) == 3000


def test_bytes_that_the_gradient_needs_are_counted():
    """n rows through a product and an exponential, which keeps its output, and the gradient on its way back."""
    weights = torch.zeros(250, 250, requires_grad=True)

    def action() -> None:
        torch.autograd.grad((torch.zeros(40, 250) @ weights).exp().sum(), weights)

    rows, square = 40 * 250 * 4, 250 * 250 * 4
    # At the end: the product's input and the gradient of its output, and the gradient of the weights.
    assert 2 * rows + square <= peak_of_tensors(action) < 2 * rows + square + 64


def test_memory_of_the_paper_s_network_is_linear():
    """From four images on; docs/gpus.md says by how much. Fake tensors have sizes, and take no time."""
    with FakeTensorMode():
        unet = build_unet(32, 3)

        def a_pass(images: int) -> None:
            loss = unet(torch.zeros(images, 3, 32, 32), torch.zeros(images, dtype=torch.int64)).sample.square().mean()
            torch.autograd.grad(loss, [*unet.parameters()])

        peaks = {images: peak_of_tensors(partial(a_pass, images)) for images in (1, 4, 8, 16)}
    assert peaks[8] - peaks[4] == pytest.approx(4 * 56.5e6, rel=1e-3)
    assert peaks[16] - peaks[8] == pytest.approx(8 * 56.5e6, rel=1e-3)
    assert peaks[1] > 4 * unet.num_parameters()


class Allocator:
    """The memory of a GPU that is not there, of which a pass takes the gradient's bytes or those of its images."""

    def __init__(self, monkeypatch, total: int, taken: int, raising: type[Exception] = torch.OutOfMemoryError):
        self.total, self.taken, self.peak, self.raising = total, taken, 0, raising
        for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.total - self.taken, self.total))
        self.passes = []

    def memory_allocated(self, device) -> int:
        return self.taken

    def max_memory_allocated(self, device) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device) -> None:
        self.peak = self.taken

    def empty_cache(self) -> None: ...

    def make_pass(self, images: int) -> None:
        self.passes.append(images)
        self.peak = self.taken + max(GRADIENT, IMAGE * images)
        if self.peak > self.total:
            raise self.raising("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("moments", [0, 2 * GRADIENT])
def test_the_largest_batch_of_a_gpu(moments, monkeypatch):
    allocator = Allocator(monkeypatch, total=24 * GIB, taken=3 * GIB)
    fitting = int((0.9 * (21 * GIB - moments)) / IMAGE)
    assert largest_batch(allocator.make_pass, CUDA, failed=1024, to_come=moments) == fitting
    assert allocator.passes == [1, 2, 4, 8, 16]


def test_never_as_many_as_have_failed(monkeypatch):
    """Whatever else takes the memory, of which the estimate knows nothing."""
    allocator = Allocator(monkeypatch, total=24 * GIB, taken=0)
    assert largest_batch(allocator.make_pass, CUDA, failed=32) == 31
    assert largest_batch(allocator.make_pass, CUDA, failed=2) == 1


def test_a_network_of_which_few_or_no_images_fit(monkeypatch):
    few = Allocator(monkeypatch, total=3 * IMAGE, taken=0)
    assert largest_batch(few.make_pass, CUDA, failed=128) == 2
    assert few.passes == [1, 2, 4]
    none = Allocator(monkeypatch, total=IMAGE // 2, taken=0)
    assert largest_batch(none.make_pass, CUDA, failed=128) == 0


def test_what_is_wrong_otherwise_is_not_hidden(monkeypatch):
    broken = Allocator(monkeypatch, total=0, taken=0, raising=ValueError)
    with pytest.raises(ValueError, match="CUDA"):
        largest_batch(broken.make_pass, CUDA, failed=128)


def test_what_was_under_way_is_gone_before_the_estimate():
    """The frames of a step that failed hold its activations, and they in turn what they were made of."""
    activations = []

    def step() -> None:
        held = torch.zeros(1000)
        activations.append(weakref.ref(held))
        held.in_a_circle = held
        raise MemoryError

    with pytest.raises(UserError, match="None is left"), fits_in_memory(CPU, lambda: f"{activations[0]()} is left"):
        step()


# Who runs out of it.


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")]
)
def test_a_gpu_without_memory(error):
    with pytest.raises(UserError, match="too large"), fits_in_memory(CUDA, lambda: "too large"):
        raise error


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_a_machine_without_memory(error):
    with pytest.raises(UserError, match="too large"), fits_in_memory(CPU, lambda: "too large"):
        raise error


def test_the_memory_of_the_machine_is_not_that_of_a_gpu():
    with pytest.raises(MemoryError), fits_in_memory(CUDA, lambda: "too large"):
        raise MemoryError
    with pytest.raises(RuntimeError, match="shapes"), fits_in_memory(CUDA, lambda: "too large"):
        raise RuntimeError("shapes")


@pytest.fixture
def room_for(monkeypatch):
    """Memory for a network's pass over a few images: more are an error, and so it is estimated."""
    forward = UNet2DModel.forward

    def make(images: int) -> None:
        def with_limit(self, sample, *arguments, **others):
            if len(sample) > images:
                raise MemoryError
            return forward(self, sample, *arguments, **others)

        monkeypatch.setattr(UNet2DModel, "forward", with_limit)

    return make


def test_a_step_that_does_not_fit(room_for, tiny_flags, network_without_dropout, tmp_path):
    flags = [*tiny_flags, f"--model_config_name_or_path={network_without_dropout}", "--max_train_steps=3"]
    plain = run_training(tmp_path / "plain", [*flags, "--train_batch_size=48"])
    room_for(20)
    with pytest.raises(UserError) as raised:
        run_training(tmp_path / "run", [*flags, "--train_batch_size=48"])
    said = str(raised.value)
    assert said.startswith(
        "--train_batch_size 48: a step with this many images does not fit in the memory of cpu; about"
    )
    assert said.endswith("which keeps the batch of 48")
    estimate, batch, passes = map(int, re.findall(r"about (\d+) .*_size (\d+) .*_steps (\d+),", said)[0])
    assert 16 <= estimate < 48  # passes of 1 to 16 were measured, and the machine has room for more
    assert (batch, passes) == (max(size for size in range(1, estimate + 1) if 48 % size == 0), 48 // batch)
    followed = [f"--train_batch_size={16}", f"--gradient_accumulation_steps={3}"]
    assert losses_of(run_training(tmp_path / "followed", [*flags, *followed])) == pytest.approx(losses_of(plain))


def test_a_step_whose_passes_are_replicas(room_for, tiny_flags, network_without_dropout, tmp_path):
    """Their number is that of the replicas, so other passes need others of these; what is said can be typed."""
    flags = [*tiny_flags, f"--model_config_name_or_path={network_without_dropout}", "--max_train_steps=1"]
    flags = [*(flag for flag in flags if not flag.startswith("--train_batch_size")), "--total_batch_size=48"]
    room_for(20)
    with pytest.raises(UserError) as raised:
        run_training(tmp_path / "run", [*flags, "--clip_per_replica=2"])
    said = str(raised.value)
    assert said.startswith(
        "--train_batch_size 24: a step with this many images does not fit in the memory of cpu; about"
    )
    kept = "which keeps the batch of 48 but clips smaller parts of it; --gradient_checkpointing takes less memory and"
    assert f", {kept} changes nothing" in said
    advised = [f"{flag}={value}" for flag, value in re.findall(r"(--\w+) (\d+)", said.partition(" use ")[2])]
    assert advised == ["--train_batch_size=16", "--gradient_accumulation_steps=3", "--clip_per_replica=3"]
    for given in ([], ["--train_batch_size=24"]):  # whatever was given before
        run_training(tmp_path / f"followed-{len(given)}", [*flags, *given, *advised])


def test_a_step_of_a_run_with_less_memory(room_for, tiny_flags, tmp_path, monkeypatch):
    """The estimate against the memory that there is: what 48 images take by the line through 8 and 16."""
    taken = {}
    monkeypatch.setattr(machine, "peak_memory", lambda action, device: taken.setdefault(*measure(action)))
    monkeypatch.setattr(machine, "free_memory", lambda device: 30 * taken[16] // 16)

    def measure(action) -> tuple[int, int]:
        return action.args[0], peak_of_tensors(action)

    room_for(47)
    with pytest.raises(UserError) as raised:
        run_training(tmp_path / "run", [*tiny_flags, "--train_batch_size=48"])
    assert sorted(taken) == [1, 2, 4, 8, 16]
    assert taken[16] == pytest.approx(2 * taken[8], rel=0.2)
    per_image = (taken[16] - taken[8]) / 8
    estimate = int((0.9 * (30 * taken[16] // 16 - 2 * 4 * weights_of(tiny_flags)) - taken[8]) / per_image + 8)
    assert f"about {estimate} would fit: use --train_batch_size 24 --gradient_" in str(raised.value)


def weights_of(flags: list[str]) -> int:
    (folder,) = (flag.partition("=")[2] for flag in flags if flag.startswith("--model_config"))
    return UNet2DModel.from_config(UNet2DModel.load_config(folder)).num_parameters()


def test_a_network_that_does_not_fit(train, tmp_path, monkeypatch):
    def no_room(*_) -> None:
        raise MemoryError

    monkeypatch.setattr("schedulers.loss.DiffusionLoss.__call__", no_room)
    with pytest.raises(UserError, match="--train_batch_size 16: .* nor with a single one: choose a smaller network"):
        train(tmp_path / "run")


def test_a_moving_average_that_does_not_fit(train, tmp_path, monkeypatch):
    def no_room(*_) -> None:
        raise MemoryError

    monkeypatch.setattr("training.update.build_ema", no_room)
    with pytest.raises(UserError, match="the network and its moving average do not fit in the memory of cpu"):
        train(tmp_path / "run")


def test_a_grid_that_does_not_fit(room_for, train, tmp_path):
    room_for(16)
    with pytest.raises(UserError, match=r"--eval_batch_size 40: such .* of cpu; about \d\d would fit"):
        train(tmp_path / "run", "--eval_batch_size=40", "--max_train_steps=2", "--save_images_steps=2")
    for thread in threading.enumerate():  # as Python does when a script ends, for what is still being written
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    assert (tmp_path / "run" / "checkpoint-2").is_dir()


@pytest.fixture(scope="module")
def run(tiny_network, cache_dir, tmp_path_factory):
    flags = ["--max_train_steps=1", "--eval_batch_size=1"]
    return run_training(tmp_path_factory.mktemp("runs") / "run", [*make_tiny_flags(tiny_network, cache_dir), *flags])


def test_a_batch_of_images_that_does_not_fit(run, room_for, tmp_path):
    room_for(20)
    flags = ["--ddim", "--num_inference_steps=2", f"--output_dir={tmp_path / 'out'}"]
    with pytest.raises(UserError, match=r"--batch_size 40: 40 images of 8x8 .* of cpu; about \d\d would fit: choose"):
        run_script("generate", run, *flags, "--num_images=40", "--batch_size=40")


def test_features_that_do_not_fit(evaluate, generated, real, tmp_path, monkeypatch):  # noqa: F811
    from evaluation.networks import FeatureNetwork

    compute = FeatureNetwork.compute

    def with_limit(self, images, *arguments):
        if len(images) > 12:
            raise MemoryError
        return compute(self, images, *arguments)

    monkeypatch.setattr(FeatureNetwork, "compute", with_limit)
    flags = [f"--generated={generated}", f"--real={real}", f"--output_dir={tmp_path}"]
    with pytest.raises(UserError, match=r"--feature_batch_size 24: .* of cpu; those of about \d+ would"):
        evaluate(*flags, "--feature_batch_size=24")
    evaluate(*flags, "--feature_batch_size=8")


def test_a_machine_that_refuses_memory(run, tmp_path):
    """No stand-in: the system gives this process no more than it has, and a little."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    flags = ["--ddim", "--num_inference_steps=2", f"--output_dir={tmp_path / 'out'}"]
    try:
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 300 * 2**20, hard))
        with pytest.raises(
            UserError, match=r"--batch_size 400000: .* do not fit in the memory of cpu; about \d+ would fit"
        ) as raised:
            run_script("generate", run, *flags, "--num_images=400000", "--batch_size=400000")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    suggested = int(re.search(r"choose --batch_size (\d+)", str(raised.value))[1])
    assert 16 <= suggested < 400_000
