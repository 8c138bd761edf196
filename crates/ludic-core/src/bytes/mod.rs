//! Tables as bytes, for queues, files and other processes.
//!
//! The layout follows safetensors, so that its readers open it: the length of the header in 8
//! bytes (little-endian), the header in JSON, the columns one after the other. A table of the
//! samples [5, 6, 7] and [8, 9] has this header, without the line breaks:
//!
//! ```text
//! {"__metadata__":{"format":"ludic.sample_table","version":"1"},
//!  "offsets":{"dtype":"I64","shape":[3],"data_offsets":[0,24]},
//!  "input_ids":{"dtype":"I32","shape":[5],"data_offsets":[24,44]},
//!  "weights":{"dtype":"F32","shape":[2],"data_offsets":[44,52]},
//!  "action_mask":{"dtype":"U8","shape":[5],"data_offsets":[52,57]}}
//! ```
//!
//! A table with log-probabilities also has `actor_logps` (F32), one with a 0 in an attention mask
//! `attention_mask` (U8): these six are the columns of [`ColumnInput`](crate::ColumnInput). A
//! [token column](crate::SampleTable::with_token_column)
//! `credit` is `token.credit` (F32). A truncated view has `original_lengths` [N] (I32), a chained one `chains` and `links` [N] (I32, -1
//! for a sample in no chain). Spaces after the header align the columns to 8 bytes; wider numbers
//! come first, so that each column is aligned to its own.
//!
//! A table has exactly one such text. Reading accepts the columns in any order and checks all that
//! ingesting columns checks. What it allocates is bounded by the number of bytes given.

mod error;
mod read;
mod write;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use error::TableBytesError;
pub use write::TableBytes;

/// What `format` in the header must be.
const FORMAT: &str = "ludic.sample_table";
/// The version of the layout. A reader refuses any other.
const VERSION: &str = "1";
/// The size of the length of the header.
const PREFIX: usize = size_of::<u64>();
/// The longest header that is read. A written one has fewer than 1,000 bytes without token columns.
const MAX_HEADER: usize = 4096;

/// What the names of token columns begin with.
const TOKEN: &str = "token.";

/// The header. The fields are in the order of the columns.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    #[serde(rename = "__metadata__")]
    metadata: Metadata,
    offsets: Column,
    input_ids: Column,
    weights: Column,
    #[serde(skip_serializing_if = "Option::is_none")]
    actor_logps: Option<Column>,
    #[serde(skip_serializing_if = "Option::is_none")]
    original_lengths: Option<Column>,
    #[serde(skip_serializing_if = "Option::is_none")]
    chains: Option<Column>,
    #[serde(skip_serializing_if = "Option::is_none")]
    links: Option<Column>,
    action_mask: Column,
    #[serde(skip_serializing_if = "Option::is_none")]
    attention_mask: Option<Column>,
    /// All fields of other names: token columns, or an error.
    #[serde(flatten)]
    token_columns: BTreeMap<String, Column>,
}

/// Of another version, all that is known.
#[derive(Debug, Serialize, Deserialize)]
struct Metadata {
    format: String,
    version: String,
}

/// One column: its type, its number of values, and where it begins and ends after the header.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Column {
    dtype: Dtype,
    shape: [usize; 1],
    data_offsets: [usize; 2],
}

/// The types of columns, by their names in safetensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Dtype {
    I64,
    I32,
    F32,
    U8,
}

impl Dtype {
    /// The size of a value in bytes.
    fn width(self) -> usize {
        match self {
            Self::I64 => 8,
            Self::I32 | Self::F32 => 4,
            Self::U8 => 1,
        }
    }
}

impl Header {
    /// The name, the type and the place of each column that is present.
    fn columns(&self) -> impl Iterator<Item = (&str, Dtype, &Column)> {
        let columns = [
            ("offsets", Dtype::I64, Some(&self.offsets)),
            ("input_ids", Dtype::I32, Some(&self.input_ids)),
            ("weights", Dtype::F32, Some(&self.weights)),
            ("actor_logps", Dtype::F32, self.actor_logps.as_ref()),
            ("original_lengths", Dtype::I32, self.original_lengths.as_ref()),
            ("chains", Dtype::I32, self.chains.as_ref()),
            ("links", Dtype::I32, self.links.as_ref()),
            ("action_mask", Dtype::U8, Some(&self.action_mask)),
            ("attention_mask", Dtype::U8, self.attention_mask.as_ref()),
        ];
        let token_columns = self.token_columns.iter().map(|(name, column)| (name.as_str(), Dtype::F32, Some(column)));
        columns.into_iter().chain(token_columns).filter_map(|(name, dtype, column)| Some((name, dtype, column?)))
    }
}
