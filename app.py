#!/usr/bin/env python
"""Open a page to play with a model: choose what should appear and a seed, and watch the image form.

python app.py runs/cifar10
python app.py runs/digits_class --port 8000
"""

from __future__ import annotations

import base64
import html
import io
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from common.errors import UserError, describe, run_script, say
from common.interruption import stop_requested, stops_deferred
from common.options import ConfigOptions, from_to, option, parse_options, section
from generation.generate_options import ModelOptions

if TYPE_CHECKING:
    from generation.forming import Frame, Studio, Wish
    from run_folder.saved_model import SavedModel

SECONDS_BETWEEN_LOOKS = 0.2  # for a signal
SHOWS = [("x_0, as the network sees it", True), ("x_t, with its noise", False)]
SAMPLERS = [("DDIM", True), ("DDPM", False)]
CSS = """
footer { display: none !important; }
.forming { display: flex; flex-wrap: wrap; gap: 12px; margin: 12px 0; }
.forming figure { margin: 0; width: clamp(96px, 22%, 160px); }
.forming.single figure { width: min(100%, 384px); }
.forming img { width: 100%; image-rendering: pixelated; border-radius: 4px; }
.forming figcaption { font-size: 13px; opacity: .75; text-align: center; overflow-wrap: anywhere; }
.status progress { width: 100%; accent-color: #f97316; }
.status p, .command p { margin: 4px 0; }
.command code { display: block; padding: 8px; overflow-wrap: anywhere; white-space: pre-wrap; user-select: all; }
.mistake { color: #b00020; font-weight: 600; overflow-wrap: anywhere; }
.dark .mistake { color: #ff8a80; }
"""


@section("page")
class PageOptions:
    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0 lets everybody in the network use the page.")
    port: int | None = option(None, "Port to listen at (default: the first free one from 7860 on).", from_to(1, 65535))
    mixed_precision: Literal["no", "fp16", "bf16"] | None = option(None, "Precision of the network (default: no).")
    allow_tf32: ClassVar[bool] = False


@dataclass
class Options(ConfigOptions, PageOptions, ModelOptions):
    """All options of this script."""


def main() -> None:
    description = "A page to play with a model: choose what should appear and a seed, and watch the image form."
    options = parse_options(Options, sys.argv[1:], description=description, usage="%(prog)s [RUN] [--flag value ...]")
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before it is imported: nothing is told to anybody
    try:
        import gradio
    except ImportError as error:
        raise UserError("the page needs gradio, which is not installed: pip install gradio") from error

    # Heavy imports come late, so that --help and a mistake in a flag are answered at once.
    from common.processes import start_processes
    from generation.forming import Studio
    from run_folder.saved_model import find_models

    processes = start_processes(options)
    lengths = [] if options.ema_length is None else [options.ema_length]
    found = find_models(options.model, options.checkpoints, options.weights, lengths)
    models = {model.source: model for model in found}
    page = build_page(models, Studio(processes))
    own = {"share": False, "ssr_mode": False, "mcp_server": False, "pwa": False, "enable_monitoring": False}
    shown = {"css": CSS, "theme": gradio.themes.Default(font="sans-serif", font_mono="monospace"), "footer_links": []}
    # gradio asks its own server whether it is there, which must not go through a proxy.
    os.environ["NO_PROXY"] = ",".join(filter(None, [os.environ.get("NO_PROXY"), options.host, "localhost"]))
    with stops_deferred():
        try:
            page.launch(
                server_name=options.host, server_port=options.port, prevent_thread_lock=True, quiet=True, **own, **shown
            )
        except OSError as error:
            where = options.host if options.port is None else f"{options.host} --port {options.port}"
            raise UserError(f"--host {where}: cannot listen there ({error}); try another --port") from error
        say(f"open {page.local_url} in a browser; Ctrl-C ends it")
        while not stop_requested():
            time.sleep(SECONDS_BETWEEN_LOOKS)


def build_page(models: dict[str, SavedModel], studio: Studio) -> Any:
    """Lay out what the models offer, and connect it with the studio."""
    import gradio

    from conditions.guidance import ALL
    from generation.forming import MOST_IMAGES, Wish
    from generation.methods import SHORT_SAMPLING

    newest = [*models][-1]
    condition, total = models[newest].condition, models[newest].scheduler.config.num_train_timesteps
    kind = condition["condition"] if condition else None
    with gradio.Blocks(title=f"Play with {newest}", analytics_enabled=False) as page:
        gradio.HTML(f"<h2>{html.escape(newest)}</h2>")
        with gradio.Row():
            with gradio.Column(scale=1, min_width=300):
                model = gradio.Dropdown([*models], value=newest, label="Checkpoint", visible=len(models) > 1)
                asked = {}
                if kind == "class":
                    names = [ALL, *condition["class_names"]]
                    asked["class_label"] = gradio.Dropdown(names, value=ALL, label="What should appear")
                elif kind == "text":
                    asked["prompt"] = gradio.Textbox(condition["prompts"][0], label="What should appear")
                if condition and condition["dropout"]:
                    info = "1 is none. 2 to 4 shows more clearly what should appear."
                    asked["guidance_scale"] = gradio.Number(1, label="Guidance", info=info, step=0.5)
                with gradio.Row():
                    asked["seed"] = gradio.Number(0, label="Seed", precision=0, min_width=100)
                    label = f"Images (1 to {MOST_IMAGES})"
                    asked["num_images"] = gradio.Number(4, label=label, precision=0, min_width=100)
                with gradio.Row():
                    asked["ddim"] = gradio.Radio(SAMPLERS, value=True, label="Sampler", min_width=100)
                    steps, label = min(SHORT_SAMPLING, total), f"Steps (1 to {total})"
                    asked["steps"] = gradio.Number(steps, label=label, precision=0, min_width=100)
                estimates = gradio.Radio(SHOWS, value=True, label="While it forms, show")
            with gradio.Column(scale=2, min_width=320):
                with gradio.Row():
                    start = gradio.Button("Generate", variant="primary", elem_id="generate")
                    stop = gradio.Button("Stop", elem_id="stop")
                shown = gradio.HTML("<p>Press Generate.</p>", elem_id="shown")
        stopped = gradio.State(threading.Event)  # of each visitor

        def form(values: dict) -> Iterator[str]:
            values[stopped].clear()
            wish = Wish(**{name: values[component] for name, component in asked.items()})
            yield from show(studio, models[values[model]], wish, values[estimates], values[stopped])

        inputs = {model, estimates, stopped, *asked.values()}
        start.click(form, inputs, shown, show_progress="hidden", api_visibility="private")
        stop.click(
            lambda stopped: stopped.set(), stopped, queue=False, show_progress="hidden", api_visibility="private"
        )
    return page


def show(studio: Studio, model: SavedModel, wish: Wish, estimates: bool, stopped: threading.Event) -> Iterator[str]:
    """Yield the page's right side while the images form; what goes wrong is one line of it."""
    from conditions.guidance import unknown_words

    frame = None
    try:
        for frame in studio.form(model, wish, estimates, stopped):
            yield as_html(frame, f"step {frame.number} of {frame.steps}")
    except Exception as error:
        yield f'<p class="mistake">{html.escape(describe(error))}</p>'
        return
    if frame is None or frame.number < frame.steps:
        yield as_html(frame, f"stopped at step {frame.number} of {frame.steps}") if frame else "<p>stopped</p>"
        return
    precision = studio.processes.precision
    which = f"--weights={model.weights}" if model.ema_length is None else f"--ema_length={model.ema_length:g}"
    flags = [] if model.step is None and model.ema_length is None else [which]
    flags += wish.flags() + ([] if precision == "no" else [f"--mixed_precision={precision}"])
    command = shlex.join(["python", "generate.py", model.source, *flags])
    below = f"<p>To make these images as files:</p><code>{html.escape(command)}</code>"
    if unknown := unknown_words([wish.prompt or ""], model.condition):
        below = f"<p>No caption of the training had: {html.escape(', '.join(unknown))}</p>{below}"
    yield as_html(frame, f"done after {frame.steps} steps") + f'<div class="command">{below}</div>'


def as_html(frame: Frame, status: str) -> str:
    """Return images, each with its caption, below a line about how far they are."""
    from PIL import Image

    figures = []
    for image, caption in zip(frame.images, frame.captions, strict=True):
        file = io.BytesIO()
        Image.fromarray(image.permute(1, 2, 0).squeeze(-1).numpy()).save(file, format="png")
        source = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        caption = html.escape(caption)
        figures.append(f'<figure><img src="{source}" alt="{caption}"><figcaption>{caption}</figcaption></figure>')
    bar = f'<progress value="{frame.number}" max="{frame.steps}"></progress>'
    few = " single" if len(figures) == 1 else ""
    return f'<div class="status"><p>{status}</p>{bar}</div><div class="forming{few}">{"".join(figures)}</div>'


if __name__ == "__main__":
    run_script(main)
