"""The settings of actors and their queue: what is refused, and what follows from them."""

import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from ludic.errors import ConfigError
from ludic.recipes.actors import check_actors, count_prompts_per_entry, uses_queue
from ludic.recipes.compose import compose
from ludic.recipes.processes import check_url, find_queue


def recipe_of(*settings: str):
    return compose(["sort", *settings])


RECIPE = recipe_of()


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (["place.actors=-1"], r"place.actors \(-1\) must be at least 0"),
        (["place.actors=1", "place.restarts=-1"], r"place.restarts \(-1\) must be at least 0"),
        (["place.actors=1", "queue.order=random"], r"queue.order \(random\) .*exact, arrival"),
        (["place.actors=1", "queue.prompts_per_entry=5"], r"prompts_per_entry \(5\) must be a divisor of rollout.prompts \(32\)"),
        (["place.actors=1", "queue.prompts_per_entry=0"], r"prompts_per_entry \(0\) must be at least 1"),
        (["place.actors=1", "queue.lease_s=0"], r"queue.lease_s \(0.0\) must be above 0"),
        (["place.actors=1", "queue.patience_s=-3"], r"queue.patience_s \(-3.0\) must be above 0"),
        (["place.actors=1", "queue.max_lag=3"], r"queue.max_lag \(3\) .* queue.order=exact; leave one"),
        (
            ["place.actors=1", "queue.order=arrival", "queue.max_lag=2", "inference.batches_ahead=2"],
            r"must be more than inference.batches_ahead \(2\)",
        ),
        (["queue.order=arrival"], r"queue.order \(arrival\) needs place.actors or queue.url"),
        (["queue.url=http://localhost"], "must begin with redis:// or rediss://"),
        (
            ["place.actors=1", "place.servers=1", "inference.batches_ahead=1"],
            r"inference.batches_ahead \(1\) must be 0 .* queue.order=arrival",
        ),
        (
            ["place.actors=1", "inference.url=http://h:8000", "inference.batches_ahead=2"],
            r"batches_ahead \(2\) must be 0 with servers, unless queue.order=arrival",
        ),
        (["place.actors=1", "inference=vllm"], "needs servers: set place.servers=N"),
    ],
)
def test_wrong_settings_are_refused_with_the_rule(settings: list[str], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        check_actors(recipe_of(*settings))


@pytest.mark.parametrize(
    "settings",
    [
        ["place.actors=1", "place.servers=1"],
        ["place.actors=1", "place.servers=1", "inference.batches_ahead=1", "queue.order=arrival"],
        ["place.servers=1", "inference.batches_ahead=1"],
        ["place.actors=1", "inference.batches_ahead=1"],
    ],
)
def test_servers_that_have_the_version_that_is_asked_for_are_accepted(settings: list[str]) -> None:
    check_actors(recipe_of(*settings))


def test_a_password_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="LUDIC_QUEUE_URL") as caught:
        check_actors(recipe_of("queue.url='rediss://user:secret@host:6379/0'"))
    assert "rediss://***@host:6379/0" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h/0?password=hunter2", r"redis://h/0"),
        ("rediss://h?db=1&ssl_password=hunter2", r"rediss://h"),
        ("redis://:/hunter2@host", r"redis://***@host"),
        ("redis://:a?hunter2@host", r"redis://***@host"),
        ("redis://:a#hunter2@host", r"redis://***@host"),
        ("redis://:hunter2@host/0?ssl_password=hunter2", r"redis://***@host/0"),
        ("me:hunter2@host:6379", r"***@host:6379"),
        ("redis://:hunter2@[host", r"redis://***@[host"),
    ],
)
def test_a_password_is_refused_wherever_it_stands_and_not_shown(url: str, shown: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"queue.url ({shown}) ")) as caught:
        check_url(url)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("url", ["redis://h:6379/0", "rediss://h?ssl_ca_certs=/a/ca.pem&db=2", "redis://user@h", "a@b.sqlite"])
def test_an_address_without_a_password_is_accepted(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize("address", ["queuehost:6379", ":hunter2@queuehost:6379"])
def test_a_variable_that_is_no_address_is_named_and_not_shown(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDIC_QUEUE_URL", address)
    with pytest.raises(ConfigError, match=r"LUDIC_QUEUE_URL .* must begin with redis:// or rediss://") as caught:
        find_queue(recipe_of().queue, Path("/runs/a"))
    assert address not in str(caught.value)
    with pytest.raises(ConfigError, match="LUDIC_QUEUE_URL"):  # before a run begins
        check_actors(recipe_of("place.actors=1"))
    check_actors(recipe_of())  # a run without actors has no queue


def test_actors_or_an_address_make_a_queue() -> None:
    assert not uses_queue(recipe_of())
    for settings in (["place.actors=1"], ["queue.url=redis://host:6379/0"], ["queue.url=here.sqlite"]):
        recipe = recipe_of(*settings)
        check_actors(recipe)
        assert uses_queue(recipe)


def test_the_queue_is_a_file_of_the_run_unless_there_is_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("/runs/a")
    assert find_queue(recipe_of().queue, folder) == "/runs/a/queue.sqlite"
    assert find_queue(recipe_of("queue.url=other.sqlite").queue, folder) == "/runs/a/other.sqlite"
    assert find_queue(recipe_of("queue.url=redis://host").queue, folder) == "redis://host"
    monkeypatch.setenv("LUDIC_QUEUE_URL", "rediss://user:secret@host")
    assert find_queue(recipe_of("queue.url=redis://host").queue, folder) == "rediss://user:secret@host"
    monkeypatch.setenv("LUDIC_QUEUE_URL", "/fast/disk.sqlite")
    assert find_queue(recipe_of().queue, folder) == "/fast/disk.sqlite"


@pytest.mark.parametrize(("prompts", "per_entry"), [(32, 8), (10, 2), (3, 1), (1, 1), (4, 1), (5, 1), (12, 3), (9, 3)])
def test_an_entry_has_at_most_a_quarter_of_a_batch(prompts: int, per_entry: int) -> None:
    assert count_prompts_per_entry(recipe_of(f"rollout.prompts={prompts}")) == per_entry


@given(st.integers(1, 4096))
def test_entries_divide_a_batch(prompts: int) -> None:
    RECIPE.rollout.prompts = prompts
    per_entry = count_prompts_per_entry(RECIPE)
    assert prompts % per_entry == 0
    assert per_entry <= -(-prompts // 4)
