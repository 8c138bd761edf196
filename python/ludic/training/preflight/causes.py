"""Finds why the trainer and the sampler disagree, by trial: computes what the log-probabilities
would be under each suspected cause. The causes' texts are in `known_causes`.

The suspects, in order of precedence where several fit: the sampler's log-probabilities before
temperature, or at a temperature that the trainer was not told; renormalised over top-p;
log-probabilities or ids off by one; a prompt rendered in another way; text that was tokenised
again; and, if nothing else fits, other weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ludic.inference.client import ClipsPrompts, CompletesTokens
from ludic.inference.prompts.template import ChatTemplate
from ludic.inference.sampling import SamplingParams
from ludic.training import ranks
from ludic.training.backend.protocol import TrainingBackend
from ludic.training.config import TrainerConfig
from ludic.training.preflight import known_causes
from ludic.training.preflight.comparison import Comparison, compare, mean_absolute, read_sampler_logps
from ludic.training.preflight.known_causes import Cause
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWItem
from ludic.types import TokenTrace

MAX_REMAINDER = 0.5
"""A suspect must make the mean difference smaller by this factor, and no other may make it
smaller still."""
EQUAL_WITHIN = 0.01
"""Nats within which one token's log-probabilities are the same."""
NUM_PROBES = 8
"""Prompts that the sampler is asked to continue."""
PROBES_NAME = "samples drawn from token ids"


async def find_cause(finder: CauseFinder, comparison: Comparison, threshold: float, tried: dict[str, float]) -> Cause | None:
    """The suspect that explains the difference best. `tried` gets the mean difference under each.

    None where the difference is below the threshold and no suspect explains it.
    """
    causes = {cause.name: cause for cause in await finder.try_causes(comparison, tried)}
    best = min(causes, key=lambda name: tried[name], default=None)
    if best is not None and tried[best] < MAX_REMAINDER * comparison.mean:
        return causes[best]
    if comparison.mean <= threshold:
        return None
    return (
        finder.check_prompts(comparison)
        or finder.check_completions(comparison)
        or await finder.probe_sampler(comparison, tried, threshold)
    )


@dataclass(frozen=True)
class CauseFinder:
    """Tries one cause after another, with everything that is known of how the samples were made."""

    backend: TrainingBackend
    cfg: TrainerConfig
    sampling: SamplingParams | None
    tokenizer: Any | None
    client: Any | None

    async def try_causes(self, comparison: Comparison, tried: dict[str, float]) -> list[Cause]:
        """The causes under which the log-probabilities can be computed. `tried` gets the mean
        difference of each."""
        causes = []
        for cause, mean in _try_shifts(comparison):
            causes.append(cause)
            tried[cause.name] = mean
        if ranks.is_distributed():  # another rank may have other suspects, and a pass of one alone would hang
            return causes
        for cause, shaping in self._other_distributions():
            causes.append(cause)
            tried[cause.name] = (await compare(self.backend, self.cfg, comparison.items, **shaping)).mean
        for cause, items in self._rewrite_samples(comparison):
            causes.append(cause)
            tried[cause.name] = (await compare(self.backend, self.cfg, items)).mean
        return causes

    def _other_distributions(self) -> list[tuple[Cause, dict[str, Any]]]:
        """Other distributions that the sampler's log-probabilities may be of."""
        configured, sampling = self.cfg.temperature, self.sampling
        shapings: list[tuple[Cause, dict[str, Any]]] = []
        if configured != 1.0:
            shapings.append((known_causes.RAW(configured=configured), {"temperature": 1.0}))
        if sampling is None:
            return shapings
        drawn = sampling.temperature or 1.0
        if drawn not in (configured, 1.0):
            shapings.append((known_causes.OTHER_TEMPERATURE(drawn=drawn, configured=configured), {"temperature": drawn}))
        if sampling.top_p < 1.0:
            cut: dict[str, Any] = {"top_p": sampling.top_p}
            shapings += [
                (known_causes.NUCLEUS(top_p=sampling.top_p, temperature=t), {**cut, "temperature": t})
                for t in dict.fromkeys((drawn, configured))
            ]
        return shapings

    def _rewrite_samples(self, comparison: Comparison) -> list[tuple[Cause, list[SAWItem]]]:
        """Other tokens that the sampler may have read and drawn."""
        largest = max(int(np.max(item.input_ids)) for item in comparison.items)
        rewritten = [
            (known_causes.SHIFTED_IDS(by=by), [_with_shifted_ids(item, -by, largest) for item in comparison.items])
            for by in (1, -1)
        ]
        for name, prompts in self._render_other_prompts(comparison).items():
            rewritten.append(
                (
                    known_causes.OTHER_PROMPT_FITS(way=name),
                    [_with_prompt(i, ids) for i, ids in zip(comparison.items, prompts, strict=True)],
                )
            )
        return [(cause, items) for cause, items in rewritten if self._fits_budget(items)]

    def _fits_budget(self, items: Sequence[SAWItem]) -> bool:
        return max(len(item.input_ids) for item in items) * len(items) <= 2 * self.cfg.micro_token_budget

    def _render_other_prompts(self, comparison: Comparison) -> dict[str, list[list[int]]]:
        """Prompts of all samples, by how they may have been rendered; only where that differs
        from what the samples have."""
        if self.tokenizer is None:
            return {}
        ways: dict[str, list[list[int]]] = {}
        for item in comparison.items:
            for name, ids in self._render_prompt(item).items():
                ways.setdefault(name, []).append(ids)
        own = [_prompt(item) for item in comparison.items]
        return {name: ids for name, ids in ways.items() if len(ids) == len(own) and ids != own and all(ids)}

    def _render_prompt(self, item: SAWItem) -> dict[str, list[int]]:
        tokenizer, prompt = self.tokenizer, _prompt(item)
        assert tokenizer is not None
        ways = {"the prompt's text, tokenised again": _encode(tokenizer, tokenizer.decode(prompt))}
        bos = getattr(tokenizer, "bos_token_id", None)
        if bos is not None:
            ways["a begin token before the prompt"] = [bos, *prompt]
            ways["no begin token before the prompt"] = prompt[1:] if prompt[:1] == [bos] else prompt
        messages = item.meta.get("chat_prompt_messages")
        if messages:
            contents = "".join(message.get("content") or "" for message in messages)
            ways["the messages without any template"] = _encode(tokenizer, contents)
            ways["one line for each message"] = _encode(
                tokenizer, "".join(f"{m['role']}: {m.get('content')}\n" for m in messages)
            )
            if getattr(tokenizer, "chat_template", None):
                ways["the tokenizer's chat template"] = _encode(tokenizer, ChatTemplate(tokenizer).render(messages))
                closed = tokenizer.apply_chat_template(messages, add_generation_prompt=False, tokenize=False)
                ways["the chat template without its generation prompt"] = _encode(tokenizer, closed)
        return ways

    def check_prompts(self, comparison: Comparison) -> Cause | None:
        """The cause where first prompts have other tokens than the policy's tokenizer makes of
        their messages, however small the difference is."""
        clipped = isinstance(self.client, ClipsPrompts) and self.client.prompts_clipped > 0
        if self.tokenizer is None or clipped:  # a clipped prompt has other messages than the sample
            return None
        for item in comparison.items:
            messages = item.meta.get("chat_prompt_messages")
            if not messages or any(message.get("role") not in ("system", "user") for message in messages):
                continue
            expected = ChatTemplate(self.tokenizer).render(messages)
            prompt = _prompt(item)
            if _encode(self.tokenizer, expected) == prompt:
                continue
            text = self.tokenizer.decode(prompt)
            return known_causes.RETOKENISED_PROMPT() if text == expected else _other_template(text, expected)
        return None

    def check_completions(self, comparison: Comparison) -> Cause | None:
        """Completions that agree up to some token and not after it, and are exactly what the
        tokenizer makes of their text.

        Sampled tokens are sometimes others than those; where they are, the sampler's
        log-probabilities belong to other tokens.
        """
        if self.tokenizer is None:
            return None
        agreeing = [len(part) > 0 and abs(part[0]) < EQUAL_WITHIN for part in comparison.differences]
        canonical = [self._is_canonical(item) for item in comparison.items]
        if sum(agreeing) >= 0.25 * len(agreeing) and sum(canonical) >= 0.9 * len(canonical):
            return known_causes.RETOKENISED_COMPLETION()
        return None

    def _is_canonical(self, item: SAWItem) -> bool:
        """Whether the completion is what the tokenizer makes of its text, its end tokens aside."""
        assert self.tokenizer is not None
        special = set(self.tokenizer.all_special_ids)
        ids = [i for i in _completion(item) if i not in special]
        return _encode(self.tokenizer, self.tokenizer.decode(ids)) == ids

    async def probe_sampler(self, comparison: Comparison, tried: dict[str, float], threshold: float) -> Cause:
        """Ask the sampler to continue token ids, if it can. No template and no text is involved,
        so that a difference that stays is one of weights."""
        if not isinstance(self.client, CompletesTokens) or ranks.is_distributed():
            return known_causes.OTHER_WEIGHTS(where="")
        probes = await self._sample_probes(self.client, comparison)
        tried[PROBES_NAME] = (await compare(self.backend, self.cfg, probes)).mean
        return (
            known_causes.OTHER_PROMPTS()
            if tried[PROBES_NAME] < max(EQUAL_WITHIN, threshold)
            else known_causes.OTHER_WEIGHTS(where=", not even where it goes on from ids")
        )

    async def _sample_probes(self, client: CompletesTokens, comparison: Comparison) -> list[SAWItem]:
        """New completions of the samples' prompts."""
        sampling = self.sampling or SamplingParams(temperature=self.cfg.temperature)
        sampling = replace(
            sampling, max_tokens=min(sampling.max_tokens, max(len(_completion(item)) for item in comparison.items))
        )
        prompts = [_prompt(item) for item in comparison.items][:NUM_PROBES]
        probes = (client.complete_tokens(ids, sampling=sampling, seed=i) for i, ids in enumerate(prompts) if ids)
        traces = await asyncio.gather(*probes)
        return [_item_from_trace(trace) for trace in traces]


def _item_from_trace(trace: TokenTrace) -> SAWItem:
    prompt, completion = trace.prompt_token_ids, trace.completion_token_ids
    length = len(prompt) + len(completion)
    logps = ActorTokenLogps(list(trace.completion_logprobs or []))
    mask = [0] * len(prompt) + [1] * len(completion)
    return SAWItem(prompt + completion, [1] * length, mask, 0.0, {}, SampleAttachments(logps))


def _try_shifts(comparison: Comparison) -> list[tuple[Cause, float]]:
    """Mean differences if each log-probability belonged to the token before or after.

    Example: `rows` [a, b, c] are for ids 1 to 3, so that the id at place 2 has row 1 (b); shifted
    by 1 it has row 2 (c), by -1 row 0 (a).
    """
    shifts = []
    for by in (1, -1):
        parts = []
        for row, places, sampler in zip(comparison.rows, comparison.places, comparison.sampler, strict=True):
            moved = places - 1 + by
            inside = (moved >= 0) & (moved < len(row))
            parts.append(row[moved[inside]] - sampler[inside])
        if sum(map(len, parts)):
            shifts.append((known_causes.SHIFTED_LOGPROBS(where="after" if by > 0 else "before"), mean_absolute(parts)))
    return shifts


def _prompt(item: SAWItem) -> list[int]:
    """Ids before the first action."""
    first = int(np.flatnonzero(np.asarray(item.action_mask))[0])
    return [int(i) for i in item.input_ids[:first]]


def _completion(item: SAWItem) -> list[int]:
    return [int(i) for i in np.asarray(item.input_ids)[len(_prompt(item)) :]]


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _with_prompt(item: SAWItem, prompt: list[int]) -> SAWItem:
    """The sample behind another prompt."""
    completion = _completion(item)
    old = len(_prompt(item))
    mask = [int(value) for value in np.asarray(item.action_mask)[old:]]
    return replace(
        item,
        input_ids=prompt + completion,
        attention_mask=[1] * (len(prompt) + len(completion)),
        action_mask=[0] * len(prompt) + mask,
        attachments=SampleAttachments(ActorTokenLogps([float(value) for value in read_sampler_logps(item)])),
    )


def _with_shifted_ids(item: SAWItem, by: int, largest: int) -> SAWItem:
    """The sample with `by` added to the ids of its action tokens, within [0, largest]."""
    ids = np.asarray(item.input_ids).copy()
    action = np.asarray(item.action_mask) != 0
    ids[action] = np.clip(ids[action] + by, 0, largest)
    return replace(item, input_ids=[int(i) for i in ids])


def _other_template(text: str, expected: str) -> Cause:
    """The cause, with 10 characters before and 30 after the first that differs."""
    at = next((i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), min(len(text), len(expected)))
    shown = slice(max(0, at - 10), at + 30)
    return known_causes.OTHER_TEMPLATE(at=at, prompt=text[shown], expected=expected[shown])
