"""Finds the cause if trainer and sampler disagree: recomputes the trainer's log-probabilities as
they would be under each possible cause, and compares them with the sampler's.

The possible causes, in order of precedence: the sampler's log-probabilities are from before
temperature scaling, or at another temperature; they are renormalised over top-p; log-probabilities
or ids are shifted by one; the prompt was rendered in another way; text was tokenised again; and, if
nothing else fits, the weights differ.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ludic.inference.client import CompletesTokens
from ludic.inference.prompts.template import ChatTemplate, begin_prompt
from ludic.inference.request import SamplingParams
from ludic.training import ranks
from ludic.training.backend.protocol import TrainingBackend
from ludic.training.config import TrainerConfig
from ludic.training.preflight.comparison import Comparison, compare, mean_absolute, read_sampler_logps
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWItem

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
        return NOT_A_NUMBER(count=count, total=comparison.num_tokens)
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
            shapings.append((RAW(configured=configured), {"temperature": 1.0}))
        if sampling is None:
            return shapings
        drawn = sampling.temperature or 1.0
        if drawn not in (configured, 1.0):
            shapings.append((OTHER_TEMPERATURE(drawn=drawn, configured=configured), {"temperature": drawn}))
        if sampling.top_p < 1.0:
            cut: dict[str, Any] = {"top_p": sampling.top_p}
            shapings += [
                (NUCLEUS(top_p=sampling.top_p, temperature=t), {**cut, "temperature": t})
                for t in dict.fromkeys((drawn, configured))
            ]
        return shapings

    def _rewrite_samples(self, comparison: Comparison) -> list[tuple[Cause, list[SAWItem]]]:
        """The samples with other tokens that the sampler may have read or drawn, each with its
        cause."""
        largest = max(int(np.max(item.input_ids)) for item in comparison.items)
        rewritten = [(SHIFTED_IDS(by=by), [_with_shifted_ids(item, -by, largest) for item in comparison.items]) for by in (1, -1)]
        for name, prompts in self._render_other_prompts(comparison).items():
            items = [_with_prompt(item, ids) for item, ids in zip(comparison.items, prompts, strict=True)]
            rewritten.append((OTHER_PROMPT_FITS(way=name), items))
        room = 2 * self.cfg.micro_token_budget
        return [(cause, items) for cause, items in rewritten if max(len(i.input_ids) for i in items) * len(items) <= room]

    def _render_other_prompts(self, comparison: Comparison) -> dict[str, list[list[int]]]:
        """The prompts of all samples under each other rendering. Renderings that give the samples'
        own prompts are left out."""
        if self.tokenizer is None or any(item.images for item in comparison.items):
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
        has_clipped_prompts = getattr(self.client, "prompts_clipped", 0) > 0
        if self.tokenizer is None or has_clipped_prompts:  # a clipped prompt has other messages than the sample
            return None
        for item in comparison.items:
            messages = item.meta.get("chat_prompt_messages")
            others = any(message.get("role") not in ("system", "user") for message in messages or ())
            if not messages or others or item.images:  # placeholders are not of the tokenizer
                continue
            expected = ChatTemplate(self.tokenizer).render(messages, **(item.meta.get("chat_template_kwargs") or {}))
            prompt = _prompt(item)
            ids = begin_prompt(self.tokenizer, _encode(self.tokenizer, expected))
            if ids == prompt:
                continue
            text, expected = self.tokenizer.decode(prompt), self.tokenizer.decode(ids)
            if text == expected:
                return RETOKENISED_PROMPT()
            at = next((i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), min(len(text), len(expected)))
            shown = slice(max(0, at - 10), at + 30)
            return OTHER_TEMPLATE(at=at, prompt=text[shown], expected=expected[shown])
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
            return RETOKENISED_COMPLETION()
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
            return OTHER_WEIGHTS(where="")
        probes = await self._sample_probes(self.client, comparison)
        tried[PROBES_NAME] = (await compare(self.backend, self.cfg, probes)).mean
        return (
            OTHER_PROMPTS()
            if tried[PROBES_NAME] < max(EQUAL_WITHIN, threshold)
            else OTHER_WEIGHTS(where=", not even when it continues token ids")
        )

    async def _sample_probes(self, client: CompletesTokens, comparison: Comparison) -> list[SAWItem]:
        sampling = self.sampling or SamplingParams(temperature=self.cfg.temperature)
        sampling = replace(
            sampling, max_tokens=min(sampling.max_tokens, max(len(_completion(item)) for item in comparison.items))
        )
        prompts = [(_prompt(item), {"images": item.images} if item.images else {}) for item in comparison.items][:NUM_PROBES]
        probes = (
            client.complete_tokens(ids, sampling=sampling, seed=i, **shown) for i, (ids, shown) in enumerate(prompts) if ids
        )
        traces = await asyncio.gather(*probes)
        items = []
        for trace in traces:
            prompt, completion = trace.prompt_token_ids, trace.completion_token_ids
            mask = [0] * len(prompt) + [1] * len(completion)
            logps = ActorTokenLogps(list(trace.completion_logprobs or []))
            attached = SampleAttachments(logps, candidates=trace.candidates, routes=trace.routes)
            items.append(SAWItem(prompt + completion, [1] * len(mask), mask, 0.0, {}, attached, trace.images))
        return items


def _try_shifts(comparison: Comparison) -> list[tuple[Cause, float]]:
    """Return the mean difference if each log-probability belonged to the token after, and if it
    belonged to the token before.

    Example: `all_trainer_logps` [a, b, c] belong to positions 1 to 3, so position 2 has index 1
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
            shifts.append((SHIFTED_LOGPROBS(where="after" if by > 0 else "before"), mean_absolute(parts)))
    return shifts


def _prompt(item: SAWItem) -> list[int]:
    first = int(np.flatnonzero(np.asarray(item.action_mask))[0])
    return [int(i) for i in item.input_ids[:first]]


def _completion(item: SAWItem) -> list[int]:
    return [int(i) for i in np.asarray(item.input_ids)[len(_prompt(item)) :]]


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _with_prompt(item: SAWItem, prompt: list[int]) -> SAWItem:
    completion = _completion(item)
    old = len(_prompt(item))
    mask = [int(value) for value in np.asarray(item.action_mask)[old:]]
    return replace(
        item,
        input_ids=prompt + completion,
        attention_mask=[1] * (len(prompt) + len(completion)),
        action_mask=[0] * len(prompt) + mask,
        attachments=SampleAttachments(
            ActorTokenLogps([float(value) for value in read_sampler_logps(item)]), candidates=item.attachments.candidates
        ),
    )


def _with_shifted_ids(item: SAWItem, by: int, largest: int) -> SAWItem:
    """Return the sample with `by` added to the ids of its action tokens, clipped to
    [0, largest]."""
    ids = np.asarray(item.input_ids).copy()
    action = np.asarray(item.action_mask) != 0
    ids[action] = np.clip(ids[action] + by, 0, largest)
    return replace(item, input_ids=[int(i) for i in ids])


@dataclass(frozen=True)
class Cause:
    """A cause, with what was measured, and its remedy; or a template of one, whose texts have
    placeholders for what is measured.

    >>> RAW(configured=0.7).description
    "the sampler returns log-probabilities before temperature (raw); the trainer's are of logits /
    0.7"
    """

    name: str
    description: str
    remedy: str

    def __call__(self, **facts: object) -> Cause:
        return Cause(self.name.format(**facts), self.description.format(**facts), self.remedy.format(**facts))


SEND_IDS = (
    "send the prompt as token ids, rendered once by the policy's own tokenizer, and keep the prompt ids that the server echoes"
)

NOT_A_NUMBER = Cause(
    name="NaN from the trainer",
    description="{count} of {total} log-probabilities of the trainer are NaN",
    remedy="load the model in bfloat16 or float32 if it overflows in float16; if it has NaN there too, its weights are broken",
)
RAW = Cause(
    name="the sampler's log-probabilities are before temperature",
    description="the sampler returns log-probabilities before temperature (raw); the trainer's are of logits / {configured:g}",
    remedy="start the server with --logprobs-mode processed_logprobs (LocalChatClient: logprobs_mode='processed'), or set "
    "TrainerConfig.temperature to 1",
)
OTHER_TEMPERATURE = Cause(
    name="the sampler's log-probabilities are at temperature {drawn:g}",
    description="the sampler returns log-probabilities at temperature {drawn:g}, the sampling temperature; the trainer uses "
    "{configured:g}",
    remedy="set TrainerConfig.temperature to {drawn:g}",
)
NUCLEUS = Cause(
    name="renormalised over top_p {top_p:g}, at temperature {temperature:g}",
    description="the sampler returns log-probabilities renormalised over the tokens within top_p {top_p:g}; the trainer's are over all "
    "tokens",
    remedy="sample with top_p=1, or start the server with --logprobs-mode raw_logprobs (LocalChatClient: logprobs_mode='raw') and set "
    "TrainerConfig.temperature to 1",
)
SHIFTED_LOGPROBS = Cause(
    name="log-probabilities of the token {where}",
    description="log-probabilities and ids are shifted by one: each value belongs to the token {where}",
    remedy="align them where the client reads the server's answer: one log-probability for each sampled id, in the same order, and an "
    "action mask that begins at the first sampled id",
)
SHIFTED_IDS = Cause(
    name="completion ids {by:+d}",
    description="the ids of the completions are the sampler's {by:+d}: ids are shifted by one",
    remedy="use the ids as the server returns them; an added token in the vocabulary of one side also shifts ids",
)
OTHER_PROMPT_FITS = Cause(
    name="prompt: {way:.49s}",
    description="the sampler read another prompt than the samples have: its log-probabilities fit this prompt: {way} (another chat "
    "template, or text tokenised again)",
    remedy=SEND_IDS,
)
OTHER_TEMPLATE = Cause(
    name="another chat template",
    description="the prompts are rendered by another chat template than the policy's: at character {at} they have {prompt!r}, the "
    "policy's tokenizer makes {expected!r}",
    remedy="give the server the chat template of the policy's tokenizer (--chat-template), or send prompts as token ids",
)
RETOKENISED_PROMPT = Cause(
    name="prompt tokenised in another way",
    description="the prompts have the right text but other token ids than the policy's tokenizer makes from it: the text was tokenised "
    "again, or by another tokenizer",
    remedy=SEND_IDS,
)
RETOKENISED_COMPLETION = Cause(
    name="completions tokenised again",
    description="the completions are what the tokenizer makes from their text, and agree with the sampler only up to some token: the text "
    "was tokenised again, and the ids are not those that were sampled",
    remedy="train on the ids that the server returns (return_token_ids), never on ids made from its text",
)
OTHER_PROMPTS = Cause(
    name="another prompt on the sampler's side",
    description="the sampler agrees with the trainer when it continues token ids, but not on these samples: it read another prompt than "
    "they have (another chat template), or their ids were made from text",
    remedy="send the prompt as token ids, keep the prompt ids that the server echoes, and train on the ids that it returns",
)
OTHER_WEIGHTS = Cause(
    name="other weights",
    description="no other cause explains the difference, and the sampler never agrees{where}: it serves stale weights, or another model",
    remedy="publish the trainer's weights before the first batch, reset the server's prefix cache with them, and check that both "
    "load the same model",
)
