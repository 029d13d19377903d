"""Progress bars that suit a terminal and a log file."""

import sys

from tqdm.auto import tqdm


def progress_bar(**options) -> tqdm:
    """A tqdm bar with an ETA; in a file it writes a line every 30 seconds, not ten a second."""
    terminal = sys.stderr.isatty()
    return tqdm(**{"mininterval": 0.1 if terminal else 30, "dynamic_ncols": terminal, **options})
