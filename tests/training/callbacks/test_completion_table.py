"""The table of completions: which samples, and that no text of the model reaches the terminal as a
command."""

import io

import pytest
from rich.console import Console
from training_samples import ListSource, cpu_config, sorting_items, tiny_model

from ludic.errors import ConfigError
from ludic.training import CompletionTable, SAWItem, Trainer, make_sft
from ludic.training.callbacks.completion_table import make_table, spread


def sample(text, reward, **meta):
    return SAWItem([1, 2], [1, 1], [0, 1], reward - 0.5, {"prev_obs": "2+2=", "action": text, "total_reward": reward, **meta})


def shown(*items):
    out = io.StringIO()
    Console(file=out, width=100, force_terminal=False).print(make_table(items, "Completions of step 3"))
    return out.getvalue()


def test_a_row_has_prompt_completion_reward_advantage_and_tokens():
    text = shown(sample("4", 1.0, completion_length=2))
    assert "Completions of step 3" in text
    [row] = [line for line in text.splitlines() if "2+2=" in line]
    assert row.split() == ["│", "2+2=", "│", "4", "│", "1", "│", "+0.5", "│", "2", "│"]


def test_control_characters_and_markup_are_shown_as_they_are():
    text = shown(sample("\x1b[2J\x1b]0;title\x07[red]x[/] \u202eabc", 0.0))
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert [shown for shown in ("\\x1b[2J", "[red]x[/]") if shown not in text] == []


def test_items_are_spread_from_the_best_reward_to_the_worst():
    items = [sample("x", reward) for reward in (1.0, 0.0, 0.5, 0.25, 0.0)]
    assert [item.meta["total_reward"] for item in spread(items, 3)] == [1.0, 0.25, 0.0]
    assert [item.meta["total_reward"] for item in spread(items, 1)] == [1.0]
    assert len(spread(items, 9)) == 5


def test_every_nth_batch_is_shown_and_samples_without_text_are_not():
    out = io.StringIO()
    items = sorting_items(4)
    for item in items[:2]:
        item.meta["action"] = "123"
    table = CompletionTable(every=2, rows=8, console=Console(file=out, width=100))
    cfg = cpu_config()
    Trainer(model=tiny_model(), algo=make_sft(), batch_source=ListSource(items), cfg=cfg, callbacks=[table]).train_sync(3)
    assert out.getvalue().count("Completions of step") == 1
    assert out.getvalue().count("123") == 2
    Trainer(model=tiny_model(), algo=make_sft(), batch_source=ListSource(items[2:]), cfg=cfg, callbacks=[table]).train_sync(2)
    assert out.getvalue().count("Completions of step") == 1
    with pytest.raises(ConfigError, match=r"every \(0\)"):
        CompletionTable(every=0)
