"""Makes pairs of samples from rows of preference data.

A row has a `chosen` and a `rejected` response, in one of TRL's formats:

    {"prompt": "2+2=", "chosen": "4", "rejected": "5"}          plain text, no chat template
    {"chosen": "2+2=4", "rejected": "2+2=5"}                    the common prefix is the prompt
    {"prompt": [...], "chosen": [...], "rejected": [...]}       lists of messages, chat template
    {"chosen": [...], "rejected": [...]}                        the prefix is the prompt

If `prompt` is text and the responses are conversations, the text is ignored because they repeat it,
unless they begin with the assistant. A row for KTO may instead have one answer, in TRL's unpaired
format, and becomes one sample, without a partner:

    {"prompt": "2+2=", "completion": "4", "label": true}        or lists of messages

Conversations can also have `tools` and
`chat_template_kwargs`, which are passed to the template. Both samples end with the end token of the
response: what a template adds after it is never sampled, and a reward model reads its score at the
last token.

The metadata of preference samples, and checks of it.

`pair_id` (text or a whole number) identifies the pair, `role` is `chosen` or `rejected`, and
`label` is the probability that the chosen response is better: 1.0 for a plain preference.

    {"pair_id": "sum", "role": "chosen", "label": 1.0}
    {"pair_id": "sum", "role": "rejected", "label": 1.0}
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from ludic.data import DataSet, load_data
from ludic.data.formats import Kind
from ludic.data.row_images import intern_row
from ludic.data.rows_on_disk import Changed
from ludic.errors import DataError, DataKeyError, RowError, check_value
from ludic.inference.prompts.template import encode_text, read_template_kwargs
from ludic.training.samples.conversations import ChatTokenizer, ChatTokens, append_eos, tokenize_prompt_completion
from ludic.training.types import SAWItem
from ludic.types import Message, cut_spans

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]


@dataclass(frozen=True)
class PreferenceItems:
    """Makes pairs of samples from rows.

    >>> row = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    >>> chosen, rejected = PreferenceItems(tokenizer).of_row(row, "row 1", pair_id="p1")
    """

    tokenizer: Any
    use_chat_template: bool = False
    """Render plain text with the template too: the prompt as a user message, the response as an
    assistant message."""
    system_prompt: str | None = None
    """System message for conversations without one."""
    max_length: int | None = None
    """Truncate samples to this many tokens: plain text at the start of its prompt, conversations at
    the end of the response."""
    as_arrays: bool = False
    """Store tokens and masks as int32 arrays instead of lists, which take seven times the
    memory."""

    def __post_init__(self) -> None:
        check_value("max_length", self.max_length, least=1, optional=True)

    def of_row(self, row: Row, where: str, *, pair_id: str | int, label: float = 1.0) -> tuple[SAWItem, SAWItem]:
        """Return the (chosen, rejected) samples of a row, with `pair_id`, `role` and `label` in
        their `meta`.

        Raises DataError, naming the row, if it has none of the formats above; RowError for an empty
        response, for two responses with equal tokens, and for a prompt that leaves no room for a
        response.
        """
        label = check_label(label, where)
        chosen, rejected = row.get("chosen"), row.get("rejected")
        samples = self._tokenize(row, {"chosen": chosen, "rejected": rejected}, where)
        meta = {"pair_id": pair_id, "label": label, **_identify_prompt(row)}
        metas = ({**meta, "role": role} for role in ("chosen", "rejected"))
        first, second = (_make_item(sample, meta, as_arrays=self.as_arrays) for sample, meta in zip(samples, metas, strict=True))
        if same_tokens(first, second):
            was_cut = "truncation" in first.meta or "truncation" in second.meta
            within = f" within max_length ({self.max_length})" if was_cut else ""
            message = f"{where}: chosen and rejected are the same{within}; such a pair has no learning signal"
            raise RowError(message, reason="same_responses_when_cut" if was_cut else "same_responses")
        return first, second

    def of_answer(self, row: Row, where: str, *, pair_id: str | int) -> SAWItem:
        """Return the sample of a row with one answer: its role is `chosen` if the row's `label` is
        true, else `rejected`, and its `pair_id` must be its own. Raises as `of_row`."""
        [sample] = self._tokenize(row, {"completion": row.get("completion")}, where)
        role = "chosen" if row.get("label") else "rejected"
        return _make_item(
            sample, {"pair_id": pair_id, "label": 1.0, "role": role, **_identify_prompt(row)}, as_arrays=self.as_arrays
        )

    def _tokenize(self, row: Row, answers: Mapping[str, Any], where: str) -> list[TruncatedTokens]:
        if all(isinstance(answer, str) for answer in answers.values()):
            return self._tokenize_texts(row, answers, where)
        if all(_are_messages(answer) for answer in answers.values()):
            return self._tokenize_conversations(row, list(answers.values()), where)
        kinds = " and ".join(type(answer).__name__ for answer in answers.values())
        raise DataError(f"{where}: {' and '.join(answers)} must both be text or both be lists of messages, not {kinds}")

    def _tokenize_texts(self, row: Row, answers: Mapping[str, str], where: str) -> list[TruncatedTokens]:
        prompt = row.get("prompt")
        if prompt is not None and not isinstance(prompt, str):
            raise DataError(f"{where}: prompt must be text where the responses are, not {type(prompt).__name__}")
        if self.use_chat_template:
            if not prompt:
                raise DataError(f"{where} has no prompt, which use_chat_template needs")
            for name, text in answers.items():
                if not text:
                    raise RowError(f"{where} has an empty {name} response; leave the row out", reason="empty_response")
            question = [{"role": "user", "content": prompt}]
            replies = [[{"role": "assistant", "content": text}] for text in answers.values()]
            return [self._tokenize_conversation(row, question, reply, where) for reply in replies]
        if prompt:
            each = [tokenize_prompt_completion(self.tokenizer, prompt, text, where) for text in answers.values()]
        else:
            ids = [append_eos(self.tokenizer, encode_text(self.tokenizer, text)) for text in answers.values()]
            each = _split_common_prefix(ids)
        return [truncate_left(tokens, self.max_length) for tokens in each]

    def _tokenize_conversations(self, row: Row, answers: list[list[Message]], where: str) -> list[TruncatedTokens]:
        prompt = row.get("prompt")
        if isinstance(prompt, str) and answers[0][0].get("role") == "assistant":
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, list):
            shared = count_common_messages(answers[0], answers[-1])
            prompt, answers = answers[0][:shared], [answer[shared:] for answer in answers]
        return [self._tokenize_conversation(row, prompt, answer, where) for answer in answers]

    def _tokenize_conversation(
        self, row: Row, prompt: Sequence[Message], answer: Sequence[Message], where: str
    ) -> TruncatedTokens:
        prompt = add_system_prompt(prompt, self.system_prompt)
        template_args = read_template_kwargs(row, where)
        tokens = conversation_tokens(self.tokenizer, prompt, answer, where, tools=row.get("tools"), **template_args)
        return truncate_right(tokens, self.max_length, where)


@dataclass(frozen=True)
class TruncatedTokens:
    """Tokens that fit into `max_length`."""

    tokens: ChatTokens
    cut: dict[str, Any]
    """The entries of a sample's `meta` about the truncation; empty if nothing was truncated."""


def conversation_tokens(
    tokenizer: Any,
    prompt: Sequence[Message],
    answer: Sequence[Message],
    where: str,
    *,
    tools: Any = None,
    **template_args: Any,
) -> ChatTokens:
    """Tokenise prompt and answer with the chat template, up to the end token of the last message of
    `answer`. The assistant's tokens in `answer` are the action.

    Example: mask [0, 1, 0], whose last token is a line break of the template, is cut to 3 - 1 = 2
    tokens: [0, 1].
    """
    if not answer or answer[-1].get("role") != "assistant":
        raise DataError(f"{where}: a response must end with an assistant message")
    chat = ChatTokenizer(tokenizer, "all", template_args)
    [tokens] = chat.tokenize([*prompt, *answer], tools=tools, first=len(prompt), where=where)
    end = len(tokens.action_mask) - tokens.action_mask[::-1].index(1)
    return ChatTokens(tokens.input_ids[:end], tokens.action_mask[:end], tokens.images)


def _identify_prompt(row: Row) -> dict[str, str]:
    """For the `meta` of the row's samples: equal for all rows of a prompt, also where their samples
    are cut differently."""
    prompt = row.get("prompt")
    encoded = json.dumps(prompt, sort_keys=True, default=str).encode()
    return {"prompt_digest": hashlib.blake2b(encoded, digest_size=16).hexdigest()} if prompt else {}


def add_system_prompt(prompt: Sequence[Message], system_prompt: str | None) -> list[Message]:
    """Return `prompt` with the system message before it, unless it begins with one."""
    if system_prompt is None or (prompt and prompt[0].get("role") == "system"):
        return list(prompt)
    return [{"role": "system", "content": system_prompt}, *prompt]


def count_common_messages(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Return the length of the common prefix of messages; each conversation keeps at least one
    message after it. Example: 1 for [u, a1] and [u, a2], and also for [u, a1] and [u, a1]."""
    limit = min(len(chosen), len(rejected)) - 1
    return next((index for index in range(limit) if chosen[index] != rejected[index]), limit)


def truncate_left(tokens: ChatTokens, max_length: int | None) -> TruncatedTokens:
    """Keep the last `max_length` tokens: this cuts the start of the prompt first, and the
    completion only if it is too long by itself. Example: [1, 2, 3, 4] with mask [0, 0, 1, 1] cut
    to 3 is [2, 3, 4] with [0, 1, 1]."""
    total, num_actions = len(tokens.input_ids), sum(tokens.action_mask)
    if max_length is None or total <= max_length:
        return TruncatedTokens(tokens, {})
    retained = ChatTokens(tokens.input_ids[-max_length:], tokens.action_mask[-max_length:])
    facts = _truncation_facts(total, max_length, prompt=num_actions < total, completion=num_actions > max_length)
    return TruncatedTokens(retained, facts)


def truncate_right(tokens: ChatTokens, max_length: int | None, where: str) -> TruncatedTokens:
    """Keep the first `max_length` tokens. Raises RowError if none of them belongs to the
    completion. Example: mask [0, 0, 1, 1] has a prompt of 2 tokens and can be cut to 3 tokens,
    but not to 2."""
    total, prompt_length = len(tokens.input_ids), tokens.action_mask.index(1)
    if max_length is None or total <= max_length:
        return TruncatedTokens(tokens, {})
    if prompt_length >= max_length:
        message = (
            f"{where}: its prompt has {prompt_length} tokens and fills max_length ({max_length}); raise max_length or leave the row "
            "out"
        )
        raise RowError(message, reason="prompt_too_long")
    images = cut_spans(tokens.images, 0, end=max_length)
    retained = ChatTokens(tokens.input_ids[:max_length], tokens.action_mask[:max_length], images)
    return TruncatedTokens(retained, _truncation_facts(total, max_length, prompt=False, completion=True))


def _truncation_facts(total: int, retained: int, *, prompt: bool, completion: bool) -> dict[str, Any]:
    return {
        "truncation": {
            "original_len": total,
            "truncated_len": retained,
            "prompt_truncated": prompt,
            "completion_truncated": completion,
        },
        "truncated": True,
        "truncation_reason": "max_length",
        "seq_len_truncated": True,
        "seq_len_original": total,
        "seq_len_retained": retained,
        "seq_len_retained_frac": retained / total,
    }


def _split_common_prefix(both: list[list[int]]) -> list[ChatTokens]:
    """Take the common prefix of the token ids as the prompt; each response keeps at least one token
    after it. Example: [5, 6, 7] and [5, 6, 8, 2] have the masks [0, 0, 1] and [0, 0, 1, 1]."""
    limit = max(0, min(map(len, both)) - 1)
    shared = next((index for index in range(limit) if both[0][index] != both[1][index]), limit)
    return [ChatTokens(ids, [0] * shared + [1] * (len(ids) - shared)) for ids in both]


def _are_messages(value: Any) -> TypeGuard[list[Message]]:
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _make_item(sample: TruncatedTokens, meta: dict[str, Any], *, as_arrays: bool) -> SAWItem:
    ids, mask = sample.tokens.input_ids, sample.tokens.action_mask
    lengths = {"completion_length": sum(mask), "prompt_length": len(mask) - sum(mask)}
    column: Any = (lambda values: np.array(values, dtype=np.int32)) if as_arrays else list
    return SAWItem(
        input_ids=column(ids),
        attention_mask=column([1] * len(ids)),
        action_mask=column(mask),
        weight=1.0,
        meta={**meta, **lengths, **sample.cut},
        images=sample.tokens.images,
    )


SHOWN_FAULTS = 3
Response = str | list[Message]


def create_preference_saw_items(
    prompt: str | list[Message] | None,
    chosen: Response,
    rejected: Response,
    tokenizer: Any,
    *,
    label: float = 1.0,
    pair_id: str | int | None = None,
    max_length: int | None = None,
    use_chat_template: bool = False,
    system_prompt: str | None = None,
) -> tuple[SAWItem, SAWItem]:
    """Return the (chosen, rejected) samples of one pair.

    >>> chosen, rejected = create_preference_saw_items("2+2=", "4", "5", tokenizer, pair_id="sum")

    `label` is the probability that the chosen response is better. Without `pair_id` the pair gets a
    unique id. Raises DataError for an empty response and for two equal responses; see
    `PreferenceItems`.
    """
    pair_maker = PreferenceItems(tokenizer, use_chat_template, system_prompt, max_length)
    name = uuid.uuid4().hex if pair_id is None else pair_id
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    return pair_maker.of_row(row, f"pair {name}", pair_id=name, label=label)


def preference_dataset_to_saw_items(
    dataset: DataSet | Iterable[Row],
    tokenizer: Any,
    *,
    prompt_col: str = "prompt",
    chosen_col: str = "chosen",
    rejected_col: str = "rejected",
    label_col: str | None = None,
    max_length: int | None = None,
    use_chat_template: bool = False,
    system_prompt: str | None = None,
    strict: bool = False,
    left_out: Counter[str] | None = None,
) -> list[SAWItem]:
    """Return the samples of all rows: chosen and rejected of row 0, then of row 1 and so on. The id
    of row i is `pref_i`.

    A row that gives no pair (an empty response, two equal responses, a prompt that fills
    `max_length`) is skipped. A warning has the number of such rows and shows the first ones;
    `left_out` gets the number for each reason (`RowFault`, or `malformed`). Raises DataError if no
    row is left, and with `strict` for the first such row.
    """
    pair_maker = PreferenceItems(tokenizer, use_chat_template, system_prompt, max_length)
    names = {"prompt": prompt_col, "chosen": chosen_col, "rejected": rejected_col}
    source: Iterable[Row] = dataset.rows if isinstance(dataset, DataSet) else dataset
    rows = ({**row, **{name: row.get(column) for name, column in names.items()}} for row in source)
    where = dataset.where if isinstance(dataset, DataSet) else lambda index: f"row {index}"
    return _make_items(pair_maker, rows, where, label_col=label_col, strict=strict, left_out=left_out)


def _make_items(
    pair_maker: PreferenceItems,
    rows: Iterable[Row],
    where: Callable[[int], str],
    *,
    label_col: str | None,
    strict: bool = False,
    strict_labels: bool = False,
    unpaired: bool = False,
    left_out: Counter[str] | None = None,
) -> list[SAWItem]:
    items: list[SAWItem] = []
    faults: list[str] = []
    reasons: Counter[str] = Counter() if left_out is None else left_out
    for index, row in enumerate(rows):
        label: Any = 1.0 if label_col is None else row.get(label_col)
        if strict_labels:
            check_label(label, where(index))
        try:
            if unpaired:
                items.append(pair_maker.of_answer(row, where(index), pair_id=f"pref_{index}"))
            else:
                items.extend(pair_maker.of_row(row, where(index), pair_id=f"pref_{index}", label=label))
        except DataError as error:
            if strict:
                raise
            faults.append(str(error))
            reasons[error.reason if isinstance(error, RowError) else "malformed"] += 1
    if faults:
        report = f"{len(faults)} rows make no pair: {'; '.join(faults[:SHOWN_FAULTS])}"
        if not items:
            raise DataError(f"no row is left: {report}")
        logger.warning("skipped %s%s", report, "; and so on" if len(faults) > SHOWN_FAULTS else "")
    return items


def load_preference_items(
    source: str,
    tokenizer: Any,
    *,
    config: str | None = None,
    split: str = "train",
    columns: Mapping[str, str | Sequence[str]] | None = None,
    label_col: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    max_length: int | None = None,
    use_chat_template: bool = False,
    system_prompt: str | None = None,
    unpaired: bool = False,
    left_out: Counter[str] | None = None,
    image_folder: Path | None = None,
) -> list[SAWItem]:
    """Return the samples of a JSONL, JSON, CSV or parquet file, of a folder, or of a data set id
    for the `datasets` library. Rows are in one of TRL's preference formats, or have two scored
    responses as in SHP. With `unpaired`, for KTO, they may have a `completion` and a `label` that
    is true or false, which `label_col` renames.

    `columns` maps names to columns (`{"chosen": "better"}`); `config` and `split` are for ids and
    folders. At most `limit` rows are read; they are drawn at random with `seed`, since data sets
    are often sorted, and keep their order. Paths of images are relative to `image_folder`, or to
    the folder of the file.

    Raises DataError, naming file and row, for a row of another format and for a label that is not a
    probability. A row that gives no pair is skipped with a warning and counted in `left_out`
    (`preference_dataset_to_saw_items`), and so is a row with two equal scores (`equal_scores`).
    """
    other_kind: Kind | None = "unpaired_preference" if unpaired else None
    if unpaired and label_col is not None:
        columns = {**(columns or {}), "label": label_col}
    data = load_data(
        source,
        kind="preference",
        other_kind=other_kind,
        columns=columns,
        config=config,
        split=split,
        limit=limit,
        seed=seed,
    )
    pair_maker = PreferenceItems(tokenizer, use_chat_template, system_prompt, max_length, as_arrays=True)
    rows = Changed(data.rows, lambda index, row: intern_row(row, image_folder or data.table.folder_of(index), data.where(index)))
    if left_out is not None and data.table.equal_scores:
        left_out["equal_scores"] += len(data.table.equal_scores)
    if data.kind == other_kind:
        return _make_items(pair_maker, rows, data.where, label_col=None, unpaired=True, left_out=left_out)
    return _make_items(pair_maker, rows, data.where, label_col=label_col, strict_labels=True, left_out=left_out)


def shuffle_preference_pairs(items: Sequence[SAWItem], seed: int | None = None) -> list[SAWItem]:
    """Return the pairs in a random order that depends on the seed. The samples of a pair become
    neighbours and keep their order.

    Example: pairs a b a b shuffled to the order (b, a) are b b a a.
    """
    by_pair: dict[Any, list[SAWItem]] = {}
    for row, item in enumerate(items):
        by_pair.setdefault(meta_value(item, row, "pair_id"), []).append(item)
    pairs = list(by_pair.values())
    return [item for index in np.random.default_rng(seed).permutation(len(pairs)) for item in pairs[index]]


PREFERENCE_KEYS = ("pair_id", "role", "label")
"""The keys that every preference sample has in its `meta`."""


def check_label(label: Any, where: str) -> float:
    """Return the label as a float. Raises DataError, naming `where`, unless it is a number in
    [0, 1]."""
    hint = "it is the probability that the chosen response is better"
    check_value(f"the label of {where}", label, hint, error=DataError, least=0, most=1)
    return float(label)


def meta_value(item: SAWItem, row: int, key: str) -> Any:
    """Return `item.meta[key]`. Raises DataKeyError, naming sample `row`, if the key is missing."""
    if key not in item.meta:
        raise DataKeyError(f"sample {row} has no {key!r} in its meta ({list(item.meta)}); use create_preference_saw_items")
    return item.meta[key]


def same_tokens(first: SAWItem, second: SAWItem) -> bool:
    """Whether two samples have the same token ids."""
    return len(first.input_ids) == len(second.input_ids) and bool(np.array_equal(first.input_ids, second.input_ids))
