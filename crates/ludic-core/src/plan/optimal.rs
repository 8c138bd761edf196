//! The exact minimum of `padded_tokens + overhead_tokens * micro_batches`.
//!
//! Refilling the micro-batches with the sorted samples, keeping the counts, raises no maximum, so
//! some optimal partition is contiguous in sorted order and `D[j] = min over i of D[i] + overhead +
//! (j - i) * w(length_j)` is the whole problem. `w` does not fall with the length, so for `i < i'`
//! the lead of `i'` over `i` only grows with `j` (the cost is Monge), and the feasible window `(j -
//! i) * length_j <= budget` moves one way: once `i'` is better, `i` never returns. Hence a queue of
//! candidates, each with the first position from which it is the best, and a binary search for each
//! new one. (A convex-hull queue is wrong here: a point that it drops can become optimal once the
//! front expires.)
//!
//! Costs are integers, so that no rounding decides a tie; ties go to the smallest `i`, the longest
//! last micro-batch.

use std::collections::VecDeque;
use std::ops::{Add, Mul, Sub};

use super::sorted::{Run, Sorted};
use super::{Plan, check_budget, check_overhead};
use crate::CoreError;

/// The exact minimum of `padded_tokens + overhead_tokens * micro_batches` under `longest * rows <=
/// budget`. O(n log n).
///
/// With a very large overhead it has the fewest micro-batches, and among those partitions the
/// fewest padded tokens.
pub fn optimal(lengths: &[i32], micro_token_budget: i64, overhead_tokens: i64) -> Result<Plan, CoreError> {
    let overhead = check_overhead(overhead_tokens)?;
    let sorted = Sorted::new(lengths)?;
    let budget = check_budget(micro_token_budget, sorted.longest())?;
    let offsets = offsets(&sorted.runs, budget, overhead, 1);
    Ok(Plan::contiguous(lengths, sorted, offsets))
}

/// Where the micro-batches of the optimum begin, when each sample is `rows` rows (a pair is two).
pub(crate) fn offsets(runs: &[Run], budget: u64, overhead: u64, rows: u64) -> Vec<u32> {
    let (samples, longest) = runs.last().map_or((0, 0), |run| (i128::from(run.end), i128::from(run.length)));
    // Above the padding of any partition the overhead decides first, however large it is.
    let overhead = i128::from(overhead).min(samples * longest * i128::from(rows) + 1);
    solve(runs, budget, Objective { overhead, scale: i128::from(rows), per_row: 0 })
}

/// Where the micro-batches begin in the partition into exactly `count` that has the fewest padded
/// tokens.
///
/// `count` must be at least what greedy needs and at most the number of samples. Because the cost
/// is Monge, the padding is convex in the count: a price on each micro-batch finds the count, or
/// two partitions on either side of it.
pub(crate) fn offsets_exactly(runs: &[Run], budget: u64, count: usize) -> Vec<u32> {
    let price = least_price(runs, budget, count);
    let fewest = priced(runs, budget, price, Ties::FewestMicroBatches);
    if fewest.len() > count {
        return fewest;
    }
    splice(&fewest, &priced(runs, budget, price, Ties::MostMicroBatches), count)
}

/// The least price at which a best partition has at most `count` micro-batches.
fn least_price(runs: &[Run], budget: u64, count: usize) -> i128 {
    let enough = |price: i128| priced(runs, budget, price, Ties::FewestMicroBatches).len() <= count + 1;
    let (mut low, mut high) = (0, 1);
    while !enough(high) {
        (low, high) = (high + 1, 4 * high);
    }
    while low < high {
        let middle = low + (high - low) / 2;
        (low, high) = if enough(middle) { (low, middle) } else { (middle + 1, high) };
    }
    low
}

/// Which of the partitions of equal cost is taken.
#[derive(Clone, Copy)]
enum Ties {
    FewestMicroBatches,
    MostMicroBatches,
}

/// The best partition when each micro-batch costs `price` padded tokens. Costs are scaled so that
/// the count only decides ties: it adds 1 for each micro-batch, or 1 for each row that does not
/// begin one.
fn priced(runs: &[Run], budget: u64, price: i128, ties: Ties) -> Vec<u32> {
    let scale = runs.last().map_or(0, |run| i128::from(run.end)) + 1;
    let (per_micro_batch, per_row) = match ties {
        Ties::FewestMicroBatches => (1, 0),
        Ties::MostMicroBatches => (-1, 1),
    };
    solve(runs, budget, Objective { overhead: price * scale + per_micro_batch, scale, per_row })
}

/// Two best partitions, one of fewer and one of at least `count`, exchanged where a micro-batch of
/// the second lies within one of the first: by the Monge property both results are best too, and
/// one of them has `count`.
fn splice(fewer: &[u32], more: &[u32], count: usize) -> Vec<u32> {
    let extra = count + 1 - fewer.len();
    let inside = (0..fewer.len() - 1).find(|&k| more[k + extra + 1] <= fewer[k + 1]);
    let head = inside.unwrap_or(fewer.len() - 2);
    [&more[..=head + extra], &fewer[head + 1..]].concat()
}

/// What a micro-batch of `rows` samples of at most `length` costs: `overhead + rows * (scale *
/// length + per_row)`.
#[derive(Debug, Clone, Copy)]
struct Objective {
    overhead: i128,
    scale: i128,
    per_row: i128,
}

/// Machine words where no sum can overflow them, twice as wide otherwise.
fn solve(runs: &[Run], budget: u64, objective: Objective) -> Vec<u32> {
    let Some(last) = runs.last() else {
        return vec![0];
    };
    let row = objective.scale * i128::from(last.length) + objective.per_row;
    let largest = (i128::from(last.end) + 1) * (objective.overhead + row);
    let parents = if largest <= i128::from(i64::MAX) {
        let weight = |run: &Run| objective.scale as i64 * i64::from(run.length) + objective.per_row as i64;
        Search::new(runs, budget, objective.overhead as i64, weight).parents()
    } else {
        let weight = |run: &Run| objective.scale * i128::from(run.length) + objective.per_row;
        Search::new(runs, budget, objective.overhead, weight).parents()
    };
    walk(&parents)
}

/// The offsets in order from the best predecessor of each end.
fn walk(parents: &[u32]) -> Vec<u32> {
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

/// A run of equal lengths as the search needs it.
struct Step<T> {
    begin: u32,
    end: u32,
    /// How many rows of this length fit.
    rows: u32,
    /// What each of its rows costs.
    weight: T,
}

/// A micro-batch that would begin at `start`: the best of the queue for ends from `from` until the
/// next one's `from`.
#[derive(Clone, Copy)]
struct Candidate<T> {
    start: u32,
    /// Cost of everything before `start`.
    cost: T,
    from: u32,
    from_step: u32,
    /// The last end for which it is feasible, and the step that holds the end after it.
    until: u32,
    until_step: u32,
}

struct Search<T> {
    steps: Vec<Step<T>>,
    overhead: T,
    queue: VecDeque<Candidate<T>>,
    /// The step in which the newest candidate stops being feasible; it moves one way.
    horizon: usize,
}

impl<T: Cost> Search<T> {
    fn new(runs: &[Run], budget: u64, overhead: T, weight: impl Fn(&Run) -> T) -> Self {
        let rows = |run: &Run| {
            budget.checked_div(u64::from(run.length)).and_then(|rows| u32::try_from(rows).ok()).unwrap_or(u32::MAX)
        };
        let step = |run: &Run| Step { begin: run.begin, end: run.end, rows: rows(run), weight: weight(run) };
        Self { steps: runs.iter().map(step).collect(), overhead, queue: VecDeque::new(), horizon: 0 }
    }

    /// For each end `1..=n`, where the last micro-batch of the best partition of the samples before
    /// it begins.
    fn parents(mut self) -> Vec<u32> {
        let samples = self.steps.last().map_or(0, |step| step.end);
        let mut parents = vec![0; samples as usize + 1];
        let mut cost = T::default();
        for step in 0..self.steps.len() {
            let weight = self.steps[step].weight;
            for end in self.steps[step].begin + 1..=self.steps[step].end {
                self.push(end - 1, cost, step as u32);
                let best = self.front(end);
                cost = best.cost + self.overhead + T::from(end - best.start) * weight;
                parents[end as usize] = best.start;
            }
        }
        parents
    }

    /// Drop what `end` has left behind; the front is then the best candidate for it.
    fn front(&mut self, end: u32) -> Candidate<T> {
        while self.queue.len() > 1 && self.queue[1].from <= end {
            self.queue.pop_front();
        }
        self.queue[0]
    }

    /// Enter the micro-batches that begin at `start`, dropping candidates that it beats from their
    /// first end on.
    fn push(&mut self, start: u32, cost: T, step: u32) {
        let (until, until_step) = self.reach(start);
        let mut new = Candidate { start, cost, from: start + 1, from_step: step, until, until_step };
        while let Some(&last) = self.queue.back() {
            let (from, from_step) = if last.from > start { (last.from, last.from_step) } else { (start + 1, step) };
            let lead = cost - last.cost;
            let rows = T::from(start - last.start);
            if last.until < from || lead < rows * self.steps[from_step as usize].weight {
                self.queue.pop_back();
                continue;
            }
            let ahead = &self.steps[from_step as usize + 1..self.steps.len().min(last.until_step as usize + 1)];
            let passed = ahead.partition_point(|step| rows * step.weight <= lead);
            (new.from, new.from_step) = match ahead.get(passed) {
                Some(step) => (step.begin + 1, from_step + 1 + passed as u32),
                None => (last.until.saturating_add(1), last.until_step),
            };
            break;
        }
        if (new.from_step as usize) < self.steps.len() {
            self.queue.push_back(new);
        }
    }

    /// The last end for which a micro-batch that begins at `start` is feasible, and the step that
    /// holds the one after.
    fn reach(&mut self, start: u32) -> (u32, u32) {
        while let Some(step) = self.steps.get(self.horizon) {
            let end = start.saturating_add(step.rows);
            if end < step.end {
                return (end.max(step.begin), self.horizon as u32);
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

    /// The fewest padded tokens for each number of micro-batches, by the programme over ends and
    /// counts.
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
                    let with = best[begin][count - 1].map(|before| before + tokens);
                    best[end][count] = [best[end][count], with].into_iter().flatten().min();
                }
            }
        }
        best.swap_remove(samples)
    }

    proptest! {
        #[test]
        fn exactly_as_many_micro_batches_as_asked_with_the_fewest_tokens(
            lengths in prop_oneof![
                prop::collection::vec(0..5i32, 1..24), prop::collection::vec(0..500i32, 1..24),
                prop::collection::vec(0..=i32::MAX, 1..24),
            ],
            factor in 1..20u64,
        ) {
            let sorted = Sorted::new(&lengths).unwrap();
            let budget = u64::from(sorted.longest()).max(1) * factor;
            let expected = fewest_tokens(&lengths, budget);
            let fewest = greedy_offsets(&sorted.runs, budget).len() - 1;
            prop_assert!(expected[..fewest].iter().all(Option::is_none));
            for (count, &tokens) in expected.iter().enumerate().skip(fewest) {
                let plan = Plan::contiguous(&lengths, sorted.clone(), offsets_exactly(&sorted.runs, budget, count));
                prop_assert_eq!((plan.len(), Some(plan.padded_tokens())), (count, tokens));
                prop_assert!(plan.iter().all(|rows| !rows.is_empty()));
            }
        }
    }
}
