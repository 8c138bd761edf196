//! Mean, sum and count over what samples say of themselves.
//!
//! An absent value is skipped. A denominator, where one is given, divides the *sum* (or the count) once, also for `mean`,
//! whose own count it replaces; without values, or with a denominator of zero, the result is 0.

use std::str::FromStr;

use crate::CoreError;

/// What is done with the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// Their sum by their number.
    Mean,
    /// Their sum.
    Sum,
    /// How many are true, that is not 0.
    CountTrue,
}

impl FromStr for Reduction {
    type Err = CoreError;

    fn from_str(kind: &str) -> Result<Self, CoreError> {
        match kind {
            "mean" => Ok(Self::Mean),
            "sum" => Ok(Self::Sum),
            "count_true" => Ok(Self::CountTrue),
            _ => Err(CoreError::UnknownReduction { kind: kind.to_owned() }),
        }
    }
}

/// What the result is divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Denominator {
    /// By nothing; a mean by the number of its values.
    None,
    /// By the number of samples.
    Samples,
    /// By the number of rollouts.
    Rollouts,
}

impl Denominator {
    /// Its count, if it has one.
    pub fn count(self, num_samples: u64, num_rollouts: u64) -> Option<u64> {
        match self {
            Self::None => None,
            Self::Samples => Some(num_samples),
            Self::Rollouts => Some(num_rollouts),
        }
    }
}

impl TryFrom<Option<&str>> for Denominator {
    type Error = CoreError;

    fn try_from(name: Option<&str>) -> Result<Self, CoreError> {
        match name {
            None => Ok(Self::None),
            Some("samples") => Ok(Self::Samples),
            Some("rollouts") => Ok(Self::Rollouts),
            Some(name) => Err(CoreError::UnknownDenominator { name: name.to_owned() }),
        }
    }
}

/// One reducer on its way through the values.
#[derive(Debug, Clone, Copy)]
pub struct Accumulator {
    reduction: Reduction,
    total: f64,
    count: u64,
}

impl Accumulator {
    /// Before the first value.
    pub fn new(reduction: Reduction) -> Self {
        Self { reduction, total: 0.0, count: 0 }
    }

    /// Takes one value that is present.
    pub fn add(&mut self, value: f64) {
        self.total += match self.reduction {
            Reduction::CountTrue => f64::from(u8::from(value != 0.0)),
            Reduction::Mean | Reduction::Sum => value,
        };
        self.count += 1;
    }

    /// The result, divided by `denominator` where there is one.
    pub fn finish(&self, denominator: Option<u64>) -> f64 {
        let by = match (self.reduction, denominator) {
            (_, Some(denominator)) => denominator,
            (Reduction::Mean, None) => self.count,
            (Reduction::Sum | Reduction::CountTrue, None) => return self.total,
        };
        if by == 0 { 0.0 } else { self.total / by as f64 }
    }
}

/// Reduces one column; NaN stands for an absent value. The order of the sum is fixed, so that the result is the same on
/// every machine.
pub fn reduce_column(reduction: Reduction, values: &[f64]) -> f64 {
    match reduction {
        Reduction::CountTrue => total(values, is_true),
        Reduction::Sum => total(values, present_or_zero),
        Reduction::Mean => mean(values),
    }
}

fn present_or_zero(value: f64) -> f64 {
    if value.is_nan() { 0.0 } else { value }
}

fn is_present(value: f64) -> f64 {
    if value.is_nan() { 0.0 } else { 1.0 }
}

fn is_true(value: f64) -> f64 {
    if value.is_nan() | (value == 0.0) { 0.0 } else { 1.0 }
}

const LANES: usize = 8;

fn total(values: &[f64], term: impl Fn(f64) -> f64) -> f64 {
    let (groups, tail) = values.as_chunks::<LANES>();
    let mut lanes = [0.0f64; LANES];
    for group in groups {
        lanes.iter_mut().zip(group).for_each(|(lane, &value)| *lane += term(value));
    }
    lanes.iter().sum::<f64>() + tail.iter().map(|&value| term(value)).sum::<f64>()
}

/// Sum and count in one pass over the memory.
fn mean(values: &[f64]) -> f64 {
    const BLOCK: usize = 1024;
    let (mut sum, mut count) = (0.0, 0.0);
    for block in values.chunks(BLOCK) {
        sum += total(block, present_or_zero);
        count += total(block, is_present);
    }
    if count == 0.0 { 0.0 } else { sum / count }
}
