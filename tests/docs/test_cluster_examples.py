"""The examples of docs/training.md and docs/metrics.md that name large models and servers, run
with a tiny model and in-process inference in their place.

Only what `REPLACED` lists is changed in their text; the rest is what a user would run.
"""

import ast
import asyncio
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import ludic.distributed.adapters
import ludic.inference
from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.distributed import LocalPublisher
from ludic.envs import DatasetQAEnv
from ludic.inference import InferenceSpec, LocalChatClient, ReturnSpec, SamplingParams
from ludic.interaction import SingleAgentProtocol
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.parsers import ParseResult
from ludic.training import RolloutBatchSource, RolloutEngine, Trainer, TrainerConfig, make_dataset_sequence_requests_fn, make_grpo

PAGES = [Path(__file__).parents[2] / "docs" / name for name in ("training.md", "metrics.md")]
REPLACED = [
    ('model_device="cuda"', 'model_device="cpu"'),
    ("num_steps=1000", "num_steps=3"),
    ("num_steps=100)", "num_steps=3)"),
    ("num_steps=100 - ", "num_steps=4 - "),
    ("TrainerConfig(learning_rate=2e-5)", "TrainerConfig(learning_rate=2e-5, model_device='cpu')"),
    ("env_registry={...}, protocol_registry={...}", "env_registry=env_registry, protocol_registry=protocol_registry"),
    ("every_n_steps=50", "every_n_steps=2"),
]


def cluster_blocks() -> list[str]:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    return re.findall(r"^```python cluster\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def tiny_model(dtype=torch.float32):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=259, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32
    )
    return Qwen2ForCausalLM(config).to(dtype)


class PassingEnv(DatasetQAEnv):
    """Its info has the keys that the example's reducers read."""

    def env_step(self, action):
        outcome = super().env_step(action)
        outcome.info.update(all_passed=len(action) % 2 == 0, compile_failed=False, pass_rate=0.5)
        outcome.reward = float(len(action) % 2)
        return outcome


class World:
    """What the examples presuppose: a model, a tokenizer, a client, a batch source."""

    def __init__(self, path):
        self.path = path
        self.tokenizer = make_byte_tokenizer()
        self.model = tiny_model()
        self.client = LocalChatClient(self.model, self.tokenizer)
        self.env_registry = {"qa": PassingEnv}
        self.protocol_registry = {"single": self.protocol}
        self.requests = make_dataset_sequence_requests_fn(
            [{"question": "abc", "answer": "d"}, {"question": "de", "answer": "f"}],
            batch_size=2,
            env_kind="qa",
            protocol_kind="single",
            group_size=8,
            inference=InferenceSpec(sampling=SamplingParams(temperature=1.0, max_tokens=3), return_=ReturnSpec.for_rl()),
        )

    def protocol(self):
        agent = Agent(
            client=self.client,
            model="tiny",
            ctx=FullDialog(),
            parser=lambda text: ParseResult(text, 0.0, None),
            reject_incomplete_completions=False,
        )
        return SingleAgentProtocol(agent)

    def source(self):
        engine = RolloutEngine(env_registry=self.env_registry, protocol_registry=self.protocol_registry)
        return RolloutBatchSource(engine=engine, request_fn=self.requests, algorithm=make_grpo(group_size=8), concurrency=16)

    def trainer(self):
        cfg = TrainerConfig(model_device="cpu", max_seq_len=64, micro_token_budget=256)
        return Trainer(model=self.model, algo=make_grpo(group_size=8), batch_source=self.source(), cfg=cfg)

    def run(self, source: str, **names):
        for old, new in REPLACED:
            source = source.replace(old, new)
        namespace = {"__name__": "example", **names}
        code = compile(source, "docs", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, namespace)
        if asyncio.iscoroutine(result):
            asyncio.run(result)
        return namespace


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)

    def tiny_from_pretrained(name, **kwargs):
        world.model = tiny_model(kwargs["torch_dtype"])
        return world.model

    def local_client(**kwargs):
        world.client = LocalChatClient(world.model, world.tokenizer)
        return world.client

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", tiny_from_pretrained)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: world.tokenizer)
    monkeypatch.setattr(ludic.inference, "VLLMChatClient", local_client, raising=False)
    monkeypatch.setattr(ludic.distributed.adapters, "create_vllm_publisher", LocalPublisher, raising=False)
    return world


@pytest.fixture
def wandb(monkeypatch):
    """A fake module that records its calls."""
    module = types.ModuleType("wandb")
    module.inits, module.logged = [], []
    module.run = None
    module.init = lambda **kwargs: module.inits.append(kwargs) or types.SimpleNamespace(finish=lambda: None, **kwargs)
    module.log = lambda stats, step=None: module.logged.append((step, dict(stats)))
    module.finish = lambda: None
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def block(marker: str) -> str:
    (found,) = [source for source in cluster_blocks() if marker in source]
    return found


def test_every_cluster_example_is_tested_here():
    markers = [
        "Complete example",
        "await trainer.train",
        "resume_from=",
        "TeeLogger(",
        "with logger:\n    for step",
        'name="experiment-1"',
    ]
    assert len(cluster_blocks()) == len(markers)
    assert all(block(marker) for marker in markers)


def test_the_whole_script_trains_publishes_and_saves_a_checkpoint(world):
    names = world.run(block("Complete example"), batch_source=world.source())
    assert names["trainer"].current_step == 3
    assert asyncio.run(world.client.get_policy_version()) == 3
    assert (world.path / "checkpoints" / "step_000002" / "model.safetensors").is_file()


def test_the_run_is_resumed_from_its_latest_checkpoint(world):
    names = world.run(block("Complete example"), batch_source=world.source())
    algo, cfg, model = names["algo"], names["cfg"], names["model"]
    source = world.source()
    names = world.run(block("resume_from="), algo=algo, cfg=cfg, model=model, batch_source=source)
    assert names["trainer"].current_step == 4
    assert source.engine.totals.num_episodes == 2 * 2 * 8  # steps 3 and 4, of 2 prompts x 8 answers


def test_the_loop_inside_a_coroutine_trains(world):
    before = {name: p.clone() for name, p in world.model.named_parameters()}
    names = world.run(
        block("await trainer.train"),
        env_registry=world.env_registry,
        protocol_registry=world.protocol_registry,
        make_requests=world.requests,
        model=world.model,
    )
    assert names["trainer"].current_step == 3
    assert names["trainer"].cfg.lr == 2e-5
    assert any(not torch.equal(p, before[name]) for name, p in world.model.named_parameters())


def test_the_dashboard_can_be_used_directly(world, capsys):
    names = world.run(block("with logger:\n    for step"), trainer=world.trainer(), num_steps=2)
    assert names["stats"]["train/step"] == 2


def test_wandb_receives_what_is_logged(world, wandb):
    names = world.run(block('name="experiment-1"'))
    names["logger"].log(4, {"train/loss": 0.5})
    assert wandb.inits[0]["project"] == "ludic-training"
    assert wandb.inits[0]["tags"] == ["cispo", "apps"]
    assert wandb.logged == [(4, {"train/loss": 0.5})]


def test_tee_writes_to_both(world, wandb, capsys):
    names = world.run(block("TeeLogger("))
    names["logger"].log(1, {"train/loss": 0.25})
    assert "[train] step=1" in capsys.readouterr().out
    assert wandb.logged == [(1, {"train/loss": 0.25})]


def test_the_error_of_the_old_configuration_says_what_to_write():
    with pytest.raises((TypeError, ValueError), match=r"grad_accum_steps.*micro_token_budget"):
        TrainerConfig(
            model_device="cpu",
            lr=1e-5,
            grad_accum_steps=4,  # OLD: Fixed micro-batch count
            max_grad_norm=1.0,
            pad_token_id=0,
        )
