import json

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ludic.errors import DataError
from ludic.training.info_seed import seed_heatmap, seed_metrics, write_seed_heatmap

H = [[1.0, 0.2], [0.8, 0.5], [-0.3, 1.0], [0.1, 0.9], [0.6, -0.4]]
SEEDS = [1, 1, 2, 2, -1]


def test_the_worked_example():
    """Means (.9, .35) and (-.1, .95): distance sqrt(1 + .36) = 1.16619038."""
    assert seed_metrics(H, SEEDS, head=[[0.5, -0.2], [-0.3, 0.4]]) == pytest.approx({"pred_acc": 1.0, "diversity_l2": 1.36**0.5})
    heatmap = seed_heatmap(H, SEEDS)
    assert heatmap["labels"] == [1, 2]
    assert np.allclose(heatmap["matrix"], [[1.0, 0.26288807489946237], [0.26288807489946237, 1.0]], atol=1e-12)


def test_without_a_classifier_a_row_is_predicted_by_the_direction_of_the_other_rows():
    """Row 3 lies among the rows of seed 1, and is the only one to be taken for another's."""
    rows = [[1, 0], [0.9, 0.1], [1, 0.2], [0.95, 0.0], [0, 1], [0.1, 1]]
    assert seed_metrics(rows, [1, 1, 1, 2, 2, 2])["pred_acc"] == pytest.approx(5 / 6)


@given(st.integers(0, 999))
def test_seeds_that_point_in_their_own_directions_are_always_told_apart(draw):
    rng = np.random.default_rng(draw)
    seeds = np.repeat([1, 2, 3], 4)
    rows = np.eye(3)[seeds - 1] * rng.uniform(0.5, 2.0, size=(12, 1)) + 0.05 * rng.normal(size=(12, 3))
    assert seed_metrics(rows, seeds)["pred_acc"] == 1.0


def test_what_is_not_defined_is_left_out():
    assert seed_metrics(H, [-1, 0, -1, 0, 0]) == {}
    assert seed_metrics(H, [1, 1, 0, 0, 0]) == {}
    assert seed_heatmap(H, [0] * 5) == {"labels": [], "matrix": []}
    with pytest.raises(DataError, match=r"pooled \(5, 2\) .*\[N, D\] .*seed_ids \(4,\) \[N\]"):
        seed_metrics(H, [1, 1, 2, 2])


def test_a_heatmap_is_written_as_json(tmp_path):
    path = write_seed_heatmap(tmp_path / "maps", 25, H, SEEDS)
    assert path.name == "seed_heatmap_step25.json"
    assert json.loads(path.read_text()) == {"step": 25, **seed_heatmap(H, SEEDS)}
