"""Progress bars and log lines that suit a terminal and a log file."""

import logging
import sys

from tqdm.auto import tqdm


def progress_bar(**options) -> tqdm:
    """A tqdm bar with an ETA; in a file it writes a line every 30 seconds, not ten a second."""
    if not sys.stderr.isatty():
        options = {"mininterval": 30, "position": 0, **options}
    return tqdm(**{"dynamic_ncols": True, **options})


class BarFriendlyHandler(logging.Handler):
    """Log lines above the bars instead of through them."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)
