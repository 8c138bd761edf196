"""Rows that several ranks compute together: how they are divided, and what is refused. What models
compute so is compared with one process in tests/training/backend/test_sharded_ranks.py."""

from rank_processes import on_ranks


def test_slices_become_heads_and_slices_again_and_what_cannot_be_divided_is_refused(tmp_path):
    errors = on_ranks(4, "context_laws.py", tmp_path)
    assert errors.keys() == {"heads", "convolutions", "recurrence", "attention", "loss", "routers", "source", "images", "size"}
    assert "3 attention heads and 1 key heads cannot be divided among 4 ranks" in errors["heads"]
    for name in ("convolutions", "recurrence"):
        assert "slices" in errors[name]
        assert errors[name].endswith("set sharding.context (4) to 1")
    assert "the attention of Qwen2ForCausalLM is eager, not sdpa" in errors["attention"]
    assert "has its own compute_loss" in errors["loss"]
    assert "trainer.router_aux_coef need whole rows" in errors["routers"]
    assert "wrap it in SharedBatches" in errors["source"]
    assert "samples with images are computed whole" in errors["images"]
    assert "context (3) must be >= 1 and divide the number of ranks (4)" in errors["size"]
