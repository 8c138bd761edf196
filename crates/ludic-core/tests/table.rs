//! Laws of tables: samples can be read back, whatever the width of their numbers, and errors name
//! the values that are wrong.

mod samples;

use ludic_core::{ColumnInput, CoreError, Floats, Ints, Sample, SampleTable, TableBuilder};
use proptest::prelude::*;
use samples::{Owned, table};

/// Every sample, read back through a batch of its own.
fn read_back(table: &SampleTable) -> Vec<Contents> {
    (0..table.len() as i64).map(|at| one_row(table, at)).collect()
}

/// Ids, action mask, log-probabilities and attention mask.
type Contents = (Vec<i64>, Vec<f32>, Vec<f32>, Vec<i64>);

fn one_row(table: &SampleTable, at: i64) -> Contents {
    use ludic_core::collate::{LogpsOut, PaddedOut};
    let batch = table.batch(&[at]).unwrap();
    let size = batch.num_tokens();
    let (mut ids, mut attention, mut weight) = (vec![-1i64; size], vec![-1i64; size], [9.0f32]);
    let (mut action, mut logps, mut sum) = (vec![9.0f32; size], vec![9.0f32; size], [9.0f32]);
    let with_logps = table.has_actor_logps();
    let out = LogpsOut { actor_logps: &mut logps[..], old_logp_action: &mut sum[..] };
    batch
        .collate_padded(
            0,
            PaddedOut {
                input_ids: &mut ids,
                attention_mask: &mut attention,
                action_mask: &mut action[..],
                weight: &mut weight[..],
                logps: with_logps.then_some(out),
            },
        )
        .unwrap();
    (ids, action, if with_logps { logps } else { vec![] }, attention)
}

fn columns(samples: &[Owned]) -> SampleTable {
    let ids: Vec<i64> = samples.iter().flat_map(|sample| sample.ids.clone()).collect();
    let action: Vec<u8> = samples.iter().flat_map(|sample| sample.action.clone()).collect();
    let attention: Vec<u8> = samples.iter().flat_map(|sample| sample.attention.clone()).collect();
    let logps: Vec<f32> = samples.iter().flat_map(Owned::aligned_logps).collect();
    let weights: Vec<f64> = samples.iter().map(|sample| sample.weight).collect();
    let mut offsets = vec![0i64];
    samples.iter().for_each(|sample| offsets.push(offsets.last().unwrap() + sample.ids.len() as i64));
    let with_logps = samples.first().is_some_and(|sample| sample.logps.is_some());
    SampleTable::from_columns(&ColumnInput {
        input_ids: Ints::I64(&ids),
        action_mask: Ints::U8(&action),
        attention_mask: Some(Ints::U8(&attention)),
        actor_logps: with_logps.then_some(Floats::F32(&logps)),
        weights: Some(Floats::F64(&weights)),
        offsets: Ints::I64(&offsets),
    })
    .unwrap()
}

/// The sample with one error. Each value of `how` fails another check of `push`.
fn make_invalid(mut sample: Owned, how: u8) -> Owned {
    match how {
        0 => *sample.ids.last_mut().unwrap() = -1,
        1 => *sample.action.last_mut().unwrap() = 2,
        2 => sample.action.push(0),
        3 => *sample.attention.first_mut().unwrap() = 2,
        4 => sample.attention.push(1),
        5 => sample.logps = Some(vec![-1.0; sample.actions() + 1]),
        6 => sample.logps = Some(vec![f32::NAN; sample.actions().max(1)]),
        7 => sample.weight = f64::NAN,
        _ => sample.ids.clear(),
    }
    sample
}

proptest! {
    #[test]
    fn a_refused_sample_leaves_the_builder_unchanged(
        samples in samples::any_samples(), errors in prop::collection::vec((any::<prop::sample::Index>(), 0..9u8), 1..6),
    ) {
        prop_assume!(!samples.is_empty());
        let mut builder = TableBuilder::default();
        for (at, sample) in samples.iter().enumerate() {
            for (which, how) in errors.iter().filter(|(which, _)| which.index(samples.len()) == at) {
                let bad = make_invalid(samples[which.index(samples.len())].clone(), *how);
                prop_assert!(builder.push(&bad.view()).is_err());
            }
            builder.push(&sample.view()).unwrap();
        }
        let (got, want) = (builder.finish(), table(&samples).unwrap());
        prop_assert_eq!(read_back(&got), read_back(&want));
        prop_assert_eq!(got.action_counts(), want.action_counts());
        prop_assert_eq!(got.has_actor_logps(), want.has_actor_logps());
    }

    #[test]
    fn counts_are_those_of_the_samples(samples in samples::any_samples(), limit in 1usize..160) {
        let cut: Vec<Owned> = samples.iter().map(|sample| sample.cut(limit)).collect();
        let table = table(&samples).unwrap().truncate(limit as i64).unwrap();
        let targets = |sample: &Owned| sample.action.iter().skip(1).filter(|&&bit| bit == 1).count() as i32;
        prop_assert_eq!(table.lengths(), cut.iter().map(|sample| sample.ids.len() as i32).collect::<Vec<_>>());
        prop_assert_eq!(table.action_counts(), cut.iter().map(|sample| sample.actions() as i32).collect::<Vec<_>>());
        prop_assert_eq!(table.target_counts(), cut.iter().map(targets).collect::<Vec<_>>());
        prop_assert_eq!(table.num_tokens(), cut.iter().map(|sample| sample.ids.len()).sum::<usize>());
        prop_assert_eq!(table.weights(), samples.iter().map(|sample| sample.weight as f32).collect::<Vec<_>>());
    }

    #[test]
    fn columns_and_samples_make_the_same_table(samples in samples::any_samples()) {
        let (pushed, columns) = (table(&samples).unwrap(), columns(&samples));
        prop_assert_eq!(read_back(&pushed), read_back(&columns));
        prop_assert_eq!(pushed.action_counts(), columns.action_counts());
        prop_assert_eq!(pushed.weights(), columns.weights());
    }

    #[test]
    fn every_width_makes_the_same_table(ids in prop::collection::vec(0u8..128, 1..200)) {
        let mask: Vec<u8> = ids.iter().map(|id| id % 2).collect();
        macro_rules! read_as {
            ($($variant:ident $width:ty),*) => {$({
                let (ids, mask): (Vec<$width>, Vec<$width>) =
                    (ids.iter().map(|&id| id as $width).collect(), mask.iter().map(|&bit| bit as $width).collect());
                let mut builder = TableBuilder::default();
                let sample = Sample { input_ids: Ints::$variant(&ids), action_mask: Ints::$variant(&mask),
                    attention_mask: None, actor_logps: None, weight: 1.0 };
                builder.push(&sample).unwrap();
                read_back(&builder.finish())
            }),*};
        }
        let want = read_as!(I64 i64);
        prop_assert_eq!(&want[0].0, &ids.iter().map(|&id| i64::from(id)).collect::<Vec<_>>());
        for got in [read_as!(I8 i8), read_as!(I16 i16), read_as!(I32 i32), read_as!(U8 u8), read_as!(U16 u16),
                    read_as!(U32 u32), read_as!(U64 u64)] {
            prop_assert_eq!(&got, &want);
        }
    }

    #[test]
    fn an_error_in_an_id_names_the_sample_and_position(
        mut samples in samples::samples(),
        which in any::<prop::sample::Index>(),
        place in any::<prop::sample::Index>(),
        value in prop_oneof![i64::MIN..0, i64::from(i32::MAX) + 1..i64::MAX],
    ) {
        prop_assume!(!samples.is_empty());
        let sample = which.index(samples.len());
        prop_assume!(!samples[sample].ids.is_empty());
        let position = place.index(samples[sample].ids.len());
        samples[sample].ids[position] = value;
        let error = table(&samples).unwrap_err();
        prop_assert_eq!(error, CoreError::TokenId { sample, position, value: i128::from(value) });
    }

    #[test]
    fn a_mask_holds_only_zeros_and_ones(
        samples in samples::samples(), which in any::<prop::sample::Index>(), value in 2u8..=255,
    ) {
        prop_assume!(!samples.is_empty());
        let sample = which.index(samples.len());
        prop_assume!(!samples[sample].ids.is_empty());
        let position = samples[sample].ids.len() - 1;
        for field in ["action_mask", "attention_mask"] {
            let mut bad = samples.clone();
            let mask = if field == "action_mask" { &mut bad[sample].action } else { &mut bad[sample].attention };
            mask[position] = value;
            let want = CoreError::MaskValue { sample, field, position, value: i128::from(value) };
            prop_assert_eq!(table(&bad).unwrap_err(), want);
        }
    }

    #[test]
    fn a_ragged_mask_is_refused(mut samples in samples::samples(), which in any::<prop::sample::Index>(), longer in any::<bool>()) {
        prop_assume!(!samples.is_empty());
        let sample = which.index(samples.len());
        let tokens = samples[sample].ids.len();
        prop_assume!(longer || tokens > 0);
        samples[sample].action.resize(if longer { tokens + 1 } else { tokens - 1 }, 0);
        let length = samples[sample].action.len();
        let want = CoreError::MaskLength { sample, field: "action_mask", length, tokens };
        prop_assert_eq!(table(&samples).unwrap_err(), want);
    }

    #[test]
    fn log_probs_are_on_all_samples_or_on_none(mut samples in samples::samples(), which in any::<prop::sample::Index>()) {
        prop_assume!(samples.len() >= 2);
        let sample = which.index(samples.len());
        samples[sample].logps = match samples[sample].logps {
            Some(_) => None,
            None => Some(vec![-1.0; samples[sample].actions()]),
        };
        let error = table(&samples).unwrap_err();
        // If the first one differs, the error names the second.
        let (at, present) = if sample == 0 { (1, samples[1].logps.is_some()) } else { (sample, samples[sample].logps.is_some()) };
        prop_assert_eq!(&error, &CoreError::MixedLogps { sample: at, present });
        prop_assert!(error.to_string().contains("Mixed presence"));
    }

    #[test]
    fn offsets_that_do_not_span_the_columns_are_refused(mut offsets in prop::collection::vec(-3i64..12, 0..6)) {
        let (ids, mask) = (vec![1i64; 8], vec![1u8; 8]);
        let build = |offsets: &[i64]| SampleTable::from_columns(&ColumnInput {
            input_ids: Ints::I64(&ids), action_mask: Ints::U8(&mask), attention_mask: None, actor_logps: None,
            weights: None, offsets: Ints::I64(offsets),
        });
        let is_increasing = offsets.windows(2).all(|pair| pair[0] < pair[1]);
        let is_valid = offsets.first() == Some(&0) && offsets.last() == Some(&8) && is_increasing;
        prop_assert_eq!(build(&offsets).is_ok(), is_valid);
        // Increasing offsets with the right ends are valid.
        offsets.retain(|&offset| (0..=8).contains(&offset));
        offsets.extend([0, 8]);
        offsets.sort_unstable();
        offsets.dedup();
        prop_assert_eq!(build(&offsets).unwrap().len(), offsets.len() - 1);
    }
}

fn one(action: &[u8], logps: &[f32], weight: f64) -> Owned {
    let length = action.len();
    Owned {
        ids: vec![7; length],
        action: action.to_vec(),
        attention: vec![1; length],
        logps: Some(logps.to_vec()),
        weight,
    }
}

#[test]
fn a_count_of_log_probs_that_differs_from_the_actions_is_refused() {
    let error = table(&[one(&[0, 1, 1], &[-1.0], 1.0)]).unwrap_err();
    assert_eq!(error, CoreError::LogpCount { sample: 0, logps: 1, actions: 2 });
    assert!(error.to_string().contains("Length mismatch"));
}

#[test]
fn log_probs_must_be_finite() {
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = table(&[one(&[0, 1, 1], &[-1.0, value], 1.0)]).unwrap_err();
        assert!(matches!(error, CoreError::NonFiniteLogp { sample: 0, position: 1, .. }), "{error}");
    }
}

#[test]
fn weights_must_be_finite_in_float32() {
    for weight in [f64::NAN, f64::INFINITY, 1e39] {
        let error = table(&[one(&[1], &[-1.0], 0.0), one(&[1], &[-1.0], weight)]).unwrap_err();
        assert!(matches!(error, CoreError::NonFiniteWeight { sample: 1, .. }), "{error}");
    }
}

proptest! {
    #[test]
    fn other_weights_change_nothing_else(samples in samples::dialogues(), limit in 1i64..20, shift in -2.0f64..2.0) {
        let weights: Vec<f64> = (0..samples.len()).map(|index| index as f64 * 0.5 + shift).collect();
        let before = table(&samples).unwrap().chained().truncate(limit).unwrap();
        let after = before.with_weights(Floats::F64(&weights)).unwrap();
        prop_assert_eq!(after.weights(), weights.iter().map(|&weight| weight as f32).collect::<Vec<_>>());
        prop_assert_eq!(read_back(&after), read_back(&before));
        prop_assert_eq!((after.chains(), after.lengths()), (before.chains(), before.lengths()));
        prop_assert_eq!(after.original_lengths(), before.original_lengths());
        let back = after.with_weights(Floats::F32(&before.weights())).unwrap();
        prop_assert_eq!(back.to_bytes().unwrap(), before.to_bytes().unwrap());
    }
}

#[test]
fn weights_are_one_a_sample_and_finite() {
    let two = table(&[one(&[1], &[-1.0], 1.0), one(&[1], &[-1.0], 1.0)]).unwrap();
    let error = two.with_weights(Floats::F64(&[1.0])).unwrap_err();
    assert_eq!(error, CoreError::ColumnLength { column: "weights", length: 1, expected: 2 });
    let error = two.with_weights(Floats::F64(&[1.0, 1e300])).unwrap_err();
    assert_eq!(error, CoreError::NonFiniteWeight { sample: 1, value: 1e300 });
}

#[test]
fn log_probs_of_tokens_that_are_not_actions_are_ignored() {
    let table = SampleTable::from_columns(&ColumnInput {
        input_ids: Ints::U8(&[1, 2, 3]),
        action_mask: Ints::U8(&[0, 1, 0]),
        attention_mask: None,
        actor_logps: Some(Floats::F64(&[f64::NAN, -0.5, f64::INFINITY])),
        weights: None,
        offsets: Ints::U8(&[0, 3]),
    })
    .unwrap();
    assert_eq!(read_back(&table)[0].2, [0.0, -0.5, 0.0]);
    assert_eq!(table.weights(), [1.0]);
}

#[test]
fn an_error_in_a_column_names_the_sample_and_position() {
    let error = SampleTable::from_columns(&ColumnInput {
        input_ids: Ints::I32(&[1, 2, 3, 4, -5]),
        action_mask: Ints::U8(&[0; 5]),
        attention_mask: None,
        actor_logps: None,
        weights: None,
        offsets: Ints::I32(&[0, 2, 3, 5]),
    })
    .unwrap_err();
    assert_eq!(error, CoreError::TokenId { sample: 2, position: 1, value: -5 });
}

#[test]
fn a_sample_without_tokens_is_refused() {
    let none = Owned { ids: vec![], action: vec![], attention: vec![], logps: Some(vec![]), weight: 1.0 };
    assert_eq!(table(&[one(&[1], &[-1.0], 1.0), none]).unwrap_err(), CoreError::NoTokens { sample: 1 });
    let columns = ColumnInput {
        input_ids: Ints::I32(&[1, 2]),
        action_mask: Ints::U8(&[0; 2]),
        attention_mask: None,
        actor_logps: None,
        weights: None,
        offsets: Ints::I32(&[0, 1, 1, 2]),
    };
    assert_eq!(SampleTable::from_columns(&columns).unwrap_err(), CoreError::NoTokens { sample: 1 });
}

#[test]
fn ten_million_rows_make_a_table() {
    let rows = 10_000_000;
    let offsets: Vec<i64> = (0..=rows).collect();
    let (ids, mask) = (vec![1u8; rows as usize], vec![1u8; rows as usize]);
    let input = ColumnInput {
        input_ids: Ints::U8(&ids),
        action_mask: Ints::U8(&mask),
        attention_mask: None,
        actor_logps: None,
        weights: None,
        offsets: Ints::I64(&offsets),
    };
    let table = SampleTable::from_columns(&input).unwrap();
    assert_eq!(table.len(), rows as usize);
    assert_eq!(table.truncate(1).unwrap().num_tokens(), rows as usize);
}
