//! Mean, sum and count of a statistic over samples.
//!
//! Absent values are skipped. NaN is a value: it counts as true, and makes a sum and a mean NaN, so
//! that it shows. Sums are compensated: rounding errors are collected and added at the end. A
//! denominator divides the *sum* (or the count) once; for `mean` it replaces the number of values.
//! Without values, or with a denominator of 0, the result is 0.
//!
//! The values 1, 2 and 6 have the mean 3; with a denominator of 4 samples it is 9 / 4.

use std::str::FromStr;

use crate::CoreError;

/// How values are reduced to one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// The sum divided by the number of values.
    Mean,
    /// The sum.
    Sum,
    /// The number of values that are true: not 0.
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

/// The number that divides the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Denominator {
    /// No division; a mean is still divided by the number of its values.
    None,
    /// The number of samples.
    Samples,
    /// The number of rollouts.
    Rollouts,
}

impl Denominator {
    /// The count to divide by; `None` for [`Denominator::None`].
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

/// The running state of one reducer.
#[derive(Debug, Clone, Copy)]
pub struct Accumulator {
    reduction: Reduction,
    sum: CompensatedSum,
    count: u64,
}

impl Accumulator {
    /// An accumulator without values.
    pub fn new(reduction: Reduction) -> Self {
        Self { reduction, sum: CompensatedSum::default(), count: 0 }
    }

    /// Adds one value.
    pub fn add(&mut self, value: f64) {
        self.sum = self.sum.plus(match self.reduction {
            Reduction::CountTrue => f64::from(u8::from(value != 0.0)),
            Reduction::Mean | Reduction::Sum => value,
        });
        self.count += 1;
    }

    /// Returns the result, divided by `denominator` if there is one.
    pub fn finish(&self, denominator: Option<u64>) -> f64 {
        let divisor = match (self.reduction, denominator) {
            (_, Some(denominator)) => denominator,
            (Reduction::Mean, None) => self.count,
            (Reduction::Sum | Reduction::CountTrue, None) => return self.sum.value(),
        };
        if divisor == 0 { 0.0 } else { self.sum.value() / divisor as f64 }
    }
}

/// Reduces one column in which every value is present. The order of summation is fixed, so that the
/// result is the same on every machine.
pub fn reduce_column(reduction: Reduction, values: &[f64]) -> f64 {
    match reduction {
        Reduction::CountTrue => values.iter().filter(|&&value| value != 0.0).count() as f64,
        Reduction::Sum => sum_in_lanes(values),
        Reduction::Mean if values.is_empty() => 0.0,
        Reduction::Mean => sum_in_lanes(values) / values.len() as f64,
    }
}

/// The compensated sum in 8 lanes, which the processor adds together; then the sum of the lanes and
/// the tail. Value `k` belongs to lane `k % 8`, except for the tail of fewer than 8 values.
fn sum_in_lanes(values: &[f64]) -> f64 {
    const LANES: usize = 8;
    let (groups, tail) = values.as_chunks::<LANES>();
    let (mut totals, mut compensations) = ([0.0; LANES], [0.0; LANES]);
    for group in groups {
        for ((total, compensation), &value) in totals.iter_mut().zip(&mut compensations).zip(group) {
            let lane = CompensatedSum { total: *total, compensation: *compensation }.plus(value);
            (*total, *compensation) = (lane.total, lane.compensation);
        }
    }
    let sum = tail.iter().chain(&totals).fold(CompensatedSum::default(), |sum, &value| sum.plus(value));
    CompensatedSum { compensation: sum.compensation + compensations.iter().sum::<f64>(), ..sum }.value()
}

/// A sum that also collects its rounding errors: the compensated sum of Neumaier (1974), with the
/// error of each addition computed without a branch (Knuth's TwoSum).
#[derive(Debug, Clone, Copy, Default)]
struct CompensatedSum {
    total: f64,
    /// The sum of the rounding errors. 1e16 + 1 is rounded to 1e16 and leaves 1 here.
    compensation: f64,
}

impl CompensatedSum {
    #[inline(always)]
    fn plus(self, value: f64) -> Self {
        let total = self.total + value;
        let added = total - self.total;
        let rounding_error = (self.total - (total - added)) + (value - added);
        Self { total, compensation: self.compensation + rounding_error }
    }

    /// The total with its rounding errors. Once the total is infinite, the compensation is NaN and
    /// is left out.
    fn value(self) -> f64 {
        if self.compensation.is_finite() { self.total + self.compensation } else { self.total }
    }
}
