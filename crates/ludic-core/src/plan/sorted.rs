//! Sorts lengths, and finds the runs of equal lengths.
//!
//! The lengths 3, 1, 3 have the order [1, 0, 2] and two runs: length 1 at 0..1, length 3 at 1..3.

use crate::CoreError;

/// Samples of one length: the positions `begin..end` of the sorted order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Run {
    pub length: u32,
    pub begin: u32,
    pub end: u32,
}

/// Samples by ascending length, equal lengths by ascending index.
#[derive(Debug, Clone)]
pub(crate) struct SortedLengths {
    /// Sample indices in sorted order.
    pub order: Vec<u32>,
    pub runs: Vec<Run>,
    pub num_tokens: u64,
}

impl SortedLengths {
    /// Sorts the lengths: by counting if their range is small compared with their number, otherwise
    /// by radix.
    pub fn new(lengths: &[i32]) -> Result<Self, CoreError> {
        let Some((shortest, longest)) = find_extremes(lengths)? else {
            return Ok(Self { order: Vec::new(), runs: Vec::new(), num_tokens: 0 });
        };
        let num_values = (longest - shortest) as usize + 1;
        let (order, runs) = if num_values <= lengths.len().saturating_mul(2) {
            counting_sort(lengths, shortest, num_values)
        } else {
            radix_sort(lengths, shortest, num_values)
        };
        let num_tokens = runs.iter().map(|run| u64::from(run.length) * u64::from(run.end - run.begin)).sum();
        Ok(Self { order, runs, num_tokens })
    }

    pub fn len(&self) -> usize {
        self.order.len()
    }

    pub fn longest(&self) -> u32 {
        self.runs.last().map_or(0, |run| run.length)
    }
}

/// The shortest and the longest length, or `None` if there are no lengths. Checks that there are
/// not too many and that none is negative.
fn find_extremes(lengths: &[i32]) -> Result<Option<(u32, u32)>, CoreError> {
    if lengths.len() >= u32::MAX as usize {
        return Err(CoreError::TooManySamples { count: lengths.len() as u64 });
    }
    let Some((&first, rest)) = lengths.split_first() else {
        return Ok(None);
    };
    let (shortest, longest) =
        rest.iter().fold((first, first), |(low, high), &length| (low.min(length), high.max(length)));
    if shortest < 0 {
        let index = lengths.iter().position(|&length| length < 0).unwrap_or(0);
        return Err(CoreError::NegativeLength { index: index as u64, length: i64::from(lengths[index]) });
    }
    Ok(Some((shortest as u32, longest as u32)))
}

/// Sorts by counting the samples of each of the `num_values` lengths from `shortest` on. `next` has
/// first the count of each length, then the position of its next sample: for the lengths 3, 1, 3,
/// the counts [1, 0, 2] of the lengths 1, 2 and 3, then the positions [0, 1, 1].
fn counting_sort(lengths: &[i32], shortest: u32, num_values: usize) -> (Vec<u32>, Vec<Run>) {
    let mut next = vec![0u32; num_values];
    for &length in lengths {
        next[(length as u32 - shortest) as usize] += 1;
    }
    // An empty run is overwritten by the next one. This avoids an unpredictable branch.
    let mut runs = vec![Run::default(); num_values.min(lengths.len()) + 1];
    let (mut num_runs, mut begin) = (0, 0);
    for (slot, length) in next.iter_mut().zip(shortest..) {
        let end = begin + *slot;
        runs[num_runs] = Run { length, begin, end };
        num_runs += usize::from(end > begin);
        *slot = begin;
        begin = end;
    }
    runs.truncate(num_runs);
    let mut order = vec![0u32; lengths.len()];
    for (&length, index) in lengths.iter().zip(0u32..) {
        let slot = &mut next[(length as u32 - shortest) as usize];
        order[*slot as usize] = index;
        *slot += 1;
    }
    (order, runs)
}

/// Sorts keys of 64 bits: the length above `shortest` in the upper half, the index in the lower
/// half. Takes two stable passes, each over half of the bits that the lengths use, if the histogram
/// of a pass is small compared with the number of lengths; otherwise one comparison sort.
fn radix_sort(lengths: &[i32], shortest: u32, num_values: usize) -> (Vec<u32>, Vec<Run>) {
    let half_bits = (usize::BITS - (num_values - 1).leading_zeros()).div_ceil(2);
    let mut keys: Vec<u64> =
        lengths.iter().zip(0u64..).map(|(&length, index)| u64::from(length as u32 - shortest) << 32 | index).collect();
    if 1 << half_bits > lengths.len() {
        keys.sort_unstable();
    } else {
        let mut half_sorted = vec![0; keys.len()];
        sort_by_digit(&keys, &mut half_sorted, 32, half_bits);
        sort_by_digit(&half_sorted, &mut keys, 32 + half_bits, half_bits);
    }
    let runs = find_runs(&keys, shortest);
    (keys.into_iter().map(|key| key as u32).collect(), runs)
}

/// One stable pass: sorts `from` into `to` by the digit of `bits` bits above `shift`. By 1 bit
/// above a shift of 0, the keys 3, 2, 1 become 2, 3, 1.
fn sort_by_digit(from: &[u64], to: &mut [u64], shift: u32, bits: u32) {
    let digit = |key: u64| (key >> shift) as usize & ((1 << bits) - 1);
    let mut next = vec![0u32; 1 << bits];
    from.iter().for_each(|&key| next[digit(key)] += 1);
    let mut begin = 0;
    for slot in &mut next {
        begin += std::mem::replace(slot, begin);
    }
    for &key in from {
        let slot = &mut next[digit(key)];
        to[*slot as usize] = key;
        *slot += 1;
    }
}

/// The runs of equal lengths in sorted keys.
fn find_runs(keys: &[u64], shortest: u32) -> Vec<Run> {
    let mut end = 0;
    let run = |keys: &[u64]| {
        let begin = end;
        end += keys.len() as u32;
        Run { length: (keys[0] >> 32) as u32 + shortest, begin, end }
    };
    keys.chunk_by(|a, b| a >> 32 == b >> 32).map(run).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// From as many lengths as there are samples to a thousand times as many, so that each of
        /// the three ways is taken.
        #[test]
        fn the_order_is_the_stable_sort_and_the_runs_are_its_groups(
            lengths in (1i32..2000, 0i32..5000)
                .prop_flat_map(|(span, low)| prop::collection::vec(low..low + span, 0..600))
        ) {
            let sorted = SortedLengths::new(&lengths)?;
            let mut order: Vec<u32> = (0..lengths.len() as u32).collect();
            order.sort_by_key(|&index| lengths[index as usize]);
            prop_assert_eq!(&sorted.order, &order);
            let mut end = 0;
            for run in &sorted.runs {
                prop_assert!(run.begin == end && run.end > end);
                end = run.end;
                let members = &order[run.begin as usize..run.end as usize];
                prop_assert!(members.iter().all(|&index| lengths[index as usize] as u32 == run.length));
            }
            prop_assert_eq!(end as usize, lengths.len());
            prop_assert!(sorted.runs.is_sorted_by(|a, b| a.length < b.length));
            prop_assert_eq!(sorted.num_tokens, lengths.iter().map(|&length| length as u64).sum::<u64>());
        }
    }
}
