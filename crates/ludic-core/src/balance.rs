//! One plan for all ranks: the same number of micro-batches for each, and as little waiting as is
//! found.
//!
//! The objective is the lockstep: the sum over steps of the costliest rank's micro-batch, plus an
//! overhead a *step* of `overhead_tokens * linear`, however many ranks there are. A sample costs
//! `linear * length + quadratic * length^2`, a row of a padded micro-batch what its longest row
//! costs. The micro-batches are made for all ranks together, as many as a multiple of the ranks,
//! sorted by cost and dealt one round a step, so that the ranks that wait for each other compute
//! neighbours in cost; the heaviest step comes first.
//!
//! ```
//! use ludic_core::balance::{Packing, RankOptions, plan_ranks};
//!
//! let packing = Packing::PaddingFree;
//! let options = RankOptions { world_size: 2, packing, overhead_tokens: 256, linear: 1, quadratic: 0 };
//! // 8 tokens on the one rank, 4 + 3 + 1 on the other.
//! let ranks = plan_ranks(&[8, 4, 3, 1], 8, &options)?;
//! assert_eq!(ranks[0].iter().collect::<Vec<_>>(), [[0]]);
//! assert_eq!(ranks[1].iter().collect::<Vec<_>>(), [[1, 2, 3]]);
//! assert_eq!((ranks[0].cost(), ranks[1].cost()), (8, 8));
//! # Ok::<(), ludic_core::CoreError>(())
//! ```

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use crate::CoreError;
use crate::plan::{
    Plan, Sorted, check_budget, check_overhead, greedy_offsets, optimal_offsets, optimal_offsets_exactly, padding_free,
};
use crate::steps::Steps;

/// Above this many samples the search for the best micro-batches, a few dozen plans, gives way to
/// the planners for one rank and a few halvings: among so many micro-batches the deal finds
/// neighbours in cost anyway.
const SEARCHED_SAMPLES: usize = 1 << 15;
/// The most ranks.
const MAX_RANKS: i64 = 1 << 20;
/// The largest factor of the cost: then no sum of costs leaves 128 bits.
const MAX_FACTOR: i64 = 1 << 31;

/// How samples become micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// The documented greedy, then the costliest halved up to a multiple of the ranks.
    Greedy,
    /// The least lockstep that is found, over the numbers of steps that `overhead_tokens` makes
    /// worth it: of plans with the fewest padded tokens for a multiple of the ranks, and of
    /// micro-batches made step by step.
    Optimal,
    /// No padding: the fewest steps, samples dealt by cost under a hard cap on the tokens.
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
    /// The fixed cost of a step, which all ranks take together, in tokens; `Packing::Optimal` alone
    /// asks for it.
    pub overhead_tokens: i64,
    /// Cost of a token.
    pub linear: i64,
    /// Cost of a token for each token of its sample.
    pub quadratic: i64,
}

/// One rank's micro-batches. An empty one stands for a row of weight zero that keeps the ranks in
/// step.
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

    /// How many micro-batches there are: the same for every rank.
    pub fn len(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Whether there is no micro-batch: only for no samples.
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

    /// Sum of the cost of its samples, without padding.
    pub fn cost(&self) -> u128 {
        self.cost
    }

    /// Tokens computed.
    pub fn padded_tokens(&self) -> u64 {
        self.padded_tokens
    }
}

/// The same number of micro-batches for each rank. Every sample is on one rank once; no rank is
/// without a sample unless there are fewer samples than ranks; no micro-batch is empty unless there
/// are fewer samples than micro-batches.
pub fn plan_ranks(lengths: &[i32], micro_token_budget: i64, options: &RankOptions) -> Result<Vec<RankPlan>, CoreError> {
    let ranks = in_range("world_size", options.world_size, 1, MAX_RANKS)? as usize;
    let prices = Prices::new(options)?;
    let overhead = check_overhead(options.overhead_tokens)?;
    let made = match options.packing {
        Packing::PaddingFree => pack(lengths, micro_token_budget, &prices, ranks)?,
        Packing::Greedy => pad(lengths, micro_token_budget, |sorted, budget| {
            let offsets = greedy_offsets(&sorted.runs, budget);
            let count = slots(offsets.len() - 1, ranks, sorted.len());
            halve(offsets, count, |rows| contiguous_work(lengths, sorted, &prices, rows))
        })?,
        Packing::Optimal => pad(lengths, micro_token_budget, |sorted, budget| {
            best_count(lengths, sorted, budget, overhead, &prices, ranks)
        })?,
    };
    Ok(deal(lengths, &made, options.packing, &prices, ranks))
}

fn in_range(name: &'static str, value: i64, least: i64, most: i64) -> Result<i64, CoreError> {
    if (least..=most).contains(&value) { Ok(value) } else { Err(CoreError::OutOfRange { name, value, least, most }) }
}

/// What work costs.
struct Prices {
    linear: u128,
    quadratic: u128,
}

impl Prices {
    fn new(options: &RankOptions) -> Result<Self, CoreError> {
        let linear = in_range("linear", options.linear, 0, MAX_FACTOR)? as u128;
        let quadratic = in_range("quadratic", options.quadratic, 0, MAX_FACTOR)? as u128;
        Ok(Self { linear, quadratic })
    }

    fn sample(&self, length: u64) -> u128 {
        let length = u128::from(length);
        self.linear * length + self.quadratic * length * length
    }

    /// What the samples cost by themselves.
    fn real(&self, shape: &Shape) -> u128 {
        self.linear * u128::from(shape.tokens) + self.quadratic * shape.squares
    }

    /// What a rank computes for them.
    fn work(&self, shape: &Shape, packing: Packing) -> u128 {
        match packing {
            Packing::PaddingFree => self.real(shape),
            Packing::Greedy | Packing::Optimal => u128::from(shape.rows) * self.sample(shape.longest),
        }
    }
}

/// All that the cost of a micro-batch depends on.
struct Shape {
    rows: u64,
    longest: u64,
    tokens: u64,
    squares: u128,
}

impl Shape {
    fn of(lengths: &[i32], rows: &[u32]) -> Self {
        let mut shape = Self { rows: rows.len() as u64, longest: 0, tokens: 0, squares: 0 };
        for &row in rows {
            let length = lengths[row as usize] as u64;
            shape.longest = shape.longest.max(length);
            shape.tokens += length;
            shape.squares += u128::from(length * length);
        }
        shape
    }

    fn padded_tokens(&self, packing: Packing) -> u64 {
        match packing {
            Packing::PaddingFree => self.tokens,
            Packing::Greedy | Packing::Optimal => self.rows * self.longest,
        }
    }
}

/// The least multiple of `ranks` that is at least `count`; fewer when there are not that many
/// samples.
fn slots(count: usize, ranks: usize, samples: usize) -> usize {
    count.div_ceil(ranks).saturating_mul(ranks).min(samples)
}

/// A padded plan from where its micro-batches begin in the sorted order.
fn pad(lengths: &[i32], budget: i64, cut: impl FnOnce(&Sorted, u64) -> Vec<u32>) -> Result<Plan, CoreError> {
    let sorted = Sorted::new(lengths)?;
    let budget = check_budget(budget, sorted.longest())?;
    let offsets = cut(&sorted, budget);
    Ok(Plan::contiguous(lengths, sorted, offsets))
}

/// What a padded micro-batch of consecutive samples costs: its last row is its longest.
fn contiguous_work(lengths: &[i32], sorted: &Sorted, prices: &Prices, rows: Range<usize>) -> u128 {
    let longest = lengths[sorted.order[rows.end - 1] as usize];
    rows.len() as u128 * prices.sample(longest as u64)
}

/// The cheapest in lockstep of the micro-batches made rank by rank and of those made step by step;
/// of equal ones the former.
fn best_count(lengths: &[i32], sorted: &Sorted, budget: u64, overhead: u64, prices: &Prices, ranks: usize) -> Vec<u32> {
    let step = u128::from(overhead).saturating_mul(prices.linear);
    let by_rank = by_count(lengths, sorted, budget, overhead, prices, ranks);
    if sorted.len() > SEARCHED_SAMPLES {
        return by_rank;
    }
    let ascending: Vec<u64> = sorted.order.iter().map(|&row| lengths[row as usize] as u64).collect();
    let of_row: Vec<u128> = ascending.iter().map(|&length| prices.sample(length)).collect();
    let by_step = Steps::new(&ascending, &of_row, budget, ranks, step).offsets();
    let cost =
        |offsets: &Vec<u32>| lockstep(offsets, step, ranks, |rows| contiguous_work(lengths, sorted, prices, rows));
    match by_step {
        Some(by_step) if cost(&by_step) < cost(&by_rank) => by_step,
        _ => by_rank,
    }
}

/// The cheapest in lockstep of greedy's halving and of the exact plans with the fewest steps, and
/// with the numbers of steps next to the optimum for one rank: one more too, since only there may a
/// few samples have a step each to themselves.
fn by_count(lengths: &[i32], sorted: &Sorted, budget: u64, overhead: u64, prices: &Prices, ranks: usize) -> Vec<u32> {
    let cost = |rows: Range<usize>| contiguous_work(lengths, sorted, prices, rows);
    let rounded = |count: usize| slots(count, ranks, sorted.len());
    let free = optimal_offsets(&sorted.runs, budget, overhead, 1);
    let most = rounded(free.len() - 1);
    if sorted.len() > SEARCHED_SAMPLES {
        return halve(free, most, cost);
    }
    let greedy = greedy_offsets(&sorted.runs, budget);
    let least = rounded(greedy.len() - 1);
    let one_step_less = (most.div_ceil(ranks).saturating_sub(1) * ranks).max(least);
    let one_step_more = rounded(most + 1);
    let mut counts = vec![least, one_step_less, most, one_step_more];
    counts.dedup();
    let exact = counts.into_iter().map(|count| optimal_offsets_exactly(&sorted.runs, budget, count));
    let step = u128::from(overhead).saturating_mul(prices.linear);
    exact.chain([halve(greedy, least, cost)]).min_by_key(|offsets| lockstep(offsets, step, ranks, cost)).unwrap_or(free)
}

/// What all steps cost: the costliest micro-batch of each, dealt by falling cost, and `overhead`.
fn lockstep(offsets: &[u32], overhead: u128, ranks: usize, cost: impl Fn(Range<usize>) -> u128) -> u128 {
    let mut costs: Vec<u128> = ranges(offsets).map(cost).collect();
    costs.sort_unstable_by_key(|&cost| Reverse(cost));
    costs.iter().step_by(ranks).fold(0u128, |sum, &cost| sum.saturating_add(cost).saturating_add(overhead))
}

fn ranges(offsets: &[u32]) -> impl Iterator<Item = Range<usize>> + '_ {
    offsets.windows(2).map(|pair| pair[0] as usize..pair[1] as usize)
}

/// Halve the costliest micro-batch that has two rows, the first among equals, until there are
/// `count`.
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

/// Micro-batches without padding, in the fewest steps that either way of packing finds.
fn pack(lengths: &[i32], budget: i64, prices: &Prices, ranks: usize) -> Result<Plan, CoreError> {
    let sorted = Sorted::new(lengths)?;
    let cap = check_budget(budget, sorted.longest())?;
    let samples = sorted.len();
    let bound = usize::try_from(sorted.num_tokens.div_ceil(cap)).unwrap_or(samples).max(usize::from(samples > 0));
    let least = slots(bound, ranks, samples);
    let try_spread =
        |count: usize| (samples <= SEARCHED_SAMPLES).then(|| spread(&sorted, cap, prices, count)).flatten();
    if let Some(plan) = try_spread(least) {
        return Ok(plan);
    }
    let tight = padding_free(lengths, budget)?;
    let count = slots(tight.len(), ranks, samples);
    if let Some(plan) = (count > least).then(|| try_spread(count)).flatten() {
        return Ok(plan);
    }
    let cost = |rows: Range<usize>| prices.real(&Shape::of(lengths, &tight.indices()[rows]));
    let offsets = halve(tight.offsets().to_vec(), count, cost);
    Ok(Plan::packed(tight.indices().to_vec(), offsets, tight.num_tokens()))
}

/// A micro-batch being filled: the least cost first, then the fewest rows, then the first.
type Bin = Reverse<(u128, u32, u32)>;

/// Longest sample first, each to the micro-batch of least cost that can still hold it. `None` when
/// one fits nowhere, or when looking for room takes too long.
fn spread(sorted: &Sorted, cap: u64, prices: &Prices, count: usize) -> Option<Plan> {
    let shortest = sorted.runs.first().map_or(0, |run| u64::from(run.length));
    let mut heap: BinaryHeap<Bin> = (0..count as u32).map(|bin| Reverse((0, 0, bin))).collect();
    let mut free = vec![cap; count];
    let mut bins: Vec<u32> = Vec::with_capacity(sorted.len());
    let mut passed: Vec<Bin> = Vec::new();
    let mut patience = sorted.len().saturating_mul(16);
    for run in sorted.runs.iter().rev() {
        let length = u64::from(run.length);
        let cost = prices.sample(length);
        for _ in run.begin..run.end {
            let Reverse((load, rows, bin)) = loop {
                let top = heap.pop()?;
                if free[top.0.2 as usize] >= length {
                    break top;
                }
                patience = patience.checked_sub(1)?;
                passed.push(top);
            };
            free[bin as usize] -= length;
            bins.push(bin);
            heap.extend(passed.drain(..).filter(|passed| free[passed.0.2 as usize] >= shortest));
            heap.push(Reverse((load + cost, rows + 1, bin)));
        }
    }
    Some(gather(sorted, &bins, count))
}

/// The plan in which the samples, longest first, go to the micro-batches `bins`.
fn gather(sorted: &Sorted, bins: &[u32], count: usize) -> Plan {
    let mut offsets = vec![0u32; count + 1];
    for &bin in bins {
        offsets[bin as usize + 1] += 1;
    }
    for bin in 1..offsets.len() {
        offsets[bin] += offsets[bin - 1];
    }
    let mut next = offsets.clone();
    let mut indices = vec![0u32; sorted.len()];
    let descending = sorted.runs.iter().rev().flat_map(|run| run.begin..run.end);
    for (position, &bin) in descending.zip(bins) {
        indices[next[bin as usize] as usize] = sorted.order[position as usize];
        next[bin as usize] += 1;
    }
    Plan::packed(indices, offsets, sorted.num_tokens)
}

/// One micro-batch a rank and step, by falling cost; within a step the costliest goes to the rank
/// with the least so far.
fn deal(lengths: &[i32], made: &Plan, packing: Packing, prices: &Prices, ranks: usize) -> Vec<RankPlan> {
    let shapes: Vec<Shape> = made.iter().map(|rows| Shape::of(lengths, rows)).collect();
    let mut order: Vec<(u128, usize)> = shapes.iter().map(|shape| prices.work(shape, packing)).zip(0..).collect();
    order.sort_by_key(|&(work, _)| Reverse(work));
    let mut plans = vec![RankPlan::new(); ranks];
    let mut loads: Vec<(u128, usize)> = (0..ranks).map(|rank| (0, rank)).collect();
    for step in order.chunks(ranks) {
        loads.sort_unstable();
        for (load, &(work, number)) in loads.iter_mut().zip(step) {
            let (plan, shape) = (&mut plans[load.1], &shapes[number]);
            load.0 += work;
            plan.indices.extend(made.get(number).unwrap_or_default());
            plan.cost += prices.real(shape);
            plan.padded_tokens += shape.padded_tokens(packing);
        }
        plans.iter_mut().for_each(|plan| plan.offsets.push(plan.indices.len() as u32));
    }
    plans
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn steps_are_never_worse_than_plans_made_rank_by_rank(
            lengths in prop_oneof![prop::collection::vec(0..40i32, 0..300), prop::collection::vec(0..5000i32, 0..300)],
            ranks in 1..17usize, factor in 1..20u64, overhead in 0..2000u64,
        ) {
            let options = RankOptions { world_size: ranks as i64, packing: Packing::Optimal, overhead_tokens: 0, linear: 9, quadratic: 1 };
            let prices = Prices::new(&options).unwrap();
            let sorted = Sorted::new(&lengths).unwrap();
            let budget = u64::from(sorted.longest()).max(1) * factor;
            let cost = |offsets: &[u32]| {
                lockstep(offsets, u128::from(overhead) * 9, ranks, |rows| contiguous_work(&lengths, &sorted, &prices, rows))
            };
            let today = by_count(&lengths, &sorted, budget, overhead, &prices, ranks);
            let best = best_count(&lengths, &sorted, budget, overhead, &prices, ranks);
            prop_assert!(cost(&best) <= cost(&today));
        }
    }
}
