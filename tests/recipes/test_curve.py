"""The reward curve as text and as a picture."""

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from ludic.recipes.curve import running_mean, text_curve, write_picture

rates = st.lists(st.floats(0, 1), min_size=1, max_size=200)


def test_a_rising_curve_is_drawn_from_its_values() -> None:
    # Four rows, each a quarter: 0 fills none, .25 one, .5 two and 1.0 all; .125 is half a cell of the lowest row.
    lines = text_curve([0.0, 0.125, 0.25, 0.5, 1.0], width=5, height=4)
    assert [line[7:] for line in lines[:4]] == ["    █", "    █", "   ██", " ▄███"]
    assert lines[0].startswith(" 1.00")
    assert lines[5].endswith("step 5")


@given(values=rates, width=st.integers(1, 80), height=st.integers(1, 12))
def test_every_line_has_the_width_of_the_chart(values: list[float], width: int, height: int) -> None:
    lines = text_curve(values, width=width, height=height)
    assert len(lines) == height + 2
    assert {len(line) for line in lines[: height + 1]} == {7 + min(width, len(values))}


@given(values=rates)
def test_more_reward_never_draws_less(values: list[float]) -> None:
    def cells(curve: list[float]) -> int:
        return sum(" ▁▂▃▄▅▆▇█".index(cell) for line in text_curve(curve, width=20)[:8] for cell in line[7:])

    assert cells([min(1.0, value + 0.2) for value in values]) >= cells(values)


def test_nothing_is_drawn_of_nothing() -> None:
    assert text_curve([]) == []


def test_a_running_mean_is_over_what_there_is() -> None:
    assert running_mean([1.0, 3.0, 5.0, 7.0], window=2) == [1.0, 2.0, 4.0, 6.0]


@given(values=rates)
def test_a_running_mean_stays_within_the_values(values: list[float]) -> None:
    assert all(min(values) - 1e-9 <= mean <= max(values) + 1e-9 for mean in running_mean(values))


@pytest.mark.parametrize("values", [[0.2, 0.5, 0.9], [0.4]])
def test_the_picture_is_a_png(tmp_path: Path, values: list[float]) -> None:
    path = tmp_path / "reward.png"
    write_picture(path, {"reward": values}, marks={"held-out": (0.2, 0.9)}, title="sort")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert path.stat().st_size > 10_000


def test_the_picture_has_room_for_every_reward_and_for_rates_from_0_to_1() -> None:
    from ludic.recipes.curve import _range

    assert _range([]) == _range([0.2, 0.9]) == (0.0, 1.0)
    assert _range([-2.5, 0.3, 4.0]) == (-2.5, 4.0)
