"""Plots of preference scores."""

import numpy as np
import pytest

from ludic.errors import DataError
from ludic.eval.picture import _make_bin_edges, draw_margins, draw_reliability
from ludic.training import PreferenceMetrics


def metrics_of(count=500, **settings):
    draw = np.random.default_rng(0)
    better, worse = draw.normal(1.0, 1.0, count), draw.normal(0.0, 1.0, count)
    preferred = draw.random(count) < 1 / (1 + np.exp(worse - better))
    metrics = PreferenceMetrics(both_orders=True, **settings)
    metrics.update(np.where(preferred, better, worse), np.where(preferred, worse, better))
    return metrics


@pytest.mark.parametrize("draw", [draw_reliability, draw_margins])
def test_a_plot_is_written_and_depends_on_the_scores(tmp_path, draw):
    pictures = []
    for name, metrics in {"all": metrics_of(), "few": metrics_of(7)}.items():
        draw(tmp_path / f"{name}.png", metrics, title="reward model, seed 0")
        pictures.append((tmp_path / f"{name}.png").read_bytes())
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert pictures[0] != pictures[1]


@pytest.mark.parametrize("draw", [draw_reliability, draw_margins])
def test_an_empty_plot_is_refused(tmp_path, draw):
    with pytest.raises(DataError, match="no scores"):
        draw(tmp_path / "none.png", PreferenceMetrics(), title="")


@pytest.mark.parametrize("margins", [[0.0], [0.0, 3.0], [-2.0, 1.0], [1e-3, 5e3]])
def test_no_histogram_bin_mixes_right_and_wrong_pairs(margins):
    edges = _make_bin_edges(np.array(margins))
    assert 0.0 in edges
    assert edges[0] <= min(margins)
    assert max(margins) <= edges[-1] * (1 + 1e-12)
