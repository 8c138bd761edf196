//! Mean, sum and count over what samples say of themselves.
//!
//! An absent value is left out. NaN is a value: it counts as true, and makes a sum and a mean NaN,
//! so that it is seen. Sums are compensated: what rounding takes from them is added at the end. A
//! denominator, where one is given, divides the *sum* (or the count) once, also for `mean`, whose
//! own count it replaces; without values, or with a denominator of zero, the result is 0.

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
    sum: Sum,
    count: u64,
}

impl Accumulator {
    /// Before the first value.
    pub fn new(reduction: Reduction) -> Self {
        Self { reduction, sum: Sum::default(), count: 0 }
    }

    /// Takes one value that is present.
    pub fn add(&mut self, value: f64) {
        self.sum = self.sum.with(match self.reduction {
            Reduction::CountTrue => f64::from(u8::from(value != 0.0)),
            Reduction::Mean | Reduction::Sum => value,
        });
        self.count += 1;
    }

    /// The result, divided by `denominator` where there is one.
    pub fn finish(&self, denominator: Option<u64>) -> f64 {
        let by = match (self.reduction, denominator) {
            (_, Some(denominator)) => denominator,
            (Reduction::Mean, None) => self.count,
            (Reduction::Sum | Reduction::CountTrue, None) => return self.sum.value(),
        };
        if by == 0 { 0.0 } else { self.sum.value() / by as f64 }
    }
}

/// Reduces one column, in which every value is present. The order of the sum is fixed, so that the
/// result is the same on every machine.
pub fn reduce_column(reduction: Reduction, values: &[f64]) -> f64 {
    match reduction {
        Reduction::CountTrue => values.iter().filter(|&&value| value != 0.0).count() as f64,
        Reduction::Sum => total(values),
        Reduction::Mean if values.is_empty() => 0.0,
        Reduction::Mean => total(values) / values.len() as f64,
    }
}

/// Several sums beside each other, which a processor adds at once.
fn total(values: &[f64]) -> f64 {
    const LANES: usize = 8;
    let (groups, tail) = values.as_chunks::<LANES>();
    let (mut totals, mut losts) = ([0.0; LANES], [0.0; LANES]);
    for group in groups {
        for ((total, lost), &value) in totals.iter_mut().zip(&mut losts).zip(group) {
            let lane = Sum { total: *total, lost: *lost }.with(value);
            (*total, *lost) = (lane.total, lane.lost);
        }
    }
    let sum = tail.iter().chain(&totals).fold(Sum::default(), |sum, &value| sum.with(value));
    Sum { lost: sum.lost + losts.iter().sum::<f64>(), ..sum }.value()
}

/// A sum that keeps what rounding takes from it: the compensated sum of Neumaier (1974), with the
/// error of each addition found without a branch (Knuth's TwoSum).
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    total: f64,
    lost: f64,
}

impl Sum {
    #[inline(always)]
    fn with(self, value: f64) -> Self {
        let total = self.total + value;
        let added = total - self.total;
        Self { total, lost: self.lost + ((self.total - (total - added)) + (value - added)) }
    }

    /// Where the total is infinite nothing finite was lost.
    fn value(self) -> f64 {
        if self.lost.is_finite() { self.total + self.lost } else { self.total }
    }
}
