//! Micro-batches without padding: the sum of lengths is at most the budget, by best fit decreasing.
//!
//! Lengths only fall, so an open micro-batch is either waiting (its free space is below the present
//! length) or ready, and those that become ready have less free space than all that were. The ready
//! ones are therefore a stack with the fullest on top, and the waiting ones need no search, only to
//! be handed over in order of falling free space.

use std::collections::BinaryHeap;

use super::sorted::Sorted;
use super::{Plan, begin_offsets, check_budget};
use crate::CoreError;

/// Best fit decreasing: the longest sample first, each into the fullest micro-batch that still
/// holds it; among equally full ones the first that became so. O(n + longest), or O(n log n) when
/// lengths are far above their number.
pub fn padding_free(lengths: &[i32], micro_token_budget: i64) -> Result<Plan, CoreError> {
    let sorted = Sorted::new(lengths)?;
    let budget = check_budget(micro_token_budget, sorted.longest())?;
    let longest = sorted.longest() as usize;
    let placed = if longest <= sorted.len().saturating_mul(16).max(1 << 14) {
        place(&sorted, budget, Buckets::new(longest))
    } else {
        place(&sorted, budget, Heap::default())
    };
    let (indices, offsets) = placed.layout(&sorted.order);
    Ok(Plan::packed(indices, offsets, sorted.num_tokens))
}

/// Which positions of the sorted order go to which micro-batch, in order of placing.
struct Placed {
    segments: Vec<Segment>,
    bins: u32,
}

struct Segment {
    bin: u32,
    begin: u32,
    end: u32,
}

/// An open micro-batch and the tokens that it can still take.
#[derive(Clone, Copy)]
struct Open {
    bin: u32,
    free: u64,
}

/// Equal lengths go in together: what was the fullest stays the fullest as long as it holds
/// another.
fn place(sorted: &Sorted, budget: u64, mut waiting: impl Waiting) -> Placed {
    let mut placed = Placed { segments: Vec::with_capacity(sorted.len()), bins: 0 };
    let mut ready: Vec<Open> = Vec::new();
    for run in sorted.runs.iter().rev() {
        waiting.release(run.length, &mut ready);
        let mut begin = run.begin;
        while begin < run.end {
            let mut open = ready.pop().unwrap_or_else(|| {
                placed.bins += 1;
                Open { bin: placed.bins - 1, free: budget }
            });
            let rows = rows_that_fit(open.free, u64::from(run.length), run.end - begin);
            open.free -= u64::from(rows) * u64::from(run.length);
            placed.segments.push(Segment { bin: open.bin, begin, end: begin + rows });
            begin += rows;
            match u32::try_from(open.free) {
                Ok(free) if free < run.length => waiting.put(open.bin, free),
                _ => ready.push(open),
            }
        }
    }
    placed
}

/// At most `rest` rows of `length` in the `free` space, which holds at least one.
fn rows_that_fit(free: u64, length: u64, rest: u32) -> u32 {
    if free < 2 * length {
        return 1;
    }
    let rows = free.checked_div(length).and_then(|rows| u32::try_from(rows).ok());
    rows.map_or(rest, |rows| rows.min(rest))
}

impl Placed {
    /// The sample indices micro-batch after micro-batch, and where each begins.
    fn layout(&self, order: &[u32]) -> (Vec<u32>, Vec<u32>) {
        let rows = self.segments.iter().map(|segment| (segment.bin, segment.end - segment.begin));
        let offsets = begin_offsets(self.bins as usize, rows);
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

/// Micro-batches whose free space is below the present length.
trait Waiting {
    fn put(&mut self, bin: u32, free: u32);
    /// Hand over all with free space of at least `length`, the emptiest first; among equals the
    /// last put first.
    fn release(&mut self, length: u32, ready: &mut Vec<Open>);
}

/// One list for each amount of free space below the longest length.
struct Buckets {
    /// The last bin put in each list, plus one; 0 for an empty list.
    last: Vec<u32>,
    /// The bin put before each bin in its list, plus one.
    before: Vec<u32>,
    /// The lists from here on are empty.
    end: usize,
}

impl Buckets {
    fn new(longest: usize) -> Self {
        Self { last: vec![0; longest], before: Vec::new(), end: longest }
    }
}

impl Waiting for Buckets {
    fn put(&mut self, bin: u32, free: u32) {
        let bin_slot = bin as usize;
        if bin_slot >= self.before.len() {
            self.before.resize(bin_slot + 1, 0);
        }
        self.before[bin_slot] = self.last[free as usize];
        self.last[free as usize] = bin + 1;
    }

    fn release(&mut self, length: u32, ready: &mut Vec<Open>) {
        while self.end > length as usize {
            self.end -= 1;
            let mut link = self.last[self.end];
            while let Some(bin) = link.checked_sub(1) {
                ready.push(Open { bin, free: self.end as u64 });
                link = self.before[bin as usize];
            }
        }
    }
}

/// The same in space that does not grow with the longest length.
#[derive(Default)]
struct Heap {
    /// Free space, order of putting, bin.
    entries: BinaryHeap<(u32, u32, u32)>,
    puts: u32,
}

impl Waiting for Heap {
    fn put(&mut self, bin: u32, free: u32) {
        self.entries.push((free, self.puts, bin));
        self.puts += 1;
    }

    fn release(&mut self, length: u32, ready: &mut Vec<Open>) {
        while let Some((free, _, bin)) = self.entries.peek().copied().filter(|entry| entry.0 >= length) {
            ready.push(Open { bin, free: u64::from(free) });
            self.entries.pop();
        }
    }
}
