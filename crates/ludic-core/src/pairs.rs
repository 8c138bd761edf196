//! Preference pairs: grouped by id, checked, and planned as atoms of two rows.
//!
//! ```
//! use ludic_core::pairs::{PairId, group, plan};
//!
//! let ids = ["a", "b", "a", "c", "b"].map(PairId::Text);
//! let groups = group(&ids, &["chosen", "rejected", "rejected", "chosen", "chosen"], true)?;
//! assert_eq!(groups.pairs, [[0, 2], [4, 1]]);
//! assert_eq!(groups.incomplete, [3]);
//! // Two pairs of at most 5 tokens are four rows: 4 * 5 = 20. The shorter pair comes first.
//! let pairs = [[0, 2], [4, 1]];
//! assert_eq!(plan(&[5, 3, 4, 9, 2], &pairs, 20, None)?.iter().collect::<Vec<_>>(), [[4, 1, 0, 2]]);
//! assert_eq!(plan(&[5, 3, 4, 9, 2], &pairs, 19, None)?.len(), 2);
//! # Ok::<(), ludic_core::CoreError>(())
//! ```

use std::collections::HashMap;
use std::fmt;

use crate::CoreError;
use crate::plan::{Plan, Sorted, check_budget, check_overhead, greedy_offsets, optimal_offsets};

/// What names a pair. The number 1 and the text "1" are different pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PairId<'a> {
    /// A number.
    Number(i64),
    /// A text.
    Text(&'a str),
}

impl fmt::Display for PairId<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(formatter, "{number}"),
            Self::Text(text) => write!(formatter, "{text:?}"),
        }
    }
}

/// The two roles, in the order in which a pair's rows stand.
const ROLES: [&str; 2] = ["chosen", "rejected"];

/// The samples of each pair, and what was left out.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Groups {
    /// Chosen and rejected sample of each complete pair, in order of the pairs' first appearance.
    pub pairs: Vec<[u32; 2]>,
    /// The only sample of each incomplete pair, in the same order.
    pub incomplete: Vec<u32>,
}

/// Group samples by pair id. Each pair has one `"chosen"` and one `"rejected"`; one that lacks
/// either is left out, or an error unless `drop_incomplete`.
pub fn group(ids: &[PairId<'_>], roles: &[&str], drop_incomplete: bool) -> Result<Groups, CoreError> {
    if ids.len() != roles.len() {
        return Err(CoreError::UnequalColumns {
            first: "pair_ids",
            first_len: ids.len() as u64,
            second: "roles",
            second_len: roles.len() as u64,
        });
    }
    let found = collect(ids, roles)?;
    let mut groups = Groups::default();
    for members in found {
        match members {
            [Some(chosen), Some(rejected)] => groups.pairs.push([chosen, rejected]),
            [Some(only), None] | [None, Some(only)] => groups.incomplete.push(only),
            [None, None] => {}
        }
    }
    match groups.incomplete.first().map(|&only| only as usize) {
        Some(only) if !drop_incomplete => Err(CoreError::IncompletePair {
            pair: ids[only].to_string(),
            has: ROLES[usize::from(roles[only] == ROLES[1])],
            count: groups.incomplete.len() as u64,
        }),
        _ => Ok(groups),
    }
}

/// The samples of each pair by role, in order of first appearance.
fn collect(ids: &[PairId<'_>], roles: &[&str]) -> Result<Vec<[Option<u32>; 2]>, CoreError> {
    let mut slots = HashMap::with_capacity(ids.len() / 2 + 1);
    let mut found: Vec<[Option<u32>; 2]> = Vec::with_capacity(ids.len() / 2 + 1);
    let mut neighbour = None;
    for ((id, role), sample) in ids.iter().zip(roles).zip(0u32..) {
        let Some(role) = ROLES.iter().position(|known| known == role) else {
            return Err(CoreError::UnknownRole { index: u64::from(sample), role: (*role).to_owned() });
        };
        // Most often the two halves of a pair stand side by side: then the second needs no look-up.
        let slot = match neighbour {
            Some((last, slot)) if last == id => slot,
            _ => *slots.entry(id).or_insert(found.len()),
        };
        neighbour = Some((id, slot));
        if slot == found.len() {
            found.push([None; 2]);
        }
        if let Some(first) = found[slot][role].replace(sample) {
            let (first, second) = (u64::from(first), u64::from(sample));
            return Err(CoreError::DuplicateRole { pair: id.to_string(), role: ROLES[role], first, second });
        }
    }
    Ok(found)
}

/// Plan pairs of sample indices (chosen, rejected), each an atom of two rows as long as its longer
/// sample: `2 * longest * pairs <= budget`. Chosen and rejected are neighbours. Samples in no pair
/// are in no micro-batch.
///
/// Greedy without `overhead_tokens`, the exact optimum with it.
pub fn plan(
    lengths: &[i32],
    pairs: &[[i64; 2]],
    micro_token_budget: i64,
    overhead_tokens: Option<i64>,
) -> Result<Plan, CoreError> {
    let overhead = overhead_tokens.map(check_overhead).transpose()?;
    let pairs = check_pairs(lengths.len(), pairs)?;
    let length = |pair: &[u32; 2]| lengths[pair[0] as usize].max(lengths[pair[1] as usize]);
    check_lengths(lengths, &pairs)?;
    let sorted = Sorted::new(&pairs.iter().map(length).collect::<Vec<_>>())?;
    // For whole numbers `2 * rows <= budget` is `rows <= budget / 2`.
    let budget = check_budget(micro_token_budget, 0)? / 2;
    if budget < u64::from(sorted.longest()) {
        return Err(CoreError::PairBudgetTooSmall {
            budget: micro_token_budget as u64,
            longest: u64::from(sorted.longest()),
        });
    }
    let offsets = match overhead {
        Some(overhead) => optimal_offsets(&sorted.runs, budget, overhead, 2),
        None => greedy_offsets(&sorted.runs, budget),
    };
    let indices = sorted.order.iter().flat_map(|&pair| pairs[pair as usize]).collect();
    Ok(Plan::padded(lengths, indices, offsets.into_iter().map(|offset| 2 * offset).collect()))
}

/// The pairs as indices of samples that exist and that no other place uses.
fn check_pairs(samples: usize, pairs: &[[i64; 2]]) -> Result<Vec<[u32; 2]>, CoreError> {
    if samples >= u32::MAX as usize {
        return Err(CoreError::TooManySamples { count: samples as u64 });
    }
    let mut used = vec![false; samples];
    let mut check = |pair: usize, sample: i64| {
        let index = usize::try_from(sample).ok().filter(|&index| index < samples);
        let Some(index) = index else {
            return Err(CoreError::PairIndex { pair: pair as u64, sample, samples: samples as u64 });
        };
        if std::mem::replace(&mut used[index], true) {
            return Err(CoreError::PairRepeats { pair: pair as u64, sample: index as u64 });
        }
        Ok(index as u32)
    };
    pairs
        .iter()
        .enumerate()
        .map(|(pair, &[chosen, rejected])| Ok([check(pair, chosen)?, check(pair, rejected)?]))
        .collect()
}

/// Neither sample of a pair has a negative length; the longer one would hide it.
fn check_lengths(lengths: &[i32], pairs: &[[u32; 2]]) -> Result<(), CoreError> {
    match pairs.iter().flatten().find(|&&sample| lengths[sample as usize] < 0) {
        Some(&sample) => {
            Err(CoreError::NegativeLength { index: u64::from(sample), length: i64::from(lengths[sample as usize]) })
        }
        None => Ok(()),
    }
}
