from ludic.training.info_seed.evaluator import SeedEvaluator as SeedEvaluator
from ludic.training.info_seed.metrics import (
    seed_heatmap as seed_heatmap,
    seed_metrics as seed_metrics,
    write_seed_heatmap as write_seed_heatmap,
)
from ludic.training.info_seed.prompts import SeedPrompts as SeedPrompts, seed_tagged as seed_tagged
from ludic.training.info_seed.settings import InfoSeed as InfoSeed
from ludic.training.info_seed.tagged_env import SeedTaggedEnv as SeedTaggedEnv
from ludic.training.info_seed.untagged import seed_of as seed_of, without_tags as without_tags
