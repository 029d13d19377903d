"""The page of a run: what it shows is what the files say, in a real browser; what they plant does not run."""

import csv
import json
import logging
import re
import shutil
import sys
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from conftest import help_of
from PIL import Image

import report
from common.errors import UserError
from reporting import run_page
from run_folder.config import as_yaml, parse_config
from run_folder.folder import RunFolder
from schedulers.ddpm import build_scheduler
from schedulers.timestep_samplers import LogSNRBins

IMAGE = '<img src=x onerror="window.hit=1">'
SCRIPT = "</script><script>window.hit=1</script>"
BROKEN_OUT = f'">{IMAGE}'
BINS = LogSNRBins(build_scheduler("linear", 1000).alphas_cumprod)
MEASURED = {"step": 0, "train_seconds": 0.0, "weights": "ema", "sampler": "ddim", "steps": 50, "settings": "eta=0"}
MEASURED |= {"num_images": 256, "images": "checkpoint", "sha256": "", "reference": "digits", "precision": "no"}
MEASURED |= {"reference_fingerprint": "0"}


def write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_table(path: Path, rows: list[dict]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def make_run(folder: Path, *flags: str, planted: str = "") -> Path:
    """A run of ten lines with all that scripts leave in it; `planted` is put wherever a text can be."""
    folder.mkdir(parents=True)
    flags = [*flags, f"--dataset_name=digits{planted}", f"--output_dir={folder}"]
    (folder / "config.yaml").write_text(as_yaml(parse_config([*flags, "--max_train_steps=100"])))
    rows = [["data", "50,000 images", f"1,797 images{planted}"], [f"loss{planted}", "l2", "l2"]]
    (folder / "audit.json").write_text(json.dumps(rows))
    steps = range(10, 101, 10)
    write_lines(
        folder / "metrics.jsonl",
        [
            {"step": step, "train_seconds": step / 4, "loss": 10 / step, "smoothed_loss": 11 / step, "lr": 1e-3}
            | {"grad_norm": 1 + step / 100, "images_per_second": 500.0, f"other{planted}": planted}
            for step in steps
        ],
    )
    share = (BINS.counts / BINS.counts.sum()).tolist()
    lines = [
        {"step": step, "log_snr": [float(f"{centre:.6g}") for centre in BINS.centres.tolist()], "signals": {}}
        | {"probability": [p * (2 if place < 4 else 0.9) for place, p in enumerate(share)], "loss": [0.1] * len(BINS)}
        for step in steps
    ]
    lines[0]["probability"] = share
    write_lines(folder / "timesteps.jsonl", lines)
    (folder / "samples").mkdir()
    for step in (50, 100):
        Image.new("L", (40, 40), step).save(folder / "samples" / f"step-{step}.png")
    (folder / "samples" / f"step-{planted.replace('/', '')}.png").write_bytes(b"nothing")
    table = [{**MEASURED, "step": step, "train_seconds": step / 4, "settings": f"eta=0{planted}",
              "fid@256": 200 / step, f"kid{planted}@256": 1 / step} for step in (50, 100)]  # fmt: skip
    write_table(folder / "evaluation_results.csv", table)
    write_table(folder / "best_scores.csv", [{"metric": "fid@256", "best": 2.0, **MEASURED}])
    generated = folder / "generated" / f"step-100{planted.replace('/', '')}"
    (generated / "images").mkdir(parents=True)
    for seed in range(3):
        Image.new("L", (8, 8), 50 * seed).save(generated / "images" / f"{seed:06d}.png")
    record = {"step": 100, "labels": [f"cat{planted}", f"dog{planted}"]}
    (generated / "samples.json").write_text(json.dumps(record))
    return folder


def make_nearest(folder: Path) -> None:
    (generated,) = (folder / "generated").iterdir()
    Image.new("RGB", (200, 22 + 2 + 3 * 50), "white").save(generated / "nearest.png")
    record = {"seeds": [0, 1, 2], "distances": [[12.5, 20], [3.25, 9], [40, 50]]}
    (generated / "nearest.json").write_text(json.dumps(record))


def write(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, arguments)])
    report.main()


def described(folder: Path) -> dict:
    return run_page.describe_run(RunFolder(folder))


# The script.


def test_one_run_and_several(tmp_path, monkeypatch, capsys):
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)
    write(monkeypatch, "a")
    write(monkeypatch, "a", "b")
    write(monkeypatch, *runs, "--output=both.html")
    assert capsys.readouterr().out.split() == ["a/report.html", "report.html", "both.html"]
    assert (tmp_path / "both.html").read_bytes() == (tmp_path / "report.html").read_bytes()
    assert "<title>a, b</title>" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "name one or more runs"),
        ("nowhere", "nowhere: there is no such folder"),
        ("folder", "folder is not a run: there is no config.yaml in it"),
        ("run --output page.txt", "--output page.txt: must end in .html"),
        ("run --output there/page.html", "--output there/page.html: there is no folder there"),
        ("run --output page.html", "--output page.html: is a folder"),
        ("run --outptu x", "unknown flag --outptu; did you mean --output?"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, tmp_path, monkeypatch):
    make_run(tmp_path / "run")
    (tmp_path / "folder").mkdir()
    (tmp_path / "page.html").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        write(monkeypatch, *arguments.split())
    assert message in str(error.value)


def test_help_needs_no_heavy_import():
    assert "RUN [RUN ...]" in help_of("report.py")


def test_a_training_ends_with_its_page(train, tmp_path, monkeypatch, caplog):
    run = train(tmp_path / "run", "--max_train_steps=2", "--no_random_flip")
    rows = {what: (paper, own) for what, paper, own in described(run)["audit"]}
    assert rows["flips"] == ("random", "none")
    assert rows["init"][0] == rows["init"][1]
    page = (run / "report.html").read_bytes()
    # The same command again: the network is a trained one by then, and the audit still that of the run's start.
    train(tmp_path / "run", "--max_train_steps=2", "--no_random_flip")
    assert (run / "report.html").read_bytes() == page

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("training.setup.write_report", fail)
    with caplog.at_level(logging.WARNING):
        train(tmp_path / "another", "--max_train_steps=1")
    assert (tmp_path / "another" / "README.md").exists()
    assert not (tmp_path / "another" / "report.html").exists()


# What is read.


def test_lines_that_are_damaged_are_left_out(tmp_path):
    run = make_run(tmp_path / "run")
    damaged = ["{", "[1]", '"text"', '{"loss": 1}', '{"step": "7", "loss": 1}', '{"step": true}', "[" * 100_000]
    damaged += ['{"step": 105, "loss": "1", "lr": NaN, "grad_norm": 1e999, "smoothed_loss": ' + "9" * 400 + "}"]
    for name in ("metrics.jsonl", "timesteps.jsonl"):
        path = run / name
        path.write_text(path.read_text() + "\n".join(damaged) + '\n{"step": 110')
    found = described(run)
    assert found["curves"]["step"] == [*range(10, 101, 10), 105]
    assert found["curves"]["loss"] == [pytest.approx(10 / step, rel=1e-5) for step in range(10, 101, 10)] + [None]
    assert [found["curves"][name][-1] for name in ("smoothed_loss", "lr", "grad_norm")] == [None] * 3
    assert found["timesteps"]["steps"] == [*range(10, 101, 10)]
    json.dumps(found, allow_nan=False)


def test_files_that_are_damaged_or_missing_leave_their_section_out(tmp_path):
    run = make_run(tmp_path / "run")
    for name in (
        "audit.json",
        "metrics.jsonl",
        "timesteps.jsonl",
        "evaluation_results.csv",
        "generated/step-100/samples.json",
    ):
        (run / name).write_bytes(b"\xff\x00{[")
    for path in (run / "samples").iterdir():
        path.write_bytes(b"no picture")
    found = described(run)
    nothing = {"audit": [], "curves": {}, "grids": [], "timesteps": None, "evaluation": None, "galleries": []}
    assert {name: found[name] for name in nothing} == nothing


def test_what_is_no_picture_is_not_embedded(tmp_path):
    """A run that somebody sent may name a secret of the reader's as its sample."""
    run = make_run(tmp_path / "run")
    secret = tmp_path / "secret"
    secret.write_text("a private key, and longer than the head of a picture")
    (run / "samples" / "step-70.png").symlink_to(secret)
    assert [grid["step"] for grid in described(run)["grids"]] == [50, 100]


def test_a_long_run_makes_no_large_page(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    monkeypatch.setattr(run_page, "MOST_POINTS", 5)
    monkeypatch.setattr(run_page, "MOST_COLUMNS", 5)
    monkeypatch.setattr(run_page, "MOST_GRIDS", 4)
    monkeypatch.setattr(run_page, "MOST_IMAGES", 2)
    for step in range(101, 110):
        Image.new("L", (40, 40)).save(run / "samples" / f"step-{step}.png")
    found = described(run)
    assert found["curves"]["step"] == [20, 40, 60, 80, 100]
    assert found["curves"]["loss"][0] == pytest.approx((1 + 0.5) / 2)
    assert found["timesteps"]["steps"] == [20, 40, 60, 80, 100]
    assert found["timesteps"]["density"][0][0] == pytest.approx(1.5)
    assert len(found["grids"]) == 4
    assert found["grids"][-1]["step"] == 109
    (gallery,) = found["galleries"]
    assert (len(gallery["images"]), gallery["count"]) == (2, 3)
    monkeypatch.setattr(run_page, "MOST_BYTES", 2 * (run / "samples" / "step-109.png").stat().st_size)
    assert [grid["step"] for grid in described(run)["grids"]][-1] == 109
    assert 1 <= len(described(run)["grids"]) <= 2


def test_the_density_is_a_multiple_of_uniform(tmp_path):
    timesteps = described(make_run(tmp_path / "run"))["timesteps"]
    assert timesteps["density"][0] == pytest.approx([1] * len(BINS), abs=1e-4)
    assert timesteps["density"][1] == pytest.approx([2] * 4 + [0.9] * (len(BINS) - 4), abs=1e-4)
    assert not timesteps["is_uniform"]
    lines = (tmp_path / "run" / "timesteps.jsonl").read_text().splitlines()
    (tmp_path / "run" / "timesteps.jsonl").write_text(lines[0])
    assert described(tmp_path / "run")["timesteps"]["is_uniform"]


def test_images_in_one_file_are_shown_as_their_grid(tmp_path):
    run = make_run(tmp_path / "run")
    generated = run / "generated" / "step-100"
    for path in (generated / "images").iterdir():
        path.unlink()
    assert described(run)["galleries"] == []
    Image.new("L", (20, 10)).save(generated / "grid.png")
    (gallery,) = described(run)["galleries"]
    assert (gallery["grid"]["width"], gallery["grid"]["height"]) == (20, 10)


def test_a_repeated_measurement_is_one_row(tmp_path):
    run = make_run(tmp_path / "run")
    settings = ("eta=0", "eta=0 seeds=256-511", "eta=0 repeats=2")
    write_table(run / "evaluation_results.csv", [{**MEASURED, "settings": one, "fid@256": 4.0} for one in settings])
    assert [row["settings"] for row in described(run)["evaluation"]["rows"]] == ["eta=0 repeats=2"]


def test_images_of_the_finished_pipeline_are_the_newest(tmp_path):
    run = make_run(tmp_path / "run")
    for name, step in (("pipeline", None), ("step-200", 200), ("step-300", 300)):
        shutil.copytree(run / "generated" / "step-100", run / "generated" / name)
        (run / "generated" / name / "samples.json").write_text(json.dumps({"step": step}))
    assert [gallery["name"] for gallery in described(run)["galleries"]] == ["pipeline", "step-300", "step-200"]


def test_a_run_by_time_has_no_number_of_steps(tmp_path):
    assert described(make_run(tmp_path / "run"))["total_steps"] == 100
    assert described(make_run(tmp_path / "timed", "--max_train_seconds=60"))["total_steps"] is None


def test_a_picture_too_large_for_the_page_is_named(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run")
    monkeypatch.setattr(run_page, "MOST_BYTES", 50)
    assert described(run)["grids"] == []
    assert "step-100.png is not on the page" in capsys.readouterr().err


# The page, in a browser.


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


def show(browser: Browser, page: Path, *runs: Path) -> None:
    run_page.write_report(runs, page)
    browser.open(page)


def text_of(browser: Browser, selector: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.textContent)")


def box_of(browser: Browser, selector: str) -> dict[str, float]:
    """Where an element is in the window, after it has been brought there."""
    script = "const node = document.querySelector(%s); node.scrollIntoView({behavior: 'instant', block: 'center'}); "
    script += "const {x, y, width, height} = node.getBoundingClientRect(); return {x, y, width, height};"
    return browser.run(f"(() => {{ {script % json.dumps(selector)} }})()")


def test_the_page_shows_the_run(browser, tmp_path):
    run = make_run(tmp_path / "my run")
    make_nearest(run)
    show(browser, tmp_path / "page.html", run)
    assert browser.complaints() == []
    assert text_of(browser, "h1") == ["my run"]
    ids = browser.run("[...document.querySelectorAll('section')].map((each) => each.id)")
    assert ids == ["audit", "curves", "samples", "timesteps", "metrics", "gallery", "options"]
    assert text_of(browser, "#audit td.marked") == ["1,797 images"]
    titles = ["Loss", "Learning rate", "Gradient norm", "Images per second", "fid@256 (few images)", "kid@256"]
    assert text_of(browser, ".chart h3") == titles
    paths = browser.run("[...document.querySelectorAll('.chart path')].map((each) => each.getAttribute('d'))")
    assert len(paths) == len(titles) + 1
    assert all(re.fullmatch(r"M[\d.]+ [\d.]+(L[\d.]+ [\d.]+)+", path) for path in paths)
    assert text_of(browser, "#metrics td.best") == ["2"]
    assert text_of(browser, ".gallery span") == ["seed 0, cat", "seed 1, dog", "seed 2, cat"]
    assert text_of(browser, ".nearest li") == ["seed 0, distance 12.5", "seed 1, distance 3.25", "seed 2, distance 40"]
    assert "generate.py with --nearest" not in text_of(browser, "#gallery")[0]
    assert browser.run("document.querySelectorAll('.heat canvas').length") == 2
    assert all(browser.run("[...document.images].map((each) => each.naturalWidth > 0 && each.alt !== '')"))
    # On a phone nothing is wider than the screen.
    browser("Emulation.setDeviceMetricsOverride", width=375, height=800, deviceScaleFactor=1, mobile=True)
    wide = browser.run("document.documentElement.scrollWidth")
    browser("Emulation.clearDeviceMetricsOverride")
    assert wide <= 375


def test_rows_of_two_references_are_kept_apart(browser, tmp_path):
    """In the facts, the names of lines and the table; of several methods the best is told."""
    run, names = make_run(tmp_path / "run"), ("digits[train], 1797 images of 8x8", "digits[test], 360 images of 8x8")
    rows = [{**MEASURED, "step": step, "reference": name, "fid@256": 200 / step + far}
            for step in (50, 100) for far, name in enumerate(names)]  # fmt: skip
    write_table(run / "evaluation_results.csv", rows)
    best = [(names[0], 2.0, 50), (names[0], 2.5, 10), (names[1], 3.0, 50)]
    scores = [{"metric": "fid@256", "best": value, **MEASURED, "steps": steps, "reference": name}
              for name, value, steps in best]  # fmt: skip
    write_table(run / "best_scores.csv", scores)
    show(browser, tmp_path / "page.html", run)
    facts = dict(zip(text_of(browser, ".facts dt"), text_of(browser, ".facts dd"), strict=True))
    told = {name: value for name, value in facts.items() if "fid" in name}
    column = "Best fid@256 (few images) against"
    assert told == {f"{column} digits[train]": "2", f"{column} digits[test]": "3"}
    assert text_of(browser, "#metrics th[scope=col]") == ["step", "reference", "fid@256 (few images)"]
    assert text_of(browser, "#metrics tbody tr") == [
        "50digits[train]4", "50digits[test]5", "100digits[train]2", "100digits[test]3"
    ]  # fmt: skip
    assert f"Measured against {names[0]}; {names[1]};" in text_of(browser, "#metrics .note")[0]
    box = box_of(browser, ".charts.small svg")
    browser.mouse("mouseMoved", box["x"] + box["width"] - 12, box["y"] + box["height"] / 2)
    method = "ema ddim 50 steps eta=0 against"
    assert tip_of(browser) == f"step 100\n{method} digits[train]: 2\n{method} digits[test]: 3"
    # A run of one reference says it once.
    show(browser, tmp_path / "page.html", make_run(tmp_path / "another"))
    assert "Best fid@256 (few images)" in text_of(browser, ".facts dt")
    assert text_of(browser, "#metrics th[scope=col]") == ["step", "fid@256 (few images)", "kid@256"]
    assert browser.complaints() == []


def test_curves_zoom_and_tell_their_values(browser, tmp_path):
    show(browser, tmp_path / "page.html", make_run(tmp_path / "run"))
    box = box_of(browser, ".chart svg")
    ticks = "[...document.querySelector('.chart').querySelectorAll('text')].map((each) => each.textContent)"
    whole, middle = browser.run(ticks), box["y"] + box["height"] / 2
    browser.mouse("mouseMoved", box["x"] + box["width"] - 12, middle)
    assert text_of(browser, ".tip")[0] == "step 100\nloss: 0.1\nsmoothed: 0.11"
    browser.drag((box["x"] + box["width"] * 0.5, middle), (box["x"] + box["width"] * 0.8, middle))
    zoomed = browser.run(ticks)
    steps = [int(tick) for tick in zoomed if re.fullmatch(r"\d\d+", tick)]
    assert zoomed != whole
    assert steps
    assert all(40 <= step <= 80 for step in steps)
    assert not browser.run("document.getElementById('reset').disabled")
    browser.double_click(box["x"] + box["width"] / 2, middle)
    assert browser.run(ticks) == whole
    assert browser.run("document.getElementById('reset').disabled")
    browser.run("document.querySelector('input[value=train_seconds]').click()")
    assert "s of training" in browser.run(ticks)
    # By keys, for those who have no mouse.
    browser.run("document.querySelector('.chart svg').focus()")
    for key in ("ArrowRight", "ArrowRight"):
        browser("Input.dispatchKeyEvent", type="keyDown", key=key)
    assert text_of(browser, ".chart [aria-live]")[0].startswith("5 s of training, loss: 0.5")
    browser("Input.dispatchKeyEvent", type="keyDown", key="+")
    assert not browser.run("document.getElementById('reset').disabled")
    browser("Input.dispatchKeyEvent", type="keyDown", key="Escape")
    assert browser.run("document.getElementById('reset').disabled")
    assert browser.complaints() == []


def test_the_density_is_drawn_as_it_moved(browser, tmp_path):
    """Uniform at first; then the four noisiest bins, at the bottom, are drawn twice as often, the others less."""
    show(browser, tmp_path / "page.html", make_run(tmp_path / "run"))
    box = box_of(browser, ".heat canvas")
    rows = len(BINS)
    pixel = "[...document.querySelector('.heat canvas').getContext('2d').getImageData({}, {}, 1, 1).data]"
    assert all(browser.run(pixel.format(0, row))[3] == 0 for row in range(rows))
    for row in range(rows):
        red, _, blue, alpha = browser.run(pixel.format(5, row))
        assert (red > blue, alpha == 255) == (row >= rows - 4, row >= rows - 4)
        assert alpha > 0
    browser.mouse("mouseMoved", box["x"] + box["width"] * 0.55, box["y"] + box["height"] - 3)
    assert re.fullmatch(r"step 60, log-SNR [-\d.]+ to [-\d.]+\ndrawn 2 × as often as uniformly", tip_of(browser))


def tip_of(browser: Browser) -> str:
    (shown,) = [text for text in text_of(browser, ".tip:not([hidden])") if text]
    return shown


def test_the_slider_shows_the_grids(browser, tmp_path):
    show(browser, tmp_path / "page.html", make_run(tmp_path / "run"))
    image = "document.querySelector('#samples img')"
    last = browser.run(f"{image}.src")
    assert browser.run(f"{image}.alt") == "Samples of run at step 100"
    browser.run("document.getElementById('step').focus()")
    browser("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft", code="ArrowLeft", windowsVirtualKeyCode=37)
    assert browser.run(f"{image}.alt") == "Samples of run at step 50"
    assert browser.run(f"{image}.src") != last
    browser.run("document.querySelector('#samples button').click()")
    shown = "new Promise((done) => setTimeout(() => done({}), 100))".format(f"{image}.alt")
    for _ in range(100):
        if browser.run(shown) == "Samples of run at step 100":
            break
    assert browser.run("document.querySelector('#samples button').textContent") == "Play"


def test_several_runs_stand_side_by_side(browser, tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", "--learning_rate=1e-3", "--timestep_sampler=stratified")]
    show(browser, tmp_path / "page.html", *runs)
    assert text_of(browser, "h1") == ["2 runs"]
    marked = text_of(browser, "#runs tr.marked")
    assert marked == ["learning_rate0.00020.001", "timestep_sampleruniformstratified"]
    assert browser.run("document.querySelectorAll('#samples img').length") == 2
    assert browser.run("document.querySelector('.chart').querySelectorAll('path').length") == 4
    assert text_of(browser, ".legend li") == ["a", "b"]
    colours = (
        "[...document.querySelector('.chart').querySelectorAll('path')].map((each) => getComputedStyle(each).stroke)"
    )
    assert len(set(browser.run(colours))) == 2
    assert browser.complaints() == []


def test_a_run_that_has_only_begun(browser, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(as_yaml(parse_config(["--dataset_name=digits", f"--output_dir={run}"])))
    write(monkeypatch, run)
    assert "there are no metrics in it yet, so it has no curves" in capsys.readouterr().err
    browser.open(run / "report.html")
    assert browser.run("[...document.querySelectorAll('section')].map((each) => each.id)") == ["options"]
    assert browser.complaints() == []


@pytest.mark.parametrize("planted", [IMAGE, BROKEN_OUT, SCRIPT, "<!--<script>"])
def test_what_a_run_plants_is_text(planted, browser, tmp_path):
    runs = [make_run(tmp_path / f"run{planted.replace('/', '')}", planted=planted)]
    make_nearest(runs[0])
    runs.append(make_run(tmp_path / "other", planted=planted.upper()))
    for shown in (runs, runs[:1]):
        show(browser, tmp_path / "page.html", *shown)
        assert browser.run("window.hit") is None
        assert browser.run("document.scripts.length") == 2
        assert browser.run("[...document.images].filter((each) => !each.src.startsWith('data:image/png')).length") == 0
        assert browser.run("document.querySelectorAll('[onerror]').length") == 0
        text = text_of(browser, "main")[0]
        assert text.count(planted) >= 8  # of the data, the audit, the metrics, the images
        assert browser.run("document.title").startswith(f"run{planted.replace('/', '')}")
        assert browser.complaints() == []


def test_the_policy_of_the_page_forbids_all_but_its_own_script(browser, tmp_path):
    """Even if a text did become an element, it would not run and nothing would be fetched."""
    show(browser, tmp_path / "page.html", make_run(tmp_path / "run"))
    browser.run(f"document.body.insertAdjacentHTML('beforeend', {json.dumps(IMAGE)})")
    browser.run(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hit = 1'}))"
    )
    browser.run("new Promise((done) => setTimeout(done, 200))")
    assert browser.run("window.hit") is None
    assert any("Content Security Policy" in complaint for complaint in browser.complaints())
