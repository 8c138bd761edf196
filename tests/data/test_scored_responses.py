"""Rows with two scored responses as preferences."""

import logging
import re

import pytest

from ludic.data import load_data
from ludic.data.dataset import convert_scores, has_scored_responses
from ludic.data.formats import Row
from ludic.data.sources import Table
from ludic.errors import DataError


def preferences(*rows: Row):
    return convert_scores(Table("shp.jsonl", "line", list(rows), [2 * number + 1 for number in range(len(rows))]))


def row(**changes):
    return {"prompt": "why?", "response_a": "so", "response_b": "thus", "score_a": 3, "score_b": 12.5, **changes}


def test_the_response_with_the_higher_score_is_chosen_and_all_columns_are_kept():
    [preference] = preferences(row(domain="x")).rows
    assert (preference["prompt"], preference["chosen"], preference["rejected"]) == ("why?", "thus", "so")
    assert preference["domain"] == "x"
    [preference] = preferences(row(score_a=13)).rows
    assert (preference["chosen"], preference["rejected"]) == ("so", "thus")


def test_rows_with_equal_scores_are_left_out_and_the_others_keep_their_order(caplog):
    with caplog.at_level(logging.WARNING):
        table = preferences(row(score_a=12.5), row())
    assert len(table.rows) == 1
    assert table.where(0) == "shp.jsonl, line 3"
    assert re.search("left out 1 rows .*equal", caplog.text)
    with pytest.raises(DataError, match="equal in every row"):
        preferences(row(score_a=12.5))


def test_without_scores_the_label_says_which_is_better():
    plain = {"history": "why?", "human_ref_A": "so", "human_ref_B": "thus"}
    assert [preference["chosen"] for preference in preferences({**plain, "labels": 1}, {**plain, "labels": 0}).rows] == [
        "so",
        "thus",
    ]
    with pytest.raises(DataError, match=r"shp.jsonl, line 1: .*label \(None\) must be 1"):
        preferences(plain)


@pytest.mark.parametrize("score", ["high", None, float("nan"), True])
def test_the_error_of_scores_that_are_not_numbers_names_them(score):
    with pytest.raises(DataError, match=r"shp.jsonl, line 1: .*scores .*two numbers"):
        preferences(row(score_a=score))


def test_only_rows_with_two_unranked_responses_are_recognised():
    assert has_scored_responses(row())
    assert has_scored_responses({"human_ref_A": 1, "human_ref_B": 1})
    assert not has_scored_responses({"prompt": 1, "response_a": 1})
    assert not has_scored_responses({**row(), "chosen": "x", "rejected": "y"})


def test_a_file_of_scored_responses_has_the_kind_preference(tmp_path):
    path = tmp_path / "shp.jsonl"
    path.write_text('{"post": "why?", "a": "so", "b": "thus", "up_a": 1, "up_b": 2}\n')
    names = {"prompt": "post", "response_a": "a", "response_b": "b", "score_a": "up_a", "score_b": "up_b"}
    data = load_data(str(path), columns=names)
    assert data.kind == "preference"
    assert not data.conversational
    assert (data.rows[0]["prompt"], data.rows[0]["chosen"]) == ("why?", "thus")
