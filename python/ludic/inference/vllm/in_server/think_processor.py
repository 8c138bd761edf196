"""A logits processor for vLLM servers that ends the thinking of requests with `max_think`.

    python -m vllm.entrypoints.openai.api_server ... --logits-processors
    ludic.inference.vllm.in_server.think_processor:GlobalThinkProcessor

The forced tokens of `</think>` have log-probability 0 if the server reports log-probabilities of
the distribution sampled from.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

from ludic.inference.vllm.in_server.think_limits import ThinkLimits, parse_max_think

CLOSING = "</think>"


class GlobalThinkProcessor(LogitsProcessor):
    """Reads `max_think` from a request's `vllm_xargs`."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        parse_max_think((sampling_params.extra_args or {}).get("max_think"))

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        from transformers import AutoTokenizer

        config = vllm_config.model_config
        tokenizer = AutoTokenizer.from_pretrained(
            config.tokenizer, revision=config.tokenizer_revision, trust_remote_code=config.trust_remote_code
        )
        self._limits = ThinkLimits(tokenizer.encode(CLOSING, add_special_tokens=False))

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._limits.remove(row)
        for row, params, _, output in batch_update.added:
            self._limits.add(row, (params.extra_args or {}).get("max_think"), output)
        for source, target, direction in batch_update.moved:
            self._limits.move(source, target, swap=direction == MoveDirectionality.SWAP)

    def apply(self, logits: Any) -> Any:
        """logits [rows, V], changed in place."""
        for row, token in self._limits.forced_tokens().items():
            logit = logits[row, token].clone()
            logits[row] = float("-inf")
            logits[row, token] = logit
        return logits
