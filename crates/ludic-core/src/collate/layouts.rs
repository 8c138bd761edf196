//! The output arrays of each layout: slices of the caller's memory.

use std::mem::MaybeUninit;

/// An output element: a value, or uninitialised memory.
pub trait Slot<T: Copy> {
    /// Writes the value.
    fn put(&mut self, value: T);
}

impl<T: Copy> Slot<T> for T {
    #[inline(always)]
    fn put(&mut self, value: T) {
        *self = value;
    }
}

impl<T: Copy> Slot<T> for MaybeUninit<T> {
    #[inline(always)]
    fn put(&mut self, value: T) {
        self.write(value);
    }
}

/// The output arrays for the actor's log-probabilities.
#[derive(Debug)]
pub struct LogpsOut<'a, F> {
    /// One per token of the layout; 0 for tokens that are not actions.
    pub actor_logps: &'a mut [F],
    /// `[N]`: the sum over each sample.
    pub old_logp_action: &'a mut [F],
}

/// The right-padded layout: B lines of T tokens. N, the number of samples, equals B unless samples
/// share lines.
#[derive(Debug)]
pub struct PaddedOut<'a, I, F> {
    /// `[B, T]`, the padding token on the right.
    pub input_ids: &'a mut [I],
    /// `[B, T]`: 1 on tokens, 0 on padding.
    pub attention_mask: &'a mut [I],
    /// `[B, T]`: 1 on actions.
    pub action_mask: &'a mut [F],
    /// `[N]`
    pub weight: &'a mut [F],
    /// Present exactly when the table has log-probabilities.
    pub logps: Option<LogpsOut<'a, F>>,
}

/// The padding-free layout: S tokens, the lines concatenated.
#[derive(Debug)]
pub struct PaddingFreeOut<'a, I, C, F> {
    /// `[S]`
    pub input_ids: &'a mut [I],
    /// `[S]`: counts from 0 in each line.
    pub position_ids: &'a mut [I],
    /// `[B + 1]`: where each line begins, then the end of the last. Lines of 3 and 2 tokens give
    /// [0, 3, 5].
    pub cu_seqlens: &'a mut [C],
    /// `[S]`: 1 on actions.
    pub action_mask: &'a mut [F],
    /// `[N]`
    pub weight: &'a mut [F],
    /// Present exactly when the table has log-probabilities.
    pub logps: Option<LogpsOut<'a, F>>,
}

/// The right-padded layout in nine bytes per token.
#[derive(Debug)]
pub struct CompactOut<'a, C, U, F> {
    /// `[B, T]`, the padding token on the right.
    pub input_ids: &'a mut [C],
    /// `[B, T]`: 1 on actions.
    pub action_mask: &'a mut [U],
    /// `[B]`: the number of tokens of each line that are attended to.
    pub lengths: &'a mut [C],
    /// `[N]`
    pub weight: &'a mut [F],
    /// Present exactly when the table has log-probabilities.
    pub logps: Option<LogpsOut<'a, F>>,
}
