"""One look for every picture of curves: a file is drawn inside `drawing` and is there whole or not at all.

Figures are made without pyplot, so nothing global is changed and no screen is needed.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.files import write_atomically

# Okabe & Ito (2008), told apart whatever one's colour vision, without the yellow that white paper swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", ":")  # more curves than colours
NOTE = "#666666"  # what is written into a picture, as against drawn
ASPECT = 0.6  # a panel's height over its width

STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.prop_cycle": cycler(linestyle=LINES) * cycler(color=COLOURS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.titlesize": 11,
    "font.size": 10,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "savefig.dpi": 144,
}


@contextmanager
def drawing(
    path: Path, rows: int = 1, columns: int = 1, panel_width: float = 5.6, aspect: float = ASPECT, **sharing: bool
) -> Iterator[tuple[Figure, np.ndarray]]:
    """Yield a figure and its panels [rows, columns] to draw on, and write the PNG when that is done."""
    with matplotlib.rc_context(STYLE):
        size = (panel_width * columns, panel_width * aspect * rows)
        figure = Figure(figsize=size, layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False, **sharing)
        file = io.BytesIO()
        # Grown to what stands beside the panels; without the version of matplotlib, which would change the bytes.
        figure.savefig(file, format="png", bbox_inches="tight", metadata={"Software": None})
    write_atomically(path, file.getvalue())


@contextmanager
def single_panel(
    path: Path, title: str, xlabel: str, ylabel: str, legend_title: str | None = None, **settings: object
) -> Iterator[Axes]:
    """Yield a panel to draw on; `settings` are those of `Axes.set`, and a legend stands beside curves with labels."""
    with drawing(path) as (_, panels):
        axes = panels.item()
        yield axes
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel, **settings)
        if axes.get_legend_handles_labels()[0]:
            legend_beside(panels, legend_title)


def legend_beside(panels: np.ndarray, title: str | None = None) -> None:
    """Write what the curves of the first panel are to the right of all panels, where no data can be."""
    handles, labels = panels.flat[0].get_legend_handles_labels()
    panels[0, -1].legend(handles, labels, title=title, loc="upper left", bbox_to_anchor=(1.01, 1.02), alignment="left")
