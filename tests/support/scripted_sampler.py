"""An engine that says what a script says, letter by letter: its ids are not the tokenizer's."""

import asyncio

from chat_tokenizers import spell

from ludic.inference.client import Sampled
from ludic.types import TokenTrace


class ScriptedSampler:
    """`script(prompt, number)` returns the text of call `number`, or raises. A text longer than the
    limit is cut off."""

    def __init__(self, tokenizer, script, *, delay=0.0, version=3):
        self.tokenizer, self.script, self.delay, self.version = tokenizer, script, delay, version
        self.asked = []
        """(prompt ids, sampling, seed) of each call."""

    async def complete_tokens(self, prompt_token_ids, *, sampling=None, seed=None):
        return (await self.sample_tokens(prompt_token_ids, sampling=sampling, seed=seed)).trace

    async def sample_tokens(self, prompt_token_ids, *, sampling=None, seed=None):
        number = len(self.asked)
        self.asked.append((list(prompt_token_ids), sampling, seed))
        if self.delay:
            await asyncio.sleep(self.delay)
        text = self.script(self.tokenizer.decode(prompt_token_ids), number)
        for stop in sampling.stop_texts:
            if stop in text:
                text = text[: text.index(stop) + len(stop)]
                ids, ended, reason = spell(self.tokenizer, text), False, "stop"
                break
        else:
            ids, ended, reason = [*spell(self.tokenizer, text), self.tokenizer.eos_token_id], True, "stop"
        if len(ids) > sampling.max_tokens:
            ids, ended, reason = ids[: sampling.max_tokens], False, "length"
        return Sampled(TokenTrace.from_arrays(prompt_token_ids, ids, [-0.5] * len(ids), reason), ended, self.version)
