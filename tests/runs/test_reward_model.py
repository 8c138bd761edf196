"""`ludic train-rm`: what a run writes, that it is reproducible, resumes and stops, with flags and
settings, with and without adapters."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
from chat_tokenizers import CHATML, chat_tokenizer
from commands import NETWORK, same_weights, summary_of, write_rows
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ludic.data.sources import Draw
from ludic.errors import DataError
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.recipes.epochs_schema import compose_rm
from ludic.recipes.model import choose_padding_token
from ludic.runs import epochs
from ludic.runs.data.pairs import PairData
from ludic.runs.report.scores import decode_scores

TINY = [*NETWORK, "threads=1", "pairs=40", "batch_size=8", "train_sample=16", "task.args.num_heldout=20"]
EVALUATED = {
    *("eval_loss", "eval_pairwise_accuracy", "eval_mean_margin", "eval_margin_std", "eval_negative_margin_rate", "eval_roc_auc"),
    *("eval_ece", "eval_fpr@0.5", "eval_fnr@0.5", "eval_margin_p50", "eval_num_pairs"),
}
PROMISED = {"train_pairwise_accuracy", "bayes_accuracy", "wall_s", "seed", "pairs_per_s", "padding", "steps", "config_hash"}
train_rm, refused, train_until = (partial(do, "train-rm") for do in (commands.ludic, commands.refused, commands.train_until))


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    return [*TINY, f"output={tmp_path}", "name=run"]


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n + 3)} for n in range(count)]


def score(run: Path, text: str) -> float:
    """The score of one text by the saved model, loaded with transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(run / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    with torch.no_grad():
        return float(model(torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])).logits)


def test_a_run_writes_every_documented_file(tiny: list[str], tmp_path: Path) -> None:
    shown = train_rm(*tiny)
    run = tmp_path / "run"
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "training.png",
        "reliability.png",
        "margins.png",
        "data.jsonl",
        "heldout.jsonl",
    ):
        assert (run / name).stat().st_size > 0, name
    for said in ("Held-out accuracy", "negative margins", "Best possible accuracy", "Padding", "Seconds", "40 pairs"):
        assert said in " ".join(shown.split()), said
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(line["phase"], line["step"], line["train/total_pairs"]) for line in lines] == [("rm", n, 8) for n in range(1, 6)]
    summary = summary_of(run)
    assert summary.keys() >= EVALUATED | PROMISED
    assert (summary["steps"], summary["epochs"], summary["seed"]) == (5, 1.0, 0)
    assert (summary["data"]["pairs"], summary["data"]["heldout_pairs"], summary["eval_num_pairs"]) == (40, 20, 20)
    scores = decode_scores(json.loads((run / "heldout_scores.json").read_text()))
    assert (scores.num_pairs, scores.compute()["pairwise_accuracy"]) == (20, summary["eval_pairwise_accuracy"])


def test_the_reported_metrics_are_those_of_the_saved_model(tiny: list[str], tmp_path: Path) -> None:
    train_rm(*tiny, "trainer.lr=3e-2")
    held = [json.loads(line) for line in (tmp_path / "run" / "heldout.jsonl").read_text().splitlines()]
    margins = [
        score(tmp_path / "run", r["prompt"] + r["chosen"]) - score(tmp_path / "run", r["prompt"] + r["rejected"]) for r in held
    ]
    summary = summary_of(tmp_path / "run")
    assert summary["eval_mean_margin"] == pytest.approx(sum(margins) / 20, abs=1e-4)
    assert summary["eval_pairwise_accuracy"] == sum(margin > 0 for margin in margins) / 20


def test_the_bayes_accuracy_is_that_of_the_held_out_pairs(tiny: list[str], tmp_path: Path) -> None:
    train_rm(*tiny)
    held = [json.loads(line) for line in (tmp_path / "run" / "heldout.jsonl").read_text().splitlines()]
    best = sum(max(row["probability"], 1 - row["probability"]) for row in held) / len(held)
    assert summary_of(tmp_path / "run")["bayes_accuracy"] == pytest.approx(best)


def test_the_pairs_on_disk_are_the_data_of_the_run(tiny: list[str], tmp_path: Path) -> None:
    train_rm(*tiny)
    files = [f"data={tmp_path / 'run' / 'data.jsonl'}", f"heldout_data={tmp_path / 'run' / 'heldout.jsonl'}"]
    train_rm(*tiny, "name=again", *files)
    assert same_weights(tmp_path / "run", tmp_path / "again")
    one, two = (summary_of(tmp_path / name) for name in ("run", "again"))
    assert {key: one[key] for key in EVALUATED} == {key: two[key] for key in EVALUATED}
    assert two["bayes_accuracy"] is None  # it is unknown for data from a file


def test_json_prints_only_the_summary(tiny: list[str], tmp_path: Path) -> None:
    assert json.loads(train_rm(*tiny, "--json")) == summary_of(tmp_path / "run")


def test_two_runs_of_a_config_are_equal_and_another_seed_differs(tiny: list[str], tmp_path: Path) -> None:
    train_rm(*tiny, "name=one")
    train_rm(str(tmp_path / "one" / "config.yaml"), "name=two")
    train_rm(*tiny, "name=three", "seed=1")
    assert same_weights(tmp_path / "one", tmp_path / "two")
    assert not same_weights(tmp_path / "one", tmp_path / "three")
    one, two, three = (summary_of(tmp_path / name) for name in ("one", "two", "three"))
    assert (one["eval_loss"], one["config_hash"]) == (two["eval_loss"], two["config_hash"])
    assert one["bayes_accuracy"] == three["bayes_accuracy"]  # all seeds have the same held-out pairs


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A causal model on disk without a reward head, with a chat template."""
    from training_samples import tiny_model

    path = tmp_path / "model-on-disk"
    tiny_model(vocab_size=261).save_pretrained(path)
    chat_tokenizer(CHATML).save_pretrained(path)
    return path


def test_the_documented_command_runs_on_a_local_file(tmp_path: Path, model: Path) -> None:
    shp = [
        {
            "history": f"why {n}?",
            "human_ref_A": "because",
            "human_ref_B": f"so {n}",
            "labels": n % 2,
            "score_A": n % 2,
            "score_B": 1 - n % 2,
        }
        for n in range(60)
    ]
    data = write_rows(tmp_path / "shp.jsonl", *shp)
    command = f"""--model {model} --hf-dataset {data} --hf-split train --limit 50 --steps 6 --batch-size 4 --micro-token-budget 128
        --max-seq-len 64 --lr 5e-6 --weight-decay 0.01 --warmup-steps 2 --lr-scheduler cosine --beta 1.0
        --regularization-lambda 0.001 --label-smoothing 0.05 --lora --lora-rank 8 --eval-split test --eval-limit 4 --eval-every 2
        --early-stopping-patience 5 --profile-memory --output-dir {tmp_path / "checkpoints_rm_v2"}"""
    shown = train_rm(*command.split(), "threads=1")
    run = tmp_path / "checkpoints_rm_v2"
    assert "no split test; 10% of it" in " ".join(shown.split())
    summary = summary_of(run)
    assert (summary["steps"], summary["data"]["pairs"], summary["eval_num_pairs"]) == (6, 45, 4)
    assert summary["trained_parameters"] < summary["parameters"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval/pairwise_accuracy" in line and "train/loss" not in line] == [2, 4, 6]


def test_weights_that_are_neither_loaded_nor_trained_are_an_error(tiny: list[str], tmp_path: Path) -> None:
    """A BERT saved as a masked language model has no pooler, and LoRA would leave the newly
    initialised one untrained."""
    from small_models import scoring_model
    from transformers import BertForMaskedLM

    classifier = scoring_model("Bert")
    place = tmp_path / "bert"
    config = classifier.config
    config.vocab_size = 272
    BertForMaskedLM(config).save_pretrained(place)
    make_byte_tokenizer().save_pretrained(place)
    given = [*tiny, f"model={place}", "trainer.max_seq_len=32", "trainer.micro_token_budget=128"]
    assert "no weights for bert.pooler.dense" in refused(*given, "lora.rank=2")
    assert not (tmp_path / "run").exists()
    train_rm(*given)  # all weights are trained


def test_adapters_are_saved_beside_the_merged_model(tiny: list[str], tmp_path: Path) -> None:
    from peft import PeftModel

    train_rm(*tiny, "lora.rank=4", "trainer.lr=3e-2")
    run, text = tmp_path / "run", "high>98765"
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    assert any("score" in name for name in adapter)  # the head was trained too
    assert all(weight.any() for name, weight in adapter.items() if "lora_B" in name)  # no weight has its initial value
    assert sum("lora_B" in name for name in adapter) == 2 * 7  # layers, and the projections in each
    adapted = PeftModel.from_pretrained(
        AutoModelForSequenceClassification.from_pretrained(run / "base"), str(run / "adapter")
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    with torch.no_grad():
        given = float(adapted(torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])).logits)
    assert given == pytest.approx(score(run, text), abs=1e-5)


def test_conversations_and_text_are_rendered_by_the_models_template(tiny: list[str], tmp_path: Path, model: Path) -> None:
    said = [{"role": "user", "content": "hi"}]
    talk = [
        {
            "prompt": said,
            "chosen": [{"role": "assistant", "content": "yo"}],
            "rejected": [{"role": "assistant", "content": f"{n}"}],
        }
        for n in range(8)
    ]
    text = [{"prompt": "hi", "chosen": "yo", "rejected": f"{n}"} for n in range(8)]
    recipe = compose_rm([*tiny, f"data={write_rows(tmp_path / 'talk.jsonl', *talk)}", "heldout=0"])
    plain = compose_rm([*tiny, f"data={write_rows(tmp_path / 'text.jsonl', *text)}", "heldout=0"])
    rendered = compose_rm([*tiny, f"data={tmp_path / 'text.jsonl'}", "heldout=0", "chat_template=true"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [[list(item.input_ids) for item in PairData.read(r, tokenizer, note=print).train] for r in (recipe, plain, rendered)]
    assert ids[0] == ids[2]
    assert ids[0] != ids[1]


def test_columns_can_have_other_names_and_labels_can_be_soft(tiny: list[str], tmp_path: Path) -> None:
    content = [{"q": f"{n}?", "better": "a", "worse": "b", "sure": 0.75} for n in range(3)]
    named = ["columns.prompt=q", "columns.chosen=better", "columns.rejected=worse", "columns.label=sure", "heldout=0"]
    recipe = compose_rm([*tiny, f"data={write_rows(tmp_path / 'data.jsonl', *content)}", *named])
    chosen, rejected, *_ = PairData.read(recipe, make_byte_tokenizer(), note=print).train
    assert make_byte_tokenizer().decode(list(chosen.input_ids)) == "0?a<eos>"
    assert (chosen.meta["role"], rejected.meta["role"], chosen.meta["label"]) == ("chosen", "rejected", 0.75)


def test_pairs_with_one_prompt_are_held_out_together(tiny: list[str], tmp_path: Path) -> None:
    content = [{"prompt": f"{n // 4}?", "chosen": f"a{n}", "rejected": f"b{n}"} for n in range(40)]
    recipe = compose_rm([*tiny, f"data={write_rows(tmp_path / 'data.jsonl', *content)}", "heldout=0.2"])
    data = PairData.read(recipe, make_byte_tokenizer(), note=print)
    prompts = [{bytes(item.input_ids[:2]) for item in part} for part in (data.train, data.heldout)]
    assert (len(data.train), len(data.heldout)) == (64, 16)
    assert not prompts[0] & prompts[1]
    assert all(a.meta["pair_id"] == b.meta["pair_id"] for a, b in zip(data.train[::2], data.train[1::2], strict=True))


def test_pairs_with_one_prompt_stay_together_after_truncation(tiny: list[str], tmp_path: Path) -> None:
    """A long prompt loses more of its start beside a long answer, so what remains of it differs
    between pairs."""
    content = [
        {"prompt": f"{n // 4:03}" + "q" * 90, "chosen": "a" * (1 + n % 4), "rejected": "b" * (1 + n % 4)} for n in range(40)
    ]
    settings = ["heldout=0.2", "trainer.max_seq_len=32"]
    recipe = compose_rm([*tiny, f"data={write_rows(tmp_path / 'data.jsonl', *content)}", *settings])
    data = PairData.read(recipe, make_byte_tokenizer(), note=print)
    prompts = [{item.meta["prompt_digest"] for item in part} for part in (data.train, data.heldout)]
    assert (len(prompts[0]), len(prompts[1])) == (8, 2)
    assert not prompts[0] & prompts[1]


def test_rows_that_are_not_pairs_are_counted_by_reason(tiny: list[str], tmp_path: Path, model: Path) -> None:
    def talk(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
        said = [[{"role": "assistant", "content": text}] for text in (chosen, rejected)]
        return {"prompt": [{"role": "user", "content": prompt}], "chosen": said[0], "rejected": said[1]}

    long = "q" * 200
    faulty = [
        *[talk("same?", "a", "a")] * 3,
        *[talk("late?", long + "a", long + "b")] * 2,
        talk(long, "a", "b"),
    ]
    data = write_rows(tmp_path / "data.jsonl", *faulty, *(talk(f"{n}?", "a", "b") for n in range(6)))
    held = write_rows(tmp_path / "held.jsonl", {"prompt": "same", "chosen": "b", "rejected": "b"}, *rows(5))
    shown = train_rm(*tiny, f"model={model}", f"data={data}", f"heldout_data={held}", "trainer.max_seq_len=64", "batch_size=2")
    counts = summary_of(tmp_path / "run")["data"]
    assert counts["left_out"] == {"same_responses": 3, "same_responses_when_cut": 2, "prompt_too_long": 1}
    assert counts["heldout_left_out"] == {"same_responses": 1}
    assert (counts["pairs"], counts["heldout_pairs"]) == (6, 5)
    table = [line.strip("│ ").split("│") for line in shown.splitlines() if line.startswith("│")]
    cells = {row[0].strip(): (int(row[1]), int(row[2])) for row in table if len(row) == 3}
    assert cells == {
        "same responses": (3, 1),
        "same responses when cut": (2, 0),
        "prompt too long": (1, 0),
    }


def test_a_run_that_skips_no_row_prints_no_count(tiny: list[str], tmp_path: Path) -> None:
    shown = train_rm(*tiny)
    assert "no pair" not in shown
    assert summary_of(tmp_path / "run")["data"]["left_out"] == {}


def test_responses_with_equal_scores_are_counted_among_the_drawn_rows(tiny: list[str], tmp_path: Path) -> None:
    shp = [
        {"history": f"{n}", "human_ref_A": "a", "human_ref_B": f"b{n}", "score_A": n, "score_B": 3 * (n // 3)} for n in range(12)
    ]
    data = write_rows(tmp_path / "shp.jsonl", *shp)  # rows 0, 3, 6 and 9 have equal scores
    for limit in (None, 8, 10):
        recipe = compose_rm([*tiny, f"data={data}", f"limit={'null' if limit is None else limit}", "heldout=0", "seed=3"])
        drawn = Draw(limit, seed=3).of(12)
        read = PairData.read(recipe, make_byte_tokenizer(), note=print)
        assert read.left_out["equal_scores"] == len({0, 3, 6, 9} & set(drawn))
        assert len(read.train) // 2 == len(drawn) - read.left_out["equal_scores"]


def test_a_limit_draws_randomly_from_the_whole_data_set(tiny: list[str], tmp_path: Path) -> None:
    content = [{"prompt": f"{part}{n}?", "chosen": "a", "rejected": "b"} for part in "xyz" for n in range(100)]
    data = write_rows(tmp_path / "sorted.jsonl", *content)

    def prompts(*more: str) -> list[str]:
        read = PairData.read(compose_rm([*tiny, f"data={data}", "limit=30", *more]), make_byte_tokenizer(), note=print)
        return [bytes(token - 3 for token in item.input_ids[:2] if token > 2).decode() for item in read.train[::2]]

    first = prompts("heldout=0", "seed=1")
    assert {prompt[0] for prompt in first} == set("xyz")  # the first 30 rows are all x
    assert first == prompts("heldout=0", "seed=1") != prompts("heldout=0", "seed=2")


def test_a_loaded_model_gets_the_usual_settings_of_reward_models() -> None:
    made, loaded = compose_rm([]), compose_rm(["model=some/model"])
    assert (loaded.trainer.warmup_steps, loaded.trainer.warmup_ratio) == (0, 0.1)  # a short run reaches its rate, too
    assert (loaded.trainer.lr_scheduler_type, loaded.trainer.lr_min_ratio) == ("cosine", 0.0)
    assert (loaded.loss.label_smoothing, loaded.loss.regularization_lambda) == (0.05, 0.001)
    assert (made.loss.label_smoothing, made.loss.regularization_lambda) == (
        0.0,
        0.0,
    )  # the true probability is known for generated pairs


def test_an_invalid_label_is_an_error_and_not_a_skipped_row(tiny: list[str], tmp_path: Path) -> None:
    content = [{"prompt": "1?", "chosen": "a", "rejected": "b", "sure": sure} for sure in (1, 80)]
    recipe = compose_rm([*tiny, f"data={write_rows(tmp_path / 'data.jsonl', *content)}", "columns.label=sure", "heldout=0"])
    with pytest.raises(DataError, match=r"line 2 \(80\) .*at least 0 and at most 1"):
        PairData.read(recipe, make_byte_tokenizer(), note=print)


def test_a_reward_model_does_not_pad_with_the_end_token() -> None:
    """A classifier reads its score at the last token that is not padding."""
    tokenizer = make_byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    assert choose_padding_token(tokenizer).pad_token == "<bos>"
    assert choose_padding_token(make_byte_tokenizer()).pad_token == "<pad>"


def test_without_held_out_pairs_only_the_training_pairs_are_evaluated(tiny: list[str], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", *rows(20))
    shown = train_rm(*tiny, f"data={data}", "heldout=0")
    assert "No pairs are held out" in shown
    summary = summary_of(tmp_path / "run")
    assert not any(key.startswith("eval_") for key in summary)
    assert 0 <= summary["train_pairwise_accuracy"] <= 1


def test_the_plot_has_the_held_out_accuracy_only_where_it_was_measured(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[dict[str, Any]] = []
    monkeypatch.setattr(epochs, "write_picture", lambda *_, **options: drawn.append(options))
    train_rm(*tiny)
    last = summary_of(tmp_path / "run")["eval_pairwise_accuracy"]
    assert drawn[0]["measured"] == {"held-out accuracy": [(5, last)]}  # 40 pairs are 5 steps; nothing was measured before
    train_rm(*tiny, "name=again", "trainer.eval_at_start=true", "trainer.eval_every_n_steps=2")
    points = drawn[1]["measured"]["held-out accuracy"]
    assert [step for step, _ in points] == [0, 2, 4, 5]
    assert points[-1] == (5, last)
    assert drawn[0]["marks"] == drawn[1]["marks"] == {}


def test_an_evaluation_can_end_training_early(tiny: list[str], tmp_path: Path) -> None:
    train_rm(*tiny, "epochs=9", "trainer.lr=0", "trainer.eval_every_n_steps=2", "trainer.early_stopping_patience=1")
    assert summary_of(tmp_path / "run")["steps"] == 4


def test_a_run_that_stops_early_saves_the_model_of_its_best_evaluation(tiny: list[str], tmp_path: Path) -> None:
    worse = ["trainer.lr=1", "trainer.warmup_steps=0", "trainer.lr_scheduler_type=null"]  # every step makes the model worse
    stop = ["trainer.eval_every_n_steps=1", "trainer.early_stopping_patience=2"]
    shown = train_rm(*tiny, "epochs=9", *worse, *stop)
    summary = summary_of(tmp_path / "run")
    measured = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["eval/loss"] for line in measured if "eval/loss" in line}
    best = min(losses, key=losses.__getitem__)
    assert best < summary["steps"]
    assert summary["early_stopping"] == {"stopped": True, "kept_step": best, "metric": "eval_loss", "best": losses[best]}
    assert summary["eval_loss"] == pytest.approx(losses[best])  # metrics of the saved model
    assert f"has the weights of step {best}" in " ".join(shown.split())
    assert re.search("Early stopping .*these same pairs", " ".join(shown.split()))


# ---- invalid settings, stopping, resuming
# ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trainer.lrr=1"], "did you mean trainer.lr"),
        (["--eval-evry", "3"], "did you mean --eval-every"),
        (["pairs.jsonl"], "write data=pairs.jsonl for a data file"),
        (["data=/nowhere.jsonl"], "does not exist"),
        (["heldout=1.0"], "heldout (1.0) must be at least 0 and below 1"),
        (["batch_size=0"], "batch_size (0) must be at least 1"),
        (["heldout_split=test"], "are for data of your own"),
        (["trainer.micro_token_budget=300"], "2 * max_seq_len (256)"),
        (["loss.beta=0"], "beta"),
        (["loss.label_smoothing=2"], "label_smoothing"),
        (["model=/nowhere/at/all"], "config.json"),
        (["lora.rank=-1"], "lora rank (-1)"),
        (["lora.rank=2", "lora.target_modules=[nothing]"], "nothing"),
        (["task.kind=digit"], "did you mean digits"),
        (["task.args.temperature=0"], "temperature (0)"),
        (["--resume", "/nowhere"], "accepts steps=N"),
    ],
)
def test_an_invalid_setting_is_a_one_line_error_and_leaves_no_folder(
    tiny: list[str], tmp_path: Path, arguments: list[str], said: str
) -> None:
    assert said in refused(*tiny, *arguments)
    assert not list(tmp_path.iterdir())


def test_an_invalid_row_is_named_before_anything_is_written(tiny: list[str], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", *rows(2), {"prompt": "2+2=", "chosen": "4"})
    assert "data.jsonl, line 3" in refused(*tiny, f"data={data}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("step", "settings"), [(1, ["lora.rank=2"]), (3, [])])
def test_a_run_stopped_anywhere_resumes_to_the_uninterrupted_run(
    tiny: list[str], tmp_path: Path, step: int, settings: list[str]
) -> None:
    train_rm(*tiny, "name=whole", *settings)
    assert train_until(step, [*tiny, "name=parts", *settings]) == 130
    interrupted = summary_of(tmp_path / "parts")
    assert interrupted["steps"] == step
    assert "eval_loss" not in interrupted
    assert (tmp_path / "parts" / "model" / "model.safetensors").is_file()
    train_rm("--resume", str(tmp_path / "parts"))
    assert same_weights(tmp_path / "whole", tmp_path / "parts")
    whole, parts = (summary_of(tmp_path / name) for name in ("whole", "parts"))
    same = {*EVALUATED, "train_pairwise_accuracy", "steps", "data", "config_hash"}
    assert {key: parts[key] for key in same} == {key: whole[key] for key in same}
    lines = len((tmp_path / "parts" / "metrics.jsonl").read_text().splitlines())
    train_rm("--resume", str(tmp_path / "parts"))  # resuming a finished run only reports
    assert len((tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()) == lines


def test_other_data_under_the_same_name_is_refused_on_resume(tiny: list[str], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", *rows(30))
    assert train_until(2, [*tiny, f"data={data}"]) == 130
    write_rows(data, *reversed(rows(30)))
    assert "the content of data.jsonl has changed" in refused("--resume", str(tmp_path / "run"))


def test_a_loaded_model_has_its_own_default_rates_that_the_command_line_overrides() -> None:
    small, loaded, chosen = compose_rm(), compose_rm(["model=x"]), compose_rm(["--model", "x", "--lr", "1"])
    assert (small.trainer.lr, loaded.trainer.lr, chosen.trainer.lr) == (3e-3, 5e-6, 1.0)


def test_print_config_shows_every_field_and_runs_nothing(tmp_path: Path) -> None:
    shown = train_rm("--print-config", f"output={tmp_path}", "--seed", "9", "--beta", "2")
    for said in ("seed: 9", "beta: 2.0", "rm_calibration_bins: 10", "temperature: 0.5"):
        assert said in shown
    assert not list(tmp_path.iterdir())


def test_a_run_that_was_killed_between_its_files_of_pairs_gets_the_other_one(tmp_path: Path) -> None:
    """A file that is there stays as it is."""
    train, held = tmp_path / "data.jsonl", tmp_path / "heldout.jsonl"
    whole = PairData([], [], rows=rows(2), heldout_rows=rows(1))
    whole.write_missing_rows(train, held)
    wanted = [path.read_text() for path in (train, held)]
    held.unlink()
    PairData([], [], rows=rows(3), heldout_rows=rows(1)).write_missing_rows(train, held)
    assert [path.read_text() for path in (train, held)] == wanted
