//! One plan for all ranks: each rank gets the same number of micro-batches, and the ranks wait for
//! each other as little as possible.
//!
//! The planner minimises the lockstep cost: the sum over steps of the costliest rank's micro-batch,
//! plus a fixed overhead for each *step* of `overhead_tokens * linear`, whatever the number of
//! ranks. A sample costs `linear * length + quadratic * length^2`; each row of a padded micro-batch
//! costs as much as its longest row. The micro-batches are made for all ranks together, their
//! number a multiple of the ranks. They are sorted by cost and dealt one round a step, so that
//! ranks that wait for each other compute micro-batches of similar cost. The heaviest step comes
//! first.
//!
//! ```
//! use ludic_core::balance::{Packing, RankOptions, plan_ranks};
//!
//! let options = RankOptions {
//!     world_size: 2,
//!     packing: Packing::PaddingFree,
//!     overhead_tokens: 256,
//!     linear: 1,
//!     quadratic: 0,
//! };
//! // 8 tokens on one rank, 4 + 3 + 1 on the other.
//! let ranks = plan_ranks(&[8, 4, 3, 1], 8, &options)?;
//! assert_eq!(ranks[0].iter().collect::<Vec<_>>(), [[0]]);
//! assert_eq!(ranks[1].iter().collect::<Vec<_>>(), [[1, 2, 3]]);
//! assert_eq!((ranks[0].cost(), ranks[1].cost()), (8, 8));
//! # Ok::<(), ludic_core::CoreError>(())
//! ```

mod cost;
mod packed;
mod padded;
mod steps;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use crate::CoreError;
use crate::plan::{Plan, check_overhead, ranges};
use cost::{Prices, Shape};

/// Up to this many samples, a few dozen plans are compared. Above it, some micro-batches of the
/// plan for one rank are halved: with that many micro-batches, the ranks get similar costs anyway.
const SEARCHED_SAMPLES: usize = 1 << 15;
/// The largest number of ranks.
const MAX_RANKS: i64 = 1 << 20;
/// The largest factor of the cost: no sum of costs overflows 128 bits.
const MAX_FACTOR: i64 = 1 << 31;

/// How samples become micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// The documented greedy plan; its costliest micro-batches are halved until their number is a
    /// multiple of the ranks.
    Greedy,
    /// The plan of least lockstep cost among two kinds: plans with the fewest padded tokens for a
    /// multiple of the ranks, and micro-batches made step by step. `overhead_tokens` decides how
    /// many steps are worth it.
    Optimal,
    /// No padding: the fewest steps, with samples spread by cost under a hard cap on the tokens.
    PaddingFree,
}

impl Packing {
    /// The packing of that name.
    pub fn from_name(name: &str) -> Result<Self, CoreError> {
        match name {
            "greedy" => Ok(Self::Greedy),
            "optimal" => Ok(Self::Optimal),
            "padding_free" => Ok(Self::PaddingFree),
            _ => Err(CoreError::UnknownPacking { name: name.to_owned() }),
        }
    }
}

/// What the ranks share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankOptions {
    /// The number of ranks.
    pub world_size: i64,
    /// How samples become micro-batches.
    pub packing: Packing,
    /// The fixed cost of a step, which all ranks take together, in tokens. Only `Packing::Optimal`
    /// uses it.
    pub overhead_tokens: i64,
    /// Cost of a token.
    pub linear: i64,
    /// Additional cost of a token for each token of its sample.
    pub quadratic: i64,
}

/// The micro-batches of one rank. An empty one stands for a row of weight zero, which keeps the
/// ranks in step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankPlan {
    indices: Vec<u32>,
    offsets: Vec<u32>,
    cost: u128,
    padded_tokens: u64,
}

impl RankPlan {
    fn new() -> Self {
        Self { indices: Vec::new(), offsets: vec![0], cost: 0, padded_tokens: 0 }
    }

    /// The number of micro-batches, the same for every rank.
    pub fn len(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Whether there is no micro-batch. Only a plan of no samples has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
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

    /// The summed cost of the samples, without padding.
    pub fn cost(&self) -> u128 {
        self.cost
    }

    /// The number of tokens that the rank computes, padding included.
    pub fn padded_tokens(&self) -> u64 {
        self.padded_tokens
    }
}

/// Plans the same number of micro-batches for each rank. Every sample is on exactly one rank. Every
/// rank has a sample unless there are fewer samples than ranks. No micro-batch is empty unless
/// there are fewer samples than micro-batches.
pub fn plan_ranks(lengths: &[i32], micro_token_budget: i64, options: &RankOptions) -> Result<Vec<RankPlan>, CoreError> {
    let ranks = check_range("world_size", options.world_size, 1, MAX_RANKS)? as usize;
    let prices = Prices::new(options)?;
    let overhead = check_overhead(options.overhead_tokens)?;
    let plan = match options.packing {
        Packing::PaddingFree => packed::plan_packed(lengths, micro_token_budget, &prices, ranks)?,
        Packing::Greedy => padded::plan_greedy(lengths, micro_token_budget, &prices, ranks)?,
        Packing::Optimal => padded::plan_optimal(lengths, micro_token_budget, overhead, &prices, ranks)?,
    };
    Ok(deal(lengths, &plan, options.packing, &prices, ranks))
}

/// The value, if it is between `least` and `most`.
fn check_range(name: &'static str, value: i64, least: i64, most: i64) -> Result<i64, CoreError> {
    if (least..=most).contains(&value) { Ok(value) } else { Err(CoreError::OutOfRange { name, value, least, most }) }
}

/// Deals the micro-batches by falling cost, one to each rank a step; within a step the costliest
/// goes to the rank with the least cost so far.
///
/// Costs 9, 7, 4, 1 on two ranks: 9 to rank 0 and 7 to rank 1, then 4 to rank 1, which has less,
/// and 1 to rank 0.
fn deal(lengths: &[i32], plan: &Plan, packing: Packing, prices: &Prices, ranks: usize) -> Vec<RankPlan> {
    let shapes: Vec<Shape> = plan.iter().map(|rows| Shape::of(lengths, rows)).collect();
    let mut order: Vec<(u128, usize)> =
        shapes.iter().map(|shape| prices.computed_cost(shape, packing)).zip(0..).collect();
    order.sort_by_key(|&(cost, _)| Reverse(cost));
    let mut rank_plans = vec![RankPlan::new(); ranks];
    let mut loads: Vec<(u128, usize)> = (0..ranks).map(|rank| (0, rank)).collect();
    for step in order.chunks(ranks) {
        loads.sort_unstable();
        for (load, &(cost, micro_batch)) in loads.iter_mut().zip(step) {
            let (rank_plan, shape) = (&mut rank_plans[load.1], &shapes[micro_batch]);
            load.0 += cost;
            rank_plan.indices.extend(plan.get(micro_batch).unwrap_or_default());
            rank_plan.cost += prices.real_cost(shape);
            rank_plan.padded_tokens += shape.padded_tokens(packing);
        }
        rank_plans.iter_mut().for_each(|rank_plan| rank_plan.offsets.push(rank_plan.indices.len() as u32));
    }
    rank_plans
}

/// The least multiple of `ranks` that is at least `count`, but no more than there are samples.
/// 5 micro-batches on 4 ranks become 8, or 7 if there are 7 samples.
fn round_up_to_ranks(count: usize, ranks: usize, samples: usize) -> usize {
    count.div_ceil(ranks).saturating_mul(ranks).min(samples)
}

/// Halves the costliest micro-batch of at least two rows, the first among equals, until there are
/// `count`. With the cost as the number of rows, `[0, 4, 6]` and a `count` of 3 give `[0, 2, 4,
/// 6]`.
fn halve(mut offsets: Vec<u32>, count: usize, cost: impl Fn(Range<usize>) -> u128) -> Vec<u32> {
    let entry = |begin: usize, end: usize| (end - begin > 1).then(|| (cost(begin..end), Reverse(begin), end));
    let mut heap: BinaryHeap<_> = ranges(&offsets).filter_map(|rows| entry(rows.start, rows.end)).collect();
    let missing = count.saturating_sub(offsets.len() - 1);
    for _ in 0..missing {
        let Some((_, Reverse(begin), end)) = heap.pop() else {
            break;
        };
        let middle = begin.midpoint(end);
        offsets.push(middle as u32);
        heap.extend(entry(begin, middle));
        heap.extend(entry(middle, end));
    }
    offsets.sort_unstable();
    offsets
}
