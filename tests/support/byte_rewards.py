"""A reward that no two answers of a small model are likely to share, so that there is always something to learn."""


def mean_id(completion_ids: list[list[int]], **_: object) -> list[float]:
    return [sum(ids) / (256 * max(1, len(ids))) for ids in completion_ids]
