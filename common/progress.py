"""Progress bars and log lines that suit a terminal and a log file."""

import logging
import sys

from tqdm.auto import tqdm


def progress_bar(**options) -> tqdm:
    """Return a tqdm bar; in a file it writes a line every 30 seconds, not ten a second."""
    if not sys.stderr.isatty():
        options = {"mininterval": 30, "position": 0, "file": Lines(), **options}
    return tqdm(**{"dynamic_ncols": True, **options})


class Lines:
    """Bars for a file, in which a carriage return would not go back: each state is a line of its own."""

    def write(self, text: str) -> None:
        if text := text.strip():
            sys.stderr.write(f"{text}\n")

    def flush(self) -> None:
        sys.stderr.flush()


class BarFriendlyHandler(logging.Handler):
    """Log lines above the bars instead of through them."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def set_up_logging(is_main: bool) -> None:
    """Log as the diffusers examples do, from the main process only: what all would say is said once."""
    logging.basicConfig(
        format="%(asctime)s - %(levelname)s - %(name)s - %(message)s",
        datefmt="%m/%d/%Y %H:%M:%S",
        level=logging.INFO if is_main else logging.ERROR,
        handlers=[BarFriendlyHandler()],
        force=True,
    )
    for noisy in ("httpx", "httpx2", "datasets", "PIL", "fsspec", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
