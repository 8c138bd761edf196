//! Laws of truncation and selection, which are views of a table.

mod samples;

use ludic_core::CoreError;
use proptest::prelude::*;
use samples::table;

proptest! {
    #[test]
    fn truncating_twice_is_truncating_to_the_shorter(samples in samples::samples(), a in 1i64..160, b in 1i64..160) {
        let whole = table(&samples).unwrap();
        let twice = whole.truncate(a).unwrap().truncate(b).unwrap();
        let once = whole.truncate(a.min(b)).unwrap();
        prop_assert_eq!(twice.lengths(), once.lengths());
        prop_assert_eq!(twice.action_counts(), once.action_counts());
        prop_assert_eq!(twice.original_lengths(), whole.lengths());
    }

    #[test]
    fn a_view_leaves_the_table_unchanged(samples in samples::samples(), limit in 1i64..160) {
        let whole = table(&samples).unwrap();
        let lengths = whole.lengths();
        let cut = whole.truncate(limit).unwrap();
        prop_assert!(cut.lengths().iter().all(|&length| i64::from(length) <= limit));
        prop_assert_eq!(whole.lengths(), lengths);
    }

    #[test]
    fn select_returns_the_samples_in_the_order_of_the_indices((samples, limit, indices) in samples::batch()) {
        let cut = table(&samples).unwrap().truncate(limit as i64).unwrap();
        let view = cut.select(&indices).unwrap();
        let pick = |column: Vec<i32>| indices.iter().map(|&at| column[at as usize]).collect::<Vec<_>>();
        prop_assert_eq!(view.lengths(), pick(cut.lengths()));
        prop_assert_eq!(view.original_lengths(), pick(cut.original_lengths()));
        prop_assert_eq!(view.action_counts(), pick(cut.action_counts()));
    }

    #[test]
    fn an_index_outside_the_table_is_refused(samples in samples::samples(), beyond in 0i64..5) {
        let table = table(&samples).unwrap();
        for index in [samples.len() as i64 + beyond, -1 - beyond, i64::MIN, i64::MAX] {
            let want = CoreError::IndexOutOfRange { index, samples: samples.len() };
            prop_assert_eq!(table.select(&[index]).unwrap_err(), want);
        }
    }
}

#[test]
fn a_length_that_is_not_positive_is_refused() {
    let table = table(&[]).unwrap();
    for value in [0, -1, i64::MIN] {
        assert_eq!(table.truncate(value).unwrap_err(), CoreError::NotPositive { name: "max_seq_len", value });
    }
}

#[test]
fn a_length_beyond_32_bits_cuts_nothing() {
    let samples =
        [samples::Owned { ids: vec![1; 9], action: vec![1; 9], attention: vec![1; 9], logps: None, weight: 1.0 }];
    assert_eq!(table(&samples).unwrap().truncate(i64::MAX).unwrap().lengths(), [9]);
}
