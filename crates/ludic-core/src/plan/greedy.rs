//! The documented algorithm: ascending stable sort, a new micro-batch whenever the next sample
//! breaks the rule.
//!
//! No partition has fewer micro-batches: any part of a feasible micro-batch is feasible, so taking
//! the most from the front never loses one.

use super::sorted::{Run, Sorted};
use super::{Plan, check_budget};
use crate::CoreError;

/// Ascending stable sort; a new micro-batch when `longest * rows` would exceed the budget. O(n +
/// longest).
pub fn greedy(lengths: &[i32], micro_token_budget: i64) -> Result<Plan, CoreError> {
    let sorted = Sorted::new(lengths)?;
    let budget = check_budget(micro_token_budget, sorted.longest())?;
    let offsets = offsets(&sorted.runs, budget);
    Ok(Plan::contiguous(lengths, sorted, offsets))
}

/// Where the micro-batches begin, read off the runs: one step a run and one a micro-batch, none a
/// sample.
pub(crate) fn offsets(runs: &[Run], budget: u64) -> Vec<u32> {
    let mut offsets = vec![0];
    let mut start = 0;
    for run in runs {
        if u64::from(run.end - start) * u64::from(run.length) <= budget {
            continue;
        }
        // The product exceeds the budget, so the length is not 0; it is at most the budget, so a
        // row always fits.
        let rows = u32::try_from(budget / u64::from(run.length)).unwrap_or(u32::MAX);
        while run.end - start > rows {
            start = run.begin.max(start + rows);
            offsets.push(start);
        }
    }
    offsets.extend(runs.last().map(|run| run.end));
    offsets
}
