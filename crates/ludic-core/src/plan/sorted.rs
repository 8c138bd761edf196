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
    /// Counting sort when the range of lengths is small beside their number, a comparison sort otherwise.
    pub fn new(lengths: &[i32]) -> Result<Self, CoreError> {
        let Some((shortest, longest)) = range(lengths)? else {
            return Ok(Self { order: Vec::new(), runs: Vec::new(), num_tokens: 0 });
        };
        let span = (longest - shortest) as usize + 1;
        let (order, runs) = if span <= lengths.len().saturating_mul(8) {
            counting_sort(lengths, shortest, span)
        } else {
            comparison_sort(lengths)
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
    // Written without a branch, which a processor could not foresee: an empty run is overwritten by the next.
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

fn comparison_sort(lengths: &[i32]) -> (Vec<u32>, Vec<Run>) {
    let mut keys: Vec<u64> = lengths.iter().zip(0u64..).map(|(&length, index)| (length as u64) << 32 | index).collect();
    keys.sort_unstable();
    let mut runs: Vec<Run> = Vec::new();
    for (key, end) in keys.iter().zip(1u32..) {
        let length = (key >> 32) as u32;
        match runs.last_mut() {
            Some(run) if run.length == length => run.end = end,
            _ => runs.push(Run { length, begin: end - 1, end }),
        }
    }
    (keys.into_iter().map(|key| key as u32).collect(), runs)
}
