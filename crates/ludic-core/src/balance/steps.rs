//! Padded micro-batches made step by step, for ranks that wait for each other.
//!
//! In the sorted order a step is a range of samples, cut into one micro-batch a rank. What a step
//! costs is its costliest micro-batch, plus its overhead: `D[b] = min over a of D[a] + cost of the
//! step a..b + overhead`. The cost of a step is the least for which cutting from the longest on,
//! each micro-batch as large as it may be, needs no more micro-batches than there are ranks: what
//! is cut first is dearest a row, so that no other cut reaches further. Integers decide, and of
//! equal steps the one with the fewest samples, so that the plan is the same on every machine.

use std::ops::Range;

/// Steps end at no more places than these: at every sample while there are fewer, else evenly among
/// them.
const MOST_ENDS: usize = 128;

/// Samples in ascending order, and what a step may cost.
pub(crate) struct Steps<'a> {
    lengths: &'a [u64],
    /// What a row of each sample's length costs.
    prices: &'a [u128],
    budget: u64,
    ranks: usize,
    overhead: u128,
}

impl<'a> Steps<'a> {
    pub(crate) fn new(lengths: &'a [u64], prices: &'a [u128], budget: u64, ranks: usize, overhead: u128) -> Self {
        Self { lengths, prices, budget, ranks, overhead }
    }

    /// Where the micro-batches begin, `ranks` of them in each step. None where the steps cannot end
    /// where they are looked for: every micro-batch needs a sample and room for the longest.
    pub(crate) fn offsets(&self) -> Option<Vec<u32>> {
        let ends = self.ends();
        let sums = self.sums();
        let mut best: Vec<Option<(u128, usize)>> = vec![None; ends.len()];
        *best.first_mut()? = Some((0, 0));
        for end in 1..ends.len() {
            best[end] = self.best_step(&ends, &sums, &best, end);
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

    fn ends(&self) -> Vec<usize> {
        let samples = self.lengths.len();
        let count = samples.min(MOST_ENDS);
        (0..=count).map(|end| end * samples / count.max(1)).collect()
    }

    /// The cost of the samples before each, one row each.
    fn sums(&self) -> Vec<u128> {
        let mut sum = 0;
        let mut sums = vec![0];
        sums.extend(self.prices.iter().map(|price| {
            sum += price;
            sum
        }));
        sums
    }

    /// The cost of everything before `ends[end]`, and the end at which its last step begins.
    fn best_step(
        &self,
        ends: &[usize],
        sums: &[u128],
        best: &[Option<(u128, usize)>],
        end: usize,
    ) -> Option<(u128, usize)> {
        let mut found: Option<(u128, usize)> = None;
        for begin in (0..end).rev() {
            let step = ends[begin]..ends[end];
            if step.len() < self.ranks {
                continue;
            }
            let even = (sums[step.end] - sums[step.start]).div_ceil(self.ranks as u128);
            let least = even.max(self.prices[step.end - 1]);
            // A step with more samples costs no less, so that none of those that follow is better,
            // or fits.
            if found.is_some_and(|(cost, _)| least.saturating_add(self.overhead) >= cost)
                || !self.fits(&step, u128::MAX)
            {
                break;
            }
            let Some((before, _)) = best[begin] else { continue };
            let fixed = before.saturating_add(self.overhead);
            let limit = found.map_or(u128::MAX, |(cost, _)| cost.saturating_sub(fixed).saturating_sub(1));
            if least <= limit && self.fits(&step, limit) {
                found = Some((fixed.saturating_add(self.cost(&step, least, limit)), begin));
            }
        }
        found
    }

    /// The least cost of a step between one that is no more than it and one at which it fits.
    fn cost(&self, step: &Range<usize>, mut least: u128, enough: u128) -> u128 {
        // No micro-batch costs more than all rows at the price of the longest.
        let mut most = enough.min(self.prices[step.end - 1].saturating_mul(step.len() as u128));
        while least < most {
            let middle = least + (most - least) / 2;
            if self.fits(step, middle) {
                most = middle;
            } else {
                least = middle + 1;
            }
        }
        most
    }

    /// Whether as many micro-batches as ranks hold the step, none of them dearer than `limit`.
    fn fits(&self, step: &Range<usize>, limit: u128) -> bool {
        let mut end = step.end;
        for _ in 0..self.ranks {
            let rows = self.rows(end, limit);
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

    /// How many rows the micro-batch before `end` may have.
    fn rows(&self, end: usize, limit: u128) -> usize {
        let (length, price) = (self.lengths[end - 1], self.prices[end - 1]);
        let in_budget = self.budget.checked_div(length).unwrap_or(u64::MAX);
        let in_limit = match (u64::try_from(limit), u64::try_from(price)) {
            (_, Ok(0)) => u64::MAX,
            (Ok(limit), Ok(price)) => limit / price,
            _ => u64::try_from(limit / price).unwrap_or(u64::MAX),
        };
        usize::try_from(in_budget.min(in_limit)).unwrap_or(usize::MAX)
    }

    /// Where the micro-batches of a step begin: as cut from the longest, but that every rank is
    /// left a sample.
    fn cut(&self, step: Range<usize>) -> Vec<usize> {
        let limit = self.cost(&step, self.prices[step.end - 1], u128::MAX);
        let mut begins = Vec::with_capacity(self.ranks);
        let mut end = step.end;
        for rest in (0..self.ranks).rev() {
            let rows = self.rows(end, limit).min(end - step.start - rest);
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

    /// The least that the costliest of `ranks` consecutive parts costs, over all ways to cut.
    fn least_by_trying(steps: &Steps<'_>, step: Range<usize>, ranks: usize) -> Option<u128> {
        let part = |range: &Range<usize>| {
            let rows = range.len() as u128;
            (rows * u128::from(steps.lengths[range.end - 1]) <= u128::from(steps.budget))
                .then(|| rows * steps.prices[range.end - 1])
        };
        if ranks == 1 {
            return part(&step);
        }
        (step.start + 1..step.end)
            .filter_map(|cut| Some(least_by_trying(steps, step.start..cut, ranks - 1)?.max(part(&(cut..step.end))?)))
            .min()
    }

    proptest! {
        #[test]
        fn a_step_costs_the_least_that_any_cut_of_it_costs(
            mut lengths in prop::collection::vec(0..60u64, 1..12), ranks in 1..5usize, factor in 1..8u64,
        ) {
            lengths.sort_unstable();
            prop_assume!(lengths.len() >= ranks);
            let prices: Vec<u128> = lengths.iter().map(|&length| u128::from(7 * length + length * length)).collect();
            let budget = lengths[lengths.len() - 1].max(1) * factor;
            let steps = Steps::new(&lengths, &prices, budget, ranks, 5);
            let whole = 0..lengths.len();
            let want = least_by_trying(&steps, whole.clone(), ranks);
            prop_assert_eq!(steps.fits(&whole, u128::MAX), want.is_some());
            if let Some(want) = want {
                let begins = steps.cut(whole);
                prop_assert!(begins.len() == ranks && begins[0] == 0 && begins.is_sorted_by(|a, b| a < b));
                let ends = begins[1..].iter().copied().chain([lengths.len()]);
                let dearest = begins.iter().zip(ends).map(|(&begin, end)| (end - begin) as u128 * prices[end - 1]).max();
                prop_assert_eq!(dearest, Some(want));
            }
        }
    }
}
