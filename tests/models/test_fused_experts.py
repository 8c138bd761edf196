"""Parts of the tensors of experts, read from files that have each expert alone."""

import pytest
import torch
from hypothesis import given, strategies as st
from small_models import EXPERTS, MIXTURES, causal_model, make_from_config, mixture_model
from transformers.core_model_loading import MergeModulelist, Transpose, WeightConverter

from ludic.errors import CheckpointError
from ludic.models import state_files
from ludic.models.regions import make_slices
from ludic.models.state_files import FusedExperts, find_fused, write_model
from ludic.models.tensor_files import StoredTensors

OTHERS = {
    "Qwen3Moe": {**EXPERTS, "head_dim": 8, "num_experts": 12, "norm_topk_prob": True},
    "Mixtral": {**EXPERTS, "num_local_experts": 3},
}
"""Twelve experts: the third is before the eleventh. Mixtral also has other names of modules."""


@pytest.mark.parametrize("architecture", [*MIXTURES, *OTHERS])
def test_a_published_mixture_is_read_by_the_names_of_the_model(architecture, tmp_path):
    if architecture in MIXTURES:
        model = mixture_model(architecture)
    else:
        model = make_from_config(architecture, "ForCausalLM", OTHERS[architecture], 0)
    write_model(model, tmp_path)
    own = model.state_dict()
    with StoredTensors([tmp_path / "model.safetensors"]) as stored:
        assert set(stored.names()) - set(own)
        fused = find_fused(model, stored)
        described = fused.describe()
        assert described.keys() == own.keys()
        for name, tensor in own.items():
            assert (described[name].shape, described[name].dtype) == (tensor.shape, tensor.dtype)
            assert torch.equal(fused.read(name), tensor), name
            half = tuple((size // 2, size) for size in tensor.shape)
            assert torch.equal(fused.read(name, half), tensor[make_slices(half)]), name


class Recorded:
    """`StoredTensors` of tensors in memory, which notes what is read."""

    def __init__(self, tensors):
        self.tensors, self.read_elements = tensors, 0

    def describe(self):
        return self.tensors

    def read(self, name, region=None):
        values = self.tensors[name] if region is None else self.tensors[name][make_slices(region)]
        self.read_elements += values.numel()
        return values


@st.composite
def cases(draw):
    """(experts, rows of each part, columns, a region of the whole)."""
    experts, columns = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rows = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    region = []
    for size in (experts, sum(rows), columns):
        start = draw(st.integers(0, size))
        region.append((start, draw(st.integers(start, size))))
    return experts, rows, columns, tuple(region)


@given(cases())
def test_a_region_is_that_of_the_stacked_experts_and_nothing_else_is_read(case):
    experts, rows, columns, region = case
    names = [[f"{expert}.{part}" for expert in range(experts)] for part in range(len(rows))]
    tensors = {name: torch.randn(size, columns) for part, size in zip(names, rows, strict=True) for name in part}
    whole = torch.cat([torch.stack([tensors[name] for name in part]) for part in names], dim=1)
    stored = Recorded(tensors)
    wanted = whole[make_slices(region)]
    assert torch.equal(FusedExperts(stored, {"all": names}).read("all", region), wanted)
    assert stored.read_elements == wanted.numel()


def test_conversions_that_need_whole_tensors_and_dense_models_have_none(tmp_path, monkeypatch):
    write_model(mixture_model("Glm4Moe"), tmp_path)
    dense = causal_model("Qwen2")
    with StoredTensors([tmp_path / "model.safetensors"]) as stored:
        assert find_fused(dense, stored) is None
        assert find_fused(torch.nn.Linear(2, 2), stored) is None
        turned = WeightConverter("mlp.experts.*.down_proj.weight", "mlp.experts.down_proj", [MergeModulelist(0), Transpose(1, 2)])
        monkeypatch.setattr(state_files, "list_transforms", lambda model: [turned])
        assert find_fused(mixture_model("Glm4Moe"), stored) is None


def test_experts_that_are_not_alike_are_named():
    stored = Recorded({"0.up": torch.ones(2, 3), "1.up": torch.ones(4, 3)})
    with pytest.raises(CheckpointError, match=r"up is stored in \[2\] experts"):
        FusedExperts(stored, {"up": [["0.up", "1.up"]]}).describe()
