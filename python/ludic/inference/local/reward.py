"""A reward model in this process: any sequence-classification model of transformers.

Shapes: N sequences, B of them in a forward pass, T tokens of the longest, H hidden size, L labels.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ludic import _core
from ludic.errors import ConfigError, DataError, InferenceError, check_value
from ludic.event_loop import run_in_thread
from ludic.inference.local.decode import Bounds
from ludic.inference.local.images import BatchImages
from ludic.inference.prompts.images import check_spans
from ludic.inference.prompts.template import encode_text, reads_same_ids
from ludic.inference.reward_types import (
    ImageTokens,
    PoolingType,
    RewardModelTrainingMode,
    ScoringRequest,
    ScoringResponse,
    as_scoring_input,
    check_one_label,
    select_trained_weights,
)
from ludic.models.images.features import Features
from ludic.models.images.processor import find_processor
from ludic.models.images.rows import RowImages
from ludic.models.images.support import check_images
from ludic.models.packed_attention import pin_rope
from ludic.models.published import copy_weights
from ludic.models.wrappers import evaluation_mode
from ludic.types import ImageSpan

logger = logging.getLogger(__name__)


class LocalRewardModel:
    """Scores sequences with `model`, in evaluation mode and without gradients; the mode of each
    module is restored after a call.

    Token ids are scored as they are. Text is tokenised with `tokenizer`, after the token with which
    it begins texts, without the end token; with `add_special_tokens`, with all special tokens.

    The score of a decoder is computed at the last token of each sequence, whatever its id. vLLM
    does the same; the forward pass of transformers uses the last token that is not
    `config.pad_token_id`, which differs if a sequence ends with that id. An encoder uses its own
    pooler, if it has one.

    Sequences are packed by length into forward passes of at most `micro_token_budget` tokens,
    including padding, by the same planner as in training. Equal inputs give equal scores; other
    sequences in the same pass may change the last digits of float32.

    A model that sees images also scores `ImageTokens`, whose images are in the store.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        micro_token_budget: int = 16384,
        add_special_tokens: bool = False,
        name: str = "reward_model",
    ) -> None:
        check_value("micro_token_budget", micro_token_budget, least=1)
        pin_rope(model)
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self._budget, self._add_special_tokens = micro_token_budget, add_special_tokens
        self._body, self._head = _body_and_head(model)
        self._images = find_processor(model)
        self._busy = threading.Lock()
        """Held while sequences are scored and while weights are copied."""
        self._version = 0
        pad, end = getattr(getattr(model, "config", None), "pad_token_id", None), getattr(tokenizer, "eos_token_id", None)
        if self._head is not None and pad is not None and pad == end:
            logger.warning(
                "the end token of %s is also its padding token: here a sequence is scored at its end token, but the forward pass of "
                "transformers uses the token before it; if the model was trained with the latter, set another padding token",
                name,
            )

    def reads_ids_of(self, tokenizer: Any) -> bool:
        """Whether token ids of that tokenizer mean the same here, so that they can be scored
        without decoding."""
        return reads_same_ids(self.tokenizer, tokenizer)

    @property
    def reads_images(self) -> bool:
        """Whether it scores `ImageTokens`."""
        return self._head is not None and self._images is not None

    async def score_batch(
        self,
        inputs: Sequence[str | Sequence[int] | ImageTokens],
        *,
        normalize: bool = True,
        pooling_type: PoolingType | None = None,
        n_labels: int = 1,
    ) -> list[float]:
        """[N] scores, computed in a worker thread; `normalize` applies the logistic function.
        `pooling_type=None` uses the model's own pooling.

        Raises DataError for a sequence that the model cannot read, InferenceError if it fails.
        """
        check_one_label(n_labels)
        logits_NL = await run_in_thread(self._logits, list(inputs), pooling_type, n_labels)
        return _apply_activation(logits_NL, normalize)[:, 0].tolist()

    async def score(self, request: ScoringRequest) -> tuple[ScoringResponse, dict[str, Any]]:
        """Like `score_batch`, with all labels. The info has `reward_model_version`."""
        logits_NL = await run_in_thread(self._logits, list(request.inputs), request.pooling_type, request.n_labels)
        return self._response(request, logits_NL), {"reward_model_version": self._version}

    def score_sync(self, request: ScoringRequest) -> tuple[ScoringResponse, dict[str, Any]]:
        """`score` in the calling thread."""
        response = self._response(request, self._logits(list(request.inputs), request.pooling_type, request.n_labels))
        return response, {"reward_model_version": self._version}

    async def get_reward_model_version(self) -> int:
        return self._version

    def sync_reward_weights(
        self,
        params: Mapping[str, Tensor],
        *,
        training_mode: RewardModelTrainingMode | str = RewardModelTrainingMode.FULL,
        timeout_s: float = 600.0,
        version: str | int | None = None,
    ) -> str:
        """Copy the weights that `training_mode` changes, by name and never during a call; returns
        the version now used."""
        selected = select_trained_weights(params, training_mode)
        if not self._busy.acquire(timeout=timeout_s):
            raise TimeoutError(f"sequences were still being scored after {timeout_s} s; the weights were not changed")
        try:
            copy_weights(self.model, selected)
            self._version = self._version + 1 if version is None else int(version)
            return str(self._version)
        finally:
            self._busy.release()

    def _response(self, request: ScoringRequest, logits_NL: Tensor) -> ScoringResponse:
        scores = _apply_activation(logits_NL, request.normalize)
        tokens = sum(len(ids) for ids in self._token_ids(request.inputs))
        return ScoringResponse(
            scores=(scores[:, 0] if request.n_labels == 1 else scores).tolist(),
            model=self.name,
            usage={"prompt_tokens": tokens, "total_tokens": tokens},
            metadata={"pooling_type": request.pooling_type.value, "normalize": request.normalize},
        )

    def _logits(self, inputs: Sequence[str | Sequence[int] | ImageTokens], pooling: PoolingType | None, n_labels: int) -> Tensor:
        """[N, L] float32 on the CPU. Raises ConfigError for a model with another number of labels
        than `n_labels`."""
        sequences = self._token_ids(inputs)
        self._check_sequences(sequences, pooling)
        spans = [each.images if isinstance(each, ImageTokens) else () for each in inputs]
        placeholder_id = -1 if self._images is None else self._images.placeholder_id
        if not sequences:
            return torch.zeros(0, n_labels)
        lengths = np.fromiter((len(ids) for ids in sequences), dtype=np.int32, count=len(sequences))
        plan = _core.plan_optimal(lengths, max(self._budget, int(lengths.max())))
        logits: dict[int, Tensor] = {}
        try:
            with self._busy, evaluation_mode(self.model), torch.no_grad():
                features = self._encode_images(sequences, spans)
                for rows in plan.to_lists():
                    images = RowImages(placeholder_id, [spans[row] for row in rows], None, features)
                    scored = self._forward([sequences[row] for row in rows], pooling, images)
                    logits.update(zip(rows, scored.float().cpu(), strict=True))
        except RuntimeError as error:
            raise InferenceError(f"{self.name} failed: {type(error).__name__}: {error}") from error
        if len(logits[0]) != n_labels:
            raise ConfigError(f"{self.name} has {len(logits[0])} labels, but the request has n_labels={n_labels}")
        return torch.stack([logits[row] for row in range(len(sequences))])

    def _encode_images(self, sequences: Sequence[Sequence[int]], spans: Sequence[tuple[ImageSpan, ...]]) -> dict[str, Features]:
        """The features of each image. Raises DataError for a sequence with other tokens of images
        than its images have here."""
        if (processor := self._images) is None:
            return {}
        digests = list(dict.fromkeys(span.digest for each in spans for span in each))
        if digests:
            check_images(self.model, processor)
        for index, (ids, images) in enumerate(zip(sequences, spans, strict=True)):
            processor.check_count(len(images))
            try:
                check_spans(ids, images, processor, self.name)
            except ConfigError as error:
                remedy = f"use the processor and the images.max_pixels of the policy for {self.name}"
                raise DataError(f"sequence {index}: {error}; {remedy}") from error
        return dict(zip(digests, BatchImages(self.model, None).encode(digests), strict=True))

    def _forward(self, sequences: Sequence[Sequence[int]], pooling: PoolingType | None, images: RowImages) -> Tensor:
        """Logits [B, L] of right-padded rows."""
        device = next(self.model.parameters()).device
        lengths_B = torch.tensor([len(ids) for ids in sequences])
        ids_BT = torch.zeros(len(sequences), int(lengths_B.max()), dtype=torch.long)
        for row, ids in enumerate(sequences):
            ids_BT[row, : len(ids)] = torch.tensor(ids)
        mask_BT = (torch.arange(ids_BT.shape[1]) < lengths_B[:, None]).long().to(device)
        ids_BT, lengths_B = ids_BT.to(device), lengths_B.to(device)
        if self._head is None or self._body is None:
            logits_BL: Tensor = self.model(input_ids=ids_BT, attention_mask=mask_BT).logits
            return logits_BL
        keywords = images.keywords(self.model, {"input_ids": ids_BT})
        hidden_BTH: Tensor = self._body(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False, **keywords).last_hidden_state
        pooled: Tensor = self._head(_pool(hidden_BTH, mask_BT, lengths_B, pooling or PoolingType.LAST))
        return pooled

    def _token_ids(self, inputs: Sequence[str | Sequence[int] | ImageTokens]) -> list[Sequence[int]]:
        checked = [as_scoring_input(item.ids if isinstance(item, ImageTokens) else item) for item in inputs]
        if self.tokenizer is None and any(isinstance(item, str) for item in checked):
            raise ConfigError(f"{self.name} has no tokenizer but got text; pass tokenizer=, or token ids")
        return [self._encode(item) if isinstance(item, str) else item for item in checked]

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"]) if self._add_special_tokens else encode_text(self.tokenizer, text)

    def _check_sequences(self, sequences: Sequence[Sequence[int]], pooling: PoolingType | None) -> None:
        if pooling is PoolingType.STEP:
            raise ConfigError("pooling_type=step is reserved: scores for each step are not implemented")
        if self._head is None and pooling not in (None, PoolingType.CLS):
            raise ConfigError(f"{self.name} is an encoder that scores its first token; use pooling_type=cls or None")
        bounds = Bounds.of(self.model)
        for index, ids in enumerate(sequences):
            if fault := bounds.find_fault(ids):
                raise DataError(f"sequence {index} for {self.name} has {fault}")


def _pool(hidden_BTH: Tensor, mask_BT: Tensor, lengths_B: Tensor, pooling: PoolingType) -> Tensor:
    """Pooled hidden states [B, H]."""
    if pooling is PoolingType.CLS:
        return hidden_BTH[:, 0]
    if pooling is PoolingType.LAST:
        return hidden_BTH[torch.arange(len(lengths_B), device=hidden_BTH.device), lengths_B - 1]
    weights_BT1 = mask_BT[:, :, None].to(hidden_BTH.dtype)
    return (hidden_BTH * weights_BT1).sum(1) / lengths_B[:, None].to(hidden_BTH.dtype)


def _body_and_head(model: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """The decoder and the linear head on its hidden states; (None, None) for a model with its own
    pooling."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    body, head = getattr(inner, getattr(inner, "base_model_prefix", "") or "-", None), getattr(inner, "score", None)
    return (body, head) if isinstance(body, nn.Module) and isinstance(head, nn.Module) else (None, None)


def _apply_activation(logits_NL: Tensor, normalize: bool) -> Tensor:
    if not normalize:
        return logits_NL
    return torch.sigmoid(logits_NL) if logits_NL.shape[1] == 1 else torch.softmax(logits_NL, dim=1)
