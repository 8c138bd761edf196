//! Padded micro-batches for all ranks: ranges of the sorted samples.

use std::cmp::Reverse;
use std::ops::Range;

use super::cost::Prices;
use super::steps::StepPlanner;
use super::{SEARCHED_SAMPLES, halve, round_up_to_ranks};
use crate::CoreError;
use crate::plan::{
    Plan, SortedLengths, check_budget, greedy_offsets, optimal_offsets, optimal_offsets_for_count, ranges,
};

/// The greedy plan with its costliest micro-batches halved until their number is a multiple of the
/// ranks.
pub(super) fn plan_greedy(lengths: &[i32], budget: i64, prices: &Prices, ranks: usize) -> Result<Plan, CoreError> {
    plan_ranges(lengths, budget, |sorted, budget| {
        let offsets = greedy_offsets(&sorted.runs, budget);
        let count = round_up_to_ranks(offsets.len() - 1, ranks, sorted.len());
        halve(offsets, count, |rows| range_cost(lengths, sorted, prices, rows))
    })
}

/// The plan with the least lockstep cost that the search finds. `overhead` is the fixed cost of a
/// step, in tokens.
pub(super) fn plan_optimal(
    lengths: &[i32],
    budget: i64,
    overhead: u64,
    prices: &Prices,
    ranks: usize,
) -> Result<Plan, CoreError> {
    plan_ranges(lengths, budget, |sorted, budget| best_offsets(lengths, sorted, budget, overhead, prices, ranks))
}

/// The plan whose micro-batches begin at `choose_offsets` in the sorted order.
fn plan_ranges(
    lengths: &[i32],
    budget: i64,
    choose_offsets: impl FnOnce(&SortedLengths, u64) -> Vec<u32>,
) -> Result<Plan, CoreError> {
    let sorted = SortedLengths::new(lengths)?;
    let budget = check_budget(budget, sorted.longest())?;
    let offsets = choose_offsets(&sorted, budget);
    Ok(Plan::contiguous(lengths, sorted, offsets))
}

/// The cost of a micro-batch of consecutive samples, of which the last is the longest.
fn range_cost(lengths: &[i32], sorted: &SortedLengths, prices: &Prices, rows: Range<usize>) -> u128 {
    let longest = lengths[sorted.order[rows.end - 1] as usize];
    rows.len() as u128 * prices.sample_cost(longest as u64)
}

/// The plan of least lockstep cost of two: the best by the number of micro-batches, and the one
/// made step by step. The former if they cost the same.
fn best_offsets(
    lengths: &[i32],
    sorted: &SortedLengths,
    budget: u64,
    overhead: u64,
    prices: &Prices,
    ranks: usize,
) -> Vec<u32> {
    let step_overhead = u128::from(overhead).saturating_mul(prices.linear);
    let by_count = best_offsets_by_count(lengths, sorted, budget, overhead, prices, ranks);
    if sorted.len() > SEARCHED_SAMPLES {
        return by_count;
    }
    let ascending: Vec<u64> = sorted.order.iter().map(|&row| lengths[row as usize] as u64).collect();
    let row_costs: Vec<u128> = ascending.iter().map(|&length| prices.sample_cost(length)).collect();
    let by_step = StepPlanner::new(&ascending, &row_costs, budget, ranks, step_overhead).find_offsets();
    let cost =
        |offsets: &Vec<u32>| lockstep(offsets, step_overhead, ranks, |rows| range_cost(lengths, sorted, prices, rows));
    match by_step {
        Some(by_step) if cost(&by_step) < cost(&by_count) => by_step,
        _ => by_count,
    }
}

/// The plan of least lockstep cost of: greedy's plan, halved; and the plans with the fewest padded
/// tokens for the fewest steps, for the number of steps that is optimal for one rank, for one less
/// and for one more. One more matters: only then may a few samples have a step each to themselves.
fn best_offsets_by_count(
    lengths: &[i32],
    sorted: &SortedLengths,
    budget: u64,
    overhead: u64,
    prices: &Prices,
    ranks: usize,
) -> Vec<u32> {
    let cost = |rows: Range<usize>| range_cost(lengths, sorted, prices, rows);
    let rounded = |count: usize| round_up_to_ranks(count, ranks, sorted.len());
    let one_rank = optimal_offsets(&sorted.runs, budget, overhead, 1);
    let optimal = rounded(one_rank.len() - 1);
    if sorted.len() > SEARCHED_SAMPLES {
        return halve(one_rank, optimal, cost);
    }
    let greedy = greedy_offsets(&sorted.runs, budget);
    let fewest = rounded(greedy.len() - 1);
    let one_step_less = (optimal.div_ceil(ranks).saturating_sub(1) * ranks).max(fewest);
    let one_step_more = rounded(optimal + 1);
    let mut counts = vec![fewest, one_step_less, optimal, one_step_more];
    counts.dedup();
    let exact = counts.into_iter().map(|count| optimal_offsets_for_count(&sorted.runs, budget, count));
    let step_overhead = u128::from(overhead).saturating_mul(prices.linear);
    exact
        .chain([halve(greedy, fewest, cost)])
        .min_by_key(|offsets| lockstep(offsets, step_overhead, ranks, cost))
        .unwrap_or(one_rank)
}

/// The lockstep cost: the sum over steps of the costliest micro-batch and `overhead`. Micro-batches
/// are dealt in descending order of cost. Costs 9, 7, 4, 1 on two ranks are the steps (9, 7) and
/// (4, 1), which cost `9 + 4 + 2 * overhead`.
fn lockstep(offsets: &[u32], overhead: u128, ranks: usize, cost: impl Fn(Range<usize>) -> u128) -> u128 {
    let mut costs: Vec<u128> = ranges(offsets).map(cost).collect();
    costs.sort_unstable_by_key(|&cost| Reverse(cost));
    costs.iter().step_by(ranks).fold(0u128, |sum, &cost| sum.saturating_add(cost).saturating_add(overhead))
}

#[cfg(test)]
mod tests {
    use super::super::{Packing, RankOptions};
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn steps_are_never_worse_than_plans_made_rank_by_rank(
            lengths in prop_oneof![prop::collection::vec(0..40i32, 0..300), prop::collection::vec(0..5000i32, 0..300)],
            ranks in 1..17usize, factor in 1..20u64, overhead in 0..2000u64,
        ) {
            let options = RankOptions {
                world_size: ranks as i64, packing: Packing::Optimal, overhead_tokens: 0, linear: 9, quadratic: 1,
            };
            let prices = Prices::new(&options).unwrap();
            let sorted = SortedLengths::new(&lengths).unwrap();
            let budget = u64::from(sorted.longest()).max(1) * factor;
            let cost = |offsets: &[u32]| {
                lockstep(offsets, u128::from(overhead) * 9, ranks, |rows| range_cost(&lengths, &sorted, &prices, rows))
            };
            let by_count = best_offsets_by_count(&lengths, &sorted, budget, overhead, &prices, ranks);
            let best = best_offsets(&lengths, &sorted, budget, overhead, &prices, ranks);
            prop_assert!(cost(&best) <= cost(&by_count));
        }
    }
}
