//! Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16) over episodes of
//! different lengths, which lie one after another in packed columns.
//!
//! delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  the return is A_t + V_t.
//!
//! V after the last token of an episode is its last value: 0 if the episode ended, an estimate if it
//! was cut off. With the rewards 0, 1, the values 1/2, 1/4, the last value 0 and gamma = lam = 1 the
//! deltas are -1/4 and 3/4, the advantages 1/2 and 3/4, and the returns 1 and 1.

use crate::CoreError;
use crate::ingest::check_column;

/// Advantage and return of each token.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimates {
    /// The advantages, `A_t`.
    pub advantages: Vec<f64>,
    /// The targets of the critic, `A_t + V_t`.
    pub returns: Vec<f64>,
}

/// Estimates the advantages of episodes. `rewards` and `values` have one entry for each token,
/// `lengths` and `last_values` one for each episode. Takes O(tokens), in one order on every machine.
///
/// # Errors
/// [`CoreError::NegativeLength`] for a negative length, [`CoreError::ColumnLength`] for a column with
/// more or fewer entries than tokens, or episodes.
pub fn gae(
    rewards: &[f64],
    values: &[f64],
    lengths: &[i64],
    last_values: &[f64],
    gamma: f64,
    lam: f64,
) -> Result<Estimates, CoreError> {
    let mut tokens = 0_usize;
    for (index, &length) in lengths.iter().enumerate() {
        let count = usize::try_from(length).map_err(|_| CoreError::NegativeLength { index: index as u64, length })?;
        tokens = tokens.saturating_add(count);
    }
    check_column("rewards", rewards.len(), tokens)?;
    check_column("values", values.len(), tokens)?;
    check_column("last_values", last_values.len(), lengths.len())?;
    let (mut advantages, mut returns) = (vec![0.0; tokens], vec![0.0; tokens]);
    let mut end = tokens;
    for (&length, &last_value) in lengths.iter().zip(last_values).rev() {
        let start = end - length as usize;
        let (mut advantage, mut next_value) = (0.0, last_value);
        for token in (start..end).rev() {
            let delta = rewards[token] + gamma * next_value - values[token];
            advantage = delta + gamma * lam * advantage;
            (advantages[token], returns[token]) = (advantage, advantage + values[token]);
            next_value = values[token];
        }
        end = start;
    }
    Ok(Estimates { advantages, returns })
}
