"""One conversation has the same prompt ids in every command, and turns end with the same token, for
small copies of the tokenizers of well-known families."""

import json
import re

import pytest
from chat_families import FAMILIES, make_tokenizer
from playing import play, tiny_model
from rendering_commands import ASKED, SAID, last_trained, prompt_of, prompts_of_commands, write_rows

from ludic.errors import ConfigError, DataError
from ludic.inference import ChatCompletionRequest, ReturnSpec, SamplingParams
from ludic.inference.local.client import LocalChatClient
from ludic.inference.prompts.template import find_turn_end, read_template_kwargs, with_kwargs
from ludic.recipes.compose import compose
from ludic.recipes.epochs_schema import compose_dpo, compose_rm, compose_sft
from ludic.recipes.model import build_tokenizer
from ludic.runs.data.preview import preview
from ludic.runs.data.sft import SFTData, count_sample
from ludic.runs.reinforce import RLRun
from ludic.training.samples.conversations import ChatTokenizer
from ludic.training.samples.sft import SFTItems

TALK = [*ASKED, *SAID, {"role": "user", "content": "Be brief."}, {"role": "assistant", "content": "4"}]


def save_model(name, folder, **settings):
    """The folder of a tiny model with the family's tokenizer and end tokens."""
    tokenizer, family = make_tokenizer(name), FAMILIES[name]
    model = tiny_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=256)
    if family.generation_eos:
        model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(list(family.generation_eos))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder / "tokenizer")  # beside the config of a Qwen2, transformers would make it that of Qwen2
    return tokenizer


def prompts_of_family(tmp_path, name, settings, column):
    """`prompts_of_commands` of a tiny model with the family's tokenizer, which comes first."""
    folder = tmp_path / "policy"
    tokenizer = save_model(name, folder)
    named = [f"model={folder}", f"tokenizer={folder / 'tokenizer'}"]
    return tokenizer, *prompts_of_commands(tmp_path, [*named, *settings], column)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_command_renders_the_same_prompt_and_ends_with_the_templates_token(tmp_path, name):
    tokenizer, item, parts, found = prompts_of_family(tmp_path, name, [], {})
    expected = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True)["input_ids"]
    assert found == dict.fromkeys(found, expected)
    end = tokenizer.convert_tokens_to_ids(FAMILIES[name].turn_end)
    assert last_trained(item) == find_turn_end(tokenizer).token == end
    ends = frozenset(parts.model.generation_config.eos_token_id if len(find_turn_end(tokenizer).ids) > 1 else [end])
    assert find_turn_end(tokenizer).ids <= ends
    assert count_sample(item, 256, ends)["samples_without_end"] == 0


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
@pytest.mark.parametrize("how", ["column", "setting"])
def test_arguments_of_the_template_reach_every_command(tmp_path, name, how):
    arguments = FAMILIES[name].kwargs
    settings = [f"chat_template_kwargs.{key}={json.dumps(value)}" for key, value in arguments.items()]
    column = {"chat_template_kwargs": {**arguments, "absent": None}}
    given = (settings, {}) if how == "setting" else ([], column)
    tokenizer, _, parts, found = prompts_of_family(tmp_path, name, *given)
    expected = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, **arguments)["input_ids"]
    assert expected != tokenizer.apply_chat_template(ASKED, add_generation_prompt=True)["input_ids"]
    assert found == dict.fromkeys(found, expected)
    if how == "setting":  # saved with the model, for servers that render
        parts.tokenizer.save_pretrained(tmp_path / "saved")
        again = build_tokenizer(compose_sft([f"tokenizer={tmp_path / 'saved'}", *settings]))
        assert again.chat_template == parts.tokenizer.chat_template
        assert again.apply_chat_template(ASKED, add_generation_prompt=True)["input_ids"] == expected


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "What is 2+2?", "input": "", "output": "It is 4."},
        {"conversations": [{"from": "human", "value": "What is 2+2?"}, {"from": "gpt", "value": "It is 4."}]},
    ],
)
def test_rows_of_other_formats_have_arguments_of_the_template_too(row):
    tokenizer, arguments = make_tokenizer("gpt-oss"), {"reasoning_effort": "low"}
    [item] = SFTItems(tokenizer).of_row({**row, "chat_template_kwargs": arguments}, "line 1")
    assert prompt_of(item) == tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, **arguments)["input_ids"]


def test_a_row_with_tools_is_rendered_with_the_template_for_tools():
    tokenizer = make_tokenizer("qwen2.5 base")
    marked = "{% generation %}{{ messages[-1].content }}<|im_end|>{% endgeneration %}"
    tokenizer.chat_template = {"default": marked, "tool_use": "{{ tools[0].function.name }}" + tokenizer.chat_template}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    [tokens] = ChatTokenizer(tokenizer).tokenize(TALK[:2], tools=tools)
    prompt = tokenizer.apply_chat_template(ASKED, tools=tools, add_generation_prompt=True)["input_ids"]
    assert tokens.input_ids[: len(prompt)] == prompt
    assert tokens.action_mask.index(1) == len(prompt)


def test_a_row_goes_before_the_setting(tmp_path):
    tokenizer, _, _, found = prompts_of_family(
        tmp_path, "gpt-oss", ["chat_template_kwargs.reasoning_effort=high"], {"chat_template_kwargs": {"reasoning_effort": "low"}}
    )
    expected = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, reasoning_effort="low")["input_ids"]
    assert found == dict.fromkeys(found, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_answer_of_a_conversation_is_trained_up_to_its_end(name):
    tokenizer, family = make_tokenizer(name), FAMILIES[name]
    each = ChatTokenizer(tokenizer, "each").tokenize(TALK)
    trained = [[token for token, keep in zip(one.input_ids, one.action_mask, strict=True) if keep] for one in each]
    assert [tokenizer.decode(ids).endswith(text + family.turn_end) for ids, text in zip(trained, ("It is 4.", "4"), strict=True)]
    if family.rewrites:
        with pytest.raises(DataError, match="assistant_turns=each"):
            ChatTokenizer(tokenizer).tokenize(TALK)
    else:
        [both] = ChatTokenizer(tokenizer).tokenize(TALK)
        assert [token for token, keep in zip(both.input_ids, both.action_mask, strict=True) if keep] == [*trained[0], *trained[1]]


@pytest.mark.parametrize("name", ["qwen2.5 base", "added end"])
def test_sampling_stops_at_the_end_of_a_turn_although_it_is_not_the_tokenizers_end_token(name):
    import torch

    tokenizer = make_tokenizer(name)
    model, end = tiny_model(vocab_size=len(tokenizer)), tokenizer.convert_tokens_to_ids(FAMILIES[name].turn_end)
    model.lm_head = torch.nn.Linear(32, len(tokenizer))  # its bias decides
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.copy_(torch.eye(len(tokenizer))[end])
    client = LocalChatClient(model, tokenizer)
    request = ChatCompletionRequest("tiny", ASKED, SamplingParams(temperature=0.0, max_tokens=5), ReturnSpec.for_rl())
    response, _ = play(client.complete(request))
    assert (list(response.completion_token_ids), response.finish_reason, response.text) == ([end], "stop", "")


def test_a_template_that_demands_a_system_message_has_its_end_of_turn():
    tokenizer = make_tokenizer("qwen2.5 base")
    demands = "{% if messages[0].role != 'system' %}{{ raise_exception('say who it is') }}{% endif %}"
    tokenizer.chat_template = demands + tokenizer.chat_template
    assert find_turn_end(tokenizer).token == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_the_end_token_is_a_setting(tmp_path):
    tokenizer = save_model("qwen2.5 base", tmp_path)
    folder = f"tokenizer={tmp_path / 'tokenizer'}"
    built = build_tokenizer(compose_sft([folder, "eos_token='<|im_end|>'"]))
    assert (built.eos_token, tokenizer.eos_token) == ("<|im_end|>", "<|endoftext|>")
    with pytest.raises(ConfigError, match=r"eos_token \(<end>\) .*no token.*special tokens are"):
        build_tokenizer(compose_sft([folder, "eos_token='<end>'"]))


def test_a_template_is_a_setting_of_every_command(tmp_path):
    save_model("zephyr", tmp_path)
    own = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
    (tmp_path / "own.jinja").write_text(own)
    for make in (compose, compose_sft, compose_dpo, compose_rm):
        recipe = make([f"tokenizer={tmp_path / 'tokenizer'}", f"chat_template={tmp_path / 'own.jinja'}"])
        assert build_tokenizer(recipe).chat_template == own
        recipe.chat_template = own
        assert build_tokenizer(recipe).chat_template == own
        recipe.chat_template = "absent.jinja"
        with pytest.raises(ConfigError, match=r"chat_template \(absent.jinja\) does not exist"):
            build_tokenizer(recipe)


def test_an_argument_that_the_template_does_not_read_is_an_error(tmp_path):
    save_model("qwen3", tmp_path)
    with pytest.raises(ConfigError, match=r"chat_template_kwargs has enable_thinkng, .*does not"):
        build_tokenizer(compose([f"tokenizer={tmp_path / 'tokenizer'}", "chat_template_kwargs.enable_thinkng=false"]))


def test_an_argument_that_renderings_leave_empty_has_its_setting():
    template = "{% for each in documents or [] %}{{ each.title }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = make_tokenizer("zephyr")
    tokenizer.chat_template = with_kwargs(template, {"documents": [{"title": "a 'title'"}]})
    assert tokenizer.apply_chat_template(ASKED, tokenize=False) == "a 'title'What is 2+2?"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tokenize"])
def test_an_argument_that_every_prompt_sets_is_an_error(name):
    with pytest.raises(ConfigError, match=f"chat_template_kwargs has {name}"):
        with_kwargs("{{ messages }}{{ add_generation_prompt }}", {name: True})
    with pytest.raises(DataError, match=f"row 1: chat_template_kwargs has {name}"):
        read_template_kwargs({"chat_template_kwargs": {name: True}}, "row 1")


def test_an_argument_has_a_name_that_a_template_can_set():
    with pytest.raises(ConfigError, match="chat_template_kwargs has a-b"):
        with_kwargs("{{ a }}-b{{ a-b }}", {"a-b": 1})


def test_a_column_that_is_no_object_names_the_row(tmp_path):
    save_model("qwen3", tmp_path)
    recipe = compose_sft(
        [
            f"tokenizer={tmp_path / 'tokenizer'}",
            write_rows(tmp_path / "rows.jsonl", {"messages": TALK[:2]}, chat_template_kwargs="no"),
        ]
    )
    with pytest.raises(DataError, match=r"line 1.*chat_template_kwargs \('no'\) .*object"):
        SFTData.read(recipe, build_tokenizer(recipe))


def test_a_template_whose_turns_end_with_no_token_is_warned_of_before_a_run(tmp_path, caplog):
    save_model("zephyr", tmp_path)
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    build_tokenizer(compose_sft([f"tokenizer={tmp_path / 'tokenizer'}", f"chat_template={json.dumps(plain)}"]))
    assert re.search("ends the assistant's turns .*no special token", caplog.text)


def test_the_preview_shows_the_end_of_a_turn(tmp_path):
    save_model("qwen2.5 base", tmp_path)
    recipe = compose_sft([f"tokenizer={tmp_path / 'tokenizer'}", write_rows(tmp_path / "rows.jsonl", {"messages": TALK})])
    shown = preview(recipe, build_tokenizer(recipe), 1)
    assert shown.end_of_turn == "<|im_end|>"
    assert shown.samples[0].spans[-2].text.endswith("<|im_end|>")


@pytest.mark.parametrize("prompt", [ASKED, TALK[:3]])
def test_a_prompt_of_messages_needs_a_template(tmp_path, prompt):
    save_model("zephyr", tmp_path)
    tokenizer = make_tokenizer("zephyr")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "bare")
    other = write_rows(tmp_path / "other.jsonl", {"prompt": "another"})
    rows = [write_rows(tmp_path / "rows.jsonl", {"prompt": prompt}), f"task.args.heldout_{other}", "reward=byte_rewards:mean_id"]
    recipe = compose([f"model={tmp_path}", f"tokenizer={tmp_path / 'bare'}", "threads=1", *rows])
    with pytest.raises(ConfigError, match=r"prompts of messages, .*no chat template; set chat_template=FILE"):
        RLRun.build(recipe, print)
