"""Finds the cause if trainer and sampler disagree: recomputes the trainer's log-probabilities as
they would be under each possible cause, and compares them with the sampler's. `known_causes` has
the texts of the causes.

The possible causes, in order of precedence: the sampler's log-probabilities are from before
temperature scaling, or at another temperature; they are renormalised over top-p; log-probabilities
or ids are shifted by one; the prompt was rendered in another way; text was tokenised again; and, if
nothing else fits, the weights differ.
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
"""A cause is accepted if it reduces the mean difference to less than this fraction, and if no other
cause reduces it more."""
EQUAL_WITHIN = 0.01
"""Largest difference, in nats, at which two log-probabilities of a token count as equal."""
NUM_PROBES = 8
"""Number of prompts that the sampler is asked to continue."""
PROBES_NAME = "samples drawn from token ids"


async def find_cause(finder: CauseFinder, comparison: Comparison, threshold: float, tried: dict[str, float]) -> Cause | None:
    """Return the cause that explains the difference best; None if the difference is at most
    `threshold` and no cause explains it. Writes the mean difference under each cause to `tried`."""
    if count := sum(int(np.isnan(part).sum()) for part in comparison.trainer_logps):
        return known_causes.NOT_A_NUMBER(count=count, total=comparison.num_tokens)
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
    """Tries one cause after another, with the facts about how the samples were drawn."""

    backend: TrainingBackend
    cfg: TrainerConfig
    sampling: SamplingParams | None
    tokenizer: Any | None
    client: Any | None

    async def try_causes(self, comparison: Comparison, tried: dict[str, float]) -> list[Cause]:
        """Compute the log-probabilities under each cause for which this is possible. Returns these
        causes, and writes the mean difference under each to `tried`."""
        causes = []
        for cause, mean in _try_shifts(comparison):
            causes.append(cause)
            tried[cause.name] = mean
        if ranks.is_distributed():  # ranks may try different causes, and a forward pass on one rank alone would hang
            return causes
        for cause, shaping in self._other_distributions():
            causes.append(cause)
            tried[cause.name] = (await compare(self.backend, self.cfg, comparison.items, **shaping)).mean
        for cause, items in self._rewrite_samples(comparison):
            causes.append(cause)
            tried[cause.name] = (await compare(self.backend, self.cfg, items)).mean
        return causes

    def _other_distributions(self) -> list[tuple[Cause, dict[str, Any]]]:
        """The other distributions that the sampler's log-probabilities may come from, as arguments
        of `compare`, each with its cause."""
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
        """The samples with other tokens that the sampler may have read or drawn, each with its
        cause."""
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
        """The prompts of all samples under each other rendering. Renderings that give the samples'
        own prompts are left out."""
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
                template, arguments = ChatTemplate(tokenizer), item.meta.get("chat_template_kwargs") or {}
                ways["the tokenizer's chat template"] = _encode(tokenizer, template.render(messages, **arguments))
                closed = str(template.apply(messages, prompt=False, tokenize=False, **arguments))
                ways["the chat template without its generation prompt"] = _encode(tokenizer, closed)
        return ways

    def check_prompts(self, comparison: Comparison) -> Cause | None:
        """Return the cause if a first prompt has other tokens than the policy's tokenizer makes
        from its messages; None if all are equal. The size of the difference does not matter."""
        has_clipped_prompts = isinstance(self.client, ClipsPrompts) and self.client.prompts_clipped > 0
        if self.tokenizer is None or has_clipped_prompts:  # a clipped prompt has other messages than the sample
            return None
        for item in comparison.items:
            messages = item.meta.get("chat_prompt_messages")
            if not messages or any(message.get("role") not in ("system", "user") for message in messages):
                continue
            expected = ChatTemplate(self.tokenizer).render(messages, **(item.meta.get("chat_template_kwargs") or {}))
            prompt = _prompt(item)
            if _encode(self.tokenizer, expected) == prompt:
                continue
            text = self.tokenizer.decode(prompt)
            return known_causes.RETOKENISED_PROMPT() if text == expected else _other_template(text, expected)
        return None

    def check_completions(self, comparison: Comparison) -> Cause | None:
        """Return the cause if the completions seem to have been tokenised again from their text:
        their first tokens agree with the sampler, and nearly all completions are exactly what the
        tokenizer makes from their text.

        Sampled tokens are not always what the tokenizer would make from the text. Where they are
        not, the sampler's log-probabilities belong to other tokens.
        """
        if self.tokenizer is None:
            return None
        agreeing = [len(part) > 0 and abs(part[0]) < EQUAL_WITHIN for part in comparison.differences]
        canonical = [self._is_canonical(item) for item in comparison.items]
        if sum(agreeing) >= 0.25 * len(agreeing) and sum(canonical) >= 0.9 * len(canonical):
            return known_causes.RETOKENISED_COMPLETION()
        return None

    def _is_canonical(self, item: SAWItem) -> bool:
        """Whether the completion, without special tokens, is what the tokenizer makes from its
        text."""
        assert self.tokenizer is not None
        special = set(self.tokenizer.all_special_ids)
        ids = [i for i in _completion(item) if i not in special]
        return _encode(self.tokenizer, self.tokenizer.decode(ids)) == ids

    async def probe_sampler(self, comparison: Comparison, tried: dict[str, float], threshold: float) -> Cause:
        """Ask the sampler, if it can, to continue token ids. This needs no template and no text, so
        a remaining difference is one of weights."""
        if not isinstance(self.client, CompletesTokens) or ranks.is_distributed():
            return known_causes.OTHER_WEIGHTS(where="")
        probes = await self._sample_probes(self.client, comparison)
        tried[PROBES_NAME] = (await compare(self.backend, self.cfg, probes)).mean
        return (
            known_causes.OTHER_PROMPTS()
            if tried[PROBES_NAME] < max(EQUAL_WITHIN, threshold)
            else known_causes.OTHER_WEIGHTS(where=", not even when it continues token ids")
        )

    async def _sample_probes(self, client: CompletesTokens, comparison: Comparison) -> list[SAWItem]:
        """Sample new completions of the samples' prompts, from token ids."""
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
    """Return the mean difference if each log-probability belonged to the token after, and if it
    belonged to the token before.

    Example: `all_trainer_logps` [a, b, c] are those of positions 1 to 3, so position 2 has index 1
    (b); shifted by 1 it has index 2 (c), shifted by -1 index 0 (a).
    """
    shifts = []
    for by in (1, -1):
        parts = []
        for logps, positions, sampler_logps in zip(
            comparison.all_trainer_logps, comparison.positions, comparison.sampler_logps, strict=True
        ):
            indices = positions - 1 + by
            inside = (indices >= 0) & (indices < len(logps))
            parts.append(logps[indices[inside]] - sampler_logps[inside])
        if sum(map(len, parts)):
            shifts.append((known_causes.SHIFTED_LOGPROBS(where="after" if by > 0 else "before"), mean_absolute(parts)))
    return shifts


def _prompt(item: SAWItem) -> list[int]:
    """The ids before the first action token."""
    first = int(np.flatnonzero(np.asarray(item.action_mask))[0])
    return [int(i) for i in item.input_ids[:first]]


def _completion(item: SAWItem) -> list[int]:
    return [int(i) for i in np.asarray(item.input_ids)[len(_prompt(item)) :]]


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _with_prompt(item: SAWItem, prompt: list[int]) -> SAWItem:
    """Return the sample with another prompt before its completion."""
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
    """Return the sample with `by` added to the ids of its action tokens, clipped to
    [0, largest]."""
    ids = np.asarray(item.input_ids).copy()
    action = np.asarray(item.action_mask) != 0
    ids[action] = np.clip(ids[action] + by, 0, largest)
    return replace(item, input_ids=[int(i) for i in ids])


def _other_template(text: str, expected: str) -> Cause:
    """Return the cause, which quotes both texts from 10 characters before the first difference to
    30 after it."""
    at = next((i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), min(len(text), len(expected)))
    shown = slice(max(0, at - 10), at + 30)
    return known_causes.OTHER_TEMPLATE(at=at, prompt=text[shown], expected=expected[shown])
