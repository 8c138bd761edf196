//! The stable ascending order of lengths, and the runs of equal length in it.

use crate::CoreError;

/// Consecutive samples of one length, positions `begin..end` of the sorted order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Run {
    pub length: u32,
    pub begin: u32,
    pub end: u32,
}

/// Samples by ascending length, equal lengths by ascending index.
#[derive(Debug, Clone)]
pub(crate) struct Sorted {
    pub order: Vec<u32>,
    pub runs: Vec<Run>,
    pub num_tokens: u64,
}

impl Sorted {
    /// Counting sort when the range of lengths is small beside their number, radix sort when it is
    /// not.
    pub fn new(lengths: &[i32]) -> Result<Self, CoreError> {
        let Some((shortest, longest)) = range(lengths)? else {
            return Ok(Self { order: Vec::new(), runs: Vec::new(), num_tokens: 0 });
        };
        let span = (longest - shortest) as usize + 1;
        let (order, runs) = if span <= lengths.len().saturating_mul(2) {
            counting_sort(lengths, shortest, span)
        } else {
            radix_sort(lengths, shortest, span)
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

/// The shortest and the longest length, or the first thing that is wrong with them.
fn range(lengths: &[i32]) -> Result<Option<(u32, u32)>, CoreError> {
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

fn counting_sort(lengths: &[i32], shortest: u32, span: usize) -> (Vec<u32>, Vec<Run>) {
    let mut next = vec![0u32; span];
    for &length in lengths {
        next[(length as u32 - shortest) as usize] += 1;
    }
    // Written without a branch, which a processor could not foresee: an empty run is overwritten by
    // the next.
    let mut runs = vec![Run::default(); span.min(lengths.len()) + 1];
    let (mut found, mut begin) = (0, 0);
    for (slot, length) in next.iter_mut().zip(shortest..) {
        let end = begin + *slot;
        runs[found] = Run { length, begin, end };
        found += usize::from(end > begin);
        *slot = begin;
        begin = end;
    }
    runs.truncate(found);
    let mut order = vec![0u32; lengths.len()];
    for (&length, index) in lengths.iter().zip(0u32..) {
        let slot = &mut next[(length as u32 - shortest) as usize];
        order[*slot as usize] = index;
        *slot += 1;
    }
    (order, runs)
}

/// Two stable passes over half the bits each while a histogram stays small beside the lengths, else
/// one comparison sort.
fn radix_sort(lengths: &[i32], shortest: u32, span: usize) -> (Vec<u32>, Vec<Run>) {
    let half = (usize::BITS - (span - 1).leading_zeros()).div_ceil(2);
    let mut keys: Vec<u64> =
        lengths.iter().zip(0u64..).map(|(&length, index)| u64::from(length as u32 - shortest) << 32 | index).collect();
    if 1 << half > lengths.len() {
        keys.sort_unstable();
    } else {
        let mut other = vec![0; keys.len()];
        scatter(&keys, &mut other, 32, half);
        scatter(&other, &mut keys, 32 + half, half);
    }
    let runs = runs_of(&keys, shortest);
    (keys.into_iter().map(|key| key as u32).collect(), runs)
}

/// A stable pass: `from` into `to` by `bits` bits of the keys above `shift`.
fn scatter(from: &[u64], to: &mut [u64], shift: u32, bits: u32) {
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

fn runs_of(keys: &[u64], shortest: u32) -> Vec<Run> {
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
            let sorted = Sorted::new(&lengths)?;
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
