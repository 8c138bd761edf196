"""Batches from recorded rollouts: traces as sampled, chat templates, credit, and invalid
records."""

import asyncio
import inspect
import json
from dataclasses import fields

import pytest
from chat_tokenizers import CHATML, FORGETS_THOUGHTS, chat_tokenizer
from playing import Counting, ScriptedClient, protocol
from training_samples import cpu_config, tiny_model

from ludic.errors import ConfigError, DataError
from ludic.training import (
    ConstantCredit,
    EnvSpec,
    GroupNormalizedReturn,
    OfflineBatchSource,
    ProtocolSpec,
    RolloutEngine,
    RolloutRequest,
    Trainer,
    make_chat_template_step_to_item,
    make_sft,
)
from ludic.training.rollouts.log import append_rollouts, read_rollouts
from ludic.training.rollouts.to_samples import sample_from_step
from ludic.types import Rollout, Step, TokenTrace


def parse_rollout(name, reward=1.0, steps=1, **meta):
    trace = TokenTrace([5, 6], [7, 8, 2], [-0.5, -0.25, -0.125], "stop")
    made = [Step(i, "q", "a", None, reward, False, True, {"finish_reason": "stop"}, trace, 1) for i in range(steps)]
    return Rollout(name, made, meta)


@pytest.fixture
def recorded(tmp_path):
    """A function that writes rollouts to a file and returns its path."""

    def record(*rollouts, name="rollouts.jsonl"):
        append_rollouts(tmp_path / name, rollouts)
        return tmp_path / name

    return record


def batches(source, count):
    return [asyncio.run(source.next_batch()) for _ in range(count)]


def test_rollouts_are_read_back_as_they_were_written(recorded):
    written = [parse_rollout("r0", 0.5, 2, group_id="g"), parse_rollout("r1", -1.0)]
    assert read_rollouts(recorded(*written)) == written


def test_rollouts_of_an_engine_are_read_back(tmp_path):
    path = tmp_path / "log.jsonl"
    engine = RolloutEngine(
        env_registry={"counting": Counting},
        protocol_registry={"single": lambda: protocol(ScriptedClient("ab", "cde"))},
        jsonl_path=path,
    )
    request = RolloutRequest(EnvSpec("counting", {"goal": 2}), ProtocolSpec("single"), num_episodes=2)
    played = asyncio.run(engine.generate_rollouts([request], max_steps=3))
    read = read_rollouts(path)
    assert [[step.trace for step in rollout.steps] for rollout in read] == [[step.trace for step in r.steps] for r in played]
    source = OfflineBatchSource(path, sample_from_step, ConstantCredit(1.0), batch_size=4, shuffle=False)
    [batch] = batches(source, 1)
    assert [item.input_ids for item in batch.items] == [[1, 2, *text] for text in (b"ab", b"cde") * 2]


def test_a_record_has_the_documented_fields():
    parameters = [item for item in fields(OfflineBatchSource) if item.init]
    assert [item.name for item in parameters[:3]] == ["jsonl_paths", "step_to_item", "credit_assigner"]
    assert {item.name: item.default for item in parameters[3:]} == {
        "batch_size": 32,
        "shuffle": True,
        "sample_filter": None,
        "seed": 42,
        "num_workers": 0,
        "drop_last": False,
    }


def test_a_trace_is_trained_on_exactly_its_sampled_tokens(recorded):
    source = OfflineBatchSource([recorded(parse_rollout("r0"))], sample_from_step, ConstantCredit(0.5))
    [batch] = batches(source, 1)
    [item] = batch.items
    assert (item.input_ids, item.action_mask, item.weight) == ([5, 6, 7, 8, 2], [0, 0, 1, 1, 1], 0.5)
    assert item.actor_logps is not None
    assert item.actor_logps.token_logps == [-0.5, -0.25, -0.125]
    assert batch.meta == {
        "num_samples": 1,
        "target_rollouts": 1,
        "epoch": 0,
        "avg_completion_length": 3.0,
        "avg_prompt_length": 2.0,
        "source": "offline",
        "avg_total_reward": 1.0,
    }
    assert (len(source), source.num_batches_per_epoch, source.target_rollouts, source.epoch) == (1, 1, 32, 1)


def test_credit_is_computed_over_all_files_together(recorded):
    group = {"request_meta": {"group_id": "g"}}
    paths = [recorded(parse_rollout(name, reward, **group), name=f"{name}.jsonl") for name, reward in (("a", 1.0), ("b", 0.0))]
    source = OfflineBatchSource(paths, sample_from_step, GroupNormalizedReturn(group_size=2), shuffle=False)
    assert [item.weight for item in batches(source, 1)[0].items] == [0.5, -0.5]


def test_a_step_without_credit_has_weight_one(recorded):
    class Silent:
        def compute(self, rollouts):
            return {}

    source = OfflineBatchSource(recorded(parse_rollout("a", steps=2)), sample_from_step, Silent())
    assert [item.weight for item in batches(source, 1)[0].items] == [1.0, 1.0]


def test_rollouts_without_an_id_or_with_equal_ids_keep_their_own_credit(tmp_path):
    lines = []
    for name, reward in ((None, 1.0), (None, 2.0), ("x", 3.0), ("x", 4.0)):
        step = {
            "index": 0,
            "prev_obs": "q",
            "action": "a",
            "reward": reward,
            "trace": {"prompt_token_ids": [5], "completion_token_ids": [6]},
        }
        lines.append(json.dumps({"id": name, "steps": [step]}))
    path = tmp_path / "blank.jsonl"
    path.write_text("\n".join(lines) + "\n\n")

    class Reward:
        def compute(self, rollouts):
            return {(rollout.id, 0): rollout.total_reward for rollout in rollouts}

    [batch] = batches(OfflineBatchSource(path, sample_from_step, Reward(), shuffle=False), 1)
    assert [item.weight for item in batch.items] == [1.0, 2.0, 3.0, 4.0]
    assert batch.meta["target_rollouts"] == 4
    assert batch.items[3].meta["rollout_id"] == "x#2"


def test_a_filter_drops_samples_and_counts_them(recorded):
    path = recorded(*(parse_rollout(f"r{i}", float(i % 2)) for i in range(6)))
    source = OfflineBatchSource(path, sample_from_step, ConstantCredit(1.0), sample_filter=lambda item: item.meta["reward"] > 0)
    assert (len(source), source.num_rollouts, source.num_samples_filtered) == (3, 6, 3)
    with pytest.raises(DataError, match="dropped all 6 samples"):
        OfflineBatchSource(path, sample_from_step, ConstantCredit(1.0), sample_filter=lambda item: False)


def test_errors_name_the_missing_file_or_field(tmp_path):
    def source_of(text):
        path = tmp_path / "file.jsonl"
        path.write_text(text)
        return OfflineBatchSource(path, sample_from_step, ConstantCredit(1.0))

    with pytest.raises(DataError, match="there are no rollouts in"):
        source_of("\n")
    with pytest.raises(DataError, match="does not exist"):
        OfflineBatchSource([tmp_path / "none.jsonl"], sample_from_step, ConstantCredit(1.0))
    with pytest.raises(DataError, match=r"file\.jsonl:2 is not JSON"):
        source_of('{"id": "a", "steps": [{"prev_obs": "q", "action": "a", "reward": 1}]}\n{"id"')
    with pytest.raises(DataError, match=r"file\.jsonl:1 has no steps"):
        source_of("{}")
    with pytest.raises(DataError, match=r"file\.jsonl:1: .*cannot be read: has no 'reward'"):
        source_of('{"steps": [{"prev_obs": "q", "action": "a"}]}')
    with pytest.raises(DataError, match="Missing rollout-time token trace"):
        source_of('{"steps": [{"prev_obs": "q", "action": "a", "reward": 1}]}')
    trace = '{"prompt_token_ids": [1], "completion_token_ids": [2], "completion_logprobs": []}'
    with pytest.raises(DataError, match="0 values for 1 tokens"):
        source_of('{"steps": [{"prev_obs": "q", "action": "a", "reward": 1, "trace": ' + trace + "}]}")
    with pytest.raises(ConfigError, match="num_workers"):
        OfflineBatchSource([], sample_from_step, ConstantCredit(1.0), num_workers=-1)


def test_fewer_rollouts_than_one_batch_with_drop_last_are_refused_immediately(recorded):
    with pytest.raises(ConfigError, match="leaves no batch"):
        OfflineBatchSource(recorded(parse_rollout("a")), sample_from_step, ConstantCredit(1.0), batch_size=2, drop_last=True)


def test_training_repeats_the_data_and_logs_its_rollouts(recorded):
    path = recorded(*(parse_rollout(f"r{i}") for i in range(3)))
    source = OfflineBatchSource(path, sample_from_step, ConstantCredit(1.0), batch_size=2)
    trainer = Trainer(model=tiny_model(), algo=make_sft(), batch_source=source, cfg=cpu_config())
    counts = [trainer.train_step_sync()["train/target_rollouts"] for _ in range(5)]
    assert counts == [2.0, 1.0, 2.0, 1.0, 2.0]
    assert source.epoch == 2


def test_a_checkpoint_has_the_state_of_the_source(recorded, tmp_path):
    from ludic.training import CheckpointConfig

    path = recorded(*(parse_rollout(f"r{i}", i / 10) for i in range(5)))

    def trainer(**options):
        source = OfflineBatchSource(path, sample_from_step, ConstantCredit(1.0), batch_size=2)
        folder = CheckpointConfig(tmp_path / "checkpoints", every_n_steps=1, max_to_keep=9)
        return Trainer(
            model=tiny_model(), algo=make_sft(), batch_source=source, cfg=cpu_config(), checkpoint_config=folder, **options
        )

    whole = [trainer_.train_step_sync()["train/avg_total_reward"] for trainer_ in [trainer()] for _ in range(7)]
    resumed = trainer(resume_from=4)
    assert [resumed.train_step_sync()["train/avg_total_reward"] for _ in range(3)] == whole[4:]


# ---- chat templates
# ------------------------------------------------------------------------------------------


def chat_step(**info):
    prompt = [{"role": "user", "content": "hi"}]
    return Step(0, "hi", "yo", None, 1.0, False, True, {"chat_prompt_messages": prompt, **info})


def test_the_template_renders_the_prompt_and_the_loss_covers_the_answer():
    tokenizer = chat_tokenizer(CHATML)
    rollout = Rollout("r", [chat_step(action="other", extra=1)], {"group_id": "g"})
    item = make_chat_template_step_to_item(tokenizer)(rollout, rollout.steps[0], 0.5)
    trained = [token for token, is_action in zip(item.input_ids, item.action_mask, strict=True) if is_action]
    assert tokenizer.decode(trained) == "yo<|im_end|>"
    assert tokenizer.decode(item.input_ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    assert item.weight == 0.5
    assert (item.meta["prompt_length"], item.meta["completion_length"]) == (1 + 5 + 2 + 1 + 1 + 1 + 10, 3)
    assert item.meta["action"] == "yo"  # info never replaces them
    assert (item.meta["extra"], item.meta["group_id"], item.meta["rollout_id"]) == (1, "g", "r")


def test_a_recorded_completion_takes_precedence_over_the_action():
    tokenizer = chat_tokenizer(CHATML)
    rollout = Rollout("r", [chat_step(chat_completion={"role": "assistant", "content": "recorded"})])
    item = make_chat_template_step_to_item(tokenizer)(rollout, rollout.steps[0], 1.0)
    assert "recorded<|im_end|>" in tokenizer.decode(item.input_ids)


class ListTokenizer:
    """A tokenizer with nothing but `apply_chat_template`, which returns plain lists."""

    def __init__(self, prompt, full):
        self.prompt, self.full = prompt, full

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize):
        assert tokenize
        return self.prompt if add_generation_prompt else self.full


def test_any_object_with_apply_chat_template_can_be_the_tokenizer():
    rollout = Rollout("r", [chat_step()])
    item = make_chat_template_step_to_item(ListTokenizer([1, 2], [1, 2, 3, 4]))(rollout, rollout.steps[0], 1.0)
    assert (item.input_ids, item.attention_mask, item.action_mask) == ([1, 2, 3, 4], [1] * 4, [0, 0, 1, 1])


@pytest.mark.parametrize(
    ("tokenizer", "step", "message"),
    [
        (ListTokenizer([1, 2], [1, 3, 4]), chat_step(), "not a prefix .*prompt and completion"),
        (ListTokenizer([1, 2], [1, 2]), chat_step(), "empty completion"),
        (ListTokenizer([1, 2], [1, 2, 3]), Step(0, "o", "a", None, 1.0, False, True), "no chat_prompt_messages"),
    ],
)
def test_a_step_whose_mask_cannot_be_computed_is_refused(tokenizer, step, message):
    with pytest.raises(ValueError, match=message):
        make_chat_template_step_to_item(tokenizer)(Rollout("r", [step]), step, 1.0)


def test_a_template_that_rewrites_the_prompt_is_refused():
    thoughtful = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>x</think>4"},
    ]
    step = Step(0, "q", "a", None, 1.0, False, True, {"chat_prompt_messages": thoughtful})
    with pytest.raises(DataError, match="not a prefix"):
        make_chat_template_step_to_item(chat_tokenizer(FORGETS_THOUGHTS))(Rollout("r", [step]), step, 1.0)


def test_the_factory_accepts_a_tokenizer():
    assert list(inspect.signature(make_chat_template_step_to_item).parameters) == ["tokenizer"]
