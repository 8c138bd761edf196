from ludic.eval.cli import (
    add_common_eval_args as add_common_eval_args,
    build_single_agent_engine as build_single_agent_engine,
    inference_spec_from_cli as inference_spec_from_cli,
    maybe_start_vllm as maybe_start_vllm,
    write_jsonl as write_jsonl,
)
from ludic.eval.evaluator import (
    EngineEvaluator as EngineEvaluator,
    Evaluator as Evaluator,
    ProblemEvaluator as ProblemEvaluator,
    run_eval as run_eval,
    run_eval_sync as run_eval_sync,
)
from ludic.eval.statistics import (
    Interval as Interval,
    difference_interval as difference_interval,
    distinct_at_k as distinct_at_k,
    entropy_of_answers as entropy_of_answers,
    mean_interval as mean_interval,
    pass_at_k as pass_at_k,
    share_interval as share_interval,
    wilson_interval as wilson_interval,
)
from ludic.eval.tally import Measurement as Measurement, ProblemResult as ProblemResult, measure as measure
