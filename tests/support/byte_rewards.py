"""A reward that no two answers of a small model are likely to share, so that there is always
something to learn."""


def mean_id(completion_ids: list[list[int]], **_: object) -> list[float]:
    return [sum(ids) / (256 * max(1, len(ids))) for ids in completion_ids]


def fails_at_times(prompts: list[object], completion_ids: list[list[int]], **_: object) -> list[float]:
    """The same, but no number for about every fourth prompt."""
    scores = mean_id(completion_ids)
    digits = [sum(int(char) for char in str(prompt) if char.isdigit()) for prompt in prompts]
    return [float("nan") if total % 4 == 0 else score for total, score in zip(digits, scores, strict=True)]
