//! Arbitrary lengths, budgets and settings: plans keep the budget and place every sample once, and
//! fail exactly on invalid input.
//!
//! `cargo +nightly fuzz run planner -- -max_total_time=600`
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use ludic_core::CoreError;
use ludic_core::balance::{Packing, RankOptions, RankPlan, plan_ranks};
use ludic_core::plan::{Plan, greedy, optimal, padding_free};

#[derive(Debug, Arbitrary)]
struct Input {
    lengths: Lengths,
    budget: Budget,
    overhead_tokens: i64,
    world_size: u8,
    linear: u16,
    quadratic: u16,
}

#[derive(Debug, Arbitrary)]
enum Lengths {
    Tiny(Vec<u8>),
    Usual(Vec<u16>),
    Any(Vec<i32>),
}

#[derive(Debug, Arbitrary)]
enum Budget {
    TimesTheLongest(u8),
    AboveTheLongest(u16),
    Any(i64),
}

struct Case {
    lengths: Vec<i32>,
    budget: i64,
    longest: i64,
}

impl Case {
    fn new(lengths: Lengths, budget: Budget) -> Self {
        let lengths: Vec<i32> = match lengths {
            Lengths::Tiny(lengths) => lengths.into_iter().map(i32::from).collect(),
            Lengths::Usual(lengths) => lengths.into_iter().map(i32::from).collect(),
            Lengths::Any(lengths) => lengths,
        };
        let longest = lengths.iter().copied().map(i64::from).max().unwrap_or(0);
        let budget = match budget {
            Budget::TimesTheLongest(times) => longest * i64::from(times),
            Budget::AboveTheLongest(above) => longest + i64::from(above),
            Budget::Any(budget) => budget,
        };
        Self { lengths, budget, longest }
    }

    fn is_valid(&self) -> bool {
        self.budget > 0 && self.budget >= self.longest && self.lengths.iter().all(|&length| length >= 0)
    }

    /// The tokens that a micro-batch computes.
    fn tokens(&self, rows: &[u32], padded: bool) -> i128 {
        let lengths = rows.iter().map(|&row| i128::from(self.lengths[row as usize]));
        if padded { rows.len() as i128 * lengths.max().unwrap_or(0) } else { lengths.sum() }
    }

    fn check_micro_batches<'a>(&self, micro_batches: impl Iterator<Item = &'a [u32]>, padded: bool) {
        let mut seen = vec![false; self.lengths.len()];
        for rows in micro_batches {
            assert!(self.tokens(rows, padded) <= i128::from(self.budget), "over the budget");
            for &row in rows {
                assert!(!std::mem::replace(&mut seen[row as usize], true), "sample {row} twice");
            }
        }
        assert!(seen.into_iter().all(|seen| seen), "a sample is missing");
    }

    fn check_plan(&self, result: Result<Plan, CoreError>, padded: bool) -> Option<Plan> {
        assert_eq!(result.is_ok(), self.is_valid(), "{result:?}");
        let plan = result.ok()?;
        assert!(plan.iter().all(|rows| !rows.is_empty()));
        self.check_micro_batches(plan.iter(), padded);
        let tokens: i128 = plan.iter().map(|rows| self.tokens(rows, padded)).sum();
        assert_eq!(i128::from(plan.padded_tokens()), tokens);
        Some(plan)
    }

    fn check_ranks(&self, plans: &[RankPlan], padded: bool) {
        let steps = plans[0].len();
        assert!(plans.iter().all(|plan| plan.len() == steps));
        let empty = plans.iter().flat_map(RankPlan::iter).filter(|rows| rows.is_empty()).count();
        assert!(steps == 0 || empty == (steps * plans.len()).saturating_sub(self.lengths.len()), "{empty} empty");
        let has_samples = |plan: &RankPlan| plan.iter().any(|rows| !rows.is_empty());
        assert!(self.lengths.len() < plans.len() || plans.iter().all(has_samples), "an idle rank");
        self.check_micro_batches(plans.iter().flat_map(RankPlan::iter), padded);
    }
}

fuzz_target!(|input: Input| {
    let case = Case::new(input.lengths, input.budget);
    let (lengths, budget) = (&case.lengths, case.budget);
    let overhead_tokens = input.overhead_tokens.saturating_abs();
    let greedy_plan = case.check_plan(greedy(lengths, budget), true);
    let optimal_plan = case.check_plan(optimal(lengths, budget, overhead_tokens), true);
    case.check_plan(padding_free(lengths, budget), false);
    if let (Some(greedy_plan), Some(optimal_plan)) = (greedy_plan, optimal_plan) {
        let cost = |plan: &Plan| i128::from(plan.padded_tokens()) + i128::from(overhead_tokens) * plan.len() as i128;
        assert!(cost(&optimal_plan) <= cost(&greedy_plan), "greedy is better");
        assert!(optimal_plan.len() >= greedy_plan.len(), "greedy has too many micro-batches");
    }
    for packing in [Packing::Greedy, Packing::Optimal, Packing::PaddingFree] {
        let (linear, quadratic) = (i64::from(input.linear), i64::from(input.quadratic));
        let world_size = i64::from(input.world_size) + 1;
        let options = RankOptions { world_size, packing, overhead_tokens, linear, quadratic };
        let result = plan_ranks(lengths, budget, &options);
        assert_eq!(result.is_ok(), case.is_valid(), "{result:?}");
        if let Ok(plans) = result {
            case.check_ranks(&plans, packing != Packing::PaddingFree);
        }
    }
});
