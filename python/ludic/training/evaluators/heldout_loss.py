"""The loss on held-out samples: an evaluator for supervised fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from ludic.errors import ConfigError
from ludic.training.backend.forward import as_forward_passes, forward_action_logprobs
from ludic.training.backend.protocol import ForwardPasses
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.rank_plans import RankShare
from ludic.training.config import TrainerConfig
from ludic.training.loss.context import SharedContext
from ludic.training.loss.logprobs import weigh_values
from ludic.training.preflight.layouts import with_right_layout
from ludic.training.types import SAWItem


class HeldOutLoss:
    """Mean of -log pi over all action tokens of `items`, in nats; packing does not change it.
    Samples longer than `max_seq_len` are truncated as in training. As the evaluator of a `Trainer`
    it logs `eval/loss` and `eval/perplexity`.

    It runs in one process. A sharded model would need all ranks.
    """

    def __init__(self, model: nn.Module | ForwardPasses, items: Sequence[SAWItem], cfg: TrainerConfig) -> None:
        """`model`: a model in this process, or the backend that has it."""
        self._model, self._cfg, self._passes = model, cfg, as_forward_passes(model, cfg)
        self._is_checked = False
        self._batch = replace(MacroBatch.ingest(items, cfg.max_seq_len), share=RankShare(0, 1))  # no other rank takes part
        if not self._batch.items:
            raise ConfigError(
                f"none of the {len(items)} held-out samples has a token to predict within max_seq_len ({cfg.max_seq_len})"
            )

    def measure(self) -> dict[str, float]:
        """`loss`, `perplexity`, and the number of `tokens`."""
        if isinstance(self._model, nn.Module) and not self._is_checked:
            self._is_checked = True
            self._cfg = with_right_layout(self._cfg, self._model)
        total, tokens = self._sums()
        loss = total / tokens
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": tokens}

    async def eval(self, **_: Any) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """(no records, metrics). Reducers and limits have no effect."""
        return [], self.measure()

    def _sums(self) -> tuple[float, float]:
        """Sum of -log pi over the action tokens, in float64, and their number."""
        total, tokens = 0.0, 0.0
        for micro_batch in MiniBatch(self._batch, np.arange(len(self._batch.items)), self._cfg):
            logps = forward_action_logprobs(self._passes, micro_batch, temperature=1.0).wait()
            mask = SharedContext(micro_batch.tensors["input_ids"], micro_batch.tensors).token_mask
            total -= float(weigh_values(logps.double(), mask.double()).sum())
            tokens += float(mask.sum())
        return total, tokens
