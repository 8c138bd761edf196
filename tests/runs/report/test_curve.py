"""The reward curve as text and as a plot."""

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from ludic.runs.report.curve import draw_text_curve, running_mean, write_picture

rates = st.lists(st.floats(0, 1), min_size=1, max_size=200)


def test_a_rising_curve_is_drawn_from_its_values() -> None:
    # Four rows of a quarter each: 0 fills none, .25 one, .5 two and 1.0 all; .125 is half a cell of
    # the lowest row.
    lines = draw_text_curve([0.0, 0.125, 0.25, 0.5, 1.0], width=5, height=4)
    assert [line[7:] for line in lines[:4]] == ["    █", "    █", "   ██", " ▄███"]
    assert lines[0].startswith(" 1.00")
    assert lines[5].endswith("step 5")


@given(values=rates, width=st.integers(1, 80), height=st.integers(1, 12))
def test_every_line_has_the_width_of_the_chart(values: list[float], width: int, height: int) -> None:
    lines = draw_text_curve(values, width=width, height=height)
    assert len(lines) == height + 2
    assert {len(line) for line in lines[: height + 1]} == {7 + min(width, len(values))}


@given(values=rates)
def test_a_higher_reward_never_draws_a_lower_column(values: list[float]) -> None:
    def cells(curve: list[float]) -> int:
        return sum(" ▁▂▃▄▅▆▇█".index(cell) for line in draw_text_curve(curve, width=20)[:8] for cell in line[7:])

    assert cells([min(1.0, value + 0.2) for value in values]) >= cells(values)


def test_an_empty_curve_draws_nothing() -> None:
    assert draw_text_curve([]) == []


def test_a_running_mean_covers_the_available_values() -> None:
    assert running_mean([1.0, 3.0, 5.0, 7.0], window=2) == [1.0, 2.0, 4.0, 6.0]


@given(values=rates)
def test_a_running_mean_stays_within_the_values(values: list[float]) -> None:
    assert all(min(values) - 1e-9 <= mean <= max(values) + 1e-9 for mean in running_mean(values))


@pytest.mark.parametrize("values", [[0.2, 0.5, 0.9], [0.4]])
def test_the_plot_is_a_png(tmp_path: Path, values: list[float]) -> None:
    path = tmp_path / "reward.png"
    write_picture(path, {"reward": values}, marks={"held-out": (0.2, 0.9)}, title="sort")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert path.stat().st_size > 10_000


def test_the_axis_of_the_plot_fits_rates_or_values() -> None:
    from ludic.runs.report.curve import _find_range

    assert _find_range([]) == _find_range([0.2, 0.9]) == (0.0, 1.0)
    assert _find_range([-2.5, 0.3, 4.0]) == (-2.5, 4.0)
    assert _find_range([-5.0, -3.0]) == (-5.0, -3.0)
    assert _find_range([-3.0, -3.0]) == (-3.5, -2.5)


def test_negative_rewards_are_drawn_upwards_from_the_lowest() -> None:
    # Two rows from -4 to 0: -4 is the baseline, -3 half a cell, -2 one, -1 one and a half, 0 both.
    lines = draw_text_curve([-4.0, -3.0, -2.0, -1.0, 0.0], width=5, height=2)
    assert lines[:3] == [" 0.00 ┤   ▄█", "-2.00 ┤▁▄███", "-4.00 ┼─────"]
    assert draw_text_curve([-2.0] * 3, height=1)[0].endswith("┤▁▁▁")


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=50), height=st.integers(1, 9))
def test_no_column_with_a_reward_below_zero_is_blank(values: list[float], height: int) -> None:
    lines = draw_text_curve(values, height=height)
    assert len({line.index("┤") for line in lines[:height]}) == 1
    if min(values) < 0:
        assert " " not in lines[height - 1].partition("┤")[2]


def test_intermediate_evaluations_are_connected_with_first_and_last() -> None:
    from ludic.runs.report.curve import join_points

    points = join_points(
        {"accuracy": (0.25, 0.75), "reward": (0.0, 1.0)}, {"accuracy": [(0, 0.25), (2, 0.5), (4, 0.75)]}, steps=4
    )
    assert points == {"accuracy": [(0, 0.25), (2, 0.5), (4, 0.75)], "reward": [(0, 0.0), (4, 1.0)]}


def test_evaluations_without_first_and_last_are_drawn_at_their_steps() -> None:
    from ludic.runs.report.curve import join_points

    assert join_points({}, {"accuracy": [(3, 0.5), (7, 0.75)], "nothing": []}, steps=9) == {"accuracy": [(3, 0.5), (7, 0.75)]}
