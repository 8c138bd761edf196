"""The compiled batching core: truncate, plan, collate and reduce. Shapes: N samples, S tokens in
all, B rows, T columns."""

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
    "group_pairs",
    "lengths_of",
    "plan_greedy",
    "plan_optimal",
    "plan_padding_free",
    "plan_pairs",
    "plan_ranks",
    "reduce_column",
    "reduce_records",
]

_T = TypeVar("_T")

__version__: str

@final
class SampleTable:
    """A macro-batch as columns. Immutable: `truncate` and `select` return views that share the
    columns."""

    @staticmethod
    def from_items(items: Sequence[Any]) -> SampleTable:
        """Ingest `SAWItem`s once. Their sequences may be lists, tuples, ranges, numpy arrays,
        bytes, other buffers, and whatever has `__array__`, such as tensors on the CPU.

        An array that is not contiguous or not aligned is copied; foreign byte order and any other
        type raise `DataTypeError`. A list as `attention_mask` may hold whatever equals 1 (`True`,
        `1.0`) if all of it does: the list counts its ones by itself. One with a 0 in it, and every
        other field of whole numbers, holds whole numbers or truths. Samples without tokens, ids
        outside 0..2**31 - 1, masks that are ragged or hold anything but 0 and 1, log-probs that are
        not finite, not one for each action or not on all samples, weights that are not finite:
        `DataError`, naming the sample, the value and the rule. At most 2**20 items; columns have no
        such limit.
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
        """Columns of S tokens; `offsets` [N + 1], which rise; weights are 1 when absent.
        `actor_logps` [S] is aligned with the tokens: what stands off the actions is not read."""

    def __len__(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def has_actor_logps(self) -> bool: ...
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
        """[N] action tokens at positions >= 1: those that a causal model predicts."""
    @property
    def weights(self) -> NDArray[np.float32]:
        """[N] credit of each sample."""
    @property
    def chains(self) -> NDArray[np.int32]:
        """[N] the chain of each sample, -1 outside any."""
    def chained(self) -> SampleTable:
        """The same samples, of which neighbours that continue each other are chained: the ids of
        one begin with all ids of the one before, and none of those is one of its actions. In a
        collation, neighbours of one chain share a line of the B that the shapes below speak of,
        and `turns` [N, 3] i64 says of each of the N samples its line, and where in it its own
        tokens begin and end. `weight` and `old_logp_action` have one value a sample. Chains that
        an earlier call made are forgotten."""
    def truncate(self, max_seq_len: int) -> SampleTable:
        """The same samples cut on the right to at most `max_seq_len` tokens. A change of length,
        no copy."""
    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> SampleTable:
        """The samples at `indices`, in that order; an index may come twice. No token is copied.

        Indices are whole numbers, here and in collations: a mask is refused, since as numbers it
        would mean samples 0 and 1. Take `np.flatnonzero(mask)`."""
    def collate(
        self, indices: Sequence[int] | NDArray[np.int64], pad_token_id: int, arena: Arena | None = None
    ) -> dict[str, NDArray[Any]]:
        """Right-padded `input_ids` i64, `attention_mask` i64, `action_mask` f32 [B, T], `weight`
        f32 [B]; with actor log-probs also `actor_logps` f32 [B, T] and `old_logp_action` f32
        [B]."""
    def collate_padding_free(self, indices: Sequence[int] | NDArray[np.int64], arena: Arena | None = None) -> dict[str, Any]:
        """`input_ids` i64, `position_ids` i64, `action_mask` f32 [1, S], `cu_seqlens` i32 [B +
        1], `max_seqlen` (an `int`: the longest line, as attention of variable lengths asks for
        it), `weight` f32 [B]; with actor log-probs also `actor_logps` f32 [1, S] and
        `old_logp_action` f32 [B]. A sample with a 0 in its attention mask is refused."""
    def collate_compact(
        self, indices: Sequence[int] | NDArray[np.int64], pad_token_id: int, arena: Arena | None = None
    ) -> dict[str, NDArray[Any]]:
        """Nine bytes a token: `input_ids` i32, `action_mask` u8 [B, T], `lengths` i32 [B],
        `weight` f32 [B]; with actor log-probs also `actor_logps` f32 [B, T] and
        `old_logp_action` f32 [B]. A sample with a 0 in its attention mask is refused."""

@final
class Arena:
    """Output buffers used again in turn, by one thread at a time; from 1 to 1024 slots. An array
    handed out is overwritten `slots` collations later: copy it, or be done with it, by then."""

    def __new__(cls, slots: int = 2) -> Arena: ...

@final
class Plan:
    """Micro-batches as lists of sample indices: every index once, none empty."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> NDArray[np.int64]:
        """[B] the samples of one micro-batch, from the end where `index` is negative. No slices:
        those of `list(plan)`."""
    @property
    def indices(self) -> NDArray[np.int64]:
        """[N] sample indices, micro-batch after micro-batch."""
    @property
    def offsets(self) -> NDArray[np.int64]:
        """[K + 1] where each micro-batch begins in `indices`."""
    @property
    def num_tokens(self) -> int:
        """Real tokens."""
    @property
    def padded_tokens(self) -> int:
        """Tokens computed: rows times longest for padded plans, the real tokens for padding-free
        ones."""
    def split(self, items: list[_T] | tuple[_T, ...]) -> list[list[_T]]:
        """The items at the indices of each micro-batch, where `items` has one for each sample
        planned."""
    def to_lists(self) -> list[list[int]]: ...

def lengths_of(sequences: list[Any] | tuple[Any, ...]) -> NDArray[np.int32]:
    """[N] `len` of each sequence. `DataTypeError` for one that has none, `DataError` for one of
    2**31 or more."""

def plan_greedy(lengths: NDArray[np.int32], micro_token_budget: int) -> Plan:
    """Ascending stable sort; a new micro-batch when `longest * rows` would exceed the budget.
    O(n)."""

def plan_optimal(lengths: NDArray[np.int32], micro_token_budget: int, overhead_tokens: int = 256) -> Plan:
    """The exact minimum of `padded_tokens + overhead_tokens * micro_batches` under the same
    rule. O(n log n)."""

def plan_padding_free(lengths: NDArray[np.int32], micro_token_budget: int) -> Plan:
    """Best fit decreasing: the sum of lengths of each micro-batch is at most the budget. At most
    11/9 of the fewest micro-batches plus 6/9: the bound of Dosa (2007) for first fit decreasing,
    held here by a test on small cases."""

def plan_pairs(
    lengths: NDArray[np.int32], pairs: NDArray[np.int64], micro_token_budget: int, overhead_tokens: int | None = None
) -> Plan:
    """`pairs` [P, 2] are sample indices (chosen, rejected); `2 * longest * pairs <= budget`; chosen
    and rejected are neighbours.
    Greedy without `overhead_tokens`, optimal with it."""

def group_pairs(
    pair_ids: Sequence[str | int], roles: Sequence[str], drop_incomplete: bool = True
) -> tuple[NDArray[np.int64], list[str | int]]:
    """[P, 2] indices (chosen, rejected) in order of first appearance, and the ids of incomplete
    pairs.

    Ids are texts or whole numbers of 64 bits: 1 and "1" are two pairs. Truths are refused, since
    Python takes `True` for 1; so are texts with half a surrogate pair, which have no UTF-8.
    `DataTypeError` for both."""

def plan_ranks(
    lengths: NDArray[np.int32],
    micro_token_budget: int,
    world_size: int,
    packing: Literal["greedy", "optimal", "padding_free"] = "optimal",
    overhead_tokens: int = 256,
    linear: int = 24576,
    quadratic: int = 1,
) -> list[RankPlan]:
    """One plan for all ranks: the same number of micro-batches for each.

    A row of n tokens costs `linear * n + quadratic * n**2`, a padded micro-batch its rows at the
    price of its longest. Ranks wait for each other, so that `optimal` looks for the least
    *lockstep*: the sum over steps of the costliest rank, plus `overhead_tokens * linear` a step,
    however many ranks there are. It takes the better of two searches (plans with the fewest padded
    tokens for a multiple of the ranks; micro-batches made step by step), and of equal plans the
    former; above 2**15 samples the first alone. `greedy` is `plan_greedy` with the costliest
    micro-batches halved up to a multiple of the ranks, `padding_free` the fewest steps that best
    fit finds. The budget is hard in all of them. The heaviest step comes first; equal lengths go by
    index, so that the same lengths give the same plan on every machine.
    """

@final
class RankPlan:
    """One rank's micro-batches. An empty one stands for a row of weight zero that keeps the
    ranks in step."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> NDArray[np.int64]: ...
    @property
    def cost(self) -> int:
        """Sum of the cost of its samples, in the units of `linear` and `quadratic`."""
    @property
    def padded_tokens(self) -> int: ...

def reduce_records(
    records: Sequence[Mapping[str, Any]],
    reducers: Sequence[tuple[str, str, str | None]],
    num_samples: int,
    num_rollouts: int,
) -> list[float]:
    """All reducers in one pass. A reducer is (kind: mean | sum | count_true, dotted path, None |
    samples | rollouts).

    An absent key and None are skipped, as is a path through something that is no mapping. Booleans
    count as 0 and 1. A denominator divides the sum once, also for `mean`, whose own count it
    replaces. `count_true` by rollouts counts a `rollout_id` once, however many of its steps are
    true, so that a rate never exceeds 1. Without values, or with a denominator of 0, the result is
    0. NaN is a value: it makes a mean and a sum NaN. Sums are compensated (Neumaier 1974): they
    keep what is small beside the rest.
    """

def reduce_column(kind: str, values: NDArray[np.float64]) -> float:
    """The same over one column, in which every value is present: what is absent is left out
    beforehand."""
