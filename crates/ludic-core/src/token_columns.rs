//! Columns with one float for each action token, by name: the credit of each token, what a token
//! counts for, or what a loss of the caller reads. Views share them, every layout has them, and they
//! are part of a table's bytes.

use std::iter;
use std::sync::Arc;

use crate::ingest::{append_at_actions, check_column, reserve};
use crate::numbers::{Float, Floats, each_float, find_non_finite};
use crate::table::{Row, count_ones};
use crate::{CoreError, SampleTable};

/// The largest number of columns, and the longest name in bytes: the header of a table stays short.
const MAX_COLUMNS: usize = 16;
const MAX_NAME: usize = 64;
/// The arrays of the layouts.
const LAYOUT_NAMES: [&str; 11] = [
    "input_ids",
    "attention_mask",
    "action_mask",
    "weight",
    "actor_logps",
    "old_logp_action",
    "position_ids",
    "cu_seqlens",
    "max_seqlen",
    "lengths",
    "turns",
];

/// One column.
#[derive(Debug)]
pub(crate) struct TokenColumn {
    pub(crate) name: String,
    /// One for each token of the table's columns; 0 where the token is not an action.
    pub(crate) values: Vec<f32>,
}

impl SampleTable {
    /// The names of the token columns, in alphabetical order.
    pub fn token_column_names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.token_columns.iter().map(|column| column.name.as_str())
    }

    /// Returns the same samples with one more token column. `values` has one number for each action
    /// token of each sample, in order. Copies no other column.
    ///
    /// ```
    /// use ludic_core::{ColumnInput, Floats, Ints, SampleTable};
    ///
    /// // Two samples: the ids [5, 6, 7] and [8, 9].
    /// let table = SampleTable::from_columns(&ColumnInput {
    ///     input_ids: Ints::I32(&[5, 6, 7, 8, 9]),
    ///     action_mask: Ints::U8(&[0, 1, 1, 0, 1]),
    ///     attention_mask: None,
    ///     actor_logps: None,
    ///     weights: None,
    ///     offsets: Ints::I64(&[0, 3, 5]),
    /// })?;
    /// let table = table.with_token_column("credit", Floats::F64(&[0.5, 1.0, -1.0]))?;
    /// assert_eq!(table.token_column("credit"), Some(vec![0.0, 0.5, 1.0, 0.0, -1.0]));
    /// assert_eq!(table.truncate(2)?.token_column("credit"), Some(vec![0.0, 0.5, 0.0, -1.0]));
    /// # Ok::<(), ludic_core::CoreError>(())
    /// ```
    ///
    /// # Errors
    /// The name is empty, too long, or in use; there are too many columns; there is another number
    /// of values than of action tokens; a value is not finite in float32; the table has a sample
    /// twice or in another order than it was built, as after [`select`](Self::select).
    pub fn with_token_column(&self, name: &str, values: Floats<'_>) -> Result<Self, CoreError> {
        let mut column = self.begin_token_column(name)?;
        let actions = self.action_counts().iter().map(|&count| count as usize).sum();
        if values.len() != actions {
            return Err(CoreError::TokenColumnLength { name: name.to_owned(), length: values.len(), actions });
        }
        each_float!(values, numbers => {
            let mut rest = numbers;
            for (sample, row) in self.rows.iter().enumerate() {
                let (_, stored) = row.stored(0);
                if stored.is_empty() {
                    continue; // truncation left shared tokens alone, none of which is an action
                }
                let mask = &self.columns.action[stored.clone()];
                let (own, after) = rest.split_at(count_ones(mask));
                if let Some(position) = find_non_finite(own) {
                    let value = Float::to_f64(own[position]);
                    return Err(CoreError::NonFiniteToken { name: name.to_owned(), sample, position, value });
                }
                if stored.start < column.len() {
                    let rule = "its samples must be in the order of the table, each once; add it before select";
                    return Err(CoreError::TokenColumn { name: name.to_owned(), rule });
                }
                column.resize(stored.start, 0.0);
                append_at_actions(own, mask, &mut column);
                rest = after;
            }
        });
        column.resize(self.columns.ids.len(), 0.0);
        Ok(self.push_token_column(name, column))
    }

    /// Returns the values of a column, one for each token of each sample; 0 where the token is not
    /// an action. `None` if there is no column of this name.
    pub fn token_column(&self, name: &str) -> Option<Vec<f32>> {
        let column = self.token_columns.iter().find(|column| column.name == name)?;
        let read = |row: &Row| {
            let (before, stored) = row.stored(0);
            iter::repeat_n(0.0, before).chain(column.values[stored].iter().copied())
        };
        Some(self.rows.iter().flat_map(read).collect())
    }

    /// The same table with a column of one value per token, as its bytes have it: of a table whose
    /// rows are its columns.
    pub(crate) fn with_aligned_column(&self, name: &str, mut values: Vec<f32>) -> Result<Self, CoreError> {
        self.begin_token_column(name)?;
        check_column("a token column", values.len(), self.columns.ids.len())?;
        if let Some(token) = find_non_finite(&values) {
            let sample = self.rows.partition_point(|row| row.start <= token).saturating_sub(1);
            let (position, value) = (token - self.rows[sample].start, f64::from(values[token]));
            return Err(CoreError::NonFiniteToken { name: name.to_owned(), sample, position, value });
        }
        values.iter_mut().zip(&self.columns.action).filter(|(_, bit)| **bit == 0).for_each(|(value, _)| *value = 0.0);
        Ok(self.push_token_column(name, values))
    }

    /// An empty column with memory for all tokens, if the table may have one of this name.
    fn begin_token_column(&self, name: &str) -> Result<Vec<f32>, CoreError> {
        let is_plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        let rule = if !(1..=MAX_NAME).contains(&name.len()) || !is_plain {
            "its name must have 1 to 64 letters, digits or _"
        } else if LAYOUT_NAMES.contains(&name) {
            "a micro-batch has another array of this name; choose another"
        } else if self.token_column_names().any(|other| other == name) {
            "the table has one of this name; choose another"
        } else if self.token_columns.len() == MAX_COLUMNS {
            "a table has at most 16; leave one out"
        } else {
            let mut column = Vec::new();
            reserve("a token column", &mut column, self.columns.ids.len())?;
            return Ok(column);
        };
        Err(CoreError::TokenColumn { name: name.to_owned(), rule })
    }

    fn push_token_column(&self, name: &str, values: Vec<f32>) -> Self {
        let mut table = self.clone();
        let place = self.token_columns.partition_point(|other| other.name.as_str() < name);
        table.token_columns.insert(place, Arc::new(TokenColumn { name: name.to_owned(), values }));
        table
    }
}
