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

use std::cmp::Ordering;

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
        self.plan_units(indices, 1, micro_token_budget, min_shared)
    }

    /// The same for pairs, `indices[0]` with `indices[1]` and so on, whose samples stay in one line.
    /// Pairs are ordered by the larger of their samples, then by the other. A line takes pairs for
    /// as long as they fit and a sample of theirs shares tokens with it. The samples of a pair that
    /// share nothing are two trees of one line.
    ///
    /// Refuses a budget without room for two samples as long as the longest.
    pub fn plan_pair_trees(
        &self,
        indices: &[i64],
        micro_token_budget: i64,
        min_shared: i64,
    ) -> Result<TreePlan, CoreError> {
        check_column("indices", indices.len(), indices.len().next_multiple_of(2))?;
        self.plan_units(indices, 2, micro_token_budget, min_shared)
    }

    /// `plan_trees` for units of `width` samples each.
    fn plan_units(&self, indices: &[i64], width: usize, budget: i64, min_shared: i64) -> Result<TreePlan, CoreError> {
        let mut members = Vec::with_capacity(indices.len());
        for (place, &index) in indices.iter().enumerate() {
            members.push(Member { index, place, ids: &self.columns.ids[self.row(index)?.span()] });
        }
        let longest = members.iter().map(|member| member.ids.len()).max().unwrap_or(0);
        let budget = check_budget(budget, longest as u32)?;
        if budget < (width * longest) as u64 {
            return Err(CoreError::PairBudgetTooSmall { budget, longest: longest as u64 });
        }
        let least = u64::try_from(min_shared)
            .map_err(|_| CoreError::NegativeSetting { name: "min_shared", value: min_shared })?
            .max(1);
        members.chunks_exact_mut(width).for_each(|unit| unit.sort_by(Member::order));
        let mut units: Vec<&[Member<'_>]> = members.chunks_exact(width).collect();
        units.sort_by(|a, b| b.iter().map(|member| member.ids).cmp(a.iter().map(|member| member.ids)));
        let mut plan = TreePlan { order: Vec::new(), shared: Vec::new(), bounds: vec![0], tokens: Vec::new() };
        let mut line = Line { members: Vec::new(), tokens: 0, least };
        for unit in units {
            if !line.take(unit, budget.min(i32::MAX as u64)) {
                line.write(&mut plan);
                line = Line { members: unit.iter().collect(), tokens: line.count_added(unit, &[]), least };
            }
        }
        line.write(&mut plan);
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

/// A sample in a plan.
struct Member<'t> {
    index: i64,
    place: usize,
    ids: &'t [i32],
}

impl Member<'_> {
    /// From the largest tokens down; equal samples by their place.
    fn order(&self, other: &Self) -> Ordering {
        other.ids.cmp(self.ids).then(self.place.cmp(&other.place))
    }
}

/// The samples of one line, in their order.
struct Line<'m> {
    members: Vec<&'m Member<'m>>,
    tokens: u64,
    least: u64,
}

impl<'m> Line<'m> {
    /// Takes `unit` if it shares a prefix with the line and fits. The first is always taken.
    fn take(&mut self, unit: &'m [Member<'m>], budget: u64) -> bool {
        let common: Vec<u64> = unit.iter().map(|member| self.find_common(member)).collect();
        let tokens = self.tokens + self.count_added(unit, &common);
        if !self.members.is_empty() && (tokens > budget || common.iter().all(|&common| common == 0)) {
            return false;
        }
        for member in unit {
            self.members.insert(self.find_place(member), member);
        }
        self.tokens = tokens;
        true
    }

    /// The tokens that `unit` adds to samples with which its members share `common`; none if that
    /// is empty.
    fn count_added(&self, unit: &[Member<'_>], common: &[u64]) -> u64 {
        let added = unit.iter().enumerate().map(|(at, member)| {
            let within = unit[..at].iter().map(|before| self.count_shared(before, member)).max();
            member.ids.len() as u64 - within.max(common.get(at).copied()).unwrap_or(0)
        });
        added.sum()
    }

    /// The longest prefix that `member` shares with the line: with one of its neighbours there.
    fn find_common(&self, member: &Member<'_>) -> u64 {
        let place = self.find_place(member);
        let neighbours = &self.members[place.saturating_sub(1)..(place + 1).min(self.members.len())];
        neighbours.iter().map(|neighbour| self.count_shared(neighbour, member)).max().unwrap_or(0)
    }

    fn find_place(&self, member: &Member<'_>) -> usize {
        match self.members.last() {
            Some(last) if last.order(member).is_gt() => {
                self.members.partition_point(|other| other.order(member).is_lt())
            }
            _ => self.members.len(),
        }
    }

    /// How many tokens two neighbours share.
    fn count_shared(&self, a: &Member<'_>, b: &Member<'_>) -> u64 {
        let common = count_common(a.ids, b.ids) as u64;
        if common < self.least { 0 } else { common }
    }

    /// Adds the line to `plan`.
    fn write(&self, plan: &mut TreePlan) {
        for (at, member) in self.members.iter().enumerate() {
            plan.order.push(member.index);
            plan.shared.push(if at == 0 { 0 } else { self.count_shared(self.members[at - 1], member) as i32 });
        }
        if !self.members.is_empty() {
            plan.bounds.push(plan.order.len() as i64);
            plan.tokens.push(self.tokens as i32);
        }
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
        // Where the tokens of the sample at hand are; the next one's replace its end.
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
