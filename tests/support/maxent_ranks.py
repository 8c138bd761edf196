"""Gradients of MaxEnt-GRPO and of a reference on two ranks, and those of one process: `python
maxent_ranks.py` writes name -> [largest gradient, largest difference] as JSON."""

import json

import torch.distributed as dist
from forked_ranks import run_ranks
from gathering_loss import PairLoss
from maxent_batches import GROUP_SIZE, episodes, gradient_of_the_trainer
from seeded_batches import PLAIN, SEEDS, preprocessed, seeded_episodes
from training_samples import cpu_config, tiny_model

from ludic.training import FrozenModel, LoraSettings, RLAlgorithm, apply_lora, make_grpo
from ludic.training.batching.rank_plans import RankShare
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.info_seed import InfoSeed
from ludic.training.loss import M2PO
from ludic.training.presets import make_maxent_grpo

ALGORITHMS = {
    "surrogate": {"beta": 0.1},
    "likelihood": {"beta": 0.1, "form": "likelihood", "clip_coeff": 0.3, "kl_level": "sequence"},
    "tempered": {"scale": "tempered"},
    "grpo": None,
    "m2po": None,
    "pairs": None,
    "seeds infonce": None,
    "seeds ce": None,
}
PAIRS = RLAlgorithm(
    "pairs", ConstantCredit(), PairLoss(), sample_columns={"label": lambda item: float(int(item.meta["rollout_id"][1:]) % 3)}
)
TURNS = (1, 2, 1, 1, 3, 1, 1, 1, 1, 2, 1, 1)


def make(name):
    settings = ALGORITHMS[name]
    if name.startswith("seeds"):
        return make_maxent_grpo(group_size=PLAIN, info_seed=InfoSeed(SEEDS, coeff=1.0, loss=name.split()[1]))
    if name == "pairs":
        return PAIRS
    if name == "m2po":
        return make_grpo(group_size=GROUP_SIZE, reference_kl=0.2, correction=M2PO(2.0))
    if settings is None:
        return make_grpo(group_size=GROUP_SIZE, reference_kl=0.2)
    return make_maxent_grpo(group_size=GROUP_SIZE, tau=0.3, **settings)


def samples_of(name):
    return preprocessed(make(name), seeded_episodes()) if name.startswith("seeds") else episodes(TURNS, seed=7)


def gradient(name, items, *, lora=False, **options):
    model = apply_lora(tiny_model(), LoraSettings(rank=2)) if lora else tiny_model()
    if name.startswith("seeds"):
        model = model.double()
    reference = None if lora else FrozenModel(tiny_model(seed=1), cpu_config())
    found, prepared = gradient_of_the_trainer(make(name), items, model, reference=reference, micro_token_budget=200, **options)
    return found, dict(prepared.stats)


def compare(expected, rank, world):
    """Case -> [largest gradient, largest difference], with statistics that must be equal."""
    found = {}
    for (name, lora), (whole, stats) in expected.items():
        items = samples_of(name)
        own = [item for item in items if item.meta["request_meta"]["group_id"] % world == rank]  # 2 groups and 1 group
        for how, samples, share in (("divided", items, RankShare(rank, world)), ("own", own, None)):
            got, seen = gradient(name, samples, lora=lora, share=share)
            for value in got.values():
                dist.all_reduce(value)
            assert got.keys() == whole.keys()
            differs = max(abs(seen[key] - value) for key, value in stats.items()) if stats else 0.0
            largest = max(float(value.abs().max()) for value in whole.values())
            worst = max(float((got[key] - value).abs().max()) for key, value in whole.items())
            found[f"{name}{' with adapters off' if lora else ''}, {how} samples"] = [largest, max(worst, differs)]
    return found


def fail_on_one_rank(rank, world):
    """One rank has a sample without a group: all raise, at once."""
    items = episodes((1,) * 4, seed=rank)
    if rank == 1:
        items[2].meta["request_meta"] = {}
    gradient("surrogate", items)


def main():
    cases = [*((name, False) for name in ALGORITHMS), ("surrogate", True)]
    expected = {case: gradient(case[0], samples_of(case[0]), lora=case[1]) for case in cases}
    results = run_ranks(2, lambda rank, world: compare(expected, rank, world))
    failed = run_ranks(2, fail_on_one_rank, may_fail=True)
    print(json.dumps({"results": results, "failed": failed}))


if __name__ == "__main__":
    main()
