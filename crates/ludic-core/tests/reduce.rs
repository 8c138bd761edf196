//! Laws of reducers, against the sentence that defines each.

use ludic_core::CoreError;
use ludic_core::reduce::{Accumulator, Denominator, Reduction, reduce_column};
use proptest::prelude::*;

fn values() -> impl Strategy<Value = Vec<Option<f64>>> {
    prop::collection::vec(prop::option::weighted(0.8, prop_oneof![3 => -1e3..1e3, 1 => Just(0.0)]), 0..300)
}

fn present(values: &[Option<f64>]) -> Vec<f64> {
    values.iter().flatten().copied().collect()
}

fn oracle(reduction: Reduction, values: &[f64], denominator: Option<u64>) -> f64 {
    let total = match reduction {
        Reduction::CountTrue => values.iter().filter(|&&value| value != 0.0).count() as f64,
        _ => values.iter().sum(),
    };
    match (denominator, reduction) {
        (Some(0), _) => 0.0,
        (Some(by), _) => total / by as f64,
        (None, Reduction::Mean) if values.is_empty() => 0.0,
        (None, Reduction::Mean) => total / values.len() as f64,
        (None, _) => total,
    }
}

fn reduction() -> impl Strategy<Value = Reduction> {
    prop_oneof![Just(Reduction::Mean), Just(Reduction::Sum), Just(Reduction::CountTrue)]
}

fn close(got: f64, want: f64) -> bool {
    (got - want).abs() <= 1e-9 * (1.0 + want.abs())
}

proptest! {
    #[test]
    fn an_accumulator_is_the_plain_sum_or_mean(
        values in values(), reduction in reduction(), denominator in prop::option::of(0u64..400),
    ) {
        let mut running = Accumulator::new(reduction);
        present(&values).into_iter().for_each(|value| running.add(value));
        let (got, want) = (running.finish(denominator), oracle(reduction, &present(&values), denominator));
        prop_assert!(close(got, want), "{got} for {want}");
    }

    #[test]
    fn a_column_skips_what_is_absent(values in values(), reduction in reduction()) {
        let column: Vec<f64> = values.iter().map(|value| value.unwrap_or(f64::NAN)).collect();
        let (got, want) = (reduce_column(reduction, &column), oracle(reduction, &present(&values), None));
        prop_assert!(close(got, want), "{got} for {want}");
    }
}

#[test]
fn a_mean_with_a_denominator_is_divided_once() {
    let mut mean = Accumulator::new(Reduction::Mean);
    [1.0, 2.0, 6.0].into_iter().for_each(|value| mean.add(value));
    assert_eq!(mean.finish(None), 3.0);
    // 9 over 4 samples, of which one has no value; not 3 / 4.
    assert_eq!(mean.finish(Some(4)), 2.25);
}

#[test]
fn names_are_those_of_the_documentation() {
    assert_eq!("count_true".parse(), Ok(Reduction::CountTrue));
    assert_eq!("median".parse::<Reduction>(), Err(CoreError::UnknownReduction { kind: "median".to_owned() }));
    assert_eq!(Denominator::try_from(Some("rollouts")).unwrap().count(3, 2), Some(2));
    assert_eq!(Denominator::try_from(None).unwrap().count(3, 2), None);
    let unknown = CoreError::UnknownDenominator { name: "steps".to_owned() };
    assert_eq!(Denominator::try_from(Some("steps")), Err(unknown));
}
