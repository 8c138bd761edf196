//! The border: whatever the caller holds becomes validated columns here, and nowhere else.

use crate::CoreError;
use crate::numbers::{
    Float, Floats, Int, Ints, all_ones, each_float, each_width, first_non_finite, push_ids, push_mask,
};
use crate::table::{Columns, Row, SampleTable, ones};

/// One sample as the caller has it.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'a> {
    /// Token ids, at least one, each in `0..=i32::MAX`.
    pub input_ids: Ints<'a>,
    /// 1 where the policy chose the token, 0 elsewhere; as many as ids.
    pub action_mask: Ints<'a>,
    /// 1 where the token is attended to; absent means everywhere.
    pub attention_mask: Option<Ints<'a>>,
    /// The log-probability of each action token, in order: as many as ones in `action_mask`.
    pub actor_logps: Option<Floats<'a>>,
    /// Credit.
    pub weight: f64,
}

/// All samples as the caller has them, in columns.
#[derive(Debug, Clone, Copy)]
pub struct ColumnInput<'a> {
    /// Token ids of all samples, one after the other.
    pub input_ids: Ints<'a>,
    /// As many as ids.
    pub action_mask: Ints<'a>,
    /// As many as ids; absent means that every token is attended to.
    pub attention_mask: Option<Ints<'a>>,
    /// As many as ids, aligned with them; what stands off the actions is not read.
    pub actor_logps: Option<Floats<'a>>,
    /// One a sample; absent means 1.
    pub weights: Option<Floats<'a>>,
    /// Where each sample begins, and the end of the last. They rise: a sample has at least one
    /// token.
    pub offsets: Ints<'a>,
}

/// Takes samples one at a time and makes a [`SampleTable`] of them.
///
/// A sample that is refused leaves nothing behind: the builder goes on as if it had not come.
#[derive(Debug, Default)]
pub struct TableBuilder {
    columns: Columns,
    rows: Vec<Row>,
}

impl TableBuilder {
    /// A builder that does not grow until it holds more than this, where there is memory for as
    /// much.
    #[must_use]
    pub fn with_capacity(samples: usize, tokens: usize) -> Self {
        let mut builder = Self::default();
        // A guess that memory does not hold is no error: what is pushed may be less.
        let _ = builder.columns.ids.try_reserve(tokens);
        let _ = builder.columns.action.try_reserve(tokens);
        let _ = builder.rows.try_reserve(samples);
        builder
    }

    /// Checks one sample and copies it to the end of the columns.
    ///
    /// # Errors What is wrong with the sample, or that there is no memory for it. The columns are
    /// then as they were.
    pub fn push(&mut self, sample: &Sample<'_>) -> Result<(), CoreError> {
        let start = self.columns.ids.len();
        let pushed = self.try_push(start, sample);
        if pushed.is_err() {
            self.columns.truncate(start);
        }
        pushed
    }

    fn try_push(&mut self, start: usize, sample: &Sample<'_>) -> Result<(), CoreError> {
        let at = self.rows.len();
        let len = sample.input_ids.len();
        if len == 0 {
            return Err(CoreError::NoTokens { sample: at });
        }
        if len > i32::MAX as usize {
            return Err(CoreError::SampleTooLong { sample: at, length: len });
        }
        reserve("input_ids", &mut self.columns.ids, len)?;
        push_ids(sample.input_ids, &mut self.columns.ids).map_err(|bad| bad.token_id((at, bad.position)))?;
        check_length(at, "action_mask", sample.action_mask.len(), len)?;
        reserve("action_mask", &mut self.columns.action, len)?;
        push_mask(sample.action_mask, &mut self.columns.action)
            .map_err(|bad| bad.mask((at, bad.position), "action_mask"))?;
        self.push_attention(at, start, len, sample.attention_mask)?;
        self.push_logps(at, start, sample.actor_logps)?;
        let weight = finite_weight(at, sample.weight)?;
        reserve("weight", &mut self.rows, 1)?;
        self.rows.push(Row::whole(start, len as u32, weight));
        Ok(())
    }

    /// The table of all samples pushed.
    pub fn finish(self) -> SampleTable {
        SampleTable { columns: self.columns.seal(), rows: self.rows }
    }

    fn push_attention(&mut self, at: usize, start: usize, len: usize, mask: Option<Ints<'_>>) -> Result<(), CoreError> {
        let Some(mask) = mask else {
            if let Some(column) = &mut self.columns.attention {
                reserve("attention_mask", column, len)?;
                column.resize(start + len, 1);
            }
            return Ok(());
        };
        check_length(at, "attention_mask", mask.len(), len)?;
        if self.columns.attention.is_none() && all_ones(mask) {
            return Ok(());
        }
        let column = self.columns.attention.get_or_insert_default();
        // Its first values stand for the samples before, which had none of their own.
        reserve("attention_mask", column, start + len - column.len())?;
        column.resize(start, 1);
        push_mask(mask, column).map_err(|bad| bad.mask((at, bad.position), "attention_mask"))
    }

    fn push_logps(&mut self, at: usize, start: usize, logps: Option<Floats<'_>>) -> Result<(), CoreError> {
        if at == 0 && logps.is_some() {
            self.columns.logps = Some(Vec::new());
        }
        let capacity = self.columns.ids.capacity();
        let (logps, column) = match (logps, &mut self.columns.logps) {
            (Some(logps), Some(column)) => (logps, column),
            (None, None) => return Ok(()),
            (logps, _) => {
                return Err(CoreError::MixedLogps { sample: at, present: logps.is_some() });
            }
        };
        let mask = &self.columns.action[start..];
        let actions = ones(mask);
        if logps.len() != actions {
            return Err(CoreError::LogpCount { sample: at, logps: logps.len(), actions });
        }
        // At once for all tokens to come, as for the ids.
        reserve("actor_logps", column, capacity - column.len())?;
        each_float!(logps, values => {
            if let Some(position) = first_non_finite(values) {
                return Err(CoreError::NonFiniteLogp { sample: at, position, value: Float::wide(values[position]) });
            }
            scatter(values, mask, column);
        });
        Ok(())
    }
}

impl SampleTable {
    /// A table from columns that the caller already has. Samples of any number are checked and
    /// copied in one pass.
    pub fn from_columns(input: &ColumnInput<'_>) -> Result<Self, CoreError> {
        let tokens = input.input_ids.len();
        let rows = rows_of(input.offsets, tokens, input.weights)?;
        let place = |position: usize| locate(&rows, position);
        let mut columns = Columns::default();
        reserve("input_ids", &mut columns.ids, tokens)?;
        push_ids(input.input_ids, &mut columns.ids).map_err(|bad| bad.token_id(place(bad.position)))?;
        check_column("action_mask", input.action_mask.len(), tokens)?;
        reserve("action_mask", &mut columns.action, tokens)?;
        push_mask(input.action_mask, &mut columns.action)
            .map_err(|bad| bad.mask(place(bad.position), "action_mask"))?;
        if let Some(mask) = input.attention_mask {
            check_column("attention_mask", mask.len(), tokens)?;
            if !all_ones(mask) {
                let column = columns.attention.get_or_insert_default();
                reserve("attention_mask", column, tokens)?;
                push_mask(mask, column).map_err(|bad| bad.mask(place(bad.position), "attention_mask"))?;
            }
        }
        if let Some(logps) = input.actor_logps {
            check_column("actor_logps", logps.len(), tokens)?;
            let column = each_float!(logps, values => aligned_logps(values, &columns.action))?;
            if let Some(at) = first_non_finite(&column) {
                let (sample, position) = place(at);
                return Err(CoreError::NonFiniteLogp { sample, position, value: f64::from(column[at]) });
            }
            columns.logps = Some(column);
        }
        Ok(Self { columns: columns.seal(), rows })
    }
}

/// Appends one value a token: the next log-probability where the mask is 1, else 0. Masks are runs,
/// and a run is copied at once. There are as many values as ones.
fn scatter<T: Float>(values: &[T], mask: &[u8], column: &mut Vec<f32>) {
    let start = column.len();
    column.resize(start + mask.len(), 0.0);
    let out = &mut column[start..];
    let (mut at, mut rest) = (0, values);
    while !rest.is_empty() {
        at += leading(&mask[at..], 0);
        let (run, left) = rest.split_at(leading(&mask[at..], 1));
        out[at..].iter_mut().zip(run).for_each(|(slot, value)| *slot = value.single());
        (at, rest) = (at + run.len(), left);
    }
}

/// How many values at the beginning of the mask are `bit`.
fn leading(mask: &[u8], bit: u8) -> usize {
    const GROUP: usize = 16;
    let (groups, _) = mask.as_chunks::<GROUP>();
    let whole = u128::from_ne_bytes([bit; GROUP]);
    let sure = GROUP * groups.iter().take_while(|&&group| u128::from_ne_bytes(group) == whole).count();
    sure + mask[sure..].iter().take_while(|&&value| value == bit).count()
}

/// Token-aligned log-probabilities, with 0 wherever the token is no action.
fn aligned_logps<T: Float>(values: &[T], mask: &[u8]) -> Result<Vec<f32>, CoreError> {
    let mut column = Vec::new();
    reserve("actor_logps", &mut column, mask.len())?;
    column.extend(values.iter().zip(mask).map(|(value, &bit)| if bit == 1 { value.single() } else { 0.0 }));
    Ok(column)
}

fn rows_of(offsets: Ints<'_>, tokens: usize, weights: Option<Floats<'_>>) -> Result<Vec<Row>, CoreError> {
    if let Some(weights) = weights {
        check_column("weights", weights.len(), offsets.len().saturating_sub(1))?;
    }
    let mut rows = each_width!(offsets, values => unweighted_rows(values, tokens))?;
    if let Some(weights) = weights {
        for (sample, row) in rows.iter_mut().enumerate() {
            row.weight = finite_weight(sample, each_float!(weights, values => Float::wide(values[sample])))?;
        }
    }
    Ok(rows)
}

fn unweighted_rows<T: Int>(offsets: &[T], tokens: usize) -> Result<Vec<Row>, CoreError> {
    let (Some(first), Some(last)) = (offsets.first(), offsets.last()) else {
        return Err(CoreError::NoOffsets);
    };
    let (first, last) = (first.exact(), last.exact());
    if first != 0 || last != tokens as i128 {
        return Err(CoreError::OffsetEnds { first, last, tokens });
    }
    let row = |(sample, pair): (usize, &[T])| {
        let (begin, end) = (pair[0].exact(), pair[1].exact());
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
        Ok(Row::whole(begin as usize, length as u32, 1.0))
    };
    let mut rows = Vec::new();
    reserve("offsets", &mut rows, offsets.len() - 1)?;
    for step in offsets.windows(2).enumerate() {
        rows.push(row(step)?);
    }
    Ok(rows)
}

/// The sample that holds a position of the columns, and where in the sample that is.
fn locate(rows: &[Row], position: usize) -> (usize, usize) {
    let sample = rows.partition_point(|row| row.start <= position).saturating_sub(1);
    (sample, position - rows.get(sample).map_or(0, |row| row.start))
}

fn finite_weight(sample: usize, weight: f64) -> Result<f32, CoreError> {
    let single = weight as f32;
    if single.is_finite() { Ok(single) } else { Err(CoreError::NonFiniteWeight { sample, value: weight }) }
}

/// Room for `more` values of a column, or an error in place of the end of the process.
fn reserve<T>(column: &'static str, values: &mut Vec<T>, more: usize) -> Result<(), CoreError> {
    values.try_reserve(more).map_err(|_| CoreError::OutOfMemory { column, values: more })
}

fn check_length(sample: usize, field: &'static str, length: usize, tokens: usize) -> Result<(), CoreError> {
    if length == tokens { Ok(()) } else { Err(CoreError::MaskLength { sample, field, length, tokens }) }
}

fn check_column(column: &'static str, length: usize, expected: usize) -> Result<(), CoreError> {
    if length == expected { Ok(()) } else { Err(CoreError::ColumnLength { column, length, expected }) }
}
