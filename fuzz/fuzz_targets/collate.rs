//! Arbitrary sequences, masks, log-probs, weights, maximum lengths and indices: every layout holds
//! the samples, or an error has a message.
//!
//! `cargo +nightly fuzz run collate -- -max_total_time=600`
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use ludic_core::collate::{Batch, LogpsOut, PaddedOut, PaddingFreeOut};
use ludic_core::{ColumnInput, CoreError, Floats, Ints, Sample, SampleTable, TableBuilder};

#[derive(Debug, Arbitrary)]
struct Input {
    samples: Vec<AnySample>,
    columns: Columns,
    max_seq_len: i16,
    indices: Vec<i8>,
    pad_token_id: i32,
}

/// A sample. Its action mask has the length of its ids unless `ragged` replaces it, so that not
/// every input fails at the first check.
#[derive(Debug, Arbitrary)]
struct AnySample {
    ids: Vec<(u16, bool)>,
    any_ids: Option<Vec<i64>>,
    ragged: Option<Vec<u8>>,
    attention: Option<Vec<u8>>,
    logps: bool,
    any_logps: Option<Vec<f32>>,
    weight: f64,
}

#[derive(Debug, Arbitrary)]
struct Columns {
    ids: Vec<i64>,
    action: Vec<u8>,
    attention: Option<Vec<i8>>,
    logps: Option<Vec<f64>>,
    weights: Option<Vec<f32>>,
    offsets: Vec<i64>,
}

fn push(builder: &mut TableBuilder, sample: &AnySample) -> Result<(), CoreError> {
    let ids: Vec<i64> = sample.ids.iter().map(|&(id, _)| i64::from(id)).collect();
    let action: Vec<u8> = sample.ids.iter().map(|&(_, action)| u8::from(action)).collect();
    let logps: Vec<f32> = action.iter().filter(|&&bit| bit == 1).map(|_| -0.5).collect();
    let logps = sample.any_logps.as_deref().unwrap_or(&logps);
    builder.push(&Sample {
        input_ids: Ints::I64(sample.any_ids.as_deref().unwrap_or(&ids)),
        action_mask: Ints::U8(sample.ragged.as_deref().unwrap_or(&action)),
        attention_mask: sample.attention.as_deref().map(Ints::U8),
        actor_logps: sample.logps.then_some(Floats::F32(logps)),
        weight: sample.weight,
    })
}

fn build_table(samples: &[AnySample]) -> Result<SampleTable, CoreError> {
    let mut builder = TableBuilder::with_capacity(samples.len(), 0);
    samples.iter().try_for_each(|sample| push(&mut builder, sample))?;
    Ok(builder.finish())
}

fn build_from_columns(columns: &Columns) -> Result<SampleTable, CoreError> {
    SampleTable::from_columns(&ColumnInput {
        input_ids: Ints::I64(&columns.ids),
        action_mask: Ints::U8(&columns.action),
        attention_mask: columns.attention.as_deref().map(Ints::I8),
        actor_logps: columns.logps.as_deref().map(Floats::F64),
        weights: columns.weights.as_deref().map(Floats::F32),
        offsets: Ints::I64(&columns.offsets),
    })
}

/// Checks both layouts of a micro-batch against the lengths and action counts of the samples.
fn check_layouts(table: &SampleTable, input: &Input) -> Result<(), CoreError> {
    let table = table.truncate(i64::from(input.max_seq_len))?;
    let indices: Vec<i64> = input.indices.iter().map(|&index| i64::from(index)).collect();
    let batch = table.batch(&indices)?;
    let width = batch.num_columns();
    let (ids, action) = collate_padded(&table, &batch, i64::from(input.pad_token_id))?;
    let (lengths, counts) = (table.lengths(), table.action_counts());
    let own_line = |(line, &index): (usize, &i64)| [line as i64, 0, i64::from(lengths[index as usize])];
    let turns = batch.turns().unwrap_or_else(|| indices.iter().enumerate().map(own_line).collect());
    let mut ends = vec![0; batch.num_lines()];
    for (&index, turn) in indices.iter().zip(&turns) {
        let [line, begin, end] = turn.map(|value| value as usize);
        assert!(end == lengths[index as usize] as usize && (begin == 0 || begin == ends[line]));
        assert_eq!(action[line * width..][begin..end].iter().sum::<f32>(), counts[index as usize] as f32);
        ends[line] = end;
    }
    let lines = ids.chunks(width.max(1)).zip(&ends);
    for (tokens, padding) in lines.clone().map(|(line, &end)| line.split_at(end)) {
        assert!(tokens.iter().all(|&id| (0..=i64::from(i32::MAX)).contains(&id)));
        assert!(padding.iter().all(|&id| id == i64::from(input.pad_token_id)));
    }
    let packed_ids = collate_padding_free(&table, &batch)?;
    assert_eq!(packed_ids, lines.flat_map(|(line, &end)| &line[..end]).copied().collect::<Vec<_>>());
    Ok(())
}

/// The ids and the action mask of the padded layout.
fn collate_padded(table: &SampleTable, batch: &Batch<'_>, pad: i64) -> Result<(Vec<i64>, Vec<f32>), CoreError> {
    let (samples, size) = (batch.num_samples(), batch.num_lines() * batch.num_columns());
    let (mut ids, mut attention, mut action, mut weight) =
        (vec![-7; size], vec![-7; size], vec![-7.0; size], vec![0.0; samples]);
    let (mut logps, mut sums) = (vec![f32::NAN; size], vec![f32::NAN; samples]);
    let out = LogpsOut { actor_logps: &mut logps[..], old_logp_action: &mut sums[..] };
    batch.collate_padded(
        pad,
        PaddedOut::<i64, f32> {
            input_ids: &mut ids,
            attention_mask: &mut attention,
            action_mask: &mut action,
            weight: &mut weight,
            logps: table.has_actor_logps().then_some(out),
        },
    )?;
    assert!(attention.iter().all(|bit| (0..2).contains(bit)));
    assert!(!table.has_actor_logps() || logps.iter().all(|logp| logp.is_finite()));
    Ok((ids, action))
}

/// The ids of the padding-free layout.
fn collate_padding_free(table: &SampleTable, batch: &Batch<'_>) -> Result<Vec<i64>, CoreError> {
    let (samples, size) = (batch.num_samples(), batch.num_tokens());
    let (mut ids, mut positions, mut action, mut weight) =
        (vec![-7; size], vec![-7; size], vec![0.0; size], vec![0.0; samples]);
    let (mut logps, mut sums) = (vec![f32::NAN; size], vec![f32::NAN; samples]);
    let mut boundaries = vec![-7; batch.num_lines() + 1];
    let out = LogpsOut { actor_logps: &mut logps[..], old_logp_action: &mut sums[..] };
    batch.collate_padding_free(PaddingFreeOut::<i64, i32, f32> {
        input_ids: &mut ids,
        position_ids: &mut positions,
        cu_seqlens: &mut boundaries,
        action_mask: &mut action,
        weight: &mut weight,
        logps: table.has_actor_logps().then_some(out),
    })?;
    assert!(boundaries.is_sorted() && boundaries.last() == Some(&(size as i32)));
    Ok(ids)
}

fuzz_target!(|input: Input| {
    for table in [build_table(&input.samples), build_from_columns(&input.columns)] {
        let result = table.and_then(|table| {
            [&table, &table.chained()].into_iter().try_for_each(|table| check_layouts(table, &input))
        });
        if let Err(error) = result {
            assert!(!error.to_string().is_empty());
        }
    }
});
