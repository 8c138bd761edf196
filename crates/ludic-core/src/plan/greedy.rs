//! The documented greedy plan: samples in ascending order of length, a new micro-batch whenever the
//! next sample would exceed the budget.
//!
//! No partition has fewer micro-batches: any part of a feasible micro-batch is feasible, so taking
//! as many samples as possible from the front is never worse.

use super::sorted::{Run, SortedLengths};
use super::{Plan, check_budget};
use crate::CoreError;

/// Plans micro-batches in ascending order of length (a stable sort). A new one begins when
/// `longest * rows` would exceed the budget. O(n + longest).
pub fn greedy(lengths: &[i32], micro_token_budget: i64) -> Result<Plan, CoreError> {
    let sorted = SortedLengths::new(lengths)?;
    let budget = check_budget(micro_token_budget, sorted.longest())?;
    let offsets = find_offsets(&sorted.runs, budget);
    Ok(Plan::contiguous(lengths, sorted, offsets))
}

/// Where the micro-batches begin. Takes one step per run of equal lengths and one per micro-batch,
/// not one per sample. Lengths 2, 2 and 3 with a budget of 4 give [0, 2, 3].
pub(crate) fn find_offsets(runs: &[Run], budget: u64) -> Vec<u32> {
    let mut offsets = vec![0];
    let mut start = 0;
    for run in runs {
        if u64::from(run.end - start) * u64::from(run.length) <= budget {
            continue;
        }
        // The length is not 0, because the product exceeds the budget. It is at most the budget, so
        // that one row always fits.
        let rows = u32::try_from(budget / u64::from(run.length)).unwrap_or(u32::MAX);
        while run.end - start > rows {
            start = run.begin.max(start + rows);
            offsets.push(start);
        }
    }
    offsets.extend(runs.last().map(|run| run.end));
    offsets
}
