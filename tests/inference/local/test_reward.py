"""Scores of the in-process engine equal those of transformers for single sequences."""

import asyncio
import logging
import math
import threading

import pytest
import torch
from chat_families import gemma_that_begins_texts
from hypothesis import given, settings, strategies as st
from image_samples import make_sample, seven_samples
from playing import tokenizer
from reward_models import EOS, PAD, reward_model, score_alone
from tiny_vision import make_picture, make_tiny_vision

from ludic.errors import ConfigError, DataError
from ludic.inference import LocalRewardModel, PoolingType, ScoringRequest
from ludic.inference.reward_types import ImageTokens
from ludic.models.byte_tokenizer import make_line_tokenizer

IDS = st.lists(st.integers(0, 271), min_size=1, max_size=60)


def scores(client, inputs, **options):
    return asyncio.run(client.score_batch(inputs, normalize=False, **options))


@settings(deadline=None, max_examples=25)
@given(st.lists(IDS, min_size=1, max_size=12), st.integers(1, 400))
def test_the_score_of_a_sequence_does_not_depend_on_its_batch(sequences, budget):
    """Padding ids inside or at the end of a sequence are ordinary tokens."""
    model = reward_model()
    got = scores(LocalRewardModel(model, micro_token_budget=budget), sequences)
    assert got == pytest.approx([score_alone(model, ids) for ids in sequences], abs=1e-5)


def test_scores_equal_transformers_when_no_sequence_ends_with_padding():
    model = reward_model()
    sequences = [[53, 46, 53, 64, 55, EOS], [100, 101], [5]]
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits.item() for ids in sequences]
    assert scores(LocalRewardModel(model), sequences) == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 3) for score in expected}) == 3


def test_a_sequence_that_ends_with_the_padding_id_is_scored_at_its_end():
    model = reward_model(pad=EOS)
    with torch.no_grad():
        transformers_takes = model(torch.tensor([[53, 46, EOS]])).logits.item()
    got = scores(LocalRewardModel(model), [[53, 46, EOS], [53, 46]])
    assert got[1] == pytest.approx(transformers_takes, abs=1e-5)
    assert abs(got[0] - got[1]) > 1e-2


def test_an_end_token_equal_to_the_padding_token_causes_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        LocalRewardModel(reward_model(pad=PAD), tokenizer())
        assert not caplog.records
        LocalRewardModel(reward_model(pad=EOS), tokenizer())
    assert "end token" in caplog.text


def test_text_has_the_score_of_its_token_ids():
    client = LocalRewardModel(reward_model(), tokenizer())
    text, ids, other = scores(client, ["2+2=4", list(tokenizer()("2+2=4")["input_ids"]), "2+2=5"])
    assert text == pytest.approx(ids, abs=1e-5)  # rows of a batch may differ in the last bits
    assert abs(text - other) > 1e-3


def test_text_begins_as_pairs_of_text_were_trained():
    """As with Gemma, whose texts begin with `<bos>`."""
    beginning = gemma_that_begins_texts()
    client = LocalRewardModel(reward_model(), beginning)
    plain, written = client._token_ids(["It is 4.", "<bos>It is 4."])
    assert plain == beginning("It is 4.")["input_ids"]
    assert plain.count(beginning.bos_token_id) == written.count(beginning.bos_token_id) == 1


def test_a_normalised_score_is_the_logistic_function_of_the_score():
    client = LocalRewardModel(reward_model())
    raw = scores(client, [[5, 6], [7, 8, 9]])
    assert asyncio.run(client.score_batch([[5, 6], [7, 8, 9]])) == pytest.approx([1 / (1 + math.exp(-x)) for x in raw])


def test_mean_and_first_token_pooling_can_be_requested():
    model, ids = reward_model(), [53, 46, 53]
    client = LocalRewardModel(model)
    with torch.no_grad():
        by_token = model.score(model.model(torch.tensor([ids])).last_hidden_state)[0, :, 0]
    other = [7] * 9  # longer, so that the first sequence is padded
    assert scores(client, [ids, other], pooling_type=PoolingType.MEAN)[0] == pytest.approx(by_token.mean().item(), abs=1e-5)
    assert scores(client, [ids, other], pooling_type=PoolingType.CLS)[0] == pytest.approx(by_token[0].item(), abs=1e-5)
    with pytest.raises(ConfigError, match="reserved"):
        scores(client, [ids], pooling_type=PoolingType.STEP)


def test_an_encoder_uses_its_own_pooling():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": 1}
    model = BertForSequenceClassification(BertConfig(vocab_size=300, initializer_range=0.3, **sizes)).eval()
    client = LocalRewardModel(model)
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits.item() for ids in ([1, 2, 3], [4, 5, 6, 7, 8])]
    assert scores(client, [[1, 2, 3], [4, 5, 6, 7, 8]]) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ConfigError, match="cls"):
        scores(client, [[1]], pooling_type=PoolingType.LAST)


def test_a_model_with_several_labels_is_scored_but_gives_no_reward():
    client = LocalRewardModel(reward_model(labels=3))
    response, info = client.score_sync(ScoringRequest.from_list("rm", [[5, 6]], n_labels=3))
    assert math.fsum(response.scores[0]) == pytest.approx(1.0)
    assert (response.usage["prompt_tokens"], info["reward_model_version"]) == (2, 0)
    with pytest.raises(ConfigError, match="3 labels"):
        scores(client, [[5, 6]])
    with pytest.raises(ConfigError, match="n_labels=1"):
        asyncio.run(client.score(ScoringRequest.from_list("rm", [[5, 6]])))


@pytest.mark.parametrize(
    ("ids", "message"),
    [([], "no token"), ([272], "272, .* 0..271"), ([-1], "-1, .* 0..271"), ([5] * 129, "129 tokens, the context 128")],
)
def test_invalid_inputs_are_refused_and_named(ids, message):
    with pytest.raises(DataError, match=f"sequence 1 for rm has .*{message}"):
        scores(LocalRewardModel(reward_model(), name="rm"), [[5], ids])


def test_text_without_a_tokenizer_is_refused():
    with pytest.raises(ConfigError, match="no tokenizer"):
        scores(LocalRewardModel(reward_model()), ["a"])


def test_no_inputs_give_no_scores():
    assert scores(LocalRewardModel(reward_model()), []) == []


def test_scoring_does_not_change_the_model():
    model = reward_model(seed=3)
    model.train()
    model.model.layers[0].eval()
    scores(LocalRewardModel(model), [[5, 6]])
    assert model.training
    assert not model.model.layers[0].training
    assert all(p.grad is None for p in model.parameters())


def test_ids_are_exchanged_between_tokenizers_with_equal_vocabularies():
    client = LocalRewardModel(reward_model(), tokenizer())
    assert client.reads_ids_of(tokenizer())
    assert client.reads_ids_of(make_line_tokenizer())
    more = make_line_tokenizer()
    more.add_tokens(["<new>"])
    assert not client.reads_ids_of(more)
    assert LocalRewardModel(reward_model(), more).reads_ids_of(tokenizer())
    assert not LocalRewardModel(reward_model()).reads_ids_of(tokenizer())


def test_published_weights_are_used_even_if_only_the_head_is_published():
    client = LocalRewardModel(reward_model(seed=4))
    before = scores(client, [[5, 6]])[0]
    negated = {name: -p.detach() for name, p in client.model.named_parameters()}
    assert client.sync_reward_weights(negated, training_mode="head_only", version=7) == "7"
    assert scores(client, [[5, 6]])[0] == pytest.approx(-before)
    assert asyncio.run(client.get_reward_model_version()) == 7


def test_publishing_waits_for_the_batch_that_is_being_scored():
    client = LocalRewardModel(reward_model(seed=5))
    with client._busy, pytest.raises(TimeoutError, match="not changed"):
        client.sync_reward_weights(dict(client.model.named_parameters()), timeout_s=0.01)


def test_cancelled_scores_are_not_computed():
    client, gate, computed = LocalRewardModel(reward_model()), threading.Event(), []
    compute = client._logits

    def slow(inputs, pooling_type, n_labels):
        computed.append(inputs)
        assert gate.wait(30)
        return compute(inputs, pooling_type, n_labels)

    async def scenario():
        waiting = [asyncio.create_task(client.score_batch([[5, 6, i]])) for i in range(100)]
        while not computed:
            await asyncio.sleep(0.01)
        for task in waiting:
            task.cancel()
        gate.set()
        await asyncio.gather(*waiting, return_exceptions=True)

    client._logits = slow
    asyncio.run(scenario())
    assert len(computed) < 100
    assert not client._busy.locked(), "what runs when the loop is closed was waited for"


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "llava", "gemma3"])
def test_answers_to_images_are_scored_as_transformers_does_from_pixels(name):
    model, processor = make_tiny_vision(name, scores=True)
    samples = seven_samples(processor)
    client = LocalRewardModel(model, processor.tokenizer, micro_token_budget=200)
    assert client.reads_images
    got = scores(client, [ImageTokens(tuple(each.ids), each.spans) if each.spans else each.ids for each in samples])
    with torch.no_grad():
        expected = [model(**each.inputs).logits.item() for each in samples]
    assert got == pytest.approx(expected, abs=1e-4)
    assert len({round(each, 3) for each in expected}) == len(samples)
    assert not LocalRewardModel(reward_model()).reads_images


def test_an_image_that_has_other_tokens_than_for_the_policy_is_refused():
    model, processor = make_tiny_vision("qwen2_vl", scores=True)
    digest = processor.store.add(make_picture(32, 32))
    sample = make_sample(processor, ["what? ", digest], [100])
    [span] = sample.spans
    cut = ImageTokens(tuple(sample.ids[: span.start + 9]), (span._replace(length=9),))
    with pytest.raises(DataError, match=r"has 9 placeholders .* 16 features .*images.max_pixels .*reward_model"):
        scores(LocalRewardModel(model), [cut])
    more = ImageTokens((*sample.ids, processor.placeholder_id), sample.spans)
    for wrong in (tuple(sample.ids), more, "<image>"):
        with pytest.raises(DataError, match=r"sequence 1: .* has \d+ placeholders"):
            scores(LocalRewardModel(model, processor.tokenizer), ["a", wrong])
