"""The timestep sampler of a run at work: what it draws, how it hears what came of it, and what it costs."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from common.errors import UserError
from common.machine import PendingCopy, to_device
from common.randomness import derive_seed, generator_for, standard_normal
from image_data.batches import normalised
from run_folder.config import names_own_file
from schedulers.loss import TIMESTEP_SAMPLERS
from schedulers.timestep_samplers import TimestepSampler, Update
from schedulers.weighting import LOSS_WEIGHTINGS, weighting_table

if TYPE_CHECKING:
    from common.processes import Processes
    from image_data.batches import TrainingBatches
    from run_folder.config import TrainingConfig
    from schedulers.ddpm import ExactDDPMScheduler

# Steps until a sampler hears of its losses. One would have the host wait for the device at every step; by two the
# device has the next step to work on while the host waits for this one's losses.
DELAY = 2


def build_sampler(config: TrainingConfig, alphas_cumprod: torch.Tensor) -> TimestepSampler:
    """The sampler that the configuration names, from the registry or from the user's own file."""
    name = config.timestep_sampler
    kind = load_class(name) if names_own_file(name) else TIMESTEP_SAMPLERS[name]
    with told_as(f"--timestep_sampler {name}"):
        sampler = kind(alphas_cumprod, **own_options(config, name, kind))
    if config.stratified:
        if not sampler.can_be_stratified:
            raise UserError(f"--stratified: {name} does not draw from one density for all images through `quantiles`")
        sampler.stratified = True
    return sampler


def build_weighting(config: TrainingConfig, alphas_cumprod: torch.Tensor) -> torch.Tensor:
    """The weight of the loss at every t that the configuration names."""
    name = config.loss_weighting
    with told_as(f"--loss_weighting {name}"):
        options = own_options(config, name, LOSS_WEIGHTINGS[name])
        return weighting_table(name, alphas_cumprod, config.prediction_type, **options)


def own_options(config: TrainingConfig, name: str, function: Callable) -> dict[str, object]:
    """The arguments of a sampler or weighting that are options of a run: `edm_mean` is the `mean` of `edm`."""
    given = {argument: f"{name}_{argument.rstrip('_')}" for argument in inspect.signature(function).parameters}
    return {argument: getattr(config, option) for argument, option in given.items() if hasattr(config, option)}


@contextmanager
def told_as(flag: str) -> Iterator[None]:
    """What a sampler or weighting refuses is the mistake of whoever chose it."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{flag}: {error}") from error


def load_class(name: str) -> type[TimestepSampler]:
    """The class in a file of the user's: my_file.py:MySampler."""
    path, _, wanted = name.rpartition(":")
    # Under a name that is no other module's, and where its own classes can find it.
    specification = importlib.util.spec_from_file_location(f"timestep_sampler_of_{Path(path).stem}", path)
    module = sys.modules[specification.name] = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except Exception as error:  # whatever the file does
        raise UserError(f"--timestep_sampler {name}: {path} fails with {type(error).__name__}: {error}") from error
    found = {
        kind.__name__: kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, TimestepSampler) and kind.__module__ == module.__name__
    }
    if wanted not in found:
        there = f"has {', '.join(found)}" if found else "has no class that extends TimestepSampler"
        raise UserError(f"--timestep_sampler {name}: {path} has no timestep sampler {wanted}; it {there}")
    return found[wanted]


# losses(rows, noise, timesteps): of this process's images `rows`, as the network now stands.
Losses = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class TimestepSampling:
    """A sampler between the processes, the device and the loop, none of which it knows.

    Every process draws the timesteps of the whole global batch on the host, where it is cheap and the same everywhere,
    and takes those of its own images. A sampler that observes hears the losses of the whole batch: they travel in the
    exchange that every step makes anyway, are copied out while the device goes on, and are handed over DELAY steps
    later, at the same step whatever the hardware. Those still on their way are part of the state, so that a resumed
    run draws the same timesteps. A sampler that looks at the images draws on their device and fetches nothing.
    """

    def __init__(
        self,
        sampler: TimestepSampler,
        weight_of: torch.Tensor,
        scheduler: ExactDDPMScheduler,
        batches: TrainingBatches,
        processes: Processes,
        channels: int,
    ):
        self.sampler = sampler
        self.weight_of = weight_of  # of the loss, at every t
        self.seconds = 0.0  # that this process has spent on the sampler
        self._weight_here = weight_of.to(processes.device)
        if sampler.measures_updates:
            self._divergence = scheduler.divergence_weights().float().to(processes.device)
        self._seed, self._noise_key = batches.seed, derive_seed(batches.seed, "timestep sampler")
        self._batch_size, self._positions = batches.total_batch_size, batches.positions
        self._positions_here = to_device(batches.positions.flatten(), processes.device)
        self._processes = processes
        self._on_their_way: deque[tuple[int, torch.Tensor, PendingCopy]] = deque()
        sampler.start(channels, processes.device)

    def draw(self, step: int, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Timesteps and loss weights of this process's images, [passes, images], on its device."""
        self._shape = pixels.shape[2:]
        with self._timed():
            while self._on_their_way and self._on_their_way[0][0] <= step - DELAY:
                self._hand_over(*self._on_their_way.popleft())
            generator = generator_for(self._seed, "timesteps", step)
            if self.sampler.looks_at_images:
                images = normalised(to_device(pixels.flatten(0, 1), self._processes.device))
                positions = self._positions.flatten()
                timesteps, weights = self.sampler.sample_for(images, positions, self._batch_size, generator)
                weights = weights * self._weight_here[timesteps]
                return timesteps.view_as(self._positions), weights.view_as(self._positions)
            self._drawn, weights = self.sampler.sample(self._batch_size, generator)
            weights = weights * self.weight_of[self._drawn]
            here = self._processes.device
            return to_device(self._drawn[self._positions], here), to_device(weights[self._positions], here)

    def placed(self, losses: torch.Tensor) -> torch.Tensor:
        """This process's losses at their positions in the global batch; nothing if the sampler does not observe."""
        if not self.sampler.observes:
            return losses[:0]
        return losses.new_zeros(self._batch_size).index_copy(0, self._positions_here, losses)

    def hear(self, step: int, losses: torch.Tensor) -> None:
        """Take the losses of the global batch from the device, if the sampler observes them."""
        if self.sampler.observes:
            with self._timed():
                self._on_their_way.append((step, self._drawn, PendingCopy(losses)))

    def _hand_over(self, step: int, timesteps: torch.Tensor, losses: PendingCopy) -> None:
        weighted = losses.get().double() * self.weight_of[timesteps]
        # What is not a number stops the run when the host next looks at the device; until then it teaches nothing.
        finite = weighted.isfinite()
        self.sampler.observe(step, timesteps[finite], weighted[finite])

    @contextmanager
    def around_update(self, step: int, network: torch.nn.Module, losses: Losses) -> Iterator[None]:
        """Run the sampler's hooks before and after what is done in here."""
        if not self.sampler.measures_updates:
            yield
            return

        def kl(rows: torch.Tensor, timesteps: torch.Tensor, noise_rows: torch.Tensor) -> torch.Tensor:
            return self._divergences(step, network, losses, rows, timesteps, noise_rows)

        update = Update(step, self._batch_size, self._positions.flatten(), kl, self._total)
        with self._timed():
            self.sampler.before_update(update)
        yield
        with self._timed():
            self.sampler.after_update(update)

    def _divergences(
        self,
        step: int,
        network: torch.nn.Module,
        losses: Losses,
        rows: torch.Tensor,
        timesteps: torch.Tensor,
        noise_rows: torch.Tensor,
    ) -> torch.Tensor:
        """See `Update.kl`; in parts as large as a forward pass of the training."""
        device, started = self._processes.device, time.perf_counter()
        self._processes.synchronize_device()
        self.seconds -= time.perf_counter() - started  # waiting for the training is not the sampler's time
        found = []
        network.eval()
        with torch.no_grad(), self._processes.accelerator.autocast():
            for part in torch.arange(len(rows)).split(self._positions.shape[1]):
                t = to_device(timesteps[part], device)
                noise = standard_normal(self._noise_key, to_device(noise_rows[part], device), step, self._shape)
                found.append(self._divergence[t] * losses(rows[part], noise, t))
        network.train()
        self._processes.synchronize_device()
        return torch.cat(found)

    def _total(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._processes.count > 1:
            dist.all_reduce(tensor)
        return tensor

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started

    # What checkpoints hold.

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = dict(self.sampler.state_dict())
        for step, timesteps, losses in self._on_their_way:
            state |= {f"{ON_THEIR_WAY}{step}.timesteps": timesteps, f"{ON_THEIR_WAY}{step}.losses": losses.get()}
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.sampler.load_state_dict({k: tensor for k, tensor in state.items() if not k.startswith(ON_THEIR_WAY)})
        steps = sorted({int(name.split(".")[1]) for name in state if name.startswith(ON_THEIR_WAY)})
        self._on_their_way = deque(
            (step, state[f"{ON_THEIR_WAY}{step}.timesteps"], PendingCopy(state[f"{ON_THEIR_WAY}{step}.losses"]))
            for step in steps
        )


ON_THEIR_WAY = "on_their_way."
