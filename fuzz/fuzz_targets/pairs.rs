//! Arbitrary ids, roles, pairs and lengths: plans keep pairs whole and within the budget, and fail
//! exactly on invalid input.
//!
//! `cargo +nightly fuzz run pairs -- -max_total_time=600`
#![no_main]

use std::collections::HashSet;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use ludic_core::pairs::{Groups, PairId, group, plan};

#[derive(Debug, Arbitrary)]
struct Input {
    samples: Vec<(Id, Role, u16)>,
    drop_incomplete: bool,
    budget: u32,
    overhead_tokens: Option<u32>,
    any_pairs: Vec<[i64; 2]>,
    any_lengths: Vec<i32>,
    any_budget: i64,
}

#[derive(Debug, Arbitrary)]
enum Id {
    Number(i8),
    Any(i64),
    Text(String),
}

#[derive(Debug, Arbitrary)]
enum Role {
    Chosen,
    Rejected,
    Text(String),
}

impl Role {
    fn text(&self) -> &str {
        match self {
            Self::Chosen => "chosen",
            Self::Rejected => "rejected",
            Self::Text(text) => text,
        }
    }
}

impl Id {
    fn as_pair_id(&self) -> PairId<'_> {
        match self {
            Self::Number(number) => PairId::Number(i64::from(*number)),
            Self::Any(number) => PairId::Number(*number),
            Self::Text(text) => PairId::Text(text),
        }
    }
}

fn check_groups(ids: &[PairId<'_>], roles: &[&str], groups: &Groups) {
    for &[chosen, rejected] in &groups.pairs {
        let (chosen, rejected) = (chosen as usize, rejected as usize);
        assert_eq!(ids[chosen], ids[rejected]);
        assert_eq!((roles[chosen], roles[rejected]), ("chosen", "rejected"));
    }
    let members: HashSet<u32> = groups.pairs.iter().flatten().chain(&groups.incomplete).copied().collect();
    assert_eq!(members.len(), ids.len(), "a sample is missing or occurs twice");
}

/// Whether planning must succeed: every sample exists and occurs once, and the budget holds two
/// rows of the longest.
fn is_valid(lengths: &[i32], pairs: &[[i64; 2]], budget: i64) -> bool {
    let length = |sample: &i64| usize::try_from(*sample).ok().and_then(|sample| lengths.get(sample).copied());
    let mut seen = HashSet::new();
    let fits = |length: i32| length >= 0 && i128::from(budget) >= 2 * i128::from(length);
    budget > 0 && pairs.iter().flatten().all(|sample| seen.insert(*sample) && length(sample).is_some_and(fits))
}

fn check_plan(lengths: &[i32], pairs: &[[i64; 2]], budget: i64, overhead_tokens: Option<i64>) {
    let result = plan(lengths, pairs, budget, overhead_tokens);
    assert_eq!(result.is_ok(), is_valid(lengths, pairs, budget), "{result:?}");
    let Ok(plan) = result else {
        return;
    };
    let mut planned: Vec<[i64; 2]> = Vec::new();
    for rows in plan.iter() {
        let longest = rows.iter().map(|&row| i128::from(lengths[row as usize])).max();
        let longest = longest.expect("no micro-batch is empty");
        assert!(rows.len() as i128 * longest <= i128::from(budget), "over the budget");
        planned.extend(rows.chunks(2).map(|pair| [i64::from(pair[0]), i64::from(pair[1])]));
    }
    let mut pairs = pairs.to_vec();
    pairs.sort_unstable();
    planned.sort_unstable();
    assert_eq!(planned, pairs);
}

fuzz_target!(|input: Input| {
    let ids: Vec<PairId<'_>> = input.samples.iter().map(|sample| sample.0.as_pair_id()).collect();
    let roles: Vec<&str> = input.samples.iter().map(|sample| sample.1.text()).collect();
    if let Ok(groups) = group(&ids, &roles, input.drop_incomplete) {
        check_groups(&ids, &roles, &groups);
        assert!(input.drop_incomplete || groups.incomplete.is_empty());
        let lengths: Vec<i32> = input.samples.iter().map(|sample| i32::from(sample.2)).collect();
        let pairs: Vec<[i64; 2]> = groups.pairs.iter().map(|pair| pair.map(i64::from)).collect();
        check_plan(&lengths, &pairs, i64::from(input.budget), input.overhead_tokens.map(i64::from));
    }
    check_plan(&input.any_lengths, &input.any_pairs, input.any_budget, None);
});
