//! Laws of preference pairs.

mod oracle;

use ludic_core::CoreError;
use ludic_core::pairs::{PairId, group, plan};
use ludic_core::plan::{greedy, optimal};
use proptest::prelude::*;

/// The two lengths of each pair, and a budget that holds any pair.
fn pair_lengths() -> impl Strategy<Value = (Vec<i32>, i64)> {
    oracle::workload(120).prop_map(|(mut lengths, budget)| {
        lengths.truncate(lengths.len() / 2 * 2);
        (lengths, budget.saturating_mul(2))
    })
}

/// Pair k has the samples 2k and 2k + 1. The first is chosen in even pairs, the second in odd ones:
/// 6 samples give [0, 1], [3, 2], [4, 5].
fn pair_indices(samples: usize) -> Vec<[i64; 2]> {
    (0..samples as i64 / 2)
        .map(|pair| if pair % 2 == 0 { [2 * pair, 2 * pair + 1] } else { [2 * pair + 1, 2 * pair] })
        .collect()
}

/// The (id, role) of the samples of up to 20 pairs in any order. Some pairs lack a sample.
fn samples() -> impl Strategy<Value = Vec<(i64, &'static str)>> {
    let halves = prop_oneof![Just(&["chosen", "rejected"][..]), Just(&["chosen"][..]), Just(&["rejected"][..])];
    let pairs = prop::collection::vec(halves, 0..20);
    let flat = |pairs: Vec<&'static [&'static str]>| {
        let of_pair =
            |(id, roles): (usize, &'static [&'static str])| roles.iter().map(move |&role| (id as i64 - 5, role));
        pairs.into_iter().enumerate().flat_map(of_pair).collect::<Vec<_>>()
    };
    pairs.prop_map(flat).prop_shuffle()
}

proptest! {
    #[test]
    fn a_pair_is_never_split((lengths, budget) in pair_lengths(), overhead in prop::option::of(oracle::overhead())) {
        let pairs = pair_indices(lengths.len());
        let plan = plan(&lengths, &pairs, budget, overhead).unwrap();
        oracle::every_index_once(lengths.len(), plan.iter())?;
        for rows in plan.iter() {
            prop_assert!(!rows.is_empty());
            prop_assert!(oracle::padded(&lengths, rows) <= i128::from(budget));
            for pair in rows.chunks(2) {
                let pair: Vec<i64> = pair.iter().map(|&row| i64::from(row)).collect();
                prop_assert_eq!(&pair[..], &pairs[pair[0] as usize / 2][..]);
            }
        }
        let lists: Vec<Vec<u32>> = plan.iter().map(<[u32]>::to_vec).collect();
        prop_assert_eq!(i128::from(plan.padded_tokens()), oracle::padded_tokens(&lengths, &lists));
    }

    #[test]
    fn a_pair_is_planned_as_two_rows_of_its_longer_sample((lengths, budget) in pair_lengths(), overhead in prop::option::of(0..1000i64)) {
        let longer: Vec<i32> = lengths.chunks(2).map(|pair| pair[0].max(pair[1])).collect();
        // 2 * rows + overhead = 2 * (rows + overhead / 2): the same plan for an even overhead.
        let overhead = overhead.map(|tokens| 2 * tokens);
        let expected = match overhead {
            Some(tokens) => optimal(&longer, budget / 2, tokens / 2),
            None => greedy(&longer, budget / 2),
        }.unwrap();
        let plan = plan(&lengths, &pair_indices(lengths.len()), budget, overhead).unwrap();
        let planned_pairs: Vec<u32> = plan.indices().chunks(2).map(|pair| pair[0] / 2).collect();
        prop_assert_eq!(planned_pairs, expected.indices());
        prop_assert_eq!(plan.offsets().iter().map(|&offset| offset / 2).collect::<Vec<_>>(), expected.offsets());
        prop_assert_eq!(plan.padded_tokens(), 2 * expected.padded_tokens());
    }

    #[test]
    fn groups_are_those_of_a_linear_search(samples in samples()) {
        let ids: Vec<PairId> = samples.iter().map(|sample| PairId::Number(sample.0)).collect();
        let roles: Vec<&str> = samples.iter().map(|sample| sample.1).collect();
        let find = |id: i64, role: &str| samples.iter().position(|sample| *sample == (id, role)).map(|position| position as u32);
        let mut order: Vec<i64> = Vec::new();
        samples.iter().for_each(|sample| if !order.contains(&sample.0) { order.push(sample.0) });
        let both = |id: i64| Some([find(id, "chosen")?, find(id, "rejected")?]);
        let groups = group(&ids, &roles, true).unwrap();
        prop_assert_eq!(groups.pairs, order.iter().filter_map(|&id| both(id)).collect::<Vec<_>>());
        let alone = order.iter().filter(|&&id| both(id).is_none()).map(|&id| find(id, "chosen").or(find(id, "rejected")));
        prop_assert_eq!(groups.incomplete.iter().map(|&only| Some(only)).collect::<Vec<_>>(), alone.collect::<Vec<_>>());
        prop_assert_eq!(group(&ids, &roles, false).is_err(), !groups.incomplete.is_empty());
    }

    #[test]
    fn a_second_sample_of_a_role_is_refused(samples in samples(), twice in any::<prop::sample::Index>()) {
        prop_assume!(!samples.is_empty());
        let again = samples[twice.index(samples.len())];
        let samples = [samples, vec![again]].concat();
        let ids: Vec<PairId> = samples.iter().map(|sample| PairId::Number(sample.0)).collect();
        let roles: Vec<&str> = samples.iter().map(|sample| sample.1).collect();
        let first = samples.iter().position(|sample| *sample == again).unwrap() as u64;
        let (pair, second) = (again.0.to_string(), samples.len() as u64 - 1);
        let expected = CoreError::DuplicateRole { pair, role: again.1, first, second };
        prop_assert_eq!(group(&ids, &roles, true), Err(expected));
    }
}

#[test]
fn the_documented_example_has_two_micro_batches() {
    // Pair lengths 5, 3, 6. Ascending 3, 5, 6: 2 * 5 * 2 = 20 <= 20, 2 * 6 * 3 = 36 > 20.
    let plan = plan(&[5, 4, 3, 2, 6, 6], &[[0, 1], [2, 3], [4, 5]], 20, None).unwrap();
    assert_eq!(plan.iter().collect::<Vec<_>>(), [&[2, 3, 0, 1][..], &[4, 5][..]]);
    assert_eq!(plan.padded_tokens(), 4 * 5 + 2 * 6);
}

#[test]
fn a_budget_for_one_row_is_too_small_for_a_pair() {
    let refused = plan(&[5, 4], &[[0, 1]], 9, None).unwrap_err();
    assert_eq!(refused, CoreError::PairBudgetTooSmall { budget: 9, longest: 5 });
    assert!(refused.to_string().contains("micro_token_budget"));
    assert_eq!(plan(&[5, 4], &[[0, 1]], 10, None).unwrap().len(), 1);
}

#[test]
fn samples_in_no_pair_are_left_out() {
    assert_eq!(plan(&[5, 4, 9, -1], &[[1, 0]], 10, Some(256)).unwrap().indices(), [1, 0]);
}

#[test]
fn wrong_pairs_are_named() {
    let lengths = [5, 4, -3];
    assert_eq!(plan(&lengths, &[[0, 3]], 99, None), Err(CoreError::PairIndex { pair: 0, sample: 3, samples: 3 }));
    assert_eq!(plan(&lengths, &[[-1, 0]], 99, None), Err(CoreError::PairIndex { pair: 0, sample: -1, samples: 3 }));
    assert_eq!(plan(&lengths, &[[0, 1], [1, 0]], 99, None), Err(CoreError::PairRepeats { pair: 1, sample: 1 }));
    assert_eq!(plan(&lengths, &[[0, 0]], 99, None), Err(CoreError::PairRepeats { pair: 0, sample: 0 }));
    assert_eq!(plan(&lengths, &[[0, 2]], 99, None), Err(CoreError::NegativeLength { index: 2, length: -3 }));
    assert_eq!(plan(&lengths, &[], 0, None), Err(CoreError::BudgetNotPositive { budget: 0 }));
}

#[test]
fn wrong_roles_are_named() {
    let ids = [PairId::Text("a"), PairId::Text("a"), PairId::Number(1), PairId::Text("1")];
    let roles = ["chosen", "rejected", "chosen", "rejected"];
    let groups = group(&ids, &roles, true).unwrap();
    assert_eq!((groups.pairs, groups.incomplete), (vec![[0, 1]], vec![2, 3]));
    let incomplete = group(&ids, &roles, false).unwrap_err().to_string();
    assert!(incomplete.starts_with("Incomplete preference pair 1: it has only its chosen sample"), "{incomplete}");
    let twice = CoreError::DuplicateRole { pair: "\"a\"".into(), role: "chosen", first: 0, second: 1 };
    assert_eq!(group(&ids[..2], &["chosen", "chosen"], true), Err(twice));
    assert_eq!(group(&ids[..1], &["Chosen"], true), Err(CoreError::UnknownRole { index: 0, role: "Chosen".into() }));
    assert!(matches!(
        group(&ids, &roles[..3], true),
        Err(CoreError::UnequalColumns { first_len: 4, second_len: 3, .. })
    ));
}
