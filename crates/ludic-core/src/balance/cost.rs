//! What samples and micro-batches cost the ranks that compute them.

use super::{MAX_FACTOR, Packing, RankOptions, in_range};
use crate::CoreError;

/// The two factors of the cost.
pub(super) struct Prices {
    pub(super) linear: u128,
    quadratic: u128,
}

impl Prices {
    pub(super) fn new(options: &RankOptions) -> Result<Self, CoreError> {
        let linear = in_range("linear", options.linear, 0, MAX_FACTOR)? as u128;
        let quadratic = in_range("quadratic", options.quadratic, 0, MAX_FACTOR)? as u128;
        Ok(Self { linear, quadratic })
    }

    /// With linear 2 and quadratic 1, a sample of 3 tokens costs `2 * 3 + 1 * 3 * 3 = 15`.
    pub(super) fn sample(&self, length: u64) -> u128 {
        let length = u128::from(length);
        self.linear * length + self.quadratic * length * length
    }

    /// The cost of the samples alone, without padding.
    pub(super) fn real(&self, shape: &Shape) -> u128 {
        self.linear * u128::from(shape.tokens) + self.quadratic * shape.squares
    }

    /// The cost of what a rank computes for the micro-batch, padding included.
    pub(super) fn work(&self, shape: &Shape, packing: Packing) -> u128 {
        match packing {
            Packing::PaddingFree => self.real(shape),
            Packing::Greedy | Packing::Optimal => u128::from(shape.rows) * self.sample(shape.longest),
        }
    }
}

/// Everything that the cost of a micro-batch depends on. Samples of 2 and 3 tokens: 2 rows, longest
/// 3, 5 tokens, 13 squares; 6 padded tokens.
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
