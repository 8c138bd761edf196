//! A macro-batch as columns. Every view (`truncate`, `select`) shares the columns and owns only one
//! small row a sample.

use std::sync::Arc;

use crate::CoreError;

/// Action tokens are counted once for every block of this many tokens, so that any span is counted
/// in O(1).
const BLOCK: usize = 64;

/// The token-aligned columns of all samples, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Columns {
    pub(crate) ids: Vec<i32>,
    /// 0 or 1 for each token.
    pub(crate) action: Vec<u8>,
    /// 0 where the token is no action.
    pub(crate) logps: Option<Vec<f32>>,
    /// Absent when every token is attended to, which is what nearly every sample says.
    pub(crate) attention: Option<Vec<u8>>,
    /// Action tokens before each block of `BLOCK` tokens.
    pub(crate) block_ranks: Vec<usize>,
}

impl Columns {
    /// Counts the action tokens of each block; the columns do not change afterwards.
    pub(crate) fn seal(mut self) -> Arc<Self> {
        let mut before = 0;
        self.block_ranks = Vec::with_capacity(self.action.len() / BLOCK + 1);
        for block in self.action.chunks(BLOCK) {
            self.block_ranks.push(before);
            before += ones(block);
        }
        self.block_ranks.push(before);
        Arc::new(self)
    }

    /// Takes back all tokens from `end` on, in columns that are not sealed.
    pub(crate) fn truncate(&mut self, end: usize) {
        self.ids.truncate(end);
        self.action.truncate(end);
        // The first sample decides whether there are log-probabilities.
        self.logps = self.logps.take().filter(|_| end > 0);
        if let Some(column) = &mut self.logps {
            column.truncate(end);
        }
        if let Some(column) = &mut self.attention {
            column.truncate(end);
        }
    }

    /// Whether `row` holds all ids of `before`, then others, and acts on the others alone.
    fn continues(&self, before: &Row, row: &Row) -> bool {
        let shared = before.len as usize;
        before.len < row.len
            && self.ids[before.span()] == self.ids[row.start..row.start + shared]
            && self.rank(row.start) == self.rank(row.start + shared)
            && self.attention.as_ref().is_none_or(|mask| ![before, row].iter().any(|row| mask[row.span()].contains(&0)))
    }

    /// Action tokens before `position`.
    fn rank(&self, position: usize) -> usize {
        let block = position / BLOCK;
        self.block_ranks[block] + ones(&self.action[block * BLOCK..position])
    }
}

/// The number of ones in a mask of zeros and ones.
pub(crate) fn ones(mask: &[u8]) -> usize {
    // A byte holds the sum of up to 255 ones, and sums of bytes use whole vector registers.
    let sum_of = |part: &[u8]| part.iter().fold(0u8, |sum, &bit| sum.wrapping_add(bit));
    mask.chunks(255).map(|part| usize::from(sum_of(part))).sum()
}

/// Where one sample lies in the columns, and how much of it is kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub(crate) start: usize,
    pub(crate) len: u32,
    pub(crate) original_len: u32,
    pub(crate) weight: f32,
    /// The index of the sample that its chain begins with; [`ALONE`](Self::ALONE) outside any
    /// chain.
    pub(crate) chain: u32,
    /// The index that it had when it was chained: samples of a chain continue one another in this
    /// order.
    pub(crate) link: u32,
}

impl Row {
    pub(crate) const ALONE: u32 = u32::MAX;

    /// A sample of `len` tokens from `start` on, all of them kept, in no chain.
    pub(crate) fn whole(start: usize, len: u32, weight: f32) -> Self {
        Self { start, len, original_len: len, weight, chain: Self::ALONE, link: Self::ALONE }
    }

    pub(crate) fn span(&self) -> std::ops::Range<usize> {
        self.start..self.start + self.len as usize
    }
}

/// Samples as columns: token ids, action masks, log-probabilities of the actor and weights.
///
/// Built by [`TableBuilder`](crate::TableBuilder) or [`from_columns`](Self::from_columns),
/// immutable afterwards.
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
}

impl SampleTable {
    /// Samples.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is no sample.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Tokens of all samples, after truncation.
    pub fn num_tokens(&self) -> usize {
        self.rows.iter().map(|row| row.len as usize).sum()
    }

    /// Whether the samples carry the actor's log-probabilities.
    pub fn has_actor_logps(&self) -> bool {
        self.columns.logps.is_some()
    }

    /// Tokens of each sample, after truncation.
    pub fn lengths(&self) -> Vec<i32> {
        self.rows.iter().map(|row| row.len as i32).collect()
    }

    /// Tokens of each sample as ingested.
    pub fn original_lengths(&self) -> Vec<i32> {
        self.rows.iter().map(|row| row.original_len as i32).collect()
    }

    /// Action tokens of each sample, after truncation. O(1) a sample.
    pub fn action_counts(&self) -> Vec<i32> {
        self.rows.iter().map(|row| self.count_actions(row.span())).collect()
    }

    /// Action tokens of each sample at positions >= 1: those that a causal model predicts.
    pub fn target_counts(&self) -> Vec<i32> {
        let targets = |row: &Row| {
            let span = row.span();
            self.count_actions((span.start + 1).min(span.end)..span.end)
        };
        self.rows.iter().map(targets).collect()
    }

    /// Credit of each sample.
    pub fn weights(&self) -> Vec<f32> {
        self.rows.iter().map(|row| row.weight).collect()
    }

    /// The samples at `indices`, in that order; an index may come twice. No token is copied.
    pub fn select(&self, indices: &[i64]) -> Result<Self, CoreError> {
        let rows = indices.iter().map(|&index| self.row(index)).collect::<Result<_, _>>()?;
        Ok(Self { columns: Arc::clone(&self.columns), rows })
    }

    /// The same samples, with those that continue one another **chained**: the ids of a sample
    /// begin with all ids of the sample before it, and none of those is one of its actions. So the
    /// turns of a dialogue are, as long as nobody rewrites its history.
    ///
    /// Samples of a chain that stand one after the other in a micro-batch share a line: it holds
    /// the ids of the last of them, and for a causal model everything that is computed for the
    /// others.
    ///
    /// Chains are made of the samples as they stand here: those that an earlier call made are
    /// forgotten, so that a view is chained like a table of its samples.
    pub fn chained(&self) -> Self {
        let alone = |(row, link): (&Row, u32)| Row { chain: Row::ALONE, link, ..*row };
        let mut rows: Vec<Row> = self.rows.iter().zip(0..).map(alone).collect();
        for at in 1..rows.len() {
            if self.columns.continues(&rows[at - 1], &rows[at]) {
                let before = &mut rows[at - 1];
                before.chain = before.chain.min(before.link);
                rows[at].chain = rows[at - 1].chain;
            }
        }
        Self { columns: Arc::clone(&self.columns), rows }
    }

    /// The chain of each sample, as the index of its first when it was made; -1 outside any chain.
    pub fn chains(&self) -> Vec<i32> {
        self.rows.iter().map(|row| row.chain as i32).collect()
    }

    /// The row at `index`.
    pub(crate) fn row(&self, index: i64) -> Result<Row, CoreError> {
        let row = usize::try_from(index).ok().and_then(|at| self.rows.get(at));
        row.copied().ok_or(CoreError::IndexOutOfRange { index, samples: self.rows.len() })
    }

    fn count_actions(&self, span: std::ops::Range<usize>) -> i32 {
        // At most the length of a sample, which fits.
        (self.columns.rank(span.end) - self.columns.rank(span.start)) as i32
    }
}
