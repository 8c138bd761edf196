//! The border: whatever the caller holds becomes validated columns here, and nowhere else.

use crate::CoreError;
use crate::table::{Columns, Row, SampleTable, ones};

/// Integers as the caller has them.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub enum Ints<'a> {
    I8(&'a [i8]),
    I16(&'a [i16]),
    I32(&'a [i32]),
    I64(&'a [i64]),
    U8(&'a [u8]),
    U16(&'a [u16]),
    U32(&'a [u32]),
    U64(&'a [u64]),
}

/// Floats as the caller has them.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub enum Floats<'a> {
    F32(&'a [f32]),
    F64(&'a [f64]),
}

/// Runs `$body` with `$values` bound to the slice, whatever its element type.
macro_rules! each_width {
    ($ints:expr, $values:ident => $body:expr) => {
        match $ints {
            Ints::I8($values) => $body,
            Ints::I16($values) => $body,
            Ints::I32($values) => $body,
            Ints::I64($values) => $body,
            Ints::U8($values) => $body,
            Ints::U16($values) => $body,
            Ints::U32($values) => $body,
            Ints::U64($values) => $body,
        }
    };
}

macro_rules! each_float {
    ($floats:expr, $values:ident => $body:expr) => {
        match $floats {
            Floats::F32($values) => $body,
            Floats::F64($values) => $body,
        }
    };
}

impl Ints<'_> {
    /// A copy as signed integers; what does not fit becomes the largest.
    pub fn to_i64(&self) -> Vec<i64> {
        each_width!(self, values => values.iter().map(|value| i64::try_from(value.exact()).unwrap_or(i64::MAX)).collect())
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        each_width!(self, values => values.len())
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Floats<'_> {
    /// How many there are.
    pub fn len(&self) -> usize {
        each_float!(self, values => values.len())
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One sample as the caller has it.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'a> {
    /// Token ids, each in `0..=i32::MAX`.
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
    /// Where each sample begins, and the end of the last.
    pub offsets: Ints<'a>,
}

/// Takes samples one at a time and makes a [`SampleTable`] of them.
///
/// After an error the builder holds a part of the refused sample: drop it.
#[derive(Debug, Default)]
pub struct TableBuilder {
    columns: Columns,
    rows: Vec<Row>,
}

impl TableBuilder {
    /// A builder that does not grow until it holds more than this.
    pub fn with_capacity(samples: usize, tokens: usize) -> Self {
        let columns =
            Columns { ids: Vec::with_capacity(tokens), action: Vec::with_capacity(tokens), ..Columns::default() };
        Self { columns, rows: Vec::with_capacity(samples) }
    }

    /// Checks one sample and copies it to the end of the columns.
    pub fn push(&mut self, sample: &Sample<'_>) -> Result<(), CoreError> {
        let at = self.rows.len();
        let start = self.columns.ids.len();
        let len = sample.input_ids.len();
        if len > i32::MAX as usize {
            return Err(CoreError::SampleTooLong { sample: at, length: len });
        }
        push_ids(sample.input_ids, &mut self.columns.ids).map_err(|bad| bad.token_id(at))?;
        check_length(at, "action_mask", sample.action_mask.len(), len)?;
        push_mask(sample.action_mask, &mut self.columns.action).map_err(|bad| bad.mask(at, "action_mask"))?;
        self.push_attention(at, start, len, sample.attention_mask)?;
        self.push_logps(at, start, sample.actor_logps)?;
        let weight = finite_weight(at, sample.weight)?;
        self.rows.push(Row { start, len: len as u32, original_len: len as u32, weight });
        Ok(())
    }

    /// The table of all samples pushed.
    pub fn finish(self) -> SampleTable {
        SampleTable { columns: self.columns.seal(), rows: self.rows }
    }

    fn push_attention(&mut self, at: usize, start: usize, len: usize, mask: Option<Ints<'_>>) -> Result<(), CoreError> {
        let Some(mask) = mask else {
            if let Some(column) = &mut self.columns.attention {
                column.resize(start + len, 1);
            }
            return Ok(());
        };
        check_length(at, "attention_mask", mask.len(), len)?;
        if self.columns.attention.is_none() {
            if all_ones(mask) {
                return Ok(());
            }
            self.columns.attention = Some(vec![1; start]);
        }
        let column = self.columns.attention.get_or_insert_default();
        push_mask(mask, column).map_err(|bad| bad.mask(at, "attention_mask"))
    }

    fn push_logps(&mut self, at: usize, start: usize, logps: Option<Floats<'_>>) -> Result<(), CoreError> {
        if at == 0 && logps.is_some() {
            self.columns.logps = Some(Vec::with_capacity(self.columns.ids.capacity()));
        }
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
    /// A table from columns that the caller already has. Samples of any number are checked and copied in one pass.
    pub fn from_columns(input: &ColumnInput<'_>) -> Result<Self, CoreError> {
        let tokens = input.input_ids.len();
        let rows = rows_of(input.offsets, tokens, input.weights)?;
        let place = |position: usize| locate(&rows, position);
        let mut columns = Columns::default();
        push_ids(input.input_ids, &mut columns.ids).map_err(|bad| bad.within(&rows).token_id(place(bad.position).0))?;
        check_column("action_mask", input.action_mask.len(), tokens)?;
        push_mask(input.action_mask, &mut columns.action)
            .map_err(|bad| bad.within(&rows).mask(place(bad.position).0, "action_mask"))?;
        if let Some(mask) = input.attention_mask {
            check_column("attention_mask", mask.len(), tokens)?;
            if !all_ones(mask) {
                let column = columns.attention.get_or_insert_default();
                push_mask(mask, column)
                    .map_err(|bad| bad.within(&rows).mask(place(bad.position).0, "attention_mask"))?;
            }
        }
        if let Some(logps) = input.actor_logps {
            check_column("actor_logps", logps.len(), tokens)?;
            let column = each_float!(logps, values => aligned_logps(values, &columns.action));
            if let Some(at) = first_non_finite(&column) {
                let (sample, position) = place(at);
                return Err(CoreError::NonFiniteLogp { sample, position, value: f64::from(column[at]) });
            }
            columns.logps = Some(column);
        }
        Ok(Self { columns: columns.seal(), rows })
    }
}

/// What an integer column needs of its element type.
trait Int: Copy + Default + std::ops::BitOr<Output = Self> {
    /// Sign-extended, so that anything negative is huge.
    fn unsigned(self) -> u64;
    fn exact(self) -> i128;
    fn id(self) -> i32;
    fn bit(self) -> u8;
}

macro_rules! int {
    ($($width:ty),*) => {$(
        impl Int for $width {
            fn unsigned(self) -> u64 { self as u64 }
            fn exact(self) -> i128 { i128::from(self) }
            fn id(self) -> i32 { self as i32 }
            fn bit(self) -> u8 { self as u8 }
        }
    )*};
}
int!(i8, i16, i32, i64, u8, u16, u32, u64);

trait Float: Copy + Default {
    fn single(self) -> f32;
    fn wide(self) -> f64;
}

impl Float for f32 {
    fn single(self) -> f32 {
        self
    }
    fn wide(self) -> f64 {
        f64::from(self)
    }
}

impl Float for f64 {
    fn single(self) -> f32 {
        self as f32
    }
    fn wide(self) -> f64 {
        self
    }
}

/// A value outside its range, before it is known which sample it belongs to.
#[derive(Debug, Clone, Copy)]
struct Bad {
    position: usize,
    value: i128,
}

impl Bad {
    fn token_id(self, sample: usize) -> CoreError {
        CoreError::TokenId { sample, position: self.position, value: self.value }
    }

    fn mask(self, sample: usize, field: &'static str) -> CoreError {
        CoreError::MaskValue { sample, field, position: self.position, value: self.value }
    }

    /// The same with the position counted from the beginning of its sample.
    fn within(self, rows: &[Row]) -> Self {
        Self { position: locate(rows, self.position).1, ..self }
    }
}

/// Appends ids after one vectorised check of them all; the offender is searched for only when there is one.
fn push_ids(ids: Ints<'_>, column: &mut Vec<i32>) -> Result<(), Bad> {
    each_width!(ids, values => {
        check_at_most(values, i32::MAX as u64)?;
        column.extend(values.iter().map(|&value| value.id()));
    });
    Ok(())
}

fn push_mask(mask: Ints<'_>, column: &mut Vec<u8>) -> Result<(), Bad> {
    each_width!(mask, values => {
        check_at_most(values, 1)?;
        column.extend(values.iter().map(|&value| value.bit()));
    });
    Ok(())
}

/// `limit + 1` is a power of two, so that a set bit above it anywhere shows in the OR of all values.
fn check_at_most<T: Int>(values: &[T], limit: u64) -> Result<(), Bad> {
    let union = values.iter().fold(T::default(), |union, &value| union | value);
    if union.unsigned() <= limit {
        return Ok(());
    }
    let offender = values.iter().position(|value| value.unsigned() > limit);
    let position = offender.unwrap_or_default();
    Err(Bad { position, value: values[position].exact() })
}

fn all_ones(mask: Ints<'_>) -> bool {
    // No early exit: the loop is vectorised, and nearly every mask is all ones.
    each_width!(mask, values => values.iter().fold(true, |all, value| all & (value.unsigned() == 1)))
}

fn first_non_finite<T: Float>(values: &[T]) -> Option<usize> {
    let all_finite = values.iter().fold(true, |all, value| all & value.single().is_finite());
    if all_finite { None } else { values.iter().position(|value| !value.single().is_finite()) }
}

/// Appends one value a token: the next log-probability where the mask is 1, else 0. Masks are runs, and a run is copied at
/// once. There are as many values as ones.
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
fn aligned_logps<T: Float>(values: &[T], mask: &[u8]) -> Vec<f32> {
    values.iter().zip(mask).map(|(value, &bit)| if bit == 1 { value.single() } else { 0.0 }).collect()
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
        if length > i128::from(i32::MAX) {
            return Err(CoreError::SampleTooLong { sample, length: length as usize });
        }
        Ok(Row { start: begin as usize, len: length as u32, original_len: length as u32, weight: 1.0 })
    };
    let mut rows = Vec::with_capacity(offsets.len() - 1);
    for step in offsets.windows(2).enumerate() {
        rows.push(row(step)?);
    }
    Ok(rows)
}

/// The sample that holds a position of the columns, and where in the sample that is.
fn locate(rows: &[Row], position: usize) -> (usize, usize) {
    // Empty samples begin where the next one does: the last row that begins at or before the position holds it.
    let sample = rows.partition_point(|row| row.start <= position).saturating_sub(1);
    (sample, position - rows.get(sample).map_or(0, |row| row.start))
}

fn finite_weight(sample: usize, weight: f64) -> Result<f32, CoreError> {
    let single = weight as f32;
    if single.is_finite() { Ok(single) } else { Err(CoreError::NonFiniteWeight { sample, value: weight }) }
}

fn check_length(sample: usize, field: &'static str, length: usize, tokens: usize) -> Result<(), CoreError> {
    if length == tokens { Ok(()) } else { Err(CoreError::MaskLength { sample, field, length, tokens }) }
}

fn check_column(column: &'static str, length: usize, expected: usize) -> Result<(), CoreError> {
    if length == expected { Ok(()) } else { Err(CoreError::ColumnLength { column, length, expected }) }
}
