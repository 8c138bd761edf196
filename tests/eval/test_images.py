"""An evaluation of a model that sees images, in this process."""

import asyncio

from playing import protocol
from tiny_vision import make_picture, make_tiny_vision

from ludic.envs import PromptEnv
from ludic.eval import ProblemEvaluator
from ludic.images.content import find_message_digests, image_part
from ludic.images.store import use_store
from ludic.inference import InferenceSpec, LocalChatClient, ReturnSpec, SamplingParams
from ludic.training import EnvSpec, ProtocolSpec, RolloutEngine, RolloutRequest


def test_prompts_with_images_are_answered_and_measured():
    model, processor = make_tiny_vision("qwen2_vl")
    client = LocalChatClient(model, processor.tokenizer)
    digests = [processor.store.add(make_picture(32, 32, seed=seed)) for seed in range(3)]
    prompts = [[{"role": "user", "content": [image_part(digest), {"type": "text", "text": "What is it?"}]}] for digest in digests]
    engine = RolloutEngine(env_registry={"prompt": PromptEnv}, protocol_registry={"chat": lambda: protocol(client)})
    spec = InferenceSpec(SamplingParams(temperature=1.0, max_tokens=4), ReturnSpec.for_rl())
    requests = [
        RolloutRequest(EnvSpec("prompt", {"sample": {"prompt": prompt}}), ProtocolSpec("chat"), inference=spec)
        for prompt in prompts
    ]
    evaluator = ProblemEvaluator(engine, lambda: requests, k=2, solved_at=0.0)
    with use_store(processor.store):
        rollouts, measurement = asyncio.run(evaluator.play())
    assert [len(problem.rewards) for problem in measurement.problems] == [2, 2, 2]
    traces = [step.trace for rollout in rollouts for step in rollout.steps]
    assert [[span.digest for span in trace.images] for trace in traces] == [
        find_message_digests(prompts[i // 2]) for i in range(6)
    ]
    assert len({tuple(trace.prompt_token_ids) for trace in traces}) == 1  # the images are of equal size
    assert len({tuple(trace.completion_token_ids) for trace in traces}) == 6
