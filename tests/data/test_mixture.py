"""Mixtures of data sets: how many rows of each, in which order, and where an error points."""

import json
import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from ludic.data import DataMixture, MixtureEntry, load_mixture
from ludic.errors import ConfigError, DataError
from ludic.recipes.build import build_episodic_task
from ludic.recipes.compose import compose, to_yaml
from ludic.tasks.data_task import DataTask

REWARD = f"{__name__}:one"


def one(completions, **columns):
    """The tests name it as REWARD."""
    return [1.0] * len(completions)


def write(path, count, **columns):
    path.write_text("".join(json.dumps({"prompt": f"{path.stem}{n}", "answer": n, **columns}) + "\n" for n in range(count)))
    return str(path)


@pytest.mark.parametrize(
    ("weight", "taken"), [(1, [1] * 4), (0.5, [0, 0, 1, 1]), (2.5, [2, 2, 3, 3]), (3, [3] * 4), (0.3, [0, 0, 0, 1])]
)
def test_a_weight_is_a_share_or_a_number_of_copies(weight, taken):
    counts = Counter(MixtureEntry("a.jsonl", weight=weight).draw(4, seed=0))
    assert sorted(counts[index] for index in range(4)) == taken


def test_a_share_is_that_of_the_decimal_and_not_of_the_nearest_float():
    assert 0.29 * 100 < 29
    assert len(MixtureEntry("a", weight=0.29).draw(100, seed=0)) == 29


@given(weight=st.integers(1, 400).map(lambda n: n / 100), count=st.integers(1, 50), seed=st.integers(0, 5))
def test_copies_of_any_two_rows_differ_by_one_at_most(weight, count, seed):
    drawn = MixtureEntry("a", weight=weight).draw(count, seed)
    counts = [Counter(drawn)[index] for index in range(count)]
    assert len(drawn) == math.floor(Fraction(str(weight)) * count)
    assert max(counts) - min(counts) <= 1
    assert drawn == MixtureEntry("a", weight=weight).draw(count, seed)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(seed=st.integers(0, 99))
def test_rows_of_all_sources_are_shuffled_and_keep_their_places(tmp_path, seed):
    sources = [write(tmp_path / "a.jsonl", 6), write(tmp_path / "b.jsonl", 4, level=3)]
    mixture = DataMixture([MixtureEntry(sources[0], weight=0.5), MixtureEntry(sources[1], weight=2)], seed)
    mixed = load_mixture(mixture)
    assert Counter(row["prompt"][0] for row in mixed) == {"a": 3, "b": 8}
    assert mixed.columns == ["prompt", "answer", "level"]
    for index, row in enumerate(mixed):
        assert mixed.where(index) == f"{tmp_path / row['prompt'][0]}.jsonl, line {row['answer'] + 1}"
        assert row["level"] == (3 if row["prompt"][0] == "b" else None)
    assert load_mixture(mixture).rows == mixed.rows


def test_the_seed_decides_the_order(tmp_path):
    source = write(tmp_path / "a.jsonl", 20)
    orders = [[row["answer"] for row in load_mixture(DataMixture([MixtureEntry(source)], seed))] for seed in (0, 1)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20))


def test_declared_columns_are_kept_with_the_prompt(tmp_path):
    source = write(tmp_path / "a.jsonl", 3, level=1)
    mixed = load_mixture(DataMixture([MixtureEntry(source, columns=["answer"])]), columns={"prompt": ["prompt"]})
    assert mixed.columns == ["prompt", "answer"]
    with pytest.raises(ConfigError, match=r"a.jsonl has no column gold; .*prompt, answer, level"):
        load_mixture(DataMixture([MixtureEntry(source, columns=["gold"])]))


def test_a_recipe_trains_on_a_mixture_and_reads_its_own_config_again(tmp_path):
    sources = [write(tmp_path / "a.jsonl", 20), write(tmp_path / "b.jsonl", 20)]
    file = tmp_path / "mix.yaml"
    file.write_text(
        f"data:\n  datasets: [{{id: {sources[0]}}}, {{id: {sources[1]}, weight: 0.5}}]\n  test_split_size: 0.2\nreward: {REWARD}\n"
        "model: none\n"
    )
    recipe = compose([str(file)])
    task = build_episodic_task(recipe)
    [held] = task.suites().values()
    assert len(held) == 6
    assert len(task.problem_list.training) == 24
    again = tmp_path / "config.yaml"
    again.write_text(to_yaml(recipe))
    assert compose([str(again)]).data == recipe.data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"datasets": []}, "at least one data set"),
        ({"dataset": []}, r"data .*'dataset'; did you mean datasets\?"),
        ({"datasets": "a.jsonl"}, r"data.datasets \('a.jsonl'\) must be a list"),
        ({}, r"data.datasets \(None\) must be a list"),
        ({"datasets": ["a.jsonl"]}, r"data.datasets\[0\] \('a.jsonl'\) must have keys"),
        ({"datasets": [{"weight": 1}]}, r"data.datasets\[0\] has no id"),
        ({"datasets": [{"id": "a", "wieght": 1}]}, r"data.datasets\[0\] .*'wieght'; did you mean weight"),
        ({"datasets": [{"id": "a", "weight": 0}]}, r"weight of a \(0\) .*above 0"),
        ({"datasets": [{"id": "a", "weight": True}]}, r"the weight of a \(True\)"),
        ({"datasets": [{"id": "a", "columns": "x"}]}, r"columns of a \('x'\) .*a list"),
        ({"datasets": [{"id": "a"}], "test_split_size": 1}, r"test_split_size \(1\) .*between 0 and 1"),
        (
            {"datasets": [{"id": "a", "columns": ["x"]}, {"id": "b", "columns": ["y"]}]},
            r"b has the columns \['y'\], a \['x'\]",
        ),
    ],
)
def test_a_wrong_description_is_refused(content, message):
    with pytest.raises(ConfigError, match=message):
        DataMixture.from_mapping(content)


def test_errors_name_the_source_and_its_row(tmp_path):
    source, chats = write(tmp_path / "a.jsonl", 3), tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"prompt": [{"role": "user", "content": "2+2?"}], "answer": 4}) + "\n")
    with pytest.raises(ConfigError, match=r"chats.jsonl are messages and of .*a.jsonl text"):
        load_mixture(DataMixture([MixtureEntry(source), MixtureEntry(str(chats))]))
    with pytest.raises(ConfigError, match=r"weight of .*a.jsonl \(0.1\) .*3 rows"):
        load_mixture(DataMixture([MixtureEntry(source, weight=0.1)]))
    broken = tmp_path / "b.jsonl"
    broken.write_text('{"prompt": "x", "answer": " "}\n')
    data = {"datasets": [{"id": source}, {"id": str(broken)}]}
    with pytest.raises(DataError, match=r"b.jsonl, line 1: .*answer is empty"):
        DataTask(data, "pure_accuracy_math")
    with pytest.raises(ConfigError, match=r"data \(\['a'\]\) must be a file"):
        DataTask(["a"], REWARD)
