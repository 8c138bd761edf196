"""Settings are validated when they are set, and the error says what to do."""

from dataclasses import fields, replace

import pytest
import torch

from ludic.errors import BudgetError, ConfigError
from ludic.training import TrainerConfig
from ludic.training.config import config_dataclass


def test_the_defaults_match_the_specification():
    cfg = TrainerConfig()
    assert cfg.model_device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert (cfg.lr, cfg.weight_decay, cfg.betas, cfg.eps, cfg.max_grad_norm) == (1e-5, 0.01, (0.9, 0.999), 1e-8, 1.0)
    assert (cfg.max_seq_len, cfg.micro_token_budget, cfg.sync_every_steps, cfg.log_every) == (1024, 8192, 1, 1)
    assert (cfg.eval_concurrency, cfg.eval_max_steps, cfg.eval_timeout_s, cfg.pad_token_id) == (32, 1, None, 0)
    assert (cfg.packing, cfg.overhead_tokens, cfg.minibatches_per_batch, cfg.epochs_per_batch) == ("optimal", 256, 1, 1)


def test_learning_rate_is_an_alias_of_lr():
    assert TrainerConfig(learning_rate=2e-5).lr == 2e-5
    assert TrainerConfig(lr=2e-5, learning_rate=2e-5).lr == 2e-5
    with pytest.raises(ConfigError, match=r"lr \(0\.001\) .*learning_rate \(2e-05\) .*two names"):
        TrainerConfig(lr=1e-3, learning_rate=2e-5)
    with pytest.raises(ConfigError, match="two names"):
        TrainerConfig(lr=1e-5, learning_rate=2e-5)  # 1e-5 is the default, but it was set explicitly


def test_the_error_of_a_removed_name_says_what_replaces_it():
    with pytest.raises(ConfigError, match=r"no grad_accum_steps.*max_seq_len and micro_token_budget"):
        TrainerConfig(grad_accum_steps=4)


def test_the_error_of_an_unknown_name_has_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean micro_token_budget"):
        TrainerConfig(micro_tokens_budget=4)
    with pytest.raises(ConfigError, match="it has model_device"):
        TrainerConfig(zzz=4)


def test_a_tokenizer_sets_the_pad_token():
    class Tokenizer:
        pad_token_id = 7

    assert TrainerConfig(pad_token_id=Tokenizer()).pad_token_id == 7
    Tokenizer.pad_token_id, Tokenizer.eos_token_id = None, 9
    assert TrainerConfig(pad_token_id=Tokenizer()).pad_token_id == 9
    Tokenizer.eos_token_id = None
    with pytest.raises(ConfigError, match=r"neither a padding .*nor an end token"):
        TrainerConfig(pad_token_id=Tokenizer())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pad_token_id": None}, "pad_token_id is None"),
        ({"max_seq_len": 0}, r"max_seq_len \(0\) .*at least 1"),
        ({"max_seq_len": 1.5}, "max_seq_len"),
        ({"micro_token_budget": 0}, "micro_token_budget"),
        (
            {"micro_token_budget": 1024, "max_seq_len": 2048},
            r"micro_token_budget \(1024\) .*>= max_seq_len \(2048\); raise",
        ),
        ({"lr": -1}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"max_grad_norm": 0.0}, "None turns clipping off"),
        ({"mixed_precision_dtype": "fp8"}, "bf16, fp16"),
        ({"optimizer": "adam"}, r"optimizer \('adam'\) .*adamw, muon, adafactor, adamw8bit.*module:factory"),
        ({"packing": "best"}, "optimal, greedy, padding_free"),
        ({"minibatches_per_batch": 0}, "minibatches_per_batch"),
        ({"epochs_per_batch": True}, "epochs_per_batch"),
        ({"max_empty_batches": 0}, "max_empty_batches"),
        ({"lr_scheduler_type": "step"}, "cosine, linear, wsd, constant, constant_with_warmup"),
        ({"warmup_steps": 5}, "lr_scheduler_type"),
        ({"lr_scheduler_type": "linear", "warmup_ratio": 2.0}, "warmup_ratio"),
        ({"lr_min_ratio": 1.5}, "lr_min_ratio"),
        ({"early_stopping_mode": "least"}, r"early_stopping_mode .*auto, min, max"),
        ({"sync_every_steps": -1}, "sync_every_steps"),
        ({"log_every": 0}, "log_every"),
        ({"eval_every_n_steps": 0}, "eval_every_n_steps"),
        ({"max_lag": -1}, "max_lag"),
    ],
)
def test_invalid_values_are_refused_with_value_and_rule(values, message):
    with pytest.raises(ConfigError, match=message) as caught:
        TrainerConfig(**values)
    assert isinstance(caught.value, ValueError)


def test_a_token_budget_below_max_seq_len_is_a_budget_error():
    with pytest.raises(BudgetError):
        TrainerConfig(max_seq_len=10, micro_token_budget=9)
    assert TrainerConfig(max_seq_len=10, micro_token_budget=10).micro_token_budget == 10


def test_the_config_knows_which_names_were_set_explicitly():
    cfg = TrainerConfig(lr=1e-5)
    assert cfg.was_set("lr")
    assert not cfg.was_set("sync_every_steps")


def test_a_changed_copy_sets_no_further_names_explicitly():
    copy = replace(TrainerConfig(eval_max_steps=7), lr=2e-5)
    assert copy.was_set("lr")
    assert copy.was_set("eval_max_steps")
    assert not copy.was_set("sync_every_steps")


def test_the_config_is_an_ordinary_dataclass():
    cfg = TrainerConfig(lr=1e-3)
    assert replace(cfg, max_seq_len=64).lr == 1e-3
    assert cfg == TrainerConfig(lr=1e-3)
    assert "learning_rate" not in {field.name for field in fields(cfg)}
    assert TrainerConfig(betas=[0.9, 0.95]).betas == (0.9, 0.95)


def test_a_subclass_explains_its_own_names():
    @config_dataclass
    class Wider(TrainerConfig):
        bins: int = 10

    assert Wider(bins=3, learning_rate=1e-3).lr == 1e-3
    with pytest.raises(ConfigError, match="no bin; did you mean bins"):
        Wider(bin=3)
