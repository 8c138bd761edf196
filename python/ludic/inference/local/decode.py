"""Continues a batch of prompts token by token, with a key-value cache, on any causal model of
transformers.

It knows token ids only: rendering messages and reading text is left to `local`. Shapes: N rows, P
longest prompt, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ludic.errors import InferenceError
from ludic.inference.current_episode import Episode
from ludic.inference.local.prefixes import Match, Prefix, PrefixCache, Snapshot, is_plain, joined
from ludic.inference.local.sampler import Sampler, stream_key
from ludic.inference.sampling import SamplingParams
from ludic.models.evaluation_mode import evaluation_mode


@dataclass
class DecodeRequest:
    """One prompt and how to continue it."""

    prompt_ids: list[int]
    sampling: SamplingParams
    limit: int
    """Tokens sampled at most: what the request asks for, or what the model's context leaves."""
    seed: int | None = None
    contains_stop: Callable[[list[int]], bool] | None = None
    """Whether the completion so far contains a stop string; asked after each token."""
    is_abandoned: Callable[[], bool] | None = None
    """Whether nobody waits for it any more; asked after each token, possibly from another thread
    than the one that answers."""
    episode: Episode | None = None
    """Whose next turn may begin with this one."""


@dataclass
class Completion:
    """What one request became."""

    token_ids: list[int] = field(default_factory=list)
    """The sampled ids, the end token among them."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each id under the model as it is: temperature 1, all tokens. This is
    what a trainer's forward pass gives."""
    drawn_logprobs: list[float] = field(default_factory=list)
    """The same under the distribution that was sampled: after penalties, temperature and top-p."""
    finish_reason: str = "length"


@dataclass(frozen=True)
class Bounds:
    """What a model can read."""

    vocabulary: int | None
    """Ids are below it; None: no bound is known."""
    context: int | None
    """Tokens of a prompt and its continuation."""

    @classmethod
    def of(cls, model: nn.Module) -> Bounds:
        embeddings = getattr(model, "get_input_embeddings", lambda: None)()
        context = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        return cls(getattr(embeddings, "num_embeddings", None), None if context is None else int(context))

    def room(self, prompt_ids: Sequence[int]) -> int | None:
        """Tokens that the context leaves after this prompt; None: no bound. Raises
        InferenceError for a prompt that cannot be read."""
        if not prompt_ids:
            raise InferenceError("the prompt has no token; a model needs at least one to continue")
        if self.vocabulary is not None and not 0 <= min(prompt_ids) <= max(prompt_ids) < self.vocabulary:
            wrong = next(token for token in prompt_ids if not 0 <= token < self.vocabulary)
            raise InferenceError(
                f"token id {wrong} of the prompt is outside the model's vocabulary of {self.vocabulary}; check the tokenizer"
            )
        if self.context is None:
            return None
        if len(prompt_ids) >= self.context:
            raise InferenceError(
                f"the prompt has {len(prompt_ids)} tokens, the model's context is {self.context}; shorten the prompt"
            )
        return self.context - len(prompt_ids)


def decode(
    model: nn.Module,
    requests: Sequence[DecodeRequest],
    *,
    eos_ids: frozenset[int],
    pad_id: int,
    prefixes: PrefixCache | None = None,
) -> list[Completion]:
    """Continue every request until its end token, its stop string or its limit.

    The model runs in evaluation mode and without gradients; both are as they were afterwards,
    module by module. With `prefixes`, a request of an episode goes on from what the model read in
    its turns before.
    """
    with evaluation_mode(model), torch.no_grad():  # what inference mode made could not be part of a later backward pass
        if prefixes is None or not any(request.episode for request in requests):
            return _Decoding(model, requests, eos_ids, pad_id).run()
        prefixes.hold_to(model)
        matches = [None if r.episode is None else prefixes.longest(r.episode, r.prompt_ids) for r in requests]
        answers: dict[int, Completion] = {}
        for known in (False, True):
            rows = [i for i, match in enumerate(matches) if (match is not None) == known]
            if rows:
                some, found = [requests[i] for i in rows], [match for i in rows if (match := matches[i])]
                decoding = _Decoding(model, some, eos_ids, pad_id, found, room=prefixes.max_bytes)
                answers.update(zip(rows, decoding.run(), strict=True))
                for episode, prefix in decoding.read():
                    prefixes.keep(episode, prefix)
                prefixes.shrink()
        return [answers[i] for i in range(len(requests))]


def _keywords(model: Any) -> frozenset[str]:
    """Which of the keywords used here the model's forward pass takes. A wrapper that passes
    everything on takes them all."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # adapters hide the signature
    parameters = inspect.signature(inner.forward).parameters
    wanted = frozenset({"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"})
    return wanted & set(parameters) if "input_ids" in parameters else wanted


class _Decoding:
    """The state of one batch. Row i of the tensors is request `rows[i]`; rows that ended are
    dropped when they are the majority."""

    def __init__(
        self,
        model: nn.Module,
        requests: Sequence[DecodeRequest],
        eos_ids: frozenset[int],
        pad_id: int,
        matches: Sequence[Match] = (),
        *,
        room: int = 0,
    ) -> None:
        """`matches`: what is known of each prompt, or nothing. `room`: bytes of what is read
        that may be kept, for `read`."""
        self.model, self.requests, self.room = model, requests, room
        self.keywords = _keywords(model)
        self.device = next(model.parameters()).device
        self.results = [Completion() for _ in requests]
        self.rows = list(range(len(requests)))
        keys = [stream_key(request.seed, request.prompt_ids) for request in requests]
        self.sampler = Sampler([request.sampling for request in requests], keys, self.device)
        self.eos = torch.tensor(sorted(eos_ids), dtype=torch.long, device=self.device)
        self.cache: Any = None
        self.limits = [request.limit for request in requests]
        self.limit = torch.tensor(self.limits, device=self.device)
        prompts = [tuple(request.prompt_ids) for request in requests]
        number = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        self.distinct = torch.tensor([number[prompt] for prompt in prompts], device=self.device)
        """[N] which of the different prompts each row has. Each of them is read once, and what
        was read is shared out."""
        if matches:  # each row has a cache of its own
            self.cache, known = joined(matches)
            self.ids, mask = self._padded([p[match.length :] for p, match in zip(prompts, matches, strict=True)], pad_id)
            self.mask = torch.cat([known, mask], dim=1)
        else:
            self.ids, self.mask = self._padded(list(number), pad_id)
        self.ragged = not bool(self.mask.all())
        self.left: list[tuple[Snapshot, list[int], int]] = []
        """Caches, the requests of their rows, and how many sampled tokens they hold."""
        self.watched = any(request.contains_stop for request in requests)
        self.drawn: list[tuple[Tensor, Tensor, Tensor]] = []

    def run(self) -> list[Completion]:
        alive = torch.ones(len(self.rows), dtype=torch.bool, device=self.device)
        for step in range(max(self.limits)):
            logits = self._forward()
            self.drawn.append(self.sampler.draw(logits if step else self._shared_out(logits), step))
            token = self.drawn[-1][0]
            alive = alive & ~torch.isin(token, self.eos)
            if self.watched:
                alive = self._watch(alive)
            alive = self._wanted(alive & (self.limit > step + 1))
            living = int(alive.sum())
            if living == 0:
                self._leave(step)
                break
            self._extend(token)
            if living * 2 <= len(self.rows):
                alive = self._compact(alive, step)
        self._flush()
        return [self._finished(result, limit) for result, limit in zip(self.results, self.limits, strict=True)]

    def _forward(self) -> Tensor:
        """Logits [N, V] of each row's next token, float32."""
        given: dict[str, Any] = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}
        if self.ragged:
            position = (self.mask.cumsum(dim=1) - 1).clamp(min=0)
            given["attention_mask"] = self.mask
            given["position_ids"] = position[:, -self.ids.shape[1] :]
        given = {name: value for name, value in given.items() if name in self.keywords}
        output = self.model(input_ids=self.ids, **given)
        self.cache = getattr(output, "past_key_values", None)
        logits: Tensor = output.logits[:, -1].float()
        return logits

    def _shared_out(self, logits: Tensor) -> Tensor:
        """From one row for each different prompt to one for each request."""
        if len(self.rows) == len(logits):
            return logits
        self.ids, self.mask = self.ids[self.distinct], self.mask[self.distinct]
        if self.cache is not None:
            self.cache.batch_select_indices(self.distinct)
        return logits[self.distinct]

    def _extend(self, token: Tensor) -> None:
        """What was drawn is read next. Without a cache the whole row is."""
        column = token[:, None]
        self.ids = column if self.cache is not None else torch.cat([self.ids, column], dim=1)
        self.mask = torch.cat([self.mask, torch.ones_like(column)], dim=1)

    def _flush(self) -> None:
        """Append what was drawn since the last flush to the results, one transfer each, and
        forget it."""
        if not self.drawn:
            return
        columns = [torch.stack(kept, dim=1).tolist() for kept in zip(*self.drawn, strict=True)]
        for row, ids, logps, drawn in zip(self.rows, *columns, strict=True):
            result = self.results[row]
            result.token_ids += ids
            result.logprobs += logps
            result.drawn_logprobs += drawn
        self.drawn.clear()

    def _compact(self, alive: Tensor, read: int) -> Tensor:
        """Go on with the rows that are still alive. The cache has `read` tokens of those that
        were sampled."""
        self._flush()
        self._leave(read)
        keep = alive.nonzero().squeeze(1)
        self.rows = [self.rows[i] for i in keep.tolist()]
        self.ids, self.mask, self.limit = (t[keep] for t in (self.ids, self.mask, self.limit))
        self.sampler.keep(keep)
        if self.cache is not None:
            self.cache.batch_select_indices(keep)
        return alive[keep]

    def _leave(self, read: int) -> None:
        """Put aside what the cache has of the rows that are about to go."""
        if not self.room or not is_plain(self.model, self.cache, self.device):
            return
        snapshot = Snapshot.of(self.cache, self.mask[:, : self.cache.get_seq_length()])
        if snapshot.nbytes <= self.room:
            self.room -= snapshot.nbytes
            self.left.append((snapshot, list(self.rows), read))

    def read(self) -> Iterator[tuple[Episode, Prefix]]:
        """After the run: what the model read of each episode's dialogue."""
        done = set[int]()
        for snapshot, rows, read in reversed(self.left):  # a row is in every snapshot before its last one
            for i, row in enumerate(rows):
                request = self.requests[row]
                if row not in done and request.episode is not None:
                    done.add(row)
                    yield request.episode, Prefix(snapshot, i, [*request.prompt_ids, *self.results[row].token_ids[:read]])

    def _watch(self, alive: Tensor) -> Tensor:
        """End the rows whose text now contains a stop string."""
        self._flush()
        going = alive.tolist()
        for i, row in enumerate(self.rows):
            stopped, result = self.requests[row].contains_stop, self.results[row]
            if stopped is not None and going[i] and stopped(result.token_ids):
                result.finish_reason = "stop"
                self.limits[row] = len(result.token_ids)
                going[i] = False
        return torch.tensor(going, device=self.device)

    def _wanted(self, alive: Tensor) -> Tensor:
        """Less the rows that nobody waits for."""
        unwanted = [i for i, row in enumerate(self.rows) if (asked := self.requests[row].is_abandoned) is not None and asked()]
        if unwanted:
            alive[unwanted] = False
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

    def _padded(self, prompts: Sequence[tuple[int, ...]], pad_id: int) -> tuple[Tensor, Tensor]:
        """Left-padded ids and mask [N, P]."""
        width = max(map(len, prompts))
        ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        return ids, mask
