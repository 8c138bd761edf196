"""The logits of a sample do not depend on the longest sample of the pass: RoPE by length, positions
behind the padding id."""

import copy
import json

import pytest
import torch
from small_models import BERT, LLAMA, make_from_config
from training_samples import TOKENIZER, ListSource, branching_items, cpu_config

from ludic.inference.local.client import LocalChatClient
from ludic.inference.local.decode import Bounds, DecodeRequest, decode
from ludic.inference.request import SamplingParams
from ludic.models.packed_attention import PACKED, find_rope_limits, pin_rope, set_attention
from ludic.runs.servers import _read_rope_limit
from ludic.training import MaskedCausalLMCrossEntropyLoss, RLAlgorithm, Trainer
from ludic.training.algorithm import forward_logits
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.reference import FrozenModel

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 3.0, 6.0, 9.0],
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
MODELS = {
    "Phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    "Phimoe": {
        **EXPERTS,
        "rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.5, "original_max_position_embeddings": 16},
    },
    "Llama": {"rope_parameters": DYNAMIC, "max_position_embeddings": 16},
}


def model_of(name):
    settings = {**LLAMA, "vocab_size": 259, **MODELS[name]}
    return make_from_config(name, "ForCausalLM", settings, 0)


def logits_of(model, *lengths):
    """Of rows of these lengths, those of the first."""
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.arange(3, 3 + length)
        mask[row, :length] = 1
    with torch.no_grad():
        return forward_logits(model, {"input_ids": ids, "attention_mask": mask})[0, : lengths[0]]


def trainer_of(model, max_seq_len, **options):
    algo = RLAlgorithm("supervised", ConstantCredit(1.0), MaskedCausalLMCrossEntropyLoss())
    cfg = cpu_config(max_seq_len=max_seq_len, **options)
    return Trainer(model=model, algo=algo, batch_source=ListSource(branching_items((3, 3))), cfg=cfg)


@pytest.mark.parametrize("max_seq_len", [16, 48])
@pytest.mark.parametrize("name", MODELS)
def test_rope_is_that_of_the_longest_sample_of_the_run_whatever_is_in_the_pass(name, max_seq_len):
    plain, model = model_of(name), model_of(name)
    assert not torch.allclose(logits_of(plain, 9, 30), logits_of(plain, 9), atol=1e-2)  # transformers' own
    before = json.dumps(model.config.to_dict(), default=str)
    trainer_of(model, max_seq_len)
    alone = logits_of(model, 9)
    torch.testing.assert_close(logits_of(model, 9, max_seq_len), alone, rtol=1e-4, atol=1e-5)
    if max_seq_len == 16:
        torch.testing.assert_close(alone, logits_of(model_of(name), 9), rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(alone, logits_of(model_of(name), 9, max_seq_len), rtol=1e-4, atol=1e-5)
    config = model.config.to_dict() | {"_attn_implementation": None}
    assert json.dumps(config, default=str) == json.dumps(json.loads(before) | {"_attn_implementation": None}, default=str)


def test_a_longer_run_before_leaves_nothing_behind():
    model = model_of("Llama")
    trainer_of(model, 48)
    long = logits_of(model, 9)
    trainer_of(model, 16)
    torch.testing.assert_close(logits_of(model, 9), logits_of(model_of("Llama"), 9))
    assert not torch.allclose(logits_of(model, 9), long, atol=1e-2)


def test_copies_of_a_model_follow_its_trainer():
    model = model_of("Phi3")
    sampler = LocalChatClient(model, TOKENIZER, copy_model=True).model
    reference = FrozenModel(model, cpu_config(max_seq_len=48)).model
    trainer_of(model, 16)
    want = logits_of(model_of("Phi3"), 9)
    for each in (model, sampler, reference, copy.deepcopy(reference)):
        torch.testing.assert_close(logits_of(each, 9), want)


def test_a_sampler_alone_has_the_rope_of_its_context_and_a_pinned_one_a_shorter_context():
    """16 tokens are the original context of the model, 64 the whole."""
    model = model_of("Phi3")
    LocalChatClient(model, TOKENIZER)
    torch.testing.assert_close(logits_of(model, 9), logits_of(model_of("Phi3"), 9, 64))
    assert Bounds.of(model).context == 64
    pin_rope(model, 12)
    assert Bounds.of(model).context == 16
    assert list(find_rope_limits(model.config, 16)) == [16]
    assert not list(find_rope_limits(model.config, 17))


@pytest.mark.parametrize(("max_seq_len", "context"), [(16, 16), (17, None)])
def test_a_server_that_a_run_starts_takes_the_factors_of_the_trainer(max_seq_len, context, tmp_path):
    model_of("Phi3").save_pretrained(tmp_path)
    assert _read_rope_limit(tmp_path, max_seq_len) == context


def roberta():
    return make_from_config("Roberta", "ForCausalLM", {**BERT, "is_decoder": True, "pad_token_id": 1}, 0)


def test_positions_begin_behind_the_padding_id_in_each_layout():
    """Also where the ids have the padding id, which the model would not count."""
    model = roberta()
    set_attention(model, PACKED)
    for ids in ([5, 6, 7, 8], [5, 1, 7, 8]):
        row = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, 4)}
        packed = {"input_ids": torch.tensor([ids * 2]), "position_ids": torch.tensor([[0, 1, 2, 3] * 2])}
        packed["cu_seqlens"] = torch.tensor([0, 4, 8])
        with torch.no_grad():
            alone, together = forward_logits(model, row)[0], forward_logits(model, packed)[0]
            own = model(input_ids=row["input_ids"]).logits[0]
        torch.testing.assert_close(together, torch.cat([alone, alone]))
        assert torch.allclose(own, alone, atol=1e-5) == (1 not in ids)


def test_a_sampler_counts_the_same_positions_beside_longer_prompts():
    model = roberta()
    jobs = [DecodeRequest(prompt, SamplingParams(), limit=5, seed=1) for prompt in ([5, 6, 7], [8, 9, 10, 11, 12, 13, 14])]
    together = decode(model, jobs, eos_ids=frozenset(), pad_id=1)
    for job, completion in zip(jobs, together, strict=True):
        [alone] = decode(model, [job], eos_ids=frozenset(), pad_id=1)
        assert completion.token_ids == alone.token_ids
        ids = torch.tensor([job.prompt_ids + alone.token_ids])
        with torch.no_grad():
            logps = model(input_ids=ids).logits[0].log_softmax(dim=-1)
        want = logps[len(job.prompt_ids) - 1 : -1].gather(1, torch.tensor(alone.token_ids)[:, None])[:, 0]
        assert completion.logprobs == pytest.approx(want.tolist(), abs=1e-4)
