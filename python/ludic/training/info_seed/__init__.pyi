from ludic.training.info_seed.evaluator import (
    SeedEvaluator as SeedEvaluator,
    seed_heatmap as seed_heatmap,
    seed_metrics as seed_metrics,
    write_seed_heatmap as write_seed_heatmap,
)
from ludic.training.info_seed.prompts import (
    SeedPrompts as SeedPrompts,
    SeedTaggedEnv as SeedTaggedEnv,
    seed_tagged as seed_tagged,
)
from ludic.training.info_seed.seed_tags import InfoSeed as InfoSeed, seed_of as seed_of, without_tags as without_tags
