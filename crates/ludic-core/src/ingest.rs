//! Input: the only place where data of the caller is validated and copied into columns.

use crate::CoreError;
use crate::numbers::{
    Float, Floats, Int, Ints, each_float, each_width, find_non_finite, is_all_ones, push_ids, push_mask,
};
use crate::table::{Columns, Row, SampleTable, count_ones};

/// One sample, borrowed from the caller.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'a> {
    /// Token ids, at least one, each in `0..=i32::MAX`.
    pub input_ids: Ints<'a>,
    /// 1 where the policy chose the token, 0 elsewhere; one for each id.
    pub action_mask: Ints<'a>,
    /// 1 where the token is attended to; `None` means everywhere.
    pub attention_mask: Option<Ints<'a>>,
    /// The log-probability of each action token, in order: one for each 1 in `action_mask`.
    pub actor_logps: Option<Floats<'a>>,
    /// The factor of the sample in the loss: its credit.
    pub weight: f64,
}

/// All samples in columns, borrowed from the caller.
#[derive(Debug, Clone, Copy)]
pub struct ColumnInput<'a> {
    /// Token ids of all samples, concatenated.
    pub input_ids: Ints<'a>,
    /// One for each id.
    pub action_mask: Ints<'a>,
    /// One for each id; `None` means that every token is attended to.
    pub attention_mask: Option<Ints<'a>>,
    /// One for each id. Values at tokens that are not actions are ignored.
    pub actor_logps: Option<Floats<'a>>,
    /// One for each sample; `None` means 1.
    pub weights: Option<Floats<'a>>,
    /// Where each sample begins, then the end of the last. They increase, because a sample has at
    /// least one token: samples of 3 and 2 tokens have the offsets [0, 3, 5].
    pub offsets: Ints<'a>,
}

/// Builds a [`SampleTable`] from one sample at a time. A sample that is refused leaves the builder
/// unchanged.
#[derive(Debug, Default)]
pub struct TableBuilder {
    columns: Columns,
    rows: Vec<Row>,
}

impl TableBuilder {
    /// A builder with memory reserved for this many samples and tokens, if there is enough.
    #[must_use]
    pub fn with_capacity(samples: usize, tokens: usize) -> Self {
        let mut builder = Self::default();
        // The sizes are estimates, so too little memory is no error: the samples may need less.
        let _ = builder.columns.ids.try_reserve(tokens);
        let _ = builder.columns.action.try_reserve(tokens);
        let _ = builder.rows.try_reserve(samples);
        builder
    }

    /// Checks one sample and appends it to the columns. Of a sample that continues the one before
    /// it ([`chained`](SampleTable::chained)) only the tokens that it adds: the turns of a dialogue
    /// take memory for their distinct tokens, and are read as if each were stored whole.
    ///
    /// # Errors
    /// The sample is invalid, or there is not enough memory. The columns are then unchanged.
    pub fn push(&mut self, sample: &Sample<'_>) -> Result<(), CoreError> {
        let start = self.columns.ids.len();
        let result = self.try_push(start, sample);
        if result.is_err() {
            self.columns.truncate(start);
        }
        result
    }

    /// Pushes the sample, whose tokens begin at `start`. An error leaves part of it behind.
    fn try_push(&mut self, start: usize, sample: &Sample<'_>) -> Result<(), CoreError> {
        let index = self.rows.len();
        let len = sample.input_ids.len();
        if len == 0 {
            return Err(CoreError::NoTokens { sample: index });
        }
        if len > i32::MAX as usize {
            return Err(CoreError::SampleTooLong { sample: index, length: len });
        }
        reserve("input_ids", &mut self.columns.ids, len)?;
        push_ids(sample.input_ids, &mut self.columns.ids).map_err(|bad| bad.token_id_error((index, bad.position)))?;
        check_length(index, "action_mask", sample.action_mask.len(), len)?;
        reserve("action_mask", &mut self.columns.action, len)?;
        push_mask(sample.action_mask, &mut self.columns.action)
            .map_err(|bad| bad.mask_error((index, bad.position), "action_mask"))?;
        self.push_attention(index, start, len, sample.attention_mask)?;
        let mut row = Row::new(start, len as u32, check_weight(index, sample.weight)?);
        if let Some(previous) = self.rows.last().filter(|previous| self.columns.may_share(&row, previous)) {
            (row.start, row.shared) = (previous.start, previous.len);
            self.columns.remove(start..start + previous.len as usize);
        }
        self.push_logps(index, start, sample.actor_logps)?;
        reserve("weight", &mut self.rows, 1)?;
        self.rows.push(row);
        Ok(())
    }

    /// Returns the table of all samples.
    pub fn finish(mut self) -> SampleTable {
        if self.rows.iter().any(|row| row.shared > 0) {
            self.columns.shrink(); // memory was reserved as if each sample were stored whole
        }
        SampleTable { columns: self.columns.seal(), rows: self.rows, token_columns: Vec::new() }
    }

    /// Appends an attention mask of `len` values. Creates the column when the first 0 comes.
    fn push_attention(
        &mut self,
        index: usize,
        start: usize,
        len: usize,
        mask: Option<Ints<'_>>,
    ) -> Result<(), CoreError> {
        let Some(mask) = mask else {
            if let Some(column) = &mut self.columns.attention {
                reserve("attention_mask", column, len)?;
                column.resize(start + len, 1);
            }
            return Ok(());
        };
        check_length(index, "attention_mask", mask.len(), len)?;
        if self.columns.attention.is_none() && is_all_ones(mask) {
            return Ok(());
        }
        let column = self.columns.attention.get_or_insert_default();
        // A new column begins with a 1 for each token of the samples before.
        reserve("attention_mask", column, start + len - column.len())?;
        column.resize(start, 1);
        push_mask(mask, column).map_err(|bad| bad.mask_error((index, bad.position), "attention_mask"))
    }

    /// Appends one value per token: the log-probability of an action, 0 for another token.
    fn push_logps(&mut self, index: usize, start: usize, logps: Option<Floats<'_>>) -> Result<(), CoreError> {
        if index == 0 && logps.is_some() {
            self.columns.logps = Some(Vec::new());
        }
        let (logps, column) = match (logps, &mut self.columns.logps) {
            (Some(logps), Some(column)) => (logps, column),
            (None, None) => return Ok(()),
            (logps, _) => {
                return Err(CoreError::MixedLogps { sample: index, present: logps.is_some() });
            }
        };
        let mask = &self.columns.action[start..];
        let actions = count_ones(mask);
        if logps.len() != actions {
            return Err(CoreError::LogpCount { sample: index, logps: logps.len(), actions });
        }
        // Reserved once for all expected tokens, as for the ids.
        reserve("actor_logps", column, self.columns.ids.capacity() - column.len())?;
        each_float!(logps, values => {
            if let Some(position) = find_non_finite(values) {
                return Err(CoreError::NonFiniteLogp { sample: index, position, value: Float::to_f64(values[position]) });
            }
            append_at_actions(values, mask, column);
        });
        Ok(())
    }
}

impl SampleTable {
    /// Builds a table from columns, which are checked and copied in one pass.
    pub fn from_columns(input: &ColumnInput<'_>) -> Result<Self, CoreError> {
        let tokens = input.input_ids.len();
        let rows = read_rows(input.offsets, tokens, input.weights)?;
        let place = |position: usize| locate(&rows, position);
        let mut columns = Columns::default();
        reserve("input_ids", &mut columns.ids, tokens)?;
        push_ids(input.input_ids, &mut columns.ids).map_err(|bad| bad.token_id_error(place(bad.position)))?;
        check_column("action_mask", input.action_mask.len(), tokens)?;
        reserve("action_mask", &mut columns.action, tokens)?;
        push_mask(input.action_mask, &mut columns.action)
            .map_err(|bad| bad.mask_error(place(bad.position), "action_mask"))?;
        if let Some(mask) = input.attention_mask {
            check_column("attention_mask", mask.len(), tokens)?;
            if !is_all_ones(mask) {
                let column = columns.attention.get_or_insert_default();
                reserve("attention_mask", column, tokens)?;
                push_mask(mask, column).map_err(|bad| bad.mask_error(place(bad.position), "attention_mask"))?;
            }
        }
        if let Some(logps) = input.actor_logps {
            check_column("actor_logps", logps.len(), tokens)?;
            let column = each_float!(logps, values => copy_action_logps(values, &columns.action))?;
            if let Some(token) = find_non_finite(&column) {
                let (sample, position) = place(token);
                return Err(CoreError::NonFiniteLogp { sample, position, value: f64::from(column[token]) });
            }
            columns.logps = Some(column);
        }
        Ok(Self { columns: columns.seal(), rows, token_columns: Vec::new() })
    }
}

/// Appends one value per token: the next of `values` where the mask is 1, else 0. The values -0.5
/// and -0.7 with the mask [0, 1, 1] append [0, -0.5, -0.7]. There is one value for each 1. Masks
/// consist of runs, and each run is copied in one piece.
pub(crate) fn append_at_actions<T: Float>(values: &[T], mask: &[u8], column: &mut Vec<f32>) {
    let start = column.len();
    column.resize(start + mask.len(), 0.0);
    let out = &mut column[start..];
    let (mut token, mut remaining) = (0, values);
    while !remaining.is_empty() {
        token += count_leading(&mask[token..], 0);
        let (run, after_run) = remaining.split_at(count_leading(&mask[token..], 1));
        out[token..].iter_mut().zip(run).for_each(|(slot, value)| *slot = value.to_f32());
        (token, remaining) = (token + run.len(), after_run);
    }
}

/// The number of values equal to `bit` at the beginning of the mask. The mask [0, 0, 1] and the bit
/// 0 give 2.
fn count_leading(mask: &[u8], bit: u8) -> usize {
    const GROUP: usize = 16;
    let (groups, _) = mask.as_chunks::<GROUP>();
    let uniform = u128::from_ne_bytes([bit; GROUP]);
    let in_groups = GROUP * groups.iter().take_while(|&&group| u128::from_ne_bytes(group) == uniform).count();
    in_groups + mask[in_groups..].iter().take_while(|&&value| value == bit).count()
}

/// Copies token-aligned log-probabilities, with 0 for tokens that are not actions.
fn copy_action_logps<T: Float>(values: &[T], mask: &[u8]) -> Result<Vec<f32>, CoreError> {
    let mut column = Vec::new();
    reserve("actor_logps", &mut column, mask.len())?;
    column.extend(values.iter().zip(mask).map(|(value, &bit)| if bit == 1 { value.to_f32() } else { 0.0 }));
    Ok(column)
}

/// Reads the rows of a table from its offsets and weights. `tokens` is the length of the columns.
fn read_rows(offsets: Ints<'_>, tokens: usize, weights: Option<Floats<'_>>) -> Result<Vec<Row>, CoreError> {
    if let Some(weights) = weights {
        check_column("weights", weights.len(), offsets.len().saturating_sub(1))?;
    }
    let mut rows = each_width!(offsets, values => read_unweighted_rows(values, tokens))?;
    if let Some(weights) = weights {
        for (sample, row) in rows.iter_mut().enumerate() {
            row.weight = check_weight(sample, each_float!(weights, values => Float::to_f64(values[sample])))?;
        }
    }
    Ok(rows)
}

/// Reads rows of weight 1. The offsets [0, 3, 5] give rows of 3 tokens from 0 on and 2 from 3 on.
fn read_unweighted_rows<T: Int>(offsets: &[T], tokens: usize) -> Result<Vec<Row>, CoreError> {
    let (Some(first), Some(last)) = (offsets.first(), offsets.last()) else {
        return Err(CoreError::NoOffsets);
    };
    let (first, last) = (first.to_i128(), last.to_i128());
    if first != 0 || last != tokens as i128 {
        return Err(CoreError::OffsetEnds { first, last, tokens });
    }
    let read_row = |(sample, pair): (usize, &[T])| {
        let (begin, end) = (pair[0].to_i128(), pair[1].to_i128());
        let length = end - begin;
        if length < 0 {
            return Err(CoreError::OffsetOrder { sample, begin, end });
        }
        if length == 0 {
            return Err(CoreError::NoTokens { sample });
        }
        if length > i128::from(i32::MAX) {
            return Err(CoreError::SampleTooLong { sample, length: length as usize });
        }
        Ok(Row::new(begin as usize, length as u32, 1.0))
    };
    let mut rows = Vec::new();
    reserve("offsets", &mut rows, offsets.len() - 1)?;
    for numbered_pair in offsets.windows(2).enumerate() {
        rows.push(read_row(numbered_pair)?);
    }
    Ok(rows)
}

/// The sample that contains a position of the columns, and the position within that sample. With
/// samples of 3 and 2 tokens, position 4 is (1, 1).
fn locate(rows: &[Row], position: usize) -> (usize, usize) {
    let sample = rows.partition_point(|row| row.start <= position).saturating_sub(1);
    (sample, position - rows.get(sample).map_or(0, |row| row.start))
}

/// The weight in float32, or an error if it is not finite.
pub(crate) fn check_weight(sample: usize, weight: f64) -> Result<f32, CoreError> {
    let single = weight as f32;
    if single.is_finite() { Ok(single) } else { Err(CoreError::NonFiniteWeight { sample, value: weight }) }
}

/// Reserves memory for `more` values of a column. Returns an error where a plain push would end the
/// process.
pub(crate) fn reserve<T>(column: &'static str, values: &mut Vec<T>, more: usize) -> Result<(), CoreError> {
    values.try_reserve(more).map_err(|_| CoreError::OutOfMemory { column, values: more })
}

fn check_length(sample: usize, field: &'static str, length: usize, tokens: usize) -> Result<(), CoreError> {
    if length == tokens { Ok(()) } else { Err(CoreError::MaskLength { sample, field, length, tokens }) }
}

pub(crate) fn check_column(column: &'static str, length: usize, expected: usize) -> Result<(), CoreError> {
    if length == expected { Ok(()) } else { Err(CoreError::ColumnLength { column, length, expected }) }
}
