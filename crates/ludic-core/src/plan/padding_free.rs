//! Micro-batches without padding: the sum of lengths is at most the budget, by best fit decreasing.

use std::collections::BTreeMap;

use super::sorted::Sorted;
use super::{Plan, check_budget};
use crate::CoreError;

/// Above this budget a table with one entry for each amount of free space is too large to be fast.
const DENSE_BUDGET: u64 = 1 << 24;

/// Best fit decreasing: the longest sample first, each into the fullest micro-batch that still holds it; among equally
/// full ones the one filled last. O(n) for budgets below 2^24, O(n log n) above.
pub fn padding_free(lengths: &[i32], micro_token_budget: i64) -> Result<Plan, CoreError> {
    let sorted = Sorted::new(lengths)?;
    let budget = check_budget(micro_token_budget, sorted.longest())?;
    let dense = budget <= DENSE_BUDGET.min((sorted.len() as u64).saturating_mul(64).max(1 << 16));
    let placed = if dense {
        place(&sorted, budget, Buckets::new(budget))
    } else {
        place(&sorted, budget, BTreeMap::new())
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

/// Equal lengths go in together: a bin that was the fullest stays the fullest as long as it holds another.
fn place(sorted: &Sorted, budget: u64, mut open: impl FreeSpace) -> Placed {
    let mut placed = Placed {
        segments: Vec::with_capacity(sorted.len()),
        bins: 0,
    };
    for run in sorted.runs.iter().rev() {
        let length = u64::from(run.length);
        let mut begin = run.begin;
        while begin < run.end {
            let (bin, free) = open.take(length).unwrap_or_else(|| {
                placed.bins += 1;
                (placed.bins - 1, budget)
            });
            let rest = u64::from(run.end - begin);
            let rows = if free < 2 * length {
                1
            } else {
                free.checked_div(length).unwrap_or(rest).min(rest)
            };
            open.put(bin, free - rows * length);
            let end = begin + rows as u32;
            placed.segments.push(Segment { bin, begin, end });
            begin = end;
        }
    }
    placed
}

impl Placed {
    fn layout(&self, order: &[u32]) -> (Vec<u32>, Vec<u32>) {
        let mut offsets = vec![0u32; self.bins as usize + 1];
        for segment in &self.segments {
            offsets[segment.bin as usize + 1] += segment.end - segment.begin;
        }
        for bin in 1..offsets.len() {
            offsets[bin] += offsets[bin - 1];
        }
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

/// Open micro-batches by free space.
trait FreeSpace {
    /// Take out the one with the least free space of at least `length`, the last put in among equals.
    fn take(&mut self, length: u64) -> Option<(u32, u64)>;
    fn put(&mut self, bin: u32, free: u64);
}

impl FreeSpace for BTreeMap<u64, Vec<u32>> {
    fn take(&mut self, length: u64) -> Option<(u32, u64)> {
        let (&free, bins) = self.range_mut(length..).next()?;
        let bin = bins.pop()?;
        if bins.is_empty() {
            self.remove(&free);
        }
        Some((bin, free))
    }

    fn put(&mut self, bin: u32, free: u64) {
        self.entry(free).or_default().push(bin);
    }
}

/// One stack of bins for each amount of free space, and a bitmap over the stacks that are not empty.
struct Buckets {
    /// The top of each stack, plus one; 0 for an empty stack.
    top: Vec<u32>,
    /// The bin below each bin in its stack, plus one.
    below: Vec<u32>,
    occupied: Bitmap,
}

impl Buckets {
    fn new(budget: u64) -> Self {
        let size = budget as usize + 1;
        Self {
            top: vec![0; size],
            below: Vec::new(),
            occupied: Bitmap::new(size),
        }
    }
}

impl FreeSpace for Buckets {
    fn take(&mut self, length: u64) -> Option<(u32, u64)> {
        let free = self.occupied.first_from(length as usize)?;
        let bin = self.top[free] - 1;
        self.top[free] = self.below[bin as usize];
        if self.top[free] == 0 {
            self.occupied.clear(free);
        }
        Some((bin, free as u64))
    }

    fn put(&mut self, bin: u32, free: u64) {
        let free = free as usize;
        if bin as usize == self.below.len() {
            self.below.push(0);
        }
        self.below[bin as usize] = self.top[free];
        self.top[free] = bin + 1;
        self.occupied.set(free);
    }
}

/// A set of small integers that finds the next member: each level has one bit for each word of the level below.
struct Bitmap {
    levels: Vec<Vec<u64>>,
}

impl Bitmap {
    fn new(size: usize) -> Self {
        let mut levels = vec![vec![0u64; size.div_ceil(64)]];
        while let Some(words) = levels.last().map(Vec::len).filter(|&words| words > 1) {
            levels.push(vec![0; words.div_ceil(64)]);
        }
        Self { levels }
    }

    fn set(&mut self, member: usize) {
        let mut bit = member;
        for level in &mut self.levels {
            let word = &mut level[bit / 64];
            let known = *word != 0;
            *word |= 1 << (bit % 64);
            if known {
                return;
            }
            bit /= 64;
        }
    }

    fn clear(&mut self, member: usize) {
        let mut bit = member;
        for level in &mut self.levels {
            let word = &mut level[bit / 64];
            *word &= !(1 << (bit % 64));
            if *word != 0 {
                return;
            }
            bit /= 64;
        }
    }

    /// The least member that is at least `member`.
    fn first_from(&self, member: usize) -> Option<usize> {
        let mut bit = member;
        for (height, level) in self.levels.iter().enumerate() {
            let word = level.get(bit / 64)? & (!0 << (bit % 64));
            if word != 0 {
                return Some(self.descend(height, bit / 64 * 64 + word.trailing_zeros() as usize));
            }
            bit = bit / 64 + 1;
        }
        None
    }

    /// The least member below `bit` of the level at `height`.
    fn descend(&self, height: usize, mut bit: usize) -> usize {
        for level in self.levels[..height].iter().rev() {
            bit = bit * 64 + level[bit].trailing_zeros() as usize;
        }
        bit
    }
}
