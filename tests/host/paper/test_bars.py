"""Bars of printed figures."""

import pytest
from matplotlib.figure import Figure

from nearstep.paper.bars import bars
from nearstep.paper.rows import Row, row

ROWS = [
    row("a", "V", "x", 1.5, 1.25, ours=1.75),
    row("b", "V", "x", 2.0, 3.0, kind="fitted"),
    row("c", "V", "x", 4.0, 2.0, relation="<"),
]


def test_a_figure_of_the_paper_is_beside_those_from_here() -> None:
    axes = Figure().subplots()
    bars(axes, ROWS)
    found = [[bar.get_width() for bar in each] for each in axes.containers]
    assert found == [[1.5, 2.0, 4.0], [1.25, 3.0, 2.0], [1.75, 0.0, 0.0]]
    hatched = [[bar.get_hatch() for bar in each] for each in axes.containers]
    assert hatched == [[None] * 3, *[["", "////", ""]] * 2]
    assert [each.get_text() for each in axes.get_yticklabels()] == ["a (V)", "b (V)", "c (V)"]
    texts = {each.get_text() for each in axes.texts}
    assert {"1.50 x", "1.25 x, modelled", "1.75 x", "< 4.00 x", "3.00 x, fitted"} <= texts


@pytest.mark.parametrize(
    ("paper", "scale"),
    [((1.0, 30.0), "linear"), ((1.0, 300.0), "log"), ((-1.0, 1.0, 300.0), "linear")],
)
def test_figures_of_many_sizes_have_a_logarithmic_axis(
    paper: tuple[float, ...], scale: str
) -> None:
    rows: list[Row] = [row(str(each), "V", "s", each, each) for each in paper]
    axes = Figure().subplots()
    bars(axes, rows)
    assert axes.get_xscale() == scale
