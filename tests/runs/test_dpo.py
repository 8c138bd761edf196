"""`ludic dpo`: what a run writes, that it is reproducible, resumes and stops, on generated pairs
and on data, with and without adapters."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import torch
from chat_tokenizers import CHATML, chat_tokenizer
from commands import NETWORK, metrics_of, same_weights, summary_of, write_rows
from training_samples import tiny_model

from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.models.loading import load_model, load_tokenizer
from ludic.recipes.epochs_schema import compose_dpo
from ludic.runs.dpo import list_prompts, sample_answers
from ludic.training import PrecomputedReference, load_preference_items
from ludic.training.reference import item_key

TINY = [*NETWORK, "threads=1", "pairs=40", "batch_size=8", "task.args.num_heldout=20", "warmup.steps=3", "warmup.batch_size=8"]
SAMPLED = ["answers=6", "max_new_tokens=3"]
EVALUATED = {
    *("eval_loss", "eval_rewards/chosen", "eval_rewards/rejected", "eval_rewards/margins", "eval_rewards/accuracies"),
    *("eval_logps/chosen", "eval_logps/rejected", "eval_ece", "eval_margin_p50", "eval_num_pairs"),
}
dpo, refused, train_until = (partial(do, "dpo") for do in (commands.ludic, commands.refused, commands.train_until))


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    return [*TINY, *SAMPLED, f"output={tmp_path}", "name=run"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model on disk with a chat template."""
    path = tmp_path_factory.mktemp("model-on-disk")
    tiny_model(vocab_size=261).save_pretrained(path)
    chat_tokenizer(CHATML).save_pretrained(path)
    return path


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n + 3)} for n in range(count)]


def logp(model: Any, tokenizer: Any, prompt: str, answer: str) -> float:
    """The log-probability of an answer and its end, with transformers alone."""
    before = tokenizer(prompt)["input_ids"]
    ids = torch.tensor([[*before, *tokenizer(answer)["input_ids"], tokenizer.eos_token_id]])
    with torch.no_grad():
        logps = model(ids).logits[0].double().log_softmax(-1)
    return float(sum(logps[t - 1, ids[0, t]] for t in range(len(before), ids.shape[1])))


def test_a_run_writes_every_documented_file(tiny: list[str], tmp_path: Path) -> None:
    shown = dpo(*tiny)
    run = tmp_path / "run"
    for name in (
        *("config.yaml", "metrics.jsonl", "summary.json", "training.png", "reliability.png", "margins.png"),
        *("data.jsonl", "heldout.jsonl", "answers.jsonl", "reference.logps", "reference/model.safetensors"),
    ):
        assert (run / name).stat().st_size > 0, name
    for said in (
        "Held-out accuracy of the implicit rewards",
        "true quality",
        "Best possible accuracy",
        "Padding",
        "40 pairs",
        "What this shows: The policy",
    ):
        assert said in " ".join(shown.split()), said
    lines = [(line["phase"], line["step"]) for line in metrics_of(run)]
    assert lines == [("warm_up", n) for n in range(1, 4)] + [("dpo", n) for n in range(1, 6)]
    last = metrics_of(run)[-1]
    for key in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"):
        assert f"train/{key}" in last
    summary = summary_of(run)
    assert summary.keys() >= EVALUATED | {"bayes_accuracy", "before", "after", "steps", "loss_type", "beta", "config_hash"}
    assert (summary["steps"], summary["status"], summary["algorithm"], summary["eval_num_pairs"]) == (5, "finished", "dpo", 20)
    answers = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]
    assert [row["when"] for row in answers] == ["before"] * 6 + ["after"] * 6
    assert {row["prompt"] for row in answers} == {"high>", "low>"}
    assert summary["after"]["answers"] == 6


@pytest.mark.parametrize("loss", ["cpo", "simpo", "orpo", "kto"])
def test_every_loss_trains_in_one_word(tiny: list[str], tmp_path: Path, loss: str) -> None:
    shown = " ".join(dpo(*tiny, f"loss={loss}", "steps=2").split())
    run, summary = tmp_path / "run", summary_of(tmp_path / "run")
    assert (summary["status"], summary["loss_type"], summary["steps"]) == ("finished", loss, 2)
    assert np.isfinite([line["train/loss"] for line in metrics_of(run)]).all()
    assert (run / "reference.logps").exists() == (loss == "kto")
    assert ("moved towards" in shown) == (loss == "kto")


def test_kto_trains_on_answers_without_pairs(tiny: list[str], tmp_path: Path) -> None:
    answers = [{"prompt": f"{n}+1=", "completion": str(n + 1 + n % 3), "good": n % 3 == 0} for n in range(40)]
    data = write_rows(tmp_path / "answers.jsonl", *answers)
    settings = [f"data={data}", "columns.label=good", "heldout=0.25", "steps=2"]
    shown = dpo(*tiny, "loss=kto", *settings)
    summary, last = summary_of(tmp_path / "run"), metrics_of(tmp_path / "run")[-1]
    assert "30 answers" in " ".join(shown.split())
    assert summary["data"]["pairs"] == 30
    assert 0 < summary["eval_num_pairs"] == summary["data"]["heldout_pairs"] <= 5
    assert last["train/num_chosen"] + last["train/num_rejected"] == 8
    assert last["train/kl"] >= 0
    assert "has no column" in " ".join(refused(*tiny, "name=pairs", "loss=simpo", f"data={data}").split())


def test_the_reported_metrics_are_those_of_the_saved_models(tiny: list[str], tmp_path: Path) -> None:
    """The reference is the policy after the warm-up, which the run keeps."""
    dpo(*tiny, "trainer.lr=3e-2", "loss.beta=0.3")
    run = tmp_path / "run"
    tokenizer = load_tokenizer(str(run / "model"))
    policy, reference = (load_model(str(run / name), "float32").eval() for name in ("model", "reference"))
    held = [json.loads(line) for line in (run / "heldout.jsonl").read_text().splitlines()]
    rewards = {
        role: np.array(
            [
                0.3 * (logp(policy, tokenizer, r["prompt"], r[role]) - logp(reference, tokenizer, r["prompt"], r[role]))
                for r in held
            ]
        )
        for role in ("chosen", "rejected")
    }
    margins, summary = rewards["chosen"] - rewards["rejected"], summary_of(run)
    assert abs(margins).max() > 0.01, "the policy must have moved"
    assert summary["eval_rewards/margins"] == pytest.approx(margins.mean(), abs=1e-4)
    assert summary["eval_rewards/chosen"] == pytest.approx(rewards["chosen"].mean(), abs=1e-4)
    assert summary["eval_rewards/accuracies"] == np.mean(margins > 0)
    assert summary["eval_loss"] == pytest.approx(np.logaddexp(0, -margins).mean(), abs=1e-4)


def test_two_runs_of_a_config_are_equal_and_the_pairs_on_disk_are_its_data(tiny: list[str], tmp_path: Path) -> None:
    dpo(*tiny, "name=one")
    dpo(str(tmp_path / "one" / "config.yaml"), "name=two")
    files = [f"data={tmp_path / 'one' / 'data.jsonl'}", f"heldout_data={tmp_path / 'one' / 'heldout.jsonl'}"]
    dpo(*tiny, "name=three", *files)
    assert same_weights(tmp_path / "one", tmp_path / "two")
    assert same_weights(tmp_path / "one", tmp_path / "three")
    assert summary_of(tmp_path / "one")["eval_loss"] == summary_of(tmp_path / "three")["eval_loss"]
    assert "score" not in summary_of(tmp_path / "three")["after"]  # nothing judges answers to data of one's own


@pytest.mark.parametrize(
    ("phase", "step", "settings"),
    [("warm_up", 2, []), ("dpo", 2, []), ("dpo", 3, ["lora.rank=2", "trainer.lr=0.01"]), ("dpo", 1, ["warmup.steps=0"])],
)
def test_a_run_stopped_anywhere_resumes_to_the_uninterrupted_run(
    tiny: list[str], tmp_path: Path, phase: str, step: int, settings: list[str]
) -> None:
    dpo(*tiny, "name=whole", *settings)
    assert train_until(step, [*tiny, "name=parts", *settings], phase=phase) == 130
    assert summary_of(tmp_path / "parts")["status"] == "interrupted"
    dpo("--resume", str(tmp_path / "parts"))
    assert same_weights(tmp_path / "whole", tmp_path / "parts")
    whole, parts = (summary_of(tmp_path / name) for name in ("whole", "parts"))
    same = {*EVALUATED, "before", "after", "steps", "data", "config_hash"}
    assert {key: parts[key] for key in same} == {key: whole[key] for key in same}


def test_a_lost_file_of_the_reference_is_computed_again_bit_for_bit(tiny: list[str], tmp_path: Path) -> None:
    assert train_until(2, tiny, phase="dpo") == 130
    file = tmp_path / "run" / "reference.logps"
    before = file.read_bytes()
    file.unlink()
    dpo("--resume", str(tmp_path / "run"))
    assert file.read_bytes() == before


def test_a_resume_without_the_warmed_up_policy_or_with_a_damaged_file_says_so(tiny: list[str], tmp_path: Path) -> None:
    assert train_until(2, tiny, phase="dpo") == 130
    file = tmp_path / "run" / "reference.logps"
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    assert "is damaged" in refused("--resume", str(tmp_path / "run"))
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "not hold the reference log-probabilities" in refused("--resume", str(tmp_path / "run"))
    file.write_bytes(whole)
    (tmp_path / "run" / "reference" / "model.safetensors").unlink()
    assert "model.safetensors is missing" in " ".join(refused("--resume", str(tmp_path / "run")).split())
    (tmp_path / "run" / "reference" / "manifest.json").unlink()
    assert "the policy after the warm-up, is gone" in " ".join(refused("--resume", str(tmp_path / "run")).split())


def test_own_data_on_a_model_with_adapters(tmp_path: Path, model: Path) -> None:
    """The reference is the model without adapters, and what is saved is the merged model."""
    data = write_rows(tmp_path / "pairs.jsonl", *rows(40))
    settings = ["threads=1", f"output={tmp_path}", "batch_size=8", "trainer.lr=1e-2", "lora.rank=2"]
    dpo(f"model={model}", f"data={data}", *settings, *SAMPLED, "name=own", "trainer.warmup_steps=0")
    run = tmp_path / "own"
    assert not (run / "reference").exists()
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    tokenizer, base = load_tokenizer(str(model)), load_model(str(model), "float32").eval()
    kept = PrecomputedReference.load(run / "reference.logps")
    items = load_preference_items(str(data), tokenizer)
    for item, row in zip(items[::2], rows(40), strict=True):
        total = float(kept.of_item(item).double().sum())
        assert total == pytest.approx(logp(base, tokenizer, row["prompt"], row["chosen"]), abs=1e-3)
    summary = summary_of(run)
    assert (summary["data"]["pairs"], summary["bayes_accuracy"], summary["before"]["answers"]) == (36, None, 6)


def test_conversations_are_rendered_by_the_template_and_need_one(tmp_path: Path, model: Path) -> None:
    chats = [
        {
            "prompt": [{"role": "user", "content": f"{n}+1?"}],
            "chosen": [{"role": "assistant", "content": str(n + 1)}],
            "rejected": [{"role": "assistant", "content": "no"}],
        }
        for n in range(20)
    ]
    data = write_rows(tmp_path / "chats.jsonl", *chats)
    settings = [f"data={data}", "threads=1", f"output={tmp_path}", "batch_size=8", *SAMPLED]
    dpo(f"model={model}", *settings, "name=chat")
    answers = [json.loads(line) for line in (tmp_path / "chat" / "answers.jsonl").read_text().splitlines()]
    assert answers[0]["prompt"].endswith("assistant\n")
    bare = tmp_path / "bare"
    tiny_model().save_pretrained(bare)
    make_byte_tokenizer().save_pretrained(bare)
    assert "template" in refused(f"model={bare}", *settings, "name=bare-run")
    assert not (tmp_path / "bare-run").exists()


def test_another_model_can_be_the_reference(tmp_path: Path, model: Path) -> None:
    other = tmp_path / "other"
    tiny_model(seed=5, vocab_size=261).save_pretrained(other)
    chat_tokenizer(CHATML).save_pretrained(other)
    data = write_rows(tmp_path / "pairs.jsonl", *rows(20))
    settings = [f"data={data}", f"model={model}", "threads=1", f"output={tmp_path}", "batch_size=8", "answers=0"]
    dpo(*settings, f"reference.model={other}", "name=run")
    tokenizer, reference = load_tokenizer(str(other)), load_model(str(other), "float32").eval()
    kept = PrecomputedReference.load(tmp_path / "run" / "reference.logps")
    first = load_preference_items(str(data), tokenizer)[0]
    expected = logp(reference, tokenizer, rows(1)[0]["prompt"], rows(1)[0]["chosen"])
    assert float(kept.of_item(first).double().sum()) == pytest.approx(expected, abs=1e-3)
    bytes_only = tmp_path / "bytes"
    tiny_model().save_pretrained(bytes_only)
    make_byte_tokenizer().save_pretrained(bytes_only)
    assert "must have the policy's vocabulary" in " ".join(
        refused(*settings, f"reference.model={bytes_only}", "name=wrong").split()
    )


def test_rows_that_make_no_pair_are_counted_and_none_left_is_an_error(tiny: list[str], tmp_path: Path) -> None:
    equal = {"prompt": "1+1=", "chosen": "2", "rejected": "2"}
    data = write_rows(tmp_path / "data.jsonl", *rows(30), equal)
    dpo(*tiny, f"data={data}")
    assert summary_of(tmp_path / "run")["data"]["left_out"] == {"same_responses": 1}
    assert "chosen and rejected are the same" in " ".join(
        refused(*tiny, "name=none", f"data={write_rows(tmp_path / 'equal.jsonl', equal)}").split()
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["loss.beta=0"], "beta (0.0) must be above 0 and finite"),
        (["loss.loss_type=dpo"], "sigmoid, ipo, robust"),
        (["loss.label_smoothing=0.5"], "label_smoothing (0.5)"),
        (["loss=orpo", "loss.label_smoothing=0.1"], "label_smoothing (0.1) is no setting of loss_type=orpo"),
        (["loss.desirable_weight=2"], "loss.desirable_weight (2.0) is no setting of loss=sigmoid"),
        (["loss=cpo", "reference.model=x"], "reference.model (x) is never read by loss=cpo"),
        (["warmup.answers=best"], "must be one of chosen, both"),
        (["warmup.steps=-1"], "warmup.steps (-1) must be at least 0"),
        (["trainer.packing=padding_free"], "padding_free"),
        (["trainer.micro_token_budget=300"], "2 * max_seq_len (256)"),
        (["reference.model=/nowhere/at/all"], "/nowhere/at/all"),
        (["data=/nowhere.jsonl"], "does not exist"),
        (["lora.rank=-1"], "lora rank (-1)"),
        (["heldout_split=test"], "are for data of your own"),
        (["trainer.lrr=1"], "did you mean trainer.lr"),
        (
            ["callbacks.keep_best=pairwise_accuracy", "trainer.eval_every_n_steps=1"],
            "reads pairwise_accuracy, and this run measures",
        ),
    ],
)
def test_an_invalid_setting_is_a_one_line_error_and_leaves_no_folder(
    tiny: list[str], tmp_path: Path, arguments: list[str], said: str
) -> None:
    assert said in " ".join(refused(*tiny, *arguments).split())
    assert not list(tmp_path.iterdir())


def test_an_evaluation_during_training_can_end_the_run_with_the_best_weights(tiny: list[str], tmp_path: Path) -> None:
    early = ["trainer.eval_every_n_steps=1", "trainer.early_stopping_patience=1", "trainer.early_stopping_min_delta=9"]
    dpo(*tiny, *early)
    summary = summary_of(tmp_path / "run")
    assert summary["early_stopping"]["stopped"] is True
    evaluated = [line for line in metrics_of(tmp_path / "run") if "eval/rewards/accuracies" in line]
    assert len(evaluated) == summary["steps"] == 2


def test_a_loaded_model_has_its_own_defaults() -> None:
    small, loaded = compose_dpo(), compose_dpo(["model=x", "warmup.steps=7"])
    assert (small.warmup.steps > 0, compose_dpo(["model=x"]).warmup.steps, loaded.warmup.steps) == (True, 0, 7)
    assert loaded.trainer.lr < small.trainer.lr


def test_a_loss_has_its_own_defaults() -> None:
    simpo, kto = compose_dpo(["loss=simpo"]).loss, compose_dpo(["loss={loss_type: kto, desirable_weight: 2}"]).loss
    assert (simpo.loss_type, simpo.beta, simpo.simpo_gamma, simpo.nll_coeff) == ("simpo", 2.0, 0.5, 0.0)
    assert (kto.beta, kto.desirable_weight, kto.undesirable_weight) == (0.1, 2.0, 1.0)


def test_prompts_are_those_of_the_pairs_and_samples_follow_from_the_seed() -> None:
    import asyncio

    tokenizer = make_byte_tokenizer()
    from ludic.training.samples.preference import preference_dataset_to_saw_items

    items = preference_dataset_to_saw_items([*rows(2), *rows(2)], tokenizer)
    prompts = [tokenizer.decode(ids) for ids, _ in list_prompts(items)]
    assert prompts == ["0+1=", "1+1="]
    policy = tiny_model().eval()

    def ask(seed: int) -> list[str]:
        answers = asyncio.run(sample_answers(policy, tokenizer, items, None, count=4, max_new_tokens=4, seed=seed))
        assert not answers.is_judged
        return [answer.text for answer in answers.sampled]

    assert ask(1) == ask(1) != ask(2)
    assert len({item_key(item) for item in items}) == 4
