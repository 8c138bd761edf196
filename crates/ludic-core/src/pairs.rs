//! Preference pairs: groups samples into pairs, and plans micro-batches that keep pairs whole.
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
//! let lengths = [5, 3, 4, 9, 2];
//! assert_eq!(plan(&lengths, &pairs, 20, None)?.iter().collect::<Vec<_>>(), [[4, 1, 0, 2]]);
//! assert_eq!(plan(&lengths, &pairs, 19, None)?.len(), 2);
//! # Ok::<(), ludic_core::CoreError>(())
//! ```

use std::collections::HashMap;
use std::fmt;

use crate::CoreError;
use crate::plan::{Plan, SortedLengths, check_budget, check_overhead, greedy_offsets, optimal_offsets};

/// The id of a pair. The number 1 and the text "1" are different ids.
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

/// The two roles, in the order of the rows of a pair.
const ROLES: [&str; 2] = ["chosen", "rejected"];

/// Complete pairs, and the samples of incomplete ones.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Groups {
    /// The chosen and the rejected sample of each complete pair, in order of first appearance.
    pub pairs: Vec<[u32; 2]>,
    /// The only sample of each incomplete pair, in the same order.
    pub incomplete: Vec<u32>,
}

/// Groups samples by pair id. A pair has one `"chosen"` and one `"rejected"` sample. A pair that
/// lacks either is left out if `drop_incomplete`, and is an error otherwise.
pub fn group(ids: &[PairId<'_>], roles: &[&str], drop_incomplete: bool) -> Result<Groups, CoreError> {
    if ids.len() != roles.len() {
        return Err(CoreError::UnequalColumns {
            first: "pair_ids",
            first_len: ids.len() as u64,
            second: "roles",
            second_len: roles.len() as u64,
        });
    }
    let mut groups = Groups::default();
    for members in collect_members(ids, roles)? {
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

/// The samples of each pair by role, pairs in order of first appearance. The ids a, b, a with the
/// roles chosen, rejected, rejected give [[0, 2], [none, 1]].
fn collect_members(ids: &[PairId<'_>], roles: &[&str]) -> Result<Vec<[Option<u32>; 2]>, CoreError> {
    let mut slots = HashMap::with_capacity(ids.len() / 2 + 1);
    let mut members: Vec<[Option<u32>; 2]> = Vec::with_capacity(ids.len() / 2 + 1);
    let mut previous = None;
    for ((id, role), sample) in ids.iter().zip(roles).zip(0u32..) {
        let Some(role) = ROLES.iter().position(|candidate| candidate == role) else {
            return Err(CoreError::UnknownRole { index: u64::from(sample), role: (*role).to_owned() });
        };
        // The two samples of a pair are usually adjacent: then the second needs no lookup.
        let slot = match previous {
            Some((previous_id, slot)) if previous_id == id => slot,
            _ => *slots.entry(id).or_insert(members.len()),
        };
        previous = Some((id, slot));
        if slot == members.len() {
            members.push([None; 2]);
        }
        if let Some(first) = members[slot][role].replace(sample) {
            let (first, second) = (u64::from(first), u64::from(sample));
            return Err(CoreError::DuplicateRole { pair: id.to_string(), role: ROLES[role], first, second });
        }
    }
    Ok(members)
}

/// Plans micro-batches from pairs of sample indices (chosen, rejected). A pair is two adjacent
/// rows, both as long as its longer sample: `2 * longest * pairs <= budget`. Samples in no pair are
/// in no micro-batch.
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
    let pair_length = |pair: &[u32; 2]| lengths[pair[0] as usize].max(lengths[pair[1] as usize]);
    check_lengths(lengths, &pairs)?;
    let sorted = SortedLengths::new(&pairs.iter().map(pair_length).collect::<Vec<_>>())?;
    // In integers, `2 * longest * pairs <= budget` equals `longest * pairs <= budget / 2`.
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
    // Each pair is two rows: the offsets [0, 1, 3] in pairs are [0, 2, 6] in samples.
    let indices = sorted.order.iter().flat_map(|&pair| pairs[pair as usize]).collect();
    Ok(Plan::padded(lengths, indices, offsets.into_iter().map(|offset| 2 * offset).collect()))
}

/// The pairs as 32-bit indices. Checks that every sample exists and belongs to only one pair.
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

/// Checks that no sample of a pair has a negative length. The length of the pair would hide it.
fn check_lengths(lengths: &[i32], pairs: &[[u32; 2]]) -> Result<(), CoreError> {
    match pairs.iter().flatten().find(|&&sample| lengths[sample as usize] < 0) {
        Some(&sample) => {
            Err(CoreError::NegativeLength { index: u64::from(sample), length: i64::from(lengths[sample as usize]) })
        }
        None => Ok(()),
    }
}
