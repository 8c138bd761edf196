"""Weights as files, where the names in the files are not those of the model."""

import pytest
import torch
from small_models import MIXTURES, causal_model, mixture_model

from ludic.errors import CheckpointError
from ludic.models.state_files import read_model, read_tensors, write_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_mixture_of_experts_is_read_from_the_names_it_is_published_with(architecture, dtype, tmp_path):
    written = mixture_model(architecture).to(dtype)
    write_model(written, tmp_path)
    assert set(read_tensors(tmp_path / "model.safetensors")) - set(written.state_dict()), "experts are stored one by one"
    read = mixture_model(architecture, seed=1).to(dtype)
    before = torch.random.get_rng_state()
    read_model(read, tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, tensor in written.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name


@pytest.mark.parametrize("make", [lambda: mixture_model("Glm4Moe"), lambda: causal_model("Qwen2")], ids=["a mixture", "dense"])
def test_weights_of_another_model_are_refused_and_change_nothing(make, tmp_path):
    write_model(make(), tmp_path)
    model = mixture_model("DeepseekV3")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"do not fit DeepseekV3ForCausalLM"):
        read_model(model, tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
