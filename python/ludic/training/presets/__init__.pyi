from ludic.training.presets.cispo import make_cispo as make_cispo, make_scalerl as make_scalerl
from ludic.training.presets.distillation import make_opd as make_opd
from ludic.training.presets.group_relative import (
    make_dapo as make_dapo,
    make_dr_grpo as make_dr_grpo,
    make_gmpo as make_gmpo,
    make_grpo as make_grpo,
    make_gspo as make_gspo,
    make_pass_at_k as make_pass_at_k,
    make_sapo as make_sapo,
)
from ludic.training.presets.maxent import make_maxent_grpo as make_maxent_grpo
from ludic.training.presets.policy_gradient import (
    make_ppo as make_ppo,
    make_reinforce as make_reinforce,
    make_reinforce_baseline as make_reinforce_baseline,
    make_reinforce_plus_plus as make_reinforce_plus_plus,
    make_remax as make_remax,
    make_rloo as make_rloo,
    make_sft as make_sft,
)
from ludic.training.presets.registry import PRESETS as PRESETS, REGISTRY as REGISTRY, Preset as Preset
from ludic.training.presets.reward_models import (
    make_bradley_terry as make_bradley_terry,
    make_dpo as make_dpo,
    make_grpo_with_rm as make_grpo_with_rm,
    make_kto as make_kto,
    make_scalerl_with_rm as make_scalerl_with_rm,
)
