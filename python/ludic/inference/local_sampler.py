"""Draws one token for each row of logits, from that row's own stream of random numbers.

A row's tokens depend on its seed and its logits only, never on the rows beside it: its uniforms come from a counter-based
generator keyed by the seed (Philox, Salmon et al. 2011), one for each token, and invert the row's cumulative distribution. Logits
computed in another batch shape differ in the last bit, which moves a draw only where a uniform falls within that distance of a
boundary, about one token in a million in float32.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ludic.errors import ConfigError
from ludic.inference.sampling import SamplingParams

CHUNK_ELEMENTS = 1 << 22
"""Probabilities worked on at once."""


def check_sampling(params: SamplingParams) -> None:
    """Refuse settings that have no meaning."""
    if not params.temperature >= 0:
        raise ConfigError(f"temperature ({params.temperature}) must be >= 0; 0 takes the most likely token")
    if not 0 < params.top_p <= 1:
        raise ConfigError(f"top_p ({params.top_p}) must be in (0, 1]; 1 keeps all tokens")
    if params.max_tokens < 1:
        raise ConfigError(f"max_tokens ({params.max_tokens}) must be >= 1")


class Sampler:
    """The sampling state of N rows."""

    def __init__(self, params: Sequence[SamplingParams], seeds: Sequence[int | None], device: torch.device) -> None:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        self._device = device
        self.temperature = column([p.temperature for p in params])
        self.top_p = column([p.top_p for p in params])
        self.frequency = column([p.frequency_penalty for p in params])
        self.presence = column([p.presence_penalty for p in params])
        self.counts: Tensor | None = None
        width = max(p.max_tokens for p in params)
        uniforms = np.empty((len(params), width))
        for row, (p, seed) in enumerate(zip(params, seeds, strict=True)):
            generator = np.random.Generator(np.random.Philox(key=None if seed is None else seed % 2**64))
            uniforms[row, : p.max_tokens] = generator.random(p.max_tokens)
            uniforms[row, p.max_tokens :] = 0.0
        self.uniforms = torch.from_numpy(uniforms).to(device)
        self._plain = all(p.temperature == 1.0 and p.top_p == 1.0 for p in params)
        self._penalised = any(p.frequency_penalty != 0 or p.presence_penalty != 0 for p in params)

    def keep(self, rows: Tensor) -> None:
        """Go on with the rows at these indices [M] alone."""
        for name in ("temperature", "top_p", "frequency", "presence", "uniforms"):
            setattr(self, name, getattr(self, name)[rows])
        if self.counts is not None:
            self.counts = self.counts[rows]

    def draw(self, logits_NV: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """The next token of each row, its log-probability under the logits as they are, and under the distribution drawn from.

        logits float32; results [N] int64, float32, float32. `position` is the number of tokens drawn before.
        """
        tokens, raw, drawn = [], [], []
        rows = max(1, CHUNK_ELEMENTS // logits_NV.shape[1])
        for start in range(0, logits_NV.shape[0], rows):
            part = slice(start, start + rows)
            logp = torch.log_softmax(logits_NV[part], dim=-1)
            shaped = logp if self._plain and not self._penalised else self._shaped(logits_NV[part], part)
            token = self._invert(shaped, self.uniforms[part, position], self.temperature[part])
            tokens.append(token)
            raw.append(logp.gather(1, token[:, None]).squeeze(1))
            drawn.append(shaped.gather(1, token[:, None]).squeeze(1))
        chosen = torch.cat(tokens)
        self._count(chosen, logits_NV.shape[1])
        return chosen, torch.cat(raw), torch.cat(drawn)

    def _shaped(self, logits: Tensor, part: slice) -> Tensor:
        """Log-probabilities after penalties, temperature and top-p. A greedy row is a point mass."""
        if self.counts is not None:
            counts = self.counts[part]
            logits = logits - self.frequency[part, None] * counts - self.presence[part, None] * (counts > 0)
        temperature = self.temperature[part, None]
        greedy = temperature == 0
        logp = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature), dim=-1)
        if bool((self.top_p[part] < 1).any()):
            logp = _nucleus(logp, self.top_p[part, None])
        point = torch.full_like(logp, -torch.inf).scatter_(1, logits.argmax(dim=-1, keepdim=True), 0.0)
        return torch.where(greedy, point, logp)

    @staticmethod
    def _invert(logp: Tensor, uniform: Tensor, temperature: Tensor) -> Tensor:
        """The first token whose cumulative probability exceeds the uniform's share of the total. Tokens of probability 0 are never it."""
        cumulative = logp.double().exp().cumsum(dim=-1)
        target = uniform[:, None] * cumulative[:, -1:]
        return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp(max=logp.shape[1] - 1)

    def _count(self, tokens: Tensor, vocabulary: int) -> None:
        if not self._penalised:
            return
        if self.counts is None:
            self.counts = torch.zeros((len(tokens), vocabulary), device=self._device)
        self.counts.scatter_add_(1, tokens[:, None], torch.ones_like(tokens[:, None], dtype=torch.float32))


def _nucleus(logp: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of most likely tokens whose probability reaches top_p, and renormalise (Holtzman et al. 2020)."""
    ordered, order = logp.sort(dim=-1, descending=True)
    before = ordered.exp().cumsum(dim=-1) - ordered.exp()
    dropped = torch.zeros_like(before, dtype=torch.bool).scatter_(1, order, before >= top_p)
    return torch.log_softmax(logp.masked_fill(dropped, -torch.inf), dim=-1)
