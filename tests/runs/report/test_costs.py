"""The line of tokens in the report of a run."""

import pytest

from ludic.runs.report.summary import format_padding, sum_padding

TOKENS = {
    "perf/real_tokens": 3072.0,
    "perf/padded_tokens": 3072.0,
    "perf/padded_tokens_greedy": 10_240.0,
    "perf/padded_tokens_unpacked": 12_288.0,
}


@pytest.mark.parametrize(
    ("shared", "said"),
    [
        (0.0, "3,072 tokens computed for 3,072 real ones; greedy"),
        (7168.0, "for 3,072 real ones (7,168 more, of beginnings that samples share, were computed once); greedy"),
    ],
)
def test_shared_tokens_are_named_where_there_are_any(shared, said):
    padding = sum_padding([{**TOKENS, "perf/shared_tokens": shared}])
    assert said in format_padding(padding)
    assert "(70.0% saved)" in format_padding(padding)


def test_the_summary_of_an_older_run_is_printed():
    padding = sum_padding([TOKENS])
    del padding["shared_tokens"]
    assert "for 3,072 real ones; greedy" in format_padding(padding)


def test_a_run_without_training_tokens_says_so():
    assert "no training tokens" in format_padding(sum_padding([]))
