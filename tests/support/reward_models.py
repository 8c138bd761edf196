"""Tiny reward models over the byte tokenizer, and what judges rollouts in tests."""

from functools import cache

import torch

from ludic.types import Rollout, Step, TokenTrace

PAD, EOS = 0, 2


@cache
def reward_model(seed=0, labels=1, pad=PAD, **settings):
    """A Qwen2 with a head of `labels` numbers, far enough from its initial weights that scores
    differ."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 272,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 128,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "pad_token_id": pad,
        "eos_token_id": EOS,
        "num_labels": labels,
        **settings,
    }
    return Qwen2ForSequenceClassification(Qwen2Config(**sizes)).eval()


@torch.no_grad()
def score_alone(model, ids):
    """What transformers gives the sequence by itself, read at its last token whatever that is."""
    hidden = model.model(torch.tensor([list(ids)])).last_hidden_state
    return model.score(hidden)[0, -1, 0].item()


class FakeRewardModel:
    """Scores by `judge(input)` and remembers what it was asked. An exception that `judge`
    returns is raised."""

    def __init__(self, judge=len, tokenizer=None):
        self.judge, self.tokenizer, self.calls = judge, tokenizer, []

    def reads_ids_of(self, tokenizer):
        return self.tokenizer is tokenizer

    async def score_batch(self, inputs, *, normalize=True):
        self.calls.append((list(inputs), normalize))
        scores = [self.judge(each) for each in inputs]
        for score in scores:
            if isinstance(score, Exception):
                raise score
        return [float(score) for score in scores]


def rollout(name, *turns, reward=0.0, ids=None, group="g", **info):
    """An episode of `(observation, action)` turns; the last step has the reward and, with `ids`,
    a trace."""
    steps = [
        Step(i, obs, action, None, reward if i == len(turns) - 1 else 0.0, False, i == len(turns) - 1, dict(info))
        for i, (obs, action) in enumerate(turns)
    ]
    if ids is not None:
        steps[-1].trace = TokenTrace(*ids)
    return Rollout(id=name, steps=steps, meta={"request_meta": {"group_id": group}})
