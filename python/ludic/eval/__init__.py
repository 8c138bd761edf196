"""Evaluation: accuracy, avg@k and pass@k with confidence intervals, and your own metrics, from
episodes that are played for it. Failures are counted."""

from ludic.eval.cli import (
    add_common_eval_args,
    build_single_agent_engine,
    inference_spec_from_cli,
    maybe_start_vllm,
    write_jsonl,
)
from ludic.eval.evaluator import EngineEvaluator, Evaluator, ProblemEvaluator, run_eval, run_eval_sync
from ludic.eval.statistics import (
    Interval,
    difference_interval,
    distinct_at_k,
    entropy_of_answers,
    mean_interval,
    pass_at_k,
    share_interval,
    wilson_interval,
)
from ludic.eval.tally import Measurement, ProblemResult, measure

__all__ = [
    "EngineEvaluator",
    "Evaluator",
    "Interval",
    "Measurement",
    "ProblemEvaluator",
    "ProblemResult",
    "add_common_eval_args",
    "build_single_agent_engine",
    "difference_interval",
    "distinct_at_k",
    "entropy_of_answers",
    "inference_spec_from_cli",
    "maybe_start_vllm",
    "mean_interval",
    "measure",
    "pass_at_k",
    "run_eval",
    "run_eval_sync",
    "share_interval",
    "wilson_interval",
    "write_jsonl",
]
