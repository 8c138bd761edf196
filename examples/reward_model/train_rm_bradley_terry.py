"""A reward model from preference pairs, with the Bradley-Terry loss.

    python examples/reward_model/train_rm_bradley_terry.py  # generated pairs, small model, CPU

    python examples/reward_model/train_rm_bradley_terry.py \\
        --model Qwen/Qwen2.5-0.5B --hf-dataset stanfordnlp/SHP --hf-split train --limit 5000 \\
        --steps 1000 --batch-size 16 --micro-token-budget 8192 --max-seq-len 1024 \\
        --lr 5e-6 --weight-decay 0.01 --warmup-steps 50 --lr-scheduler cosine \\
        --beta 1.0 --regularization-lambda 0.001 --label-smoothing 0.05 --lora --lora-rank 8 \\
        --eval-split test --eval-limit 1000 --eval-every 100 --early-stopping-patience 5 \\
        --profile-memory --output-dir checkpoints_rm_v2

It is `ludic train-rm`, whose flags, settings and files it has; docs/reward-models.md says what they
are. Without `--hf-dataset` or `--data` the pairs are generated, without `--model` a small model is
made.
"""

from __future__ import annotations

import sys

from ludic.cli.app import main

if __name__ == "__main__":
    sys.argv[1:1] = ["train-rm"]
    main()
