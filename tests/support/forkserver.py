"""The server from which tests fork processes that need all of a run: it has imported everything
once. There is one in each process of tests, so one list of what it imports."""

import multiprocessing

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    [
        *("ludic.cli.app", "ludic.cli.train", "ludic.runs.reinforce", "ludic.runs.sft"),
        *("ludic.runs.reward_model", "ludic.runs.report.reinforce"),
        *("ludic.runs.actors.worker", "transformers.models.qwen2.modeling_qwen2", "peft", "matplotlib.backends.backend_agg"),
        *("transformers.models.deepseek_v3.modeling_deepseek_v3", "torch.distributed.fsdp", "torch.distributed.tensor"),
    ]
)
