//! Truncation: a view with shorter rows over the same columns.

use crate::table::Row;
use crate::{CoreError, SampleTable};

impl SampleTable {
    /// Returns the same samples, cut on the right to at most `max_seq_len` tokens. Copies no
    /// token. [`original_lengths`](Self::original_lengths) still has the lengths before the cut:
    /// a sample of 3 tokens cut to 2 has length 2 and original length 3.
    pub fn truncate(&self, max_seq_len: i64) -> Result<Self, CoreError> {
        if max_seq_len <= 0 {
            return Err(CoreError::NotPositive { name: "max_seq_len", value: max_seq_len });
        }
        let limit = u32::try_from(max_seq_len).unwrap_or(u32::MAX);
        let cut = |row: &Row| Row { len: row.len.min(limit), ..*row };
        Ok(self.view(self.rows.iter().map(cut).collect()))
    }
}
