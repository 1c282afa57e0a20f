"""Pictures of what was measured, as PNG and SVG; drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.contest_report import Contest
from benchmarks.contest_ways import OTHERS, OURS, SCENARIOS, TABLEAU

if TYPE_CHECKING:
    from benchmarks.growth import Growth

_COLOURS = {OURS: "#1f77b4", TABLEAU: "#e8762d", OTHERS: "#7f7f7f"}


def draw_contest(contest: Contest, folder: Path) -> list[Path]:
    """Bars by way: its own seconds, and paler what the server did itself."""
    from matplotlib.lines import Line2D

    shown = {
        scenario: rows for scenario in SCENARIOS if (rows := [row for row in contest.rows(scenario) if row.repetitions])
    }
    heights = [len(rows) + 1.5 for rows in shown.values()]
    figure, all_axes = _figure((10, 0.36 * sum(heights) + 1), rows=len(shown), heights=heights)
    for axes, (scenario, rows) in zip(all_axes, shown.items(), strict=True):
        places = range(len(rows), 0, -1)
        colours = [_COLOURS[row.way.family] for row in rows]
        axes.barh(places, [row.seconds for row in rows], color=colours)
        axes.barh(places, [row.server for row in rows], left=[row.seconds for row in rows], color=colours, alpha=0.35)
        axes.set_yticks(places, [row.way.title for row in rows])
        for place, row in zip(places, rows, strict=True):
            wrong = f", {row.orders:,} orders wrong" if row.orders else ""
            axes.text(row.total, place, f"  {row.total:,.1f} s{wrong}", va="center", fontsize=8)
        axes.set_title(SCENARIOS[scenario], fontsize=9, loc="left")
        axes.margins(x=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    handles = [Line2D([], [], color=colour, linewidth=6, label=family) for family, colour in _COLOURS.items()]
    handles.append(Line2D([], [], color="black", alpha=0.25, linewidth=6, label="the server's own work"))
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=len(handles))
    figure.suptitle(
        f"{contest.asked['rows']:,} orders, {contest.asked['changed']:g} % of the keys changed", fontsize=10
    )
    all_axes[-1].set_xlabel("seconds until people see the change")
    return _save(figure, folder / "contest")


def draw_growth(growth: Growth, folder: Path) -> list[Path]:
    """Seconds by the size of the extract and by the size of the change, on logarithmic scales, with the fitted exponents."""
    figure, all_axes = _figure((11, 5), columns=2)
    for axes, (axis, shown) in zip(all_axes, (("rows", "rows of the extract"), ("keys", "changed keys")), strict=True):
        for name, points in growth.lines(axis).items():
            _line(axes, name, points, growth.fits(axis).get(name))
        axes.set(xscale="log", yscale="log", xlabel=shown, ylabel="seconds")
        axes.set_title(growth.title(axis), fontsize=9)
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3, which="both")
    return _save(figure, folder / "growth")


def _line(axes: Any, name: str, points: Mapping[int, float], fit: Any) -> None:
    exponent = f" (exponent {fit.exponent:.2f})" if fit else ""
    axes.plot(list(points), list(points.values()), marker="o", markersize=3, linewidth=1, label=f"{name}{exponent}")


def _figure(
    size: tuple[float, float], *, rows: int = 1, columns: int = 1, heights: Sequence[float] | None = None
) -> tuple[Any, list[Any]]:
    import matplotlib as mpl

    mpl.use("agg")
    # The same picture from the same numbers, byte for byte.
    mpl.rcParams["svg.hashsalt"] = "tir_dagster"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", gridspec_kw={"height_ratios": heights}
    )
    return figure, list(axes.flat)


def _save(figure: Any, stem: Path) -> list[Path]:
    from matplotlib import pyplot as plt

    files = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    figure.savefig(files[0], dpi=130, metadata={"Software": None})
    figure.savefig(files[1], metadata={"Date": None})
    plt.close(figure)
    return files
