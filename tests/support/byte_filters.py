"""A filter that keeps about half of the groups of any policy."""


def even_sum(answers) -> bool:
    return sum(token for answer in answers for token in answer.tokens) % 2 == 0
