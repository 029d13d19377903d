"""Timestep samplers draw from the densities of their papers, and train the objective that they say."""

import inspect
import math
import re
from dataclasses import fields

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, losses_of
from scipy.stats import beta, chi2, norm

from common.errors import UserError
from common.randomness import generator_for
from run_folder.config import TimestepOptions, TrainingConfig, parse_config
from schedulers.betas import BETA_SCHEDULES
from schedulers.ddpm import build_scheduler
from schedulers.loss import TIMESTEP_SAMPLERS, build_sampler, build_weighting, parse_own_options
from schedulers.timestep_samplers import LogSNRBins, TimestepSampler
from schedulers.weighting import LOSS_WEIGHTINGS
from training.setup import build_process

T = 1000
PROCESS = build_scheduler()
LINEAR = PROCESS.alphas_cumprod
A = LINEAR.numpy()


def make(name: str, stratified: bool = False, alphas_cumprod: torch.Tensor = LINEAR, **options) -> TimestepSampler:
    sampler = TIMESTEP_SAMPLERS[name](alphas_cumprod, **options)
    sampler.stratified = sampler.stratified or stratified
    return sampler


def closed_form(name: str, batch_size: int = 128) -> np.ndarray:
    """Each density once more, from its definition and another library."""
    t = np.arange(T)
    if name == "logit_normal":
        with np.errstate(divide="ignore"):
            below, above = (np.log(edge / T) - np.log1p(-edge / T) for edge in (t, t + 1))
        return norm.cdf(above) - norm.cdf(below)
    if name in ("edm", "edm2"):
        # A million equally likely noise levels, each counted for the nearest of the diffusion's.
        quantiles = (np.arange(1_000_000) + 0.5) / 1_000_000
        log_sigma = norm.ppf(quantiles, *((-1.2, 1.2) if name == "edm" else (-0.4, 1.0)))
        own = 0.5 * np.log((1 - A) / A)
        above = np.searchsorted(own, log_sigma).clip(1, T - 1)
        nearest = np.where(log_sigma - own[above - 1] < own[above] - log_sigma, above - 1, above)
        return np.bincount(nearest, minlength=T) / 1_000_000
    if name == "laplace":
        u = (np.arange(1_000_000) + 0.5) / 1_000_000
        log_snr = -0.5 * np.sign(0.5 - u) * np.log1p(-2 * np.abs(u - 0.5))
        own = np.log(A / (1 - A))
        nearest = T - 1 - np.rint(np.interp(log_snr, own[::-1], t)).astype(int)
        return np.bincount(nearest, minlength=T) / 1_000_000
    if name in ("log_snr", "saturating_bound", "marginal_return"):
        own = np.log(A / (1 - A))
        share = np.where((own >= -6.5) & (own <= 6.2), -np.gradient(own), 0)
        return 0.97 * share / share.sum() + 0.03 / T
    if name in ("kingma_gao", "infonoise"):  # which begin with a uniform log SNR
        share = -np.gradient(np.log(A / (1 - A)))
        share[[0, -1]] /= 2
        floor = 0.001 if name == "kingma_gao" else 0
        return (1 - floor) * share / share.sum() + floor / T
    if name == "beta":
        return ((t + 1) / T) ** 0.8 - (t / T) ** 0.8
    if name == "speed":
        first = np.where(t < 700, 5, 1) / (700 * 5 + 300)
        duals = np.zeros(T)
        for i in t:
            duals[642 - i if i < 642 else i - 642] += first[i]
        return ((batch_size // 2 + 1) * first + (batch_size - batch_size // 2 - 1) * duals) / batch_size
    if name == "ats":  # round(u (T - 1)) for uniform u: the first and the last have half a cell
        return np.append(np.append(0.5, np.ones(T - 2)), 0.5) / (T - 1)
    return np.full(T, 1 / T)


def chi_square_p(drawn: torch.Tensor, density: np.ndarray) -> float:
    """The probability of counts that are further off; neighbours are counted together where few are expected."""
    counts, expected = np.bincount(drawn.numpy(), minlength=len(density)), density * len(drawn)
    group = (np.cumsum(expected) - expected / 2) // 10
    _, group = np.unique(group, return_inverse=True)
    counts, expected = np.bincount(group, counts), np.bincount(group, expected)
    return chi2.sf(((counts - expected) ** 2 / expected).sum(), len(expected) - 1)


def draws(sampler: TimestepSampler, steps: int = 2000, batch_size: int = 128) -> torch.Tensor:
    return torch.cat([sampler.sample(batch_size, generator_for("draws", step))[0] for step in range(steps)])


@pytest.mark.parametrize("name", TIMESTEP_SAMPLERS)
def test_densities_are_the_closed_forms(name):
    sampler = make(name)
    sampler.sample(128, generator_for(0))
    density = sampler.describe()
    assert density.dtype == torch.float64
    assert density.sum().item() == pytest.approx(1, abs=1e-12)
    assert (density >= 0).all()
    np.testing.assert_allclose(density.numpy(), closed_form(name), rtol=1e-9, atol=COUNTED.get(name, 1e-12))


# Closed forms that count a million equally likely noise levels.
COUNTED = dict.fromkeys(("edm", "edm2", "laplace"), 2e-6)


@pytest.mark.parametrize("name", TIMESTEP_SAMPLERS)
def test_draws_follow_the_closed_forms(name):
    """Dependent draws (stratified ones, duals) are spread more evenly than chance would; none are spread less."""
    p = chi_square_p(draws(make(name)), closed_form(name))
    assert p > 1e-3
    if name not in ("stratified", "speed", "saturating_bound", "marginal_return"):
        assert p < 1 - 1e-3


@pytest.mark.parametrize("name", TIMESTEP_SAMPLERS)
def test_draws_come_from_their_generator_alone(name):
    drawn = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        drawn.append(make(name).sample(64, generator_for("a")))
    assert all(torch.equal(first, second) for first, second in zip(*drawn, strict=True))
    assert not torch.equal(drawn[0][0], make(name).sample(64, generator_for("b"))[0])


@pytest.mark.parametrize("schedule", BETA_SCHEDULES)
@pytest.mark.parametrize("name", TIMESTEP_SAMPLERS)
def test_every_schedule_and_length(name, schedule):
    for steps in (20, 100, 1000):
        sampler = make(name, alphas_cumprod=build_scheduler(schedule, steps).alphas_cumprod, **SHORT.get(name, {}))
        for batch_size in (1, 2, 7):
            timesteps, weights = sampler.sample(batch_size, generator_for(steps))
            assert timesteps.shape == weights.shape == (batch_size,)
            assert weights.dtype == torch.float32
            assert (timesteps >= 0).all()
            assert (timesteps < steps).all()
        assert sampler.describe().shape == (steps,)
        assert sampler.describe().sum().item() == pytest.approx(1)


SHORT = {"ats": {"grid": 10}}


# Noise levels.


@pytest.mark.parametrize("schedule", BETA_SCHEDULES)
def test_bins_of_log_snr(schedule):
    a_t = build_scheduler(schedule, T).alphas_cumprod
    bins, log_snr = LogSNRBins(a_t), torch.log(a_t / (1 - a_t))
    if schedule == "jsd":  # nothing is left of the image at its end: another step like the one before
        log_snr[-1] = 2 * log_snr[-2] - log_snr[-3]
    lower, upper = bins.edges.T
    torch.testing.assert_close(upper - lower, ((log_snr[0] - log_snr[-1]) / 16).expand(len(bins)))
    assert (lower[1:] >= upper[:-1]).all()
    for t in range(T):  # the highest edge is a timestep's too
        assert lower[bins.of_timestep[t]] - 1e-9 <= log_snr[t] <= upper[bins.of_timestep[t]] + 1e-9
    counts = np.histogram(log_snr.numpy(), 16)[0]
    assert (counts == 0).sum() == (2 if schedule == "cosine" else 0)
    assert bins.counts.tolist() == counts[counts > 0].tolist()
    # Each timestep stands for what is nearer to it than to any other.
    grid = torch.linspace(log_snr[-1], log_snr[0], 200_001, dtype=torch.float64)
    nearest = T - 1 - torch.bucketize(grid, ((log_snr[1:] + log_snr[:-1]) / 2).flip(0))
    share = torch.bincount(nearest, minlength=T).double() / len(grid)
    torch.testing.assert_close(share, bins.widths / (log_snr[0] - log_snr[-1]), atol=1e-5, rtol=0)
    values = torch.rand(T, generator=generator_for("values"), dtype=torch.float64)
    assert bins.total(values).sum().item() == pytest.approx(values.sum().item())
    assert bins.average(values)[3].item() == pytest.approx(values[bins.of_timestep == 3].mean().item())
    edges, shares = bins.with_gaps(bins.counts.numpy() / T, 0)
    assert (np.histogram(log_snr.numpy(), edges)[0] / T).tolist() == shares.tolist()
    assert (edges[0], edges[-1]) == (log_snr[-1], log_snr[0])


def test_few_timesteps_have_bins():
    single = LogSNRBins(build_scheduler("linear", 1).alphas_cumprod)
    assert (single.of_timestep.tolist(), single.widths.tolist()) == ([0], [1])
    assert single.edges[0, 0] <= single.log_snr[0] < single.edges[0, 1]
    assert LogSNRBins(build_scheduler("linear", 4).alphas_cumprod).of_timestep.tolist() == [3, 2, 1, 0]


def test_the_batches_of_earlier_versions():
    """Uniform and stratified draws are part of what makes a run repeat itself."""
    uniform, _ = make("uniform").sample(8, generator_for(0, "timesteps", 0))
    assert torch.equal(uniform, torch.randint(T, (8,), generator=generator_for(0, "timesteps", 0)))
    generator = generator_for(0, "timesteps", 0)
    jitter = torch.rand(8, generator=generator, dtype=torch.float64)
    expected = ((torch.randperm(8, generator=generator) + jitter) / 8 * T).long()
    assert torch.equal(make("stratified").sample(8, generator_for(0, "timesteps", 0))[0], expected)


def test_stratified_covers_every_slice():
    for n in (1, 8, 128, 1000):
        timesteps, weights = make("stratified").sample(n, generator_for(n))
        # The i-th smallest lies in the i-th slice, whose bounds are rounded down to timesteps.
        slices = torch.arange(n, dtype=torch.float64) * T / n
        assert (timesteps.sort().values >= slices.floor()).all()
        assert (timesteps.sort().values < slices + T / n).all()
        assert (weights == 1).all()


STRATIFIED = ("uniform", "logit_normal", "edm", "log_snr", "laplace", "beta", "speed", "loss_second_moment")


@pytest.mark.parametrize("name", STRATIFIED)
def test_stratification_keeps_the_marginals_and_cuts_the_variance(name):
    """Each image's t has the density it had, and the mean of a smooth loss over a batch varies much less."""
    independent, stratified = make(name), make(name, stratified=True)
    loss = torch.exp(-torch.arange(T) / 200)  # falls with t, as a network's does
    means = []
    for sampler in (independent, stratified):
        batches = draws(sampler).view(2000, 128)
        for position in (0, 1, 63):  # all of them first draws, not duals
            p = chi_square_p(batches[:, position], np.asarray(sampler._density))
            assert 1e-3 < p < 1 - 1e-3
        means.append(loss[batches].mean(1))
    assert abs(means[0].mean() - means[1].mean()) < 4 * means[0].std() / math.sqrt(2000)
    # Of SpeeD's evenly spread pairs two are cut in the middle, at random; the slices in Laplace's tails are wide.
    assert means[1].var() < {"speed": 0.1, "laplace": 0.01}.get(name, 0.002) * means[0].var()


def learned(name: str) -> TimestepSampler:
    """A sampler after losses that fall with t, where it observes any."""
    sampler = make(name)
    losses = torch.exp(-torch.arange(T, dtype=torch.float64) / 200) + 0.1
    for step in range(10):
        sampler.observe(step, torch.arange(T), losses)
    return sampler


def toy_gradients(theta: torch.Tensor) -> torch.Tensor:
    """The gradient at every t of |theta - c_t|^2 for targets c_t, by autograd."""
    targets = torch.randn(T, 3, generator=generator_for("targets"), dtype=torch.float64)
    return torch.autograd.functional.jacobian(lambda x: (x - targets).square().sum(1), theta)


@pytest.mark.parametrize("name", TIMESTEP_SAMPLERS)
def test_the_expected_gradient_is_that_of_uniform_draws_where_the_objective_is_the_same(name):
    """The expectation over t is a sum, not a simulation."""
    sampler, gradients = learned(name), toy_gradients(torch.ones(3, dtype=torch.float64))
    weights = sampler._corrections.double()
    expected = (sampler.describe() * weights) @ gradients
    if sampler.objective == "same":
        torch.testing.assert_close(expected, gradients.mean(0), rtol=1e-6, atol=1e-6)
    elif name not in ("edm2", "saturating_bound", "marginal_return"):  # which weight losses by what they expect of them
        assert (weights == 1).all()
    drawn, weights = sampler.sample(512, generator_for(0))
    torch.testing.assert_close(weights, sampler._corrections[drawn], rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name, kind in TIMESTEP_SAMPLERS.items() if kind.objective == "changed"])
def test_the_others_change_it(name):
    sampler = learned(name)
    if name != "ats":  # which is uniform until it has seen an update
        assert (sampler.describe() - 1 / T).abs().max() > 0.1 / T


def test_the_same_objective_needs_every_timestep():
    class Half(TimestepSampler):
        def __init__(self, alphas_cumprod):
            super().__init__(alphas_cumprod)
            self.set_density((torch.arange(self.num_train_timesteps) < 500).double())

    with pytest.raises(ValueError, match="Half never draws some timesteps"):
        Half(LINEAR)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [50, 1000, 4000])
def test_log_snr_is_uniform_between_its_bounds_whatever_the_schedule(schedule, steps):
    cumulative = build_scheduler(schedule, steps).alphas_cumprod
    density, log_snr = make("log_snr", alphas_cumprod=cumulative, floor=0.0).describe(), cumulative.logit()
    drawn = density > 0
    assert torch.equal(drawn, (log_snr >= -6.5) & (log_snr <= 6.2))
    per_unit = density[1:-1] / ((log_snr[:-2] - log_snr[2:]) / 2)
    torch.testing.assert_close(per_unit[drawn[1:-1]].max(), per_unit[drawn[1:-1]].min(), rtol=1e-9, atol=0)
    assert make("log_snr", alphas_cumprod=cumulative).least_probability >= 0.03 / steps - 1e-15


def test_a_floor_mixes_uniform_draws_in():
    expected = 0.95 * make("edm").describe() + 0.05 / T
    torch.testing.assert_close(make("edm", floor=0.05).describe(), expected, rtol=1e-12, atol=0)


def test_laplace_lies_where_it_is_told_to():
    log_snr = LINEAR.logit()
    for mu in (-2.0, 2.0):
        density = make("laplace", mu=mu, b=0.2).describe()
        assert (density @ log_snr).item() == pytest.approx(mu, abs=0.01)
        assert (density @ (log_snr - mu).abs()).item() == pytest.approx(0.2, abs=0.01)


def test_beta_has_both_parameters():
    t = np.arange(T + 1) / T
    expected = np.diff(beta(0.6, 1.7).cdf(t))
    np.testing.assert_allclose(make("beta", alpha=0.6, beta=1.7).describe(), expected, rtol=1e-9)


def test_speed_draws_the_only_timestep():
    sampler = make("speed", alphas_cumprod=build_scheduler(num_train_timesteps=1).alphas_cumprod)
    assert sampler.sample(4, generator_for("test"))[0].tolist() == [0] * 4


def test_speed_draws_pairs():
    sampler = make("speed")
    assert sampler.mirror == 642  # of the linear schedule
    drawn, _ = sampler.sample(128, generator_for(0))
    first, duals = drawn[:65], drawn[65:]
    assert torch.equal(duals, torch.where(first < 642, 642 - first, first - 642)[:63])
    density = make("speed", tau=100, k=3.0)._density
    assert density[0].item() == pytest.approx(3 * density[100].item())
    assert density[99] == density[0]
    for tau in (0, T + 1):
        with pytest.raises(ValueError, match=f"tau {tau}: must be from 1 to the 1000 timesteps"):
            make("speed", tau=tau)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("logit_normal", {"std": 0.0}, "std 0.0: must be greater than 0"),
        ("edm", {"std": -1.0}, "std -1.0"),
        ("edm", {"floor": 1.5}, "floor 1.5: must be from 0 to 1"),
        ("log_snr", {"low": 3.0, "high": 2.0}, "low 3.0, high 2.0: no timestep's log SNR is between them"),
        ("laplace", {"b": 0.0}, "b 0.0: must be greater than 0"),
        ("beta", {"alpha": 0.0}, "alpha 0.0"),
        ("loss_second_moment", {"history": 0}, "history 0"),
        ("kingma_gao", {"bins": 0}, "bins 0"),
        ("kingma_gao", {"floor": 0.0, "history": 0}, "history 0"),
        ("infonoise", {"c": -1.0}, "c -1.0: must be 0 or greater"),
        ("edm2", {"learning_rate": 0.0}, "learning_rate 0.0"),
        ("loss_second_moment", {"uniform": 2.0}, "uniform 2.0"),
        ("ats", {"grid": 2}, "grid 2: must be from the 3"),
    ],
)
def test_options_that_no_sampler_can_have(name, options, message):
    with pytest.raises(ValueError, match=message):
        make(name, **options)


# From the command line to the banner.


def test_every_option_belongs_to_an_argument_and_has_its_default():
    options = {entry.name: entry.default for entry in fields(TimestepOptions)}
    arguments = {}
    for registry, general in ((TIMESTEP_SAMPLERS, 1), (LOSS_WEIGHTINGS, 2)):
        for name, function in registry.items():
            for argument in list(inspect.signature(function).parameters.values())[general:]:
                arguments[f"{name}_{argument.name.rstrip('_')}"] = argument.default
    del arguments["bound_variance_type"]  # that of the diffusion
    general = "timestep_sampler stratified loss_weighting loss input_perturbation timestep_sampler_options".split()
    assert arguments == {name: default for name, default in options.items() if name not in general}


def test_options_reach_their_sampler_and_weighting():
    config = parse_config(["--timestep_sampler=logit_normal", "--logit_normal_mean=-0.5", "--logit_normal_std=2"])
    expected = make("logit_normal", mean=-0.5, std=2.0).describe()
    assert torch.equal(build_sampler(vars(config), LINEAR).describe(), expected)
    config = parse_config(["--timestep_sampler=speed", "--loss_weighting=speed", "--speed_tau=300", "--speed_k=2"])
    assert torch.equal(build_sampler(vars(config), LINEAR)._density, make("speed", tau=300, k=2.0)._density)
    assert build_weighting(vars(config), PROCESS)[300:].eq(1).all()
    config = parse_config(["--loss_weighting=min_snr", "--snr_gamma=1"])
    assert build_weighting(vars(config), PROCESS).max() == 1
    assert build_sampler(vars(parse_config(["--timestep_sampler=edm", "--stratified"])), LINEAR).stratified
    assert build_sampler(vars(parse_config(["--timestep_sampler=stratified"])), LINEAR).stratified


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--timestep_sampler=unifrom"], "--timestep_sampler unifrom: did you mean uniform?"),
        (
            ["--timestep_sampler=xyz"],
            "must be one of uniform, stratified, loss_second_moment, kingma_gao, logit_normal",
        ),
        (["--timestep_sampler=nowhere.py:Mine"], "there is no file nowhere.py"),
        (["--timestep_sampler=ats", "--stratified"], "--stratified: ats does not draw from one density"),
        (["--timestep_sampler=speed", "--speed_tau=2000"], "--timestep_sampler speed: tau 2000: must be from 1 to"),
        (["--timestep_sampler=edm", "--edm_std=0"], "--edm_std 0.0: must be greater than 0"),
        (["--loss_weighting=speed", "--prediction_type=sample"], "--loss_weighting speed: is only defined for epsilon"),
        (["--loss_weighting=speed", "--speed_lambda=5"], "--speed_lambda 5.0: must be from 0 to 1"),
    ],
)
def test_mistakes_are_one_line(flags, message):
    def start() -> None:
        config = parse_config(flags)
        build_sampler(vars(config), LINEAR)
        build_weighting(vars(config), build_process(config))

    with pytest.raises(UserError) as caught:
        start()
    assert message in str(caught.value)


@pytest.fixture
def own_file(tmp_path):
    """The example of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    path = tmp_path / "my_file.py"
    path.write_text(re.search(r"runs this -->\n```python\n(.*?)```", text, re.DOTALL).group(1), encoding="utf-8")
    return path


def test_the_example_of_contributing_trains(own_file, train, tmp_path, capsys):
    run = train(tmp_path / "run", f"--timestep_sampler={own_file}:Middle", "--max_train_steps=3", "--stratified")
    assert len(losses_of(run)) == 3
    assert yaml.safe_load((run / "config.yaml").read_text())["timestep_sampler"] == f"{own_file}:Middle"
    shown = capsys.readouterr().err
    assert f"[sampler] {own_file}:Middle: the paper's objective" in shown
    assert "draws t in 0-999, each with a probability of at least 0.0005; never: none" in shown


def test_the_example_draws_what_it_says(own_file):
    sampler = build_sampler(vars(TrainingConfig(timestep_sampler=f"{own_file}:Middle")), LINEAR)
    density = np.where((np.arange(T) >= 250) & (np.arange(T) < 750), 3, 1) / 2000
    np.testing.assert_allclose(sampler.describe(), density, rtol=1e-12)
    assert chi_square_p(draws(sampler), density) > 1e-3
    _, weights = sampler.sample(64, generator_for(0))
    torch.testing.assert_close(weights.unique(), torch.tensor([2 / 3, 2]))


def test_options_reach_a_sampler_of_ones_own(own_file, train, tmp_path):
    def build(*options: str):
        return build_sampler(
            vars(TrainingConfig(timestep_sampler=f"{own_file}:Middle", timestep_sampler_options=[*options])), LINEAR
        )

    density = np.where((np.arange(T) >= 250) & (np.arange(T) < 750), 9, 1) / 5000
    np.testing.assert_allclose(build("ratio=9").describe(), density, rtol=1e-12)
    with pytest.raises(UserError, match=r"Middle: .*unexpected keyword argument 'width'"):
        build("width=3")
    with pytest.raises(UserError, match="--timestep_sampler_options ratio: must be name=value, as in width=3"):
        build("ratio")
    flags = [f"--timestep_sampler={own_file}:Middle", "--timestep_sampler_options", "ratio=9"]
    run = train(tmp_path / "run", *flags, "--max_train_steps=2")
    assert yaml.safe_load((run / "config.yaml").read_text())["timestep_sampler_options"] == ["ratio=9"]


def test_options_without_a_sampler_of_ones_own_are_refused():
    with pytest.raises(UserError, match="--timestep_sampler_options width=3: are for a sampler in a file of your own"):
        parse_config(["--timestep_sampler=edm", "--timestep_sampler_options", "width=3"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch", "has no timestep sampler Mine; it has no class that extends TimestepSampler"),
        (
            "from schedulers.timestep_samplers import Uniform\nclass My(Uniform): pass",
            "has no timestep sampler Mine; it has My",
        ),
        ("import nothing_like_it", "fails with ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("class Mine(", "fails with SyntaxError"),
    ],
)
def test_a_file_without_the_class_is_one_line(text, message, tmp_path):
    path = tmp_path / "file.py"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        build_sampler(vars(TrainingConfig(timestep_sampler=f"{path}:Mine")), LINEAR)
    assert message in str(caught.value)


UNUSABLE = {
    "self.set_density(torch.ones(7))": "a density must be 1000 numbers",
    "self.set_density(torch.arange(1000.) - 1)": "a density must be 1000 numbers, one for each timestep, none below 0",
    "self.set_density(torch.full((1000,), torch.nan))": "a density must be 1000 numbers",
    "self.set_density(torch.zeros(1000))": "and not all 0",
    "self.objective = 'unheard of'": "its objective is 'unheard of'; it must be 'same' or 'changed'",
    "self.describe = lambda: torch.ones(1000)": "describe() must return the probability of each of the 1000",
    "self.draw = lambda n, g: torch.zeros(n + 1, dtype=torch.int64)": "draws [129] timesteps of torch.int64 where",
    "self.draw = lambda n, g: torch.full((n,), 5000)": "draws t from 5000 to 5000; they must be from 0 to 999",
    "self.draw = lambda n, g: torch.full((n,), -3)": "draws t from -3 to -3",
    "self.draw = lambda n, g: torch.rand(n) * 999": "draws [128] timesteps of torch.float32 where [128] of torch.int64",
    "self.draw = lambda n, g: 5": "AttributeError: 'int' object has no attribute 'shape'",
    "self.nothing": "AttributeError: 'Mine' object has no attribute 'nothing'",
}


@pytest.mark.parametrize(("line", "message"), UNUSABLE.items())
def test_a_sampler_of_ones_own_is_asked_before_the_data_is_read(line, message, train, tmp_path, monkeypatch):
    """Whatever it would do to the first step or the thousandth is one line, when there is nothing yet to lose."""
    path = tmp_path / "file.py"
    path.write_text(
        "import torch\nfrom schedulers.timestep_samplers import TimestepSampler\nclass Mine(TimestepSampler):\n"
        f"    def __init__(self, alphas_cumprod):\n        super().__init__(alphas_cumprod)\n        {line}\n"
    )
    monkeypatch.setattr("image_data.sources.open_source", lambda *options: pytest.fail("the data are read"))
    with pytest.raises(UserError) as caught:
        train(tmp_path / "run", f"--timestep_sampler={path}:Mine")
    assert str(caught.value).startswith(f"--timestep_sampler {path}:Mine: ")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_sampler_that_looks_at_images_is_asked_too(tmp_path):
    path = tmp_path / "file.py"
    path.write_text(
        "import torch\nfrom schedulers.timestep_samplers import TimestepSampler\nclass Mine(TimestepSampler):\n"
        "    def sample_for(self, images, positions, batch_size, generator):\n"
        "        assert images.shape == (128, 3, 32, 32)\n"
        "        return torch.zeros(len(images), dtype=torch.int64), torch.full((len(images),), -1.0)\n"
    )
    with pytest.raises(UserError, match="must give each of the 128 losses of a batch a weight, finite and not below 0"):
        build_sampler(vars(TrainingConfig(timestep_sampler=f"{path}:Mine")), LINEAR)
    path.write_text(path.read_text().replace("-1.0", "1.0"))
    assert build_sampler(vars(TrainingConfig(timestep_sampler=f"{path}:Mine")), LINEAR).overrides("sample_for")
    path.write_text(path.read_text() + "    def observe(self, step, timesteps, losses): pass\n")
    with pytest.raises(UserError, match="has both sample_for and observe"):
        build_sampler(vars(TrainingConfig(timestep_sampler=f"{path}:Mine")), LINEAR)


def test_a_constructor_without_arguments_is_one_line(tmp_path):
    path = tmp_path / "file.py"
    path.write_text(
        "from schedulers.timestep_samplers import TimestepSampler\nclass Mine(TimestepSampler):\n"
        "    def __init__(self): pass\n"
    )
    with pytest.raises(UserError, match=r"Mine: Mine.__init__\(\) takes 1 positional argument"):
        build_sampler(vars(TrainingConfig(timestep_sampler=f"{path}:Mine")), LINEAR)
    with pytest.raises(UserError, match=r"--timestep_sampler_options width=\[: cannot be read as YAML"):
        parse_own_options(["width=["])


def test_the_banner_says_what_is_never_drawn(train, tmp_path, capsys):
    train(tmp_path / "run", "--dry_run", "--timestep_sampler=edm", "--loss_weighting=min_snr", "--max_train_steps=1000")
    shown = capsys.readouterr().err
    assert "[sampler] edm: not the paper's objective" in shown
    density = make("edm").describe()
    last = ((density * 16_000 >= 1) | (density >= 1e-5)).nonzero().max().item()
    assert f"[sampler] draws t in 0-{last}, each with a probability of at least" in shown
    assert f"never: {last + 1}-999" in shown
    assert "[weights] min_snr: not the paper's objective; losses are weighted by 0.0005 (t = 0) to 1 (t = " in shown
    assert "timesteps     | uniform" in shown
    assert "| edm" in shown


def test_another_choice_on_resume_is_named(train, tmp_path, capsys):
    flags = ["--timestep_sampler=speed", "--ddpm_num_steps=20", "--ddpm_num_inference_steps=2"]
    train(tmp_path / "run", *flags, "--max_train_steps=2")
    train(tmp_path / "run", *flags, "--max_train_steps=3", "--speed_k=2", "--loss_weighting=p2")
    assert "loss_weighting none -> p2; speed_k 5.0 -> 2.0. From step 2 on" in capsys.readouterr().err
    flags[0] = "--timestep_sampler=loss_second_moment"
    train(tmp_path / "run", *flags, "--max_train_steps=4")
    shown = capsys.readouterr().err
    assert "loss_weighting p2 -> none; speed_k 2.0 -> 5.0; timestep_sampler speed -> loss_second_moment." in shown
