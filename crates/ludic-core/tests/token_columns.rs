//! Token columns: in every view, layout and in bytes they have what a column of log-probabilities
//! with the same values has.

mod samples;

use ludic_core::collate::{LogpsOut, PaddedOut, PaddingFreeOut};
use ludic_core::{CoreError, Floats, SampleTable};
use proptest::prelude::*;
use proptest::sample::Index;
use samples::{Owned, table};

/// The samples with log-probabilities, and a token column of the same values.
fn with_column(samples: &[Owned]) -> SampleTable {
    let values: Vec<f32> = samples.iter().flat_map(|sample| sample.logps.clone().unwrap()).collect();
    table(samples).unwrap().with_token_column("same", Floats::F32(&values)).unwrap()
}

/// Dialogues, with a log-probability for each action.
fn samples_with_logps() -> impl Strategy<Value = Vec<Owned>> {
    samples::dialogues().prop_map(|samples| {
        let number = |sample: Owned| {
            let actions = sample.actions();
            Owned { logps: Some((0..actions).map(|at| sample.ids[at] as f32 - 0.5).collect()), ..sample }
        };
        samples.into_iter().map(number).collect()
    })
}

/// Asserts that both layouts have the same numbers in the column as in the log-probabilities.
fn check_layouts(table: &SampleTable, indices: &[i64]) {
    let batch = table.batch(indices).unwrap();
    let (size, width, samples) = (batch.padded_size().unwrap(), batch.num_columns(), batch.num_samples());
    let (mut ids, mut attention) = (vec![0i64; size], vec![0i64; size]);
    let ([mut action, mut logps, mut column], [mut weight, mut sums]) =
        ([(); 3].map(|()| vec![-7.0f32; size]), [(); 2].map(|()| vec![0.0f32; samples]));
    let out = PaddedOut {
        input_ids: &mut ids[..],
        attention_mask: &mut attention[..],
        action_mask: &mut action[..],
        weight: &mut weight[..],
        logps: Some(LogpsOut { actor_logps: &mut logps[..], old_logp_action: &mut sums[..] }),
    };
    batch.collate_padded(0, out).unwrap();
    batch.collate_token_column(0, width, &mut column).unwrap();
    assert_eq!(column, logps);

    let size = batch.packed_size().unwrap();
    let [mut ids, mut positions] = [(); 2].map(|()| vec![0i64; size]);
    let mut bounds = vec![0i32; batch.num_lines() + 1];
    let [mut action, mut logps, mut column] = [(); 3].map(|()| vec![-7.0f32; size]);
    let out = PaddingFreeOut {
        input_ids: &mut ids[..],
        position_ids: &mut positions[..],
        cu_seqlens: &mut bounds[..],
        action_mask: &mut action[..],
        weight: &mut weight[..],
        logps: Some(LogpsOut { actor_logps: &mut logps[..], old_logp_action: &mut sums[..] }),
    };
    batch.collate_padding_free(out).unwrap();
    batch.collate_token_column(0, 0, &mut column).unwrap();
    assert_eq!(column, logps);
    assert!(batch.collate_token_column(0, width + 1, &mut column[..]).is_err());
}

proptest! {
    #[test]
    fn every_layout_has_the_values(
        samples in samples_with_logps(), chained in any::<bool>(), limit in 1i64..80,
        picked in prop::collection::vec(any::<Index>(), 1..6),
    ) {
        prop_assume!(!samples.is_empty());
        let whole = with_column(&samples);
        let viewed = if chained { whole.chained() } else { whole.clone() }.truncate(limit).unwrap();
        let indices: Vec<i64> = picked.iter().map(|index| index.index(samples.len()) as i64).collect();
        for view in [&viewed, &viewed.select(&indices).unwrap()] {
            check_layouts(view, &(0..view.len() as i64).collect::<Vec<_>>());
            let read = SampleTable::from_bytes(&view.to_bytes().unwrap()).unwrap();
            prop_assert_eq!(read.token_column("same"), view.token_column("same"));
            prop_assert_eq!(read.to_bytes().unwrap(), view.to_bytes().unwrap());
        }
        // A view may get a column of its own if its samples are in order.
        let values = vec![1.5f64; viewed.action_counts().iter().sum::<i32>() as usize];
        let both = viewed.with_token_column("more", Floats::F64(&values)).unwrap();
        prop_assert_eq!(both.token_column_names().collect::<Vec<_>>(), ["more", "same"]);
        let sum: f32 = both.token_column("more").unwrap().iter().sum();
        prop_assert_eq!(sum, 1.5 * values.len() as f32);
    }
}

fn two() -> SampleTable {
    let sample = |action: &[u8]| Owned {
        ids: vec![5; action.len()],
        action: action.to_vec(),
        attention: vec![1; action.len()],
        logps: None,
        weight: 1.0,
    };
    table(&[sample(&[0, 1, 1]), sample(&[0, 1])]).unwrap()
}

#[test]
fn what_cannot_be_a_column_is_refused() {
    let table = two().with_token_column("credit", Floats::F32(&[0.5, 1.0, -1.0])).unwrap();
    let refusal = |name: &str, values: &[f64]| table.with_token_column(name, Floats::F64(values)).unwrap_err();
    assert!(refusal("more", &[1.0, 2.0]).to_string().contains("2 values for 3 action tokens"));
    let error = refusal("more", &[1.0, 2.0, 1e39]);
    assert!(matches!(error, CoreError::NonFiniteToken { sample: 1, position: 0, .. }), "{error}");
    for name in ["credit", "", "a b", "weight", &"a".repeat(65)] {
        assert!(refusal(name, &[1.0; 3]).to_string().starts_with(&format!("token column {name:?} cannot be added")));
    }
    let twice = table.select(&[0, 0]).unwrap().with_token_column("more", Floats::F32(&[1.0; 4]));
    assert!(twice.unwrap_err().to_string().contains("add it before select"));
    let full = (0..15).fold(table.clone(), |table, at| {
        table.with_token_column(&format!("column{at}"), Floats::F32(&[1.0; 3])).unwrap()
    });
    assert!(full.with_token_column("one", Floats::F32(&[1.0; 3])).is_err());
    assert_eq!(SampleTable::from_bytes(&full.to_bytes().unwrap()).unwrap().token_column_names().len(), 16);
}

#[test]
fn damaged_columns_are_refused() {
    let bytes = two().with_token_column("credit", Floats::F32(&[0.5, 1.0, -1.0])).unwrap().to_bytes().unwrap();
    let at = bytes.windows(4).rposition(|four| four == 1.0f32.to_le_bytes()).unwrap();
    let mut damaged = bytes.clone();
    damaged[at..at + 4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    let error = SampleTable::from_bytes(&damaged).unwrap_err().to_string();
    assert!(error.contains("sample 0: credit[2] is inf"), "{error}");
    let mut unknown = bytes;
    let at = unknown.windows(6).position(|six| six == b"token.").unwrap();
    unknown[at] = b'T';
    assert!(SampleTable::from_bytes(&unknown).unwrap_err().to_string().contains("unknown field `Token.credit`"));
}
