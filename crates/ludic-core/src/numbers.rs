//! Numbers of any width as the caller holds them, checked and narrowed to the width of the columns.

use crate::CoreError;

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

pub(crate) use {each_float, each_width};

impl Ints<'_> {
    /// A copy as indices.
    ///
    /// # Errors
    /// [`CoreError::IndexTooLarge`] where one does not fit in a signed integer.
    pub fn to_i64(&self) -> Result<Vec<i64>, CoreError> {
        let index = |value: i128| i64::try_from(value).map_err(|_| CoreError::IndexTooLarge { index: value });
        each_width!(self, values => values.iter().map(|value| index(value.exact())).collect())
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

/// What an integer column needs of its element type.
pub(crate) trait Int: Copy + Default + std::ops::BitOr<Output = Self> {
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

pub(crate) trait Float: Copy + Default {
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
pub(crate) struct Bad {
    pub(crate) position: usize,
    value: i128,
}

impl Bad {
    /// The refusal of an id, with its place: sample and position within it.
    pub(crate) fn token_id(self, (sample, position): (usize, usize)) -> CoreError {
        CoreError::TokenId { sample, position, value: self.value }
    }

    /// The refusal of a mask value.
    pub(crate) fn mask(self, (sample, position): (usize, usize), field: &'static str) -> CoreError {
        CoreError::MaskValue { sample, field, position, value: self.value }
    }
}

/// Appends ids after one vectorised check of them all; the offender is searched for only when there
/// is one.
pub(crate) fn push_ids(ids: Ints<'_>, column: &mut Vec<i32>) -> Result<(), Bad> {
    each_width!(ids, values => {
        check_at_most(values, i32::MAX as u64)?;
        column.extend(values.iter().map(|&value| value.id()));
    });
    Ok(())
}

pub(crate) fn push_mask(mask: Ints<'_>, column: &mut Vec<u8>) -> Result<(), Bad> {
    each_width!(mask, values => {
        check_at_most(values, 1)?;
        column.extend(values.iter().map(|&value| value.bit()));
    });
    Ok(())
}

/// `limit + 1` is a power of two, so that a set bit above it anywhere shows in the OR of all
/// values.
fn check_at_most<T: Int>(values: &[T], limit: u64) -> Result<(), Bad> {
    let union = values.iter().fold(T::default(), |union, &value| union | value);
    if union.unsigned() <= limit {
        return Ok(());
    }
    let offender = values.iter().position(|value| value.unsigned() > limit);
    let position = offender.unwrap_or_default();
    Err(Bad { position, value: values[position].exact() })
}

pub(crate) fn all_ones(mask: Ints<'_>) -> bool {
    // No early exit: the loop is vectorised, and nearly every mask is all ones.
    each_width!(mask, values => values.iter().fold(true, |all, value| all & (value.unsigned() == 1)))
}

pub(crate) fn first_non_finite<T: Float>(values: &[T]) -> Option<usize> {
    let all_finite = values.iter().fold(true, |all, value| all & value.single().is_finite());
    if all_finite { None } else { values.iter().position(|value| !value.single().is_finite()) }
}
