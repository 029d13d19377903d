"""Timestep samplers that learn while the network does. Their state is tensors, the same on every process."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributions import Beta

from common.machine import to_device
from common.randomness import generator_for
from schedulers.ddpm import signal_to_noise
from schedulers.timestep_samplers import EDM, LogSNRBins, TimestepSampler, UpdateProbe, log_snr_of, positive


class LossSecondMoment(TimestepSampler):
    """p_t proportional to sqrt(E[L_t^2]) over the latest losses of every t (Nichol & Dhariwal 2021, eq. 18).

    Uniform until `history` losses of every t are known; from then on at least the share `uniform` of the draws is
    uniform, so that no p_t is below uniform / T. Weighted by 1 / (T p_t): the same objective.
    """

    def __init__(self, alphas_cumprod: torch.Tensor, history: int = 10, uniform: float = 0.001):
        super().__init__(alphas_cumprod)
        positive(history=history)
        if not 0 < uniform <= 1:
            raise ValueError(f"uniform {uniform}: must be greater than 0 and at most 1")
        self.uniform = uniform
        self.losses = torch.zeros(self.num_train_timesteps, history, dtype=torch.float64)
        self.counts = torch.zeros(self.num_train_timesteps, dtype=torch.int64)
        self.root: torch.Tensor | None = None  # sqrt(E[L_t^2]), once it is known

    @property
    def least_probability(self) -> float:
        return self.uniform / self.num_train_timesteps

    def observe(self, step: int, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        table, counts = self.losses.numpy(), self.counts.numpy()  # views of the same memory
        for t, loss in zip(timesteps.tolist(), losses.tolist(), strict=True):
            table[t, counts[t] % table.shape[1]] = loss
            counts[t] += 1
        self._refresh()

    def signals(self) -> dict[str, torch.Tensor]:
        return {} if self.root is None else {"root_mean_square_loss": self.root}

    def _refresh(self) -> None:
        if (self.counts >= self.losses.shape[1]).all():
            self.root = root = self.losses.square().mean(1).sqrt()
            self.set_density((1 - self.uniform) * root / root.sum() + self.uniform / self.num_train_timesteps)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"losses": self.losses, "counts": self.counts}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        load_into(self.losses, state["losses"], "losses")
        self.counts.copy_(state["counts"])
        self._refresh()


def load_into(tensor: torch.Tensor, saved: torch.Tensor, name: str) -> None:
    if saved.shape != tensor.shape:
        raise ValueError(f"{name} of its timestep sampler has the shape {tuple(saved.shape)}")
    tensor.copy_(saved)


class BinnedLosses(TimestepSampler):
    """A density over lambda = log SNR that follows the average loss in equal bins of it.

    Averages are over about the latest `history` losses of a bin. lambda is uniform until every bin has had ten.
    """

    signal: str  # the name of what is averaged

    def __init__(self, alphas_cumprod: torch.Tensor, bins: int, history: int, floor: float):
        super().__init__(alphas_cumprod)
        positive(bins=bins, history=history)
        self.bins, self.history, self.floor = LogSNRBins(alphas_cumprod, bins), history, floor
        self.averages = torch.zeros(len(self.bins), dtype=torch.float64)
        self.counts = torch.zeros(len(self.bins), dtype=torch.int64)
        self.set_density(self.bins.widths, floor)

    def rated(self, timesteps: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        """Convert losses to the quantity that is averaged."""
        raise NotImplementedError

    def density(self, averages: torch.Tensor) -> torch.Tensor:
        """Return p_t, up to a factor, for the average of every t's bin."""
        raise NotImplementedError

    @property
    def known(self) -> torch.Tensor | None:
        """Return the average of every t's bin, or None until every bin has had ten losses."""
        return self.averages[self.bins.of_timestep] if (self.counts >= 10).all() else None

    def signals(self) -> dict[str, torch.Tensor]:
        return {} if self.known is None else {self.signal: self.known}

    @property
    def least_probability(self) -> float:
        return self.floor / self.num_train_timesteps

    def observe(self, step: int, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        bins = self.bins.of_timestep[timesteps]
        new = torch.bincount(bins, minlength=len(self.bins))
        sums = torch.bincount(bins, self.rated(timesteps, losses), minlength=len(self.bins))
        self.counts += new
        # At first the mean of all losses, later a running mean in which each new loss has the share 1 / history.
        share = (new.double() / self.counts.clamp(min=1, max=self.history)).clamp(max=1)
        self.averages += share * (sums / new.clamp(min=1) - self.averages)
        self._refresh()

    def _refresh(self) -> None:
        if self.known is not None:
            self.set_density(self.density(self.known), self.floor)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"averages": self.averages, "counts": self.counts}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        load_into(self.averages, state["averages"], "averages")
        self.counts.copy_(state["counts"])
        self._refresh()


THIRDS = 3  # of an octave, a doubling of the steps, in which losses are summed
WORTH_A_LOOK = 100  # the losses that a bin must have had in an octave to be known


class ErrorsByOctave(TimestepSampler):
    """Tracks the error of epsilon to expect in equal bins of lambda = log SNR: its mean over steps n/2 to n.

    Errors are summed by thirds of an octave, a doubling of the steps: the state is small, and what is expected follows
    the training at its own pace. It begins with lambda uniform from `low` to `high`, and a share `floor` of the draws
    uniform over all t.
    """

    objective = "changed"
    needs_squared_errors = True
    stratified = True

    def __init__(self, alphas_cumprod: torch.Tensor, floor: float, low: float, high: float):
        super().__init__(alphas_cumprod)
        self.bins, self.floor = LogSNRBins(alphas_cumprod), floor
        self.range = self.bins.between(low, high)
        # Of the errors in every bin: their number, sum and sum of squares, in the present third of an octave of steps
        # and in the six before it.
        self.moments = torch.zeros(3, 1 + 2 * THIRDS, len(self.bins), dtype=torch.float64)
        self.third = torch.zeros((), dtype=torch.int64)  # the present one, counted from the first step
        self._refresh()

    @property
    def least_probability(self) -> float:
        return self.floor / self.num_train_timesteps

    def observe(self, step: int, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        third = int(THIRDS * math.log2(step + 1))
        if (passed := third - self.third.item()) > 0:
            self.third += passed
            passed = min(passed, 1 + 2 * THIRDS)
            self.moments = self.moments.roll(passed, dims=1)
            self.moments[:, :passed] = 0
            self._refresh()
        errors = losses / self.x_0_weights[timesteps] * self.bins.log_snr.exp()[timesteps]  # of epsilon
        for moment, values in zip(self.moments, (torch.ones_like(errors), errors, errors.square()), strict=True):
            moment[0].index_add_(0, self.bins.of_timestep[timesteps], values)

    def _refresh(self) -> None:
        """Learn from the two octaves before the present third, if their errors are known over the whole range."""
        latest, before = (self.moments[:, start : start + THIRDS].sum(1) for start in (1, 1 + THIRDS))
        # Do not wait for bins that the range hardly touches: their losses are too rare.
        share = self.bins.total(self.range) / self.bins.total(self.bins.widths)
        in_range = share > min(0.5, share.max().item() / 2)
        known = torch.minimum(latest[0], before[0]) >= WORTH_A_LOOK
        self.set_density(self.range, self.floor)
        self.expected = torch.ones(len(self.bins), dtype=torch.float64)
        self.has_learned = bool(known[in_range].all())
        if self.has_learned:
            self.expected = torch.where(known, latest[1] / latest[0], torch.nan)
            self.follow(latest, before, known)

    def follow(self, latest: torch.Tensor, before: torch.Tensor, known: torch.Tensor) -> None:
        """Set density and weights by the moments of two octaves, in the bins that are known."""
        raise NotImplementedError

    def weigh(self, weight: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Weight losses by a function of the logarithm of their expected error, scaled to mean 1 over the draws."""
        known = self.expected.isfinite()
        log_expected = np.interp(self.bins.log_snr, self.bins.centres[known], self.expected[known].log())
        weights = weight(torch.from_numpy(log_expected))
        self._corrections = (weights / (weights * self.describe()).sum()).float()

    def signals(self) -> dict[str, torch.Tensor]:
        if not self.has_learned:
            return {}
        return {"expected_error": self.expected[self.bins.of_timestep], "weight": self._corrections.double()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"moments": self.moments, "third": self.third}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        load_into(self.moments, state["moments"], "moments")
        self.third.copy_(state["third"])
        self._refresh()


class SaturatingBound(ErrorsByOctave):
    """Draw lambda = log SNR evenly; count large errors of an image by their logarithm, as the training measures them.

    The variational bound counts D = E |epsilon - epsilon_theta|^2, summed over an image, the same at every lambda
    (Kingma et al. 2021). Here D counts in full only while it is small compared with `scale`, c:

        J = integral of c ln(1 + D / c) d lambda,    w(lambda) = 1 / (1 + D / c), of mean 1 over the draws

    D grows with the size of an image, so larger ones are trained with less weight on little noise. J is what a network
    that predicts epsilon minimises; another prediction or a loss weighting comes on top of it. A share `floor` of the
    draws is uniform over all t. Another objective.
    """

    def __init__(
        self,
        alphas_cumprod: torch.Tensor,
        scale: float = 100.0,
        floor: float = 0.03,
        low: float = -6.5,
        high: float = 6.2,
    ):
        positive(scale=scale)
        self.scale, self.values = scale, 1  # in an image, before there is one
        super().__init__(alphas_cumprod, floor, low, high)

    def start(self, shape: tuple[int, int, int], device: torch.device) -> None:
        self.resize(shape)

    def resize(self, shape: tuple[int, int, int]) -> None:
        self.values = math.prod(shape)
        self._refresh()

    def follow(self, latest: torch.Tensor, before: torch.Tensor, known: torch.Tensor) -> None:
        self.weigh(lambda log_expected: 1 / (1 + self.values * log_expected.exp() / self.scale))


class MarginalReturn(ErrorsByOctave):
    """Draw where a further draw lowers the variational bound most; weight losses by how uncertain they are.

    The bound is the error L of epsilon summed over lambda = log SNR (Kingma et al. 2021). Where L falls with the number
    n of steps, the draws at lambda have earned R = -dL / d ln n, and they are spent best where all earn the same:

        p(lambda) = s R / sum R + (1 - s) pi,    w(lambda) ~ L^-power, of mean 1 over the draws

    pi is uniform in lambda from `low` to `high`. R, in bins of lambda, is the mean loss over steps n/4 to n/2 less that
    over n/2 to n and less the standard error of the difference, all over ln 2. s is (1 - prior) times the share of the
    total fall that is not standard error: where there is only noise, p falls back to pi.
    Power 1 would weight as least squares does, where L is the variance of the noise; a root of it leaves some weight
    at low noise. A share `floor` of the draws is uniform over all t. Another objective.
    """

    def __init__(
        self,
        alphas_cumprod: torch.Tensor,
        prior: float = 0.3,
        power: float = 0.25,
        floor: float = 0.03,
        low: float = -6.5,
        high: float = 6.2,
    ):
        self.prior, self.power = prior, power
        super().__init__(alphas_cumprod, floor, low, high)

    def _refresh(self) -> None:
        self.returns = torch.zeros(len(self.bins), dtype=torch.float64)
        super()._refresh()

    def follow(self, latest: torch.Tensor, before: torch.Tensor, known: torch.Tensor) -> None:
        (count, total, squares), (count_before, total_before, squares_before) = latest, before
        mean, mean_before = total / count, total_before / count_before
        variance = (squares / count - mean.square()) / count
        variance += (squares_before / count_before - mean_before.square()) / count_before
        error = torch.where(known, variance.clamp(min=0).sqrt(), 0)
        fallen = torch.where(known, (mean_before - mean - error).clamp(min=0), 0)
        self.returns = self.bins.smoothed(fallen / math.log(2))  # neighbours learn from one another
        trust = (fallen.sum() / (fallen + error).sum()).nan_to_num(0).item()
        earned, pi = self.worth()[self.bins.of_timestep] * self.range, self.range / self.range.sum()
        share = (1 - self.prior) * trust
        self.set_density(share * earned / earned.sum().clamp(min=1e-300) + (1 - share) * pi, self.floor)
        self.weigh(lambda log_expected: log_expected.mul(-self.power).exp())

    def worth(self) -> torch.Tensor:
        """Return what a draw in each bin is worth: p follows it."""
        return self.returns

    def signals(self) -> dict[str, torch.Tensor]:
        return super().signals() | ({"return": self.returns[self.bins.of_timestep]} if self.has_learned else {})


class KingmaGao(BinnedLosses):
    """p(lambda) proportional to the expected weighted loss at lambda (Kingma & Gao 2023, adaptive noise schedule).

    Weighted by 1 / (T p_t), so that the objective stays that of the loss weighting, which is `sigmoid` in the paper.
    """

    signal = "loss_per_log_snr"

    def __init__(self, alphas_cumprod: torch.Tensor, bins: int = 100, history: int = 1000, floor: float = 0.001):
        super().__init__(alphas_cumprod, bins, history, floor)

    def rated(self, timesteps: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        """Divide by the part of the range of lambda that a timestep stands for: the loss per unit of lambda."""
        return losses / self.bins.widths[timesteps]

    def density(self, averages: torch.Tensor) -> torch.Tensor:
        return averages * self.bins.widths


class InfoNoise(BinnedLosses):
    """p(lambda) such that p w follows the entropy rate, gated at low noise (Raya et al. 2026, eqs. 13 to 15).

    A unit of lambda = log SNR brings SNR mmse / 2 nats about x_0 (I-MMSE), and the network's error of x_0, which is at
    most 1 for pixels in [-1, 1], stands for the least one. With w, that error's weight in the loss, sigma^2 = 1 / SNR
    and the gate g = sigma^3 / (sigma^3 + c^3),

        p(lambda) ~ g SNR error / w

    c is the paper's for CIFAR-10, where w is `--loss_weighting edm`; bins, history and the start are not. Another
    objective.
    """

    objective = "changed"
    needs_squared_errors = True
    signal = "x_0_error"

    def __init__(
        self, alphas_cumprod: torch.Tensor, c: float = 0.15, bins: int = 64, history: int = 256, floor: float = 0.0
    ):
        super().__init__(alphas_cumprod, bins, history, floor)
        if c < 0:
            raise ValueError(f"c {c}: must be 0 or greater")
        snr = signal_to_noise(alphas_cumprod)
        self.gated = self.bins.widths * snr / (1 + c**3 * snr**1.5)

    def rated(self, timesteps: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        """Return the squared errors of x_0."""
        return losses / self.x_0_weights[timesteps]

    def density(self, averages: torch.Tensor) -> torch.Tensor:
        return self.gated * averages.clamp(max=1) / self.x_0_weights


class EDM2(EDM):
    """Losses divided by what is learned to be expected, exp(u): u(sigma) lowers loss / exp(u) + u (Karras et al. 2024).

    Eqs. 14 to 16 and 21. u is a linear layer on 128 random Fourier features of ln(sigma) / 4, trained by Adam on the
    network's losses; timesteps are EDM's with another mean and deviation, and `--loss_weighting edm` belongs to it.
    Unlike in the authors' code u starts at 0, not at random, its layer is not normalised, its learning rate does not
    decay, and it learns from losses of two steps before. Another objective.
    """

    def __init__(
        self,
        alphas_cumprod: torch.Tensor,
        mean: float = -0.4,
        std: float = 1.0,
        floor: float = 0.0,
        learning_rate: float = 0.01,
    ):
        super().__init__(alphas_cumprod, mean, std, floor)
        positive(learning_rate=learning_rate)
        self.learning_rate = learning_rate
        frequencies = torch.randn(128, generator=generator_for("edm2", "frequencies"), dtype=torch.float64)
        phases = torch.rand(128, generator=generator_for("edm2", "phases"), dtype=torch.float64)
        log_sigma = -log_snr_of(alphas_cumprod)[:, None] / 2
        angles = 2 * math.pi * (log_sigma / 4 * frequencies + phases)
        self.features = angles.cos() * math.sqrt(2 / 128)
        self.layer = torch.zeros(128, dtype=torch.float64)
        self.first, self.second = torch.zeros_like(self.layer), torch.zeros_like(self.layer)  # moments of its gradient
        self.updates = torch.zeros((), dtype=torch.int64)
        self._refresh()

    def observe(self, step: int, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        ratio = losses * (-self.log_expected[timesteps]).exp()
        gradient = ((1 - ratio)[:, None] * self.features[timesteps]).sum(0) / max(1, len(losses))
        self.updates += 1
        self.first.lerp_(gradient, 0.1)
        self.second.lerp_(gradient.square(), 0.01)
        updates = self.updates.item()
        first, second = self.first / (1 - 0.9**updates), self.second / (1 - 0.99**updates)
        self.layer -= self.learning_rate * first / (second.sqrt() + 1e-8)
        self._refresh()

    def _refresh(self) -> None:
        # Summed row by row, in an order that does not depend on the number of threads.
        self.log_expected = (self.features * self.layer).sum(1)
        self._corrections = (-self.log_expected).exp().float()

    def signals(self) -> dict[str, torch.Tensor]:
        return {"expected_loss": self.log_expected.exp()} if self.updates else {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"layer": self.layer, "first": self.first, "second": self.second, "updates": self.updates}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            load_into(tensor, state[name], name)
        self._refresh()


@dataclass(eq=False)
class AdaptiveTimestepSampling(TimestepSampler):
    """ATS: a policy that learns which timestep of an image lowers the loss most (Kim, Ki, Shim & Lee, CVPR 2025).

    t = round(u (T - 1)) with u ~ Beta(a, b), and a, b from the image x_0 by a small network that starts at the uniform
    Beta(1, 1). Every `interval` updates it looks at delta_t, the KL divergence of timestep t before the update less
    that after it (`UpdateProbe.kl`), and learns by REINFORCE:

    - delta on a grid of timesteps, for one image of the batch, is added to a queue of the latest ones;
    - the timesteps whose delta best predicts the grid's sum, by F-regression over the queue, represent the grid;
    - the reward of an image's draw is its own delta summed over these timesteps; the entropy of Beta(a, b) is a bonus.

    As in the paper, not its code, before and after have the same noise and no dropout, and processes share one policy.
    The paper's grid is all T timesteps. Nothing keeps a probability from falling towards 0: another objective.
    """

    objective = "changed"
    least_probability = 0.0

    alphas_cumprod: torch.Tensor
    interval: int = 40  # updates from one look to the next
    grid: int = 50  # timesteps that are looked at
    queue: int = 20  # looks that are remembered
    features: int = 3  # timesteps chosen for the reward
    entropy: float = 0.01  # its weight in the objective
    learning_rate: float = 0.01

    def __post_init__(self) -> None:
        super().__init__(self.alphas_cumprod)
        grid, features = self.grid, self.features
        if not features <= grid <= self.num_train_timesteps:
            there_are = f"the {self.num_train_timesteps} there are"
            raise ValueError(f"grid {grid}: must be from the {features} timesteps chosen from it to {there_are}")
        self.timesteps = torch.linspace(0, self.num_train_timesteps - 1, grid).round().long()
        self.selected = self.timesteps[torch.linspace(0, grid - 1, features).round().long()]
        self.changes = torch.zeros(self.queue, grid, dtype=torch.float64)
        self.queued = torch.zeros((), dtype=torch.int64)
        self.shapes = torch.ones(1, 2)  # a and b of every image of the batch that the policy last learned from

    def start(self, shape: tuple[int, int, int], device: torch.device) -> None:
        self.policy = Policy(shape[0]).to(device)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=self.learning_rate)

    # Draws.

    def sample_for(
        self, images: torch.Tensor, positions: torch.Tensor, batch_size: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw from the policy with the global batch's random numbers, so that any process may draw."""
        normal = torch.randn(batch_size, 2, TRIES, generator=generator)
        uniform = 1 - torch.rand(batch_size, 2, TRIES + 1, generator=generator)
        normal, uniform = (to_device(numbers[positions], images.device) for numbers in (normal, uniform))
        with torch.no_grad():
            shapes = self.policy(images)
        self._images, self._actions = images, beta_draws(shapes, normal, uniform)
        timesteps = (self._actions * (self.num_train_timesteps - 1)).round().long()
        return timesteps, torch.ones(len(timesteps), device=images.device)

    def draw(self, batch_size: int, generator: torch.Generator) -> torch.Tensor:
        """Draw without images, from the average of the policy's latest distributions."""
        self.set_density(self.describe())
        return super().draw(batch_size, generator)

    def describe(self) -> torch.Tensor:
        """Average over the batch that the policy last learned from; uniform before."""
        from scipy.special import betainc

        steps = self.num_train_timesteps
        edges = ((torch.arange(steps + 1, dtype=torch.float64) - 0.5) / (steps - 1)).clamp(0, 1)
        a, b = self.shapes.double()[:, :, None].unbind(1)
        return torch.from_numpy(betainc(a.numpy(), b.numpy(), edges.numpy())).diff().mean(0)

    def signals(self) -> dict[str, torch.Tensor]:
        """Average delta over the queue, interpolated linearly between the timesteps of the grid."""
        if not self.queued:
            return {}
        delta = self.changes[: self.queued].mean(0)
        t = np.arange(self.num_train_timesteps)
        return {"delta": torch.from_numpy(np.interp(t, self.timesteps.numpy(), delta.numpy()))}

    # What the policy learns from.

    def before_update(self, update: UpdateProbe) -> None:
        self._before = self._divergences(update) if (update.step + 1) % self.interval == 0 else None

    def after_update(self, update: UpdateProbe) -> None:
        if self._before is None:
            return
        # A loss that is not a number stops the run soon; until then it must not reach the policy.
        pairs = zip(self._before, self._divergences(update), strict=True)
        of_grid, of_images = ((before - after).nan_to_num(0, 0, 0) for before, after in pairs)
        self._learn(update, of_images.sum(1))
        self.changes[self.queued % len(self.changes)] = update.total(of_grid).cpu()
        self.queued += 1
        if self.queued >= 3:  # fewer points always lie on a line
            self.selected = self.timesteps[most_telling(self.changes[: self.queued], len(self.selected))]

    def _divergences(self, update: UpdateProbe) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute KL on the grid for one image of the global batch, held by one process, and for every image here."""
        count, features = len(update.positions), len(self.selected)
        rows = torch.arange(count).repeat_interleave(features)
        noise_rows = (update.positions[:, None] * features + torch.arange(features)).flatten()
        of_images = update.kl(rows, self.selected.repeat(count), noise_rows).view(count, features)
        of_grid = torch.zeros(len(self.timesteps), dtype=of_images.dtype, device=of_images.device)
        chosen = update.step // self.interval % update.batch_size  # the images of a batch are in random order
        for row in (update.positions == chosen).nonzero().flatten().tolist():
            noise_rows = update.batch_size * features + torch.arange(len(self.timesteps))
            of_grid = update.kl(torch.full((len(self.timesteps),), row), self.timesteps, noise_rows)
        return of_grid, of_images

    def _learn(self, update: UpdateProbe, reward: torch.Tensor) -> None:
        """Take a step of Adam on -E[log pi(u | x_0) reward] - entropy H(pi), over the images of all processes."""
        shapes = self.policy(self._images)
        beta = Beta(*shapes.unbind(1), validate_args=False)  # validating would wait for the device
        gain = beta.log_prob(self._actions) * reward + self.entropy * beta.entropy()
        (-gain.sum() / update.batch_size).backward()
        parameters = list(self.policy.parameters())
        gradient = update.total(torch.cat([parameter.grad.flatten() for parameter in parameters]))
        torch.nn.utils.vector_to_parameters(gradient, (parameter.grad for parameter in parameters))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        of_batch = torch.zeros(update.batch_size, 2, device=shapes.device)
        of_batch[update.positions.to(shapes.device)] = shapes.detach()
        self.shapes = update.total(of_batch).cpu()

    # State.

    def state_dict(self) -> dict[str, torch.Tensor]:
        adam = {
            f"adam.{name}.{kind}": tensor
            for name, parameter in self.policy.named_parameters()
            for kind, tensor in self.optimizer.state.get(parameter, {}).items()
        }
        policy = {f"policy.{name}": tensor for name, tensor in self.policy.state_dict().items()}
        own = {"queue": self.changes, "queued": self.queued, "selected": self.selected, "shapes": self.shapes}
        return own | policy | adam

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        load_into(self.changes, state["queue"], "queue")
        self.queued, self.selected, self.shapes = (state[name].clone() for name in ("queued", "selected", "shapes"))
        self.policy.load_state_dict(with_prefix(state, "policy."))
        for name, parameter in self.policy.named_parameters():
            moments = with_prefix(state, f"adam.{name}.")
            if moments:
                on_device = {kind: value.to(parameter.device) for kind, value in moments.items() if kind != "step"}
                self.optimizer.state[parameter] = on_device | {"step": moments["step"].clone()}


def with_prefix(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class Policy(torch.nn.Module):
    """x_0 -> a and b of its Beta distribution: three convolutions and three layers, as in the authors' code.

    It starts at a = b = 1 whatever its hidden layers are, which are therefore the same in every run.
    """

    def __init__(self, channels: int):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            convolutions = []
            for inputs, outputs in ((channels, 32), (32, 64), (64, 128)):
                convolution = torch.nn.Conv2d(inputs, outputs, 3, padding=1)
                convolutions += [convolution, torch.nn.ReLU(), torch.nn.MaxPool2d(2, ceil_mode=True)]
            self.features = torch.nn.Sequential(*convolutions)
            hidden = [torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU()]
            self.head = torch.nn.Sequential(*hidden, torch.nn.Linear(256, 2))
        torch.nn.init.zeros_(self.head[-1].weight)
        torch.nn.init.constant_(self.head[-1].bias, math.log(math.e - 1))  # softplus of which is 1

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.softplus(self.head(self.features(images).mean((2, 3)))) + 1e-5


# At least 95 % of the proposals for a gamma variable are accepted: eight fail for one image in 10^10.
TRIES = 8


def beta_draws(shapes: torch.Tensor, normal: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw Beta(a, b) as G_a / (G_a + G_b), gamma variables by Marsaglia & Tsang (2000) from given random numbers.

    G_a is G_{a + 1} U^(1/a), which serves for a below 1 too; the logarithms keep tiny ones apart.
    """
    d = shapes[:, :, None] + 2 / 3
    cube = (1 + normal / (9 * d).sqrt()) ** 3
    positive = cube.clamp(min=torch.finfo(cube.dtype).tiny)
    bound = normal.square() / 2 + d * (1 - positive + positive.log())
    accepted = (cube > 0) & (uniform[..., :TRIES].log() < bound)
    first = accepted.int().argmax(2, keepdim=True)
    log_gamma = (d * positive).log().gather(2, first)[..., 0] + uniform[..., TRIES].log() / shapes
    margin = torch.finfo(shapes.dtype).eps  # the density may be infinite at 0 and at 1
    return (log_gamma[:, 0] - log_gamma[:, 1]).sigmoid().clamp(margin, 1 - margin)


def most_telling(changes: torch.Tensor, count: int) -> torch.Tensor:
    """Choose the columns from which a line predicts the rows' sums best, in order of their position.

    F-regression ranks by F = (n - 2) r^2 / (1 - r^2), which rises with the squared correlation r^2.
    """
    total = changes.sum(1, keepdim=True)
    columns, total = changes - changes.mean(0), total - total.mean()
    squared = (columns * total).sum(0).square() / (columns.square().sum(0) * total.square().sum())
    return squared.nan_to_num(0, 0, 0).sort(descending=True, stable=True).indices[:count].sort().values
