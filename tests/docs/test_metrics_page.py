"""docs/metrics.md lists every key that a step logs."""

import re
from pathlib import Path

import pytest
from training_samples import ListSource, cpu_config, sorting_items, tiny_model

from ludic.training import (
    CISPOLoss,
    CompositeLoss,
    EntropyBonus,
    LossTerm,
    RLAlgorithm,
    TokenKLLoss,
    Trainer,
    make_gmpo,
    make_grpo,
    make_gspo,
    make_reinforce_baseline,
    make_sapo,
    make_sft,
)
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loop.step_record import EPISODE_KEYS
from ludic.training.stats import RESERVED_KEYS

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
NAMED = set(re.findall(r"`(?:train/kl/)?([a-z_0-9]+)`", PAGE))
COMPOSITE = CompositeLoss([LossTerm("a", CISPOLoss()), LossTerm("b", TokenKLLoss()), LossTerm("c", EntropyBonus())])
ALGORITHMS = {
    "grpo": make_grpo(group_size=4),
    "gspo": make_gspo(group_size=4),
    "sapo": make_sapo(group_size=4),
    "gmpo": make_gmpo(group_size=4),
    "reinforce_baseline": make_reinforce_baseline(),
    "sft": make_sft(),
    "composite": RLAlgorithm("composite", ConstantCredit(1.0), COMPOSITE),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_key_of_a_step_is_on_the_page(name):
    meta = {"played_rollouts": 8, "reward_std": 0.5, "avg_total_reward": 0.5, "frac_reward_zero_std": 0.5, "generation_s": 1.0}
    source = ListSource(sorting_items(8), meta={**meta, **dict.fromkeys(EPISODE_KEYS, 0)})
    stats = Trainer(model=tiny_model(), algo=ALGORITHMS[name], batch_source=source, cfg=cpu_config()).train_step_sync()
    unnamed = {key for key in stats if key.rpartition("/")[2] not in NAMED}
    assert not unnamed


def test_every_key_of_the_trainer_is_on_the_page():
    assert set(RESERVED_KEYS) <= NAMED
