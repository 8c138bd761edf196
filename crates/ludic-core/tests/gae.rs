//! Laws of generalised advantage estimation, checked against its definition.

use ludic_core::CoreError;
use ludic_core::gae::{Estimates, gae};
use proptest::prelude::*;

/// One episode: rewards and values of its tokens, and its last value.
type Episode = (Vec<(f64, f64)>, f64);

fn episodes() -> impl Strategy<Value = Vec<Episode>> {
    let tokens = prop::collection::vec((-3.0..3.0, -3.0..3.0), 0..12);
    prop::collection::vec((tokens, -3.0..3.0), 0..8)
}

fn packed(episodes: &[Episode], gamma: f64, lam: f64) -> Estimates {
    let tokens: Vec<(f64, f64)> = episodes.iter().flat_map(|(tokens, _)| tokens.clone()).collect();
    let (rewards, values): (Vec<f64>, Vec<f64>) = tokens.into_iter().unzip();
    let lengths: Vec<i64> = episodes.iter().map(|(tokens, _)| tokens.len() as i64).collect();
    let last: Vec<f64> = episodes.iter().map(|&(_, last)| last).collect();
    gae(&rewards, &values, &lengths, &last, gamma, lam).unwrap()
}

/// Equation 16: the sum over l of `(gamma lam)^l delta_{t+l}`, term by term.
fn oracle((tokens, last): &Episode, gamma: f64, lam: f64) -> Vec<f64> {
    let value = |token: usize| tokens.get(token).map_or(*last, |&(_, value)| value);
    let delta = |token: usize| tokens[token].0 + gamma * value(token + 1) - value(token);
    let advantage =
        |from: usize| (from..tokens.len()).map(|token| (gamma * lam).powi((token - from) as i32) * delta(token)).sum();
    (0..tokens.len()).map(advantage).collect()
}

proptest! {
    #[test]
    fn packed_episodes_are_the_sums_of_the_definition(episodes in episodes(), gamma in 0.0..=1.0, lam in 0.0..=1.0) {
        let got = packed(&episodes, gamma, lam);
        let want: Vec<f64> = episodes.iter().flat_map(|episode| oracle(episode, gamma, lam)).collect();
        let values = episodes.iter().flat_map(|(tokens, _)| tokens.iter().map(|&(_, value)| value));
        prop_assert_eq!(got.advantages.len(), want.len());
        for (((advantage, target), want), value) in got.advantages.iter().zip(&got.returns).zip(want).zip(values) {
            prop_assert!((advantage - want).abs() < 1e-9, "{advantage} for {want}");
            prop_assert_eq!(*target, advantage + value);
        }
    }

    #[test]
    fn an_episode_has_the_same_bits_alone_and_among_others(episodes in episodes(), gamma in 0.0..=1.0, lam in 0.0..=1.0) {
        let alone: Vec<f64> =
            episodes.iter().flat_map(|each| packed(std::slice::from_ref(each), gamma, lam).advantages).collect();
        prop_assert_eq!(packed(&episodes, gamma, lam).advantages, alone);
    }
}

#[test]
fn columns_of_other_lengths_are_refused() {
    let refused = gae(&[0.0; 3], &[0.0; 2], &[1, 1], &[0.0; 2], 1.0, 1.0);
    assert_eq!(refused, Err(CoreError::ColumnLength { column: "rewards", length: 3, expected: 2 }));
    let refused = gae(&[0.0; 2], &[0.0; 2], &[1, 1], &[0.0], 1.0, 1.0);
    assert_eq!(refused, Err(CoreError::ColumnLength { column: "last_values", length: 1, expected: 2 }));
    let refused = gae(&[], &[], &[-1], &[0.0], 1.0, 1.0);
    assert_eq!(refused, Err(CoreError::NegativeLength { index: 0, length: -1 }));
}
