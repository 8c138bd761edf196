"""Requests to reward models, and which of their weights are published."""

import pytest
from hypothesis import given, strategies as st

from ludic.errors import ConfigError, DataTypeError
from ludic.inference import PoolingType, RewardModelTrainingMode, ScoringRequest, ScoringResponse
from ludic.inference.reward_types import select_trained_weights

MERGED = {
    "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight": "q",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": "a",
    "base_model.model.model.layers.0.mlp.up_proj.weight": "up",
    "base_model.model.score.modules_to_save.default.weight": "head",
    "base_model.model.score.original_module.weight": "old head",
}
PLAIN = {"model.layers.0.self_attn.q_proj.weight": "q", "model.layers.0.mlp.up_proj.weight": "up", "score.weight": "head"}


def test_the_enum_values_are_those_of_the_servers():
    assert [each.value for each in PoolingType] == ["last", "mean", "cls", "step"]
    assert [each.value for each in RewardModelTrainingMode] == ["head_only", "lora", "full"]


def test_a_request_keeps_texts_and_ids_unchanged_and_is_hashable():
    request = ScoringRequest.from_list("rm", ["2+2=", [53, 46]], normalize=False)
    assert request == ScoringRequest("rm", ("2+2=", (53, 46)), PoolingType.LAST, False, 1)
    assert hash(request) == hash(ScoringRequest("rm", ("2+2=", (53, 46)), normalize=False))


def test_inputs_other_than_text_or_ids_are_refused():
    with pytest.raises(DataTypeError, match="text or a list of token ids"):
        ScoringRequest.from_list("rm", [[1, 2.5]])
    with pytest.raises(DataTypeError, match="text or a list of token ids"):
        ScoringRequest("rm", ((True, 2),))
    with pytest.raises(ConfigError, match="n_labels"):
        ScoringRequest("rm", ("a",), n_labels=0)
    with pytest.raises(ValueError, match="median"):
        ScoringRequest("rm", ("a",), pooling_type="median")


def test_a_response_has_its_own_usage():
    assert ScoringResponse([1.0], "rm").usage is not ScoringResponse([1.0], "rm").usage


def test_the_head_mode_selects_only_the_head():
    assert select_trained_weights(MERGED, "head_only") == {"score.weight": "head"}
    assert select_trained_weights(PLAIN, RewardModelTrainingMode.HEAD_ONLY) == {"score.weight": "head"}
    assert select_trained_weights({"classifier.dense.weight": 1, "bert.x": 2}, "head_only") == {"classifier.dense.weight": 1}


@pytest.mark.parametrize("part", ["head.dense.weight", "pooler.dense.weight"])  # of ModernBERT and of DeBERTa
def test_layers_between_backbone_and_classifier_belong_to_the_head(part):
    params = {
        f"base_model.model.{part.replace('.', '.modules_to_save.default.', 1)}": 1,
        "classifier.weight": 2,
        f"bert.{part}": 3,
    }
    params["bert.layer.query.base_layer.weight"] = 4
    assert select_trained_weights(params, "head_only") == {part: 1, "classifier.weight": 2}
    assert select_trained_weights(params, "lora") == {part: 1, "classifier.weight": 2, "bert.layer.query.weight": 4}


def test_the_full_mode_selects_all_weights_by_their_plain_names_without_adapters():
    assert select_trained_weights(MERGED, "full") == PLAIN
    assert select_trained_weights(PLAIN, "full") == PLAIN


def test_the_lora_mode_selects_merged_weights_and_the_head():
    assert select_trained_weights(MERGED, "lora") == {"model.layers.0.self_attn.q_proj.weight": "q", "score.weight": "head"}


def test_the_lora_mode_selects_unmerged_adapters_or_everything_if_names_do_not_tell():
    adapters = {"q_proj.lora_A.weight": "a", "score.weight": "head", "up_proj.weight": "up"}
    assert select_trained_weights(adapters, "lora") == {"q_proj.lora_A.weight": "a", "score.weight": "head"}
    assert select_trained_weights(PLAIN, "lora") == PLAIN


@given(st.sampled_from([MERGED, PLAIN]), st.sampled_from(list(RewardModelTrainingMode)))
def test_selecting_selected_weights_changes_nothing(params, mode):
    chosen = select_trained_weights(params, mode)
    assert select_trained_weights(chosen, mode) == chosen


def test_an_empty_selection_is_an_error_and_not_an_empty_update():
    with pytest.raises(ConfigError, match="training_mode=head_only"):
        select_trained_weights({"model.norm.weight": 1}, "head_only")
