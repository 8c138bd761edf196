//! Seeded workloads that the benches share: lengths of macro-batches as they occur in training.
#![deny(missing_docs)]

mod columns;

use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, LogNormal, Normal, Uniform};

pub use columns::Columns;

/// A distribution of lengths, clipped to [16, 4096] tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Workload {
    /// Lognormal, median 512, sigma 0.9: long tails, as in free text.
    W1,
    /// Lognormal, median 1024, sigma 0.5.
    W2,
    /// Four of five normal around 300, one of five truncated at 4096.
    W3,
    /// Uniform.
    W4,
}

impl Workload {
    /// All workloads.
    pub const ALL: [Self; 4] = [Self::W1, Self::W2, Self::W3, Self::W4];

    /// The lengths of `samples` samples, the same for the same seed.
    pub fn lengths(self, samples: usize, seed: u64) -> Vec<i32> {
        let mut random = StdRng::seed_from_u64(seed);
        (0..samples).map(|_| self.draw(&mut random).clamp(16.0, 4096.0) as i32).collect()
    }

    fn draw(self, random: &mut StdRng) -> f64 {
        match self {
            Self::W1 => log_normal(512.0, 0.9).sample(random),
            Self::W2 => log_normal(1024.0, 0.5).sample(random),
            Self::W3 if unit_uniform().sample(random) < 0.2 => 4096.0,
            Self::W3 => 300.0 + 80.0 * standard_normal().sample(random),
            Self::W4 => 16.0 + 4081.0 * unit_uniform().sample(random),
        }
    }

    /// Chosen and rejected lengths in turn. A rejected length is the chosen one times a lognormal
    /// factor of sigma 0.4.
    pub fn pair_lengths(self, pairs: usize, seed: u64) -> Vec<i32> {
        let mut random = StdRng::seed_from_u64(seed ^ 0x5eed);
        let mut rejected = |chosen: i32| f64::from(chosen) * (0.4 * standard_normal().sample(&mut random)).exp();
        let pair = |chosen: i32| [chosen, rejected(chosen).clamp(16.0, 4096.0) as i32];
        self.lengths(pairs, seed).into_iter().flat_map(pair).collect()
    }
}

fn log_normal(median: f64, sigma: f64) -> LogNormal<f64> {
    LogNormal::new(median.ln(), sigma).expect("sigma is positive")
}

fn standard_normal() -> Normal<f64> {
    Normal::new(0.0, 1.0).expect("sigma is positive")
}

fn unit_uniform() -> Uniform<f64> {
    Uniform::new(0.0, 1.0).expect("the range is not empty")
}
