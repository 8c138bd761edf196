from ludic.rollouts.training.loops.rl_loop import run_rl_training as run_rl_training
from ludic.rollouts.training.loops.sft_loop import run_sft_training as run_sft_training
