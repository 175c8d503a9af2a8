"""The frontier as a picture: overhead over budget, a line per policy, the bound below, into an SVG or PNG file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memfit.errors import BadOption
from memfit.report.frontier import AUTO, Frontier

SUFFIXES = (".svg", ".png")
# Up to this overhead the axis is linear, so that a plan that costs nothing has a place; beyond, each decade is as high.
_LINEAR_PERCENT = 1.0
_TICKS_PERCENT = (0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
# What a policy does is its colour, which policy it is its marker: fourteen hues cannot be told apart.
_KINDS = {
    "all": ("black", (AUTO,)),
    "keep": ("#7f7f7f", ("keep",)),
    "recompute": ("#1f77b4", ("sqrt", "checkpoint-search", "checkpoint-search-peak", "rotor")),
    "offload": ("#d9822b", ("vdnn-all", "vdnn-conv", "vdnn-dyn", "overlap", "overlap-on-demand")),
    "offload, planned": ("#8c564b", ("offload-greedy", "offload-dp")),
    "encode": ("#2ca02c", ("gist-lossless",)),
}
_MARKERS = "osD^v"
_OTHER = "#9467bd"


def check_plot_file(path: Path) -> None:
    """Raise if no picture could be written there: known before minutes are spent on what is in it."""
    if path.suffix.lower() not in SUFFIXES:
        raise BadOption(f"--plot {path}: name a file that ends in {' or '.join(SUFFIXES)}")
    if not path.resolve().parent.is_dir():
        raise BadOption(f"--plot {path}: there is no folder {path.resolve().parent}")
    if path.exists() and not path.is_file():
        raise BadOption(f"--plot {path}: is there, and is no file")
    _matplotlib()


def plot(found: Frontier, path: Path, *, title: str, subtitle: str) -> None:
    """Draw the frontier into that file; plans that do not fit are left out."""
    figure_class = _matplotlib()
    figure = figure_class(figsize=(10.5, 6.2), layout="constrained")
    axes = figure.add_subplot()
    nowhere = [policy for policy in found.policies if not _draw_policy(axes, found, policy)]
    _draw_bound(axes, found)
    if nowhere:
        axes.plot([], [], linestyle="none", label="\n  ".join(("fits nowhere:", *nowhere)))
    axes.set_yscale("symlog", linthresh=_LINEAR_PERCENT, linscale=0.8)
    highest = max((100 * (p.overhead or 0) for p in found.points if p.fits), default=1.0)
    ticks = [tick for tick in _TICKS_PERCENT if tick <= 1.6 * max(highest, 1.0)]
    axes.set_yticks(ticks, [f"{tick:g} %" for tick in ticks])
    axes.minorticks_off()
    # Codes can be faster than what keep does: room for a little below zero, where there is anything.
    lowest = min((100 * (limit.lower_bound_overhead or 0) for limit in found.limits), default=0.0)
    axes.set_ylim(min(1.2 * lowest, -0.05), max(1.3 * highest, 1.0))
    axes.set_xlabel("budget for activations, of what keeping everything needs")
    axes.set_ylabel("step time over keeping everything")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    _add_bytes(axes, found)
    figure.suptitle(title, x=0.012, ha="left", fontsize=12)
    axes.set_title(subtitle, fontsize=8.5, loc="left", color="#555555")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles, labels, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    try:
        figure.savefig(path, dpi=140)
    except OSError as error:
        raise BadOption(f"--plot {path}: cannot be written: {error.strerror}") from error


def _draw_policy(axes: Any, found: Frontier, policy: str) -> bool:
    """Draw its line, or say that it has none."""
    share = {limit.budget_bytes: 100 * limit.share for limit in found.limits}
    points = [(share[p.budget_bytes], 100 * p.overhead) for p in found.of(policy) if p.fits and p.overhead is not None]
    if not points:
        return False
    color, marker = _look(policy)
    width, height = (2.6, 5) if policy == AUTO else (1.1, 2)
    axes.plot(
        *zip(*points, strict=True),
        color=color,
        linewidth=width,
        marker=marker,
        markersize=5,
        label=policy,
        zorder=height,
    )
    return True


def _draw_bound(axes: Any, found: Frontier) -> None:
    """What is proven at one budget holds for every smaller one: so the line goes in steps."""
    known = [(100 * x.share, 100 * x.lower_bound_overhead) for x in found.limits if x.lower_bound_overhead is not None]
    if known:
        shares, bounds = zip(*known, strict=True)
        label = "bound: no plan is below"
        axes.step(shares, bounds, "--.", where="pre", color="#c00000", linewidth=1.4, label=label, zorder=6)
        below = min(*bounds, 0.0) - 100
        axes.fill_between(shares, bounds, below, step="pre", color="#c00000", alpha=0.07, linewidth=0)
    impossible = [100 * limit.share for limit in found.limits if limit.certificate]
    if impossible:
        axes.axvspan(
            min(impossible) - 2, max(impossible), color="#555555", alpha=0.15, linewidth=0, label="proven: no plan fits"
        )


def _look(policy: str) -> tuple[str, str]:
    for color, names in _KINDS.values():
        if policy in names:
            return color, _MARKERS[names.index(policy)]
    return _OTHER, "h"


def _add_bytes(axes: Any, found: Frontier) -> None:
    """A second scale on top: the same budgets in GiB, all included."""
    fixed, activations = found.fixed_bytes / 2**30, max(found.keep_activation_bytes, 1) / 2**30 / 100
    top = axes.secondary_xaxis(
        "top", functions=(lambda x: fixed + x * activations, lambda gib: (gib - fixed) / activations)
    )
    top.set_xlabel("budget in all, GiB", fontsize=9)


def _matplotlib() -> Any:
    """The class of figures that draw without a display; matplotlib is imported only where something is drawn."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BadOption(
            f"--plot needs matplotlib, which cannot be imported: {error}. Install memfit[cli], or leave --plot out: "
            "--json has every figure"
        ) from None

    def figure(**options: Any) -> Any:
        made = Figure(**options)
        FigureCanvasAgg(made)
        return made

    return figure
