"""Published tokenizers, SmolLM2's and Gemma 3's, through every command: prompts, ends of turns and
begin tokens are those of transformers. `make smollm2` and `make gemma3` fetch the folders."""

import asyncio
import copy
import json
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from playing import play
from rendering_commands import ASKED, SAID, last_trained, prompt_of, prompts_of_commands, write_rows
from training_samples import assert_same_tensors, cpu_config, gradients_of
from transformers import AutoTokenizer
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.errors import ConfigError, DataError
from ludic.inference import ChatCompletionRequest, ReturnSpec, SamplingParams
from ludic.inference.client import Sampled
from ludic.inference.local.client import LocalChatClient, end_token_ids
from ludic.inference.prompts.encoder import PromptEncoder
from ludic.inference.prompts.template import ChatTemplate, Dialogue, find_turn_end
from ludic.recipes.epochs_schema import compose_sft
from ludic.recipes.model import build_tokenizer
from ludic.runs.data.preview import preview
from ludic.training import MaskedCausalLMCrossEntropyLoss, RLAlgorithm, SAWItem
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import logprobs
from ludic.training.preflight.layouts import with_right_layout
from ludic.training.samples.conversations import ChatTokenizer
from ludic.types import TokenTrace

pytestmark = pytest.mark.integration
MODELS = Path(__file__).parents[3] / "target" / "models"
GEMMA = (
    "{{ bos_token }}{%- if messages[0].role == 'system' -%}{%- set first = messages[0].content + '\n\n' -%}"
    "{%- set messages = messages[1:] -%}{%- else -%}{%- set first = '' -%}{%- endif -%}"
    "{%- for m in messages -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}"
    "{%- endif -%}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}"
    "{{ m.content | trim }}{{ '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
ENDS = {"smollm2": "<|im_end|>", "gemma3": "<end_of_turn>"}
SYSTEM = {"role": "system", "content": "Be brief, naïve 日本 🙂."}
TALKS = {
    "one turn": ASKED,
    "system": [SYSTEM, *ASKED],
    "turns": [*ASKED, *SAID, {"role": "user", "content": "  Again?"}],
    "system and turns": [SYSTEM, *ASKED, *SAID, {"role": "user", "content": "Again?\n"}],
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
READ = AutoTokenizer.from_pretrained
SUPERVISED = RLAlgorithm("supervised", ConstantCredit(1.0), MaskedCausalLMCrossEntropyLoss())


@lru_cache(maxsize=4)
def read_tokenizer(place, changed, options):
    return READ(place, **dict(options))


def copy_of_tokenizer(place, **options):
    """Gemma's takes three seconds to read, and each command reads it. Of files that have not
    changed it gets a copy, whose template and special tokens are its own."""
    changed = tuple(sorted((path.name, path.stat().st_mtime_ns) for path in Path(place).iterdir()))
    return copy.copy(read_tokenizer(str(place), changed, tuple(sorted(options.items()))))


@pytest.fixture(autouse=True)
def read_once(monkeypatch):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", copy_of_tokenizer)


@cache
def tokenizer_of(name):
    if not (MODELS / name).is_dir():
        pytest.skip(f"target/models/{name} does not exist; `make {name}` makes it")
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name)
    if name == "gemma3":
        tokenizer.chat_template = GEMMA
    return tokenizer


def tiny(name, **changes):
    """A random model of the folder's config with two narrow layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer_of(name)
    config = AutoConfig.from_pretrained(MODELS / name)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    for key, value in {**sizes, "num_key_value_heads": 1, "initializer_range": 0.1, **changes}.items():
        setattr(config, key, value)
    if name == "gemma3":
        config.layer_types = ["sliding_attention", "full_attention"]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def settings_of(tmp_path, name):
    tiny(name).save_pretrained(tmp_path / "policy")
    (tmp_path / "gemma.jinja").write_text(GEMMA)
    template = [f"chat_template={tmp_path / 'gemma.jinja'}"] if name == "gemma3" else []
    return [f"model={tmp_path / 'policy'}", f"tokenizer={MODELS / name}", *template]


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("talk", TALKS)
def test_every_command_renders_the_prompt_of_transformers(tmp_path, name, talk):
    tokenizer, end = tokenizer_of(name), tokenizer_of(name).convert_tokens_to_ids(ENDS[name])
    item, parts, found = prompts_of_commands(tmp_path, settings_of(tmp_path, name), {}, prompt=TALKS[talk])
    expected = tokenizer.apply_chat_template(TALKS[talk], add_generation_prompt=True, tokenize=True)["input_ids"]
    assert found == dict.fromkeys(found, expected)
    assert len(found) == 8
    assert last_trained(item) == end == find_turn_end(parts.tokenizer).token
    assert end_token_ids(parts.model, parts.tokenizer) == {end, tokenizer.eos_token_id}
    assert expected.count(tokenizer.bos_token_id) == (1 if name == "gemma3" else len(TALKS[talk]) + 1 + ("system" not in talk))


@pytest.mark.parametrize("name", ENDS)
def test_text_is_read_by_every_command_as_the_tokenizer_reads_it(tmp_path, name):
    """Gemma's begins with `<bos>`."""
    tokenizer = tokenizer_of(name)
    settings = [each for each in settings_of(tmp_path, name) if not each.startswith("chat_template")]
    bare = type(tokenizer).from_pretrained(MODELS / name)
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "bare")
    settings[1] = f"tokenizer={tmp_path / 'bare'}"
    item, _, found = prompts_of_commands(tmp_path, settings, {}, prompt="What is 2+2?", answers=(" It is 4.", " It is 5."))
    assert found == dict.fromkeys(found, tokenizer("What is 2+2?")["input_ids"])
    assert (prompt_of(item)[0] == tokenizer.bos_token_id) == (name == "gemma3")
    assert last_trained(item) == tokenizer.eos_token_id


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("system", [[], [SYSTEM]])
def test_exactly_the_answers_and_their_ends_are_trained(tmp_path, name, system):
    talk = [*system, *ASKED, *SAID, {"role": "user", "content": "Und 日本?"}, {"role": "assistant", "content": "naïve 🙂"}]
    data = write_rows(tmp_path / "rows.jsonl", {"messages": talk})
    (tmp_path / "gemma.jinja").write_text(GEMMA)
    template = [f"chat_template={tmp_path / 'gemma.jinja'}"] if name == "gemma3" else []
    tokenizer_of(name)
    recipe = compose_sft([f"tokenizer={MODELS / name}", data, *template])
    shown = preview(recipe, build_tokenizer(recipe), 1)
    trained = [span.text for span in shown.samples[0].spans if span.trained]
    assert trained == [f"It is 4.{ENDS[name]}", f"naïve 🙂{ENDS[name]}"]
    assert "".join(span.text for span in shown.samples[0].spans) == tokenizer_of(name).apply_chat_template(talk, tokenize=False)


@pytest.mark.parametrize("name", ENDS)
def test_tools_that_the_template_leaves_out_are_an_error(name):
    with pytest.raises(DataError, match=r"tools, .*chat template leaves out"):
        ChatTokenizer(tokenizer_of(name)).tokenize([*ASKED, *SAID], tools=TOOLS)
    with pytest.raises(ConfigError, match="ignores tools"):
        ChatTemplate(tokenizer_of(name)).render(ASKED, TOOLS)


@pytest.mark.parametrize(
    ("name", "token", "finish"),
    [
        ("smollm2", "<|im_end|>", "stop"),
        ("smollm2", "<|endoftext|>", "length"),
        ("gemma3", "<end_of_turn>", "stop"),
        ("gemma3", "<eos>", "stop"),
        ("gemma3", "<start_of_turn>", "length"),
    ],
)
def test_an_answer_ends_at_the_end_tokens_only(name, token, finish):
    tokenizer, model = tokenizer_of(name), tiny(name)
    end = tokenizer.convert_tokens_to_ids(token)
    model.lm_head = torch.nn.Linear(32, len(tokenizer))  # its bias decides
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.zero_()[end] = 1
    request = ChatCompletionRequest("tiny", ASKED, SamplingParams(temperature=0.0, max_tokens=3), ReturnSpec.for_rl())
    response, _ = play(LocalChatClient(model, tokenizer).complete(request))
    assert list(response.completion_token_ids) == [end] * (1 if finish == "stop" else 3)
    assert (response.finish_reason, response.text) == (finish, "")


def long_items(draw):
    """Two prompts of 600 and 530 tokens, each with three answers."""
    items = []
    for group, length in enumerate((600, 530)):
        prompt = draw.integers(10, 1000, length).tolist()
        for index in range(3):
            ids = [*prompt, *draw.integers(10, 1000, 5 + index).tolist()]
            mask = [0] * length + [1] * (5 + index)
            meta = {"rollout_id": f"{group}-{index}", "step_index": 0, "completion_length": 5 + index, "prompt_length": length}
            items.append(SAWItem(ids, [1] * len(ids), mask, 1.0, meta))
    return items


@pytest.mark.parametrize("logits", ["full", "chunked"])
def test_layouts_beyond_the_sliding_window_have_the_gradient_of_each_sample_alone(logits, monkeypatch):
    """Of the vocabulary only what the samples have: all logits of one would be 670 MB. Four rows of
    it are a chunk, as of the whole."""
    model, items = tiny("gemma3", vocab_size=1000), long_items(np.random.default_rng(0))
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 4 * 1000)

    def backward(make, **options):
        cfg = cpu_config(**{"max_seq_len": 640, "micro_token_budget": 4000, **options})
        macro = MacroBatch.ingest(items, 640)
        mini_batch = make(macro, np.arange(len(items)), cfg)
        if options.get("packing"):
            assert with_right_layout(cfg, model).packing == "padding_free"
        backend = TorchBackend(model, cfg, algo=SUPERVISED)
        model.zero_grad(set_to_none=True)
        result = asyncio.run(backend.forward_backward(mini_batch, totals=mini_batch.totals).result())
        return gradients_of(model), result.loss.item()

    assert model.config.sliding_window == 512
    alone, loss = backward(MiniBatch, logits="full", micro_token_budget=640)  # two samples have more tokens
    scale = max(gradient.abs().max().item() for gradient in alone.values())
    for make, options in ((MiniBatch, {"packing": "padding_free"}), (TreeMiniBatch, {"prefix_sharing": "tree"})):
        got, its_loss = backward(make, logits=logits, **options)
        assert its_loss == pytest.approx(loss, rel=1e-5)
        assert_same_tensors(got, alone, atol=2e-5 * max(1.0, scale))


@pytest.mark.parametrize("name", ENDS)
def test_a_run_of_one_step_can_be_viewed_and_its_rollouts_trained_on(tmp_path, name):
    rows = write_rows(tmp_path / "rows.jsonl", {"prompt": [SYSTEM, {"role": "user", "content": " héé 日本 🙂"}]})
    other = write_rows(tmp_path / "other.jsonl", {"prompt": "another"})
    sizes = ["steps=1", "rollout.prompts=1", "rollout.group_size=2", "task.args.max_new_tokens=8", "evaluation.prompts=1"]
    where = [f"output={tmp_path}", "name=run", "threads=1", "reward=byte_rewards:mean_id"]
    for arguments in (
        ["train", *settings_of(tmp_path, name), rows, f"task.args.heldout_{other}", *sizes, *where],
        ["view", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")],
        ["rollout", str(tmp_path / "run"), "--episodes", "2", "--out", str(tmp_path / "played.jsonl")],
        ["sft", *settings_of(tmp_path, name), f"data={tmp_path / 'played.jsonl'}", "--preview", "1", "--json"],
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    assert "héé 日本 🙂" in json.dumps((tmp_path / "page.html").read_text(encoding="utf-8"), ensure_ascii=False)
    played = json.loads((tmp_path / "played.jsonl").read_text(encoding="utf-8").splitlines()[0])["steps"][0]
    (sample,) = json.loads(result.stdout)["samples"]
    tokenizer, ids = tokenizer_of(name), played["trace"]["completion_token_ids"]
    assert "".join(span["text"] for span in sample["spans"] if span["trained"]) == tokenizer.decode(ids)
    assert (
        played["trace"]["prompt_token_ids"]
        == tokenizer.apply_chat_template(played["info"]["chat_prompt_messages"], add_generation_prompt=True)["input_ids"]
    )


@pytest.mark.parametrize("name", ENDS)
def test_later_turns_begin_with_the_sampled_ids_whatever_the_tokenizer_would_make_of_their_text(name):
    tokenizer = tokenizer_of(name)
    prompts, talk, before = PromptEncoder(tokenizer), list(TALKS["system"]), []
    for said in ("Paris", "the largest one, Lyon"):
        prompt = prompts.encode(Dialogue(talk))
        assert prompt.ids[: len(before)] == before
        assert tokenizer.decode(prompt.ids) == ChatTemplate(tokenizer).render(talk)
        # One token a character: not what the tokenizer makes of the word.
        answer = [token for letter in said for token in tokenizer.encode(letter, add_special_tokens=False)]
        assert answer != tokenizer.encode(said, add_special_tokens=False)
        before = [*prompt.ids, *answer, tokenizer.convert_tokens_to_ids(ENDS[name])]
        trace = TokenTrace.from_arrays(prompt.ids, before[len(prompt.ids) :], None, "stop")
        message = prompts.read_answer(prompt, Sampled(trace, True, 0)).message
        talk = [*talk, message, {"role": "user", "content": "Another?"}]
    assert prompts.encode(Dialogue(talk)).ids[: len(before)] == before
