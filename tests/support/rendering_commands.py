"""One conversation as each command renders it: its prompt ids, and its end."""

import json

from playing import play
from safetensors.torch import save_file
from stub_sglang import StubSGLang
from stub_vllm import StubVLLM
from stub_vllm_sampling import GENERATE
from stub_weight_server import weights
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.inference.local.client import LocalChatClient
from ludic.inference.prompts.template import find_turn_end
from ludic.inference.sglang import SGLangClient
from ludic.inference.vllm.client import VLLMChatClient
from ludic.recipes.compose import compose
from ludic.recipes.epochs_schema import compose_dpo, compose_rm, compose_sft
from ludic.recipes.model import build_tokenizer
from ludic.rollouts.training.datasets.dataset_loaders import load_sft_dataset
from ludic.runs.data.sft import SFTData
from ludic.runs.dpo import DPORun
from ludic.runs.reinforce import RLRun
from ludic.runs.reward_model import RMRun
from ludic.runs.rollouts import make_engine, make_training_requests

ASKED = [{"role": "user", "content": "What is 2+2?"}]
SAID, WORSE = ([{"role": "assistant", "content": text}] for text in ("It is 4.", "It is 5."))


def write_rows(path, row, **more):
    path.write_text("".join(json.dumps({**row, **more, "answer": str(n)}) + "\n" for n in range(4)))
    return f"data={path}"


def prompt_of(item):
    return [int(token) for token in item.input_ids[: list(item.action_mask).index(1)]]


def before_last_answer(ids, mask):
    """Example: the mask 0 1 0 1 1 0 gives the first three ids."""
    last = len(mask) - 1 - mask[::-1].index(1.0)
    return ids[: last + 1 - mask[last::-1].index(0.0)]


def last_trained(item):
    return [token for token, trained in zip(item.input_ids, item.action_mask, strict=True) if trained][-1]


def first_item(parts):
    return [*parts.data.train, *parts.data.heldout][0]


def ask_trained_policy(parts, recipe, client):
    """The prompt ids of one training request."""
    engine = make_engine(parts.task, client, model_name="tiny", system_prompt=None)
    request = make_training_requests(parts.task, recipe.rollout, seed=0)()[0]

    async def played():
        try:
            return await engine.generate_rollouts([request], 1)
        finally:
            if hasattr(client, "aclose"):
                await client.aclose()

    return list(play(played())[0].steps[0].trace.prompt_token_ids)


def prompts_of_commands(tmp_path, settings, column, *, prompt=ASKED, answers=(SAID, WORSE)):
    """A sample of sft, the parts of a run, and command -> prompt ids of the conversation. The
    `settings` name model and tokenizer."""
    given, (said, worse) = ["threads=1", *settings], answers
    chats = write_rows(tmp_path / "chats.jsonl", {"prompt": prompt, "completion": said}, **column)
    pairs = write_rows(tmp_path / "pairs.jsonl", {"prompt": prompt, "chosen": said, "rejected": worse}, **column)
    asked = write_rows(tmp_path / "asked.jsonl", {"prompt": prompt}, **column)
    sft = compose_sft([*given, chats])
    built = build_tokenizer(sft)
    [item] = SFTData.read(sft, built).train[:1]
    found = {"sft": prompt_of(item)}
    for command, parts in {
        "dpo": DPORun.build(compose_dpo([*given, pairs, "heldout=0"]), note=print),
        "train-rm": RMRun.build(compose_rm([*given, pairs, "heldout=0"]), note=print),
    }.items():
        found[command] = prompt_of(first_item(parts))
        assert last_trained(first_item(parts)) == last_trained(item)
    other = write_rows(tmp_path / "other.jsonl", {"prompt": "another"})
    given.append("reward=byte_rewards:mean_id")
    recipe = compose(
        [*given, asked, f"task.args.heldout_{other}", "rollout.prompts=1", "rollout.group_size=2", "task.args.max_new_tokens=2"]
    )
    parts = RLRun.build(recipe, print)
    found["train"] = ask_trained_policy(parts, recipe, LocalChatClient(parts.model, parts.tokenizer))
    [sample] = load_sft_dataset(str(tmp_path / "chats.jsonl"), tokenizer=built, max_samples=1)
    found["rollouts"] = before_last_answer(sample.tokens, sample.loss_mask)  # it trains the answers of the prompt, too
    with StubVLLM(vocabulary=len(built), eos_id=built.eos_token_id) as server:
        found["vllm"] = ask_trained_policy(parts, recipe, VLLMChatClient(urls=[server.url], tokenizer=parts.tokenizer))
        stops = set(server.bodies(GENERATE)[0]["sampling_params"].get("stop_token_ids", ())) | {built.eos_token_id}
    assert stops == find_turn_end(built).ids
    found |= {
        "sglang": ask_sglang(tmp_path, parts, recipe),
        "eval": ask_evaluated(tmp_path, [*given, other, f"task.args.heldout_{asked}"]),
    }
    return item, parts, found


def ask_sglang(tmp_path, parts, recipe):
    save_file(weights(0), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32"}))
    with StubSGLang(tmp_path) as server:
        found = ask_trained_policy(parts, recipe, SGLangClient(server.url, tokenizer=parts.tokenizer))
        sent = set(server.calls[0][1]["sampling_params"].get("stop_token_ids", ())) | {parts.tokenizer.eos_token_id}
    assert sent == find_turn_end(parts.tokenizer).ids
    return found


def ask_evaluated(tmp_path, given):
    arguments = [*given, "k=1", "problems=1", "max_tokens=2", "device=cpu", f"output={tmp_path}", "name=measured"]
    result = CliRunner().invoke(app, ["eval", *arguments])
    assert result.exit_code == 0, result.output
    [rollouts] = tmp_path.rglob("rollouts.jsonl")
    return json.loads(rollouts.read_text().splitlines()[0])["steps"][0]["trace"]["prompt_token_ids"]
