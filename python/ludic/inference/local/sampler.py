"""Draws one token for each row of logits. Each row has its own random stream.

A row's tokens depend only on its seed, its prompt and its logits, never on the other rows. For each
token, a counter-based generator keyed by seed and prompt (Philox, Salmon et al. 2011) gives a
uniform number, which is mapped through the row's inverse cumulative distribution. Logits computed
in another batch shape differ in the last bits. That changes a draw only if its uniform number is
that close to a boundary (about one token in a million in float32), and a greedy choice only if two
tokens are that close.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludic.inference.request import SamplingParams
from ludic.types import ImageSpan

CHUNK_ELEMENTS = 1 << 20
"""Probabilities processed in one pass."""
TILE = 128
"""Tokens whose probabilities are summed first when a uniform number is looked up."""
HEAD = 1024
"""Most likely tokens that top-p sorts before it sorts a whole row."""
BLOCK = 64
"""Uniforms drawn from each stream in one call; a multiple of four."""


def stream_key(seed: int | None, prompt_ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> NDArray[np.uint64]:
    """[2] the key of one request's random stream; a random key without a seed.

    It depends on the prompt and its images, so that requests with the same seed and different
    prompts are independent.
    """
    if seed is None:
        return np.frombuffer(secrets.token_bytes(16), dtype=np.uint64)
    shown = "".join(span.digest for span in images).encode()
    digest = hashlib.blake2b(np.asarray(prompt_ids, dtype="<i8").tobytes() + shown, digest_size=8).digest()
    return np.array([seed % 2**64, int.from_bytes(digest, "little")], dtype=np.uint64)


class Uniforms:
    """The numbers of `np.random.Generator(np.random.Philox(key=key)).random()` for any key and
    position. Does not make a generator for each key, which takes longer than drawing from it."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(0)
        self._generator = np.random.Generator(self._philox)
        self._state: Any = self._philox.state
        self._state["buffer_pos"] = 4  # a count gives four numbers; 4 means that all are used up

    def block(self, key: NDArray[np.uint64], number: int) -> NDArray[np.float64]:
        """[BLOCK] the numbers `number * BLOCK` to `(number + 1) * BLOCK - 1` of the key's
        stream."""
        counter = np.array([number * BLOCK // 4, 0, 0, 0], dtype=np.uint64)
        self._state["state"] = {"counter": counter, "key": key}
        self._philox.state = self._state
        return self._generator.random(BLOCK)


class Sampler:
    """The sampling state of N rows."""

    def __init__(
        self,
        params: Sequence[SamplingParams],
        keys: Sequence[NDArray[np.uint64]],
        device: torch.device,
        prompts: Sequence[Sequence[int]] = (),
        *,
        keep_candidates: bool = False,
        banned_ids: Sequence[int] = (),
    ) -> None:
        """`prompts` [N]: the token ids that `repetition_penalty` counts as seen. `keep_candidates`:
        fill `candidates`. `banned_ids` are never drawn."""

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        self._device = device
        self._keys, self._uniforms = list(keys), Uniforms()
        self.temperature = column([p.temperature for p in params])
        self.top_p = column([p.top_p for p in params])
        self.top_k = torch.tensor([p.top_k for p in params], device=device)
        self.min_p = column([p.min_p for p in params])
        self.repetition = column([p.repetition_penalty for p in params])
        self.frequency = column([p.frequency_penalty for p in params])
        self.presence = column([p.presence_penalty for p in params])
        self.uniforms = torch.empty((len(params), 0), dtype=torch.float64, device=device)
        self.counts: Tensor | None = None
        self.seen: Tensor | None = None
        """[N, V] tokens of the prompt and the answer, if one of the rows penalises them."""
        self.candidates: list[list[int]] | None = [] if keep_candidates else None
        """Of each row in the last draw, the ids of the tokens that top-p, top-k and min-p kept; []
        means all that are not banned."""
        self._banned = torch.tensor(banned_ids, dtype=torch.long, device=device)
        self._prompts = prompts if any(p.repetition_penalty != 1 for p in params) else None
        self._plain = all(p.temperature == 1.0 and not p.is_cut for p in params)
        self._greedy = any(p.temperature == 0.0 for p in params)
        self._cut = any(p.top_p < 1 or p.top_k or p.min_p for p in params)
        self._penalised = any(p.frequency_penalty != 0 or p.presence_penalty != 0 for p in params)

    def keep(self, rows: Tensor) -> None:
        """Keep only the rows at these indices [M]."""
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition", "frequency", "presence", "uniforms"):
            setattr(self, name, getattr(self, name)[rows])
        self._keys = [self._keys[row] for row in rows.tolist()]
        if self.counts is not None:
            self.counts = self.counts[rows]
        if self.seen is not None:
            self.seen = self.seen[rows]

    def draw(self, logits_NV: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """The next token of each row, its log-probability under the raw logits, and under the
        distribution sampled from.

        Logits are float32; results are [N] int64, float32, float32. `position` is the number of
        tokens drawn before: 0, 1, 2 and so on.
        """
        if position % BLOCK == 0:
            block = np.stack([self._uniforms.block(key, position // BLOCK) for key in self._keys])
            self.uniforms = torch.from_numpy(block).to(self._device)
        uniform = self.uniforms[:, position % BLOCK]
        if self._prompts is not None and self.seen is None:
            self.seen = torch.zeros(logits_NV.shape, dtype=torch.bool, device=self._device)
            for row, prompt in zip(self.seen, self._prompts, strict=True):
                row[torch.tensor(prompt, device=self._device)] = True
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        candidates: list[list[int]] = []
        num_allowed = logits_NV.shape[1] - len(self._banned)
        is_plain = self._plain and not self._penalised and not len(self._banned)
        rows = max(1, CHUNK_ELEMENTS // logits_NV.shape[1])
        for start in range(0, logits_NV.shape[0], rows):
            part = slice(start, start + rows)
            logits = logits_NV[part]
            allowed = logits.index_fill(1, self._banned, -torch.inf) if len(self._banned) else logits
            shaped = logits if is_plain else self._shape_logits(allowed, part)
            if self.candidates is not None:
                kept = shaped > -torch.inf
                candidates += [[] if int(each.sum()) == num_allowed else each.nonzero().squeeze(1).tolist() for each in kept]
            p = torch.softmax(shaped, dim=-1)
            token = _invert(p, uniform[part])
            logp = _gather_logp(shaped, p, token)
            raw_logp = logp if is_plain else _gather_logp(logits, torch.softmax(logits, dim=-1), token)
            parts.append((token, raw_logp, logp))
        if self.candidates is not None:
            self.candidates = candidates
        tokens, raw, drawn = (torch.cat(column) for column in zip(*parts, strict=True))
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        if self._penalised:
            if self.counts is None:
                self.counts = torch.zeros(logits_NV.shape, device=self._device)
            self.counts.scatter_add_(1, tokens[:, None], torch.ones_like(tokens[:, None], dtype=torch.float32))
        return tokens, raw, drawn

    def _shape_logits(self, logits: Tensor, part: slice) -> Tensor:
        """Logits after penalties, temperature, min-p, top-k and top-p, in the order of vLLM. A
        greedy row puts all mass on one token."""
        if self.seen is not None:
            factor = self.repetition[part, None]
            penalised = torch.where(logits > 0, logits / factor, logits * factor)
            logits = torch.where(self.seen[part], penalised, logits)
        if self.counts is not None:
            counts = self.counts[part]
            logits = logits - self.frequency[part, None] * counts - self.presence[part, None] * (counts > 0)
        temperature = self.temperature[part, None]
        greedy = temperature == 0
        shaped = logits / torch.where(greedy, 1.0, temperature)
        if self._cut:
            shaped = nucleus(most_likely(shaped, self.top_k[part], self.min_p[part]), self.top_p[part])
        if self._greedy:
            point = torch.full_like(shaped, -torch.inf).scatter_(1, logits.argmax(dim=-1, keepdim=True), 0.0)
            shaped = torch.where(greedy, point, shaped)
        return shaped


def _gather_logp(logits_NV: Tensor, p_NV: Tensor, token_N: Tensor) -> Tensor:
    """The log-probability of each row's token: its logit, minus the largest, plus the logarithm of
    the largest probability."""
    largest = logits_NV.amax(dim=-1)
    return (logits_NV.gather(1, token_N[:, None]).squeeze(1) - largest) + p_NV.amax(dim=-1).log()


def _invert(p_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds the uniform times the total; never a
    token of probability 0.

    Probabilities [0.2, 0.3, 0.5] and uniform 0.4 give token 1: 0.2 <= 0.4 < 0.5. First the tile of
    tokens is found by the tiles' sums, then the token in it. Cumulative sums are float64.
    """
    vocabulary = p_NV.shape[1]
    whole = vocabulary - vocabulary % TILE
    sums = p_NV[:, :whole].unflatten(1, (-1, TILE)).sum(dim=-1) if whole else p_NV[:, :0]
    cumulative = torch.cat([sums, p_NV[:, whole:].sum(dim=-1, keepdim=True)], dim=1).double().cumsum(dim=-1)
    target = uniform_N[:, None] * cumulative[:, -1:]
    tile = _first_above(cumulative, target)
    before = torch.cat([torch.zeros_like(target), cumulative], dim=1).gather(1, tile)
    columns = tile * TILE + torch.arange(TILE, device=tile.device)
    inside = p_NV.gather(1, columns.clamp(max=vocabulary - 1)).double().masked_fill_(columns >= vocabulary, 0.0)
    token = _first_above(inside.cumsum(dim=-1), target - before)
    return (tile * TILE + token).squeeze(1).clamp(max=vocabulary - 1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """[N, 1] the first column whose cumulative sum exceeds the target; where none does, because of
    rounding, the last that adds something."""
    total = cumulative[:, -1:]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).clamp(max=cumulative.shape[1] - 1)  # NaN sorts last


def most_likely(logits_NV: Tensor, top_k_N: Tensor, min_p_N: Tensor) -> Tensor:
    """Keep the logits of the `top_k` most likely tokens, with those that are equal to the last (0:
    of all), and of these the tokens at least `min_p` times as likely as the likeliest (Nguyen et
    al. 2024); set the others to -inf."""
    least_N1 = logits_NV.amax(dim=-1, keepdim=True) + min_p_N[:, None].log()
    rank_N = top_k_N.clamp(max=logits_NV.shape[1])
    if size := int(rank_N.max()):
        last_N1 = logits_NV.topk(size, dim=-1).values.gather(1, (rank_N - 1).clamp(min=0)[:, None])
        least_N1 = torch.where(rank_N[:, None] > 0, torch.maximum(least_N1, last_N1), least_N1)
    return logits_NV.masked_fill(logits_NV < least_N1, -torch.inf)


def nucleus(logits_NV: Tensor, top_p_N: Tensor) -> Tensor:
    """Keep the logits of the smallest set of most likely tokens whose probability reaches top_p,
    and set the others to -inf (Holtzman et al. 2020). Of equal probabilities the first are kept.

    The set is looked for among the `HEAD` most likely tokens, and among all in rows where these
    have too little probability.
    """
    p_NV = torch.softmax(logits_NV, dim=-1)
    least_N, extra_N = torch.zeros_like(p_NV[:, 0]), torch.zeros_like(top_p_N, dtype=torch.long)
    rows = (top_p_N < 1).nonzero().squeeze(1)
    for size in (HEAD, p_NV.shape[1]):
        if len(rows) == 0:
            break
        p = p_NV if len(rows) == len(p_NV) else p_NV[rows]
        least, extra, is_found = _nucleus_border(p, top_p_N[rows], min(size, p_NV.shape[1]))
        least_N[rows], extra_N[rows] = least, extra
        rows = rows[~is_found]
    kept_NV = logits_NV.masked_fill(p_NV < least_N[:, None], -torch.inf)
    for row in extra_N.nonzero().squeeze(1).tolist():
        equal = (p_NV[row] == least_N[row]).nonzero().squeeze(1)
        kept_NV[row, equal[len(equal) - int(extra_N[row]) :]] = -torch.inf
    return kept_NV


def _nucleus_border(p: Tensor, top_p: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: the least probability in the nucleus, how many tokens of this probability are
    outside, and whether this is certain: the nucleus has fewer than `size` tokens, or `size` is the
    vocabulary."""
    ordered = p.topk(size, dim=-1).values if size < p.shape[1] else p.sort(dim=-1, descending=True).values
    num_kept = (ordered.cumsum(dim=-1) - ordered < top_p[:, None]).sum(dim=-1).clamp(min=1)  # 0 of a row with NaN
    least = ordered.gather(1, num_kept[:, None] - 1)
    is_certain = (num_kept < size) | (size == p.shape[1])
    extra = ((ordered >= least).sum(dim=-1) - num_kept).clamp(min=0)
    cut_by_size = extra.bool() & (ordered[:, -1] == least.squeeze(1)) & (size < p.shape[1])
    return least.squeeze(1), extra, is_certain & ~cut_by_size
