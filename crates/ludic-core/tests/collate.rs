//! Laws of collation: each layout equals one that is built value by value, and the samples can be
//! read back from it.

mod samples;

use ludic_core::collate::{Batch, CompactOut, LogpsOut, PaddedOut, PaddingFreeOut};
use ludic_core::{CoreError, SampleTable};
use proptest::prelude::*;
use samples::{Owned, table};

const PAD: i64 = 299;
/// Fills every output before collation, so that a value that is not written shows.
const DIRT: i8 = -77;

#[derive(Debug, Default, PartialEq)]
struct Layout {
    ids: Vec<i64>,
    attention: Vec<i64>,
    positions: Vec<i64>,
    action: Vec<f32>,
    weight: Vec<f32>,
    logps: Vec<f32>,
    sums: Vec<f32>,
    boundaries: Vec<i32>,
}

fn dirty<T: From<i8> + Clone>(size: usize) -> Vec<T> {
    vec![T::from(DIRT); size]
}

fn logps_out<'a>(with_logps: bool, logps: &'a mut [f32], sums: &'a mut [f32]) -> Option<LogpsOut<'a, f32>> {
    with_logps.then_some(LogpsOut { actor_logps: logps, old_logp_action: sums })
}

fn padded(table: &SampleTable, batch: &Batch<'_>) -> Layout {
    let (rows, size) = (batch.num_samples(), batch.num_lines() * batch.num_columns());
    let with_logps = table.has_actor_logps();
    let mut out = Layout {
        ids: dirty(size),
        attention: dirty(size),
        action: dirty(size),
        weight: dirty(rows),
        logps: dirty(if with_logps { size } else { 0 }),
        sums: dirty(if with_logps { rows } else { 0 }),
        ..Layout::default()
    };
    let write = PaddedOut {
        input_ids: &mut out.ids,
        attention_mask: &mut out.attention,
        action_mask: &mut out.action[..],
        weight: &mut out.weight[..],
        logps: logps_out(with_logps, &mut out.logps, &mut out.sums),
    };
    batch.collate_padded(PAD, write).unwrap();
    out
}

fn padding_free(table: &SampleTable, batch: &Batch<'_>) -> Layout {
    let (rows, size) = (batch.num_samples(), batch.num_tokens());
    let with_logps = table.has_actor_logps();
    let mut out = Layout {
        ids: dirty(size),
        positions: dirty(size),
        action: dirty(size),
        weight: dirty(rows),
        logps: dirty(if with_logps { size } else { 0 }),
        sums: dirty(if with_logps { rows } else { 0 }),
        boundaries: dirty(batch.num_lines() + 1),
        ..Layout::default()
    };
    let write = PaddingFreeOut {
        input_ids: &mut out.ids,
        position_ids: &mut out.positions,
        cu_seqlens: &mut out.boundaries[..],
        action_mask: &mut out.action[..],
        weight: &mut out.weight[..],
        logps: logps_out(with_logps, &mut out.logps, &mut out.sums),
    };
    batch.collate_padding_free(write).unwrap();
    out
}

/// The padded layout, built one value after the other.
fn padded_oracle(samples: &[Owned]) -> Layout {
    let longest = samples.iter().map(|sample| sample.ids.len()).max().unwrap();
    let mut want = Layout::default();
    for sample in samples {
        let aligned = sample.aligned_logps();
        for at in 0..longest {
            want.ids.push(*sample.ids.get(at).unwrap_or(&PAD));
            want.attention.push(sample.attention.get(at).map_or(0, |&bit| i64::from(bit)));
            want.action.push(sample.action.get(at).map_or(0.0, |&bit| f32::from(bit)));
            if sample.logps.is_some() {
                want.logps.push(*aligned.get(at).unwrap_or(&0.0));
            }
        }
        want.weight.push(sample.weight as f32);
    }
    want
}

fn check_sums(samples: &[Owned], sums: &[f32]) -> Result<(), TestCaseError> {
    for (sample, &sum) in samples.iter().zip(sums) {
        let exact: f64 = sample.logps.iter().flatten().map(|&logp| f64::from(logp)).sum();
        prop_assert!((f64::from(sum) - exact).abs() <= 1e-6 * exact.abs(), "{sum} for {exact}");
    }
    Ok(())
}

/// The samples of a padded layout, as far as a model sees them: ids, action mask and weight.
fn uncollate(layout: &Layout, rows: usize) -> Vec<(Vec<i64>, Vec<f32>, f32)> {
    let width = layout.ids.len() / rows;
    let row = |at: usize| {
        let cells = at * width..(at + 1) * width;
        let length = layout.attention[cells.clone()].iter().filter(|&&bit| bit == 1).count();
        let tokens = cells.start..cells.start + length;
        (layout.ids[tokens.clone()].to_vec(), layout.action[tokens].to_vec(), layout.weight[at])
    };
    (0..rows).map(row).collect()
}

/// What `uncollate` returns for a sample.
fn visible(sample: &Owned) -> (Vec<i64>, Vec<f32>, f32) {
    (sample.ids.clone(), sample.action.iter().map(|&bit| f32::from(bit)).collect(), sample.weight as f32)
}

proptest! {
    #[test]
    fn padded_equals_the_layout_built_value_by_value(
        samples in samples::samples_with_holes(), limit in 1usize..160, picks in prop::collection::vec(any::<prop::sample::Index>(), 1..8),
    ) {
        prop_assume!(!samples.is_empty());
        let indices: Vec<i64> = picks.iter().map(|pick| pick.index(samples.len()) as i64).collect();
        let table = table(&samples).unwrap().truncate(limit as i64).unwrap();
        let cut: Vec<Owned> = indices.iter().map(|&at| samples[at as usize].cut(limit)).collect();
        let mut got = padded(&table, &table.batch(&indices).unwrap());
        check_sums(&cut, &std::mem::take(&mut got.sums))?;
        prop_assert_eq!(got, padded_oracle(&cut));
    }

    #[test]
    fn collate_then_uncollate_is_the_identity((samples, limit, indices) in samples::batch()) {
        let table = table(&samples).unwrap().truncate(limit as i64).unwrap();
        let layout = padded(&table, &table.batch(&indices).unwrap());
        let cut: Vec<_> = indices.iter().map(|&at| visible(&samples[at as usize].cut(limit))).collect();
        prop_assert_eq!(uncollate(&layout, indices.len()), cut);
    }

    #[test]
    fn padding_free_is_the_samples_one_after_the_other((samples, limit, indices) in samples::batch()) {
        let table = table(&samples).unwrap().truncate(limit as i64).unwrap();
        let got = padding_free(&table, &table.batch(&indices).unwrap());
        let cut: Vec<Owned> = indices.iter().map(|&at| samples[at as usize].cut(limit)).collect();
        check_sums(&cut, &got.sums)?;
        prop_assert_eq!(got.boundaries[0], 0);
        for (at, sample) in cut.iter().enumerate() {
            let span = got.boundaries[at] as usize..got.boundaries[at + 1] as usize;
            let (ids, action, weight) = visible(sample);
            prop_assert_eq!(&got.ids[span.clone()], &ids);
            prop_assert_eq!(&got.action[span.clone()], &action);
            prop_assert_eq!(&got.positions[span.clone()], &(0..ids.len() as i64).collect::<Vec<_>>());
            prop_assert_eq!(got.weight[at], weight);
            if sample.logps.is_some() {
                prop_assert_eq!(&got.logps[span], &sample.aligned_logps());
            }
        }
        prop_assert_eq!(*got.boundaries.last().unwrap() as usize, got.ids.len());
    }

    #[test]
    fn compact_has_the_values_of_padded((samples, limit, indices) in samples::batch()) {
        let table = table(&samples).unwrap().truncate(limit as i64).unwrap();
        let batch = table.batch(&indices).unwrap();
        let want = padded(&table, &batch);
        let (rows, size) = (batch.num_lines(), want.ids.len());
        let (mut ids, mut action, mut lengths) = (dirty::<i32>(size), vec![77u8; size], dirty::<i32>(rows));
        let (mut weight, mut logps, mut sums) =
            (dirty::<f32>(rows), dirty::<f32>(want.logps.len()), dirty::<f32>(want.sums.len()));
        let out = CompactOut {
            input_ids: &mut ids[..], action_mask: &mut action[..], lengths: &mut lengths, weight: &mut weight[..],
            logps: logps_out(table.has_actor_logps(), &mut logps, &mut sums),
        };
        batch.collate_compact(PAD, out).unwrap();
        prop_assert_eq!(ids.iter().map(|&id| i64::from(id)).collect::<Vec<_>>(), want.ids);
        prop_assert_eq!(action.iter().map(|&bit| f32::from(bit)).collect::<Vec<_>>(), want.action);
        prop_assert_eq!((weight, logps, sums), (want.weight, want.logps, want.sums));
        let width = size / rows;
        for (at, length) in lengths.iter().enumerate() {
            let attended: i64 = want.attention[at * width..(at + 1) * width].iter().sum();
            prop_assert_eq!(i64::from(*length), attended);
        }
    }

    #[test]
    fn samples_that_share_a_line_can_be_read_from_it(
        samples in samples::dialogues(), limit in 1usize..60, picks in prop::collection::vec(any::<prop::sample::Index>(), 1..12),
        in_order in any::<bool>(),
    ) {
        let mut indices: Vec<i64> = picks.iter().map(|pick| pick.index(samples.len()) as i64).collect();
        if in_order {
            indices.sort_unstable();
            indices.dedup();
        }
        let table = table(&samples).unwrap().chained().truncate(limit as i64).unwrap();
        let batch = table.batch(&indices).unwrap();
        let turns = batch.turns().unwrap_or_else(|| (0..).zip(&indices).map(|(line, &at)| {
            [line, 0, samples[at as usize].cut(limit).ids.len() as i64]
        }).collect());
        let (wide, free) = (padded(&table, &batch), padding_free(&table, &batch));
        let width = batch.num_columns();
        let cut: Vec<Owned> = indices.iter().map(|&at| samples[at as usize].cut(limit)).collect();
        check_sums(&cut, &wide.sums)?;
        prop_assert_eq!(&wide.sums, &free.sums);
        for ((sample, turn), at) in cut.iter().zip(&turns).zip(0..) {
            let [line, begin, end] = turn.map(|value| value as usize);
            let (ids, action, weight) = visible(sample);
            prop_assert_eq!((end, wide.weight[at], free.weight[at]), (ids.len(), weight, weight));
            prop_assert!(action[..begin].iter().all(|&bit| bit == 0.0));
            for (layout, first) in [(&wide, line * width), (&free, free.boundaries[line] as usize)] {
                let own = first + begin..first + end;
                prop_assert_eq!(&layout.ids[first..first + end], &ids);
                prop_assert_eq!(&layout.action[own.clone()], &action[begin..]);
                if sample.logps.is_some() {
                    prop_assert_eq!(&layout.logps[own], &sample.aligned_logps()[begin..]);
                }
            }
            prop_assert!(wide.attention[line * width..][..end].iter().all(|&bit| bit == 1));
        }
        for line in 0..batch.num_lines() {
            let bounds = free.boundaries[line] as usize..free.boundaries[line + 1] as usize;
            prop_assert_eq!(bounds.len() as i64, wide.attention[line * width..][..width].iter().sum::<i64>());
            prop_assert_eq!(&free.positions[bounds.clone()], &(0..bounds.len() as i64).collect::<Vec<_>>());
        }
    }

    #[test]
    fn samples_are_chained_if_each_begins_with_the_one_before(samples in samples::dialogues()) {
        let mut want: Vec<i32> = vec![-1; samples.len()];
        for at in 1..samples.len() {
            let (before, sample) = (&samples[at - 1], &samples[at]);
            let shared = before.ids.len();
            if shared > 0 && sample.ids.len() > shared && sample.ids.starts_with(&before.ids)
                && !sample.action[..shared].contains(&1) && !before.attention.contains(&0) && !sample.attention.contains(&0)
            {
                if want[at - 1] == -1 {
                    want[at - 1] = at as i32 - 1;
                }
                want[at] = want[at - 1];
            }
        }
        prop_assert_eq!(table(&samples).unwrap().chained().chains(), want);
    }

    #[test]
    fn chaining_a_view_is_chaining_a_table_of_its_samples(
        samples in samples::dialogues(), limit in 1usize..60, picks in prop::collection::vec(any::<prop::sample::Index>(), 1..12),
        rows in prop::collection::vec(any::<prop::sample::Index>(), 1..12), in_order in any::<bool>(), before in any::<bool>(),
    ) {
        let mut indices: Vec<i64> = picks.iter().map(|pick| pick.index(samples.len()) as i64).collect();
        if in_order {
            indices.sort_unstable();
        }
        let whole = table(&samples).unwrap();
        let whole = if before { whole.chained() } else { whole };
        let view = whole.truncate(limit as i64).unwrap().select(&indices).unwrap().chained();
        let selected: Vec<Owned> = indices.iter().map(|&at| samples[at as usize].cut(limit)).collect();
        let fresh = table(&selected).unwrap().chained();
        prop_assert_eq!(view.chains(), fresh.chains());
        let rows: Vec<i64> = rows.iter().map(|row| row.index(indices.len()) as i64).collect();
        let (of_view, of_fresh) = (view.batch(&rows).unwrap(), fresh.batch(&rows).unwrap());
        prop_assert_eq!(of_view.turns(), of_fresh.turns());
        prop_assert_eq!(padded(&view, &of_view), padded(&fresh, &of_fresh));
        prop_assert_eq!(padding_free(&view, &of_view), padding_free(&fresh, &of_fresh));
    }

    #[test]
    fn only_the_padded_layout_accepts_a_zero_in_the_attention_mask(samples in samples::samples_with_holes()) {
        prop_assume!(!samples.is_empty());
        let table = table(&samples).unwrap();
        let indices: Vec<i64> = (0..samples.len() as i64).collect();
        let batch = table.batch(&indices).unwrap();
        let hole = samples.iter().position(|sample| sample.attention.contains(&0));
        let Some(index) = hole else { return Ok(()) };
        let want = CoreError::PartialAttention { index: index as i64 };
        let free = PaddingFreeOut::<i64, i32, f32> { input_ids: &mut [], position_ids: &mut [], cu_seqlens: &mut [],
            action_mask: &mut [], weight: &mut [], logps: None };
        prop_assert_eq!(batch.collate_padding_free(free).unwrap_err(), want.clone());
        let compact = CompactOut::<i32, u8, f32> { input_ids: &mut [], action_mask: &mut [], lengths: &mut [],
            weight: &mut [], logps: None };
        prop_assert_eq!(batch.collate_compact(PAD, compact).unwrap_err(), want);
    }
}

fn plain(length: usize) -> Owned {
    Owned { ids: vec![5; length], action: vec![1; length], attention: vec![1; length], logps: None, weight: 1.0 }
}

fn turn(ids: &[i64], actions: std::ops::Range<usize>) -> Owned {
    let action = (0..ids.len()).map(|at| u8::from(actions.contains(&at))).collect();
    Owned { ids: ids.to_vec(), action, attention: vec![1; ids.len()], logps: None, weight: 1.0 }
}

#[test]
fn three_turns_of_which_the_third_rewrites_the_history_take_two_lines() {
    let turns = [turn(&[1, 2, 3], 2..3), turn(&[1, 2, 3, 4, 5], 4..5), turn(&[1, 9, 3, 4, 5, 6, 7], 6..7)];
    let table = table(&turns).unwrap().chained();
    assert_eq!(table.chains(), [0, 0, -1]);
    let batch = table.batch(&[0, 1, 2]).unwrap();
    assert_eq!((batch.num_samples(), batch.num_lines(), batch.num_tokens()), (3, 2, 5 + 7));
    assert_eq!(batch.turns().unwrap(), [[0, 0, 3], [0, 3, 5], [1, 0, 7]]);
    assert_eq!(padded(&table, &batch).action, [0., 0., 1., 0., 1., 0., 0., 0., 0., 0., 0., 0., 0., 1.]);
}

#[test]
fn samples_of_a_view_that_was_chained_twice_keep_their_own_tokens() {
    // Two dialogues of two turns. In the view the second comes first, and its first turn is
    // missing.
    let turns = [turn(&[1, 2], 1..2), turn(&[1, 2, 3, 4], 3..4), turn(&[8, 8], 1..2), turn(&[8, 8, 8, 8], 3..4)];
    let view = table(&turns).unwrap().chained().select(&[3, 0, 1]).unwrap().chained();
    assert_eq!(view.chains(), [-1, 1, 1]);
    let batch = view.batch(&[0, 2]).unwrap();
    assert_eq!(padded(&view, &batch).ids, [8, 8, 8, 8, 1, 2, 3, 4]);
}

#[test]
fn a_sample_that_occurs_twice_or_out_of_order_has_a_line_of_its_own() {
    let table = table(&[turn(&[1, 2], 1..2), turn(&[1, 2, 3, 4], 3..4)]).unwrap().chained();
    for indices in [[1, 0], [1, 1], [0, 0]] {
        assert_eq!(table.batch(&indices).unwrap().num_lines(), 2);
    }
    assert_eq!(table.batch(&[0, 1]).unwrap().num_lines(), 1);
}

#[test]
fn an_output_of_the_wrong_size_is_refused() {
    let table = table(&[plain(3), plain(2)]).unwrap();
    let batch = table.batch(&[0, 1]).unwrap();
    let (mut ids, mut attention, mut action, mut weight) = ([0i64; 6], [0i64; 5], [0f32; 6], [0f32; 2]);
    let out = PaddedOut {
        input_ids: &mut ids[..],
        attention_mask: &mut attention[..],
        action_mask: &mut action[..],
        weight: &mut weight[..],
        logps: None,
    };
    let want = CoreError::OutputLength { name: "attention_mask", length: 5, expected: 6 };
    assert_eq!(batch.collate_padded(0, out).unwrap_err(), want);
}

#[test]
fn a_padding_token_outside_the_vocabulary_is_refused() {
    let table = table(&[plain(1)]).unwrap();
    let batch = table.batch(&[0]).unwrap();
    for value in [-1, i64::from(i32::MAX) + 1] {
        let mut weight = [0f32; 1];
        let out = PaddedOut::<i64, f32> {
            input_ids: &mut [],
            attention_mask: &mut [],
            action_mask: &mut [],
            weight: &mut weight,
            logps: None,
        };
        assert_eq!(batch.collate_padded(value, out).unwrap_err(), CoreError::PadToken { value });
    }
}

#[test]
fn an_empty_batch_is_refused() {
    assert_eq!(table(&[plain(1)]).unwrap().batch(&[]).unwrap_err(), CoreError::EmptyBatch);
}

#[test]
fn a_batch_that_32_bits_cannot_address_is_refused_before_memory_is_allocated() {
    let table = table(&[plain(1000)]).unwrap();
    let batch = table.batch(&vec![0; 10_000_000]).unwrap();
    let rows = 10_000_000;
    assert_eq!(batch.padded_size().unwrap_err(), CoreError::BatchTooLarge { rows, columns: 1000 });
    assert_eq!(batch.packed_size().unwrap_err(), CoreError::PackedTooLarge { rows, tokens: 10_000_000_000 });
}

#[test]
fn a_batch_that_only_padding_makes_too_large_can_be_packed() {
    // 3000 rows of one token and one of 2^20: 3001 * 2^20 = 3.1e9 tokens with padding, and
    // 1,051,576 without.
    let mut samples = vec![plain(1); 3000];
    samples.push(plain(1 << 20));
    let table = table(&samples).unwrap();
    let batch = table.batch(&(0..3001).collect::<Vec<_>>()).unwrap();
    assert_eq!(batch.padded_size().unwrap_err(), CoreError::BatchTooLarge { rows: 3001, columns: 1 << 20 });
    assert_eq!(batch.packed_size(), Ok(1_051_576));
    assert_eq!(*padding_free(&table, &batch).boundaries.last().unwrap(), 1_051_576);
}
