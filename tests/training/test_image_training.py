"""A run in one process: the sampler answers prompts with images, and the trainer learns from the
rewards which picture gets which answer. Only the picture tells, not its size nor the text."""

import asyncio
from itertools import count

import pytest
from image_items import add_pictures, image_item
from tiny_vision import make_tiny_qwen2_vl
from training_samples import ListSource, cpu_config

from ludic.inference import ReturnSpec, SamplingParams
from ludic.inference.local import LocalChatClient
from ludic.inference.request import ChatCompletionRequest
from ludic.training import Trainer, make_grpo, make_sft
from ludic.training.rollouts.to_samples import batch_from_rollouts
from ludic.types import Rollout, Step

GROUP = 8
ANSWERS = "ab"
SETTINGS = {"max_seq_len": 64, "micro_token_budget": 512, "lr": 1e-3}


class SampledAnswers:
    """A group of answers to each picture, rewarded if they are the picture's."""

    def __init__(self, client, pictures, credit):
        self.client, self.pictures, self.credit, self.seeds = client, pictures, credit, count()

    async def play(self, picture, answer, group):
        content = [{"type": "image", "image": f"ludic-image:{picture}"}, {"type": "text", "text": "?"}]
        seed = next(self.seeds)
        request = ChatCompletionRequest(
            "policy",
            [{"role": "user", "content": content}],
            SamplingParams(temperature=1.0, max_tokens=1),
            ReturnSpec.for_rl(),
            seed,
        )
        response, _ = await self.client.complete(request)
        trace = response.to_trace()
        assert [span.digest for span in trace.images] == [picture]
        reward = float(response.text == answer)
        step = Step(0, "?", response.text, None, reward, False, True, trace=trace)
        return Rollout(id=f"r{seed}", steps=[step], meta={"request_meta": {"group_id": group}})

    async def next_batch(self):
        calls = [
            self.play(picture, answer, f"g{next(self.seeds)}/{picture}")
            for picture, answer in zip(self.pictures, ANSWERS, strict=True)
            for _ in range(GROUP)
        ]
        rollouts = await asyncio.gather(*calls)
        for number, rollout in enumerate(rollouts):
            rollout.meta["request_meta"] = {"group_id": number // GROUP}
        return batch_from_rollouts(rollouts, self.credit)


def demonstrations(processor, pictures):
    """Both answers for each picture: what is taught first knows the answers, not which is right."""
    prompt = "user: ", "?\nassistant: "
    return [
        image_item(
            processor, [prompt[0], picture, prompt[1]], processor.tokenizer(answer, add_special_tokens=False)["input_ids"]
        )[0]
        for picture in pictures
        for answer in ANSWERS
    ]


@pytest.mark.parametrize("tower", ["trained", "frozen"])
def test_a_policy_learns_from_rewards_which_picture_gets_which_answer(tower):
    model, processor = make_tiny_qwen2_vl()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(tower == "trained" or "visual" not in name)
    pictures = add_pictures(processor, [(16, 16), (16, 16)])
    taught = ListSource(demonstrations(processor, pictures))
    Trainer(model=model, algo=make_sft(), batch_source=taught, cfg=cpu_config(**SETTINGS)).train_sync(25)
    algo = make_grpo(group_size=GROUP)
    source = SampledAnswers(LocalChatClient(model, processor.tokenizer), pictures, algo.credit_assigner)
    trainer = Trainer(model=model, algo=algo, batch_source=source, cfg=cpu_config(**SETTINGS))
    stats = [trainer.train_step_sync() for _ in range(25)]
    rewards = [each["train/avg_total_reward"] for each in stats]
    assert 0.2 <= rewards[0] <= 0.8
    assert "mismatch/mean" in stats[0]
    assert sum(rewards[-8:]) / 8 >= 0.9
    assert max(each.get("mismatch/mean", 0.0) for each in stats) <= 1e-4
    encoded = sum(each["images/encoded"] for each in stats)
    assert encoded == (sum(each["images/distinct"] for each in stats) if tower == "trained" else 2)
