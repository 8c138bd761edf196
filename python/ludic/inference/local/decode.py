"""Batched decoding with a key-value cache, for any causal model of transformers.

This module works on token ids; `client` renders messages and decodes text. Shapes: N rows, P tokens
of the longest prompt, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ludic.errors import InferenceError
from ludic.inference.client import Episode
from ludic.inference.local.images import BatchImages, list_banned
from ludic.inference.local.prefixes import Match, Prefix, PrefixCache, Snapshot, is_plain, is_separable, join_prefixes
from ludic.inference.local.sampler import Sampler, stream_key
from ludic.inference.request import SamplingParams
from ludic.models.images.rows import has_image_positions
from ludic.models.packed_attention import find_context, first_position
from ludic.models.routing import Routers
from ludic.models.wrappers import evaluation_mode, unwrap_transformer
from ludic.types import ImageSpan

LEAST_SHARED_TOKENS = 4096
"""Cached tokens that sharing prompts must save; it costs some operations in each layer."""


@dataclass
class DecodeRequest:
    """One prompt and how to continue it."""

    prompt_ids: list[int]
    sampling: SamplingParams
    limit: int
    """Maximum number of sampled tokens: the request's limit, or what fits into the model's
    context."""
    seed: int | None = None
    contains_stop: Callable[[list[int]], bool] | None = None
    """Whether the completion so far contains a stop string; called after each token."""
    is_abandoned: Callable[[], bool] | None = None
    """Whether the caller has gone away; called after each token, from the decoding thread."""
    episode: Episode | None = None
    """The episode of the request, whose later turns may reuse its keys and values."""
    keep_candidates: bool = False
    """Whether the completion has the tokens that it was sampled among."""
    images: Sequence[ImageSpan] = ()
    """The images in `prompt_ids`, in order; the model has a processor (`find_processor`)."""


@dataclass
class Completion:
    """The result of one request."""

    token_ids: list[int] = field(default_factory=list)
    """The sampled ids, including the end token."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each id under the unmodified model: temperature 1, all tokens. A trainer's
    forward pass computes the same."""
    drawn_logprobs: list[float] = field(default_factory=list)
    """The same under the distribution sampled from: after penalties, temperature and top-p."""
    finish_reason: str = "length"
    candidates: list[list[int]] = field(default_factory=list)
    """If they are kept: of each token the ids that it was sampled among, [] for all."""
    routes: NDArray[Any] | None = None
    """[R, L, K] if they are kept: the experts of the tokens that the model read, prompt included;
    the last sampled token may not be among them."""


@dataclass(frozen=True)
class Bounds:
    """The limits of a model."""

    vocabulary: int | None
    """Token ids must be below it; None if unknown."""
    context: int | None
    """Maximum number of prompt plus sampled tokens; None if unknown."""

    @classmethod
    def of(cls, model: nn.Module) -> Bounds:
        embeddings = getattr(model, "get_input_embeddings", lambda: None)()
        return cls(getattr(embeddings, "num_embeddings", None), find_context(model))

    def room(self, prompt_ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> int | None:
        """Number of tokens that fit into the context after this prompt; None without a limit.
        Raises InferenceError for an empty, too long or out-of-vocabulary prompt."""
        if fault := self.find_fault(prompt_ids, more=1):
            shown = f"; {sum(span.length for span in images)} of its tokens are {len(images)} images" if images else ""
            raise InferenceError(f"the prompt has {fault}{shown}")
        return None if self.context is None else self.context - len(prompt_ids)

    def find_fault(self, ids: Sequence[int], *, more: int = 0) -> str | None:
        """What is wrong with ids that the model is to read, with room for `more` after them: the
        end of a message. None if it can read them."""
        if not ids:
            return "no tokens; a model needs at least one"
        if self.vocabulary is not None and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            wrong = next(token for token in ids if not 0 <= token < self.vocabulary)
            return f"the token id {wrong}, which must be in the model's vocabulary, 0..{self.vocabulary - 1}"
        if self.context is not None and len(ids) + more > self.context:
            return f"{len(ids)} tokens, the context {self.context}; shorten it"
        return None


def decode(
    model: nn.Module,
    requests: Sequence[DecodeRequest],
    *,
    eos_ids: frozenset[int],
    pad_id: int,
    prefixes: PrefixCache | None = None,
    routers: Routers | None = None,
) -> list[Completion]:
    """Continue every request until its end token, its stop string or its limit.

    The model runs in evaluation mode and without gradients; the mode of each module is restored
    afterwards. With `prefixes`, a request of an episode reuses the keys and values of its earlier
    turns. A model with a processor draws no placeholders. With `routers`, completions have the
    experts of their tokens.
    """
    from ludic.inference.local.row_cache import shareable_attention

    # Tensors of inference mode could not be used in a later backward pass.
    with evaluation_mode(model), torch.no_grad(), shareable_attention(model):
        images = BatchImages(model, prefixes) if any(request.images for request in requests) else None
        if prefixes is None or (images is None and not any(request.episode for request in requests)):
            return _Decoding(model, requests, eos_ids, pad_id, images=images, routers=routers).run()
        prefixes.clear_if_changed(model)
        matches = [_find_match(prefixes, request, images) for request in requests]
        completions: dict[int, Completion] = {}
        for has_prefix in (False, True):
            rows = [i for i, match in enumerate(matches) if (match is not None) == has_prefix]
            if rows:
                row_requests, row_matches = [requests[i] for i in rows], [match for i in rows if (match := matches[i])]
                kept: dict[str, Any] = {"images": images, "snapshot_bytes": prefixes.max_bytes, "routers": routers}
                decoding = _Decoding(model, row_requests, eos_ids, pad_id, row_matches, **kept)
                completions.update(zip(rows, decoding.run(), strict=True))
                for episode, prefix in decoding.prefixes():
                    prefixes.add(episode, prefix)
                prefixes.shrink()
        return [completions[i] for i in range(len(requests))]


def _find_match(prefixes: PrefixCache, request: DecodeRequest, images: BatchImages | None) -> Match | None:
    if request.episode is None:
        return None
    ids = request.prompt_ids if images is None else images.key(request.prompt_ids, request.images)
    match = prefixes.longest_match(request.episode, ids, request.images)
    brings_image = match is not None and any(span.start >= match.length for span in request.images)
    return None if brings_image and images is not None and images.see_each_other else match


def _forward_keywords(model: Any) -> frozenset[str]:
    """The keywords used here that the model's forward pass accepts; all of them for a wrapper that
    forwards its arguments."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # adapters hide the signature
    parameters = inspect.signature(inner.forward).parameters
    used = frozenset({"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"})
    return used & set(parameters) if "input_ids" in parameters else used


class _Decoding:
    """The state of one batch. Row i of the tensors belongs to request `rows[i]`; ended rows are
    dropped, immediately if that copies only the rows that take their places."""

    def __init__(
        self,
        model: nn.Module,
        requests: Sequence[DecodeRequest],
        eos_ids: frozenset[int],
        pad_id: int,
        matches: Sequence[Match] = (),
        *,
        images: BatchImages | None = None,
        snapshot_bytes: int = 0,
        routers: Routers | None = None,
    ) -> None:
        """`matches` are the cached prefixes of all prompts, or empty. `images`: of a batch that has
        some. `snapshot_bytes` limits the caches that are kept for `prefixes`."""
        self.model, self.requests, self.images, self.snapshot_bytes = model, requests, images, snapshot_bytes
        self.keywords = _forward_keywords(model)
        self.routers = routers
        self.routed: list[NDArray[Any]] = []
        """[N, T, L, K] experts of what each pass read since the last `_collect_drawn`."""
        self.routes: list[list[NDArray[Any]]] = [[] for _ in requests]
        """The experts of each request's tokens so far, in parts."""
        for parts, match in zip(self.routes, matches, strict=False):
            parts += [] if match.prefix.routes is None else [match.prefix.routes[: match.length]]
        self.device = next(model.parameters()).device
        self.results = [Completion() for _ in requests]
        self.rows = list(range(len(requests)))
        keys = [stream_key(request.seed, request.prompt_ids, request.images) for request in requests]
        self.sampler = Sampler(
            [request.sampling for request in requests],
            keys,
            self.device,
            [request.prompt_ids for request in requests],
            keep_candidates=any(request.keep_candidates for request in requests),
            banned_ids=list_banned(model),
        )
        self.eos = torch.tensor(sorted(eos_ids), dtype=torch.long, device=self.device)
        self.cache: Any = None
        self.has_row_cache = False
        """Whether the cache is a `RowCache`; after the prompts."""
        self.limits = [request.limit for request in requests]
        self.limit = torch.tensor(self.limits, device=self.device)
        self.prompts = [tuple(r.prompt_ids if images is None else images.key(r.prompt_ids, r.images)) for r in requests]
        """[N] the ids of each prompt, with the numbers of its images."""
        distinct = dict(zip(self.prompts, requests, strict=True))
        number = {prompt: i for i, prompt in enumerate(distinct)}
        self.prompt_of_row = torch.tensor([number[prompt] for prompt in self.prompts], device=self.device)
        """[N] index into the distinct prompts, each of which the model reads once. Prompts a, b, a
        give [0, 1, 0]."""
        read = [(request.prompt_ids, request.images, 0) for request in distinct.values()]
        if matches:  # each row has its own cache
            self.prompt_of_row = torch.arange(len(requests), device=self.device)
            read = [(each.prompt_ids, each.images, match.length) for each, match in zip(requests, matches, strict=True)]
            self.cache, prefix_mask = join_prefixes(matches)
        self.ids, mask = self._pad([ids[start:] for ids, _, start in read], pad_id)
        self.mask = torch.cat([prefix_mask, mask], dim=1) if matches else mask
        self.has_padding = not bool(self.mask.all())
        self.positions = None if images is None else images.positions(read, self.ids.shape[1])
        """[3, N, T] of the tokens that the next pass reads, if they are not counted."""
        shown = [span.digest for _, spans, start in read for span in spans if span.start >= start]
        self.features = [] if images is None else images.encode(shown)
        """Of the images that the next pass reads."""
        self.snapshots: list[tuple[Snapshot, list[int], int]] = []
        """Caches, the requests of their rows, and the number of sampled tokens that they hold."""
        self.has_stops = any(request.contains_stop for request in requests)
        self.drawn: list[tuple[Tensor, Tensor, Tensor]] = []
        """Of each step since the last `_collect_drawn`: tokens and both log-probabilities, [N]
        each."""

    def run(self) -> list[Completion]:
        """Sample until every row has ended."""
        alive = torch.ones(len(self.rows), dtype=torch.bool, device=self.device)
        for step in range(max(self.limits)):
            # 1. Run the model; in the first step, copy each distinct prompt's logits to its rows.
            logits = self._read_prompts() if step == 0 else self._forward()
            # 2. Draw a token for each row.
            self.drawn.append(self.sampler.draw(logits, step))
            for row, candidates in zip(self.rows, self.sampler.candidates or (), strict=False):
                self.results[row].candidates.append(candidates)
            tokens = self.drawn[-1][0]
            # 3. End rows: end token, stop string, limit, caller gone.
            alive = alive & ~torch.isin(tokens, self.eos)
            if self.has_stops:
                alive = self._end_at_stop_strings(alive)
            alive = alive & (self.limit > step + 1)
            for i, row in enumerate(self.rows):
                is_abandoned = self.requests[row].is_abandoned
                if is_abandoned is not None and is_abandoned():
                    alive[i] = False
            num_alive = int(alive.sum())
            if num_alive == 0:
                self._save_snapshot(torch.ones_like(alive), step)
                break
            # 4. Append the tokens to the input; a model without a cache reads the whole row again.
            column = tokens[:, None]
            self.ids = column if self.cache is not None else torch.cat([self.ids, column], dim=1)
            self.mask = torch.cat([self.mask, torch.ones_like(column)], dim=1)
            # 5. Drop ended rows. A copy of all other rows pays if the majority has ended; else the
            # fixed cost counts.
            if len(self.rows) - num_alive >= max(1, len(self.rows) / (8 if self.has_row_cache else 2)):
                alive = self._compact(alive, step)
        self._collect_drawn()
        completions = [self._cut_after_end(result, limit) for result, limit in zip(self.results, self.limits, strict=True)]
        if self.routers is not None:
            for completion, prompt, parts in zip(completions, self.prompts, self.routes, strict=True):
                completion.routes = np.concatenate(parts)[: len(prompt) + len(completion.token_ids)]
        return completions

    def prefixes(self) -> Iterator[tuple[Episode, Prefix]]:
        """After `run`: the tokens of each episode's dialogue whose keys and values are cached."""
        for snapshot, rows, num_sampled in self.snapshots:
            for i, row in enumerate(rows):
                request = self.requests[row]
                if request.episode is not None:
                    ids = [*self.prompts[row], *self.results[row].token_ids[:num_sampled]]
                    routes = self.results[row].routes
                    yield request.episode, Prefix(snapshot, i, ids, None if routes is None else routes[: len(ids)])

    def _forward(self) -> Tensor:
        """Logits [N, V] of each row's next token, float32."""
        arguments: dict[str, Any] = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}
        first = first_position(unwrap_transformer(self.model))
        # A model with positions of images would count on from those of its last pass.
        if self.has_padding or first or has_image_positions(self.model):  # mask [0, 0, 1, 1, 1] -> positions [0, 0, 0, 1, 2]
            position = (self.mask.cumsum(dim=1) - 1).clamp(min=0) + first
            arguments["attention_mask"] = self.mask
            arguments["position_ids"] = position[:, -self.ids.shape[1] :] if self.positions is None else self.positions
        arguments = {name: value for name, value in arguments.items() if name in self.keywords}
        if self.images is not None:
            arguments |= self.images.keywords(self.ids, self.features)
        with nullcontext() if self.routers is None else self.routers.running() as seen:
            output = self._run_model(arguments)
        if self.routers is not None and seen is not None:
            experts = seen.indices().to(self.routers.dtype).cpu().numpy()
            self.routed.append(experts.reshape(*self.ids.shape, -1, self.routers.top_k))
        self.cache, self.features = getattr(output, "past_key_values", None), []
        if self.positions is not None:  # of the next token: [[0, 0, 1, 1]] -> [[2]]
            self.positions = (self.positions.amax(dim=(0, 2)) + 1)[None, :, None].expand(len(self.positions), -1, 1)
        logits: Tensor = output.logits[:, -1].float()
        return logits

    def _run_model(self, arguments: dict[str, Any]) -> Any:
        """The model's output; from whole rows if its attention differs from the first pass and
        cannot read shared prompts."""
        if not (self.has_row_cache and self.cache.shares):
            return self.model(input_ids=self.ids, **arguments)
        length = self.cache.get_seq_length()
        try:
            output = self.model(input_ids=self.ids, **arguments)
        except RuntimeError:  # of shapes, if there is a mask
            if not self.cache.has_unread_columns():
                raise
        else:
            if not self.cache.has_unread_columns():
                return output
        self.cache.unshare(length)
        return self.model(input_ids=self.ids, **arguments)

    def _read_prompts(self) -> Tensor:
        """Logits [N, V] after the prompts. Input and cache then have a row for each request."""
        from ludic.inference.local.row_cache import RowCache, record_reads

        with record_reads() as reads:
            logits = self._forward()
        if self.routed:
            experts = self.routed.pop()
            for row, prompt in enumerate(self.prompt_of_row.tolist()):
                own = len(self.prompts[row]) - sum(map(len, self.routes[row]))
                self.routes[row].append(experts[prompt, experts.shape[1] - own :])
        if is_plain(self.cache, self.device):
            tokens_saved = (len(self.rows) - len(logits)) * self.cache.get_seq_length()
            share = tokens_saved >= LEAST_SHARED_TOKENS and reads.are_of(self.cache)
            self.has_row_cache = True
            self.cache = RowCache(self.cache, self.prompt_of_row, limit=max(self.limits), share=share)
        elif self.cache is not None and len(self.rows) > len(logits):
            self.cache.reorder_cache(self.prompt_of_row)
        self.ids, self.mask = self.ids[self.prompt_of_row], self.mask[self.prompt_of_row]
        self.positions = None if self.positions is None else self.positions[:, self.prompt_of_row]
        return logits[self.prompt_of_row]

    def _collect_drawn(self) -> None:
        """Move the drawn tokens to the results, in one transfer for each of the three columns."""
        if not self.drawn:
            return
        columns = [torch.stack(steps, dim=1).tolist() for steps in zip(*self.drawn, strict=True)]
        for row, ids, logps, drawn in zip(self.rows, *columns, strict=True):
            result = self.results[row]
            result.token_ids += ids
            result.logprobs += logps
            result.drawn_logprobs += drawn
        self.drawn.clear()
        if self.routed:
            experts = np.concatenate([read[:, -1:] for read in self.routed], axis=1)
            for row, read in zip(self.rows, experts, strict=True):
                self.routes[row].append(read)
            self.routed.clear()

    def _compact(self, alive: Tensor, num_sampled: int) -> Tensor:
        """Keep only the rows that are alive. The cache holds `num_sampled` sampled tokens.

        Rows of requests [0, 2, 5] and alive [T, F, T] become rows of requests [0, 5].
        """
        self._collect_drawn()
        self._save_snapshot(~alive, num_sampled)
        if self.has_row_cache:
            keep = self.cache.keep(alive)
        else:
            keep = alive.nonzero().squeeze(1)
            if self.cache is not None:
                self.cache.reorder_cache(keep)
        self.rows = [self.rows[i] for i in keep.tolist()]
        self.ids, self.mask, self.limit = (t[keep] for t in (self.ids, self.mask, self.limit))
        self.positions = None if self.positions is None else self.positions[:, keep]
        self.sampler.keep(keep)
        return alive[keep]

    def _save_snapshot(self, leaving: Tensor, num_sampled: int) -> None:
        """Keep the cache of the rows that leave, if they can be reused and it is small enough."""
        if not self.snapshot_bytes or not is_separable(self.model, self.cache):
            return
        places = leaving.nonzero().squeeze(1)
        if self.cache.nbytes_of_rows(len(places)) <= self.snapshot_bytes:
            snapshot = Snapshot(self.cache.read_rows(places), self.mask[places, : self.cache.get_seq_length()].bool())
            self.snapshot_bytes -= snapshot.nbytes
            self.snapshots.append((snapshot, [self.rows[i] for i in places.tolist()], num_sampled))

    def _end_at_stop_strings(self, alive: Tensor) -> Tensor:
        self._collect_drawn()
        still_alive = alive.tolist()
        for i, row in enumerate(self.rows):
            contains_stop, result = self.requests[row].contains_stop, self.results[row]
            if contains_stop is not None and still_alive[i] and contains_stop(result.token_ids):
                result.finish_reason = "stop"
                self.limits[row] = len(result.token_ids)
                still_alive[i] = False
        return torch.tensor(still_alive, device=self.device)

    def _cut_after_end(self, result: Completion, limit: int) -> Completion:
        """Drop the tokens that were drawn after a row had ended.

        With end token 2 and limit 9, ids [7, 2, 8, 8] become [7, 2], finish reason "stop".
        """
        ends = set(self.eos.tolist())
        end = next((i + 1 for i, token in enumerate(result.token_ids[:limit]) if token in ends), None)
        if end is not None:
            result.finish_reason = "stop"
        length = limit if end is None else end
        for values in (result.token_ids, result.logprobs, result.drawn_logprobs, result.candidates):
            del values[length:]
        return result

    def _pad(self, prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
        """Left-padded ids and mask [N, P]: prompts [7, 8] and [9] give [[7, 8], [pad, 9]] and
        [[1, 1], [0, 1]]."""
        width = max(map(len, prompts))
        ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        return ids, mask
