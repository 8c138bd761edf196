"""The routers of mixtures of experts of every family: their own choice again changes nothing, and
another choice is computed as the class would have."""

import inspect
import sys

import pytest
import torch
from small_architectures import make_architecture
from training_samples import tiny_model
from transformers import Qwen3MoeConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Config, DeepseekV2TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ludic.errors import ConfigError, DataError
from ludic.models.routing import OWN, Routers, count_samples
from ludic.types import Routes

FAMILIES = [
    *("qwen2_moe", "qwen3_moe", "qwen3_next", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss"),
    *("granitemoe", "llama4_text", "ernie4_5_moe", "jamba"),
]
REFUSED = {"phimoe", "doge", "bamba"}
"""Named as mixtures, and their experts, if they have any, are not chosen by topk over all."""


def run(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def check_family(name):
    model = make_architecture(name)
    routers, ids = Routers(model), torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(1))
    plain = run(model, ids)
    with routers.running() as seen:
        assert torch.equal(run(model, ids), plain)
    own = seen.indices()
    assert own.shape == (12, len(routers.modules), routers.top_k)
    with routers.running(own):
        assert torch.equal(run(model, ids), plain)
    with routers.running(torch.full_like(own, OWN)):
        assert torch.equal(run(model, ids), plain)
    other = (own + 1) % routers.num_experts
    with routers.running(other) as replayed:
        assert (run(model, ids) - plain).abs().max() > 1e-6
    assert torch.equal(replayed.indices(), other)
    assert torch.equal(run(model, ids), plain)  # no hook is left
    return model, routers, ids


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_computes_the_same_with_its_own_routes(name):
    check_family(name)


@pytest.mark.slow
def test_every_mixture_of_transformers_replays_its_routes_or_is_refused():
    """All causal models whose source speaks of experts. Prints what was found for each."""
    replayed = []
    for kind, architecture in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        name, architecture = kind.model_type, architecture[0] if isinstance(architecture, tuple) else architecture
        if "expert" not in inspect.getsource(sys.modules[architecture.__module__]).lower():
            continue
        try:
            make_architecture(name)
        except Exception as error:
            print(f"{name}: not made small ({type(error).__name__})")
            continue
        try:
            _, routers, _ = check_family(name)
        except ConfigError as error:
            print(f"{name}: {error}")
            continue
        print(f"{name}: {len(routers.modules)} of {type(routers.modules[0]).__name__}")
        replayed.append(name)
    assert set(FAMILIES) <= set(replayed)
    assert not REFUSED & set(replayed)


def test_gates_are_the_routers_own_probabilities_of_the_recorded_experts():
    """Normalised as the class does, and with its gradient."""
    router = Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=3, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True))
    routers = object.__new__(Routers)
    routers.modules, routers.num_experts, routers.top_k = [router], 4, 2
    routers.model = router
    torch.nn.init.normal_(router.weight)
    states, recorded = torch.randn(5, 3), torch.tensor([[0, 1], [3, 0], [2, 1], [OWN, OWN], [1, 3]])
    with routers.running(recorded[:, None]):
        _, gates, chosen = router(states)
    probabilities = (states @ router.weight.T).softmax(dim=-1)
    want = torch.where(recorded == OWN, probabilities.topk(2).indices, recorded)
    assert torch.equal(chosen, want)
    picked = probabilities.gather(1, want)
    expected = picked / picked.sum(dim=1, keepdim=True)
    torch.testing.assert_close(gates, expected)
    weights = torch.randn(5, 2)
    [got] = torch.autograd.grad((gates * weights).sum(), router.weight)
    [wanted] = torch.autograd.grad((expected * weights).sum(), router.weight)
    torch.testing.assert_close(got, wanted)


def test_groups_of_recorded_experts_count_where_a_router_chooses_groups_first():
    """DeepSeek-V2 sets the scores of other groups to 0, which would be the gates of these."""
    config = DeepseekV2Config(
        hidden_size=3,
        num_attention_heads=1,
        num_key_value_heads=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=2.5,
    )
    router = DeepseekV2TopkRouter(config)
    routers = object.__new__(Routers)
    routers.modules, routers.num_experts, routers.top_k = [router], 8, 2
    routers.model = router
    torch.nn.init.normal_(router.weight)
    states, recorded = torch.randn(40, 3), torch.randint(0, 4, (40, 2)) + torch.tensor([0, 4])
    with routers.running(recorded[:, None]):
        outputs = router(states)
    probabilities = (states @ router.weight.T).softmax(dim=-1)
    gates = next(each for each in outputs if each.shape == (40, 2) and each.is_floating_point())
    torch.testing.assert_close(gates, probabilities.gather(1, recorded) * 2.5)


def test_other_models_and_routes_of_others_are_refused():
    with pytest.raises(ConfigError, match=r"Qwen2ForCausalLM has no router"):
        Routers(tiny_model())
    model = make_architecture("qwen3_moe")
    routers, ids = Routers(model), torch.arange(6)[None]
    with routers.running(torch.zeros(5, 2, 2, dtype=torch.int16)), pytest.raises(DataError, match=r"6 tokens, and routes of 5"):
        run(model, ids)
    for wrong in (torch.zeros(6, 3, 2), torch.zeros(6, 2, 1), torch.full((6, 2, 2), 4)):
        with pytest.raises(DataError, match=r"layers of \d experts up to"), routers.running(wrong.short()):
            pass
    assert torch.equal(run(model, ids), run(model, ids))


def test_a_server_that_reports_every_block_is_read_by_the_number_of_the_block():
    """vLLM has a column of each block, DeepSeek's first has no experts."""
    model = make_architecture("deepseek_v3", num_hidden_layers=3, first_k_dense_replace=1)
    routers, ids = Routers(model), torch.arange(6)[None]
    assert len(routers.modules) == 2
    with routers.running() as seen:
        run(model, ids)
    other = (seen.indices() + 1) % routers.num_experts
    with routers.running(torch.cat([torch.zeros(6, 1, 2, dtype=torch.long), other], dim=1)) as replayed:
        run(model, ids)
    assert torch.equal(replayed.indices(), other)


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gpt_oss", "granitemoe"])
def test_the_balance_loss_is_the_models_own(name):
    """With padding: three tokens of the second row are none."""
    model = make_architecture(name)
    routers, ids = Routers(model), torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    with routers.running() as seen:
        own = model(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False).aux_loss
    weights = count_samples({"input_ids": ids, "attention_mask": mask})
    ours = seen.balance_loss(weights, seen.load(weights, routers.num_experts))
    torch.testing.assert_close(ours, own, rtol=1e-5, atol=0)
    parameters = [module.weight for module in routers.modules if hasattr(module, "weight")]
    for got, wanted in zip(*(torch.autograd.grad(loss, parameters, retain_graph=True) for loss in (ours, own)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-7)


def test_a_model_without_a_balance_loss_is_refused():
    with pytest.raises(ConfigError, match=r"DeepseekV3ForCausalLM has no load-balancing loss"):
        Routers(make_architecture("deepseek_v3"), balanced=True)


def test_tokens_count_once_for_each_sample_that_has_them():
    """Turns [0, 2) and [0, 3) of row 0 and [0, 1) of row 1: tokens of row 0 count 2 2 1."""
    turns = torch.tensor([[0, 1, 2], [0, 2, 3], [1, 0, 1]])
    padded = {"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]), "turns": turns}
    assert count_samples(padded).tolist() == [2, 2, 1, 1, 0, 0]
    joined = {"input_ids": torch.ones(1, 4), "turns": turns, "cu_seqlens": torch.tensor([0, 3, 4])}
    assert count_samples(joined).tolist() == [2, 2, 1, 1]


def test_routes_are_bytes_of_whole_tokens():
    """Two layers of one expert; more than 256 experts take two bytes."""
    routes = Routes(bytes([3, 0, 1, 2]), 2, 1, 1)
    assert routes.array.tolist() == [[[3], [0]], [[1], [2]]]
    assert routes.cut(1).array.tolist() == [[[3], [0]]]
    assert Routes(bytes([44, 1]), 1, 1, 2).array.tolist() == [[[300]]]
    for wrong in (Routes(b"abc", 2, 1, 1), Routes(b"ab", 1, 1, 3), Routes(b"", 0, 1, 1)):
        with pytest.raises(DataError, match=r"bytes, which are not"):
            _ = wrong.array
