//! The exact minimum of `padded_tokens + overhead_tokens * micro_batches`.
//!
//! Some optimal partition is contiguous in the sorted order: refilling its micro-batches with the
//! sorted samples, with the same number of rows each, raises no maximum. So this recurrence solves
//! the problem, where `D[j]` is the least cost of the first `j` samples, `length_j` the longest of
//! them, and `w` the cost of a row of a given length:
//!
//! ```text
//! D[j] = min over i of D[i] + overhead + (j - i) * w(length_j)
//! ```
//!
//! Lengths 2, 3, 3 with an overhead of 1 give D = 0, 3, 7, 10. The last is `0 + 1 + 3 * 3`: all
//! samples in one micro-batch.
//!
//! `w` does not decrease with the length. So for `i < i'`, the advantage of `i'` over `i` only
//! grows with `j` (the cost is Monge). The feasible window `(j - i) * length_j <= budget` only
//! moves forward. Once `i'` is better, `i` is never better again. So a queue has the candidates
//! `i`, each with the first `j` for which it is the best; one binary search finds that `j` for a
//! new candidate. (A convex-hull queue is wrong here: it drops points that become optimal once the
//! front expires.)
//!
//! Costs are integers, so that no rounding decides a tie. Ties go to the smallest `i`, which is the
//! longest last micro-batch.

use std::collections::VecDeque;
use std::ops::{Add, Mul, Sub};

use super::sorted::{Run, SortedLengths};
use super::{Plan, check_budget, check_overhead};
use crate::CoreError;

/// Plans micro-batches with the exact minimum of `padded_tokens + overhead_tokens * micro_batches`
/// under `longest * rows <= budget`. O(n log n).
///
/// With a very large overhead it has the fewest micro-batches, and among those partitions the
/// fewest padded tokens.
pub fn optimal(lengths: &[i32], micro_token_budget: i64, overhead_tokens: i64) -> Result<Plan, CoreError> {
    let overhead = check_overhead(overhead_tokens)?;
    let sorted = SortedLengths::new(lengths)?;
    let budget = check_budget(micro_token_budget, sorted.longest())?;
    let offsets = find_offsets(&sorted.runs, budget, overhead, 1);
    Ok(Plan::contiguous(lengths, sorted, offsets))
}

/// Where the micro-batches of the optimum begin. Each sample is `rows` rows (a pair is two).
pub(crate) fn find_offsets(runs: &[Run], budget: u64, overhead: u64, rows: u64) -> Vec<u32> {
    let (samples, longest) = runs.last().map_or((0, 0), |run| (i128::from(run.end), i128::from(run.length)));
    // An overhead above the padded tokens of any partition decides first, however large it is.
    let overhead = i128::from(overhead).min(samples * longest * i128::from(rows) + 1);
    solve(runs, budget, Objective { overhead, scale: i128::from(rows), per_row: 0 })
}

/// Where the micro-batches begin in the partition into exactly `count` micro-batches with the
/// fewest padded tokens.
///
/// `count` must be at least what greedy needs and at most the number of samples. Because the cost
/// is Monge, the padding is convex in the count. So some price per micro-batch either gives the
/// count, or gives two partitions, one with fewer and one with more, which are then spliced.
pub(crate) fn find_offsets_for_count(runs: &[Run], budget: u64, count: usize) -> Vec<u32> {
    let price = find_least_price(runs, budget, count);
    let fewest = solve_with_price(runs, budget, price, Ties::FewestMicroBatches);
    if fewest.len() > count {
        return fewest;
    }
    splice(&fewest, &solve_with_price(runs, budget, price, Ties::MostMicroBatches), count)
}

/// The least price at which a best partition has at most `count` micro-batches.
fn find_least_price(runs: &[Run], budget: u64, count: usize) -> i128 {
    // A partition into `count` micro-batches has `count + 1` offsets.
    let is_enough = |price: i128| solve_with_price(runs, budget, price, Ties::FewestMicroBatches).len() <= count + 1;
    let (mut low, mut high) = (0, 1);
    while !is_enough(high) {
        (low, high) = (high + 1, 4 * high);
    }
    while low < high {
        let middle = low + (high - low) / 2;
        (low, high) = if is_enough(middle) { (low, middle) } else { (middle + 1, high) };
    }
    low
}

/// Which of several partitions of equal cost to take.
#[derive(Clone, Copy)]
enum Ties {
    FewestMicroBatches,
    MostMicroBatches,
}

/// The best partition if each micro-batch costs `price` padded tokens. Costs are scaled up so that
/// the count decides only ties: each micro-batch adds 1, or each row that does not begin one.
fn solve_with_price(runs: &[Run], budget: u64, price: i128, ties: Ties) -> Vec<u32> {
    let scale = runs.last().map_or(0, |run| i128::from(run.end)) + 1;
    let (per_micro_batch, per_row) = match ties {
        Ties::FewestMicroBatches => (1, 0),
        Ties::MostMicroBatches => (-1, 1),
    };
    solve(runs, budget, Objective { overhead: price * scale + per_micro_batch, scale, per_row })
}

/// Combines the offsets of two best partitions, one with fewer than `count` micro-batches and one
/// with at least `count`: `more` up to a micro-batch that lies within one of `fewer`, then `fewer`.
/// By the Monge property the result is also a best partition.
///
/// `fewer` [0, 2, 4], `more` [0, 1, 2, 3, 4] and a `count` of 3 give [0, 1, 2, 4].
fn splice(fewer: &[u32], more: &[u32], count: usize) -> Vec<u32> {
    let extra = count + 1 - fewer.len();
    let inside = (0..fewer.len() - 1).find(|&k| more[k + extra + 1] <= fewer[k + 1]);
    let head = inside.unwrap_or(fewer.len() - 2);
    [&more[..=head + extra], &fewer[head + 1..]].concat()
}

/// The cost of a micro-batch of `rows` samples, the longest of `length` tokens: `overhead + rows *
/// (scale * length + per_row)`.
#[derive(Debug, Clone, Copy)]
struct Objective {
    overhead: i128,
    scale: i128,
    per_row: i128,
}

/// Where the micro-batches of the cheapest partition begin. Computes in 64 bits if no sum can
/// overflow them, otherwise in 128 bits.
fn solve(runs: &[Run], budget: u64, objective: Objective) -> Vec<u32> {
    let Some(last) = runs.last() else {
        return vec![0];
    };
    let largest_row = objective.scale * i128::from(last.length) + objective.per_row;
    let largest = (i128::from(last.end) + 1) * (objective.overhead + largest_row);
    let parents = if largest <= i128::from(i64::MAX) {
        let row_cost = |run: &Run| objective.scale as i64 * i64::from(run.length) + objective.per_row as i64;
        Search::new(runs, budget, objective.overhead as i64, row_cost).find_parents()
    } else {
        let row_cost = |run: &Run| objective.scale * i128::from(run.length) + objective.per_row;
        Search::new(runs, budget, objective.overhead, row_cost).find_parents()
    };
    trace_offsets(&parents)
}

/// The offsets from the best last begin for each end: the parents [0, 0, 0, 2] give [0, 2, 3].
fn trace_offsets(parents: &[u32]) -> Vec<u32> {
    let mut end = parents.len() as u32 - 1;
    let mut offsets = vec![end];
    while end > 0 {
        end = parents[end as usize];
        offsets.push(end);
    }
    offsets.reverse();
    offsets
}

trait Cost: Copy + Ord + Default + From<u32> + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> {}
impl Cost for i64 {}
impl Cost for i128 {}

/// A run of equal lengths with its budget in rows and its cost.
struct PricedRun<T> {
    begin: u32,
    end: u32,
    /// How many rows of this length fit in a micro-batch.
    max_rows: u32,
    /// The cost of each of its rows.
    row_cost: T,
}

/// The micro-batches that begin at `start`, as candidates for the last one. They are the best for
/// the ends from `first_end` up to the `first_end` of the next candidate.
#[derive(Clone, Copy)]
struct Candidate<T> {
    start: u32,
    /// The cost of everything before `start`.
    cost: T,
    first_end: u32,
    /// The run of the sample at position `first_end - 1`.
    first_run: u32,
    /// The last end for which a micro-batch from `start` on is feasible.
    last_end: u32,
    /// The run of the sample at position `last_end`, the first that does not fit.
    expiry_run: u32,
}

struct Search<T> {
    runs: Vec<PricedRun<T>>,
    overhead: T,
    queue: VecDeque<Candidate<T>>,
    /// The run in which the newest candidate stops being feasible. It never moves back.
    horizon: usize,
}

impl<T: Cost> Search<T> {
    fn new(runs: &[Run], budget: u64, overhead: T, row_cost: impl Fn(&Run) -> T) -> Self {
        let max_rows = |run: &Run| {
            budget.checked_div(u64::from(run.length)).and_then(|rows| u32::try_from(rows).ok()).unwrap_or(u32::MAX)
        };
        let priced =
            |run: &Run| PricedRun { begin: run.begin, end: run.end, max_rows: max_rows(run), row_cost: row_cost(run) };
        Self { runs: runs.iter().map(priced).collect(), overhead, queue: VecDeque::new(), horizon: 0 }
    }

    /// For each end `0..=n`, where the last micro-batch begins in the best partition of the samples
    /// before that end. Lengths 2, 3, 3 with an overhead of 1 give [0, 0, 0, 0].
    fn find_parents(mut self) -> Vec<u32> {
        let samples = self.runs.last().map_or(0, |run| run.end);
        let mut parents = vec![0; samples as usize + 1];
        let mut cost = T::default();
        for run in 0..self.runs.len() {
            let row_cost = self.runs[run].row_cost;
            for end in self.runs[run].begin + 1..=self.runs[run].end {
                self.push(end - 1, cost, run as u32);
                let best = self.find_best(end);
                cost = best.cost + self.overhead + T::from(end - best.start) * row_cost;
                parents[end as usize] = best.start;
            }
        }
        parents
    }

    /// The best candidate for `end`. Drops the candidates before it, which are no longer needed.
    fn find_best(&mut self, end: u32) -> Candidate<T> {
        while self.queue.len() > 1 && self.queue[1].first_end <= end {
            self.queue.pop_front();
        }
        self.queue[0]
    }

    /// Adds the candidate that begins at `start`. Drops those that it beats from their first end
    /// on.
    ///
    /// It costs `extra` more than the last candidate and computes `saved_rows` fewer rows, so that
    /// it is better exactly where `saved_rows * row_cost > extra`.
    fn push(&mut self, start: u32, cost: T, run: u32) {
        let (last_end, expiry_run) = self.find_last_end(start);
        let mut new = Candidate { start, cost, first_end: start + 1, first_run: run, last_end, expiry_run };
        while let Some(&last) = self.queue.back() {
            let (first_end, first_run) =
                if last.first_end > start { (last.first_end, last.first_run) } else { (start + 1, run) };
            let extra = cost - last.cost;
            let saved_rows = T::from(start - last.start);
            if last.last_end < first_end || extra < saved_rows * self.runs[first_run as usize].row_cost {
                self.queue.pop_back();
                continue;
            }
            let ahead = &self.runs[first_run as usize + 1..self.runs.len().min(last.expiry_run as usize + 1)];
            let not_better = ahead.partition_point(|run| saved_rows * run.row_cost <= extra);
            (new.first_end, new.first_run) = match ahead.get(not_better) {
                Some(run) => (run.begin + 1, first_run + 1 + not_better as u32),
                None => (last.last_end.saturating_add(1), last.expiry_run),
            };
            break;
        }
        if (new.first_run as usize) < self.runs.len() {
            self.queue.push_back(new);
        }
    }

    /// The last end for which a micro-batch that begins at `start` is feasible, and the run of the
    /// sample at that position, the first that does not fit. Lengths 2, 3, 3 with a budget of 6 and
    /// a `start` of 0 give the end 2: three rows of 3 would be 9 tokens.
    fn find_last_end(&mut self, start: u32) -> (u32, u32) {
        while let Some(run) = self.runs.get(self.horizon) {
            let end = start.saturating_add(run.max_rows);
            if end < run.end {
                return (end.max(run.begin), self.horizon as u32);
            }
            self.horizon += 1;
        }
        (u32::MAX, self.horizon as u32)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::greedy_offsets;

    /// The fewest padded tokens for each number of micro-batches, by dynamic programming over ends
    /// and counts.
    fn fewest_tokens(lengths: &[i32], budget: u64) -> Vec<Option<u64>> {
        let mut sorted: Vec<u64> = lengths.iter().map(|&length| length as u64).collect();
        sorted.sort_unstable();
        let samples = sorted.len();
        let mut best = vec![vec![None; samples + 1]; samples + 1];
        best[0][0] = Some(0);
        for end in 1..=samples {
            for begin in 0..end {
                let tokens = (end - begin) as u64 * sorted[end - 1];
                for count in (1..=end).filter(|_| tokens <= budget) {
                    let candidate = best[begin][count - 1].map(|before| before + tokens);
                    best[end][count] = [best[end][count], candidate].into_iter().flatten().min();
                }
            }
        }
        best.swap_remove(samples)
    }

    proptest! {
        #[test]
        fn plans_for_a_count_have_that_many_micro_batches_and_the_fewest_tokens(
            lengths in prop_oneof![
                prop::collection::vec(0..5i32, 1..24), prop::collection::vec(0..500i32, 1..24),
                prop::collection::vec(0..=i32::MAX, 1..24),
            ],
            factor in 1..20u64,
        ) {
            let sorted = SortedLengths::new(&lengths).unwrap();
            let budget = u64::from(sorted.longest()).max(1) * factor;
            let expected = fewest_tokens(&lengths, budget);
            let fewest = greedy_offsets(&sorted.runs, budget).len() - 1;
            prop_assert!(expected[..fewest].iter().all(Option::is_none));
            for (count, &tokens) in expected.iter().enumerate().skip(fewest) {
                let plan = Plan::contiguous(&lengths, sorted.clone(), find_offsets_for_count(&sorted.runs, budget, count));
                prop_assert_eq!((plan.len(), Some(plan.padded_tokens())), (count, tokens));
                prop_assert!(plan.iter().all(|rows| !rows.is_empty()));
            }
        }
    }
}
