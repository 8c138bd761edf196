"""Tasks of several turns: measured frequencies of teachers, demonstrations and rollouts token by
token, rates by hand, and whole runs."""

import asyncio
import json
import math
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.envs.key_value import KEYS
from ludic.envs.tictactoe import EMPTY, legal_moves, optimal_moves, play
from ludic.errors import ConfigError
from ludic.inference import ChatCompletionRequest, LocalChatClient, ReturnSpec, SamplingParams
from ludic.models.byte_tokenizer import make_byte_tokenizer, make_line_tokenizer
from ludic.recipes.compose import compose
from ludic.recipes.model import make_small_model
from ludic.runs.held_out import Evaluation, HeldOut
from ludic.runs.rollouts import TrainingRequests, make_engine
from ludic.tasks import Addition, DigitSort, EpisodicTask, TicTacToe, Tools, as_episodic
from ludic.tasks.demonstrations import DemonstrationSource
from ludic.training.types import SAWItem
from ludic.types import ChatResponse

TASKS: list[EpisodicTask] = [TicTacToe(), TicTacToe(format="chat"), Tools(), Tools(format="chat")]
CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def train(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["train", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    summary: dict[str, Any] = json.loads(result.stdout)
    return summary


# ---- tasks and teachers
# ------------------------------------------------------------------------------------------


def test_the_teacher_of_tic_tac_toe_plays_as_documented() -> None:
    """The dialogue has `X` or `O`, then the opponent's moves; the board is reconstructed from
    them."""
    results, kinds, moves = Counter[str](), Counter[str](), 0
    for game in TicTacToe().demonstrations(3_000, Random(0)):
        board, mark = EMPTY, game[0].observation[0]
        for turn in game:
            if turn.observation[-2] != ".":
                board = play(board, int(turn.observation[-2]) - 1)
            cell = int(turn.action) - 1
            moves += 1
            kinds["perfect"] += cell in optimal_moves(board)
            kinds["taken"] += cell not in legal_moves(board)
            if cell not in legal_moves(board):
                results["illegal"] += 1
                break
            board = play(board, cell)
        assert len(game) <= 5
        results[f"as {mark}"] += 1
    # 3 % of the moves name a taken cell, fewer on an empty board: X's first move, about one in
    # seven of both sides' moves.
    assert kinds["taken"] / moves == pytest.approx(0.026, abs=0.006)
    # Half of the moves are perfect by choice, and many random ones by chance.
    assert 0.6 < kinds["perfect"] / moves < 0.8
    assert results["as X"] / 3_000 == pytest.approx(0.5, abs=0.04)


def test_the_teacher_of_tic_tac_toe_has_its_documented_strength() -> None:
    """It wins or draws .735 of its games, as measured when it was designed."""
    task, rng, good = TicTacToe(), Random(1), 0
    for _ in range(2_000):
        env = task.make_env({"mark": rng.choice("XO"), "opponent": "random"})
        env.env_reset(seed=rng.getrandbits(32))
        over = False
        while not over:
            outcome = env.env_step(str(task._teacher_move(env.board, rng) + 1))  # type: ignore[attr-defined]
            over = outcome.terminated
        good += outcome.info["result"] in ("win", "draw")
    assert good / 2_000 == pytest.approx(0.735, abs=0.04)


def test_two_of_three_training_games_are_played_as_o_against_the_mixed_opponent() -> None:
    task, rng = TicTacToe(), Random(2)
    drawn = [task.draw(rng) for _ in range(6_000)]
    assert sum(game["mark"] == "O" for game in drawn) / 6_000 == pytest.approx(2 / 3, abs=0.03)
    assert {game["opponent"] for game in drawn} == {"mixed"}


def test_tic_tac_toe_is_evaluated_against_two_opponents_equally_on_both_sides() -> None:
    suites = TicTacToe().suites()
    assert list(suites) == ["random", "perfect"]
    for name, games in suites.items():
        assert {game["opponent"] for game in games} == {name}
        assert [game["mark"] for game in games[:4]] == ["X", "O", "X", "O"]


def test_the_teacher_of_the_tool_makes_the_documented_errors() -> None:
    kinds = Counter[str]()
    for episode in Tools().demonstrations(10_000, Random(0)):
        calls = [turn for turn in episode if turn.action[0] == "?"]
        answer = episode[-1].action
        assert answer[0] == "="
        assert len(calls) == len(episode) - 1
        if not calls:
            kinds["guess"] += 1
        elif len(calls) == 1:
            kinds["one call"] += 1
        elif calls[1].action[1] != calls[1].observation:
            kinds["wrong key"] += 1
            assert answer[1] == episode[-1].observation
        else:
            kinds["both keys"] += 1
            kinds["copied"] += answer[1] == episode[-1].observation
    # 16 % right, and 4.5 % with a random answer, which is right one time in ten. Standard errors
    # are at most .005.
    for kind, expected in {"guess": 0.62, "one call": 0.085, "wrong key": 0.09, "both keys": 0.205, "copied": 0.1645}.items():
        assert kinds[kind] / 10_000 == pytest.approx(expected, abs=0.015), kind


def test_no_held_out_pair_is_trained_on() -> None:
    task, rng = Tools(), Random(3)
    held = {(episode["start"], episode["holds"]) for episode in task.suites()["held out"]}
    assert len(held) == 20
    drawn = {(episode["start"], episode["holds"]) for episode in (task.draw(rng) for _ in range(3_000))}
    assert len(drawn) == 70
    assert not held & drawn
    assert Counter(episode["id"] for episode in task.suites()["held out"]).most_common()[0][1] == 500 / 20
    assert all(a != b and {a, b} <= set(KEYS) for a, b in held | drawn)


@pytest.mark.parametrize("task", TASKS)
def test_a_task_satisfies_its_interface(task: EpisodicTask) -> None:
    rng = Random(0)
    assert isinstance(task, EpisodicTask)
    assert as_episodic(task) is task
    for episode in task.demonstrations(50, rng):
        assert 1 <= len(episode) <= task.max_turns
        for turn in episode:
            assert len(turn.action) + 1 < task.max_new_tokens  # bytes and the end token, with some margin
            assert task.parser(turn.action).action
    json.dumps([task.draw(rng) for _ in range(3)])  # requests are written as JSON
    assert task.demonstrations(5, Random(7)) == task.demonstrations(5, Random(7))


@pytest.mark.parametrize(
    ("task", "rates"), [(DigitSort(), {}), (Addition(), {"scratchpad_right": "the whole scratchpad is the textbook's"})]
)
def test_a_single_turn_task_is_adapted_to_an_episodic_task(task: Any, rates: dict[str, str]) -> None:
    episodic = as_episodic(task)
    problems = [task.draw(rng) for rng in [Random(4)] for _ in range(3)]
    assert [turn.observation for [turn] in episodic.demonstrations(3, Random(4))] == [problem["question"] for problem in problems]
    assert (episodic.max_turns, episodic.success_reward, episodic.rates) == (1, 1.0, rates)
    assert list(episodic.suites().values()) == [task.heldout()]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TicTacToe(format="haiku"), r"format \('haiku'\) .*moves, chat"),
        (lambda: TicTacToe(opponent_perfect=1.5), r"perfect \(1.5\)"),
        (lambda: TicTacToe(teacher_perfect=0.99), r"teacher_perfect \+ teacher_illegal"),
        (lambda: TicTacToe(as_o=-1), "as_o"),
        (lambda: Tools(format="haiku"), "terse, chat"),
        (lambda: Tools(guess=0.9), r"right \+ guess"),
        (lambda: Tools(num_heldout=60), r"num_heldout \(60\)"),
    ],
)
def test_an_invalid_argument_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


# ---- demonstrations, token by token
# --------------------------------------------------------------------------------


def demonstrations(task: Any, tokenizer: Any, **settings: Any) -> list[SAWItem]:
    source = DemonstrationSource(task, tokenizer, batch_size=8, seed=0, **settings)
    return asyncio.run(source.next_batch()).items


def recipe_of(task: Any) -> str:
    return "tictactoe" if isinstance(task, TicTacToe) else "tools"


def as_text(ids: list[int]) -> str:
    return bytes(i - 3 for i in ids).decode()


def test_a_game_is_one_sample_with_the_loss_on_its_moves() -> None:
    games = TicTacToe().demonstrations(8, Random("demonstrations 0 0"))
    items = demonstrations(TicTacToe(), make_line_tokenizer())
    assert len(items) == 8
    for game, item in zip(games, items, strict=True):
        assert as_text(item.input_ids) == "".join(f"{turn.observation}{turn.action}\n" for turn in game)
        trained = [token for token, mask in zip(item.input_ids, item.action_mask, strict=True) if mask]
        assert as_text(trained) == "".join(f"{turn.action}\n" for turn in game)
        assert item.meta["completion_length"] == 2 * len(game)


def test_a_template_that_rewrites_the_history_splits_the_sample() -> None:
    tokenizer = make_line_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{{ messages[-1].content }}"
    games = TicTacToe().demonstrations(8, Random("demonstrations 0 0"))
    items = demonstrations(TicTacToe(), tokenizer)
    assert len(items) == sum(len(game) for game in games)
    assert as_text(items[1].input_ids) == f"3{games[0][1].observation}{games[0][1].action}\n"
    assert [item.meta["step_index"] for item in items[: len(games[0])]] == list(range(len(games[0])))


@pytest.mark.parametrize("task", [TicTacToe(), Tools()])
def test_the_policys_prompts_have_the_tokens_of_the_demonstrations(task: Any) -> None:
    """Each prompt starts with the previous prompt and its answer, so an episode is one row of
    tokens."""
    tokenizer = make_line_tokenizer()
    model = make_small_model(compose([recipe_of(task), "network.hidden_size=16", "network.intermediate_size=16"]).network)
    client = LocalChatClient(model, tokenizer)
    episodes = task.demonstrations(8, Random("demonstrations 0 0"))

    async def prompt_of(messages: list[dict[str, str]]) -> list[int]:
        inference = {"sampling": SamplingParams(max_tokens=1), "return_": ReturnSpec.for_rl()}
        response, _ = await client.complete(ChatCompletionRequest(model="m", messages=messages, seed=0, **inference))
        assert response.prompt_token_ids is not None
        return response.prompt_token_ids

    async def asked(episode: Any) -> list[list[int]]:
        said = [
            message
            for turn in episode
            for message in ({"role": "user", "content": turn.observation}, {"role": "assistant", "content": turn.action})
        ]
        return await asyncio.gather(*(prompt_of(said[: 2 * number + 1]) for number in range(len(episode))))

    async def all_asked() -> list[list[list[int]]]:
        return await asyncio.gather(*(asked(episode) for episode in episodes))

    for prompts, item in zip(asyncio.run(all_asked()), demonstrations(task, tokenizer), strict=True):
        for prompt in prompts:
            assert item.input_ids[: len(prompt)] == prompt
            assert item.action_mask[len(prompt) - 1 : len(prompt) + 1] == [0, 1]  # an action starts here
        assert item.action_mask[-1] == 1


def test_members_of_a_group_have_the_same_episode_and_the_same_randomness() -> None:
    requests = TrainingRequests(Tools(), compose(["tools"]).rollout, seed=0)()
    assert len(requests) == 32 * 8
    groups = [requests[start : start + 8] for start in range(0, len(requests), 8)]
    assert all(len({(r.env_seed, r.meta["problem_id"], r.meta["group_id"]) for r in group}) == 1 for group in groups)
    assert all(len({r.sampling_seed for r in group}) == 8 for group in groups)
    assert len({group[0].env_seed for group in groups}) == 32


def test_the_line_tokenizer_survives_saving_and_loading(tmp_path: Path) -> None:
    make_line_tokenizer().save_pretrained(tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    dialog = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "?c"}, {"role": "user", "content": "h"}]
    assert read.eos_token_id == 13
    assert read.apply_chat_template(dialog, tokenize=False, add_generation_prompt=True) == "c?c\nh"
    assert read("?c\nĊ")["input_ids"] == [byte + 3 for byte in "?c\nĊ".encode()]
    assert make_byte_tokenizer().eos_token_id == 2


# ---- evaluation
# ------------------------------------------------------------------------------------------


class Player:
    """A policy defined by a function of the dialogue: messages to (text, finish reason)."""

    def __init__(self, move: Any) -> None:
        self.move = move

    async def complete(self, request: ChatCompletionRequest) -> tuple[ChatResponse, dict[str, Any]]:
        text, finish = self.move(request.messages)
        return ChatResponse(text, [1], [-0.1], finish, [2]), {}


def perfect_move(messages: list[dict[str, str]]) -> tuple[str, str]:
    board = EMPTY
    for message in messages:
        said = message["content"]
        cell = said[-2] if message["role"] == "user" else said
        if cell != ".":
            board = play(board, int(cell) - 1)
    return str(optimal_moves(board)[0] + 1), "stop"


def measured(task: EpisodicTask, move: Any, recipe: str) -> Evaluation:
    settings = compose([recipe, "evaluation.prompts=20", "evaluation.samples_per_prompt=2"])
    engine = make_engine(task, Player(move), model_name="m", system_prompt=None)
    return asyncio.run(HeldOut(engine, task, settings.evaluation, settings.rollout).measure())


def test_the_evaluation_of_a_perfect_player_has_no_losses() -> None:
    rates = measured(TicTacToe(), perfect_move, "tictactoe").rates()
    assert (rates["not_lost"], rates["lost"], rates["legal_moves"], rates["greedy_accuracy"]) == (1.0, 0.0, 1.0, 1.0)
    assert (rates["not_lost_as_x"], rates["not_lost_as_o"]) == (1.0, 1.0)
    assert (rates["perfect_drawn"], rates["perfect_drawn_as_x"], rates["perfect_drawn_as_o"]) == (1.0, 1.0, 1.0)
    assert rates["won"] + rates["drawn"] == 1.0
    assert rates["sampled_reward"] == pytest.approx(rates["won"] + 0.5 * rates["drawn"])
    assert list(rates) == ["sampled_reward", "greedy_accuracy", *TicTacToe().rates]


def test_an_illegal_move_counts_neither_as_loss_nor_as_draw() -> None:
    """X plays perfectly; O always names the cell that X took. That is half of the games, with one
    illegal move in each."""

    def move(messages: list[dict[str, str]]) -> tuple[str, str]:
        first = messages[0]["content"]
        return (first[-2], "stop") if first.startswith("O") else perfect_move(messages)

    rates = measured(TicTacToe(), move, "tictactoe").rates()
    assert (rates["not_lost_as_x"], rates["not_lost_as_o"], rates["not_lost"]) == (1.0, 0.0, 0.5)
    assert (rates["lost"], rates["perfect_drawn_as_o"], rates["perfect_drawn"]) == (0.0, 0.0, 0.5)
    assert 0.5 < rates["legal_moves"] < 0.9


def test_a_truncated_answer_loses_the_game_immediately() -> None:
    measurement = measured(TicTacToe(), lambda messages: ("5", "length"), "tictactoe")
    rates = measurement.rates()
    assert (rates["sampled_reward"], rates["legal_moves"], rates["not_lost"]) == (-1.0, 0.0, 0.0)
    assert all(answer.text == "illegal: 5" and not answer.success for answer in measurement.answers)


def test_a_policy_that_uses_the_tool_is_distinguished_from_one_that_guesses() -> None:
    def look_up(messages: list[dict[str, str]]) -> tuple[str, str]:
        key = messages[-1]["content"]
        return (f"?{key}" if len(messages) < 5 else f"={key}"), "stop"

    rates = measured(Tools(), look_up, "tools").rates()
    assert rates == {"sampled_reward": 1.0, "greedy_accuracy": 1.0, "looked_up": 1.0, "answered": 1.0}
    rates = measured(Tools(), lambda messages: ("=a", "stop"), "tools").rates()
    assert (rates["looked_up"], rates["answered"]) == (0.0, 1.0)
    assert rates["sampled_reward"] < 0.4  # one in ten of 40
    rates = measured(Tools(), lambda messages: ("?a", "stop"), "tools").rates()
    assert (rates["sampled_reward"], rates["answered"]) == (0.0, 0.0)


# ---- whole runs
# ------------------------------------------------------------------------------------------


def test_the_summary_of_tic_tac_toe_has_its_rates(tiny: list[str], tmp_path: Path) -> None:
    summary = train("tictactoe", *tiny)
    assert list(summary["before"]) == list(summary["after"]) == ["sampled_reward", "greedy_accuracy", *TicTacToe().rates]
    assert set(summary) >= {"wall_s", "phases_s", "padding", "steps", "clip_fraction", "seed", "config_hash"}
    assert all(math.isfinite(rate) for rate in summary["after"].values())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    reinforce = [line for line in lines if line["phase"] == "reinforce"]
    assert len(reinforce) == 3
    for line in reinforce:
        assert line["train/won"] + line["train/drawn"] + line["train/illegal_move"] <= 1.0 + 1e-9


def test_the_report_names_the_rates_and_shows_games(tiny: list[str]) -> None:
    result = CliRunner().invoke(app, ["train", "tictactoe", *tiny])
    assert result.exit_code == 0, result.output
    for said in ("drawn against a perfect opponent", "moves that are legal", "X against a random", "never whether a move"):
        assert said in " ".join(result.output.split()), said


@pytest.mark.parametrize("recipe", ["tictactoe", "tools"])
def test_a_chat_model_plays_in_natural_language(tiny: list[str], tmp_path: Path, recipe: str) -> None:
    """A model on disk with a chat template and its own end token gets rules, tags and turns by
    role."""
    train(recipe, *tiny, "name=first", "network.max_positions=2048", "warmup.steps=0", "steps=0")
    path = tmp_path / "first" / "model"
    tokenizer = make_byte_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(path)
    config = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": tokenizer.eos_token_id}))

    fast = ["rollout.log_every=1", "steps=2", "evaluation.prompts=1"]
    summary = train(recipe, *tiny, "name=second", f"model={path}", *fast)
    assert summary["steps"] == 2
    written = (tmp_path / "second" / "config.yaml").read_text()
    assert "format: chat" in written
    step = json.loads((tmp_path / "second" / "rollouts.jsonl").read_text().splitlines()[0])["steps"][0]
    prompt = tokenizer.decode(step["trace"]["prompt_token_ids"])
    assert prompt.startswith("<|system|>")
    assert prompt.endswith("<eos><|assistant|>")
    assert ("<move>B2</move>" if recipe == "tictactoe" else "<get>KEY</get>") in prompt

    # A game is one row here too, because the template ends an answer with the same token as the
    # model.
    task = TicTacToe(format="chat") if recipe == "tictactoe" else Tools(format="chat")
    assert len(demonstrations(task, tokenizer, system_prompt=task.system_prompt)) == 8


def test_a_dialogue_without_a_chat_template_is_refused_before_anything_is_sampled(tiny: list[str], tmp_path: Path) -> None:
    """It was once found out in the first batch: after the warm-up."""
    message = "the task has episodes of up to 5 turns, and the tokenizer has no chat template"
    result = CliRunner().invoke(app, ["train", "tictactoe", *tiny, "name=first", "network.end_of_turn=eos"])
    assert result.exit_code != 0
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "first").exists()

    train("sort", *tiny, "name=plain", "warmup.steps=0", "steps=0", f"output={tmp_path}")
    result = CliRunner().invoke(app, ["eval", "tictactoe", f"model={tmp_path / 'plain' / 'model'}", f"output={tmp_path}"])
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize("recipe", ["tictactoe", "tools"])
def test_a_run_with_several_turns_is_reproducible(tiny: list[str], tmp_path: Path, recipe: str) -> None:
    one = train(recipe, *tiny, "name=one")
    two = train(recipe, *tiny, "name=two")
    assert (one["before"], one["after"]) == (two["before"], two["after"])
    files = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert files[0] == files[1]


def test_an_invalid_end_of_turn_token_is_refused(tiny: list[str]) -> None:
    result = CliRunner().invoke(app, ["train", "tools", *tiny, "network.end_of_turn=bell"])
    assert result.exit_code == 2
    assert re.search(r"network\.end_of_turn \(bell\) .*eos, newline", result.stderr)
