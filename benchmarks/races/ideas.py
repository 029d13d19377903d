"""Ways to adapt the density of timesteps to the training, each of another kind, to be raced against `log_snr`.

    python train_unconditional.py --timestep_sampler benchmarks/races/ideas.py:LearningSpeed ...

Each starts from the density of `log_snr`, pi, and follows what it sees by a share of 0.7; 3 % of the draws are uniform
over all t. They are for unconditional networks that predict epsilon. `RecordedWeights` is the opposite, a control that
follows nothing. What came of them is in docs/adaptive_experiments.md.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch

from common.randomness import generator_for
from schedulers.adaptive_samplers import MarginalReturn, SaturatingBound, load_into
from schedulers.loss import normalise
from schedulers.timestep_samplers import LogSNRBins, TimestepSampler, UpdateProbe

FLOOR, LOW, HIGH = 0.03, -6.5, 6.2  # of `log_snr`
FOLLOWED = 0.7  # the share of the draws that follows what is seen


class LearningSpeed(MarginalReturn):
    """Draw where the loss falls fastest in proportion: p(lambda) ~ -d ln L / d ln n, whatever an error is worth."""

    def __init__(self, alphas_cumprod: torch.Tensor):
        super().__init__(alphas_cumprod, prior=1 - FOLLOWED, power=0.0, floor=FLOOR, low=LOW, high=HIGH)

    def worth(self) -> torch.Tensor:
        return (self.returns / self.expected).nan_to_num(0)


class BoundToSimple(MarginalReturn):
    """From the density of the bound to that of L_simple: a curriculum that the training times.

        p = (1 - m) pi + m / T,    m = 1 - F / (the largest F so far)

    F is the fall of the losses above lambda = 0 over the latest octave of steps, as a share of them: little noise is
    learned first, and once that goes slowly, what the paper trains.
    """

    def __init__(self, alphas_cumprod: torch.Tensor):
        self.largest_fall = torch.zeros((), dtype=torch.float64)
        super().__init__(alphas_cumprod, power=0.0, floor=FLOOR, low=LOW, high=HIGH)

    def _refresh(self) -> None:
        super()._refresh()
        clean = (self.bins.centres > 0) & self.expected.isfinite()
        fall = self.returns[clean].sum() / self.expected[clean].sum() if clean.any() else torch.zeros(())
        torch.maximum(self.largest_fall, fall.double(), out=self.largest_fall)
        moved = 1 - fall / self.largest_fall if self.largest_fall > 0 else 0.0
        pi, uniform = self.range / self.range.sum(), torch.full_like(self.range, 1 / self.num_train_timesteps)
        self.set_density((1 - moved) * pi + moved * uniform, self.floor)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return super().state_dict() | {"largest_fall": self.largest_fall}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.largest_fall.copy_(state["largest_fall"])
        super().load_state_dict(state)


class RecordedWeights(SaturatingBound):
    """Weight losses from the first step on as `saturating_bound` does at the end of another run.

    `result` is that run's file of results in a race. If this does as well, the weights need not follow the training.
    """

    def __init__(self, alphas_cumprod: torch.Tensor, result: str):
        of_bins = json.loads(Path(result).read_text(encoding="utf-8"))["draws"]["loss"]
        self.recorded = torch.tensor(of_bins, dtype=torch.float64)
        super().__init__(alphas_cumprod)

    def _refresh(self) -> None:
        self.set_density(self.range, self.floor)
        self.expected, self.has_learned = self.recorded, True
        self.follow(*self.moments[:2], known=self.expected.isfinite())


class Look(TimestepSampler):
    """p(lambda) ~ (1 - s) pi + s pi v, with a value v for every bin of lambda that looks at the network bring.

    It looks `per_doubling` times whenever the number of steps has doubled, from step `first` on, so that a run that is
    ten times as long pays hardly more. Each look has the share `newest` in v.
    """

    objective = "changed"
    stratified = True
    per_doubling = 2
    newest = 0.5

    def __init__(self, alphas_cumprod: torch.Tensor, first: int = 64):
        super().__init__(alphas_cumprod)
        self.alphas_cumprod, self.bins, self.first = alphas_cumprod, LogSNRBins(alphas_cumprod), first
        self.pi = self.bins.between(LOW, HIGH)
        self.pi /= self.pi.sum()
        self.values = torch.ones(len(self.bins), dtype=torch.float64)
        self.looks = torch.zeros((), dtype=torch.int64)
        self._refresh()

    def look(self, update: UpdateProbe) -> torch.Tensor:
        """Return a number, not below 0, for every bin; the network has no dropout meanwhile."""
        raise NotImplementedError

    def follow(self, values: torch.Tensor) -> None:
        worth = self.pi * values[self.bins.of_timestep]
        self.set_density((1 - FOLLOWED) * self.pi + FOLLOWED * worth / worth.sum(), FLOOR)

    def before_update(self, update: UpdateProbe) -> None:
        steps = update.step + 1
        before, now = (int(self.per_doubling * math.log2(number)) for number in (max(1, steps - 1), steps))
        if steps < self.first or now == before:
            return
        update.network.eval()
        seen = self.look(update).double()
        update.network.train()
        if seen.isfinite().all() and seen.sum() > 0:
            self.looks += 1
            self.values.lerp_(seen / seen.mean(), 1.0 if self.looks == 1 else self.newest)
            self._refresh()

    def _refresh(self) -> None:
        self.follow(self.values)

    def signals(self) -> dict[str, torch.Tensor]:
        return {"value": self.values[self.bins.of_timestep]} if self.looks else {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"values": self.values, "looks": self.looks}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        load_into(self.values, state["values"], "values")
        self.looks.copy_(state["looks"])
        self._refresh()

    def gradient(self, update: UpdateProbe, number: int, images: int, purpose: str) -> torch.Tensor:
        """Compute the gradient of the mean error of epsilon in a bin, over so many of this process's images."""
        device = next(update.network.parameters()).device
        generator = generator_for("looks", purpose, update.step, number, int(update.positions[0]))
        rows = torch.randint(len(update.images), (images,), generator=generator)
        members = (self.bins.of_timestep == number).nonzero().flatten()
        t = members[torch.randint(len(members), (images,), generator=generator)].to(device)
        x_0 = normalise(update.images[rows].to(device))
        epsilon = torch.randn(x_0.shape, generator=generator).to(device)
        a = self.alphas_cumprod.to(device)[t].float()[:, None, None, None]
        error = (update.network(a.sqrt() * x_0 + (1 - a).sqrt() * epsilon, t).sample - epsilon).square().mean()
        return torch.cat([one.flatten() for one in torch.autograd.grad(error, list(update.network.parameters()))])


class GradientMoments(Look):
    """The density with the least noisy gradient of what `log_snr` trains: p ~ pi sqrt(G), losses weighted by pi / p.

    G would be the mean squared norm of the gradient of an image of a bin. Here it is that of the mean over four of
    them, in which the noise of the gradient counts by far the most.
    """

    per_doubling = 4
    newest = 0.4

    def look(self, update: UpdateProbe) -> torch.Tensor:
        norms = [self.gradient(update, number, 4, "moments").square().sum() for number in range(len(self.bins))]
        return update.total(torch.stack(norms)).cpu()

    def _refresh(self) -> None:
        self.follow(self.values.sqrt())
        # The share that stays with pi keeps the weights below 1 / (1 - FOLLOWED).
        wanted = (1 - FLOOR) * self.pi + FLOOR / self.num_train_timesteps
        self._corrections = (wanted / self.describe()).float()


class Transfer(Look):
    """Draw at those noise levels whose gradient lowers the losses of all, through the weights that they share.

        v_b = max(0, sum_c <g_b, P g_c>),    P = 1 / sqrt(mean_b g_b^2), as Adam scales gradients

    g_b and g_c are from different images, so that noise is not taken for agreement.
    """

    def look(self, update: UpdateProbe) -> torch.Tensor:
        halves = [
            torch.stack([self.gradient(update, number, 8, half) for number in range(len(self.bins))])
            for half in ("first", "second")
        ]
        first, second = (update.total(half) for half in halves)
        scale = (first.square().mean(0) / 2 + second.square().mean(0) / 2).sqrt().clamp(min=1e-12)
        worth = (first @ (second.sum(0) / scale) + second @ (first.sum(0) / scale)).cpu()
        return self.bins.smoothed(worth.clamp(min=0))


class Spectrum(Look):
    """Draw at the noise levels that decide the frequencies in which samples differ from the data.

    A frequency f with power S_f, that of white noise of variance 1 being 1, emerges where SNR S_f = 1, at
    lambda = -ln S_f. v there is |ln(S_f of 64 samples / S_f of the data)|, over its mean, from 0.5 to 2. Samples are
    drawn by DDIM in 20 steps from the weights as they are.
    """

    samples, steps = 64, 20

    def __init__(self, alphas_cumprod: torch.Tensor, first: int = 64):
        super().__init__(alphas_cumprod, first)
        self.power = torch.zeros(0, dtype=torch.float64)  # summed over looks, by radius; their number is the last

    def look(self, update: UpdateProbe) -> torch.Tensor:
        images = normalise(update.images)
        of_samples = power_spectrum(self.draw_samples(update, images.shape[1:]))
        seen = torch.cat([power_spectrum(images), torch.ones(1), of_samples])
        # The processes have different images, and samples that may differ in their last bits.
        seen = update.total(seen.to(next(update.network.parameters()).device)).cpu()
        of_images, of_samples = seen[: len(of_samples) + 1], seen[len(of_samples) + 1 :] / seen[len(of_samples)]
        self.power = of_images if len(self.power) == 0 else self.power + of_images
        of_data = self.power[:-1] / self.power[-1]
        differences = (of_samples / of_data).log().abs()
        levels = -of_data.log()
        order = levels.argsort().numpy()
        value = np.interp(self.bins.centres, levels.numpy()[order], differences.numpy()[order])
        return torch.from_numpy(value / value.mean()).clamp(0.5, 2)

    @torch.no_grad()
    def draw_samples(self, update: UpdateProbe, shape: torch.Size) -> torch.Tensor:
        device = next(update.network.parameters()).device
        x = torch.randn(self.samples, *shape, generator=generator_for("looks", "samples", update.step)).to(device)
        timesteps = torch.linspace(self.num_train_timesteps - 1, 0, self.steps).round().long()
        a = torch.cat([self.alphas_cumprod.float()[timesteps], torch.ones(1)]).to(device)  # x_0 is where they end
        for t, now, following in zip(timesteps.tolist(), a[:-1], a[1:], strict=True):
            x_0 = ((x - (1 - now).sqrt() * update.network(x, t).sample.float()) / now.sqrt()).clamp(-1, 1)
            epsilon = (x - now.sqrt() * x_0) / (1 - now).sqrt()
            x = following.sqrt() * x_0 + (1 - following).sqrt() * epsilon
        return x.cpu()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return super().state_dict() | {"power": self.power}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.power = state["power"].clone()
        super().load_state_dict(state)


def power_spectrum(images: torch.Tensor) -> torch.Tensor:
    """Average the power of images over channels and over the frequencies of each radius from 1; 1 for white noise."""
    side = images.shape[-1]
    frequencies = torch.fft.fftfreq(side, 1 / side)
    radius = (frequencies[:, None].square() + frequencies.square()).sqrt().round().long().flatten()
    power = torch.fft.fft2(images.double()).abs().square().mean((0, 1)).flatten() / side**2
    sums = torch.zeros(side, dtype=torch.float64).index_add_(0, radius, power)
    counts = torch.bincount(radius, minlength=side)
    return (sums / counts.clamp(min=1))[1 : side // 2 + 1]
