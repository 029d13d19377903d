"""--cuda_graph, with a stand-in for the graph: what is replayed is the step, whatever the host would have decided."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from conftest import losses_of, run_training
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.errors import RunFailed, UserError
from common.machine import CALLS_BEFORE_CAPTURE, CapturedWork
from run_folder.config import parse_conditional_config, parse_config
from schedulers.loss import build_loss
from training import setup
from training.setup import build_process, check_cuda_graph
from training.update import NEVER_FAILED, Update

LENGTH = ["--max_train_steps=8", "--checkpointing_steps=8", "--save_images_steps=100", "--lr_warmup_steps=20"]
WEIGHTS = "checkpoint-8/unet/diffusion_pytorch_model.safetensors"


def tensors_in(values: object) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


class Graph(TorchDispatchMode):
    """Stands in for torch.cuda.CUDAGraph: keeps the operations that are started, and starts them again.

    They read and write the very tensors that they read and wrote when they were captured. To capture them changes
    nothing, and to ask for a number is an error, as on a GPU.
    """

    replays = 0

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.before = [], {}

    def __torch_dispatch__(self, operation, types, arguments=(), others=None):
        if operation is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        for storage in (tensor.untyped_storage() for tensor in tensors_in((arguments, others))):
            self.before.setdefault(storage._cdata, (storage, storage.clone()))
        results = operation(*arguments, **(others or {}))
        for storage in (tensor.untyped_storage() for tensor in tensors_in(results)):
            self.before.setdefault(storage._cdata, (storage, storage.clone()))
        self.operations.append((operation, arguments, others or {}, results))
        return results

    @torch.no_grad()
    def replay(self) -> None:
        Graph.replays += 1
        for operation, arguments, others, results in self.operations:
            again = operation(*arguments, **others)
            for result, new in zip(tensors_in(results), tensors_in(again), strict=True):
                if result.untyped_storage()._cdata != new.untyped_storage()._cdata:
                    result.copy_(new)


@contextmanager
def captured(graph: Graph, stream: object, capture_error_mode: str):
    numbers = torch.get_rng_state()
    with graph:
        yield
    torch.set_rng_state(numbers)
    for storage, saved in graph.before.values():
        storage.copy_(saved)


@pytest.fixture
def graphs(monkeypatch):
    stream = SimpleNamespace(wait_stream=lambda other: None)
    stand_ins = {"CUDAGraph": Graph, "graph": captured, "Stream": lambda: stream, "current_stream": lambda: stream}
    for name, stand_in in {**stand_ins, "stream": lambda stream: nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(setup, "check_cuda_graph", lambda *arguments: None)
    Graph.replays = 0


def test_a_graph_knows_what_it_was_given_but_not_what_the_host_has_changed(graphs):
    """What it returns are the same tensors every time."""
    factor = 1.0
    work = CapturedWork(lambda a, b: (a * factor + b, torch.full_like(a, factor)))
    results = []
    for number in range(CALLS_BEFORE_CAPTURE + 3):
        factor = number
        results.append([result.item() for result in work(torch.tensor(10.0), torch.tensor(0.5 * number))])
    last = CALLS_BEFORE_CAPTURE
    assert results[: last + 1] == [[10.0 * n + 0.5 * n, n] for n in range(last + 1)]
    assert results[last + 1 :] == [[10.0 * last + 0.5 * n, last] for n in (last + 1, last + 2)]
    assert work(torch.tensor(1.0), torch.tensor(0.0))[0] is work(torch.tensor(2.0), torch.tensor(0.0))[0]


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("train_unconditional", ["--input_perturbation=0.1"]),
        ("train_unconditional", ["--gradient_accumulation_steps=2", "--timestep_sampler=loss_second_moment"]),
        ("train_unconditional", ["--mixed_precision=bf16", "--ema_warmup"]),
        ("train_conditional", ["--condition=class"]),
    ],
)
def test_a_run_is_the_same_as_a_graph(script, flags, graphs, tiny_flags, tmp_path):
    """But for its learning rate, in float32; dropout, a warm-up and more differ from step to step."""
    flags = [*tiny_flags, *LENGTH, *flags]
    plain = run_training(tmp_path / "plain", flags, script)
    graphed = run_training(tmp_path / "graph", [*flags, "--cuda_graph"], script)
    assert Graph.replays == 8 - CALLS_BEFORE_CAPTURE
    assert losses_of(graphed) == pytest.approx(losses_of(plain), rel=1e-5)
    for folder in ("unet", "unet_ema"):
        name = WEIGHTS.replace("unet", folder, 1)
        one, other = load_file(plain / name), load_file(graphed / name)
        for key in one:
            torch.testing.assert_close(one[key], other[key], rtol=1e-4, atol=1e-7)


def test_a_run_as_a_graph_resumes(graphs, tiny_flags, tmp_path):
    flags = [*tiny_flags, *LENGTH, "--cuda_graph"]
    whole = run_training(tmp_path / "whole", flags)
    run_training(tmp_path / "parts", [*flags, "--max_train_steps=5"])
    parts = run_training(tmp_path / "parts", flags)
    assert losses_of(parts) == losses_of(whole)
    one, other = load_file(whole / WEIGHTS), load_file(parts / WEIGHTS)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_update_that_is_not_finite_is_left_out_by_the_graph(graphs, tiny_flags, tmp_path, monkeypatch):
    """No branch decides that: after the capture there is nobody to take it."""
    said = []
    for more in ([], ["--cuda_graph"]):
        run = tmp_path / f"run{len(said)}"
        with pytest.raises(RunFailed, match=r"step \d+: the .* is not finite") as raised:
            run_training(run, [*tiny_flags, *LENGTH, "--learning_rate=1e36", "--lr_warmup_steps=0", *more])
        said.append(str(raised.value).partition(";")[0])
    assert said[0] == said[1]


def test_a_failure_is_remembered_by_the_graph(graphs):
    """All updates after it are left out, too, until the host looks."""
    config = parse_config(["--dataset_name=digits", "--no_use_ema", "--cuda_graph"])
    layer = torch.nn.Linear(1, 1)
    processes = SimpleNamespace(device=torch.device("cpu"), index=0, accelerator=SimpleNamespace(scaler=None))
    update = Update(config, layer, 100, processes)

    def work(step: torch.Tensor, all_finite: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for weights in layer.parameters():
            weights.grad = torch.ones_like(weights)
        update.step(step, all_finite)
        return (update.failed_at.clone(),)

    captured_work, failures, weights = CapturedWork(work), [], []
    for number in range(1, CALLS_BEFORE_CAPTURE + 6):
        update.begin(number)
        (failed_at,) = captured_work(torch.tensor(number), torch.tensor(number != CALLS_BEFORE_CAPTURE + 3))
        failures.append(failed_at.item())
        weights.append(layer.weight.item())
    assert failures == [NEVER_FAILED] * (CALLS_BEFORE_CAPTURE + 2) + [CALLS_BEFORE_CAPTURE + 3] * 3
    assert len(set(weights[:-3])) == CALLS_BEFORE_CAPTURE + 2
    assert len(set(weights[-4:])) == 1


def test_a_step_that_asks_the_device_cannot_be_captured(graphs, tiny_flags, tmp_path, monkeypatch):
    clip = Update.clip

    def asking(update: Update, *given: object) -> None:
        clip(update, *given)
        update.gradient_norm.item()

    monkeypatch.setattr(Update, "clip", asking)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        run_training(tmp_path / "run", [*tiny_flags, *LENGTH, "--cuda_graph"])


@pytest.mark.parametrize(
    ("flags", "device", "count", "reason"),
    [
        ([], "cpu", 1, "needs an NVIDIA GPU, and this run is on cpu"),
        ([], "cuda", 4, "is for one process, and there are 4"),
        (["--mixed_precision=fp16"], "cuda", 1, "the scaling of fp16"),
        (["--gradient_checkpointing"], "cuda", 1, "--gradient_checkpointing asks the host"),
        (["--condition=text"], "cuda", 1, "captions come from the host"),
        (["--timestep_sampler=ats"], "cuda", 1, "ats looks at the network within a step"),
    ],
)
def test_what_is_no_graph(flags, device, count, reason):
    parse = parse_conditional_config if "--condition=text" in flags else parse_config
    config = parse(["--dataset_name=digits", "--cuda_graph", *flags])
    processes = SimpleNamespace(device=torch.device(device), count=count, precision=config.mixed_precision or "no")
    with pytest.raises(UserError, match=f"--cuda_graph: {reason}.*; leave it out"):
        check_cuda_graph(config, build_loss(vars(config), build_process(config)), processes)


@pytest.mark.parametrize("looks", ["before_update", "after_update"])
def test_a_sampler_of_the_user_s_that_looks_at_updates_is_no_graph(tmp_path, looks):
    code = (
        f"from schedulers.timestep_samplers import Uniform\nclass Mine(Uniform):\n    def {looks}(self, update): pass\n"
    )
    (tmp_path / "mine.py").write_text(code)
    test_what_is_no_graph([f"--timestep_sampler={tmp_path}/mine.py:Mine"], "cuda", 1, ".*looks at the network")


def test_a_plain_run_on_one_gpu_is_a_graph():
    config = parse_config(["--dataset_name=digits", "--cuda_graph", "--compile", "--mixed_precision=bf16"])
    processes = SimpleNamespace(device=torch.device("cuda:0"), count=1, precision="bf16")
    check_cuda_graph(config, build_loss(vars(config), build_process(config)), processes)
