//! Laws of reducers, checked against their definitions.

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
    fn a_column_is_the_plain_sum_or_mean(values in values(), reduction in reduction()) {
        let column = present(&values);
        let (got, want) = (reduce_column(reduction, &column), oracle(reduction, &column, None));
        prop_assert!(close(got, want), "{got} for {want}");
    }

    #[test]
    fn a_column_and_the_same_values_one_by_one_agree_to_the_last_bits(
        values in prop::collection::vec(prop_oneof![-1e16..1e16, -1e-3..1e-3, Just(f64::INFINITY), Just(f64::NAN)], 0..300),
        reduction in reduction(),
    ) {
        let mut running = Accumulator::new(reduction);
        values.iter().for_each(|&value| running.add(value));
        let (got, want) = (reduce_column(reduction, &values), running.finish(None));
        let agree = (got - want).abs() <= 4.0 * f64::EPSILON * want.abs() + 1e-12;
        prop_assert!(agree || got == want || got.is_nan() && want.is_nan(), "{got} for {want}");
    }
}

#[test]
fn a_sum_keeps_small_values_beside_large_ones() {
    // 1e16 + 1 rounds to 1e16, so that a plain sum of these values is 0.
    let values: Vec<f64> = [1e16].into_iter().chain([1.0; 1000]).chain([-1e16]).collect();
    let mut running = Accumulator::new(Reduction::Sum);
    values.iter().for_each(|&value| running.add(value));
    assert_eq!((running.finish(None), reduce_column(Reduction::Sum, &values)), (1000.0, 1000.0));
}

#[test]
fn values_that_are_not_finite_show_in_the_result() {
    for (values, sum) in [
        ([f64::INFINITY, 1.0], f64::INFINITY),
        ([f64::MAX, f64::MAX], f64::INFINITY),
        ([f64::NEG_INFINITY, -1.0], f64::NEG_INFINITY),
    ] {
        let mut running = Accumulator::new(Reduction::Sum);
        values.iter().for_each(|&value| running.add(value));
        assert_eq!((running.finish(None), reduce_column(Reduction::Sum, &values)), (sum, sum));
    }
    assert!(reduce_column(Reduction::Mean, &[1.0, f64::NAN]).is_nan());
    assert!(reduce_column(Reduction::Sum, &[f64::INFINITY, f64::NEG_INFINITY]).is_nan());
    assert_eq!(reduce_column(Reduction::CountTrue, &[f64::NAN, 0.0, -2.0]), 2.0);
}

#[test]
fn a_mean_with_a_denominator_is_divided_once() {
    let mut mean = Accumulator::new(Reduction::Mean);
    [1.0, 2.0, 6.0].into_iter().for_each(|value| mean.add(value));
    assert_eq!(mean.finish(None), 3.0);
    // 9 / 4 samples, one of which has no value; not 3 / 4.
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
