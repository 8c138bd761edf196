//! Arbitrary names, values and denominators: both ways of reducing agree, unknown names are
//! refused, and nothing is divided by zero.
//!
//! `cargo +nightly fuzz run reduce -- -max_total_time=600`
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use ludic_core::reduce::{Accumulator, Denominator, Reduction, reduce_column};

#[derive(Debug, Arbitrary)]
struct Input {
    kind: Kind,
    denominator: Option<String>,
    counts: (u64, u64),
    values: Vec<f64>,
}

#[derive(Debug, Arbitrary)]
enum Kind {
    Mean,
    Sum,
    CountTrue,
    Any(String),
}

impl Kind {
    fn name(&self) -> &str {
        match self {
            Self::Mean => "mean",
            Self::Sum => "sum",
            Self::CountTrue => "count_true",
            Self::Any(name) => name,
        }
    }
}

/// Whether two sums are equal up to the order of summation. One order may overflow earlier than
/// another. `size` is the sum of the absolute values.
fn agree(got: f64, want: f64, size: f64) -> bool {
    !size.is_finite() || !got.is_finite() || !want.is_finite() || (got - want).abs() <= 1e-9 * size
}

fuzz_target!(|input: Input| {
    let parsed: Result<Reduction, _> = input.kind.name().parse();
    let Ok(reduction) = parsed else {
        assert!(!["mean", "sum", "count_true"].contains(&input.kind.name()));
        return;
    };
    let mut running = Accumulator::new(reduction);
    input.values.iter().for_each(|&value| running.add(value));
    let size: f64 = input.values.iter().map(|value| value.abs()).sum::<f64>() + input.values.len() as f64;
    assert!(agree(reduce_column(reduction, &input.values), running.finish(None), size));
    if let Ok(denominator) = Denominator::try_from(input.denominator.as_deref()) {
        let count = denominator.count(input.counts.0, input.counts.1);
        let result = running.finish(count);
        assert!(count != Some(0) || result == 0.0);
        assert!(!result.is_nan() || !size.is_finite());
    }
});
