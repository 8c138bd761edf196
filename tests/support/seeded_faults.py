"""Chat clients with injected trainer-sampler mismatches, and rollouts sampled through them."""

from dataclasses import replace

from chat_tokenizers import CHATML, chat_tokenizer
from training_samples import TOKENIZER, tiny_model

from ludic.inference import InferenceSpec, LocalChatClient, ReturnSpec, SamplingParams
from ludic.runs.rollouts import make_engine, make_request
from ludic.tasks import DigitSort
from ludic.training.credit_assignment import MonteCarloReturn

PROBLEMS = 12


class Faulty:
    """A client that passes its requests through `ask` and its responses through `change(request,
    response)`."""

    def __init__(self, inner, *, change=None, ask=None, from_ids=True):
        self.inner, self.change, self.ask = inner, change, ask
        if from_ids:
            self.complete_tokens = inner.complete_tokens

    async def complete(self, request):
        sent_request = request if self.ask is None else self.ask(request)
        response, info = await self.inner.complete(sent_request)
        return (response if self.change is None else self.change(request, response)), info


def sampling(**changes):
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 12, **changes})


async def sample_items(client, params, *, task=None, concurrency=64):
    """The samples of a batch of real episodes."""
    task = task or DigitSort(digits=4)
    engine = make_engine(task, client, model_name="tiny", system_prompt=None, max_retries=0)
    inference = InferenceSpec(sampling=params, return_=ReturnSpec.for_rl())
    from random import Random

    draw = Random(5)
    requests = [make_request(task.draw(draw), inference=inference, seed=seed) for seed in range(PROBLEMS)]
    batch = await engine.generate_batch(requests, credit_assigner=MonteCarloReturn(), concurrency=concurrency)
    return batch.items


def shift_logprobs(request, response):
    """Each log-probability is that of the next token; the last one is repeated."""
    logps = response.completion_logprobs
    return replace(response, completion_logprobs=[*logps[1:], logps[-1]])


def shift_ids(request, response):
    return replace(response, completion_token_ids=[i + 1 for i in response.completion_token_ids])


def render_prompt_locally(tokenizer):
    """Reports prompt ids that the client renders itself, whatever the server used."""
    from ludic.inference.prompts.template import ChatTemplate

    def change(request, response):
        text = ChatTemplate(tokenizer).render(request.messages)
        return replace(response, prompt_token_ids=tokenizer(text, add_special_tokens=False)["input_ids"])

    return change


def retokenise_text(tokenizer):
    """Re-tokenises the text and drops the log-probabilities that are left over."""

    def change(request, response):
        ids = tokenizer(response.text, add_special_tokens=False)["input_ids"]
        stopped = response.completion_token_ids[-1:] == [tokenizer.eos_token_id]
        ids = [*ids, tokenizer.eos_token_id] if stopped else ids
        logps = response.completion_logprobs
        if len(ids) > len(logps):
            ids = ids[: len(logps)]
        return replace(response, completion_token_ids=ids, completion_logprobs=logps[: len(ids)])

    return change


def byte_policy(seed=0, **changes):
    return tiny_model(seed, **changes), TOKENIZER


def chat_policy(seed=0, template=CHATML):
    tokenizer = chat_tokenizer(template)
    return tiny_model(seed, vocab_size=len(tokenizer) + 5), tokenizer


def client_of(model, tokenizer, **options):
    return LocalChatClient(model, tokenizer, **options)
