"""The pictures of the report, as PNG data: how the scales went, what underflowed, how long a batch took."""

import io
import math
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from lightning_amp.callbacks.report_record import Points, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart by all common kinds of colour blindness (Okabe and Ito); the marks' red is in none of the lines.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#7F6000")
_CROSS: dict[str, Any] = {"marker": "x", "markersize": 6, "markeredgewidth": 1.6}
_RED, _INK = "#C1121F", "#3A3F45"
_BINS = 40


def scales_picture(record: Record) -> bytes:
    """Draws each loss's scale over the batches, one below the other, overflows marked.

    Args:
        record: Has a scale for one loss at least.
    """
    from matplotlib.lines import Line2D

    names = list(record.scales)
    figure = _figure(0.8 + 1.35 * len(names))
    panels = figure.subplots(len(names), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for i, (name, axes) in enumerate(zip(names, panels, strict=True)):
        points = [*record.scales[name], (record.batches, record.scales[name][-1][1])]
        colour = _COLOURS[i % len(_COLOURS)]
        axes.step(*_columns(points), where="post", color=colour, linewidth=2)
        skips = record.overflows.get(name, [])
        axes.plot(*_columns(skips), color=_RED, linestyle="", zorder=3, **_CROSS)
        account = record.accounts[name]
        axes.set_title(
            f"{account.overflows} of {account.attempts} backward passes overflowed", loc="right", fontsize=9, color=_INK
        )
        axes.set_title(name, loc="left", fontsize=10, fontweight="bold", color=colour)
        axes.set_ylabel("loss scale")
        _tidy(axes)
    every = [scale for points in (*record.scales.values(), *record.overflows.values()) for _, scale in points]
    _octaves(panels[0], min(every), max(every))
    panels[-1].set_xlabel("batch")
    _all_batches(panels[-1], record.batches)
    handles = [
        Line2D([], [], color=_INK, linewidth=2, label="scale"),
        Line2D([], [], color=_RED, linestyle="", label="overflow: the step was skipped", **_CROSS),
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    return _png(figure)


def course_picture(record: Record) -> bytes:
    """Draws the share of zero gradient elements and the time of a batch, side by side.

    Args:
        record: Has a batch at least.
    """
    figure = _figure(2.7)
    left, right = figure.subplots(1, 2)
    for i, (name, points) in enumerate(record.zeros.items()):
        batches, shares = _columns(points)
        left.plot(
            batches, [100 * s for s in shares], ".-", color=_COLOURS[i % len(_COLOURS)], label=name, linewidth=1.6
        )
    left.set_title("Gradient elements that are zero", loc="left", fontsize=10, fontweight="bold", color=_INK)
    left.set_ylabel("share (%)")
    highest = max((100 * share for points in record.zeros.values() for _, share in points), default=0.0)
    top = max(0.1, highest)
    left.set_ylim(-0.04 * top, 1.3 * top)
    if record.zeros:
        left.legend(loc="upper right", frameon=False, ncols=2, fontsize=8)
    bins = _binned([1e3 * s for s in record.seconds], record.batches)
    right.fill_between(bins[0], bins[1], bins[3], color=_COLOURS[0], alpha=0.25, linewidth=0, label="nine in ten")
    right.plot(bins[0], bins[2], color=_COLOURS[0], linewidth=1.6, label="median")
    right.set_title("Time of a batch", loc="left", fontsize=10, fontweight="bold", color=_INK)
    right.set_ylabel("milliseconds")
    # A pause of the machine must not flatten all the rest.
    right.set_ylim(0, 1.3 * min(max(bins[3]), 4 * median(bins[2])))
    right.legend(loc="upper right", frameon=False, ncols=2, fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("batch")
        _all_batches(axes, record.batches)
        _tidy(axes)
    return _png(figure)


def _figure(height: float) -> "Figure":
    from matplotlib.figure import Figure  # no pyplot: it would keep the figure, and choose a backend

    return Figure(figsize=(9.5, height), layout="constrained")


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [batch for batch, _ in points], [value for _, value in points]


def _tidy(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#B0B5BA")
    axes.tick_params(colors=_INK, labelsize=9)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)
    axes.grid(alpha=0.25)


def _all_batches(axes: "Axes", last: int) -> None:
    axes.set_xlim(-0.008 * last, 1.008 * max(last, 2))


def _octaves(axes: "Axes", low: float, high: float) -> None:
    """Has the axis count in powers of two, five ticks at the most."""
    axes.set_yscale("log", base=2)
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    stride = max(1, math.ceil((last - first) / 4))
    ticks = range(first, last + 1, stride)
    axes.set_yticks([2.0**n for n in ticks], [f"$2^{{{n}}}$" for n in ticks])
    axes.set_ylim(2.0 ** (first - 0.6), 2.0 ** (last + 0.6))
    axes.minorticks_off()


def _binned(values: Sequence[float], last: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """Returns, for neighbouring values taken together: the middle batch, the 5th percentile, the median, the 95th."""
    width = max(1, math.ceil(len(values) / _BINS))
    columns: tuple[list[float], list[float], list[float], list[float]] = ([], [], [], [])
    for start in range(0, len(values), width):
        part = sorted(values[start : start + width])
        columns[0].append(last - len(values) + start + (len(part) + 1) / 2)
        for column, share in zip(columns[1:], (0.05, 0.5, 0.95), strict=True):
            column.append(part[min(len(part) - 1, int(share * len(part)))])
    return columns


def _png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
