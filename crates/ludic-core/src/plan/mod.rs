//! Plans micro-batches from lengths. Padded plans follow one rule: `longest * rows <=
//! micro_token_budget`.
//!
//! Lengths must not be negative; 0 is allowed. A budget of `i64::MAX` is no limit. The same lengths
//! give the same plan on every machine: there is one thread, no hash order, and ties are broken by
//! index.
//!
//! ```
//! use ludic_core::plan::{greedy, optimal, padding_free};
//!
//! let lengths = [100, 150, 200, 300, 400];
//! // 3 * 200 = 600 fits 1024, 4 * 300 = 1200 does not; 2 * 400 = 800 fits.
//! let plan = greedy(&lengths, 1024)?;
//! assert_eq!(plan.iter().collect::<Vec<_>>(), [&[0, 1, 2][..], &[3, 4]]);
//! assert_eq!((plan.num_tokens(), plan.padded_tokens()), (1150, 1400));
//! // Without overhead, micro-batches of one sample each avoid all padding.
//! assert_eq!(optimal(&lengths, 1024, 0)?.padded_tokens(), 1150);
//! // With an overhead of 256 tokens, two with 250 tokens of padding are cheaper than three.
//! assert_eq!(optimal(&lengths, 1024, 256)?, plan);
//! // Without padding: 400 + 300 + 200 + 100 = 1000 fits, and 150 more would not.
//! let packed = padding_free(&lengths, 1024)?;
//! assert_eq!(packed.iter().collect::<Vec<_>>(), [&[4, 3, 2, 0][..], &[1]]);
//! # Ok::<(), ludic_core::CoreError>(())
//! ```

mod greedy;
mod optimal;
mod padding_free;
mod sorted;
mod surplus;

pub use greedy::greedy;
pub use optimal::optimal;
pub use padding_free::padding_free;

pub(crate) use greedy::find_offsets as greedy_offsets;
pub(crate) use optimal::{find_offsets as optimal_offsets, find_offsets_for_count as optimal_offsets_for_count};
pub(crate) use sorted::SortedLengths;

use crate::CoreError;

/// Micro-batches as lists of sample indices. Every index occurs once; no micro-batch is empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    indices: Vec<u32>,
    offsets: Vec<u32>,
    num_tokens: u64,
    padded_tokens: u64,
}

impl Plan {
    /// A right-padded plan. A micro-batch computes its number of rows times its longest sample.
    pub(crate) fn padded(lengths: &[i32], indices: Vec<u32>, offsets: Vec<u32>) -> Self {
        let length = |&index: &u32| lengths[index as usize] as u64;
        let cost = |rows: &[u32]| rows.len() as u64 * rows.iter().map(length).max().unwrap_or(0);
        let num_tokens = indices.iter().map(length).sum();
        let padded_tokens = ranges(&offsets).map(|range| cost(&indices[range])).sum();
        Self { indices, offsets, num_tokens, padded_tokens }
    }

    /// A right-padded plan whose micro-batches are ranges of the sorted order. The last row of each
    /// is its longest.
    pub(crate) fn contiguous(lengths: &[i32], sorted: SortedLengths, offsets: Vec<u32>) -> Self {
        let longest = |end: usize| lengths[sorted.order[end - 1] as usize] as u64;
        let padded_tokens = ranges(&offsets).map(|range| range.len() as u64 * longest(range.end)).sum();
        Self { indices: sorted.order, offsets, num_tokens: sorted.num_tokens, padded_tokens }
    }

    /// A padding-free plan. It computes only the real tokens.
    pub(crate) fn packed(indices: Vec<u32>, offsets: Vec<u32>, num_tokens: u64) -> Self {
        Self { indices, offsets, num_tokens, padded_tokens: num_tokens }
    }

    /// The number of micro-batches.
    pub fn len(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Whether there is no micro-batch. Only a plan of no samples has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The sample indices, micro-batch after micro-batch.
    pub fn indices(&self) -> &[u32] {
        &self.indices
    }

    /// Where each micro-batch begins in `indices`, then the number of samples. The micro-batches
    /// [3, 0] and [1] have the indices [3, 0, 1] and the offsets [0, 2, 3].
    pub fn offsets(&self) -> &[u32] {
        &self.offsets
    }

    /// The number of real tokens.
    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
    }

    /// The number of tokens that the model computes: rows times longest for each padded
    /// micro-batch, the real tokens for padding-free plans.
    pub fn padded_tokens(&self) -> u64 {
        self.padded_tokens
    }

    /// The samples of one micro-batch, or `None` past the last.
    pub fn get(&self, micro_batch: usize) -> Option<&[u32]> {
        let end = *self.offsets.get(micro_batch.checked_add(1)?)?;
        Some(&self.indices[self.offsets[micro_batch] as usize..end as usize])
    }

    /// The samples of each micro-batch in turn.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u32]> {
        self.offsets.windows(2).map(|pair| &self.indices[pair[0] as usize..pair[1] as usize])
    }
}

/// The range of each micro-batch: the offsets [0, 2, 5] give 0..2 and 2..5.
pub(crate) fn ranges(offsets: &[u32]) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
    offsets.windows(2).map(|pair| pair[0] as usize..pair[1] as usize)
}

/// The offsets of `count` micro-batches from pairs (micro-batch, number of rows) in any order. The
/// pairs (0, 1), (1, 3) and (0, 1) give [0, 2, 5].
pub(crate) fn accumulate_offsets(count: usize, rows: impl Iterator<Item = (u32, u32)>) -> Vec<u32> {
    let mut offsets = vec![0u32; count + 1];
    for (micro_batch, rows) in rows {
        offsets[micro_batch as usize + 1] += rows;
    }
    for micro_batch in 1..offsets.len() {
        offsets[micro_batch] += offsets[micro_batch - 1];
    }
    offsets
}

/// The budget, if it is positive and at least the longest sample.
pub(crate) fn check_budget(budget: i64, longest: u32) -> Result<u64, CoreError> {
    if budget <= 0 {
        return Err(CoreError::BudgetNotPositive { budget });
    }
    if budget < i64::from(longest) {
        return Err(CoreError::BudgetTooSmall { budget: budget as u64, longest: u64::from(longest) });
    }
    Ok(budget as u64)
}

/// The overhead of a micro-batch in tokens, if it is not negative.
pub(crate) fn check_overhead(overhead_tokens: i64) -> Result<u64, CoreError> {
    u64::try_from(overhead_tokens)
        .map_err(|_| CoreError::NegativeSetting { name: "overhead_tokens", value: overhead_tokens })
}
