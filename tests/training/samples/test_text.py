"""Plain text as token ids: where the completion begins, and how it ends."""

import pytest

from ludic.errors import RowError
from ludic.training.samples.conversations import append_eos, tokenize_prompt_completion


class TableTokenizer:
    """Tokens are pieces of text, matched longest first. The end token is 2."""

    eos_token_id: int | None = 2

    def __init__(self, **pieces):
        self.pieces = sorted(pieces.items(), key=lambda piece: -len(piece[0]))

    def __call__(self, text, *, add_special_tokens):
        assert not add_special_tokens
        ids = []
        while text:
            piece, token = next(pair for pair in self.pieces if text.startswith(pair[0]))
            ids.append(token)
            text = text.removeprefix(piece)
        return {"input_ids": ids}


def test_the_action_is_the_completion_and_the_end_token():
    tokens = tokenize_prompt_completion(TableTokenizer(a=5, b=6), "ab", "a", "row 1")
    assert (tokens.input_ids, tokens.action_mask) == ([5, 6, 5, 2], [0, 0, 1, 1])


def test_a_token_across_the_boundary_is_split_as_at_inference():
    tokens = tokenize_prompt_completion(TableTokenizer(a=5, b=6, ab=8), "a", "b", "row 1")  # `ab` by itself is [8]
    assert (tokens.input_ids, tokens.action_mask) == ([5, 6, 2], [0, 1, 1])


def test_an_empty_completion_is_refused():
    with pytest.raises(RowError, match="row 1 has an empty completion"):
        tokenize_prompt_completion(TableTokenizer(a=5), "a", "", "row 1")


def test_an_existing_end_token_is_not_appended_again():
    tokenizer = TableTokenizer(a=5)
    assert append_eos(tokenizer, [5]) == append_eos(tokenizer, [5, 2]) == [5, 2]
    tokenizer.eos_token_id = None
    assert append_eos(tokenizer, [5]) == [5]
