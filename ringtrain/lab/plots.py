"""Empty plots and writing them as PNG."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringtrain.errors import MissingDependency


def canvas(title: str, x: str, y: str, log: bool = True) -> tuple[Any, Callable[[Path], None]]:
    """Creates an empty plot with labeled axes.

    Returns:
        matplotlib's axes, and a function that writes the plot as PNG.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependency("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel=x, ylabel=y)
    if log:
        axes.set(xscale="log", yscale="log")
    axes.set_title(title, fontsize=9)

    def write_png(path: Path) -> None:
        axes.legend(fontsize=8)
        FigureCanvasAgg(figure).print_png(path)

    return axes, write_png
