"""Tiny reward models over the byte tokenizer, and a fake one for rollout tests."""

from functools import cache

import torch

from ludic.types import Rollout, Step, TokenTrace

PAD, EOS = 0, 2


@cache
def reward_model(seed=0, labels=1, pad=PAD, **settings):
    """A Qwen2 with `labels` output scores and weights large enough that scores differ."""
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
    """The score of the sequence in a batch of one, read at its last token."""
    hidden = model.model(torch.tensor([list(ids)])).last_hidden_state
    return model.score(hidden)[0, -1, 0].item()


class FakeRewardModel:
    """Scores with `judge(input)` and records its inputs. If `judge` returns an exception, it is
    raised."""

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
    """An episode of `(observation, action)` turns. The last step has the reward and, if `ids` is
    passed, a token trace."""
    steps = [
        Step(i, obs, action, None, reward if i == len(turns) - 1 else 0.0, False, i == len(turns) - 1, dict(info))
        for i, (obs, action) in enumerate(turns)
    ]
    if ids is not None:
        steps[-1].trace = TokenTrace(*ids)
    return Rollout(id=name, steps=steps, meta={"request_meta": {"group_id": group}})
