"""`ludic sft`: what a run writes, that it is reproducible, resumes and stops, and that rows of
every format can be trained on."""

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
from training_samples import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from ludic.recipes.epochs_schema import compose_sft
from ludic.runs.data.sft import split_by_prompt
from ludic.runs.epochs import EpochsRun
from ludic.runs.sft import SFTRun
from ludic.training import SAWItem

TINY = [*NETWORK, "threads=1", "rows=40", "batch_size=8", "epochs=1", "heldout=0.1"]
SUMMARY_KEYS = [
    "status",
    "stopped_by",
    "model",
    "algorithm",
    "versions",
    "before",
    "after",
    "epochs",
    "data",
    "wall_s",
    "phases_s",
    "padding",
    "memory",
    "steps",
    "early_stopping",
    "seed",
    "config_hash",
]
sft, refused, train_until = (partial(do, "sft") for do in (commands.ludic, commands.refused, commands.train_until))


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    return [*TINY, f"output={tmp_path}", "name=run"]


def pairs(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(count)]


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    """A model on disk whose tokenizer has a chat template."""
    path = tmp_path / "chat-model"
    tiny_model(vocab_size=261).save_pretrained(path)
    chat_tokenizer(CHATML).save_pretrained(path)
    return path


def test_rows_of_a_table_can_be_trained_on(tiny: list[str], tmp_path: Path) -> None:
    """A data set that `ludic train` accepts is accepted by `ludic sft`."""
    (tmp_path / "rows.csv").write_text("prompt,completion\n" + "".join(f"{n}{n}>,{n}\n" for n in range(12)))
    (tmp_path / "rows.json").write_text(json.dumps([{"prompt": "a>", "completion": "b"}] * 2))
    sft(*tiny, f"data=[{tmp_path / 'rows.csv'},{tmp_path / 'rows.json'}]", "heldout=0")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["data"]["samples"] == 14


def test_a_run_writes_every_documented_file(tiny: list[str], tmp_path: Path) -> None:
    shown = sft(*tiny)
    run = tmp_path / "run"
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "loss.png", "data.jsonl"):
        assert (run / name).stat().st_size > 0, name
    for said in ("Held-out loss", "step 5", "Padding", "Seconds", "0 longer than max_seq_len"):
        assert said in shown, said
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(line["phase"], line["step"]) for line in lines] == [("sft", step) for step in range(1, 6)]
    summary = summary_of(run)
    assert list(summary) == SUMMARY_KEYS
    assert (summary["steps"], summary["epochs"]) == (5, round(40 / 36, 3))
    assert (summary["data"]["samples"], summary["data"]["heldout_samples"]) == (36, 4)
    assert summary["data"]["samples_without_end"] == 0
    assert 50 < summary["memory"]["process_peak_mb"] < 100_000  # importing torch alone exceeds the first limit
    assert summary["after"]["loss"] < summary["before"]["loss"]


def test_the_saved_model_is_in_hugging_face_format_and_is_the_evaluated_one(tiny: list[str], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", *pairs(20))
    sft(*tiny, f"data={data}", f"heldout_data={data}")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    total, tokens = 0.0, 0
    with torch.no_grad():
        for row in pairs(20):
            prompt = tokenizer(row["prompt"])["input_ids"]
            ids = torch.tensor([[*prompt, *tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]])
            logp = torch.log_softmax(model(ids).logits[0, :-1], dim=-1).gather(1, ids[0, 1:, None])
            total, tokens = total - float(logp[len(prompt) - 1 :].sum()), tokens + ids.shape[1] - len(prompt)
    measured = summary_of(tmp_path / "run")["after"]
    assert measured["tokens"] == tokens
    assert measured["loss"] == pytest.approx(total / tokens, rel=1e-4)


def test_the_demonstrations_on_disk_are_the_data_of_the_run(tiny: list[str], tmp_path: Path) -> None:
    sft(*tiny)
    rows = [json.loads(line) for line in (tmp_path / "run" / "data.jsonl").read_text().splitlines()]
    assert len(rows) == 40
    assert all(row["completion"] == "".join(sorted(row["prompt"][:-1])) for row in rows)
    sft(*tiny, "name=again", f"data={tmp_path / 'run' / 'data.jsonl'}")
    assert same_weights(tmp_path / "run", tmp_path / "again")


def test_json_prints_only_the_summary(tiny: list[str], tmp_path: Path) -> None:
    assert json.loads(sft(*tiny, "--json")) == summary_of(tmp_path / "run")


def test_two_runs_of_a_config_are_equal_and_another_seed_differs(tiny: list[str], tmp_path: Path) -> None:
    sft(*tiny, "name=one")
    sft(str(tmp_path / "one" / "config.yaml"), "name=two")
    sft(*tiny, "name=three", "seed=1")
    assert same_weights(tmp_path / "one", tmp_path / "two")
    assert not same_weights(tmp_path / "one", tmp_path / "three")
    one, two = (summary_of(tmp_path / name) for name in ("one", "two"))
    assert (one["after"], one["config_hash"]) == (two["after"], two["config_hash"])


@pytest.mark.parametrize("packing", ["optimal", "greedy", "padding_free"])
def test_packing_changes_the_number_of_passes_but_not_the_loss(tiny: list[str], tmp_path: Path, packing: str) -> None:
    data = write_rows(tmp_path / "data.jsonl", *({"prompt": "q" * (n % 9), "completion": "a" * (1 + n % 5)} for n in range(40)))
    settings = [f"data={data}", "heldout=0", f"heldout_data={data}", "trainer.micro_token_budget=40", "trainer.max_seq_len=32"]
    sft(*tiny, *settings, "name=reference", "trainer.packing=greedy", "trainer.micro_token_budget=4096")
    sft(*tiny, *settings, f"trainer.packing={packing}")
    reference, measured = summary_of(tmp_path / "reference"), summary_of(tmp_path / "run")
    assert measured["after"]["loss"] == pytest.approx(reference["after"]["loss"], rel=1e-4)
    assert measured["padding"]["computed_tokens"] < reference["padding"]["computed_tokens"]
    if packing == "padding_free":
        assert measured["padding"]["computed_tokens"] == measured["padding"]["real_tokens"]


def test_conversations_are_rendered_by_the_models_template(tiny: list[str], tmp_path: Path, chat_model: Path) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    data = write_rows(tmp_path / "chats.jsonl", *({"messages": talk * (1 + n % 2)} for n in range(8)))
    sft(*tiny, f"model={chat_model}", f"data={data}", "heldout=0", "batch_size=4")
    counts = summary_of(tmp_path / "run")["data"]
    assert counts["trained_tokens"] == 4 * 3 + 4 * 6  # y, o and the end token of each answer
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").chat_template == CHATML
    sft(*tiny, f"model={chat_model}", f"data={data}", "heldout=0", "batch_size=4", "assistant_turns=each", "name=each")
    assert summary_of(tmp_path / "each")["data"]["samples"] == 12


def test_a_template_from_a_file_is_used_and_saved(tiny: list[str], tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (tmp_path / "chat.jinja").write_text(template)
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    data = write_rows(tmp_path / "chats.jsonl", *({"messages": talk} for _ in range(4)))
    assert "no chat template; set chat_template=FILE" in refused(*tiny, f"data={data}")
    shown = sft(*tiny, f"data={data}", f"chat_template={tmp_path / 'chat.jinja'}", "heldout=0")
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").chat_template == template
    assert "4 samples do not end with <eos>" in (note := " ".join(shown.split()))
    assert "another token, set eos_token=TOKEN" in note
    assert "does not exist" in refused(*tiny, f"data={data}", "chat_template=/nowhere.jinja", "name=other")


def test_rows_of_all_formats_can_be_mixed_and_come_from_several_files(tiny: list[str], tmp_path: Path) -> None:
    step = {"prev_obs": "q", "action": "a", "reward": 1.0, "trace": {"prompt_token_ids": [5, 6], "completion_token_ids": [7, 2]}}
    one = write_rows(tmp_path / "one.jsonl", *pairs(3), {"id": "r", "steps": [step, {**step, "index": 1}]})
    two = write_rows(tmp_path / "two.jsonl", {"input_ids": [5, 6, 2], "action_mask": [0, 1, 1]})
    sft(*tiny, f"data=[{one},{two}]", "heldout=0")
    summary = summary_of(tmp_path / "run")
    assert summary["data"]["samples"] == 3 + 2 + 1
    assert summary["before"] is None
    assert summary["after"] is None


def test_samples_longer_than_the_limit_are_truncated_and_counted(tiny: list[str], tmp_path: Path) -> None:
    rows = [{"prompt": "q" * length, "completion": "answer"} for length in (2, 20, 60)]
    data = write_rows(tmp_path / "data.jsonl", *rows)
    shown = sft(*tiny, f"data={data}", "heldout=0", "trainer.max_seq_len=24")
    counts = summary_of(tmp_path / "run")["data"]
    assert (counts["samples"], counts["samples_cut"], counts["samples_cut_empty"], counts["samples_without_end"]) == (3, 2, 1, 2)
    assert re.search("2 longer than max_seq_len .*1 of them", " ".join(shown.split()))


def test_the_held_out_loss_is_measured_during_training_and_can_end_it(tiny: list[str], tmp_path: Path) -> None:
    sft(*tiny, "epochs=9", "trainer.lr=0", "trainer.eval_every_n_steps=2", "trainer.early_stopping_patience=1")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = [line["eval/loss"] for line in lines if "eval/loss" in line and "train/loss" not in line]
    summary = summary_of(tmp_path / "run")
    assert measured == [summary["before"]["loss"]] * 2
    assert summary["steps"] == 4
    assert summary["padding"]["real_tokens"] > 0  # an evaluated step keeps its training statistics


def test_rows_with_one_prompt_are_held_out_together() -> None:
    def row(prompt: int, answer: int) -> list[SAWItem]:
        return [SAWItem([prompt, answer], [1, 1], [0, 1], 1.0)]

    rows = [row(n // 4, n) for n in range(40)]
    train, heldout = split_by_prompt(rows, 0.3)
    assert (len(train), len(heldout)) == (28, 12)
    assert not {item.input_ids[0] for item in train} & {item.input_ids[0] for item in heldout}
    assert split_by_prompt(rows, 0.3) == (train, heldout)
    assert split_by_prompt(rows, 0.05)[1] == []  # no group is small enough
    assert split_by_prompt(rows, 0.0) == ([row[0] for row in rows], [])


# ---- invalid settings, stopping, resuming
# ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trainer.lrr=1"], "did you mean trainer.lr"),
        (["dat=x.jsonl"], "did you mean data"),
        (["rows.jsonl"], "write data=rows.jsonl for a data file"),
        (["data=/nowhere.jsonl"], "does not exist"),
        (["data=3"], "must be the path of a file"),
        (["heldout=1.0"], "heldout (1.0) must be at least 0 and below 1"),
        (["batch_size=0"], "batch_size (0) must be at least 1"),
        (["assistant_turns=some"], "all, last, each"),
        (["trainer.micro_token_budget=8"], "micro_token_budget"),
        (["model=/nowhere/at/all"], "config.json"),
        (["heldout=0", "trainer.eval_every_n_steps=1"], "needs held-out rows"),
        (["task.kind=srt"], "did you mean sort"),
        (["--resume", "/nowhere"], "accepts steps=N"),
    ],
)
def test_an_invalid_setting_is_a_one_line_error_and_leaves_no_folder(
    tiny: list[str], tmp_path: Path, arguments: list[str], said: str
) -> None:
    assert said in refused(*tiny, *arguments)
    assert not list(tmp_path.iterdir())


def test_an_invalid_row_is_named_before_anything_is_written(tiny: list[str], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", *pairs(2), {"body": "free"})
    assert re.search(r"data\.jsonl, line 3 .*columns body, .*no format", refused(*tiny, f"data={data}"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [1, 3])
def test_a_run_stopped_anywhere_resumes_to_the_uninterrupted_run(tiny: list[str], tmp_path: Path, step: int) -> None:
    sft(*tiny, "name=whole", "epochs=2")
    assert train_until(step, [*tiny, "name=parts", "epochs=2"]) == 130
    interrupted = summary_of(tmp_path / "parts")
    assert (interrupted["after"], interrupted["steps"]) == (None, step)
    [checkpoint] = (tmp_path / "parts" / "checkpoints").rglob(f"step_{step:06d}")
    assert_same_model(checkpoint, tmp_path / "parts" / "model")
    sft("--resume", str(tmp_path / "parts"))
    assert same_weights(tmp_path / "whole", tmp_path / "parts")
    whole, parts = (summary_of(tmp_path / name) for name in ("whole", "parts"))
    assert all(parts[key] == whole[key] for key in ("before", "after", "steps", "data", "config_hash"))
    lines = len((tmp_path / "parts" / "metrics.jsonl").read_text().splitlines())
    sft("--resume", str(tmp_path / "parts"))  # resuming a finished run only reports
    assert len((tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()) == lines


def assert_same_model(checkpoint: Path, saved: Path) -> None:
    """Each folder stands alone."""
    assert (checkpoint / "generation_config.json").read_text() == (saved / "generation_config.json").read_text()
    one, other = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (checkpoint, saved))
    assert all(torch.equal(one[name], tensor) for name, tensor in other.items())
    one, other = (AutoTokenizer.from_pretrained(folder) for folder in (checkpoint, saved))
    assert one("1+1=")["input_ids"] == other("1+1=")["input_ids"]
    assert one.chat_template == other.chat_template


ENDED_BY_ITS_EVALUATION = [
    *("epochs=9", "trainer.eval_every_n_steps=2", "trainer.early_stopping_patience=1"),
    "trainer.early_stopping_min_delta=100",  # nothing counts as an improvement, so step 4 is the last
]


def test_ctrl_c_during_the_last_evaluation_does_not_interrupt_the_run(tiny: list[str], tmp_path: Path) -> None:
    """There is nothing left to resume: the run says that it is complete, and it is."""
    sft(*tiny, "name=whole", *ENDED_BY_ITS_EVALUATION)
    assert train_until(4, [*tiny, "name=parts", *ENDED_BY_ITS_EVALUATION]) == 0
    whole, parts = (summary_of(tmp_path / name) for name in ("whole", "parts"))
    assert (parts["after"], parts["steps"]) == (whole["after"], 4)
    assert same_weights(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("every", [0, 1, 3])
def test_a_run_ended_by_its_evaluation_stays_ended_when_resumed(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """It is stopped during its last evaluation, wherever its last checkpoint is."""
    given = [*tiny, *ENDED_BY_ITS_EVALUATION, f"checkpoint.every_n_steps={every}"]
    sft(*given, "name=whole")
    with monkeypatch.context() as patch:
        patch.setattr(SFTRun, "train", train_and_interrupt)
        assert commands.exit_status("sft", *given, "name=parts") == 130
    sft("--resume", str(tmp_path / "parts"))
    whole, parts = (summary_of(tmp_path / name) for name in ("whole", "parts"))
    assert (parts["after"], parts["steps"]) == (whole["after"], 4)
    assert same_weights(tmp_path / "whole", tmp_path / "parts")


async def train_and_interrupt(run: SFTRun, *args: Any, **options: Any) -> None:
    await EpochsRun.train(run, *args, **options)
    raise KeyboardInterrupt


def test_other_data_under_the_same_name_is_refused_on_resume(tiny: list[str], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", *pairs(30))
    assert train_until(2, [*tiny, f"data={data}"]) == 130
    write_rows(data, *reversed(pairs(30)))
    assert "the content of data.jsonl has changed" in refused("--resume", str(tmp_path / "run"))


def test_a_loaded_model_has_its_own_default_rates_that_the_command_line_overrides() -> None:
    small, loaded, chosen = compose_sft(), compose_sft(["model=x"]), compose_sft(["model=x", "trainer.lr=1"])
    assert (small.trainer.lr, loaded.trainer.lr, chosen.trainer.lr) == (3e-3, 2e-5, 1.0)


def test_print_config_shows_every_field_and_runs_nothing(tmp_path: Path) -> None:
    shown = sft("--print-config", f"output={tmp_path}", "seed=9")
    assert "seed: 9" in shown
    assert "assistant_turns: all" in shown
    assert "packing:" in shown
    assert not list(tmp_path.iterdir())


def test_rows_of_other_libraries_are_trained_on_and_named(tiny: list[str], tmp_path: Path, chat_model: Path) -> None:
    alpaca = write_rows(tmp_path / "alpaca.jsonl", *({"instruction": f"{n}+1=", "output": str(n + 1)} for n in range(8)))
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    sharegpt = write_rows(tmp_path / "sharegpt.jsonl", *([{"conversations": turns}] * 8))
    shown = sft(*tiny, f"model={chat_model}", f"data=[{alpaca},{sharegpt}]", "heldout=0")
    assert "8 rows of alpaca (instruction, output)" in shown
    assert "8 rows of sharegpt (conversations)" in shown
    assert summary_of(tmp_path / "run")["data"]["trained_tokens"] == 8 * 2 + 8 * 3  # digit and end; y, o and end
    mixed = write_rows(tmp_path / "mixed.jsonl", {"instruction": "a", "output": "b"}, {"text": "c"})
    assert re.search(r"(?s)line 1 has alpaca \(instruction.*line 2 has text", refused(*tiny, "name=other", f"data={mixed}"))
    assert re.search(r"data_format \(csv\) .*auto, messages", refused(*tiny, "data_format=csv"))


def test_plain_texts_are_trained_whole_and_held_out_by_text(tiny: list[str], tmp_path: Path) -> None:
    """20 texts of 30 bytes and an end token, in pieces of 16 tokens: 16 + 16 tokens with one in
    both, 30 of them trained. A tenth of the texts, not of the pieces, is held out."""
    data = write_rows(tmp_path / "texts.jsonl", *({"text": f"{n:02d}" + "abcdefg " * 3 + "done"} for n in range(20)))
    sft(*tiny, f"data={data}", "trainer.max_seq_len=16")
    counts = summary_of(tmp_path / "run")["data"]
    assert (counts["samples"], counts["heldout_samples"]) == (36, 4)
    assert (counts["tokens"], counts["trained_tokens"], counts["samples_cut"]) == (18 * 32, 18 * 30, 0)
    assert counts["samples_without_end"] == 0  # the pieces that go on are none
