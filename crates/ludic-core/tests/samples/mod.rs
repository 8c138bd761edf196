//! Samples that tests own, and proptest strategies for them.
#![allow(dead_code)]

use ludic_core::{CoreError, Floats, Ints, Sample, SampleTable, TableBuilder};
use proptest::prelude::*;

/// One sample, owned. `logps` has one value for each action.
#[derive(Debug, Clone, PartialEq)]
pub struct Owned {
    pub ids: Vec<i64>,
    pub action: Vec<u8>,
    pub attention: Vec<u8>,
    pub logps: Option<Vec<f32>>,
    pub weight: f64,
}

impl Owned {
    pub fn view(&self) -> Sample<'_> {
        Sample {
            input_ids: Ints::I64(&self.ids),
            action_mask: Ints::U8(&self.action),
            attention_mask: Some(Ints::U8(&self.attention)),
            actor_logps: self.logps.as_deref().map(Floats::F32),
            weight: self.weight,
        }
    }

    /// The sample, cut on the right to at most `max_seq_len` tokens.
    pub fn cut(&self, max_seq_len: usize) -> Self {
        let keep = self.ids.len().min(max_seq_len);
        let actions = self.action[..keep].iter().filter(|&&bit| bit == 1).count();
        Self {
            ids: self.ids[..keep].to_vec(),
            action: self.action[..keep].to_vec(),
            attention: self.attention[..keep].to_vec(),
            logps: self.logps.as_ref().map(|logps| logps[..actions].to_vec()),
            weight: self.weight,
        }
    }

    pub fn actions(&self) -> usize {
        self.action.iter().filter(|&&bit| bit == 1).count()
    }

    /// One value per token: the log-probability of an action, 0 for another token.
    pub fn aligned_logps(&self) -> Vec<f32> {
        let mut next = self.logps.iter().flatten();
        self.action.iter().map(|&bit| if bit == 1 { *next.next().unwrap_or(&0.0) } else { 0.0 }).collect()
    }
}

pub fn table(samples: &[Owned]) -> Result<SampleTable, CoreError> {
    let mut builder = TableBuilder::default();
    samples.iter().try_for_each(|sample| builder.push(&sample.view()))?;
    Ok(builder.finish())
}

/// A mask of a few runs, like real ones, or of independent bits.
fn mask() -> impl Strategy<Value = Vec<u8>> {
    let runs = prop::collection::vec((0u8..2, 1usize..70), 1..4)
        .prop_map(|runs| runs.into_iter().flat_map(|(bit, length)| vec![bit; length]).collect());
    prop_oneof![3 => runs, 1 => prop::collection::vec(0u8..2, 1..150)]
}

fn sample(with_logps: bool, holes: bool) -> impl Strategy<Value = Owned> {
    mask().prop_flat_map(move |action| {
        let length = action.len();
        let actions = action.iter().filter(|&&bit| bit == 1).count();
        let id = prop_oneof![0i64..300, Just(i64::from(i32::MAX))];
        let attention =
            if holes { prop::collection::vec(0u8..2, length).boxed() } else { Just(vec![1; length]).boxed() };
        let logps = prop::collection::vec(-20.0f32..0.0, actions).prop_map(move |logps| with_logps.then_some(logps));
        (prop::collection::vec(id, length), Just(action), attention, logps, -2.0..2.0)
            .prop_map(|(ids, action, attention, logps, weight)| Owned { ids, action, attention, logps, weight })
    })
}

/// Up to 12 samples, all with log-probabilities or none, every token attended to.
pub fn samples() -> impl Strategy<Value = Vec<Owned>> {
    any::<bool>().prop_flat_map(|with_logps| prop::collection::vec(sample(with_logps, false), 0..12))
}

/// The same, some of them with arbitrary attention masks.
pub fn samples_with_holes() -> impl Strategy<Value = Vec<Owned>> {
    any::<bool>().prop_flat_map(|with_logps| {
        let one = any::<bool>().prop_flat_map(move |holes| sample(with_logps, holes));
        prop::collection::vec(one, 0..12)
    })
}

/// Samples, a length to cut them to, and the indices of a micro-batch, which may repeat.
pub fn batch() -> impl Strategy<Value = (Vec<Owned>, usize, Vec<i64>)> {
    samples().prop_filter("needs a sample", |samples| !samples.is_empty()).prop_flat_map(|samples| {
        let indices = prop::collection::vec(0..samples.len() as i64, 1..8);
        (Just(samples), 1usize..160, indices)
    })
}

/// Samples with holes, or of dialogues.
pub fn any_samples() -> impl Strategy<Value = Vec<Owned>> {
    prop_oneof![samples_with_holes(), dialogues()]
}

/// One turn of a dialogue: the tokens of the environment, the tokens of the policy, whether the
/// history is rewritten before it, and whether all tokens of the history count as its actions.
type Turn = (Vec<i64>, Vec<i64>, bool, bool);

fn turn() -> impl Strategy<Value = Turn> {
    let ids = |least| prop::collection::vec(0i64..4, least..6);
    (ids(0), prop_oneof![9 => ids(1), 1 => ids(0)], prop::bool::weighted(0.15), prop::bool::weighted(0.1))
}

/// The samples of up to four dialogues of up to five turns each, one per turn. Nearly every one
/// begins with the one before it.
pub fn dialogues() -> impl Strategy<Value = Vec<Owned>> {
    let dialogue = prop::collection::vec(turn(), 1..6);
    (prop::collection::vec(dialogue, 1..5), any::<bool>())
        .prop_map(|(dialogues, with_logps)| dialogues.iter().flat_map(|turns| samples_of(turns, with_logps)).collect())
}

fn samples_of(turns: &[Turn], with_logps: bool) -> Vec<Owned> {
    let (mut history, mut samples) = (Vec::<i64>::new(), Vec::new());
    for (observation, completion, rewrite, history_is_action) in turns {
        if *rewrite && !history.is_empty() {
            history[0] += 10;
        }
        let mut action = vec![u8::from(*history_is_action); history.len()];
        action.extend(vec![0; observation.len()]);
        action.extend(vec![1; completion.len()]);
        history.extend(observation.iter().chain(completion));
        if history.is_empty() {
            continue;
        }
        let actions = action.iter().filter(|&&bit| bit == 1).count();
        samples.push(Owned {
            ids: history.clone(),
            attention: vec![1; history.len()],
            logps: with_logps.then(|| (0..actions).map(|at| -0.1 * (at + 1) as f32).collect()),
            weight: samples.len() as f64,
            action,
        });
    }
    samples
}
