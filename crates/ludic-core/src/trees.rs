//! Prefix trees: samples that begin with the same tokens, each of which is computed once.
//!
//! Samples are ordered so that each *shares* its first tokens with the sample before it and adds
//! the rest to the tree:
//!
//! ```text
//! [1, 2, 3, 4]   shares 0, adds 1 2 3 4
//! [1, 2, 3]      shares 3, adds nothing
//! [1, 2, 5]      shares 2, adds 5
//! ```
//!
//! A *line* is a tree, or a part of one that fits into the token budget and begins anew.
//!
//! ```
//! use ludic_core::trees::TreeOut;
//! use ludic_core::{ColumnInput, Ints, SampleTable};
//!
//! // [1, 2, 5], [1, 2, 3, 4] and [7].
//! let table = SampleTable::from_columns(&ColumnInput {
//!     input_ids: Ints::I32(&[1, 2, 5, 1, 2, 3, 4, 7]),
//!     action_mask: Ints::U8(&[0, 0, 1, 0, 0, 1, 1, 1]),
//!     attention_mask: None,
//!     actor_logps: None,
//!     weights: None,
//!     offsets: Ints::I64(&[0, 3, 7, 8]),
//! })?;
//! let plan = table.plan_trees(&[0, 1, 2], 8, 1)?;
//! assert_eq!(plan.order, [2, 0, 1]); // the tree of 7; then 5 before 3
//! assert_eq!(plan.shared, [0, 0, 2]);
//! assert_eq!(plan.bounds, [0, 1, 3]);
//! assert_eq!(plan.tokens, [1, 5]);
//! let trees = table.trees(&[0, 1], &[0, 2])?;
//! let (mut ids, mut positions, mut places) = ([0i64; 5], [0i64; 5], [0i64; 7]);
//! trees.collate(TreeOut { input_ids: &mut ids[..], position_ids: &mut positions[..], places: &mut places[..] })?;
//! assert_eq!(ids, [1, 2, 5, 3, 4]);
//! assert_eq!(positions, [0, 1, 2, 2, 3]);
//! assert_eq!(places, [0, 1, 2, 0, 1, 3, 4]); // where the tokens of both samples are in `ids`
//! # Ok::<(), ludic_core::CoreError>(())
//! ```

use crate::collate::{Slot, check_output};
use crate::ingest::check_column;
use crate::plan::check_budget;
use crate::table::{Columns, Row};
use crate::{CoreError, SampleTable};

/// Samples in the order of their trees. See the head of this module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TreePlan {
    /// `[N]`: the indices of the samples, each once.
    pub order: Vec<i64>,
    /// `[N]`: how many tokens each sample of `order` shares with the one before it.
    pub shared: Vec<i32>,
    /// `[L + 1]`: where each line begins in `order`, then the number of samples.
    pub bounds: Vec<i64>,
    /// `[L]`: the number of tokens that each line computes.
    pub tokens: Vec<i32>,
}

/// The output arrays of the tree layout.
#[derive(Debug)]
pub struct TreeOut<'a, I> {
    /// `[U]`: each token of the trees once, in the order in which samples add them.
    pub input_ids: &'a mut [I],
    /// `[U]`: the position of each of them in its samples.
    pub position_ids: &'a mut [I],
    /// `[S]`: for each token of each sample, sample after sample, its index in `input_ids`.
    pub places: &'a mut [I],
}

/// Samples in an order, and what each shares with the one before it; checked.
#[derive(Debug)]
pub struct Trees<'t> {
    columns: &'t Columns,
    rows: Vec<Row>,
    shared: Vec<usize>,
}

impl SampleTable {
    /// Orders the samples at `indices` so that those with a common prefix are neighbours, and
    /// divides them into lines of at most `micro_token_budget` tokens. A prefix of fewer than
    /// `min_shared` tokens is not shared. Attention masks play no part.
    ///
    /// The order is lexicographic by tokens, from the largest down, so that a sample which begins
    /// with another one comes before it; equal samples by their place in `indices`. A line takes
    /// samples for as long as they share tokens and fit.
    pub fn plan_trees(&self, indices: &[i64], micro_token_budget: i64, min_shared: i64) -> Result<TreePlan, CoreError> {
        let mut rows =
            indices.iter().map(|&index| Ok((index, self.row(index)?))).collect::<Result<Vec<_>, CoreError>>()?;
        let longest = rows.iter().map(|(_, row)| row.len).max().unwrap_or(0);
        let budget = check_budget(micro_token_budget, longest)?.min(i32::MAX as u64);
        let least = u64::try_from(min_shared)
            .map_err(|_| CoreError::NegativeSetting { name: "min_shared", value: min_shared })?;
        let ids = |row: &Row| &self.columns.ids[row.span()];
        rows.sort_by(|(_, a), (_, b)| ids(b).cmp(ids(a)));
        let mut plan = TreePlan { order: Vec::new(), shared: Vec::new(), bounds: Vec::new(), tokens: Vec::new() };
        let (mut previous, mut tokens) = (None, 0u64);
        for (at, (index, row)) in rows.iter().enumerate() {
            let common = previous.map_or(0, |previous| count_common(ids(previous), ids(row))) as u64;
            let added = u64::from(row.len) - common;
            if common < least.max(1) || tokens + added > budget {
                plan.bounds.push(at as i64);
                plan.tokens.push(row.len as i32);
                plan.shared.push(0);
                tokens = u64::from(row.len);
            } else {
                tokens += added;
                plan.shared.push(common as i32);
                if let Some(last) = plan.tokens.last_mut() {
                    *last = tokens as i32;
                }
            }
            plan.order.push(*index);
            previous = Some(row);
        }
        plan.bounds.push(rows.len() as i64);
        Ok(plan)
    }

    /// The samples at `indices`, in that order, as trees: each shares its first `shared` tokens
    /// with the one before it. Refuses more than these have in common.
    pub fn trees(&self, indices: &[i64], shared: &[i64]) -> Result<Trees<'_>, CoreError> {
        check_column("shared", shared.len(), indices.len())?;
        let columns = &*self.columns;
        let rows = indices.iter().map(|&index| self.row(index)).collect::<Result<Vec<_>, _>>()?;
        let mut counts = Vec::with_capacity(rows.len());
        for (at, (row, &value)) in rows.iter().zip(shared).enumerate() {
            let limit = match at.checked_sub(1) {
                Some(before) => count_common(&columns.ids[rows[before].span()], &columns.ids[row.span()]),
                None => 0,
            };
            let refused = CoreError::OutOfRange { name: "shared", value, least: 0, most: limit as i64 };
            counts.push(usize::try_from(value).ok().filter(|&count| count <= limit).ok_or(refused)?);
        }
        Ok(Trees { columns, rows, shared: counts })
    }
}

impl Trees<'_> {
    /// U, the number of tokens of the trees.
    pub fn num_tokens(&self) -> usize {
        self.num_places() - self.shared.iter().sum::<usize>()
    }

    /// S, the number of tokens of all samples.
    pub fn num_places(&self) -> usize {
        self.rows.iter().map(|row| row.len as usize).sum()
    }

    /// Writes the tree layout.
    pub fn collate<I: Slot<i64>>(&self, out: TreeOut<'_, I>) -> Result<(), CoreError> {
        check_output("input_ids", out.input_ids, self.num_tokens())?;
        check_output("position_ids", out.position_ids, self.num_tokens())?;
        check_output("places", out.places, self.num_places())?;
        // Where the tokens of the sample at hand are; those of the next one replace its end.
        let mut path: Vec<i64> = Vec::new();
        let (mut next, mut place) = (0, 0);
        for (row, &shared) in self.rows.iter().zip(&self.shared) {
            path.truncate(shared);
            for (position, &id) in self.columns.ids[row.span()].iter().enumerate().skip(shared) {
                path.push(next as i64);
                out.input_ids[next].put(i64::from(id));
                out.position_ids[next].put(position as i64);
                next += 1;
            }
            for &index in &path {
                out.places[place].put(index);
                place += 1;
            }
        }
        Ok(())
    }
}

/// The length of the common prefix.
fn count_common(a: &[i32], b: &[i32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
