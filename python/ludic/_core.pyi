"""The compiled batching core: truncates, plans, collates and reduces. Shapes: N samples, S tokens
in total, B rows, T columns."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Arena",
    "Plan",
    "RankPlan",
    "SampleTable",
    "__version__",
    "apply_delta",
    "encode_delta",
    "gae",
    "group_pairs",
    "lengths_of",
    "plan_greedy",
    "plan_optimal",
    "plan_padding_free",
    "plan_pairs",
    "plan_ranks",
    "read_floats",
    "read_ids",
    "reduce_column",
    "reduce_records",
    "relay_program",
]

_T = TypeVar("_T")

__version__: str

@final
class SampleTable:
    """A macro-batch as columns. Immutable: `truncate` and `select` return views that share the
    columns."""

    @staticmethod
    def from_items(items: Sequence[Any]) -> SampleTable:
        """A table of `SAWItem`s. Their sequences may be lists, tuples, ranges, numpy arrays, bytes,
        other buffers, or objects with `__array__`, such as tensors on the CPU.

        Arrays that are not contiguous or not aligned are copied. Raises `DataTypeError` for foreign
        byte order and for any other type. A list as `attention_mask` may hold any values equal to 1
        (`True`, `1.0`) if all of them are; otherwise it must hold integers or booleans, as must
        every other integer field. Raises `DataError`, which names the sample, the value and the
        rule, for: samples without tokens; ids outside 0..2**31 - 1; masks of another length or with
        values other than 0 and 1; log-probs that are not finite, not one for each action, or not
        on all samples; weights that are not finite. At most 2**20 items; columns have no such
        limit.
        """

    @staticmethod
    def from_columns(
        input_ids: NDArray[np.integer[Any]] | Sequence[int],
        action_mask: NDArray[np.integer[Any] | np.bool] | Sequence[int],
        offsets: NDArray[np.integer[Any]] | Sequence[int],
        weights: NDArray[np.floating[Any]] | Sequence[float] | None = None,
        actor_logps: NDArray[np.floating[Any]] | Sequence[float] | None = None,
        attention_mask: NDArray[np.integer[Any] | np.bool] | Sequence[int] | None = None,
    ) -> SampleTable:
        """A table of columns of S tokens. `offsets` [N + 1] must not decrease: [0, 2, 5] are a
        sample of 2 tokens and one of 3. Weights default to 1. `actor_logps` [S] is aligned with
        the tokens; values at tokens that are not actions are ignored."""

    @staticmethod
    def from_bytes(buffer: bytes | bytearray | memoryview | NDArray[np.uint8]) -> SampleTable:
        """The table that `to_bytes` wrote. It shares no memory with `buffer`.

        Everything is checked, as for columns, so the bytes may come from anywhere; what is
        allocated is bounded by their number. Raises `DataError`, which names what is wrong, for
        bytes that are no table, are damaged, incomplete or of another version of the layout."""
    def to_bytes(self) -> bytes:
        """The samples as they are now (truncated, selected, chained), in the layout of safetensors:
        about 9 bytes a token with log-probs, 5 without.

        Readers of safetensors find the arguments of `from_columns` by their names: `input_ids` i32,
        `action_mask` u8 and, where present, `actor_logps` f32 and `attention_mask` u8 [S];
        `offsets` i64 [N + 1]; `weights` f32 [N]. A truncated table also has `original_lengths`, a
        chained one `chains` and `links`, i32 [N]. A token column `credit`
        is `token.credit`, f32 [S]. `__metadata__` has `format` ("ludic.sample_table") and
        `version` ("1")."""
    def __len__(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def has_actor_logps(self) -> bool: ...
    @property
    def has_partial_attention(self) -> bool:
        """Whether a sample has a 0 in its attention mask, also one that this view leaves out."""
    @property
    def lengths(self) -> NDArray[np.int32]:
        """[N] tokens of each sample, after truncation."""
    @property
    def original_lengths(self) -> NDArray[np.int32]:
        """[N] tokens of each sample as ingested."""
    @property
    def action_counts(self) -> NDArray[np.int32]:
        """[N] action tokens of each sample, after truncation."""
    @property
    def target_counts(self) -> NDArray[np.int32]:
        """[N] action tokens at positions >= 1, which are those that a causal model predicts."""
    @property
    def weights(self) -> NDArray[np.float32]:
        """[N] credit of each sample."""
    @property
    def chains(self) -> NDArray[np.int32]:
        """[N] the chain of each sample, -1 for a sample in no chain."""
    def chained(self) -> SampleTable:
        """The same samples, with neighbours that continue each other chained: the ids of a sample
        begin with all ids of the one before it, and none of those tokens is one of its actions.

        In a collation, neighbours of one chain share a row: B below counts shared rows once.
        `turns` [N, 3] i64 has the row of each sample, and where its own tokens begin and end in
        that row. Ids [5, 6] and [5, 6, 7], chained, are one row [5, 6, 7] with the turns
        [[0, 0, 2], [0, 2, 3]]. `weight` and `old_logp_action` have one value for each sample. A
        new call replaces the chains of an earlier one."""
    def with_weights(self, weights: NDArray[np.floating[Any]] | Sequence[float]) -> SampleTable:
        """The same samples with other weights [N], rounded to float32; truncation and chains stay.
        Raises `DataError` for another number of weights, and for one that is not finite, which it
        names."""
    @property
    def token_columns(self) -> tuple[str, ...]:
        """The names of the token columns, in alphabetical order."""
    def token_column(self, name: str) -> NDArray[np.float32]:
        """[S] values of a token column, one for each token of each sample; 0 where the token is not
        an action. Raises `KeyError` if there is none of this name."""
    def with_token_column(self, name: str, values: NDArray[np.floating[Any]] | Sequence[float]) -> SampleTable:
        """The same samples with a column of floats, one for each action token of each sample, in
        order. Views keep it, `to_bytes` writes it, and every collation has it as f32 in the shape
        of `input_ids`, with 0 where the token is not an action.

        Action masks [0, 1, 1] and [0, 1] with the values [0.5, 1, -1] are [[0, 0.5, 1], [0, -1,
        0]]. At most 16 columns. Raises `DataError` for another number of values, for one that is
        not finite in float32, for a name that is in use or has other characters than letters,
        digits and _, and for a table whose samples were selected in another order."""
    def truncate(self, max_seq_len: int) -> SampleTable:
        """The same samples, cut on the right to at most `max_seq_len` tokens. No token is
        copied."""
    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> SampleTable:
        """The samples at `indices`, in that order. An index may occur twice. No token is copied.

        Indices must be whole numbers, here and in collations. A boolean mask is refused, because
        as numbers it would mean samples 0 and 1: use `np.flatnonzero(mask)`."""
    def collate(
        self, indices: Sequence[int] | NDArray[np.int64], pad_token_id: int, arena: Arena | None = None
    ) -> dict[str, NDArray[Any]]:
        """Right-padded `input_ids` i64, `attention_mask` i64, `action_mask` f32 [B, T], `weight`
        f32 [B]; with actor log-probs also `actor_logps` f32 [B, T] and `old_logp_action` f32
        [B]."""
    def collate_padding_free(self, indices: Sequence[int] | NDArray[np.int64], arena: Arena | None = None) -> dict[str, Any]:
        """`input_ids` i64, `position_ids` i64, `action_mask` f32 [1, S], `cu_seqlens` i32 [B +
        1], `max_seqlen` (an `int`: the length of the longest row, for variable-length
        attention), `weight` f32 [B]; with actor log-probs also `actor_logps` f32 [1, S] and
        `old_logp_action` f32 [B]. A sample with a 0 in its attention mask is refused."""
    def plan_trees(
        self,
        indices: Sequence[int] | NDArray[np.int64],
        micro_token_budget: int,
        min_shared: int = 1,
        paired: bool = False,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """Orders samples so that those with a common prefix are neighbours, and divides them into
        *lines* of at most `micro_token_budget` tokens, in which each common prefix of at least
        `min_shared` tokens counts once. Returns `order` i64 [N], the indices; `shared` i64 [N], how
        many tokens each sample of `order` shares with the one before it; `bounds` i64 [L + 1],
        where each line begins in `order`; `tokens` i32 [L], what each line computes.

        The order is lexicographic by tokens, from the largest down. Ids [1, 2, 5] and [1, 2, 3, 4]
        are one line of 5 tokens, in which the second shares 2. O(n log n) comparisons of ids.

        `paired`: indices 0 and 1, 2 and 3 and so on are pairs, which stay in one line; the samples
        of a line are ordered as above, and a pair whose samples share nothing is two trees of one
        line. Raises `BudgetError` if two samples as long as the longest do not fit."""
    def collate_trees(
        self,
        indices: Sequence[int] | NDArray[np.int64],
        shared: Sequence[int] | NDArray[np.int64],
        arena: Arena | None = None,
    ) -> dict[str, NDArray[Any]]:
        """The prefix trees of samples, each of which shares its first `shared` [N] tokens with the
        one before it: `input_ids` and `position_ids` i64 [1, U] have each token once, in the order
        in which samples add them, and `places` i64 [S] has the index of each token of each sample
        in them. Raises `ConfigError` if samples do not have that many tokens in common."""
    def collate_compact(
        self, indices: Sequence[int] | NDArray[np.int64], pad_token_id: int, arena: Arena | None = None
    ) -> dict[str, NDArray[Any]]:
        """Nine bytes per token: `input_ids` i32, `action_mask` u8 [B, T], `lengths` i32 [B],
        `weight` f32 [B]; with actor log-probs also `actor_logps` f32 [B, T] and
        `old_logp_action` f32 [B]. A sample with a 0 in its attention mask is refused."""

@final
class Arena:
    """Output buffers that are reused in turn, from 1 to 1024 slots, for one thread at a time. An
    array is overwritten `slots` collations after it was returned: copy it if you need it longer.

    Nothing in `ludic` uses it yet; it is for data-parallel training."""

    def __new__(cls, slots: int = 2) -> Arena: ...

@final
class Plan:
    """Micro-batches as lists of sample indices. Every index occurs once; none is empty."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> NDArray[np.int64]:
        """[B] the samples of one micro-batch. A negative `index` counts from the end. For a slice,
        use `list(plan)`."""
    @property
    def indices(self) -> NDArray[np.int64]:
        """[N] sample indices, micro-batch after micro-batch."""
    @property
    def offsets(self) -> NDArray[np.int64]:
        """[K + 1] where each micro-batch begins in `indices`, and the number of samples:
        [[3, 0], [1]] has the indices [3, 0, 1] and the offsets [0, 2, 3]."""
    @property
    def num_tokens(self) -> int:
        """The number of real tokens."""
    @property
    def padded_tokens(self) -> int:
        """The number of tokens that the model computes: rows times longest for each padded
        micro-batch, the real tokens for padding-free plans."""
    def split(self, items: list[_T] | tuple[_T, ...]) -> list[list[_T]]:
        """The items of each micro-batch. `items` must have one item for each planned sample."""
    def to_lists(self) -> list[list[int]]: ...

def read_ids(values: Any) -> NDArray[np.int32]:
    """[N] token ids of a sequence, as `SampleTable.from_items` reads it. Raises DataTypeError for
    what is no sequence of whole numbers, DataError for an id that 32 bits cannot hold."""

def read_floats(values: Any) -> NDArray[np.float32] | NDArray[np.float64]:
    """[N] log-probabilities of a sequence: float32 if that changes none of them, else float64, so
    that their values are those that were given. Raises DataTypeError for what is no sequence of
    numbers."""

def lengths_of(sequences: list[Any] | tuple[Any, ...]) -> NDArray[np.int32]:
    """[N] `len` of each sequence, for a plan without a table. Raises `DataTypeError` for an object
    without `len`, `DataError` for a length of 2**31 or more. Nothing in `ludic` uses it yet; it is
    for data-parallel training."""

def plan_greedy(lengths: NDArray[np.int32], micro_token_budget: int) -> Plan:
    """Plans micro-batches in ascending order of length (a stable sort). A new one begins when
    `longest * rows` would exceed the budget. O(n)."""

def plan_optimal(lengths: NDArray[np.int32], micro_token_budget: int, overhead_tokens: int = 256) -> Plan:
    """Plans micro-batches with the exact minimum of `padded_tokens + overhead_tokens *
    micro_batches` under the same rule. O(n log n)."""

def plan_padding_free(lengths: NDArray[np.int32], micro_token_budget: int) -> Plan:
    """Plans micro-batches without padding by best fit decreasing: the sum of the lengths of each is
    at most the budget. Where that takes more micro-batches than the tokens need, samples are
    exchanged until one is empty, if a bounded search finds how: the number is then
    `ceil(tokens / budget)`. It is at most 11/9 of the fewest possible plus 6/9: the bound of Dosa
    (2007) for first fit decreasing, which a test checks on small cases."""

def plan_pairs(
    lengths: NDArray[np.int32], pairs: NDArray[np.int64], micro_token_budget: int, overhead_tokens: int | None = None
) -> Plan:
    """Plans micro-batches that keep pairs whole: `2 * longest * pairs <= budget`. `pairs` [P, 2]
    are sample indices (chosen, rejected), which are neighbours in the plan. Greedy without
    `overhead_tokens`, optimal with it."""

def group_pairs(
    pair_ids: Sequence[str | int], roles: Sequence[str], drop_incomplete: bool = True
) -> tuple[NDArray[np.int64], list[str | int]]:
    """Groups samples by pair id. Returns [P, 2] indices (chosen, rejected) in order of first
    appearance, and the ids of incomplete pairs.

    Ids are strings or 64-bit integers: 1 and "1" are different pairs. Raises `DataTypeError` for
    booleans, because in Python `True == 1`, and for strings with a lone surrogate, which have no
    UTF-8 encoding."""

def plan_ranks(
    lengths: NDArray[np.int32],
    micro_token_budget: int,
    world_size: int,
    packing: Literal["greedy", "optimal", "padding_free"] = "optimal",
    overhead_tokens: int = 256,
    linear: int = 24576,
    quadratic: int = 1,
) -> list[RankPlan]:
    """Plans the same number of micro-batches for each rank.

    A row of n tokens costs `linear * n + quadratic * n**2`; a padded micro-batch costs its number
    of rows times the price of its longest row. Because ranks wait for each other, `optimal`
    searches for the least *lockstep* cost: the sum over steps of the costliest rank, plus
    `overhead_tokens * linear` per step, whatever the number of ranks. It compares two searches:
    plans with the fewest padded tokens for a multiple of the ranks, and micro-batches made step by
    step. It prefers the former if they cost the same, and above 2**15 samples uses only the former.
    `greedy` is `plan_greedy` with the costliest micro-batches halved until their number is a
    multiple of the ranks. `padding_free` has the fewest steps that best fit finds. None exceeds the
    budget. The heaviest step comes first. Equal lengths are ordered by index, so that the same
    lengths give the same plan on every machine: each rank makes the plan of all and takes its part.
    """

@final
class RankPlan:
    """The micro-batches of one rank. An empty one stands for a row of weight zero, which keeps the
    ranks in step."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> NDArray[np.int64]: ...
    @property
    def cost(self) -> int:
        """The summed cost of its samples, in the units of `linear` and `quadratic`."""
    @property
    def padded_tokens(self) -> int: ...

def gae(
    rewards: NDArray[np.float64],
    values: NDArray[np.float64],
    lengths: NDArray[np.int64],
    last_values: NDArray[np.float64],
    *,
    gamma: float,
    lam: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16). Returns the advantages and the
    returns of S tokens, [S] each; the returns are the targets of the critic.

    `rewards` [S] after each token and `values` [S] before it belong to episodes that lie one after
    another: `lengths` [E] tokens each, of all turns. `last_values` [E] are the values after the
    last token: 0 for an episode that ended, an estimate for one that was cut off. Raises DataError
    for columns of other lengths, DataTypeError for arrays of another kind."""

def encode_delta(base: NDArray[np.uint8], new: NDArray[np.uint8], width: int) -> NDArray[np.uint8] | None:
    """The change of a tensor from `base` to `new`, [bytes] each, whose entries have `width` bytes
    (1, 2, 4 or 8); None if no bit differs.

    Entries are compared as bits. The delta has the changed entries (gaps of their indices, and old
    XOR new, as varints), or the XOR of all entries, whichever is smaller; it is at most one byte
    longer than the tensor. Both arrays are read in place, with the GIL released if they are large:
    no other thread may write to them meanwhile. Raises DataError for other sizes or widths,
    DataTypeError for arrays of another kind.
    """

def apply_delta(target: NDArray[np.uint8], delta: NDArray[np.uint8], width: int) -> None:
    """Apply a delta from `encode_delta` to its base, in place. Applied again, it restores the base.

    Raises DataError, and changes nothing, if the bytes are not a delta of a tensor of this size and
    width. They may be from anybody, but have no digest: one with other changes is applied.
    """

def reduce_records(
    records: Sequence[Mapping[str, Any]],
    reducers: Sequence[tuple[str, str, str | None]],
    num_samples: int,
    num_rollouts: int,
) -> list[float]:
    """Applies all reducers in one pass. A reducer is (kind: mean | sum | count_true, dotted path,
    None | samples | rollouts).

    Absent keys, None and paths through something that is not a mapping are skipped. Booleans count
    as 0 and 1. A denominator divides the sum once; for `mean` it replaces the number of values.
    `count_true` by rollouts counts each `rollout_id` once, however many of its steps are true, so
    that a rate never exceeds 1. Without values, or with a denominator of 0, the result is 0. NaN is
    a value: it makes a mean and a sum NaN. Sums are compensated (Neumaier 1974), so that small
    values are not lost beside large ones.
    """

def reduce_column(kind: str, values: NDArray[np.float64]) -> float:
    """The same for one column. Every value is present: remove absent ones beforehand."""

def relay_program() -> bytes:
    """The executable of crates/ludic-relay, the first process of a sandbox; empty if this is not
    Linux."""
