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

use std::cmp::Reverse;
use std::ops::Range;

/// The largest number of places where a step may end: after every sample if there are fewer
/// samples, otherwise at even distances.
const MAX_ENDS: usize = 128;
/// For more ranks than this, there are half as many places: a try of a step costs as much as there
/// are ranks, and a step has at least as many samples.
const MANY_RANKS: usize = 256;

/// Samples in ascending order of length, and the settings of the search.
pub(crate) struct StepPlanner<'a> {
    lengths: &'a [u64],
    /// The cost of a row of each sample's length.
    row_costs: &'a [u128],
    /// The largest number of rows of each sample's length that the budget allows.
    rows_in_budget: Vec<usize>,
    ranks: usize,
    overhead: u128,
}

/// The outcome of a try of a step under a limit.
enum Fit {
    /// It fits, and costs so much, at most the limit.
    Costs(u128),
    /// It does not fit, nor under any limit below this one.
    Needs(u128),
}

impl<'a> StepPlanner<'a> {
    pub(crate) fn new(lengths: &'a [u64], row_costs: &'a [u128], budget: u64, ranks: usize, overhead: u128) -> Self {
        let in_budget =
            |&length: &u64| usize::try_from(budget.checked_div(length).unwrap_or(u64::MAX)).unwrap_or(usize::MAX);
        Self { lengths, row_costs, rows_in_budget: lengths.iter().map(in_budget).collect(), ranks, overhead }
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
        let count = samples.min(if self.ranks > MANY_RANKS { MAX_ENDS / 2 } else { MAX_ENDS });
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
    /// begins; the last of those that cost the same.
    ///
    /// The steps are tried in ascending order of a lower bound of the total, until the bound of the
    /// next is above the best total so far.
    fn find_best_step(
        &self,
        ends: &[usize],
        cost_sums: &[u128],
        best: &[Option<(u128, usize)>],
        end: usize,
    ) -> Option<(u128, usize)> {
        let first = self.reach(ends[end]);
        let mut candidates: Vec<(u128, Reverse<usize>, u128)> = (0..end)
            .rev()
            .take_while(|&begin| ends[begin] >= first)
            .filter(|&begin| ends[end] - ends[begin] >= self.ranks)
            .filter_map(|begin| {
                let fixed = best[begin]?.0.saturating_add(self.overhead);
                Some((fixed.saturating_add(self.bound(cost_sums, &(ends[begin]..ends[end]))), Reverse(begin), fixed))
            })
            .collect();
        candidates.sort_unstable();
        let mut best_step: Option<(u128, usize)> = None;
        for (bound, Reverse(begin), fixed) in candidates {
            match best_step {
                Some((cost, _)) if bound > cost => break,
                Some((cost, last)) if bound == cost && begin < last => continue,
                _ => {}
            }
            // The largest step cost that would be better: as much as now for a later begin.
            let limit = best_step
                .map_or(u128::MAX, |(cost, last)| (cost - fixed.min(cost)).saturating_sub(u128::from(begin < last)));
            if let Some(cost) = self.find_cost(&(ends[begin]..ends[end]), bound - fixed, limit) {
                best_step = Some((fixed.saturating_add(cost), begin));
            }
        }
        best_step
    }

    /// The first sample of the longest step that ends before `end` and fits the budget.
    fn reach(&self, mut end: usize) -> usize {
        for _ in 0..self.ranks {
            if end == 0 {
                break;
            }
            end = end.saturating_sub(self.rows_in_budget[end - 1]);
        }
        end
    }

    /// No step costs less than its rows without padding, shared evenly, or than its longest row.
    fn bound(&self, cost_sums: &[u128], step: &Range<usize>) -> u128 {
        let even_share = (cost_sums[step.end] - cost_sums[step.start]).div_ceil(self.ranks as u128);
        even_share.max(self.row_costs[step.end - 1])
    }

    /// The cost of a step that is at least `low`, or `None` if it is above `high` or does not fit the
    /// budget. A bisection between costs that some cut has: each try returns the next such cost.
    fn find_cost(&self, step: &Range<usize>, mut low: u128, high: u128) -> Option<u128> {
        let mut high = match self.try_limit(step, high) {
            Fit::Costs(cost) => cost,
            Fit::Needs(_) => return None,
        };
        while low < high {
            match self.try_limit(step, low + (high - low) / 2) {
                Fit::Costs(cost) => high = cost,
                Fit::Needs(cost) => low = cost,
            }
        }
        Some(high)
    }

    /// Whether one micro-batch per rank, each of at most `limit`, can hold the step. Rows that cost
    /// 1, 2 and 4 fit on two ranks under a limit of 5, as [4] and [1, 2], which cost 4 and
    /// `2 * 2`: the step costs 4. Under a limit of 3 no micro-batch holds the last row, which needs
    /// 4.
    fn try_limit(&self, step: &Range<usize>, limit: u128) -> Fit {
        let (mut end, mut largest, mut needed) = (step.end, 0, u128::MAX);
        for _ in 0..self.ranks {
            let row_cost = self.row_costs[end - 1];
            let (rows, left) = (self.max_rows(end, limit), end - step.start);
            if rows >= left {
                return Fit::Costs(largest.max(row_cost.saturating_mul(left as u128)));
            }
            if rows < self.rows_in_budget[end - 1] {
                needed = needed.min(row_cost.saturating_mul(rows as u128 + 1));
            }
            if rows == 0 {
                break;
            }
            largest = largest.max(row_cost.saturating_mul(rows as u128));
            end -= rows;
        }
        Fit::Needs(needed)
    }

    /// The largest number of rows of a micro-batch that ends at `end`.
    fn max_rows(&self, end: usize, limit: u128) -> usize {
        let (in_budget, row_cost) = (self.rows_in_budget[end - 1], self.row_costs[end - 1]);
        let in_limit = match (u64::try_from(limit), u64::try_from(row_cost)) {
            (_, Ok(0)) => u64::MAX,
            (Ok(limit), Ok(row_cost)) => limit / row_cost,
            _ => u64::try_from(limit / row_cost).unwrap_or(u64::MAX),
        };
        in_budget.min(usize::try_from(in_limit).unwrap_or(usize::MAX))
    }

    /// Where the micro-batches of a step begin. They are cut from the longest sample down, but
    /// leave at least one sample for each remaining rank. Rows that cost 1, 2 and 4 on two ranks
    /// give [0, 2].
    fn cut(&self, step: Range<usize>) -> Vec<usize> {
        let limit = self.find_cost(&step, self.row_costs[step.end - 1], u128::MAX).unwrap_or(u128::MAX);
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
            (range.len() <= planner.rows_in_budget[range.end - 1]).then(|| rows * planner.row_costs[range.end - 1])
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
            let longest = row_costs[lengths.len() - 1];
            prop_assert_eq!(planner.find_cost(&whole, longest, u128::MAX), want);
            prop_assert_eq!(planner.reach(lengths.len()) == 0, want.is_some());
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
