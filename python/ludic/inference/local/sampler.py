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

from ludic.inference.sampling import SamplingParams

CHUNK_ELEMENTS = 1 << 22
"""Probabilities processed at once."""
BLOCK = 64
"""Uniforms drawn from each stream at once; a multiple of four."""


def stream_key(seed: int | None, prompt_ids: Sequence[int]) -> NDArray[np.uint64]:
    """[2] the key of one request's random stream; a random key without a seed.

    It depends on the prompt, so that requests with the same seed and different prompts are
    independent.
    """
    if seed is None:
        return np.frombuffer(secrets.token_bytes(16), dtype=np.uint64)
    digest = hashlib.blake2b(np.asarray(prompt_ids, dtype="<i8").tobytes(), digest_size=8).digest()
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

    def __init__(self, params: Sequence[SamplingParams], keys: Sequence[NDArray[np.uint64]], device: torch.device) -> None:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        self._device = device
        self._keys, self._uniforms = list(keys), Uniforms()
        self.temperature = column([p.temperature for p in params])
        self.top_p = column([p.top_p for p in params])
        self.frequency = column([p.frequency_penalty for p in params])
        self.presence = column([p.presence_penalty for p in params])
        self.uniforms = torch.empty((len(params), 0), dtype=torch.float64, device=device)
        self.counts: Tensor | None = None
        self._plain = all(p.temperature == 1.0 and p.top_p == 1.0 for p in params)
        self._cut = any(p.top_p < 1.0 for p in params)
        self._penalised = any(p.frequency_penalty != 0 or p.presence_penalty != 0 for p in params)

    def keep(self, rows: Tensor) -> None:
        """Keep only the rows at these indices [M]."""
        for name in ("temperature", "top_p", "frequency", "presence", "uniforms"):
            setattr(self, name, getattr(self, name)[rows])
        self._keys = [self._keys[row] for row in rows.tolist()]
        if self.counts is not None:
            self.counts = self.counts[rows]

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
        tokens, raw, drawn = [], [], []
        rows = max(1, CHUNK_ELEMENTS // logits_NV.shape[1])
        for start in range(0, logits_NV.shape[0], rows):
            part = slice(start, start + rows)
            logp = torch.log_softmax(logits_NV[part], dim=-1)
            shaped = logp if self._plain and not self._penalised else self._shape_logprobs(logits_NV[part], part)
            token = _invert(shaped, uniform[part])
            tokens.append(token)
            raw.append(logp.gather(1, token[:, None]).squeeze(1))
            drawn.append(shaped.gather(1, token[:, None]).squeeze(1))
        all_tokens = torch.cat(tokens)
        self._count(all_tokens, logits_NV.shape[1])
        return all_tokens, torch.cat(raw), torch.cat(drawn)

    def _shape_logprobs(self, logits: Tensor, part: slice) -> Tensor:
        """Log-probabilities after penalties, temperature and top-p. A greedy row puts all mass on
        one token."""
        if self.counts is not None:
            counts = self.counts[part]
            logits = logits - self.frequency[part, None] * counts - self.presence[part, None] * (counts > 0)
        temperature = self.temperature[part, None]
        greedy = temperature == 0
        logp = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature), dim=-1)
        if self._cut:
            logp = nucleus(logp, self.top_p[part, None])
        point = torch.full_like(logp, -torch.inf).scatter_(1, logits.argmax(dim=-1, keepdim=True), 0.0)
        return torch.where(greedy, point, logp)

    def _count(self, tokens: Tensor, vocabulary: int) -> None:
        if not self._penalised:
            return
        if self.counts is None:
            self.counts = torch.zeros((len(tokens), vocabulary), device=self._device)
        self.counts.scatter_add_(1, tokens[:, None], torch.ones_like(tokens[:, None], dtype=torch.float32))


def _invert(logp_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds the uniform times the total; never a
    token of probability 0.

    Probabilities [0.2, 0.3, 0.5] and uniform 0.4 give token 1: 0.2 <= 0.4 < 0.5.
    """
    cumulative = logp_NV.double().exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = torch.minimum(uniform_N[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp(max=logp_NV.shape[1] - 1)  # NaN sorts last


def nucleus(logp: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of most likely tokens whose probability reaches top_p, and
    renormalise (Holtzman et al. 2020)."""
    ordered, order = logp.sort(dim=-1, descending=True, stable=True)
    before = ordered.exp().cumsum(dim=-1) - ordered.exp()
    dropped = torch.zeros_like(before, dtype=torch.bool).scatter_(1, order, (before >= top_p) & (top_p < 1))
    return torch.log_softmax(logp.masked_fill(dropped, -torch.inf), dim=-1)
