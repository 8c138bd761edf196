"""The known causes of a disagreement between trainer and sampler: name, description and remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A cause, with what was measured, and its remedy."""

    name: str
    description: str
    remedy: str


@dataclass(frozen=True)
class KnownCause:
    """A template of a cause; its texts have placeholders for what was measured.

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

NOT_A_NUMBER = KnownCause(
    name="NaN from the trainer",
    description="{count} of {total} log-probabilities of the trainer are NaN",
    remedy="load the model in bfloat16 or float32 if it overflows in float16; if it has NaN there too, its weights are broken",
)
RAW = KnownCause(
    name="the sampler's log-probabilities are before temperature",
    description="the sampler returns log-probabilities before temperature (raw); the trainer's are of logits / {configured:g}",
    remedy="start the server with --logprobs-mode processed_logprobs (LocalChatClient: logprobs_mode='processed'), or set "
    "TrainerConfig.temperature to 1",
)
OTHER_TEMPERATURE = KnownCause(
    name="the sampler's log-probabilities are at temperature {drawn:g}",
    description="the sampler returns log-probabilities at temperature {drawn:g}, the sampling temperature; the trainer uses "
    "{configured:g}",
    remedy="set TrainerConfig.temperature to {drawn:g}",
)
NUCLEUS = KnownCause(
    name="renormalised over top_p {top_p:g}, at temperature {temperature:g}",
    description="the sampler returns log-probabilities renormalised over the tokens within top_p {top_p:g}; the trainer's are over all "
    "tokens",
    remedy="sample with top_p=1, or start the server with --logprobs-mode raw_logprobs (LocalChatClient: logprobs_mode='raw') and set "
    "TrainerConfig.temperature to 1",
)
SHIFTED_LOGPROBS = KnownCause(
    name="log-probabilities of the token {where}",
    description="log-probabilities and ids are shifted by one: each value is that of the token {where}",
    remedy="align them where the client reads the server's answer: one log-probability for each sampled id, in the same order, and an "
    "action mask that begins at the first sampled id",
)
SHIFTED_IDS = KnownCause(
    name="completion ids {by:+d}",
    description="the ids of the completions are the sampler's {by:+d}: ids are shifted by one",
    remedy="use the ids as the server returns them; an added token in the vocabulary of one side also shifts ids",
)
OTHER_PROMPT_FITS = KnownCause(
    name="prompt: {way:.49s}",
    description="the sampler read another prompt than the samples have: its log-probabilities fit this prompt: {way} (another chat "
    "template, or text tokenised again)",
    remedy=SEND_IDS,
)
OTHER_TEMPLATE = KnownCause(
    name="another chat template",
    description="the prompts are rendered by another chat template than the policy's: at character {at} they have {prompt!r}, the "
    "policy's tokenizer makes {expected!r}",
    remedy="give the server the chat template of the policy's tokenizer (--chat-template), or send prompts as token ids",
)
RETOKENISED_PROMPT = KnownCause(
    name="prompt tokenised in another way",
    description="the prompts have the right text but other token ids than the policy's tokenizer makes from it: the text was tokenised "
    "again, or by another tokenizer",
    remedy=SEND_IDS,
)
RETOKENISED_COMPLETION = KnownCause(
    name="completions tokenised again",
    description="the completions are what the tokenizer makes from their text, and agree with the sampler only up to some token: the text "
    "was tokenised again, and the ids are not those that were sampled",
    remedy="train on the ids that the server returns (return_token_ids), never on ids made from its text",
)
OTHER_PROMPTS = KnownCause(
    name="another prompt on the sampler's side",
    description="the sampler agrees with the trainer when it continues token ids, but not on these samples: it read another prompt than "
    "they have (another chat template), or their ids were made from text",
    remedy="send the prompt as token ids, keep the prompt ids that the server echoes, and train on the ids that it returns",
)
OTHER_WEIGHTS = KnownCause(
    name="other weights",
    description="no other cause explains the difference, and the sampler never agrees{where}: it serves stale weights, or another model",
    remedy="publish the trainer's weights before the first batch, reset the server's prefix cache with them, and check that both "
    "load the same model",
)
