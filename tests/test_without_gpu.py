"""What a GPU would be asked to do, checked on a machine that has none.

Fake tensors have a device and a shape, but no numbers: to ask for one, which on a GPU means to wait, raises, and so
does a tensor that was not copied to the device. Operations are counted, since each costs the host time.
"""

import json
import re
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from diffusers import UNet2DModel
from ema_pytorch import EMA
from test_sampling_methods import UNUSABLE
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorDeviceMismatchError, FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from common.machine import Stopwatch, to_device
from common.processes import GRADIENT_EXCHANGE, LOST_AFTER, PATIENCE, Processes
from common.randomness import standard_normal
from conditions.condition import ClassCondition
from conditions.guidance import GenerationCondition, Guidance
from evaluation import samples
from evaluation.evaluate_options import parse_evaluation
from evaluation.image_sets import as_rgb
from evaluation.likelihood import measure_batch
from generation.engine import LONGEST_PASS, InferenceSettings, idle_share
from image_data.batches import Batch
from run_folder.config import parse_config
from schedulers.ddpm import build_scheduler
from schedulers.denoising import DDIM, DDPM, DiffusersMethod, StepNoise, UnusableScheduler, denoise, network_predict
from schedulers.loss import build_loss
from schedulers.timestep_samplers import LogSNRBins
from training.loop import learn
from training.network import build_unet
from training.setup import build_process
from training.tracking import Window
from training.update import Update, build_ema

CUDA = torch.device("cuda:0")
VIEWS = "view _unsafe_view transpose t permute expand unsqueeze squeeze slice select split detach alias".split()


class Operations(TorchDispatchMode):
    """Counts what is computed; views of a tensor start nothing on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, arguments=(), others=None):
        name = str(operation).split(".")[1]
        if name not in VIEWS and not str(operation).startswith("prim."):
            self.counts[name] += 1
        return operation(*arguments, **(others or {}))

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """As torch pins memory: a tensor of the same strides is made, and written to."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).copy_(tensor)


@pytest.fixture
def on_gpu(monkeypatch, tiny_network):
    """A network on a GPU that is not there, in a mode that has to be entered."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    with (mode := FakeTensorMode(allow_non_fake_inputs=True)), CUDA:
        unet = UNet2DModel.from_config(UNet2DModel.load_config(tiny_network))
    return mode, unet


@pytest.fixture(params=[[], ["--clip_per_replica=1"]], ids=["plain", "per replica"])
def step(monkeypatch, on_gpu, request):
    """What a step of the training needs, but for its gradient: autograd wants a device for that."""
    config = parse_config(["--dataset_name=digits", "--no_use_ema", *request.param])
    loss = build_loss(vars(config), build_process(config))
    processes = SimpleNamespace(device=CUDA, count=1, index=0, accelerator=SimpleNamespace(scaler=None))
    loss.start(0, 4, (1, 8, 8), lambda rows: {}, processes)
    bins, places = LogSNRBins(loss.process.alphas_cumprod), torch.arange(4)
    mode, unet = on_gpu
    with mode:
        update, window = Update(config, unet, 100, processes), Window(processes, bins, 50)
    monkeypatch.setattr(torch.Tensor, "backward", lambda objective: None)
    images = torch.zeros(4, 1, 8, 8, dtype=torch.uint8)
    return SimpleNamespace(
        loss=loss, update=update, window=window, unet=unet, mode=mode, batch=Batch(0, images, places, places, places)
    )


def take(step, number: int) -> None:
    """The lines of `training.loop.train` that work on the device."""
    t, weights = (to_device(some, CUDA) for some in (torch.tensor([0, 1, 2, 999]), torch.ones(4)))
    step.update.begin(number)
    step.update.objective = torch.zeros((), device=CUDA)
    errors = step.loss(step.unet, step.batch, t)
    assert errors.device == CUDA
    for parameter in step.unet.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step.update.backward((weights * errors).mean())
    step.update.clip(step.window.exchange_timer)
    in_batch = step.loss.in_global_batch(errors.detach(), step.batch)
    all_finite, _ = step.window.add_step(t, weights, errors.detach(), step.update, in_batch)
    step.update.step(number, all_finite)


def test_a_step_waits_for_nothing_and_forgets_no_copy(step):
    with step.mode:
        for number in range(2):
            take(step, number)


def test_what_waits_or_forgets_a_copy_is_noticed(step):
    with step.mode:
        take(step, 0)
        with pytest.raises(DataDependentOutputException):
            step.window.fetch()  # as a line of metrics must
        with pytest.raises(FakeTensorDeviceMismatchError):
            step.window.sums + torch.ones(3, 1)


@pytest.mark.parametrize("method", [DDPM, DDIM])
def test_a_denoising_step_waits_for_nothing(method, on_gpu):
    mode, unet = on_gpu
    chosen = method(build_scheduler(), 10)
    chosen.scheduler.alphas_cumprod = chosen.scheduler.alphas_cumprod.numpy()  # is looked up on the host, as it may be
    with mode, torch.no_grad():
        seeds = torch.arange(4, device=CUDA)
        noise = StepNoise(seeds, [0, 1, 2, 3], 1, (1, 8, 8))
        output = network_predict(unet)(noise(), torch.zeros((), dtype=torch.int64, device=CUDA))
        for number in (1, 10):
            assert chosen.step(output, number, noise(), noise).device == CUDA


@pytest.mark.parametrize("flags", [[], ["--loss_weighting=bound"], ["--prediction_type=mean"]], ids=str)
def test_a_learned_variance_waits_for_nothing(flags, step, monkeypatch):
    config = parse_config(["--dataset_name=digits", "--variance_type=learned_range", *flags])
    loss = build_loss(vars(config), build_process(config))
    loss.__dict__ = step.loss.__dict__ | loss.__dict__
    process, step.loss = loss.process, loss
    bounds, method = process._log_variances(), DDPM(build_process(config), 10)  # made once, on the host
    monkeypatch.setattr(process, "_log_variances", lambda: bounds)
    method.scheduler.alphas_cumprod = method.scheduler.alphas_cumprod.numpy()  # is looked up on the host, as it may be
    with step.mode, CUDA:
        step.unet = UNet2DModel.from_config(step.unet.config, out_channels=2)
    with step.mode:
        step.update = Update(config, step.unet, 100, step.update.processes)
        take(step, 0)
        noise = StepNoise(torch.arange(4, device=CUDA), [0, 1, 2, 3], 1, (1, 8, 8))
        with torch.no_grad():
            output = network_predict(step.unet)(noise(), torch.zeros((), dtype=torch.int64, device=CUDA))
            assert method.step(output, 1, noise(), noise).device == CUDA


def compatible_schedulers() -> list[str]:
    return sorted(kind.__name__ for kind in build_scheduler().compatibles)


@pytest.mark.parametrize("name", compatible_schedulers())
def test_a_step_of_a_diffusers_scheduler_waits_for_nothing(name):
    """Its timesteps and noise levels are real, on the host; samples on the meta device have no numbers to wait for."""
    if name in UNUSABLE:
        with pytest.raises(UnusableScheduler, match=UNUSABLE[name]):
            DiffusersMethod(build_scheduler(), name, 5)
        return
    method = DiffusersMethod(build_scheduler(), name, 5)
    method.begin()
    samples = torch.zeros(2, 1, 8, 8, device="meta")
    for number in range(1, len(method.timesteps) + 1):
        seen = method.network_input(samples, number)
        samples = method.step(seen * 0.5, number, samples, StepNoise(torch.arange(2), [0, 1], number, (1, 8, 8)))
    assert samples.device.type == "meta"


def test_a_scheduler_whose_timesteps_are_on_the_device_is_noticed():
    method = DiffusersMethod(build_scheduler(), "DDIMScheduler", 5)
    method._scheduler.set_timesteps(5, device="meta")
    samples = torch.zeros(2, 1, 8, 8, device="meta")
    with pytest.raises(RuntimeError, match="meta tensors"):
        method.step(samples, 1, samples, StepNoise(torch.arange(2), [0, 1], 1, (1, 8, 8)))


def test_grey_images_of_an_evaluation_can_be_pinned(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    images = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="single memory location"):
        images.expand(-1, 3, -1, -1).pin_memory()
    assert as_rgb(images).pin_memory().shape == (2, 3, 4, 4)


@pytest.mark.parametrize(("kind", "updates"), [("cuda", 2), ("mps", 1)])
def test_who_leaves_out_an_update_that_is_not_finite(kind, updates):
    """The fused optimiser by `found_inf`; that of MPS does not look at it."""
    processes = SimpleNamespace(device=torch.device("cpu"), accelerator=SimpleNamespace(scaler=None))
    update = Update(parse_config(["--dataset_name=digits", "--no_use_ema"]), torch.nn.Linear(1, 1), 10, processes)
    processes.device = torch.device(kind)
    called = []
    update.optimizer.step = lambda: called.append(update.optimizer.found_inf.item())
    update.step(0, torch.tensor(True))
    update.step(1, torch.tensor(False))
    assert called == [0.0, 1.0][:updates]


# How much there is to start.


def test_operations_of_the_paper_s_network():
    """A forward pass of 16 images on an H100 takes less time than the host needs to start these."""
    with FakeTensorMode(), Operations() as operations, torch.no_grad():
        with CUDA:
            unet = build_unet(32, 3).eval()
            images, t = torch.empty(16, 3, 32, 32), torch.zeros(16, dtype=torch.int64)
        operations.counts.clear()
        unet(images, t)
    assert operations.total <= 406


@pytest.mark.parametrize(("mixed", "of_network"), [(False, 1006), (True, 1513)], ids=["float32", "bf16"])
def test_operations_of_a_step(mixed, of_network):
    """And those beside the network's, forward and backward. Autograd takes fake tensors only of a CPU.

    In bf16 every weight is cast once, and every gradient back; beside the network nothing is.
    """
    cpu, counted = torch.device("cpu"), {}
    config = parse_config(["--dataset_name=digits", "--no_use_ema"])
    processes = SimpleNamespace(device=cpu, count=1, index=0, accelerator=SimpleNamespace(scaler=None))
    loss = build_loss(vars(config), build_process(config))
    loss.start(0, 16, (3, 8, 8), lambda rows: {}, processes)
    window = Window(processes, LogSNRBins(loss.process.alphas_cumprod), 50)
    with FakeTensorMode(allow_non_fake_inputs=True):
        unet = build_unet(32, 3)
        network = torch.autocast("cpu", torch.bfloat16, enabled=mixed)(unet)
        update = Update(config, unet, 100, processes)
        state = SimpleNamespace(unet=unet, loss=loss, update=update, window=window)
        run = SimpleNamespace(
            network=network, state=state, processes=processes, gradient_exchange=lambda enabled: nullcontext()
        )
        t, weights, places = torch.arange(16), torch.ones(16), torch.arange(16)
        batch = Batch(0, torch.zeros(16, 3, 32, 32, dtype=torch.uint8), places, places, places)
        learn(run, batch, t, weights)  # which makes the optimiser's state
        with Operations() as counted["step"]:
            learn(run, batch, t, weights)
        with Operations() as counted["network"]:
            network(torch.zeros(16, 3, 32, 32), t).sample.float().sum().backward()
    beside = counted["step"].counts - counted["network"].counts
    for name in ("linalg_vector_norm", "mul_"):  # of clipping; on a GPU one operation has them all
        beside[name] -= len([*unet.parameters()])
    assert counted["network"].total <= of_network
    assert beside.total() <= 227


def test_operations_of_the_noise():
    with Operations() as operations:
        standard_normal(1, torch.arange(4), 0, (3, 32, 32))
    assert operations.total <= 156


def test_the_moving_average_is_one_operation(tiny_network):
    unet = UNet2DModel.from_config(UNet2DModel.load_config(tiny_network))
    ema = build_ema(parse_config(["--dataset_name=digits"]), unet)
    ema.update()
    ema.update()
    with Operations() as operations:
        ema.update()
    assert operations.counts.pop("_foreach_lerp_") == 1
    assert operations.total <= 4  # of its counter, on the host


def test_the_moving_average_has_the_bits_of_ema_pytorch(tiny_network):
    unet = UNet2DModel.from_config(UNet2DModel.load_config(tiny_network))
    ours = build_ema(parse_config(["--dataset_name=digits", "--ema_max_decay=0.99"]), unet)
    theirs = EMA(unet, beta=0.99, update_after_step=0, update_every=1, include_online_model=False, use_foreach=True)
    theirs.get_current_decay = ours.get_current_decay
    for _ in range(5):
        with torch.no_grad():
            for weights in unet.parameters():
                weights.add_(torch.randn_like(weights))
        ours.update()
        theirs.update()
    pairs = zip(ours.ema_model.parameters(), theirs.ema_model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def passes_of(guidance: Guidance, timestep: int) -> tuple[list[int], torch.Tensor]:
    """How many images each pass of the network gets, and what becomes of its outputs: here the rows themselves."""
    sizes = []

    class Network(torch.nn.Linear):
        def forward(self, samples, t, class_labels):
            sizes.append(len(samples))
            return SimpleNamespace(sample=class_labels[:, None, None, None].float().expand_as(samples))

    condition = GenerationCondition(ClassCondition(["a", "b"]), ["a", "b"], [0, 1], guidance)
    predict = condition.predict_for(Network(1, 1), [0, 1, 2])
    return sizes, predict(torch.zeros(3, 1, 2, 2), torch.tensor(timestep))


def test_guidance_is_one_pass():
    sizes, output = passes_of(Guidance(3.0), 5)
    assert sizes == [6]
    assert output[:, 0, 0, 0].tolist() == [2 + 3 * (0 - 2), 2 + 3 * (1 - 2), 2 + 3 * (0 - 2)]


def test_where_guidance_does_not_apply_no_image_is_seen_twice():
    sizes, output = passes_of(Guidance(3.0, interval=[10, 20]), 5)
    assert sizes == [3]
    assert output[:, 0, 0, 0].tolist() == [0, 1, 0]


# Mixed precision while images are made.


def test_denoising_steps_are_in_float32():
    """Of a matrix product autocast would keep three digits."""

    class Mixing(DDIM):
        def step(self, model_output, number, sample, noise):
            return sample @ torch.full((4, 4), 0.3) + model_output

    method, seeds, samples = Mixing(build_scheduler(), 3), torch.arange(2), []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            samples.append(denoise(lambda samples, t: samples * 0.3, method, seeds, (1, 4, 4)))
    assert torch.equal(*samples)


@pytest.mark.parametrize("kind", ["saved", "moving average"])
@pytest.mark.parametrize("task", ["images", "bits per dimension"])
def test_weights_are_cast_once_for_all_steps(task, kind, tiny_network):
    unet = UNet2DModel.from_config(UNet2DModel.load_config(tiny_network)).eval()
    if kind == "moving average":
        unet = build_ema(parse_config(["--dataset_name=digits"]), unet).ema_model.eval()
    casts = []

    def predict(samples: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        with Operations() as operations:
            output = unet(samples, t).sample.float()
        casts.append(operations.counts["_to_copy"])
        return output

    with torch.autocast("cpu", torch.bfloat16):
        if task == "images":
            denoise(predict, DDIM(build_scheduler(), 4), torch.arange(2), (1, 8, 8))
        else:
            measure_batch(
                predict, build_scheduler("linear", 4), torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.arange(2)
            )
    assert casts[0] > 50 + casts[1]
    assert casts[1:] == [casts[1]] * 3


# Many processes.


@pytest.fixture
def one_of_64(monkeypatch):
    dist.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
    processes = Processes.__new__(Processes)
    processes.count, processes.device, processes._impatient, processes._asked = 64, torch.device("cpu"), None, []
    yield processes
    dist.destroy_process_group()


def test_a_step_of_64_processes_has_two_collectives_beside_its_gradient(one_of_64):
    """The sums of a window, and whether somebody wants to stop, which nobody waits for."""
    window = Window(one_of_64, LogSNRBins(build_scheduler().alphas_cumprod), 50)
    norm = torch.zeros(())
    update = SimpleNamespace(objective=norm, gradient_norm=norm, is_finite=torch.tensor(True))
    with Operations() as operations:
        window.add_step(torch.arange(4), torch.ones(4), torch.ones(4), update, torch.ones(0))
        one_of_64.any_a_step_ago(False, False)
    assert {name: count for name, count in operations.counts.items() if "reduce" in name} == {"allreduce_": 2}


def test_the_gradient_of_the_paper_s_network_crosses_in_seven_parts(one_of_64):
    """The first is small and leaves early in the backward pass; no byte is sent twice, nor copied into its part."""
    unet, parts = build_unet(32, 3), []
    network = DistributedDataParallel(unet, **GRADIENT_EXCHANGE)

    def exchanged(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        parts.append(bucket.buffer())
        (future := torch.futures.Future()).set_result(bucket.buffer())
        return future

    network.register_comm_hook(None, exchanged)
    for _ in range(2):  # after the first step the parts are in the order in which gradients come
        parts.clear()
        network(torch.zeros(1, 3, 32, 32), torch.zeros(1, dtype=torch.int64)).sample.sum().backward()
    sizes = [part.nbytes / 2**20 for part in parts]
    assert len(sizes) <= 7
    assert sizes[0] < 3
    assert sum(sizes) * 2**20 == sum(weights.nbytes for weights in unet.parameters())
    places = {part.untyped_storage().data_ptr() for part in parts}
    assert {weights.grad.untyped_storage().data_ptr() for weights in unet.parameters()} == places


def test_a_wish_is_heard_a_step_later(one_of_64):
    wishes = [(False, False), (False, True), (True, False), (False, False)]
    heard = [one_of_64.any_a_step_ago(*wish) for wish in wishes]
    assert heard == [[False, False], [False, False], [False, True], [True, False]]


def test_many_processes_wait_for_the_last_batches():
    """256 images in a batch leave 64 processes idle for 23 % of the time that 50,000 take, and 64 images for 6 %."""
    assert idle_share(-(-50_000 // 256), 64) == pytest.approx(1 - 196 / 256)
    assert idle_share(-(-50_000 // 64), 64) == pytest.approx(1 - 782 / 832)
    assert idle_share(5, 1) == 0


def test_there_is_patience_for_the_slowest_batch():
    """The batch size doubles while a pass takes less than LONGEST_PASS; the longest diffusions have 4,000 steps."""
    assert LOST_AFTER.total_seconds() < 2 * LONGEST_PASS * 4000 < PATIENCE.total_seconds()


class Events:
    """The events of a GPU whose clock stands still but for what is computed on it."""

    def __init__(self) -> None:
        self.milliseconds = 0.0

    def __call__(self, device: torch.device, enable_timing: bool) -> SimpleNamespace:
        assert device == CUDA
        assert enable_timing
        event = SimpleNamespace()
        event.record = lambda: setattr(event, "at", self.milliseconds)
        event.elapsed_time = lambda end: end.at - event.at
        return event


@pytest.mark.parametrize("device", [CUDA, torch.device("cpu")])
def test_what_is_waited_for_begins_with_the_last_gradient(device, monkeypatch):
    """The watch is started by every gradient of the first layers; events are read afterwards."""
    clock = Events()
    monkeypatch.setattr(torch, "Event", clock)
    monkeypatch.setattr("common.machine.time.perf_counter", lambda: clock.milliseconds / 1000)
    watch = Stopwatch(device)
    for _ in range(2):
        for pause in (100, 30):
            clock.milliseconds += pause
            watch.start(None)
        clock.milliseconds += 4
        watch.stop()
    assert watch.seconds() == pytest.approx(0.008)
    clock.milliseconds += 1000
    assert watch.seconds() == pytest.approx(0.008)
    watch.start()
    clock.milliseconds += 2
    watch.stop()
    assert watch.seconds() == pytest.approx(0.010)


@pytest.mark.parametrize(("flags", "exchanges"), [([], 1), (["--clip_per_replica=2"], 2)], ids=["plain", "per replica"])
def test_every_exchange_of_a_step_is_timed(flags, exchanges, tiny_network, monkeypatch):
    """That of the sums, and that of gradients which each process clips before; accelerate's own is not in here."""
    clock, cpu = Events(), torch.device("cpu")
    monkeypatch.setattr("common.machine.time.perf_counter", lambda: clock.milliseconds / 1000)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: setattr(clock, "milliseconds", clock.milliseconds + 5))
    config = parse_config(["--dataset_name=digits", "--no_use_ema", *flags])
    processes = SimpleNamespace(device=cpu, count=2, index=0, accelerator=SimpleNamespace(scaler=None))
    loss, unet = (
        build_loss(vars(config), build_process(config)),
        UNet2DModel.from_config(UNet2DModel.load_config(tiny_network)),
    )
    loss.start(0, 8, (1, 8, 8), lambda rows: {}, processes)
    window = Window(processes, LogSNRBins(loss.process.alphas_cumprod), 50)
    state = SimpleNamespace(unet=unet, loss=loss, update=Update(config, unet, 100, processes), window=window)
    run = SimpleNamespace(
        network=unet, state=state, processes=processes, gradient_exchange=lambda enabled: nullcontext()
    )
    t, weights, places = torch.arange(4), torch.ones(4), torch.arange(4)
    batch = Batch(0, torch.zeros(4, 1, 8, 8, dtype=torch.uint8), places, places, places)
    learn(run, batch, t, weights)
    assert window.exchange_timer.seconds() == pytest.approx(0.005 * exchanges)


# The wheel.


def test_the_default_wheel_supports_what_the_readme_says():
    if torch.version.cuda is None:
        pytest.skip("torch is built for CPUs only")
    oldest = min(int(number) for number in re.findall(r"sm_(\d+)", torch._C._cuda_getArchFlags()))
    readme = (ROOT / "README.md").read_text()
    assert "from Turing (2018) on; a V100 needs an older CUDA build" in readme
    assert oldest == 75  # a V100 is 70


# Images that are there.


def test_kept_images_of_other_settings_are_not_measured(tmp_path, monkeypatch):
    kept = {"complete": True, "sha256": "x", "sampler": "ddim", "seeds": "0-9", "images": 10, "batch_size": 4}
    kept |= {"subfolders": False, "device": "cpu", "versions": {}}
    made_with = {"precision": "no", "allow_tf32": False, "channels_last": False, "compile": False}
    monkeypatch.setattr(samples, "open_images", lambda folder, flag: range(10))
    wanted = samples.Samples.__new__(samples.Samples)
    wanted.folder, wanted.seeds, wanted.settings = tmp_path, range(10), {"sampler": "ddim"}
    wanted.job, wanted.inference = SimpleNamespace(model=SimpleNamespace(sha256="x")), InferenceSettings()
    for changed in ({}, {"allow_tf32": True}, {"channels_last": True}, {"compile": True}, {"precision": "bf16"}):
        (tmp_path / "samples.json").write_text(json.dumps(kept | made_with | changed))
        assert (wanted.find_kept() is None) is bool(changed)


@pytest.mark.parametrize(
    ("flags", "noted"),
    [([], "no"), (["--mixed_precision=bf16"], "bf16"), (["--allow_tf32"], "TF32")],
)
def test_tf32_is_noted_beside_results(flags, noted, tmp_path):
    assert parse_evaluation([f"--generated={tmp_path}", "--dataset_name=digits", *flags]).precision == noted
