"""When servers get adapters, and when merged weights."""

import pytest
from tiny_policy import save_tiny_policy

from ludic.errors import ConfigError
from ludic.inference.vllm.in_server.server import lora_flags
from ludic.recipes.compose import compose
from ludic.recipes.model import check_adapters, serves_base, why_merged

URL = "inference.url=http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["inference=vllm", "lora.rank=0"], "lora.rank=0"),
        (["inference=vllm", "lora.publish=merged"], "lora.publish=merged"),
        ([], "inference=local"),
        (["inference=vllm", "lora.rank=513"], "lora.rank above 512"),
        (["inference=vllm", "quantization=int8"], "quantization=int8"),
        ([URL], "inference.url"),
        (["inference=vllm"], None),
        (["servers=2", "lora.publish=adapter"], None),
    ],
)
def test_why_the_weights_of_a_small_model_are_merged(settings, reason):
    recipe = compose(["lora.rank=2", *settings])
    assert why_merged(recipe) is None if reason is None else reason in why_merged(recipe)
    assert serves_base(recipe) == (reason is None)


@pytest.mark.parametrize(
    ("quantization", "url", "is_merged"), [("int8", URL, True), ("int8", "inference=vllm", False), ("null", URL, False)]
)
def test_a_running_server_has_a_model_on_disk_but_not_its_quantised_form(tmp_path, quantization, url, is_merged):
    save_tiny_policy(tmp_path)
    recipe = compose(["lora.rank=2", f"model={tmp_path}", f"quantization.kind={quantization}", url])
    assert (why_merged(recipe) is not None) == is_merged
    assert serves_base(recipe) == (url != URL)


def test_adapters_that_cannot_be_pushed_are_an_error_if_they_are_asked_for():
    with pytest.raises(ConfigError, match=r"lora.publish=adapter .*inference=local"):
        check_adapters(compose(["lora.rank=2", "lora.publish=adapter"]))
    with pytest.raises(ConfigError, match=r"lora.publish .*lora.rank"):
        compose(["lora.publish=adapter"])


@pytest.mark.parametrize(("rank", "most"), [(1, "1"), (4, "8"), (16, "16"), (48, "64"), (512, "512")])
def test_a_server_is_started_with_the_next_rank_that_it_knows(rank, most):
    assert dict(lora_flags(rank))["--max-lora-rank"] == most
    assert lora_flags(0) == []
