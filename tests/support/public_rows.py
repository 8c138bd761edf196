"""A few rows with the columns and types of public data sets, written for these tests."""

from itertools import product

SUMS = [(2, 2), (1, 3), (5, 4), (3, 3), (1, 1), (4, 3), (6, 1), (2, 6), (8, 1)]


def message(role, content):
    return {"role": role, "content": content}


GSM8K = [
    {
        "question": f"Nora has {a} shells and finds {b} more. How many shells does she have?",
        "answer": f"She has {a}+{b}=<<{a}+{b}={a + b}>>{a + b} shells.\n#### {a + b}",
    }
    for a, b in SUMS
]
MATH = [
    {
        "problem": f"Find $x$ if $x - {a} = {b}$.",
        "level": "Level 1",
        "type": "Algebra",
        "solution": f"Adding ${a}$ gives $x = \\boxed{{{a + b}}}$.",
    }
    for a, b in SUMS
]
MATH_500 = [
    {
        "problem": f"Compute ${a} + {b}$.",
        "solution": f"The sum is $\\boxed{{{a + b}}}$.",
        "answer": str(a + b),
        "subject": "Prealgebra",
        "level": 1,
        "unique_id": f"test/prealgebra/{a}{b}.json",
    }
    for a, b in SUMS[:3]
]
MBPP = [
    {
        "task_id": number,
        "text": f"Write a function to {words} a number.",
        "code": f"def {name}(n):\n    return {result}",
        "test_list": [f"assert {name}({n}) == {eval_at(n)}" for n in (1, 4, 7)],
        "test_setup_code": "",
        "challenge_test_list": [],
    }
    for number, (name, words, result, eval_at) in enumerate(
        [
            ("double", "double", "2 * n", lambda n: 2 * n),
            ("square", "square", "n * n", lambda n: n * n),
            ("negate", "negate", "-n", lambda n: -n),
            ("follow", "add one to", "n + 1", lambda n: n + 1),
        ],
        601,
    )
]
CAPYBARA = [
    {
        "source": "Airoboros",
        "messages": [
            message("user", f"What is {a} plus {b}?"),
            message("assistant", f"It is {a + b}."),
            message("user", "And one more?"),
            message("assistant", f"Then it is {a + b + 1}."),
        ],
        "num_turns": 2,
    }
    for a, b in product(range(1, 9), repeat=2)
]
ULTRAFEEDBACK = [
    {
        "chosen": [message("user", f"Add {a} and {b}, please."), message("assistant", f"{a} and {b} make {a + b}.")],
        "rejected": [message("user", f"Add {a} and {b}, please."), message("assistant", "I would rather not.")],
        "score_chosen": 8.5,
        "score_rejected": 3.0,
    }
    for a, b in SUMS
]
SPLITS = {
    ("openai/gsm8k", "main", "train"): GSM8K[3:],
    ("openai/gsm8k", "main", "test"): GSM8K[:3],
    ("DigitalLearningGmbH/MATH-lighteval", None, "train"): MATH[3:],
    ("HuggingFaceH4/MATH-500", None, "test"): MATH_500,
    ("google-research-datasets/mbpp", "full", "train"): MBPP[1:],
    ("google-research-datasets/mbpp", "full", "test"): MBPP[:1],
    ("trl-lib/Capybara", None, "train"): CAPYBARA,
    ("trl-lib/ultrafeedback_binarized", None, "train"): ULTRAFEEDBACK[2:],
    ("trl-lib/ultrafeedback_binarized", None, "test"): ULTRAFEEDBACK[:2],
}
"""(id of the hub, configuration, split) to the rows."""


def load_dataset(source, config=None, *, split, streaming=False):
    """In place of `datasets.load_dataset`, which would download."""
    from datasets import Dataset

    return Dataset.from_list(SPLITS[source, config, split])
