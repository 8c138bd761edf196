//! Laws of prefix trees, checked against tries that are built one token at a time.

mod samples;

use std::collections::{BTreeMap, BTreeSet};

use ludic_core::trees::{TreeOut, TreePlan};
use ludic_core::{CoreError, SampleTable};
use proptest::prelude::*;
use samples::{Owned, table};

/// Samples over few tokens, so that many begin alike.
fn branching() -> impl Strategy<Value = Vec<Owned>> {
    let ids = prop_oneof![
        3 => prop::collection::vec(0i64..2, 1..9),
        1 => prop::collection::vec(0i64..3, 1..4),
        1 => Just(vec![1, 1, 1, 1, 1]),
    ];
    prop::collection::vec(ids, 1..24).prop_map(|all| all.into_iter().map(sample).collect())
}

fn sample(ids: Vec<i64>) -> Owned {
    let length = ids.len();
    Owned { ids, action: vec![1; length], attention: vec![1; length], logps: None, weight: 1.0 }
}

/// The number of nodes of the trie of some samples: their distinct prefixes.
fn count_nodes<'a>(samples: impl Iterator<Item = &'a Owned>) -> usize {
    let prefixes = samples.flat_map(|sample| (1..=sample.ids.len()).map(|end| &sample.ids[..end]));
    prefixes.collect::<BTreeSet<_>>().len()
}

fn lines(plan: &TreePlan) -> Vec<&[i64]> {
    plan.bounds.windows(2).map(|ends| &plan.order[ends[0] as usize..ends[1] as usize]).collect()
}

type Arrays = (Vec<i64>, Vec<i64>, Vec<i64>);

fn collate(table: &SampleTable, order: &[i64], shared: &[i64]) -> Result<Arrays, CoreError> {
    let trees = table.trees(order, shared)?;
    let (mut ids, mut positions) = (vec![-1i64; trees.num_tokens()], vec![-1i64; trees.num_tokens()]);
    let mut places = vec![-1i64; trees.num_places()];
    trees.collate(TreeOut { input_ids: &mut ids[..], position_ids: &mut positions[..], places: &mut places[..] })?;
    Ok((ids, positions, places))
}

fn wide(values: &[i32]) -> Vec<i64> {
    values.iter().map(|&value| i64::from(value)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn a_line_computes_each_prefix_once(samples in branching(), spare in 0i64..30) {
        let longest = samples.iter().map(|sample| sample.ids.len()).max().unwrap() as i64;
        let indices: Vec<i64> = (0..samples.len() as i64).collect();
        let plan = table(&samples).unwrap().plan_trees(&indices, longest + spare, 1).unwrap();
        let mut seen = plan.order.clone();
        seen.sort_unstable();
        prop_assert_eq!(seen, indices);
        prop_assert_eq!(plan.tokens.len() + 1, plan.bounds.len());
        for (line, &tokens) in lines(&plan).into_iter().zip(&plan.tokens) {
            prop_assert_eq!(tokens as usize, count_nodes(line.iter().map(|&index| &samples[index as usize])));
            prop_assert!(i64::from(tokens) <= longest + spare);
        }
    }

    #[test]
    fn a_large_budget_makes_one_line_of_each_first_token(samples in branching()) {
        let indices: Vec<i64> = (0..samples.len() as i64).collect();
        let plan = table(&samples).unwrap().plan_trees(&indices, i64::MAX, 1).unwrap();
        let total: i32 = plan.tokens.iter().sum();
        prop_assert_eq!(total as usize, count_nodes(samples.iter()));
        prop_assert_eq!(plan.tokens.len(), samples.iter().map(|sample| sample.ids[0]).collect::<BTreeSet<_>>().len());
    }

    #[test]
    fn a_short_prefix_is_not_shared(samples in branching(), least in 0i64..10) {
        let indices: Vec<i64> = (0..samples.len() as i64).collect();
        let plan = table(&samples).unwrap().plan_trees(&indices, i64::MAX, least).unwrap();
        for (line, begin) in lines(&plan).into_iter().zip(&plan.bounds) {
            prop_assert_eq!(plan.shared[*begin as usize], 0);
            for at in 1..line.len() {
                let shared = plan.shared[*begin as usize + at];
                let (a, b) = (&samples[line[at - 1] as usize].ids, &samples[line[at] as usize].ids);
                prop_assert_eq!(shared as usize, a.iter().zip(b).take_while(|(a, b)| a == b).count());
                prop_assert!(i64::from(shared) >= least.max(1));
            }
        }
        if least > 8 {
            prop_assert_eq!(plan.tokens.len(), samples.len());
        }
    }

    #[test]
    fn every_sample_is_read_back_from_its_places(samples in branching(), spare in 0i64..30) {
        let longest = samples.iter().map(|sample| sample.ids.len()).max().unwrap() as i64;
        let indices: Vec<i64> = (0..samples.len() as i64).collect();
        let table = table(&samples).unwrap();
        let plan = table.plan_trees(&indices, longest + spare, 1).unwrap();
        let (ids, positions, places) = collate(&table, &plan.order, &wide(&plan.shared)).unwrap();
        prop_assert_eq!(ids.len() as i32, plan.tokens.iter().sum::<i32>());
        let mut begin = 0;
        let mut tokens_before: BTreeMap<i64, Vec<i64>> = BTreeMap::new();
        for &index in &plan.order {
            let sample = &samples[index as usize].ids;
            let own = &places[begin..begin + sample.len()];
            begin += sample.len();
            for (position, &place) in own.iter().enumerate() {
                prop_assert_eq!(ids[place as usize], sample[position]);
                prop_assert_eq!(positions[place as usize], position as i64);
                // A token has one path to its root, whichever sample it is read for.
                let path = tokens_before.entry(place).or_insert_with(|| own[..position].to_vec());
                prop_assert_eq!(&path[..], &own[..position]);
            }
        }
        prop_assert_eq!(tokens_before.len(), ids.len());
    }

    #[test]
    fn a_truncated_table_is_planned_as_a_table_of_cut_samples(samples in branching(), limit in 1i64..9) {
        let indices: Vec<i64> = (0..samples.len() as i64).collect();
        let cut: Vec<Owned> = samples.iter().map(|sample| sample.cut(limit as usize)).collect();
        let view = table(&samples).unwrap().truncate(limit).unwrap();
        prop_assert_eq!(view.plan_trees(&indices, 40, 2).unwrap(), table(&cut).unwrap().plan_trees(&indices, 40, 2).unwrap());
    }

    #[test]
    fn a_line_of_pairs_has_both_samples_of_each_and_every_prefix_once(samples in branching(), spare in 0i64..30) {
        let paired = samples.len() / 2 * 2;
        prop_assume!(paired > 0);
        let longest = samples.iter().map(|sample| sample.ids.len()).max().unwrap() as i64;
        // Pairs in any order: (1, 0), (3, 2) and so on.
        let indices: Vec<i64> = (0..paired as i64).map(|index| index ^ 1).collect();
        let table = table(&samples).unwrap();
        let plan = table.plan_pair_trees(&indices, 2 * longest + spare, 1).unwrap();
        let mut seen = plan.order.clone();
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..paired as i64).collect::<Vec<_>>());
        for (line, &tokens) in lines(&plan).into_iter().zip(&plan.tokens) {
            prop_assert!(line.iter().all(|&index| line.contains(&(index ^ 1))));
            prop_assert_eq!(tokens as usize, count_nodes(line.iter().map(|&index| &samples[index as usize])));
            prop_assert!(i64::from(tokens) <= 2 * longest + spare);
        }
        let (ids, _, places) = collate(&table, &plan.order, &wide(&plan.shared)).unwrap();
        prop_assert_eq!(ids.len() as i32, plan.tokens.iter().sum::<i32>());
        let read: Vec<i64> = places.iter().map(|&place| ids[place as usize]).collect();
        let want: Vec<i64> = plan.order.iter().flat_map(|&index| samples[index as usize].ids.clone()).collect();
        prop_assert_eq!(read, want);
    }

    #[test]
    fn pairs_of_one_prompt_are_one_line(
        answers in prop::collection::vec(prop::collection::vec(0i64..3, 1..6), 2..16),
        prompt in prop::collection::vec(3i64..5, 4..9),
    ) {
        // Every pair shares the prompt, so that a large budget computes each prefix once.
        let samples: Vec<Owned> = answers.iter().map(|answer| sample([&prompt[..], answer].concat())).collect();
        let indices: Vec<i64> = (0..samples.len() as i64 / 2 * 2).collect();
        let plan = table(&samples).unwrap().plan_pair_trees(&indices, i64::MAX, 4).unwrap();
        prop_assert_eq!(&plan.bounds, &vec![0, indices.len() as i64]);
        prop_assert_eq!(plan.tokens[0] as usize, count_nodes(samples[..indices.len()].iter()));
    }

    #[test]
    fn equal_samples_in_pairs_are_planned_as_the_samples_alone(samples in branching(), spare in 0i64..30) {
        // A pair of two equal samples computes what one of them computes.
        let longest = samples.iter().map(|sample| sample.ids.len()).max().unwrap() as i64;
        let indices: Vec<i64> = (0..samples.len() as i64).collect();
        let twice: Vec<i64> = indices.iter().flat_map(|&index| [index, index]).collect();
        let table = table(&samples).unwrap();
        let alone = table.plan_trees(&indices, 2 * longest + spare, 1).unwrap();
        let pairs = table.plan_pair_trees(&twice, 2 * longest + spare, 1).unwrap();
        prop_assert_eq!(pairs.tokens, alone.tokens);
        prop_assert_eq!(pairs.bounds, alone.bounds.iter().map(|bound| 2 * bound).collect::<Vec<_>>());
        prop_assert_eq!(pairs.order.iter().step_by(2).copied().collect::<Vec<_>>(), alone.order);
    }

    #[test]
    fn more_than_the_common_prefix_is_refused(samples in branching()) {
        let table = table(&samples).unwrap();
        let order: Vec<i64> = (0..samples.len() as i64).collect();
        let common = |at: usize| samples[at - 1].ids.iter().zip(&samples[at].ids).take_while(|(a, b)| a == b).count() as i64;
        let exact: Vec<i64> = (0..samples.len()).map(|at| if at == 0 { 0 } else { common(at) }).collect();
        prop_assert!(collate(&table, &order, &exact).is_ok());
        for at in 0..samples.len() {
            for wrong in [-1, exact[at] + 1] {
                let mut shared = exact.clone();
                shared[at] = wrong;
                let refused = collate(&table, &order, &shared).unwrap_err();
                prop_assert_eq!(refused, CoreError::OutOfRange { name: "shared", value: wrong, least: 0, most: exact[at] });
            }
        }
    }
}

#[test]
fn a_prompt_with_two_answers_is_computed_once() {
    // 9 8 7 is the prompt; the answers are 1, 1 2 and 3. From the largest: 3, then 1 2, then 1.
    // The line adds 9 8 7 3, then 1 2 to the 3 that are shared, then nothing: 6 tokens of 13.
    let samples = [vec![9, 8, 7, 1], vec![9, 8, 7, 1, 2], vec![9, 8, 7, 3]].map(sample);
    let plan = table(&samples).unwrap().plan_trees(&[0, 1, 2], 8, 3).unwrap();
    assert_eq!(plan, TreePlan { order: vec![2, 1, 0], shared: vec![0, 3, 4], bounds: vec![0, 3], tokens: vec![6] });
    // With a budget of 5 the second answer begins a line anew: 4 tokens, then 5 and none.
    let plan = table(&samples).unwrap().plan_trees(&[0, 1, 2], 5, 3).unwrap();
    assert_eq!((plan.bounds, plan.tokens, plan.shared), (vec![0, 1, 3], vec![4, 5], vec![0, 0, 4]));
}

#[test]
fn a_pair_that_does_not_fit_begins_a_line() {
    // Pairs (5 5 1, 5 5 2) and (5 5 3, 7 5 5). The second has the larger sample, 7 5 5, so it comes
    // first: two trees of 6 tokens. The first shares 5 5 with 5 5 3 and would add 1 and 2: 8.
    let samples = [vec![5, 5, 1], vec![5, 5, 2], vec![5, 5, 3], vec![7, 5, 5]].map(sample);
    let table = table(&samples).unwrap();
    let plan = table.plan_pair_trees(&[0, 1, 2, 3], 8, 2).unwrap();
    assert_eq!(
        plan,
        TreePlan { order: vec![3, 2, 1, 0], shared: vec![0, 0, 2, 2], bounds: vec![0, 4], tokens: vec![8] }
    );
    // With a budget of 7 it begins its own line, 5 5 2 and 1.
    let plan = table.plan_pair_trees(&[0, 1, 2, 3], 7, 2).unwrap();
    assert_eq!((plan.bounds, plan.tokens, plan.shared), (vec![0, 2, 4], vec![6, 4], vec![0, 0, 0, 2]));
}

#[test]
fn half_a_pair_is_refused() {
    let table = table(&[sample(vec![1, 2, 3]), sample(vec![1])]).unwrap();
    let refused = table.plan_pair_trees(&[0, 1, 0], 9, 1);
    assert!(matches!(refused, Err(CoreError::ColumnLength { column: "indices", length: 3, expected: 4 })));
    let refused = table.plan_pair_trees(&[0, 1], 5, 1);
    assert!(matches!(refused, Err(CoreError::PairBudgetTooSmall { budget: 5, longest: 3 })));
}

#[test]
fn settings_out_of_range_are_refused() {
    let table = table(&[sample(vec![1, 2, 3])]).unwrap();
    assert!(matches!(table.plan_trees(&[0], 2, 1), Err(CoreError::BudgetTooSmall { budget: 2, longest: 3 })));
    assert!(matches!(table.plan_trees(&[0], 3, -1), Err(CoreError::NegativeSetting { name: "min_shared", value: -1 })));
    assert!(matches!(table.plan_trees(&[1], 3, 1), Err(CoreError::IndexOutOfRange { index: 1, samples: 1 })));
    assert!(matches!(
        table.trees(&[0], &[]),
        Err(CoreError::ColumnLength { column: "shared", length: 0, expected: 1 })
    ));
}
