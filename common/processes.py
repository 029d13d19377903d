"""The processes of a run: how they start, agree and take turns."""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from common.errors import ROOT, RunFailed, UserError, reason_of
from common.interruption import run_child
from common.machine import keep_freed_memory, usable_cores
from common.progress import set_up_logging

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

# What gloo, NCCL and torch say when another process is gone or silent.
LOST_CONTACT = re.compile("connection|timed out|timeout|peer|nccl|socket", re.IGNORECASE)

# Long enough for one process per machine to decode a large data set, or to make its last batch of images with a slow
# network, while the others wait. A process that has died is noticed at once.
PATIENCE = timedelta(days=1)
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")  # exists if the driver is loaded
# A process that has not come to a step for this long is lost. One that has died is noticed at once.
LOST_AFTER = timedelta(minutes=10)
# NCCL ends a process without a word; gloo, which names the lost one, is to notice first.
LOST_ON_DEVICE_AFTER = 2 * LOST_AFTER
SLURM_PORTS = range(12_000, 32_000)  # below the ports that Linux assigns when a program asks for any free one
# The buckets that DDP exchanges double as gradients, which saves a copy of them.
GRADIENT_EXCHANGE = {"gradient_as_bucket_view": True}
# Features that `accelerate config` can switch on in the environment, but that the scripts do not use.
NOT_USED = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "PARALLELISM_CONFIG": "parallelism"}
YES = ("1", "true", "yes", "on", "y", "t")
ROLL_CALL_SECONDS = 10
PATIENCE_WITH_SCRIPT = 20.0  # seconds that a script has to end when a stop is asked for


class ProcessOptions(Protocol):
    """The options of every script that concern its processes."""

    mixed_precision: str | None
    allow_tf32: bool


class Processes:
    """The processes of a run as one of them sees them; every collective must be called by all.

    Flags and other small things are exchanged by gloo on the CPU, which does not wait for a GPU.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.device: torch.device = accelerator.device
        self.precision: str = accelerator.mixed_precision
        self.index: int = accelerator.process_index
        self.count: int = accelerator.num_processes
        self.is_main: bool = accelerator.is_main_process
        self.is_local_main: bool = accelerator.is_local_main_process
        self.local_count = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this machine
        self._counters = 0
        self._store = dist.HashStore()
        self._asked: list[tuple[torch.Tensor, dist.Work]] = []
        if self.count > 1:
            atexit.register(leave_group)
            self._impatient = dist.new_group(backend="gloo", timeout=LOST_AFTER)
            self._patient = dist.new_group(backend="gloo", timeout=PATIENCE)
            self._store = self._open_store()

    def all_reduce_any(self, flag: bool) -> bool:
        """Return whether the flag is set on any process; for use at every step."""
        if self.count == 1:
            return flag
        shared = torch.tensor([flag], dtype=torch.int8)
        with self.reporting_dead_peers():
            dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self._impatient)
        return bool(shared.item())

    def any_a_step_ago(self, *flags: bool) -> list[bool]:
        """Return which flags were set on any process at the previous call; a single process gets its current flags.

        This way no step waits for other processes: the answer arrives while the device is computing.
        """
        if self.count == 1:
            return list(flags)
        with self.reporting_dead_peers():
            shared = torch.tensor(flags, dtype=torch.int8)
            work = dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self._impatient, async_op=True)
            self._asked.append((shared, work))
            if len(self._asked) == 1:
                return [False] * len(flags)
            answer, earlier = self._asked.pop(0)
            earlier.wait()
        return answer.bool().tolist()

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the processes of a tensor on the CPU."""
        total = tensor.clone()
        if self.count > 1:
            with self.reporting_dead_peers():
                dist.all_reduce(total, group=self._patient)
        return total

    def all_gather(self, item: object) -> list:
        """Return what every process has; for rare and small things."""
        items = [item] * self.count
        if self.count > 1:
            with self.reporting_dead_peers():
                dist.all_gather_object(items, item, group=self._patient)
        return items

    def broadcast(self, item: object) -> object:
        """Return what the main process has; the others may pass anything."""
        return self.all_gather(item)[0]

    def gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return all processes' rows of a tensor on the CPU to the main process, and none to the others."""
        if self.count == 1:
            return rows
        parts = [rows] * self.count if self.is_main else None
        with self.reporting_dead_peers():
            dist.gather_object(rows, parts, group=self._patient)
        return torch.cat(parts) if self.is_main else rows[:0]

    def barrier(self) -> None:
        """Return when all processes are here."""
        self.all_gather(None)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Let the main process of each machine go first; if it fails, it says so before anyone waits for it."""
        if not self.is_local_main:
            self.barrier()
        yield
        if self.is_local_main:
            self.barrier()

    @contextmanager
    def reporting_dead_peers(self) -> Iterator[None]:
        """End with the number of any process that is lost inside this context, not with a hang or a traceback."""
        try:
            yield
        except RuntimeError as error:
            if self.count == 1 or not LOST_CONTACT.search(str(error)):
                raise
            lost = self._call_roll()
            raise RunFailed(
                f"{f'process {lost}' if lost else 'one process'} of {self.count} no longer answers, so the others end "
                f"too; see its own output for the cause. Start the same command again to continue"
            ) from error

    def _open_store(self) -> dist.TCPStore:
        """Open the store, kept by process 0, for roll calls that need no connection to a lost process."""
        host = os.environ["MASTER_ADDR"]
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if self.is_main else None
        port = self.broadcast(store.port if store is not None else None)
        store = store or dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
        self.barrier()  # otherwise process 0 could end early, over a mistake, and the others search for it for minutes
        return store

    def _call_roll(self) -> str:
        """Return the numbers of the processes that do not answer."""
        if not isinstance(self._store, dist.TCPStore):  # they were still looking for one another
            return ""
        try:
            self._store.set(str(self.index), "here")
        except RuntimeError:
            return "0"
        end, lost = time.monotonic() + ROLL_CALL_SECONDS, []
        for index in range(self.count):
            try:
                self._store.wait([str(index)], timedelta(seconds=max(0.1, end - time.monotonic())))
            except RuntimeError:
                lost.append(str(index))
        return ", ".join(lost)

    def shared_counter(self) -> Callable[[int], int]:
        """Return a function that adds to a new counter, shared by all processes, and returns its value before.

        It waits for nobody. The counter lives with process 0, which must end last.
        """
        self._counters += 1
        name = f"count {self._counters}"

        def add(amount: int) -> int:
            with self.reporting_dead_peers():
                return self._store.add(name, amount) - amount

        return add

    def run_script(self, script: str, flags: Sequence[str], **environment: str) -> list[int]:
        """Run a script of this project beside every process, on its device, and return all exit codes.

        The scripts find one another as these processes did. Meanwhile each process waits only for its own child, not in
        a collective, which would time out.
        """
        environment = {**os.environ, **environment}
        if self.count > 1:
            # The main process keeps the store in which they meet, as torchrun's agent does.
            host = os.environ["MASTER_ADDR"]
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if self.is_main else None
            port = self.broadcast(store.port if store is not None else None)
            agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
            environment |= {"MASTER_PORT": str(port), **agent}
        code = run_child([sys.executable, str(ROOT / script), *flags], environment, PATIENCE_WITH_SCRIPT)
        return self.all_gather(code)

    def finish(self) -> None:
        """Leave the group in good order."""
        if self.count > 1:
            dist.destroy_process_group()

    def synchronize_device(self) -> None:
        """Wait for the device, so that a clock read next is true."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def start_processes(options: ProcessOptions) -> Processes:
    """Join the other processes, under plain python, torchrun, accelerate launch or srun."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import DistributedDataParallelKwargs

    adopt_slurm_tasks(os.environ)
    check_accelerate(os.environ)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    precision = options.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", "fp16", "bf16"):
        raise UserError(f"mixed precision {precision}, of accelerate's configuration: only no, fp16 and bf16 work here")
    check_cuda()
    # DDP would be told that process 3 of a machine has GPU 3; but a task that sees only one GPU has GPU 0.
    os.environ.setdefault("ACCELERATE_BYPASS_DEVICE_MAP", "true")
    try:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and os.environ.get("GROUP_WORLD_SIZE") == "1":
            _join_again(world_size)
        accelerator = Accelerator(
            # Where there is no GPU, accelerate joins the others only when told to use the CPU; otherwise each
            # process would believe itself alone and all would write the same run.
            cpu=world_size > 1 and not torch.accelerator.is_available(),
            mixed_precision=precision,
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=_patience_of_device()),
                DistributedDataParallelKwargs(**GRADIENT_EXCHANGE),
            ],
        )
    except ValueError as error:  # fp16 or bf16 where the device has none, for example
        raise UserError(f"--mixed_precision {precision}: {error}") from error
    except (dist.DistError, OSError) as error:  # a port in use, a host that is not there
        meeting = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise UserError(
            f"the processes cannot meet at {meeting} ({reason_of(error)}); if the port is taken, name another one with "
            f"torchrun --master_port, accelerate launch --main_process_port, or MASTER_PORT"
        ) from error
    # The fused optimiser of MPS applies what overflows.
    without_scaler = accelerator.scaler is None or not accelerator.scaler.is_enabled()
    if precision == "fp16" and (without_scaler or accelerator.device.type == "mps"):
        raise UserError(f"--mixed_precision fp16: not available on {accelerator.device.type}; use bf16 or no")
    if accelerator.num_processes != world_size:
        raise UserError(
            f"{world_size} processes were started (WORLD_SIZE), but {accelerator.num_processes} found each other: "
            f"start them with torchrun or accelerate launch"
        )
    several_wanted = {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= os.environ.keys() and "LOCAL_RANK" not in os.environ
    if several_wanted and accelerator.device.type == "cpu":
        # accelerate has set an address for processes to meet at, but started only one, which would change the batch.
        raise UserError("accelerate launch starts one process on the CPU, whatever --num_processes is: use torchrun")
    try:
        processes = Processes(accelerator)
    except RuntimeError as error:
        if not LOST_CONTACT.search(str(error)):
            raise
        raise RunFailed(
            f"the processes have met, but cannot reach each other ({reason_of(error)}). If one has ended, its own "
            f"output says why; between machines, name the network interface that they share, for example "
            f"GLOO_SOCKET_IFNAME=eth0 (`ip address` lists them)"
        ) from error
    check_devices(processes)
    if processes.device.type == "cpu":
        keep_freed_memory()
    set_up_logging(processes.is_main)
    logger.info(accelerator.state)
    # Launchers set one thread per process whatever the machine; a number the user chose is left alone. On GPUs too the
    # cores are shared among the processes of the machine: distances and statistics are computed on the CPU.
    launched = "LOCAL_WORLD_SIZE" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    if os.environ.get("OMP_NUM_THREADS") in ((None, "1") if launched else (None,)):
        torch.set_num_threads(max(1, int(usable_cores()) // processes.local_count))
    # Both ways: torch allows it for convolutions by default, some containers allow it everywhere.
    torch.backends.cuda.matmul.allow_tf32 = options.allow_tf32
    torch.backends.cudnn.allow_tf32 = options.allow_tf32
    return processes


def adopt_slurm_tasks(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables so that the tasks of srun find one another, unless a launcher has done so.

    A batch script has most of SLURM's variables too, but is no task of a step.
    """
    count = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
    if count == 1 or "RANK" in environment:
        return
    # As in "2(x3),1": so many tasks on each node.
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment["SLURM_STEP_TASKS_PER_NODE"])
    tasks = [int(tasks) for tasks, nodes in groups for _ in range(int(nodes or 1))]
    mine = tasks[int(environment["SLURM_NODEID"])]
    # Tasks that are bound to cores of their own share them with nobody.
    bound = usable_cores() < int(environment.get("SLURM_CPUS_ON_NODE", 0))
    # The first of a list such as "gpu[07-09,12],big1".
    first_host = re.sub(r"\[(\w+)[^]]*\]", r"\1", environment["SLURM_STEP_NODELIST"]).split(",")[0]
    number = 100 * int(environment["SLURM_JOB_ID"]) + int(environment["SLURM_STEP_ID"])
    meeting = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(1 if bound else mine),
        "MASTER_ADDR": "127.0.0.1" if len(tasks) == 1 else first_host,
        "MASTER_PORT": str(SLURM_PORTS[number % len(SLURM_PORTS)]),
    }
    for name, value in meeting.items():
        environment.setdefault(name, value)


def check_accelerate(environment: MutableMapping[str, str]) -> None:
    """Raise if `accelerate config` asks for something that would silently change a training, or have no effect."""
    asked = [what for name, what in NOT_USED.items() if environment.get(f"ACCELERATE_USE_{name}", "").lower() in YES]
    if asked:
        raise UserError(
            f"accelerate's configuration asks for {' and '.join(asked)}, and every GPU holds the whole network here: "
            f"start with `accelerate launch --multi_gpu` or torchrun"
        )
    backend = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend != "no":
        raise UserError(
            f"accelerate's configuration asks for torch dynamo ({backend}): add --compile instead, and choose none in "
            f"`accelerate config`, or start with torchrun"
        )
    passes = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if passes not in ("1", "auto"):
        raise UserError(
            f"accelerate's configuration asks for {passes} gradient accumulation steps: give the scripts "
            f"--gradient_accumulation_steps {passes} instead, and choose 1 there, or start with torchrun"
        )


def leave_group() -> None:
    """Leave the group when a failed process ends; on GPUs, without waiting for work that is under way."""
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def _patience_of_device() -> timedelta:
    return LOST_ON_DEVICE_AFTER if torch.cuda.is_available() else LOST_AFTER


def wants_cpu() -> bool:
    """Return whether accelerate was told to leave the GPUs alone."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in YES


def check_cuda() -> None:
    """Raise if torch cannot use the NVIDIA driver that is there: nobody means to train on the CPU for days."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles")
    if torch.accelerator.is_available() or hidden or wants_cpu() or not NVIDIA_DRIVER.exists():
        return
    built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built for CPUs only"
    driver = next(iter(re.findall(r"\d+\.\d[\d.]*", NVIDIA_DRIVER.read_text(errors="replace"))), "?")
    raise UserError(
        f"this machine has an NVIDIA driver ({driver}), but torch {torch.__version__}, which {built}, cannot use it: "
        f"install a torch that fits the driver, or use the CPU with CUDA_VISIBLE_DEVICES=''"
    )


def check_devices(processes: Processes) -> None:
    """Raise if two processes share a GPU: more processes were started than there are GPUs, and NCCL needs one each."""
    if processes.device.type != "cuda":
        return
    devices = set(processes.all_gather(str(torch.cuda.get_device_properties(processes.device).uuid)))
    if len(devices) < processes.count:
        raise UserError(
            f"{processes.count} processes were started, but they have {len(devices)} GPU(s), and each needs its own: "
            f"start as many on each machine as it has GPUs"
        )


def _join_again(world_size: int) -> None:
    """Meet the other processes after torchrun has started all of them again.

    torch 2.15 waits for those that have died, whose addresses are under the same keys (a bare all-reduce under
    `torchrun --standalone --max-restarts` hangs); keys with the number of the restart do not clash.
    """
    store, rank, _ = next(dist.rendezvous("env://"))
    attempt = dist.PrefixStore(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    backend = "nccl" if torch.cuda.is_available() and not wants_cpu() else "gloo"
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=world_size, timeout=_patience_of_device())
