//! A macro-batch stored as columns. Views (`truncate`, `select`, `chained`) share the columns and
//! own one small row per sample.

use std::ops::Range;
use std::sync::Arc;

use crate::CoreError;
use crate::ingest::{check_column, check_weight};
use crate::numbers::{Float, Floats, each_float};
use crate::token_columns::TokenColumn;

/// The number of tokens in a block. Action tokens are counted once per block, so that counting any
/// span is O(1).
const BLOCK: usize = 64;

/// The token-aligned columns of all samples, concatenated.
#[derive(Debug, Default)]
pub(crate) struct Columns {
    pub(crate) ids: Vec<i32>,
    /// 0 or 1 for each token.
    pub(crate) action: Vec<u8>,
    /// 0 where the token is not an action.
    pub(crate) logps: Option<Vec<f32>>,
    /// None if every token is attended to, which is true of nearly all data.
    pub(crate) attention: Option<Vec<u8>>,
    /// The number of action tokens before each block, then the total. With blocks of 2 tokens, the
    /// action mask [1, 0, 1] gives [0, 1, 2].
    pub(crate) actions_before_block: Vec<usize>,
}

impl Columns {
    /// Counts the action tokens before each block. The columns do not change afterwards.
    pub(crate) fn seal(mut self) -> Arc<Self> {
        let mut before = 0;
        self.actions_before_block = Vec::with_capacity(self.action.len() / BLOCK + 1);
        for block in self.action.chunks(BLOCK) {
            self.actions_before_block.push(before);
            before += count_ones(block);
        }
        self.actions_before_block.push(before);
        Arc::new(self)
    }

    /// Removes all tokens from `end` on. Only for columns that are not sealed yet.
    pub(crate) fn truncate(&mut self, end: usize) {
        self.ids.truncate(end);
        self.action.truncate(end);
        // The first sample decides whether there are log-probabilities; without it, it is open.
        self.logps = self.logps.take().filter(|_| end > 0);
        if let Some(column) = &mut self.logps {
            column.truncate(end);
        }
        if let Some(column) = &mut self.attention {
            column.truncate(end);
        }
    }

    /// Removes the tokens of a range but their log-probabilities, which come later. Only for columns
    /// that are not sealed yet.
    pub(crate) fn remove(&mut self, tokens: Range<usize>) {
        self.ids.drain(tokens.clone());
        self.action.drain(tokens.clone());
        if let Some(column) = &mut self.attention {
            column.drain(tokens);
        }
    }

    /// Returns memory that was reserved for more tokens.
    pub(crate) fn shrink(&mut self) {
        self.ids.shrink_to_fit();
        self.action.shrink_to_fit();
        self.logps.iter_mut().for_each(Vec::shrink_to_fit);
    }

    /// Whether `row` continues `previous`: it begins with all ids of `previous`, is longer, and has
    /// no action among the shared ids. [5, 6, 7] with the action mask [0, 0, 1] continues [5, 6].
    /// Never true if either row has a 0 in its attention mask.
    fn continues(&self, row: &Row, previous: &Row) -> bool {
        previous.len < row.len && self.may_share(row, previous)
    }

    /// Whether `row` continues `previous`, or is the same tokens without an action.
    pub(crate) fn may_share(&self, row: &Row, previous: &Row) -> bool {
        previous.len <= row.len
            && self.begins_with(row, previous)
            && ![previous, row].into_iter().any(|row| self.has_hole(row))
    }

    /// Whether `row` begins with all ids of `previous`, which is not longer, and has no action among
    /// them.
    pub(crate) fn begins_with(&self, row: &Row, previous: &Row) -> bool {
        let end = row.start + previous.len as usize;
        let own = row.stored(0).1.start.min(end)..end;
        self.ids[previous.span()] == self.ids[row.start..end] && !self.action[own].contains(&1)
    }

    /// Whether a token of the sample is not attended to.
    pub(crate) fn has_hole(&self, row: &Row) -> bool {
        self.attention.as_ref().is_some_and(|mask| mask[row.span()].contains(&0))
    }

    /// The number of action tokens in a span. O(1).
    fn count_actions(&self, span: Range<usize>) -> usize {
        self.count_actions_before(span.end) - self.count_actions_before(span.start)
    }

    fn count_actions_before(&self, position: usize) -> usize {
        let block = position / BLOCK;
        self.actions_before_block[block] + count_ones(&self.action[block * BLOCK..position])
    }
}

/// The number of ones in a mask of zeros and ones.
pub(crate) fn count_ones(mask: &[u8]) -> usize {
    // A byte holds the sum of up to 255 ones, and sums of bytes use whole vector registers.
    let sum_bytes = |part: &[u8]| part.iter().fold(0u8, |sum, &bit| sum.wrapping_add(bit));
    mask.chunks(255).map(|part| usize::from(sum_bytes(part))).sum()
}

/// The position of one sample in the columns, and its length after truncation.
///
/// A sample that continues the one before it stores only what it adds. The ids [5, 6, 7] with the
/// action mask [0, 1, 0], then [5, 6, 7, 8] with [0, 0, 0, 1], are the columns [5, 6, 7, 8] and
/// [0, 1, 0, 1]; both rows start at 0, and the second has 3 shared tokens, which are no actions of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub(crate) start: usize,
    pub(crate) len: u32,
    pub(crate) original_len: u32,
    /// The number of its first tokens that are stored for the samples before it. They are attended
    /// to, and none is an action of this sample, whatever the columns say. Truncation may leave
    /// fewer.
    pub(crate) shared: u32,
    pub(crate) weight: f32,
    /// The index of the first sample of its chain; [`NO_CHAIN`](Self::NO_CHAIN) if it is in none.
    pub(crate) chain: u32,
    /// The index of the sample when the chains were made. Samples of a chain continue each other
    /// in this order.
    pub(crate) link: u32,
}

impl Row {
    pub(crate) const NO_CHAIN: u32 = u32::MAX;

    /// A sample of `len` tokens from `start` on, not truncated and in no chain.
    pub(crate) fn new(start: usize, len: u32, weight: f32) -> Self {
        Self { start, len, original_len: len, shared: 0, weight, chain: Self::NO_CHAIN, link: Self::NO_CHAIN }
    }

    /// Whether it is in a chain.
    pub(crate) fn is_chained(&self) -> bool {
        self.chain != Self::NO_CHAIN
    }

    /// The range of its tokens in the columns. A `start` of 3 and a `len` of 2 give 3..5.
    pub(crate) fn span(&self) -> Range<usize> {
        self.start..self.start + self.len as usize
    }

    /// Where the tokens from `begin` on have their actions: the number of tokens before the stored
    /// ones, which have no action, and the range of the stored ones in the columns. In a row from 10
    /// on with 5 tokens, of which 3 are shared, the tokens from 1 on give 2 and 13..15.
    pub(crate) fn stored(&self, begin: usize) -> (usize, Range<usize>) {
        let first = (self.shared.min(self.len) as usize).max(begin);
        (first - begin, self.start + first..self.span().end)
    }
}

/// Samples stored as columns: token ids, action masks, the actor's log-probabilities and weights.
///
/// Immutable. Build it with [`TableBuilder`](crate::TableBuilder) or
/// [`from_columns`](Self::from_columns).
///
/// ```
/// use ludic_core::{Ints, Sample, TableBuilder};
///
/// let mut builder = TableBuilder::default();
/// builder.push(&Sample {
///     input_ids: Ints::I64(&[5, 6, 7]),
///     action_mask: Ints::U8(&[0, 1, 1]),
///     attention_mask: None,
///     actor_logps: None,
///     weight: 0.5,
/// })?;
/// let table = builder.finish();
/// assert_eq!(table.action_counts(), [2]);
/// assert_eq!(table.truncate(2)?.action_counts(), [1]);
/// # Ok::<(), ludic_core::CoreError>(())
/// ```
#[derive(Debug, Clone)]
pub struct SampleTable {
    pub(crate) columns: Arc<Columns>,
    pub(crate) rows: Vec<Row>,
    pub(crate) token_columns: Vec<Arc<TokenColumn>>,
}

impl SampleTable {
    /// The number of samples.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is no sample.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The number of tokens of all samples, after truncation.
    pub fn num_tokens(&self) -> usize {
        self.rows.iter().map(|row| row.len as usize).sum()
    }

    /// Whether the samples have the actor's log-probabilities.
    pub fn has_actor_logps(&self) -> bool {
        self.columns.logps.is_some()
    }

    /// Whether a sample of the columns has a 0 in its attention mask, also one that a view leaves
    /// out.
    pub fn has_partial_attention(&self) -> bool {
        self.columns.attention.is_some()
    }

    /// The number of tokens of each sample, after truncation.
    pub fn lengths(&self) -> Vec<i32> {
        self.rows.iter().map(|row| row.len as i32).collect()
    }

    /// The number of tokens of each sample before truncation.
    pub fn original_lengths(&self) -> Vec<i32> {
        self.rows.iter().map(|row| row.original_len as i32).collect()
    }

    /// The number of action tokens of each sample, after truncation. O(1) per sample.
    pub fn action_counts(&self) -> Vec<i32> {
        self.rows.iter().map(|row| self.count_actions(row, 0)).collect()
    }

    /// The number of action tokens of each sample at positions >= 1, which are those that a causal
    /// model predicts. The action mask [1, 0, 1] has 2 actions and 1 target.
    pub fn target_counts(&self) -> Vec<i32> {
        self.rows.iter().map(|row| self.count_actions(row, 1)).collect()
    }

    /// The weight (credit) of each sample.
    pub fn weights(&self) -> Vec<f32> {
        self.rows.iter().map(|row| row.weight).collect()
    }

    /// Returns the same samples with other weights, one each, which must be finite in float32.
    /// Truncation and chains stay. Copies no token. The weights [0.5, 1.0] with [2.0, -1.0] become
    /// [2.0, -1.0].
    pub fn with_weights(&self, weights: Floats<'_>) -> Result<Self, CoreError> {
        check_column("weights", weights.len(), self.rows.len())?;
        let mut rows = self.rows.clone();
        for (sample, row) in rows.iter_mut().enumerate() {
            row.weight = check_weight(sample, each_float!(weights, values => Float::to_f64(values[sample])))?;
        }
        Ok(self.view(rows))
    }

    /// Returns the samples at `indices`, in that order. An index may occur twice. Copies no token.
    pub fn select(&self, indices: &[i64]) -> Result<Self, CoreError> {
        let rows = indices.iter().map(|&index| self.row(index)).collect::<Result<_, _>>()?;
        Ok(self.view(rows))
    }

    /// Returns the same samples, with those that continue each other linked into **chains**. A
    /// sample continues the one before it if its ids begin with all ids of that sample, and none
    /// of those tokens is one of its actions. The turns of a dialogue are a chain as long as
    /// no code rewrites the history.
    ///
    /// Adjacent samples of a chain share one line of a micro-batch. The line has the ids of the
    /// last of them, which for a causal model covers the computation of the others.
    ///
    /// Chains of an earlier call are discarded: chaining a view equals chaining a new table of its
    /// samples. The ids [1], [1, 2] and [8] have the [`chains`](Self::chains) [0, 0, -1].
    pub fn chained(&self) -> Self {
        let unchained = |(row, link): (&Row, u32)| Row { chain: Row::NO_CHAIN, link, ..*row };
        let mut rows: Vec<Row> = self.rows.iter().zip(0..).map(unchained).collect();
        for index in 1..rows.len() {
            if self.columns.continues(&rows[index], &rows[index - 1]) {
                let previous = &mut rows[index - 1];
                // `NO_CHAIN` is the largest value: a sample in no chain begins one here.
                previous.chain = previous.chain.min(previous.link);
                rows[index].chain = rows[index - 1].chain;
            }
        }
        self.view(rows)
    }

    /// The chain of each sample: the index that the chain's first sample had when the chain was
    /// made, or -1 for a sample in no chain.
    pub fn chains(&self) -> Vec<i32> {
        self.rows.iter().map(|row| row.chain as i32).collect()
    }

    /// The same columns with other rows.
    pub(crate) fn view(&self, rows: Vec<Row>) -> Self {
        Self { columns: Arc::clone(&self.columns), rows, token_columns: self.token_columns.clone() }
    }

    /// The row at `index`, or an error if there is none.
    pub(crate) fn row(&self, index: i64) -> Result<Row, CoreError> {
        let row = usize::try_from(index).ok().and_then(|index| self.rows.get(index));
        row.copied().ok_or(CoreError::IndexOutOfRange { index, samples: self.rows.len() })
    }

    /// The number of action tokens of a sample from `begin` on.
    fn count_actions(&self, row: &Row, begin: usize) -> i32 {
        // At most the length of a sample, which fits.
        self.columns.count_actions(row.stored(begin).1) as i32
    }
}
