"""Continues a batch of prompts token by token, with a key-value cache, on any causal model of transformers.

It knows token ids only: rendering messages and reading text is left to `local`. Shapes: N rows, P longest prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ludic.errors import InferenceError
from ludic.inference.local_sampler import Sampler
from ludic.inference.sampling import SamplingParams


@dataclass
class DecodeRequest:
    """One prompt and how to continue it."""

    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int | None = None
    stopped: Callable[[list[int]], bool] | None = None
    """Whether the completion so far contains a stop string; asked after each token."""


@dataclass
class Completion:
    """What one request became."""

    token_ids: list[int] = field(default_factory=list)
    """The sampled ids, the end token among them."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each id under the model as it is: temperature 1, all tokens. This is what a trainer's forward pass gives."""
    drawn_logprobs: list[float] = field(default_factory=list)
    """The same under the distribution that was sampled: after penalties, temperature and top-p."""
    finish_reason: str = "length"


@torch.inference_mode()
def decode(model: nn.Module, requests: Sequence[DecodeRequest], *, eos_ids: frozenset[int], pad_id: int) -> list[Completion]:
    """Continue every request until its end token, its stop string or its `max_tokens`. The model is in evaluation mode meanwhile."""
    limits = [_limit(model, request) for request in requests]
    training = model.training
    model.eval()
    try:
        return _Decoding(model, requests, limits, eos_ids, pad_id).run()
    finally:
        model.train(training)


def _limit(model: nn.Module, request: DecodeRequest) -> int:
    """Tokens that this request may sample, at most: what it asks for, or what the model's context leaves."""
    if not request.prompt_ids:
        raise InferenceError("the prompt has no token; a model needs at least one to continue")
    room = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if room is None:
        return request.sampling.max_tokens
    left = int(room) - len(request.prompt_ids)
    if left < 1:
        raise InferenceError(
            f"the prompt has {len(request.prompt_ids)} tokens, the model's context is {room}; shorten the prompt"
        )
    return min(left, request.sampling.max_tokens)


class _Decoding:
    """The state of one batch. Row i of the tensors is request `rows[i]`; rows that ended are dropped when they are the majority."""

    def __init__(
        self, model: nn.Module, requests: Sequence[DecodeRequest], limits: list[int], eos_ids: frozenset[int], pad_id: int
    ) -> None:
        self.model, self.requests, self.limits = model, requests, limits
        self.device = next(model.parameters()).device
        self.results = [Completion() for _ in requests]
        self.rows = list(range(len(requests)))
        self.live = [True] * len(requests)
        self.sampler = Sampler([r.sampling for r in requests], [r.seed for r in requests], self.device)
        self.eos = torch.tensor(sorted(eos_ids), dtype=torch.long, device=self.device)
        self.cache: Any = None
        self.ids, self.mask = self._padded([r.prompt_ids for r in requests], pad_id)
        self.ragged = not bool(self.mask.all())
        self.position = self.mask.sum(dim=1, keepdim=True)
        self.limit = torch.tensor(limits, device=self.device)
        self.watched = any(request.stopped for request in requests)

    def run(self) -> list[Completion]:
        tokens: list[Tensor] = []
        logps: list[Tensor] = []
        drawn: list[Tensor] = []
        alive = torch.ones(len(self.rows), dtype=torch.bool, device=self.device)
        for step in range(max(self.limits)):
            token, logp, shaped = self.sampler.draw(self._forward(), step)
            tokens.append(token)
            logps.append(logp)
            drawn.append(shaped)
            ended = torch.isin(token, self.eos)
            alive = alive & ~ended & (self.limit > step + 1)
            if self.watched:
                alive = self._watch(tokens, logps, drawn, alive)
            if not bool(alive.any()):
                break
            self.ids = token[:, None]
            if int(alive.sum()) * 2 <= len(self.rows):
                self._flush(tokens, logps, drawn)
                alive = self._compact(alive)
        self._flush(tokens, logps, drawn)
        return [self._finished(result, limit) for result, limit in zip(self.results, self.limits, strict=True)]

    def _forward(self) -> Tensor:
        """Logits [N, V] of each row's next token, float32."""
        first = self.cache is None
        keywords: dict[str, Any] = {}
        if self.ragged:
            keywords["attention_mask"] = self.mask
            keywords["position_ids"] = (self.mask.cumsum(dim=1) - 1).clamp(min=0) if first else self.position
        output = self.model(input_ids=self.ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1, **keywords)
        self.cache = output.past_key_values
        if not first:
            self.position = self.position + 1
        self.mask = torch.cat([self.mask, self.mask.new_ones(self.mask.shape[0], 1)], dim=1)
        logits: Tensor = output.logits[:, -1].float()
        return logits

    def _flush(self, tokens: list[Tensor], logps: list[Tensor], drawn: list[Tensor]) -> None:
        """Append what was drawn since the last flush to the results, one transfer each, and forget it."""
        if not tokens:
            return
        columns = [torch.stack(kept, dim=1).tolist() for kept in (tokens, logps, drawn)]
        for row, ids, logp, shaped in zip(self.rows, *columns, strict=True):
            result = self.results[row]
            result.token_ids += ids
            result.logprobs += logp
            result.drawn_logprobs += shaped
        for kept in (tokens, logps, drawn):
            kept.clear()

    def _compact(self, alive: Tensor) -> Tensor:
        """Go on with the rows that are still alive."""
        keep = alive.nonzero().squeeze(1)
        self.rows = [self.rows[i] for i in keep.tolist()]
        self.ids, self.mask, self.position, self.limit = (t[keep] for t in (self.ids, self.mask, self.position, self.limit))
        self.sampler.keep(keep)
        self.cache.batch_select_indices(keep)
        return torch.ones(len(self.rows), dtype=torch.bool, device=self.device)

    def _watch(self, tokens: list[Tensor], logps: list[Tensor], drawn: list[Tensor], alive: Tensor) -> Tensor:
        """End the rows whose text now contains a stop string."""
        self._flush(tokens, logps, drawn)
        for i, row in enumerate(self.rows):
            stopped = self.requests[row].stopped
            if stopped is not None and bool(alive[i]) and stopped(self.results[row].token_ids):
                self.results[row].finish_reason = "stop"
                self.limits[row] = len(self.results[row].token_ids)
                alive[i] = False
        return alive

    def _finished(self, result: Completion, limit: int) -> Completion:
        """Cut what was drawn after the end."""
        ends = set(self.eos.tolist())
        end = next((i + 1 for i, token in enumerate(result.token_ids[:limit]) if token in ends), None)
        if end is not None:
            result.finish_reason = "stop"
        cut = limit if end is None else end
        for kept in (result.token_ids, result.logprobs, result.drawn_logprobs):
            del kept[cut:]
        return result

    def _padded(self, prompts: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
        """Left-padded ids and mask [N, P]."""
        width = max(map(len, prompts))
        ids = torch.tensor([[pad_id] * (width - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        return ids, mask
