"""Pictures: what is drawn is what the formulas and the run say; the files are whole; a mistake is one line."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, help_of
from matplotlib.figure import Figure
from PIL import Image

import visualize
from common import plots
from common.errors import UserError
from image_data.grid import CAPTION_HEIGHT
from run_folder.checkpoints import write_files
from run_folder.config import as_yaml, parse_config
from schedulers.betas import make_betas
from schedulers.ddpm import PREDICTIONS, build_scheduler
from schedulers.loss import TIMESTEP_SAMPLERS
from schedulers.timestep_samplers import LogSNRBins, Uniform
from schedulers.weighting import LOSS_WEIGHTINGS
from visualization import diffusion, dissolving, run_curves

SCHEDULES = {name: build_scheduler(name) for name in ("linear", "cosine")}
SIDE = dissolving.NARROWEST  # of a single image in the animation
IMAGES = torch.linspace(-1, 1, 64).view(1, 1, 8, 8)


def draw(monkeypatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["visualize.py", *flags])
    visualize.main()


@pytest.fixture
def drawn(monkeypatch) -> list[Figure]:
    """The figures that a test has drawn, to look into."""
    figures, drawing = [], plots.drawing

    @contextmanager
    def recording(*arguments, **options):
        with drawing(*arguments, **options) as (figure, panels):
            figures.append(figure)
            yield figure, panels

    for room in (diffusion, plots, run_curves):
        monkeypatch.setattr(room, "drawing", recording)
    return figures


def curves(axes) -> dict[str, np.ndarray]:
    """What is plotted under each label."""
    return {line.get_label(): np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.get_lines()}


# The script.


def test_one_command_draws_everything(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(diffusion, "BATCHES", 10)
    monkeypatch.setattr(dissolving, "FRAMES", 5)
    flags = ["--schedules", "linear", "--num_images=2", "--resolution=8"]
    draw(monkeypatch, *flags, f"--output_dir={tmp_path / 'a' / 'figures'}")
    names = ["dissolving.gif", "beta.png", "snr.png", "timestep_samplers.png", "loss_weights.png"]
    written = [tmp_path / "a" / "figures" / name for name in names]
    assert capsys.readouterr().out.split() == [str(path) for path in written]
    assert sorted(written) == sorted((tmp_path / "a" / "figures").iterdir())
    for path in written:
        Image.open(path).verify()
    draw(monkeypatch, *flags, f"--output_dir={tmp_path / 'again'}")
    assert all((tmp_path / "again" / path.name).read_bytes() == path.read_bytes() for path in written)
    draw(monkeypatch, *flags, "--seed=1", f"--output_dir={tmp_path / 'other'}")
    same = [(tmp_path / "other" / path.name).read_bytes() == path.read_bytes() for path in written]
    assert same == [False, True, True, False, True]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--schedules linear linaer", "--schedules linaer: there is no such schedule; there are linear, quadratic"),
        ("--schedules", "--schedules: expected at least one argument"),
        ("--output_dri /tmp/x", "unknown flag --output_dri; did you mean --output_dir?"),
        ("--ddpm_num_steps 1", "--ddpm_num_steps 1: must be from 2 to"),
        ("--num_images 0", "--num_images 0: must be from 1 to 1024"),
        ("--output_dir README.md/x", "README.md is a file, not a folder"),
        ("--dataset_name digits --train_data_dir x", "are two ways to name the images"),
        ("--run_dir nowhere", "--run_dir nowhere: there is no such folder"),
        ("--run_dir docs", "--run_dir docs is not a run: there is no config.yaml in it"),
    ],
)
def test_a_mistake_is_one_line(flags, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError) as error:
        draw(monkeypatch, *flags.split())
    assert message in str(error.value)


def test_a_damaged_image_is_named(tmp_path, monkeypatch):
    (tmp_path / "photo.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"cannot decode .*photo\.png"):
        draw(monkeypatch, f"--train_data_dir={tmp_path}", f"--cache_dir={tmp_path / 'cache'}")


def test_help_needs_no_heavy_import():
    help_of("visualize.py")


# Images dissolving.


def test_the_animation_shows_the_forward_process(tmp_path):
    frames = dissolving.dissolving_frames(IMAGES, SCHEDULES, seed=0)
    path = dissolving.save_animation(frames, tmp_path / "dissolving.gif")
    animation = Image.open(path)
    assert animation.n_frames == len(frames) == dissolving.FRAMES
    assert animation.info["loop"] == 0  # for ever
    assert animation.info["duration"] > dissolving.MILLISECONDS  # it rests on the images
    assert path.stat().st_size < 2 * 2**20

    # How much of the image is in each schedule's half of each frame, as the GIF shows it.
    likeness = {name: [] for name in SCHEDULES}
    reference = np.asarray(IMAGES[0, 0]).repeat(SIDE // 8, axis=0).repeat(SIDE // 8, axis=1)
    top = dissolving.HEADER_HEIGHT + CAPTION_HEIGHT
    for number in range(animation.n_frames):
        animation.seek(number)
        pixels = np.asarray(animation.convert("L"), dtype=np.float64)
        for name, left in (("linear", 0), ("cosine", SIDE + 12)):
            tile = pixels[top : top + SIDE, left : left + SIDE]
            likeness[name].append(np.corrcoef(tile.flatten(), reference.flatten())[0, 1])
    linear, cosine = likeness["linear"], likeness["cosine"]
    assert min(linear[0], cosine[0]) > 0.99
    assert max(abs(linear[-1]), abs(cosine[-1])) < 0.4  # 64 pixels of noise
    assert cosine[16] > linear[16] + 0.2  # at t = 500 cosine has half of the signal's variance left, linear 8 %


def test_only_the_schedule_differs():
    """Two names of one schedule give the same picture: the noise is the same."""
    twice = {"cosine": SCHEDULES["cosine"], "again": SCHEDULES["cosine"]}
    halves = []
    for schedules in (SCHEDULES, twice):
        frame = np.asarray(dissolving.dissolving_frames(IMAGES, schedules, seed=0)[16])
        tiles = frame[dissolving.HEADER_HEIGHT + CAPTION_HEIGHT :]
        halves += [tiles[:, :SIDE], tiles[:, -SIDE:]]
    linear, cosine, first, second = halves
    assert (cosine == first).all()
    assert (first == second).all()
    assert (linear != cosine).any()


@pytest.mark.parametrize("channels", [1, 3])
def test_colours(channels, tmp_path):
    """One palette holds the images' colours, and white paper stays white."""
    images = torch.rand(2, channels, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    frames = dissolving.dissolving_frames(images, SCHEDULES, seed=0)
    animation = Image.open(dissolving.save_animation(frames, tmp_path / "colours.gif")).convert("RGB")
    assert animation.getpixel((animation.width - 1, 0)) == (255, 255, 255)
    difference = np.asarray(animation, dtype=np.float64) - np.asarray(frames[0], dtype=np.float64)
    assert np.abs(difference).mean() < {1: 2, 3: 10}[channels]


# Curves over t.


def test_betas_and_snr_are_those_of_the_schedules(tmp_path, drawn):
    diffusion.draw_betas(SCHEDULES, tmp_path / "beta.png")
    diffusion.draw_snr(SCHEDULES, tmp_path / "snr.png")
    (betas,), (snr,) = (figure.axes for figure in drawn)
    for name in SCHEDULES:
        assert np.array_equal(curves(betas)[name], make_betas(name, 1000).numpy())
    a_t = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    assert np.allclose(curves(snr)["linear"], a_t / (1 - a_t), rtol=1e-10)
    assert betas.get_yscale() == snr.get_yscale() == "log"


def test_every_sampler_is_drawn_as_it_draws(tmp_path, drawn, monkeypatch):
    class Early(Uniform):
        """The first half of the timesteps only; its losses count half."""

        def sample(self, batch_size, generator):
            timesteps, weights = super().sample(batch_size, generator)
            return timesteps // 2, weights / 2

    monkeypatch.setitem(TIMESTEP_SAMPLERS, "early", Early)
    samplers = diffusion.build_samplers({"linear": SCHEDULES["linear"]})
    diffusion.draw_samplers(samplers, 0, tmp_path / "samplers.png")
    (figure,) = drawn
    panels = {axes.get_title(loc="left").split()[0]: axes for axes in figure.axes if axes.get_visible()}
    assert list(panels) == list(TIMESTEP_SAMPLERS)
    for name, axes in panels.items():
        drawn_bars, weights = (stairs.get_data().values for stairs in axes.patches)
        (density,) = curves(axes).values()
        assert np.isclose(density.mean(), 1)
        if name != "early":
            assert np.allclose(drawn_bars, density.reshape(len(drawn_bars), -1).mean(1), atol=0.15)
    drawn_bars, weights = (stairs.get_data().values for stairs in panels["early"].patches)
    assert np.allclose(drawn_bars[:25], 2, atol=0.2)
    assert (drawn_bars[25:] == 0).all()
    assert (weights[:25] == 0.5).all()
    assert np.isnan(weights[25:]).all()


@pytest.mark.parametrize("steps", [1, 7, 130, 999])
def test_any_number_of_timesteps(steps, tmp_path, drawn, monkeypatch):
    monkeypatch.setattr(diffusion, "BATCHES", 20)
    diffusion.draw_samplers({"uniform": {"linear": Uniform(torch.ones(steps))}}, 0, tmp_path / "samplers.png")
    heights, edges, _ = drawn[0].axes[0].patches[0].get_data()
    assert (edges[0], edges[-1]) == (0, steps)
    assert np.isclose((heights * np.diff(edges)).sum(), steps)


def test_a_sampler_of_ones_own_is_drawn_beside_the_others(tmp_path, drawn, monkeypatch):
    monkeypatch.setattr(diffusion, "BATCHES", 2)
    monkeypatch.setattr(dissolving, "FRAMES", 2)
    own = tmp_path / "my_file.py"
    own.write_text(
        "import torch\nfrom schedulers.timestep_samplers import TimestepSampler\nclass Mine(TimestepSampler):\n"
        "    objective = 'changed'\n"
        "    def __init__(self, alphas_cumprod):\n"
        "        super().__init__(alphas_cumprod)\n"
        "        self.set_density(torch.arange(self.num_train_timesteps) < 10)\n"
    )
    flags = ["--schedules=linear", "--num_images=1", "--resolution=8", f"--output_dir={tmp_path / 'figures'}"]
    draw(monkeypatch, *flags, f"--timestep_sampler={own}:Mine")
    panels = {axes.get_title(loc="left"): axes for axes in drawn[2].axes if axes.get_visible()}
    assert [name.split()[0] for name in panels] == [*TIMESTEP_SAMPLERS, "my_file.py:Mine"]
    (density,) = curves(panels["my_file.py:Mine (another objective)"]).values()
    assert density.nonzero()[0].tolist() == list(range(10))
    for name, message in (
        ("uniform", "--timestep_sampler uniform: is not a sampler of your own"),
        (f"{tmp_path / 'other.py'}:Mine", "there is no file"),
        (f"{own}:Yours", "has no timestep sampler Yours; it has Mine"),
    ):
        with pytest.raises(UserError, match=message):
            draw(monkeypatch, *flags, f"--timestep_sampler={name}")


def test_few_timesteps(tmp_path, monkeypatch, capsys):
    """A sampler that needs more of them is named and left out of the picture."""
    monkeypatch.setattr(diffusion, "BATCHES", 5)
    flags = ["--ddpm_num_steps=2", "--schedules", "linear", "cosine", "--num_images=1", "--resolution=8"]
    draw(monkeypatch, *flags, f"--output_dir={tmp_path}")
    assert "the timestep sampler ats is left out: grid 50" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 5


def test_every_weighting_is_drawn(tmp_path, drawn):
    diffusion.draw_weightings(SCHEDULES, tmp_path / "weights.png")
    (figure,) = drawn
    assert len(figure.axes) == len(SCHEDULES) * len(PREDICTIONS)
    epsilon = curves(figure.axes[0])
    assert list(epsilon) == list(LOSS_WEIGHTINGS)
    a_t = SCHEDULES["linear"].alphas_cumprod.numpy()
    snr = a_t / (1 - a_t)
    assert np.allclose(epsilon["min_snr"], np.minimum(snr, 5) / snr, rtol=1e-6)


# A run.


class Moving(Uniform):
    """A sampler with a state: the density is what it was told."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.density = super().describe()

    def load_state_dict(self, state):
        self.density = state["density"]

    def describe(self):
        return self.density


@pytest.fixture
def run_folder(tmp_path, monkeypatch) -> Path:
    """What a run leaves of its timesteps: its configuration, two checkpoints of the sampler, metrics."""
    monkeypatch.setitem(TIMESTEP_SAMPLERS, "uniform", Moving)
    folder = tmp_path / "run"
    folder.mkdir()
    flags = ["--dataset_name=digits", "--ddpm_num_steps=4", "--ddpm_num_inference_steps=4", "--channels=1"]
    (folder / "config.yaml").write_text(as_yaml(parse_config(flags)))
    for step, density in {20: [0.1, 0.2, 0.3, 0.4], 100: [0.7, 0.1, 0.1, 0.1]}.items():
        (folder / f"checkpoint-{step}").mkdir()
        state = {"density": torch.tensor(density, dtype=torch.float64)}
        write_files(folder / f"checkpoint-{step}", {"sampler.safetensors": state})
    lines = [
        {"step": step, "loss": 1.0, **{f"loss_q{quarter}": 10.0**-quarter for quarter in range(4)}}
        | {run_curves.EFFECTIVE_SAMPLE_SIZE: 0.5}
        for step in range(10, 101, 10)
    ]
    del lines[3]["loss_q2"]  # none of its timesteps was drawn
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 11')
    return folder


def test_a_run_is_drawn(run_folder, drawn, monkeypatch, capsys):
    draw(monkeypatch, f"--run_dir={run_folder}")
    names = ["loss_by_quarter.png", "timestep_density.png", "effective_sample_size.png"]
    assert capsys.readouterr().out.split() == [str(run_folder / "figures" / name) for name in names]
    losses, densities, sizes = (figure.axes[0] for figure in drawn)
    assert {label: set(values) for label, values in curves(losses).items()} == {
        "0 to 0": {1.0}, "1 to 1": {0.1}, "2 to 2": {0.01}, "3 to 3": {0.001},
    }  # fmt: skip
    assert [len(values) for values in curves(losses).values()] == [10, 10, 9, 10]
    assert np.allclose(curves(densities)["20"], [0.4, 0.8, 1.2, 1.6])
    assert np.allclose(curves(densities)["100"], [2.8, 0.4, 0.4, 0.4])
    assert set(next(iter(curves(sizes).values()))) == {0.5}


@pytest.mark.parametrize("sampler", ["loss_second_moment", "ats"])
def test_a_real_run_that_adapts(sampler, train, tmp_path, drawn, monkeypatch):
    """What a checkpoint holds is what the sampler drew from: the density has left the uniform one."""
    flags = ["--ddpm_num_steps=4", "--ddpm_num_inference_steps=4"]
    flags += ["--ats_grid=4", "--ats_interval=2"] if sampler == "ats" else []
    lengths = ["--max_train_steps=24", "--checkpointing_steps=2", "--checkpoints_total_limit=99"]
    folder = train(tmp_path / "run", f"--timestep_sampler={sampler}", *flags, *lengths, "--save_images_steps=999")
    draw(monkeypatch, f"--run_dir={folder}")
    losses, over_log_snr, densities, sizes = (figure.axes[0] for figure in drawn)
    assert over_log_snr.get_title(loc="left").startswith("density")
    assert len(drawn[1].axes) == 2 * 3  # density, loss and signal, with their scales
    shown = curves(densities)
    assert len(shown) == run_curves.MOST_CURVES
    assert (list(shown)[0], list(shown)[-1]) == ("2", "24")
    assert np.abs(shown["24"] - shown["2"]).max() > 1e-3
    assert all(np.isclose(density.mean(), 1) for density in shown.values())
    assert len(curves(losses)) == 4
    assert (next(iter(curves(sizes).values())) <= 1 + 1e-9).all()


def test_what_the_timesteps_did_is_drawn_in_its_place(run_folder, drawn, monkeypatch):
    """Of four bins the second noisiest and the last are empty at first; the density starts uniform."""
    bins = LogSNRBins(build_scheduler("linear", 4).alphas_cumprod)
    lines = [
        {
            "step": step,
            "log_snr": bins.centres.tolist(),
            "probability": [0.25] * 4 if step <= 300 else [0.5, 0.25, 0.25, 0],
            "loss": [1.0 + step % 2, None if step <= 300 else 2.0, 3.0, None],
            "signals": {"never": [None] * 4} | ({} if step <= 300 else {"some_signal": [-1.0, 0.0, 1.0, 2.0]}),
        }
        for step in range(1, 601)
    ]
    other_schedule = {**lines[0], "log_snr": [0.0] * 16, "probability": [1 / 16] * 16, "loss": [1.0] * 16}
    (run_folder / "timesteps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [other_schedule, *lines]))
    draw(monkeypatch, f"--run_dir={run_folder}")
    panels = {axes.get_title(loc="left"): axes for axes in drawn[1].axes if axes.get_title(loc="left")}
    assert list(panels) == ["density, as a multiple of uniform $t$", "mean loss, unweighted", "signal: some signal"]
    density, loss, signal = (axes.collections[0].get_array() for axes in panels.values())
    corners = panels["mean loss, unweighted"].collections[0].get_coordinates()
    filled = np.searchsorted(corners[:, 0, 1], bins.edges[:, 0].numpy())  # rows of the four; the others are gaps
    assert corners[0, :, 0].tolist() == list(range(0, 601, 4))
    assert loss.mask.all(1).sum() == len(loss) - 3
    first, last = slice(0, 75), slice(75, 150)
    assert (loss[filled[0]] == 1.5).all()
    assert loss.mask[filled[1], first].all()
    assert (loss[filled[1], last] == 2).all()
    assert (density[filled, first] == 1).all()
    assert density[filled, -1].tolist() == [2, 1, 1, 1 / 32]
    assert signal.mask[:, first].all()
    assert signal[filled, -1].tolist() == [-1, 0, 1, 2]


def test_colours_tell_signs_and_orders_of_magnitude_apart():
    colours, _ = run_curves.colours_for(np.array([[1e-4, 1.0], [np.nan, 1e-2]]))
    assert colours["norm"].__class__.__name__ == "LogNorm"
    for values in ([-1.0, 3.0, np.nan], [0.0, 1.0, 1.0], [0.0, 0.0, 0.0]):
        colours, _ = run_curves.colours_for(np.array([values]))
        assert colours["norm"](0.0) == 0.5
    colours, scale = run_curves.colours_around_1(np.array([[0.9, 5.0, np.nan]]))
    assert [scale["format"](tick, 0) for tick in scale["ticks"]] == ["1/8", "1/4", "1/2", "1", "2", "4", "8"]
    assert colours["norm"](1.0) == pytest.approx(0.5)


def test_a_run_without_checkpoints_or_weights_is_drawn_as_far_as_it_goes(run_folder, monkeypatch, capsys):
    for step in (20, 100):
        (run_folder / f"checkpoint-{step}").rename(run_folder / f"checkpoint-{step}.corrupt")
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()[:-1]]
    for line in lines:
        del line[run_curves.EFFECTIVE_SAMPLE_SIZE]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw(monkeypatch, f"--run_dir={run_folder}")
    assert [path.name for path in (run_folder / "figures").iterdir()] == ["loss_by_quarter.png"]


def test_the_samples_of_a_run_become_a_gif(run_folder, monkeypatch, capsys):
    """A frame for each grid in the order of the steps; the raw weights stand beside the others in the beginning."""
    samples = run_folder / "samples"
    samples.mkdir()
    for step, width, grey in ((9, 30, 0), (10, 20, 100), (20, 20, 0), (100, 20, 200)):
        Image.new("L", (width, 20), grey).save(samples / f"step-{step}.png")
    draw(monkeypatch, f"--run_dir={run_folder}")
    assert capsys.readouterr().out.split()[-1] == str(run_folder / "figures" / "samples_over_steps.gif")
    with Image.open(run_folder / "figures" / "samples_over_steps.gif") as gif:
        frames = [gif.seek(frame) or gif.convert("RGB") for frame in range(gif.n_frames)]
    assert [frame.getpixel((5, 5))[0] for frame in frames] == pytest.approx([0, 100, 0, 200], abs=5)
    assert [frame.getpixel((25, 5))[0] for frame in frames] == pytest.approx([0, 255, 255, 255], abs=5)
    (samples / "step-100.png").write_bytes(b"cut off")
    with pytest.raises(UserError, match=r"step-100\.png cannot be read"):
        draw(monkeypatch, f"--run_dir={run_folder}")


def test_a_damaged_checkpoint_is_left_out_of_the_pictures(run_folder, monkeypatch, capsys):
    (run_folder / "checkpoint-20" / "sampler.safetensors").write_bytes(b"cut off")
    draw(monkeypatch, f"--run_dir={run_folder}")
    assert "checkpoint-20 is left out, because it is damaged: sampler.safetensors is not" in capsys.readouterr().err
    assert (run_folder / "figures" / "timestep_density.png").exists()


def test_quarters_are_named_as_the_training_counts_them(tmp_path, drawn):
    lines = [{"step": 1, **{f"loss_q{quarter}": 1 for quarter in range(4)}}]
    run_curves.draw_losses_by_quarter(lines, 50, tmp_path / "losses.png")
    quarters = torch.arange(50) * 4 // 50
    edges = [(quarters == quarter).nonzero().flatten()[[0, -1]].tolist() for quarter in range(4)]
    assert list(curves(drawn[0].axes[0])) == [f"{first} to {last}" for first, last in edges]


def test_a_run_takes_a_folder_for_downloads(run_folder, monkeypatch, tmp_path):
    draw(monkeypatch, f"--run_dir={run_folder}", f"--cache_dir={tmp_path / 'cache'}")
    assert (run_folder / "figures" / "loss_by_quarter.png").exists()


def test_a_run_that_cannot_be_drawn_says_why(run_folder, monkeypatch):
    write_files(run_folder / "checkpoint-20", {"sampler.safetensors": {"other": torch.zeros(1)}})
    with pytest.raises(UserError, match=r"checkpoint-20/sampler\.safetensors does not fit the timestep sampler"):
        draw(monkeypatch, f"--run_dir={run_folder}")
    metrics, config = run_folder / "metrics.jsonl", run_folder / "config.yaml"
    for leave in (lambda: metrics.write_text('{"step": 1'), lambda: metrics.write_text(""), metrics.unlink):
        leave()
        with pytest.raises(UserError, match="there are no metrics in it yet"):
            draw(monkeypatch, f"--run_dir={run_folder}")
    for text in ("", "a: [", "- a list"):
        config.write_text(text)
        with pytest.raises(UserError, match=r"config\.yaml in it is not a valid run configuration"):
            draw(monkeypatch, f"--run_dir={run_folder}")


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("metrics.jsonl", {"loss_q0": 1.0}),
        ("metrics.jsonl", {"step": "one", "loss_q0": 1.0}),
        ("metrics.jsonl", {"step": 10**30, "loss_q0": 1.0}),
        ("metrics.jsonl", {"step": 1, "loss_q0": "small"}),
        ("metrics.jsonl", {"step": 1, "loss_q0": [1.0]}),
        ("timesteps.jsonl", {"step": 1}),
        ("timesteps.jsonl", {"step": 1, "log_snr": None, "probability": [1], "loss": [1], "signals": {"a": ["x"]}}),
        ("timesteps.jsonl", {"step": 1, "log_snr": None, "probability": [1], "loss": [1], "signals": {}}),
    ],
)
def test_lines_that_no_training_wrote_are_named(run_folder, monkeypatch, file, line):
    if "log_snr" in line:
        line["log_snr"] = LogSNRBins(build_scheduler("linear", 4).alphas_cumprod).centres.tolist()
    with (run_folder / file).open("a") as lines:
        lines.write(f"\n{json.dumps(line)}\n")
    with pytest.raises(UserError, match=rf"{file}: has a line .*no training wrote"):
        draw(monkeypatch, f"--run_dir={run_folder}")
    assert not (run_folder / "figures").exists()


def test_a_quarter_that_is_never_drawn_is_left_out(tmp_path, drawn):
    run_curves.draw_losses_by_quarter(
        [{"step": 1, "loss_q0": 1, "loss_q1": 1, "loss_q3": 1}], 1000, tmp_path / "losses.png"
    )
    assert list(curves(drawn[0].axes[0])) == ["0 to 249", "250 to 499", "750 to 999"]


def test_a_long_run_is_smoothed_in_place(tmp_path, drawn):
    """The running mean of a straight line is that line: it is centred, and no shorter than it must be."""
    metrics = [{"step": step, "loss_q0": step, "loss_q1": 1, "loss_q2": 1, "loss_q3": 1} for step in range(1, 501)]
    run_curves.draw_losses_by_quarter(metrics, 1000, tmp_path / "losses.png")
    smooth = drawn[0].axes[0].get_lines()[0]
    assert np.allclose(smooth.get_ydata(), smooth.get_xdata())
    assert len(smooth.get_ydata()) == 500 - 10  # of 11 lines each


def test_a_picture_is_whole_or_not_there(tmp_path):
    with pytest.raises(RuntimeError), plots.drawing(tmp_path / "x.png"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
