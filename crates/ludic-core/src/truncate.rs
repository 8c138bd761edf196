//! Truncation is a change of length: the tokens stay where they are.

use std::sync::Arc;

use crate::table::Row;
use crate::{CoreError, SampleTable};

impl SampleTable {
    /// The same samples cut on the right to at most `max_seq_len` tokens. No token is copied, and
    /// [`original_lengths`](Self::original_lengths) still says what was ingested.
    pub fn truncate(&self, max_seq_len: i64) -> Result<Self, CoreError> {
        if max_seq_len <= 0 {
            return Err(CoreError::NotPositive { name: "max_seq_len", value: max_seq_len });
        }
        let limit = u32::try_from(max_seq_len).unwrap_or(u32::MAX);
        let cut = |row: &Row| Row { len: row.len.min(limit), ..*row };
        Ok(Self { columns: Arc::clone(&self.columns), rows: self.rows.iter().map(cut).collect() })
    }
}
