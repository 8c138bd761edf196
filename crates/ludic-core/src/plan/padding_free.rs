//! Micro-batches without padding by best fit decreasing: the sum of lengths is at most the budget.
//!
//! Samples are placed in descending order of length. An open micro-batch (a bin) is *waiting* if
//! its free space is below the current length, and otherwise *ready*. A bin that becomes ready has
//! less free space than all bins that were ready before it. So the ready bins form a stack with the
//! fullest on top, and the waiting bins need no search: they are released in descending order of
//! free space. `surplus` closes bins that the tokens do not need.

use std::collections::BinaryHeap;

use super::sorted::SortedLengths;
use super::surplus::close_surplus;
use super::{Plan, accumulate_offsets, check_budget};
use crate::CoreError;

/// Plans micro-batches by best fit decreasing: the longest sample first, each into the fullest bin
/// that still holds it; among equally full ones, into the first that became so. Where that takes
/// more bins than the tokens need, samples are exchanged until one is empty, if a bounded search
/// finds how. O(n + longest), or O(n log n) when lengths are far above their number.
pub fn padding_free(lengths: &[i32], micro_token_budget: i64) -> Result<Plan, CoreError> {
    let sorted = SortedLengths::new(lengths)?;
    let budget = check_budget(micro_token_budget, sorted.longest())?;
    let longest = sorted.longest() as usize;
    let placement = if longest <= sorted.len().saturating_mul(16).max(1 << 14) {
        place(&sorted, budget, Buckets::new(longest))
    } else {
        place(&sorted, budget, Heap::default())
    };
    let (indices, offsets) = placement.layout(&sorted.order);
    let (indices, offsets) = close_surplus(lengths, indices, offsets, budget, fewest_bins(&sorted, budget));
    Ok(Plan::packed(indices, offsets, sorted.num_tokens))
}

/// A lower bound on the number of bins of any plan: the bins for all tokens, and one bin for each
/// sample above half the budget, since no two of these share a bin.
fn fewest_bins(sorted: &SortedLengths, budget: u64) -> usize {
    let by_tokens = usize::try_from(sorted.num_tokens.div_ceil(budget)).unwrap_or(usize::MAX);
    let first_large = sorted.runs.partition_point(|run| u64::from(run.length) * 2 <= budget);
    let large = sorted.runs.get(first_large).map_or(0, |run| sorted.len() - run.begin as usize);
    by_tokens.max(large).max(usize::from(sorted.len() > 0))
}

/// Which samples go to which bin.
struct Placement {
    segments: Vec<Segment>,
    num_bins: u32,
}

/// The samples at positions `begin..end` of the sorted order, which go to one bin.
struct Segment {
    bin: u32,
    begin: u32,
    end: u32,
}

/// A bin and the tokens that it can still take.
#[derive(Clone, Copy)]
struct OpenBin {
    bin: u32,
    free: u64,
}

/// Places all samples. Samples of one length are placed together: the fullest bin stays the fullest
/// as long as it holds another.
fn place(sorted: &SortedLengths, budget: u64, mut waiting: impl WaitingBins) -> Placement {
    let mut placement = Placement { segments: Vec::with_capacity(sorted.len()), num_bins: 0 };
    let mut ready: Vec<OpenBin> = Vec::new();
    for run in sorted.runs.iter().rev() {
        waiting.release(run.length, &mut ready);
        let mut begin = run.begin;
        while begin < run.end {
            let mut open = ready.pop().unwrap_or_else(|| {
                placement.num_bins += 1;
                OpenBin { bin: placement.num_bins - 1, free: budget }
            });
            let rows = count_fitting_rows(open.free, u64::from(run.length), run.end - begin);
            open.free -= u64::from(rows) * u64::from(run.length);
            placement.segments.push(Segment { bin: open.bin, begin, end: begin + rows });
            begin += rows;
            match u32::try_from(open.free) {
                Ok(free) if free < run.length => waiting.insert(open.bin, free),
                _ => ready.push(open),
            }
        }
    }
    placement
}

/// How many of `available` rows of `length` tokens fit in the `free` space, which holds at least
/// one.
fn count_fitting_rows(free: u64, length: u64, available: u32) -> u32 {
    if free < 2 * length {
        return 1;
    }
    let rows = free.checked_div(length).and_then(|rows| u32::try_from(rows).ok());
    rows.map_or(available, |rows| rows.min(available))
}

impl Placement {
    /// The indices and offsets of the plan.
    ///
    /// With the sorted order [2, 0, 1] and the segments (bin 0, 2..3), (bin 1, 1..2), (bin 0,
    /// 0..1), bin 0 holds the samples 1 and 2: the indices are [1, 2, 0] and the offsets [0, 2, 3].
    fn layout(&self, order: &[u32]) -> (Vec<u32>, Vec<u32>) {
        let rows = self.segments.iter().map(|segment| (segment.bin, segment.end - segment.begin));
        let offsets = accumulate_offsets(self.num_bins as usize, rows);
        // Where the next sample of each bin goes.
        let mut next = offsets.clone();
        let mut indices = vec![0u32; order.len()];
        for segment in &self.segments {
            let begin = &mut next[segment.bin as usize];
            for (slot, position) in (*begin..).zip(segment.begin..segment.end) {
                indices[slot as usize] = order[position as usize];
            }
            *begin += segment.end - segment.begin;
        }
        (indices, offsets)
    }
}

/// The bins whose free space is below the current length.
trait WaitingBins {
    fn insert(&mut self, bin: u32, free: u32);
    /// Moves the bins with free space of at least `length` to `ready`, the emptiest first. Among
    /// equally full bins, the last one inserted comes first.
    fn release(&mut self, length: u32, ready: &mut Vec<OpenBin>);
}

/// One linked list of bins for each amount of free space below the longest length. Links are bin
/// numbers plus 1; 0 ends a list. With 5 free tokens in the bins 0 and then 2, `heads[5]` is 3,
/// `next[2]` is 1 and `next[0]` is 0.
struct Buckets {
    /// The last bin inserted in each list.
    heads: Vec<u32>,
    /// For each bin, the bin inserted before it in the same list.
    next: Vec<u32>,
    /// The lists from this one on are empty.
    end: usize,
}

impl Buckets {
    fn new(longest: usize) -> Self {
        Self { heads: vec![0; longest], next: Vec::new(), end: longest }
    }
}

impl WaitingBins for Buckets {
    fn insert(&mut self, bin: u32, free: u32) {
        let slot = bin as usize;
        if slot >= self.next.len() {
            self.next.resize(slot + 1, 0);
        }
        self.next[slot] = self.heads[free as usize];
        self.heads[free as usize] = bin + 1;
    }

    fn release(&mut self, length: u32, ready: &mut Vec<OpenBin>) {
        while self.end > length as usize {
            self.end -= 1;
            let mut link = self.heads[self.end];
            while let Some(bin) = link.checked_sub(1) {
                ready.push(OpenBin { bin, free: self.end as u64 });
                link = self.next[bin as usize];
            }
        }
    }
}

/// A heap, whose size does not depend on the longest length.
#[derive(Default)]
struct Heap {
    /// Free space, insertion number, bin.
    entries: BinaryHeap<(u32, u32, u32)>,
    insertions: u32,
}

impl WaitingBins for Heap {
    fn insert(&mut self, bin: u32, free: u32) {
        self.entries.push((free, self.insertions, bin));
        self.insertions += 1;
    }

    fn release(&mut self, length: u32, ready: &mut Vec<OpenBin>) {
        while let Some((free, _, bin)) = self.entries.peek().copied().filter(|entry| entry.0 >= length) {
            ready.push(OpenBin { bin, free: u64::from(free) });
            self.entries.pop();
        }
    }
}
