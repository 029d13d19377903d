"""app.py: what forms on the page is what generate.py makes; the page itself in a real browser."""

import base64
import importlib.util
import io
import itertools
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import preloaded
import pytest
import torch
from browser import CHROMIUM, Browser
from conftest import help_of, make_tiny_flags, run_script, run_training
from PIL import Image

import app
from common.errors import UserError
from conditions.guidance import unknown_words
from generation.forming import Studio, Wish
from run_folder.saved_model import SavedModel, find_models
from schedulers.denoising import StepNoise, to_uint8

DIGIT = "document.querySelector('#shown')"


@pytest.fixture(scope="module")
def plain_run(tiny_network, cache_dir, tmp_path_factory) -> Path:
    """A run without a condition, with checkpoints at steps 1 and 2."""
    flags = ["--max_train_steps=2", "--checkpointing_steps=1", "--save_images_steps=1000", "--eval_batch_size=1"]
    return run_training(tmp_path_factory.mktemp("runs") / "plain", [*make_tiny_flags(tiny_network, cache_dir), *flags])


@pytest.fixture
def studio() -> Studio:
    from accelerate import Accelerator

    from common.processes import Processes

    return Studio(Processes(Accelerator(cpu=True)))


def newest(run: Path) -> SavedModel:
    (model,) = find_models(str(run), [], None)
    return model


def pixels_of(folder: Path) -> np.ndarray:
    return np.stack([np.asarray(Image.open(path)) for path in sorted((folder / "images").glob("*.png"))])


# What forms.


@pytest.mark.parametrize(
    ("kind", "wish"),
    [
        ("plain_run", Wish(seed=5, num_images=3, steps=6)),
        ("plain_run", Wish(num_images=16, steps=3, ddim=True)),
        ("class_run", Wish(seed=8, num_images=4, steps=4, ddim=True, class_label="all")),
        ("class_run", Wish(seed=1, num_images=2, steps=4, class_label="7", guidance_scale=2.0)),
        ("text_run", Wish(num_images=2, steps=3, ddim=True, prompt="-- a handwritten two", guidance_scale=1.5)),
    ],
)
@pytest.mark.parametrize("estimates", [True, False])
def test_the_last_frame_is_what_generate_makes(kind, wish, estimates, studio, tmp_path, request):
    run = request.getfixturevalue(kind)
    *_, last = studio.form(newest(run), wish, estimates)
    assert last.number == last.steps == wish.steps
    run_script("generate", run, *wish.flags(), f"--output_dir={tmp_path / 'out'}")
    assert np.array_equal(last.images.squeeze(1).numpy(), pixels_of(tmp_path / "out"))


def test_captions_say_what_each_image_is_to_show(studio, plain_run, class_run):
    *_, last = studio.form(newest(class_run), Wish(seed=9, num_images=2, steps=1, ddim=True), True)
    assert last.captions == ["seed 9, 9", "seed 10, 0"]
    *_, last = studio.form(newest(plain_run), Wish(num_images=1, steps=1, ddim=True), True)
    assert last.captions == ["seed 0"]


def test_the_frames_on_the_way(studio, plain_run):
    """x_t and the x_0 in it, against both worked out here: x_0 = (x_t - sqrt(1 - a) epsilon) / sqrt(a), clipped."""
    model, wish = newest(plain_run), Wish(seed=3, num_images=2, steps=4, ddim=True)
    noisy, estimates = ([frame.images for frame in studio.form(model, wish, shown)] for shown in (False, True))
    assert len(noisy) == len(estimates) == wish.steps
    network, levels = model.load(torch.device("cpu")), model.scheduler.alphas_cumprod
    seeds = torch.tensor([3, 4])
    sample = StepNoise(seeds, seeds.tolist(), 0, model.shape)()
    timesteps = [999, 666, 333, 0]
    for number, t in enumerate(timesteps):
        a_t, a_s = levels[t], levels[timesteps[number + 1]] if number < 3 else torch.ones(())
        with torch.inference_mode():
            epsilon = network(sample, torch.tensor(t)).sample
        x_0 = ((sample - (1 - a_t).sqrt() * epsilon) / a_t.sqrt()).clamp(-1, 1)
        sample = a_s.sqrt() * x_0 + (1 - a_s).sqrt() * (sample - a_t.sqrt() * x_0) / (1 - a_t).sqrt()
        sample = sample.float()
        for own, frame in ((sample, noisy[number]), (x_0.float(), estimates[number])):
            difference = to_uint8(own).int() - frame.int()
            assert difference.abs().max() <= 1, number
            assert (difference != 0).float().mean() < 0.05


def test_of_many_steps_some_fifty_are_shown(studio, plain_run):
    numbers = [frame.number for frame in studio.form(newest(plain_run), Wish(steps=200, ddim=True), True)]
    assert numbers == [*range(4, 201, 4)]


def test_a_stop_leaves_the_last_frame(studio, plain_run):
    stopped, shown, before = threading.Event(), [], set(threading.enumerate())
    for frame in studio.form(newest(plain_run), Wish(steps=1000), True, stopped):
        shown.append(frame.number)
        stopped.set()
    assert 0 < shown[-1] < 1000
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)


def test_a_visitor_who_leaves_stops_it(studio, plain_run):
    stopped = threading.Event()
    frames = studio.form(newest(plain_run), Wish(steps=1000), True, stopped)
    next(frames)
    frames.close()
    assert stopped.is_set()


def test_the_network_is_loaded_once(studio, plain_run, monkeypatch):
    load, loaded = SavedModel.load, []
    monkeypatch.setattr(SavedModel, "load", lambda model, device: loaded.append(model.step) or load(model, device))
    first, second = find_models(str(plain_run), ["all"], None)
    for model, seed in itertools.product((first, second), (0, 1)):
        assert [*studio.form(model, Wish(seed=seed, steps=2, ddim=True), True)]
    assert loaded == [1, 2]


def test_averages_of_two_lengths_are_two_networks(studio, tiny_network, cache_dir, tmp_path, monkeypatch):
    flags = [flag for flag in make_tiny_flags(tiny_network, cache_dir) if "ema_max_decay" not in flag]
    run = run_training(tmp_path / "run", [*flags, "--ema=power", "--max_train_steps=4", "--checkpointing_steps=1"])
    load, loaded = SavedModel.load, []
    monkeypatch.setattr(SavedModel, "load", lambda model, device: loaded.append(model) or load(model, device))
    for length in (0.1, 0.2):
        (model,) = find_models(str(run), [], None, [length])
        *_, below = app.show(studio, model, Wish(steps=2, ddim=True), False, threading.Event())
        assert f"{run}/checkpoint-4 --ema_length={length} --ddim" in below.replace("&#x27;", "").replace("'", "")
    assert [model.ema_length for model in loaded] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (Wish(seed=-1), "seed -1: must be a whole number from 0 on"),
        (Wish(seed=None), "seed : must be a whole number from 0 on"),
        (Wish(seed=2**63), "the largest seed is 9223372036854775807"),
        (Wish(num_images=0), "0 images: must be from 1 to 16"),
        (Wish(num_images=17), "17 images: must be from 1 to 16; generate.py makes more"),
        (Wish(steps=0), "--num_inference_steps 0: must be greater than 0"),
        (Wish(steps=1001), "--num_inference_steps 1001: more than the 1000 steps"),
        (Wish(guidance_scale=-1.0), "--guidance_scale -1.0: must be 0 or greater"),
        (Wish(class_label="cat"), "--class_labels cat: no such class"),
        (Wish(prompt="a cat"), "was trained without captions"),
    ],
)
def test_a_value_out_of_range_is_one_line_of_the_page(wish, message, studio, class_run):
    (line,) = app.show(studio, newest(class_run), wish, True, threading.Event())
    assert line.startswith('<p class="mistake">')
    assert message in line
    assert "\n" not in line


def test_what_nobody_expected_is_one_line_too(studio, plain_run, monkeypatch):
    def fail(model: SavedModel, device: torch.device) -> None:
        raise RuntimeError("<b>no")

    monkeypatch.setattr(SavedModel, "load", fail)
    (line,) = app.show(studio, newest(plain_run), Wish(), True, threading.Event())
    assert "RuntimeError in " in line
    assert "&lt;b&gt;no" in line


def test_the_command_below_the_images_makes_them(studio, class_run, tmp_path):
    wish = Wish(seed=1, num_images=2, steps=2, ddim=True, class_label="3", guidance_scale=3)
    *_, shown = app.show(studio, newest(class_run), wish, True, threading.Event())
    command = shown.partition("<code>")[2].partition("</code>")[0].replace("&#x27;", "'")
    assert f"python generate.py '{class_run}/checkpoint-6' --weights=ema --ddim --seeds=1-2" in command
    assert command.endswith("--num_inference_steps=2 --class_labels=3 --guidance_scale=3")


def test_words_that_no_caption_had(text_run, class_run):
    assert unknown_words(["a handwritten zebra"], newest(text_run).condition) == ["zebra"]
    assert unknown_words(["a handwritten zebra"], newest(class_run).condition) == []


def test_without_gradio_one_line_says_what_to_install(monkeypatch, plain_run):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(sys, "argv", ["app.py", str(plain_run)])
    with pytest.raises(UserError, match="pip install gradio"):
        app.main()


def test_help_needs_no_heavy_import():
    assert "[RUN]" in help_of("app.py")


# The page, in a browser.


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if importlib.util.find_spec("gradio") is None:
        pytest.skip("gradio is not installed: pip install gradio")
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def opened(browser, tmp_path):
    """Start app.py on a run and show its page; it must end well, and ask nobody for anything."""
    proxy = socket.create_server(("127.0.0.1", 0))
    pages = []

    def open_page(run: Path, *flags: str) -> SimpleNamespace:
        port, log = free_port(), tmp_path / "log"
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), address)
        process = preloaded.Process(["app.py", run, f"--port={port}", *flags], log=log, NO_PROXY="", **proxies)
        pages.append(process)
        end = time.monotonic() + 120
        while "open http" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        browser.open(f"http://127.0.0.1:{port}")
        browser.wait_for("!!document.querySelector('#generate')")
        return SimpleNamespace(own=f"http://127.0.0.1:{port}/", process=process, log=log)

    yield open_page
    for process in pages:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    proxy.setblocking(False)
    with proxy, pytest.raises(BlockingIOError):
        proxy.accept()


def fill(browser: Browser, label: str, value: object) -> None:
    """Type into the field with this label."""
    browser.run(
        "(() => { const block = [...document.querySelectorAll('label')].find((each) => "
        f"each.innerText.trim().startsWith({label!r})); const field = block.querySelector('input, textarea'); "
        "field.focus(); field.select(); })()"
    )
    browser("Input.insertText", text=str(value))


def labels(browser: Browser) -> list[str]:
    found = browser.run("[...document.querySelectorAll('[data-testid=block-info]')].map((each) => each.innerText)")
    return [label.strip() for label in found]


def images(browser: Browser) -> np.ndarray:
    sources = browser.run(f"[...{DIGIT}.querySelectorAll('img')].map((each) => each.src)")
    decoded = [base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in sources]
    return np.stack([np.asarray(Image.open(io.BytesIO(each))) for each in decoded])


def generate(browser: Browser, until: str = "To make these images") -> str:
    browser.run("document.querySelector('#generate').click()")
    return browser.wait_for(f"{DIGIT}.innerText.includes({until!r}) && {DIGIT}.innerText")


def test_a_class_forms_on_the_page(opened, browser, class_run, tmp_path):
    page = opened(class_run)
    wanted = ["What should appear", "Guidance", "Seed", "Images (1 to 16)", "Sampler", "Steps (1 to 1000)"]
    assert labels(browser) == [*wanted, "While it forms, show"]
    for label, value in (("Seed", 5), ("Images", 3), ("Steps", 4), ("Guidance", 2)):
        fill(browser, label, value)
    assert "done after 4 steps" in generate(browser)
    flags = ["--ddim", "--num_inference_steps=4", "--seeds=5-7", "--guidance_scale=2"]
    run_script("generate", class_run, *flags, f"--output_dir={tmp_path / 'out'}")
    assert np.array_equal(images(browser), pixels_of(tmp_path / "out"))
    # What cannot be is a line, and the page goes on.
    fill(browser, "Steps", 5000)
    assert "more than the 1000 steps" in generate(browser, "--num_inference_steps 5000")
    fill(browser, "Steps", 2)
    assert "done after 2 steps" in generate(browser, "done after 2")
    asked = [url for url in browser.requests() if not url.startswith(("data:", page.own))]
    assert asked == []
    assert "Traceback" not in page.log.read_text()


def test_stop_on_the_page(opened, browser, plain_run):
    page = opened(plain_run)
    assert labels(browser) == ["Seed", "Images (1 to 16)", "Sampler", "Steps (1 to 1000)", "While it forms, show"]
    browser.run("document.querySelector('input[type=radio][value=false]')?.click()")
    fill(browser, "Images", 16)
    fill(browser, "Steps", 1000)
    generate(browser, "step ")
    browser.run("document.querySelector('#stop').click()")
    assert browser.wait_for(f"{DIGIT}.innerText.includes('stopped at step')")
    assert len(images(browser)) == 16
    fill(browser, "Steps", 2)
    assert "done after 2 steps" in generate(browser, "done after 2")
    assert [url for url in browser.requests() if not url.startswith(("data:", page.own))] == []


def test_a_prompt_is_text_wherever_it_is_shown(opened, browser, text_run):
    opened(text_run)
    fill(browser, "What should appear", "<img src=x onerror=window.hit=1> ${7*7} {{7*7}} two")
    fill(browser, "Steps", 2)
    shown = generate(browser)
    assert "No caption of the training had: " in shown
    assert "${7*7} {{7*7}} two" in shown
    assert browser.run("window.hit") is None
