//! Padded micro-batches made step by step, for ranks that wait for each other.
//!
//! A step is a range of the sorted samples, cut into one micro-batch per rank. It costs as much as
//! its costliest micro-batch, plus the overhead. Dynamic programming finds the cheapest steps:
//!
//! ```text
//! D[b] = min over a of D[a] + cost of the step a..b + overhead
//! ```
//!
//! The cost of a step is the least limit under which it fits: micro-batches are cut from the
//! longest sample down, each as large as budget and limit allow, and no more than there are ranks.
//! No other cut reaches further, since the longest sample of a micro-batch sets the cost of all its
//! rows. Costs are integers, and among steps of equal cost the one with the fewest samples is
//! taken, so that the plan is the same on every machine.

use std::ops::Range;

/// The largest number of places where a step may end: after every sample if there are fewer
/// samples, otherwise at even distances.
const MAX_ENDS: usize = 128;

/// Samples in ascending order of length, and the settings of the search.
pub(crate) struct StepPlanner<'a> {
    lengths: &'a [u64],
    /// The cost of a row of each sample's length.
    row_costs: &'a [u128],
    budget: u64,
    ranks: usize,
    overhead: u128,
}

impl<'a> StepPlanner<'a> {
    pub(crate) fn new(lengths: &'a [u64], row_costs: &'a [u128], budget: u64, ranks: usize, overhead: u128) -> Self {
        Self { lengths, row_costs, budget, ranks, overhead }
    }

    /// Where the micro-batches begin, `ranks` of them in each step. `None` if no steps that end at
    /// the tried places are feasible: every micro-batch needs a sample and must fit the budget.
    pub(crate) fn find_offsets(&self) -> Option<Vec<u32>> {
        let ends = self.ends();
        let cost_sums = self.cost_sums();
        let mut best: Vec<Option<(u128, usize)>> = vec![None; ends.len()];
        *best.first_mut()? = Some((0, 0));
        for end in 1..ends.len() {
            best[end] = self.find_best_step(&ends, &cost_sums, &best, end);
        }
        let mut steps = Vec::new();
        let mut end = ends.len() - 1;
        while end > 0 {
            let (_, begin) = best[end]?;
            steps.push(ends[begin]..ends[end]);
            end = begin;
        }
        let cuts = steps.into_iter().rev().flat_map(|step| self.cut(step)).map(|begin| begin as u32);
        Some(cuts.chain([self.lengths.len() as u32]).collect())
    }

    /// Where a step may begin or end. 5 samples and at most 2 ends would give [0, 2, 5].
    fn ends(&self) -> Vec<usize> {
        let samples = self.lengths.len();
        let count = samples.min(MAX_ENDS);
        (0..=count).map(|end| end * samples / count.max(1)).collect()
    }

    /// The summed row costs before each sample: the costs 2, 3, 5 give [0, 2, 5, 10].
    fn cost_sums(&self) -> Vec<u128> {
        let mut sum = 0;
        let mut sums = vec![0];
        sums.extend(self.row_costs.iter().map(|cost| {
            sum += cost;
            sum
        }));
        sums
    }

    /// The least cost of everything before `ends[end]`, and the index in `ends` where its last step
    /// begins.
    fn find_best_step(
        &self,
        ends: &[usize],
        cost_sums: &[u128],
        best: &[Option<(u128, usize)>],
        end: usize,
    ) -> Option<(u128, usize)> {
        let mut best_step: Option<(u128, usize)> = None;
        for begin in (0..end).rev() {
            let step = ends[begin]..ends[end];
            if step.len() < self.ranks {
                continue;
            }
            // No step costs less than its rows without padding, shared evenly, or than its longest
            // row.
            let even_share = (cost_sums[step.end] - cost_sums[step.start]).div_ceil(self.ranks as u128);
            let bound = even_share.max(self.row_costs[step.end - 1]);
            // A longer step does not cost less. So if this one is not better, or does not fit, none
            // of the following is better, or fits.
            if best_step.is_some_and(|(cost, _)| bound.saturating_add(self.overhead) >= cost)
                || !self.fits(&step, u128::MAX)
            {
                break;
            }
            let Some((cost_before, _)) = best[begin] else { continue };
            let fixed = cost_before.saturating_add(self.overhead);
            // The largest step cost that would be better.
            let limit = best_step.map_or(u128::MAX, |(cost, _)| cost.saturating_sub(fixed).saturating_sub(1));
            if bound <= limit && self.fits(&step, limit) {
                best_step = Some((fixed.saturating_add(self.find_cost(&step, bound, limit)), begin));
            }
        }
        best_step
    }

    /// The cost of a step, by binary search between a lower bound and a limit under which it fits.
    fn find_cost(&self, step: &Range<usize>, mut low: u128, limit: u128) -> u128 {
        // No micro-batch costs more than all rows at the cost of the longest.
        let mut high = limit.min(self.row_costs[step.end - 1].saturating_mul(step.len() as u128));
        while low < high {
            let middle = low + (high - low) / 2;
            if self.fits(step, middle) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        high
    }

    /// Whether one micro-batch per rank, each of at most `limit`, can hold the step. Rows that cost
    /// 1, 2 and 4 fit on two ranks under a limit of 4, as [4] and [1, 2], since `2 * 2 <= 4`.
    fn fits(&self, step: &Range<usize>, limit: u128) -> bool {
        let mut end = step.end;
        for _ in 0..self.ranks {
            let rows = self.max_rows(end, limit);
            if rows >= end - step.start {
                return true;
            }
            if rows == 0 {
                return false;
            }
            end -= rows;
        }
        false
    }

    /// The largest number of rows of a micro-batch that ends at `end`.
    fn max_rows(&self, end: usize, limit: u128) -> usize {
        let (length, row_cost) = (self.lengths[end - 1], self.row_costs[end - 1]);
        let in_budget = self.budget.checked_div(length).unwrap_or(u64::MAX);
        let in_limit = match (u64::try_from(limit), u64::try_from(row_cost)) {
            (_, Ok(0)) => u64::MAX,
            (Ok(limit), Ok(row_cost)) => limit / row_cost,
            _ => u64::try_from(limit / row_cost).unwrap_or(u64::MAX),
        };
        usize::try_from(in_budget.min(in_limit)).unwrap_or(usize::MAX)
    }

    /// Where the micro-batches of a step begin. They are cut from the longest sample down, but
    /// leave at least one sample for each remaining rank. Rows that cost 1, 2 and 4 on two ranks
    /// give [0, 2].
    fn cut(&self, step: Range<usize>) -> Vec<usize> {
        let limit = self.find_cost(&step, self.row_costs[step.end - 1], u128::MAX);
        let mut begins = Vec::with_capacity(self.ranks);
        let mut end = step.end;
        for remaining_ranks in (0..self.ranks).rev() {
            let rows = self.max_rows(end, limit).min(end - step.start - remaining_ranks);
            end -= rows;
            begins.push(end);
        }
        begins.reverse();
        begins
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The least cost of the costliest of `ranks` consecutive parts, over all ways to cut.
    fn least_cost_of_all_cuts(planner: &StepPlanner<'_>, step: Range<usize>, ranks: usize) -> Option<u128> {
        let part_cost = |range: &Range<usize>| {
            let rows = range.len() as u128;
            (rows * u128::from(planner.lengths[range.end - 1]) <= u128::from(planner.budget))
                .then(|| rows * planner.row_costs[range.end - 1])
        };
        if ranks == 1 {
            return part_cost(&step);
        }
        (step.start + 1..step.end)
            .filter_map(|cut| {
                let before = least_cost_of_all_cuts(planner, step.start..cut, ranks - 1)?;
                Some(before.max(part_cost(&(cut..step.end))?))
            })
            .min()
    }

    proptest! {
        #[test]
        fn a_step_costs_the_least_that_any_cut_of_it_costs(
            mut lengths in prop::collection::vec(0..60u64, 1..12), ranks in 1..5usize, factor in 1..8u64,
        ) {
            lengths.sort_unstable();
            prop_assume!(lengths.len() >= ranks);
            let row_costs: Vec<u128> = lengths.iter().map(|&length| u128::from(7 * length + length * length)).collect();
            let budget = lengths[lengths.len() - 1].max(1) * factor;
            let planner = StepPlanner::new(&lengths, &row_costs, budget, ranks, 5);
            let whole = 0..lengths.len();
            let want = least_cost_of_all_cuts(&planner, whole.clone(), ranks);
            prop_assert_eq!(planner.fits(&whole, u128::MAX), want.is_some());
            if let Some(want) = want {
                let begins = planner.cut(whole);
                prop_assert!(begins.len() == ranks && begins[0] == 0 && begins.is_sorted_by(|a, b| a < b));
                let ends = begins[1..].iter().copied().chain([lengths.len()]);
                let costs = begins.iter().zip(ends).map(|(&begin, end)| (end - begin) as u128 * row_costs[end - 1]);
                prop_assert_eq!(costs.max(), Some(want));
            }
        }
    }
}
