"""Rules that keep the code readable: short functions and files, declared members, tests in the same
tree as the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "python" / "ludic"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
TEST_FOLDERS = {"core", "docs", "examples", "gpu", "integration", "support"}
"""Folders of tests/ without a counterpart in the package: the Rust core, pages, scripts, real
servers, GPUs and shared support."""
OPTIONAL_READS = {
    "agents/tool_schema.py": (2, "a user's function"),
    "cli/doctor.py": (1, "the standard library of this platform"),
    "distributed/push/target.py": (5, "a user's chat client, adapted"),
    "envs/adapters/openenv.py": (2, "OpenEnv"),
    "envs/code_exec/bubblewrap.py": (1, "the standard library of this platform"),
    "envs/code_exec/env.py": (1, "a user's runner"),
    "envs/code_exec/in_sandbox/program.py": (1, "what a program made of its stdout"),
    "envs/code_exec/pool.py": (1, "a user's sandbox"),
    "distributed/engines.py": (1, "a user's engine"),
    "distributed/push/engine_sessions.py": (3, "a user's engine"),
    "envs/adapters/plain_values.py": (3, "numpy and pydantic"),
    "envs/adapters/textarena.py": (1, "TextArena"),
    "runs/prompt_room.py": (3, "a model or a tokenizer of transformers, or of a user"),
    "envs/maths/worker.py": (1, "the standard library of this platform"),
    "importing.py": (1, "a user's module"),
    "eval/cli.py": (1, "a user's argparse.Namespace"),
    "files/json_values.py": (1, "numpy and torch"),
    "forwarding.py": (1, "a user's object, adapted"),
    "inference/local/client.py": (2, "transformers"),
    "inference/local/decode.py": (6, "transformers"),
    "inference/local/prefixes.py": (3, "transformers and PEFT"),
    "inference/local/reward.py": (9, "transformers"),
    "inference/local/shared_attention.py": (5, "transformers, PEFT and wrappers of torch"),
    "inference/local/weights.py": (1, "PEFT"),
    "inference/prompts/template.py": (1, "a tokenizer"),
    "inference/vllm/in_server/weight_receiver.py": (1, "torch"),
    "inference/vllm/in_server/worker.py": (3, "vLLM"),
    "inference/vllm/responses.py": (1, "openai"),
    "interaction/single_agent.py": (2, "a user's environment"),
    "interaction/steps.py": (2, "a user's agent and environment"),
    "models/activation_checkpointing.py": (3, "transformers"),
    "models/adapters.py": (2, "PEFT"),
    "models/heads.py": (2, "transformers and PEFT"),
    "models/lora.py": (2, "transformers"),
    "models/output_layer.py": (6, "transformers"),
    "models/packed_attention.py": (8, "transformers and wrappers of torch"),
    "models/published.py": (1, "wrappers of torch"),
    "models/quantization.py": (7, "bitsandbytes, transformers and PEFT"),
    "models/sharded_files.py": (2, "transformers"),
    "models/sharding.py": (2, "FSDP2 and transformers"),
    "models/state_files.py": (3, "transformers and PEFT"),
    "recipes/build.py": (1, "a user's function"),
    "rollouts/training/backends/foreign.py": (2, "a user's backend"),
    "rollouts/training/backends/pytorch.py": (2, "a transformers model"),
    "rollouts/training/agent_integration.py": (2, "a user's environment and trajectory"),
    "rollouts/training/datasets/data_buffer.py": (1, "numpy and torch"),
    "rollouts/training/metrics.py": (2, "a user's logger, numpy and torch"),
    "rollouts/training/rollout_gen/buffered_prompts.py": (3, "a user's buffer"),
    "rollouts/training/loops/engine_publisher.py": (1, "a user's engine"),
    "rollouts/training/rollout_gen/generate_calls.py": (1, "a user's function"),
    "rollouts/training/rollout_gen/rollout_generation.py": (1, "a user's buffer"),
    "runs/data/sft.py": (1, "a tokenizer"),
    "runs/memory_estimate.py": (2, "a config of transformers"),
    "runs/sampler.py": (2, "transformers"),
    "tasks/rewards.py": (2, "a user's reward function"),
    "trainers/inputs.py": (3, "a user's function"),
    "training/backend/freed_memory.py": (1, "the C library"),
    "training/backend/prefix_sharing.py": (1, "transformers"),
    "training/algorithm.py": (4, "transformers"),
    "training/classification_metrics.py": (1, "torch"),
    "training/config.py": (1, "a tokenizer"),
    "training/info_seed/tagged_env.py": (1, "a user's environment"),
    "training/loggers/wandb.py": (3, "wandb"),
    "training/loop/setup_checks.py": (1, "a user's backend"),
    "training/loss/base.py": (1, "a user's loss, adapted"),
    "training/preflight/causes.py": (2, "a tokenizer"),
    "training/reference.py": (1, "a user's reference or backend"),
    "training/reward_deadline.py": (1, "a user's reward function"),
    "training/reward_signatures.py": (2, "a user's reward function"),
    "training/reward_values.py": (3, "a user's reward function"),
    "training/reward_scorer.py": (2, "a tokenizer"),
    "training/rm_trainer.py": (1, "transformers"),
    "training/rollouts/engine.py": (1, "a user's environment"),
    "training/rollouts/group_filters.py": (1, "a user's filter"),
    "training/samples/conversations.py": (6, "a tokenizer"),
    "training/samples/prompt_completion.py": (1, "a tokenizer"),
    "training/samples/text.py": (1, "a tokenizer"),
}
"""File -> number of optional member reads, and the foreign objects that are read. Our own types
declare every member, so none of these objects is ours."""


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_no_file_exceeds_the_line_limit():
    folders = ["crates/*/src", "benches", "tests/support"]
    others = [path for folder in folders for kind in ("rs", "py") for path in sorted(REPOSITORY.glob(f"{folder}/**/*.{kind}"))]
    assert {REPOSITORY / "benches" / "src" / "lib.rs", Path(__file__).with_name("support") / "stub_vllm.py"} < set(others)
    sources = [*python_files(), *others]
    assert len(sources) > 400
    lengths = {str(path.relative_to(REPOSITORY)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_no_function_exceeds_the_line_limit():
    lengths = {
        f"{path.relative_to(PACKAGE)}:{function.name}": function.end_lineno - function.lineno + 1
        for path in python_files()
        for function in functions_of(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert len(lengths) > 1000
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def test_every_test_folder_mirrors_a_folder_of_the_package():
    folders = {path.parent.relative_to(REPOSITORY / "tests") for path in (REPOSITORY / "tests").rglob("test_*.py")}
    packages = {path.parent.relative_to(PACKAGE) for path in python_files()}
    assert {str(folder) for folder in folders - packages if folder.parts[0] not in TEST_FOLDERS} == set()


def optional_reads(tree: ast.Module) -> int:
    """`getattr` with a default, and `hasattr`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return sum(call.func.id == "hasattr" or (call.func.id == "getattr" and len(call.args) == 3) for call in calls)


def test_optional_members_are_read_only_from_foreign_objects():
    reads = {
        str(path.relative_to(PACKAGE)): optional_reads(ast.parse(path.read_text(encoding="utf-8"))) for path in python_files()
    }
    assert {name: number for name, number in reads.items() if number} == {
        name: number for name, (number, _) in OPTIONAL_READS.items()
    }


def test_the_check_detects_optional_reads():
    assert optional_reads(ast.parse("getattr(a, 'b', None) or hasattr(c, 'd') or getattr(e, 'f')")) == 2
