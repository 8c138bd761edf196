"""A teacher behind a server gives the step of a frozen copy; one that cannot teach is refused."""

import asyncio
from dataclasses import replace

import pytest
import torch
from chat_tokenizers import CHATML, chat_tokenizer
from faulty_server import CUT, HANG
from loss_batches import Bigram
from maxent_batches import episodes
from stub_teacher_server import StubTeacherServer
from torch import nn
from training_samples import TOKENIZER, ListSource, assert_same_tensors, cpu_config, tiny_model, weights_of

from ludic.errors import ConfigError, DataError, InferenceError, ServerUnreachableError
from ludic.inference.vllm.prompt_logprobs import PromptLogprobsClient
from ludic.training import FrozenModel, TeacherServer, Trainer, collate_saw_items, make_opd
from ludic.training.batching.packing import MicroBatch
from ludic.training.loss import compute_token_logp
from ludic.types import ImageSpan

CFG = {"max_seq_len": 120, "micro_token_budget": 200}
QUICK = {"timeout_s": 10.0, "backoff_s": 0.001}


class Table(Bigram):
    """Logits that depend on one token alone: the same bits in every layout of a batch."""

    def __init__(self, seed):
        nn.Module.__init__(self)
        self.table = nn.Parameter(torch.randn(len(TOKENIZER), len(TOKENIZER), generator=torch.Generator().manual_seed(seed)))

    def judge(self, ids):
        row = torch.tensor([ids])
        return compute_token_logp(self.table.detach()[row], row)[0].tolist()


@pytest.fixture
def server():
    with StubTeacherServer(Table(1).judge, TOKENIZER) as running:
        yield running


def trained(teacher, **config):
    model = tiny_model()
    algo = make_opd(teacher=teacher, gamma=0.5, reward_coeff=1.0, group_size=4)
    trainer = Trainer(
        model=model, algo=algo, batch_source=ListSource(episodes((1, 3, 2, 1))), cfg=cpu_config(**{**CFG, **config})
    )
    stats = trainer.train_step_sync()
    return weights_of(model), stats


@pytest.mark.parametrize("layout", [{}, {"packing": "padding_free"}, {"merge_turns": True}, {"prefix_sharing": "off"}])
def test_a_server_and_a_frozen_copy_give_the_same_step_bit_for_bit(server, layout):
    frozen, stats = trained(FrozenModel(Table(1), cpu_config()), **layout)
    remote, again = trained(TeacherServer(server.url, TOKENIZER, cpu_config(**CFG), **QUICK), **layout)
    assert_same_tensors(remote, frozen)
    assert again["reference/kl"] == stats["reference/kl"] > 0.1
    assert (again["train/loss"], again["train/grad_norm"]) == (stats["train/loss"], stats["train/grad_norm"])


def test_turns_that_share_a_row_are_sent_in_one_prompt_without_padding(server):
    trained(TeacherServer(server.url, TOKENIZER, cpu_config(**CFG), **QUICK))
    bodies = server.bodies("/v1/completions")
    assert {tuple(sorted(body)) for body in bodies} == {("max_tokens", "prompt", "prompt_logprobs", "temperature")}
    sent = sorted(tuple(row) for body in bodies for row in body["prompt"])
    last = {item.meta["rollout_id"]: tuple(item.input_ids) for item in episodes((1, 3, 2, 1))}
    assert sent == sorted(last.values())


def test_a_server_of_text_does_not_score_samples_with_images(server):
    teacher = TeacherServer(server.url, TOKENIZER, cpu_config(**CFG), **QUICK)
    item = replace(episodes()[0], images=(ImageSpan("a", 0, 1),))
    with pytest.raises(DataError, match="the samples have images"):
        teacher.logps(MicroBatch(collate_saw_items([item], pad_token_id=0, device="cpu"), 1))


def test_a_teacher_that_cannot_teach_is_refused(server):
    for url, tokenizer, config, message in (
        ("http://127.0.0.1:9", TOKENIZER, {}, r"teacher \(http://127.0.0.1:9\) does not answer: .* start a vLLM"),
        (server.url, chat_tokenizer(CHATML), {}, "must have the policy's vocabulary"),
        (server.url, TOKENIZER, {"max_seq_len": 512, "micro_token_budget": 512}, r"512 tokens, .* > max_seq_len \(512\)"),
        (server.url, TOKENIZER, {"temperature": 0.7}, "at temperature 1; sample at 1, not 0.7"),
    ):
        with pytest.raises(ConfigError, match=message):
            TeacherServer(url, tokenizer, cpu_config(**{**CFG, **config}), max_retries=0, **QUICK)


def score(server, rows, **settings):
    async def scored():
        client = PromptLogprobsClient(server.url, **{**QUICK, **settings})
        try:
            return await client.score(rows)
        finally:
            await client.aclose()

    return asyncio.run(scored())


def test_a_call_that_fails_is_repeated_and_one_without_an_answer_ends(server):
    server.judge = lambda ids: [-0.5] * (len(ids) - 1)
    server.fail("/v1/completions", CUT)
    assert score(server, [[1, 2, 3], [4, 5]]) == [[-0.5, -0.5], [-0.5]]
    server.fail("/v1/completions", HANG)
    with pytest.raises(TimeoutError, match=r"no answer within 0.3 s"):
        score(server, [[1, 2]], timeout_s=0.3)


def test_answers_that_do_not_fit_are_errors(server):
    server.judge = lambda ids: [-0.5] * (len(ids) - 1)
    server.max_model_len = 3
    with pytest.raises(DataError, match=r"refused: .*maximum context length is 3"):
        score(server, [[1, 2, 3]])
    server.choice = lambda index, ids: {"index": 0, "prompt_logprobs": [None, {"9": {"logprob": -1.0}}]}
    with pytest.raises(InferenceError, match="2 answers for 2 prompts"):
        score(server, [[1, 2], [3, 4]])
    with pytest.raises(InferenceError, match="gave no prompt_logprobs of some of 2 tokens"):
        score(server, [[1, 2]])


def test_a_teacher_that_goes_away_leaves_the_weights_as_they_are(server):
    model = tiny_model()
    teacher = TeacherServer(server.url, TOKENIZER, cpu_config(**CFG), max_retries=0, **QUICK)
    trainer = Trainer(model=model, algo=make_opd(teacher=teacher), batch_source=ListSource(episodes()), cfg=cpu_config(**CFG))
    before = weights_of(model)
    server.fail("/v1/completions", CUT)
    with pytest.raises(ServerUnreachableError):
        trainer.train_step_sync()
    assert_same_tensors(weights_of(model), before)
    assert trainer.current_step == 0
