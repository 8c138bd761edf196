"""What the trainers do with a public model: the tables and the picture of docs/measured.md.

    make smollm2 && .venv/bin/pip install '.[reasoning-gym]'
    python -m benches.python.public_models --output FOLDER             # all, seeds 0 to 2
    python -m benches.python.public_models sums sums-lora --output FOLDER --seeds 0
    python -m benches.python.public_models --output FOLDER --show      # tables of what is there

An experiment is one `ludic` command, which is printed; those whose models or data it uses come
before it. `functions` needs a sandbox: `make bubblewrap`. Runs follow one another; one that has
finished in FOLDER is not repeated. `--save NAME` writes benches/results/NAME.json and
docs/NAME.png.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "target" / "models" / "smollm2"
HERE = "benches.python.public_models"

_GYM = ["task.kind=reasoning_gym", "task.args.answer_in=number", "task.args.partial_credit=false"]
_STEP = ["rollout.prompts=8", "rollout.group_size=8"]
_SHORT, _HELD_OUT = ["rollout.max_new_tokens=16"], ["evaluation.prompts=100", "evaluation.samples_per_prompt=2"]
SUM_SETTINGS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
_SUMS = str(SUM_SETTINGS).replace("'", "")
_DIGITS = "{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}"
SUMS = [*_GYM, "task.args.name=chain_sum", f"task.args.config={_SUMS}", *_STEP, *_SHORT, *_HELD_OUT]
PRODUCTS = [*_GYM, "task.args.name=products", f"task.args.config={_DIGITS}", *_STEP, *_SHORT, *_HELD_OUT]
BETWEEN = ["data=@ranges.jsonl", f"reward={HERE}:between", *_STEP, "rollout.max_new_tokens=8"]
BETWEEN += ["task.args.num_heldout=20", "evaluation.prompts=20", "evaluation.samples_per_prompt=8"]
FUNCTIONS = ["data=@functions.jsonl", "reward=code", "rollout.prompts=4", "rollout.group_size=8", "rollout.max_new_tokens=64"]
FUNCTIONS += ["task.args.num_heldout=24", "evaluation.prompts=24", "evaluation.samples_per_prompt=4"]
TOOLS = ["data=@products.jsonl", f"reward={HERE}:last_number", f"tools=[{HERE}:multiply]", *_STEP, "rollout.max_new_tokens=40"]
TOOLS += ["rollout.max_tool_turns=1", "task.args.num_heldout=50", "evaluation.prompts=50", "evaluation.samples_per_prompt=2"]
FULL, LORA = ["model=@smollm2", "trainer.lr=1e-5"], ["model=@smollm2", "lora.rank=16", "trainer.lr=3e-4"]
MAXENT = ["algorithm=maxent_grpo", "algorithm_args.tau=0.1", "algorithm_args.beta=0"]
VARIED = ["model=@between-sft/model", "trainer.lr=1e-5", "steps=30"]
TUNED = ["model=@sft/model", "trainer.lr=1e-5"]

EXPERIMENTS: dict[str, list[str]] = {
    "sums": ["train", *SUMS, *FULL, "steps=40"],
    "sums-lora": ["train", *SUMS, *LORA, "steps=40"],
    "sums-bfloat16": ["train", *SUMS, *FULL, "steps=40", "dtype=bfloat16"],
    "products": ["train", *PRODUCTS, *FULL, "steps=40"],
    "products-lora": ["train", *PRODUCTS, *LORA, "steps=40"],
    "sft": ["sft", "data=@solved.jsonl", "model=@smollm2", "trainer.lr=2e-5", "epochs=1", "batch_size=16"],
    "sft-grpo": ["train", *SUMS, *TUNED, "steps=20"],
    "dpo": ["dpo", "data=@pairs.jsonl", *TUNED, "epochs=1", "batch_size=16"],
    "rm": ["train-rm", "data=@drafts.jsonl", "heldout=0.25", *FULL, "epochs=1", "batch_size=16"],
    "rm-grpo": ["train", *SUMS, *FULL, "reward_model=@rm", "steps=20"],
    "between-sft": ["sft", "data=@numbers.jsonl", "model=@smollm2", "trainer.lr=2e-5", "epochs=1", "batch_size=16"],
    "between": ["train", *BETWEEN, *VARIED],
    "between-maxent": ["train", *BETWEEN, *VARIED, *MAXENT],
    "functions": ["train", *FUNCTIONS, *FULL, "steps=20"],
    "tools-sft": [
        "sft",
        "data=@calls.jsonl",
        "chat_template=@tools.jinja",
        "model=@smollm2",
        "trainer.lr=1e-4",
        "epochs=2",
        "batch_size=8",
    ],
    "tools": ["train", *TOOLS, "model=@tools-sft/model", "trainer.lr=1e-5", "steps=15"],
}
"""Name -> command and settings. `@NAME` is the model, the folder of another experiment with the
same seed, or a file that a function of `FILES` writes."""
EVALUATIONS = {name: [[*SUMS, "k=2"], [*SUMS, "temperature=0", "k=1"]] for name in ("sft", "dpo")}
EVALUATIONS |= {name: [[*BETWEEN, "k=32"]] for name in ("between", "between-maxent")}
"""Name -> the settings of each `ludic eval`, before and after."""


def last_number(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    """1 for each answer whose last number is the right one, else 0."""
    texts = [completion[-1]["content"] for completion in completions]
    return [float(re.findall(r"-?\d+", text)[-1:] == [right]) for text, right in zip(texts, answer, strict=True)]


def between(completions: list[list[dict[str, str]]], low: list[int], high: list[int], **_: object) -> list[float]:
    """1 for each answer that is a whole number from `low` to `high` and nothing else."""
    texts = [completion[-1]["content"].strip() for completion in completions]
    return [
        float(re.fullmatch(r"\d{1,3}", text) is not None and first <= int(text) <= last)
        for text, first, last in zip(texts, low, high, strict=True)
    ]


def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return int(a) * int(b)


def _solved(output: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Sums with their answers, none of which is held out."""
    import reasoning_gym  # type: ignore[import-untyped, unused-ignore]

    held_out = {row["question"] for row in reasoning_gym.create_dataset("chain_sum", seed=0, size=200, **SUM_SETTINGS)}
    problems = reasoning_gym.create_dataset("chain_sum", seed=1, size=1000, **SUM_SETTINGS)
    solved = {row["question"]: row["answer"] for row in problems if row["question"] not in held_out}
    for question, answer in list(solved.items())[:256]:
        yield {"messages": [_user(question), {"role": "assistant", "content": answer}]}


def _pairs(output: Path, seed: int, model: str = "@sft/model", *, finished: bool = True) -> Iterator[dict[str, Any]]:
    """A right answer of the model to a sum, with up to four wrong ones for each right one."""
    answers = output / f"answers-{model.strip('@').partition('/')[0]}-{seed}.jsonl"
    if not answers.exists():
        settings = _resolve([f"model={model}", *SUMS, f"seed={seed}", "threads=1"], seed, output)
        _ludic("rollout", *settings, "--episodes", "2400", "--out", str(answers))
    problems: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for line in answers.read_text().splitlines():
        rollout = json.loads(line)
        info = rollout["steps"][0]["info"]
        if info["finish_reason"] == "stop" or not finished:
            right, wrong = problems.setdefault(rollout["meta"]["problem_id"], ({}, {}))
            (right if rollout["total_reward"] == 1.0 else wrong)[info["completion"]] = info
    for right, wrong in problems.values():
        for info in list(wrong.values())[: 4 * len(right)]:
            chosen = next(iter(right.values()))["chat_completion"]
            yield {"prompt": info["chat_prompt_messages"], "chosen": [chosen], "rejected": [info["chat_completion"]]}


def _drafts(output: Path, seed: int) -> Iterator[dict[str, Any]]:
    """The same of SmolLM2 itself, with answers that were cut off among the wrong ones."""
    return _pairs(output, seed, "@smollm2", finished=False)


def _ranges(output: Path, seed: int) -> Iterator[dict[str, Any]]:
    for low, high in _draw_ranges(400):
        yield {"prompt": [_user(NUMBER.format(low, high))], "low": low, "high": high}


def _numbers(output: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Other ranges, each with a number of it, any as likely as any other."""
    random = Random(1)
    for low, high in _draw_ranges(656)[400:]:
        yield {"messages": [_user(NUMBER.format(low, high)), {"role": "assistant", "content": str(random.randint(low, high))}]}


NUMBER = "Write a number between {} and {}. Answer with the number only."


def _draw_ranges(count: int) -> list[tuple[int, int]]:
    random, drawn = Random(0), dict[tuple[int, int], None]()
    while len(drawn) < count:
        low = random.randrange(10, 900)
        drawn[low, low + random.randrange(20, 50)] = None
    return list(drawn)


def _functions(output: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Functions of one number, each with three tests."""
    texts: dict[str, Callable[[int, int], int]] = {
        "x plus {n}": lambda x, n: x + n,
        "x minus {n}": lambda x, n: x - n,
        "{n} minus x": lambda x, n: n - x,
        "{n} times x": lambda x, n: n * x,
        "the square of x, plus {n}": lambda x, n: x * x + n,
        "the remainder of x divided by {n}": lambda x, n: x % n,
        "the larger of x and {n}": lambda x, n: max(x, n),
        "x to the power of {n}": lambda x, n: x**n,
    }
    rows = [(text, n, function) for text, function in texts.items() for n in range(2, 22)]
    Random(0).shuffle(rows)
    for text, n, function in rows:
        tests = [f"assert f({x}) == {function(x, n)}" for x in (1, 4, 30)]
        question = f"Write a Python function f(x) that returns {text.format(n=n)}. Answer with one code block and nothing else."
        yield {"question": question, "tests": tests}


def _products(output: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Products of three digits and two, beyond a model of this size."""
    random = Random(1)
    for _ in range(400):
        a, b = random.randrange(100, 1000), random.randrange(10, 100)
        yield {"prompt": [_user(f"What is {a} * {b}?")], "answer": str(a * b)}


def _calls(output: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Such products, half of them after a call of `multiply`, the others guessed."""
    from ludic.agents.tool_schema import tool_schema

    random, tools = Random(2), [tool_schema(multiply)]
    for number in range(96):
        a, b = random.randrange(100, 1000), random.randrange(10, 100)
        messages = [_user(f"What is {a} * {b}?")]
        if number % 2:
            call = {"name": "multiply", "arguments": {"a": a, "b": b}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
            messages.append({"role": "tool", "content": str(a * b)})
            answer = a * b
        else:
            answer = random.randrange(10_000, 99_999)
        yield {"messages": [*messages, {"role": "assistant", "content": f"It is {answer}."}], "tools": tools}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


TOOLS_TEMPLATE = """
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool.function | tojson }}{% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<tool_call>
{{- {"name": c.function.name, "arguments": c.function.arguments} | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""

FILES: dict[str, Callable[[Path, int], Iterator[dict[str, Any]]]] = {
    "solved.jsonl": _solved,
    "pairs.jsonl": _pairs,
    "drafts.jsonl": _drafts,
    "ranges.jsonl": _ranges,
    "numbers.jsonl": _numbers,
    "functions.jsonl": _functions,
    "products.jsonl": _products,
    "calls.jsonl": _calls,
}


def _resolve(settings: list[str], seed: int, output: Path) -> list[str]:
    """The settings with paths in place of `@NAME`. What they name is made first."""
    return [re.sub(r"@([a-z0-9-]+(?:\.\w+)?)", lambda match: str(_make(match[1], seed, output)), setting) for setting in settings]


def _make(name: str, seed: int, output: Path) -> Path:
    if name == "smollm2":
        return MODEL
    if name in EXPERIMENTS:
        run(name, seed, output)
        return output / f"{name}-{seed}"
    path = output / f"{seed}-{name}"
    if not path.exists():
        rows = () if name == "tools.jinja" else FILES[name](output, seed)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) or TOOLS_TEMPLATE)
    return path


def run(name: str, seed: int, output: Path) -> None:
    """Run one seed of an experiment, unless it has finished, and note its processor seconds. Where
    the command samples no answers of its own, `ludic eval` measures the models before and after."""
    folder, (command, *settings) = output / f"{name}-{seed}", EXPERIMENTS[name]
    words = [*_resolve(settings, seed, output), f"seed={seed}", "threads=1", f"output={output}"]
    if not (folder / "cost.json").is_file():
        cpu, started = _cpu_seconds(), time.perf_counter()
        _ludic(command, *words, f"name={folder.name}")
        cost = {"cpu_s": _cpu_seconds() - cpu, "process_s": time.perf_counter() - started, "load": os.getloadavg()[0]}
        (folder / "cost.json").write_text(json.dumps(cost))
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # 2 GB
    (start,) = (word for word in words if word.startswith("model="))
    for number, measured in enumerate(EVALUATIONS.get(name, [])):
        for when, model in (("before", start), ("after", f"model={folder / 'model'}")):
            evaluation = f"{folder.name}-{when}-{number}"
            if not (output / evaluation / "summary.json").is_file():
                common = [f"output={output}", f"seed={seed}", "threads=1", f"name={evaluation}"]
                _ludic("eval", *_resolve(measured, seed, output), model, *common)


def _ludic(*words: str) -> None:
    print("ludic", shlex.join(words), flush=True)
    subprocess.run([sys.executable, "-m", "ludic.cli", *words], stdout=subprocess.DEVNULL, check=True, cwd=REPOSITORY)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read(output: Path, name: str) -> list[dict[str, Any]]:
    """The finished runs of an experiment, by seed. `rates` has [value, low, high] of each held-out
    rate `before` and `after`, `curve` the reward of each step."""
    found = []
    for path in sorted(output.glob(f"{name}-*/summary.json")):
        folder = path.parent
        if re.fullmatch(rf"{name}-\d+", folder.name) and (folder / "cost.json").is_file():
            summary = json.loads(path.read_text())
            steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            curve = [step["train/avg_sampled_reward"] for step in steps if "train/avg_sampled_reward" in step]
            rates = {when: read_rates(output, folder.name, summary, when) for when in ("before", "after")}
            pairs = {key: value for key, value in summary.items() if key.startswith(("eval_", "sample_"))}
            kept = {key: summary.get(key) for key in ("seed", "memory", "versions", "mismatch")}
            found.append(
                {**kept, "rates": rates, "pairs": pairs, "curve": curve, **json.loads((folder / "cost.json").read_text())}
            )
    return found


def read_rates(output: Path, name: str, summary: dict[str, Any], when: str) -> dict[str, list[float]]:
    """By the run itself, and by its evaluations: the first samples, the second is greedy."""
    found = {rate: [summary[when][rate], *limits] for rate, limits in summary.get("intervals", {}).get(when, {}).items()}
    for number, rate in enumerate(("sampled_reward", "greedy_accuracy")):
        folder = output / f"{name}-{when}-{number}"
        if (folder / "summary.json").is_file():
            accuracy = json.loads((folder / "summary.json").read_text())["accuracy"]
            found[rate] = [accuracy["value"], accuracy["low"], accuracy["high"]]
            problems = [json.loads(line) for line in (folder / "problems.jsonl").read_text().splitlines()]
            for k in (8, 32) if len(problems[0]["texts"]) == 32 else ():
                found[f"distinct_of_{k}"] = [sum(count_distinct(problem, k) for problem in problems) / len(problems)]
    return found


def count_distinct(problem: dict[str, Any], k: int) -> float:
    """How many different right answers `k` samples have, estimated from all of a problem."""
    from ludic.eval import distinct_at_k

    right = Counter(text.strip() for text, reward in zip(problem["texts"], problem["rewards"], strict=True) if reward == 1.0)
    return distinct_at_k(right.values(), len(problem["texts"]), k)


RATES = {
    "sampled_reward": "sampled",
    "greedy_accuracy": "greedy",
    "distinct_of_8": "distinct of 8",
    "distinct_of_32": "distinct of 32",
}


def format_table(results: dict[str, list[dict[str, Any]]]) -> str:
    """One table for the experiments that have the same rates."""
    tables: dict[tuple[str, ...], list[str]] = {}
    for name, runs in results.items():
        for each in runs:
            rates = tuple(rate for rate in RATES if rate in each["rates"]["after"])
            heads = [f"{RATES[rate]} before | after" for rate in rates]
            heads += ["processor minutes", "peak memory"]
            lines = tables.setdefault(rates, ["", f"| run | seed | {' | '.join(heads)} |", "|---" * (4 + 2 * len(rates)) + "|"])
            cells = [show_rate(each["rates"][when].get(rate)) for rate in rates for when in ("before", "after")]
            memory = each["memory"]["process_peak_mb"] / 1024
            cells += ["not noted" if each["cpu_s"] is None else f"{each['cpu_s'] / 60:.1f}", f"{memory:.1f} GiB"]
            lines.append(f"| {name} | {each['seed']} | {' | '.join(cells)} |")
    return "\n".join("\n".join(lines) for lines in tables.values())


def show_rate(rate: list[float] | None) -> str:
    if rate is None:
        return ""
    return f"{rate[0]:.3f} ({rate[1]:.2f} to {rate[2]:.2f})" if len(rate) == 3 else f"{rate[0]:.1f}"


def plot(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """The mean reward of the sampled answers of each step, a thin line for each seed and a thick
    one for their mean over five steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), constrained_layout=True)
    curves = {name: results[name] for name in ("sums", "sums-lora", "products", "products-lora") if name in results}
    for number, (name, runs) in enumerate(curves.items()):
        length = min(len(each["curve"]) for each in runs)
        for each in runs:
            axes.plot(range(1, length + 1), each["curve"][:length], color=f"C{number}", alpha=0.25, linewidth=0.8)
        mean = [sum(each["curve"][step] for each in runs) / len(runs) for step in range(length)]
        smooth = [sum(mean[max(0, step - 4) : step + 1]) / len(mean[max(0, step - 4) : step + 1]) for step in range(length)]
        axes.plot(range(1, length + 1), smooth, color=f"C{number}", label=f"{name} (seeds: {len(runs)})")
    axes.set(xlabel="step of 64 answers", ylabel="reward of the sampled answers", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", default=list(EXPERIMENTS), help=", ".join(EXPERIMENTS))
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--save", metavar="NAME", help="write benches/results/NAME.json and docs/NAME.png")
    options = parser.parse_args()
    if not options.show:
        for seed in options.seeds:
            for name in options.experiments:
                run(name, seed, options.output)
    results = {name: runs for name in options.experiments if (runs := read(options.output, name))}
    print(format_table(results))
    if options.save:
        folder = REPOSITORY / "benches" / "results"
        folder.mkdir(exist_ok=True)
        (folder / f"{options.save}.json").write_text(json.dumps(results, indent=1) + "\n")
        plot(results, REPOSITORY / "docs" / f"{options.save}.png")


if __name__ == "__main__":
    main()
