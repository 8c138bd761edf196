//! Borrowed numbers of any width, checked and narrowed to the width of the columns.

use crate::CoreError;

/// Integers of any width, borrowed from the caller.
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

/// Floats of any width, borrowed from the caller.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub enum Floats<'a> {
    F32(&'a [f32]),
    F64(&'a [f64]),
}

/// Runs `$body` with `$values` bound to the slice of integers, whatever its element type.
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

/// The same for floats.
macro_rules! each_float {
    ($floats:expr, $values:ident => $body:expr) => {
        match $floats {
            Floats::F32($values) => $body,
            Floats::F64($values) => $body,
        }
    };
}

pub(crate) use {each_float, each_width};

impl Ints<'_> {
    /// Copies the values as indices.
    ///
    /// # Errors
    /// [`CoreError::IndexTooLarge`] if a value does not fit in 64 signed bits.
    pub fn to_i64(&self) -> Result<Vec<i64>, CoreError> {
        let to_index = |value: i128| i64::try_from(value).map_err(|_| CoreError::IndexTooLarge { index: value });
        each_width!(self, values => values.iter().map(|value| to_index(value.to_i128())).collect())
    }

    /// The number of values.
    pub fn len(&self) -> usize {
        each_width!(self, values => values.len())
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Floats<'_> {
    /// The number of values.
    pub fn len(&self) -> usize {
        each_float!(self, values => values.len())
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// An integer that a column can be read from. The `to_` conversions do not check the range.
pub(crate) trait Int: Copy + Default + std::ops::BitOr<Output = Self> {
    /// Sign-extends, so that a negative value exceeds any limit.
    fn to_u64(self) -> u64;
    fn to_i128(self) -> i128;
    fn to_id(self) -> i32;
    fn to_bit(self) -> u8;
}

macro_rules! impl_int {
    ($($width:ty),*) => {$(
        impl Int for $width {
            fn to_u64(self) -> u64 { self as u64 }
            fn to_i128(self) -> i128 { i128::from(self) }
            fn to_id(self) -> i32 { self as i32 }
            fn to_bit(self) -> u8 { self as u8 }
        }
    )*};
}
impl_int!(i8, i16, i32, i64, u8, u16, u32, u64);

/// A float that a column can be read from.
pub(crate) trait Float: Copy + Default {
    fn to_f32(self) -> f32;
    fn to_f64(self) -> f64;
}

impl Float for f32 {
    fn to_f32(self) -> f32 {
        self
    }
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

impl Float for f64 {
    fn to_f32(self) -> f32 {
        self as f32
    }
    fn to_f64(self) -> f64 {
        self
    }
}

/// A value outside its range, and its position in the slice that was checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OutOfRange {
    pub(crate) position: usize,
    value: i128,
}

impl OutOfRange {
    /// The error for a token id at this (sample, position in the sample).
    pub(crate) fn token_id_error(self, (sample, position): (usize, usize)) -> CoreError {
        CoreError::TokenId { sample, position, value: self.value }
    }

    /// The error for a mask value at this (sample, position in the sample).
    pub(crate) fn mask_error(self, (sample, position): (usize, usize), field: &'static str) -> CoreError {
        CoreError::MaskValue { sample, field, position, value: self.value }
    }
}

/// Appends ids, if all of them are in range.
pub(crate) fn push_ids(ids: Ints<'_>, column: &mut Vec<i32>) -> Result<(), OutOfRange> {
    each_width!(ids, values => {
        check_at_most(values, i32::MAX as u64)?;
        column.extend(values.iter().map(|&value| value.to_id()));
    });
    Ok(())
}

/// Appends a mask, if all of its values are 0 or 1.
pub(crate) fn push_mask(mask: Ints<'_>, column: &mut Vec<u8>) -> Result<(), OutOfRange> {
    each_width!(mask, values => {
        check_at_most(values, 1)?;
        column.extend(values.iter().map(|&value| value.to_bit()));
    });
    Ok(())
}

/// Checks that no value exceeds `limit`; `limit + 1` must be a power of two. Then the OR of all
/// values exceeds `limit` exactly if one of them does: for the limit 1, `0 | 1 | 2` is 3. Computing
/// it is one vectorised pass; the first bad value is searched for only if there is one.
fn check_at_most<T: Int>(values: &[T], limit: u64) -> Result<(), OutOfRange> {
    let union = values.iter().fold(T::default(), |union, &value| union | value);
    if union.to_u64() <= limit {
        return Ok(());
    }
    let position = values.iter().position(|value| value.to_u64() > limit).unwrap_or_default();
    Err(OutOfRange { position, value: values[position].to_i128() })
}

/// Whether every value is 1.
pub(crate) fn is_all_ones(mask: Ints<'_>) -> bool {
    // No early exit: the loop is vectorised, and nearly every mask is all ones.
    each_width!(mask, values => values.iter().fold(true, |all, value| all & (value.to_u64() == 1)))
}

/// The position of the first value that is NaN or infinite in float32.
pub(crate) fn find_non_finite<T: Float>(values: &[T]) -> Option<usize> {
    let all_finite = values.iter().fold(true, |all, value| all & value.to_f32().is_finite());
    if all_finite { None } else { values.iter().position(|value| !value.to_f32().is_finite()) }
}
