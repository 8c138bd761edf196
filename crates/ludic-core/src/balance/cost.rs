//! The cost of samples and of micro-batches.

use super::{MAX_FACTOR, Packing, RankOptions, check_range};
use crate::CoreError;

/// The two factors of the cost of a sample: `linear * length + quadratic * length^2`.
pub(super) struct Prices {
    pub(super) linear: u128,
    quadratic: u128,
}

impl Prices {
    pub(super) fn new(options: &RankOptions) -> Result<Self, CoreError> {
        let linear = check_range("linear", options.linear, 0, MAX_FACTOR)? as u128;
        let quadratic = check_range("quadratic", options.quadratic, 0, MAX_FACTOR)? as u128;
        Ok(Self { linear, quadratic })
    }

    /// The cost of one sample. With linear 2 and quadratic 1, 3 tokens cost `2 * 3 + 1 * 3 * 3 =
    /// 15`.
    pub(super) fn sample_cost(&self, length: u64) -> u128 {
        let length = u128::from(length);
        self.linear * length + self.quadratic * length * length
    }

    /// The cost of the samples of a micro-batch, without padding.
    pub(super) fn real_cost(&self, shape: &Shape) -> u128 {
        self.linear * u128::from(shape.tokens) + self.quadratic * shape.squares
    }

    /// The cost of computing a micro-batch, padding included.
    pub(super) fn computed_cost(&self, shape: &Shape, packing: Packing) -> u128 {
        match packing {
            Packing::PaddingFree => self.real_cost(shape),
            Packing::Greedy | Packing::Optimal => u128::from(shape.rows) * self.sample_cost(shape.longest),
        }
    }
}

/// The sizes that determine the cost of a micro-batch. Samples of 2 and 3 tokens have 2 rows,
/// longest 3, 5 tokens and 13 as the sum of squares; padded they are 6 tokens.
pub(super) struct Shape {
    rows: u64,
    longest: u64,
    tokens: u64,
    /// The sum of the squares of the lengths.
    squares: u128,
}

impl Shape {
    pub(super) fn of(lengths: &[i32], rows: &[u32]) -> Self {
        let mut shape = Self { rows: rows.len() as u64, longest: 0, tokens: 0, squares: 0 };
        for &row in rows {
            let length = lengths[row as usize] as u64;
            shape.longest = shape.longest.max(length);
            shape.tokens += length;
            shape.squares += u128::from(length * length);
        }
        shape
    }

    pub(super) fn padded_tokens(&self, packing: Packing) -> u64 {
        match packing {
            Packing::PaddingFree => self.tokens,
            Packing::Greedy | Packing::Optimal => self.rows * self.longest,
        }
    }
}
