"""Pictures by matplotlib, without a window. It is imported when one is drawn, not when a command starts:
every rank of every command would wait for it, and few draw."""

from __future__ import annotations

from typing import Any


def new_figure(**options: Any) -> Any:
    """Return an empty `matplotlib.figure.Figure` with these options, whose layout makes room for all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(**options, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def picture_formats() -> set[str]:
    """Return the file name endings that the `savefig` of such a figure can write."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    return set(FigureCanvasAgg.get_supported_filetypes())
