//! Micro-batches without padding for all ranks: samples dealt by cost under a cap on the tokens.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use super::cost::{Prices, Shape};
use super::{SEARCHED_SAMPLES, halve, round_up_to_ranks};
use crate::CoreError;
use crate::plan::{Plan, SortedLengths, accumulate_offsets, check_budget, padding_free};

/// The plan with the fewest steps of two: samples spread by cost, or best fit decreasing with its
/// costliest micro-batches halved.
pub(super) fn plan_packed(lengths: &[i32], budget: i64, prices: &Prices, ranks: usize) -> Result<Plan, CoreError> {
    let sorted = SortedLengths::new(lengths)?;
    let cap = check_budget(budget, sorted.longest())?;
    let samples = sorted.len();
    let least = usize::try_from(sorted.num_tokens.div_ceil(cap)).unwrap_or(samples).max(usize::from(samples > 0));
    let fewest = round_up_to_ranks(least, ranks, samples);
    let try_spread =
        |count: usize| (samples <= SEARCHED_SAMPLES).then(|| spread(&sorted, cap, prices, count)).flatten();
    if let Some(plan) = try_spread(fewest) {
        return Ok(plan);
    }
    let best_fit = padding_free(lengths, budget)?;
    let count = round_up_to_ranks(best_fit.len(), ranks, samples);
    if let Some(plan) = (count > fewest).then(|| try_spread(count)).flatten() {
        return Ok(plan);
    }
    let cost = |rows: Range<usize>| prices.real_cost(&Shape::of(lengths, &best_fit.indices()[rows]));
    let offsets = halve(best_fit.offsets().to_vec(), count, cost);
    Ok(Plan::packed(best_fit.indices().to_vec(), offsets, best_fit.num_tokens()))
}

/// A micro-batch that is being filled: (cost, number of rows, its number), the least first.
type Bin = Reverse<(u128, u32, u32)>;

/// Longest sample first, each to the micro-batch of least cost that can still hold it. `None` when
/// a sample fits nowhere, or when the search for room takes too long.
///
/// Lengths 5, 3, 2 with a cap of 6, `count` 2, cost = length: 5 to the first, 3 to the second, and
/// 2 to the second, which holds 3 and so costs less.
fn spread(sorted: &SortedLengths, cap: u64, prices: &Prices, count: usize) -> Option<Plan> {
    let shortest = sorted.runs.first().map_or(0, |run| u64::from(run.length));
    let mut heap: BinaryHeap<Bin> = (0..count as u32).map(|bin| Reverse((0, 0, bin))).collect();
    let mut free = vec![cap; count];
    let mut bins: Vec<u32> = Vec::with_capacity(sorted.len());
    let mut too_full: Vec<Bin> = Vec::new();
    let mut attempts_left = sorted.len().saturating_mul(16);
    for run in sorted.runs.iter().rev() {
        let length = u64::from(run.length);
        let cost = prices.sample_cost(length);
        for _ in run.begin..run.end {
            let Reverse((bin_cost, rows, bin)) = loop {
                let top = heap.pop()?;
                if free[top.0.2 as usize] >= length {
                    break top;
                }
                attempts_left = attempts_left.checked_sub(1)?;
                too_full.push(top);
            };
            free[bin as usize] -= length;
            bins.push(bin);
            heap.extend(too_full.drain(..).filter(|full| free[full.0.2 as usize] >= shortest));
            heap.push(Reverse((bin_cost + cost, rows + 1, bin)));
        }
    }
    Some(gather(sorted, &bins, count))
}

/// The plan in which the samples, longest first, go to the micro-batches `bins`.
///
/// In ascending order of length the samples are [2, 0, 1], and `bins` is [0, 1, 0]: sample 1, the
/// longest, goes to micro-batch 0, sample 0 to 1 and sample 2 to 0. The indices are [1, 2, 0] and
/// the offsets [0, 2, 3].
fn gather(sorted: &SortedLengths, bins: &[u32], count: usize) -> Plan {
    let offsets = accumulate_offsets(count, bins.iter().map(|&bin| (bin, 1)));
    let mut next = offsets.clone();
    let mut indices = vec![0u32; sorted.len()];
    let descending = sorted.runs.iter().rev().flat_map(|run| run.begin..run.end);
    for (position, &bin) in descending.zip(bins) {
        indices[next[bin as usize] as usize] = sorted.order[position as usize];
        next[bin as usize] += 1;
    }
    Plan::packed(indices, offsets, sorted.num_tokens)
}
