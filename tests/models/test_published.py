"""Weights of the in-process engine: what is shared, what is copied, and what is refused."""

import asyncio

import pytest
import torch
from playing import play, tiny_model, tokenizer

from ludic.distributed import LocalPublisher
from ludic.errors import ConfigError
from ludic.inference import ChatCompletionRequest, LocalChatClient, ReturnSpec, SamplingParams
from ludic.models.published import published_weights


def request(text="abc", seed=0, **sampling):
    settings = {"temperature": 1.0, "max_tokens": 8, **sampling}
    return ChatCompletionRequest(
        "tiny", [{"role": "user", "content": text}], SamplingParams(**settings), ReturnSpec.for_rl(), seed
    )


async def answers(client, requests):
    return [response for response, _ in await asyncio.gather(*[client.complete(r) for r in requests])]


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 6, 7]])).logits


def test_changes_of_a_shared_model_are_immediate_and_a_copy_needs_a_publish():
    model = tiny_model(0)
    shared, own = LocalChatClient(model, tokenizer()), LocalChatClient(model, tokenizer(), copy_model=True)
    asked = [request(seed=s, temperature=0.0) for s in range(1)]
    before = play(answers(own, asked))[0].completion_token_ids
    other = tiny_model(1)
    model.load_state_dict(other.state_dict())
    expected = play(answers(LocalChatClient(other, tokenizer()), asked))[0].completion_token_ids
    assert expected != before
    assert play(answers(shared, asked))[0].completion_token_ids == expected
    assert play(answers(own, asked))[0].completion_token_ids == before
    LocalPublisher(own).publish(dict(model.named_parameters()), version=7)
    assert play(answers(own, asked))[0].completion_token_ids == expected
    assert play(own.get_policy_version()) == 7


def test_an_answer_has_the_version_that_it_was_sampled_from():
    async def scenario():
        client = LocalChatClient(tiny_model(), tokenizer())
        _, first = await client.complete(request())
        client.sync_weights({}, version=3)
        _, second = await client.complete(request())
        return first["policy_version"], second["policy_version"]

    assert play(scenario()) == (0, 3)


def test_weights_of_a_wrong_shape_or_name_change_nothing():
    model = tiny_model()
    client = LocalChatClient(model, tokenizer())
    before = {name: p.clone() for name, p in model.named_parameters()}
    name = next(iter(before))
    with pytest.raises(ConfigError, match="no weight 'nonsense'"):
        client.sync_weights({name: torch.zeros_like(before[name]), "nonsense": torch.zeros(1)})
    with pytest.raises(ConfigError, match="shape"):
        client.sync_weights({name: torch.zeros(3)})
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert play(client.get_policy_version()) == 0


def test_an_invalid_version_is_refused_before_anything_changes():
    model = tiny_model()
    client = LocalChatClient(model, tokenizer(), copy_model=True)
    before = logits(client.model)
    with pytest.raises(ConfigError, match="must be a number"):
        client.sync_weights(dict(tiny_model(1).named_parameters()), version="newest")
    assert torch.equal(logits(client.model), before)
    assert client.sync_weights({}, version="12") == "12"
    assert client.sync_weights({}) == "13"


def test_a_copy_can_have_its_own_dtype_and_has_no_gradients():
    model = tiny_model()
    model(input_ids=torch.tensor([[5, 6]]), labels=torch.tensor([[5, 6]])).loss.backward()
    client = LocalChatClient(model, tokenizer(), copy_model=True, device="cpu", dtype=torch.bfloat16)
    assert {(p.dtype, p.requires_grad, p.grad) for p in client.model.parameters()} == {(torch.bfloat16, False, None)}
    assert all(p.dtype == torch.float32 and p.grad is not None for p in model.parameters())
    LocalPublisher(client).publish(dict(tiny_model(1).named_parameters()))
    torch.testing.assert_close(logits(client.model), logits(tiny_model(1).to(torch.bfloat16)))


def test_a_tied_weight_can_be_published_under_either_name():
    client = LocalChatClient(tiny_model(tie_word_embeddings=True), tokenizer(), copy_model=True)
    new = torch.ones_like(client.model.lm_head.weight)
    client.sync_weights({"lm_head.weight": new})
    assert torch.equal(client.model.get_input_embeddings().weight, new)


def adapted_model():
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(tiny_model(), config).eval()


def trained(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3)
    return model


def test_publishing_to_the_trainers_own_model_with_adapters_changes_nothing():
    model = adapted_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    LocalPublisher(LocalChatClient(model, tokenizer())).publish(published_weights(model), version=1)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("plain", [False, True])
def test_copies_with_and_without_adapters_accept_what_a_lora_model_publishes(plain):
    model = adapted_model()
    client = LocalChatClient(tiny_model() if plain else model, tokenizer(), copy_model=True)
    trained(model)
    assert not torch.allclose(logits(client.model), logits(model), atol=1e-2)
    LocalPublisher(client).publish(published_weights(model), version=1)
    torch.testing.assert_close(logits(client.model), logits(model), atol=1e-4, rtol=1e-4)


def test_a_model_without_adapters_refuses_adapter_weights():
    weights = {name: p for name, p in adapted_model().named_parameters() if "lora_" in name}
    with pytest.raises(ConfigError, match="no weight"):
        LocalChatClient(tiny_model(), tokenizer()).sync_weights(weights)


def test_a_separate_lora_model_refuses_merged_weights():
    client = LocalChatClient(adapted_model(), tokenizer())
    with pytest.raises(ConfigError, match="copy_model=True"):
        client.sync_weights(published_weights(trained(adapted_model())))
    assert play(client.get_policy_version()) == 0


def test_a_copy_of_a_lora_model_is_plain_and_the_original_keeps_its_adapters():
    model = trained(adapted_model())
    before = {name: p.clone() for name, p in model.named_parameters()}
    client = LocalChatClient(model, tokenizer(), copy_model=True)
    assert {name for name, _ in client.model.named_parameters()} == {name for name, _ in tiny_model().named_parameters()}
    torch.testing.assert_close(logits(client.model), logits(model), atol=1e-4, rtol=1e-4)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_log_probabilities_of_a_lora_model_equal_the_trainers():
    model = trained(adapted_model())
    for answer in play(answers(LocalChatClient(model, tokenizer()), [request("ab", 1), request("c", 2)])):
        ids = answer.prompt_token_ids + answer.completion_token_ids
        with torch.no_grad():
            logp = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].float(), dim=-1)
        first = len(answer.prompt_token_ids) - 1
        expected = [logp[first + i, token].item() for i, token in enumerate(answer.completion_token_ids)]
        assert answer.completion_logprobs == pytest.approx(expected, abs=1e-4)
