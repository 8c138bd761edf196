"""A reward that almost never ties between two completions of a small model, so advantages are
rarely zero."""


def mean_id(completion_ids: list[list[int]], **_: object) -> list[float]:
    return [sum(ids) / (256 * max(1, len(ids))) for ids in completion_ids]


def fails_for_some_prompts(prompts: list[object], completion_ids: list[list[int]], **_: object) -> list[float]:
    """`mean_id`, but NaN for about one prompt in four."""
    scores = mean_id(completion_ids)
    digits = [sum(int(char) for char in str(prompt) if char.isdigit()) for prompt in prompts]
    return [float("nan") if total % 4 == 0 else score for total, score in zip(digits, scores, strict=True)]
