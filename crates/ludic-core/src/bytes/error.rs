//! Errors in the bytes of a table.

use crate::{CoreError, ErrorKind};

/// Bytes that are not a table. The message names the value, the rule and the remedy.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TableBytesError {
    /// Fewer bytes than the header says, or than its length takes.
    #[error(
        "a table of {length} bytes ends before its header does ({needed} bytes); pass all bytes that to_bytes returned"
    )]
    TooShort {
        /// The number of bytes.
        length: usize,
        /// Where the header ends.
        needed: u64,
    },

    /// A header longer than any that is written.
    #[error("the header of a table has {length} bytes, more than {most}; these are not bytes from to_bytes")]
    HeaderTooLong {
        /// The length that the first 8 bytes give.
        length: u64,
        /// The longest that is read.
        most: usize,
    },

    /// A header that is not JSON, or lacks columns, or has other ones.
    #[error("the header of a table cannot be read: {reason}; these are not bytes from to_bytes, or they are damaged")]
    Header {
        /// The message of the JSON reader.
        reason: String,
    },

    /// Another file in the layout of safetensors.
    #[error("bytes of the format {found:?} are not a table, whose format is {expected:?}; pass bytes from to_bytes")]
    Format {
        /// The format in the header.
        found: String,
        /// The format of tables.
        expected: &'static str,
    },

    /// A table of another version of the layout.
    #[error(
        "a table of version {found:?} cannot be read, only version {expected:?}; use the same version of ludic to write and to read"
    )]
    Version {
        /// The version in the header.
        found: String,
        /// The version that is read.
        expected: &'static str,
    },

    /// A column of another type.
    #[error("column {column} of a table is {found}, but must be {expected}; write it with to_bytes")]
    Dtype {
        /// The column.
        column: String,
        /// Its type in the header.
        found: String,
        /// The type it must have.
        expected: String,
    },

    /// A column whose place has another size than its values.
    #[error(
        "column {column} of a table lies at {begin}..{end}, which is not the size of {values} values of {width} bytes"
    )]
    ColumnSize {
        /// The column.
        column: String,
        /// Where it begins.
        begin: usize,
        /// Where it ends.
        end: usize,
        /// Its number of values.
        values: usize,
        /// The size of a value.
        width: usize,
    },

    /// Columns that overlap or leave a gap.
    #[error("column {column} of a table begins at {begin}, but the column before it ends at {end}; columns must touch")]
    ColumnPlace {
        /// The column.
        column: String,
        /// Where it begins.
        begin: usize,
        /// Where the column before it ends.
        end: usize,
    },

    /// More or fewer bytes than the columns need.
    #[error(
        "the columns of a table need {needed} bytes, but {length} follow its header; pass all of them, and no more"
    )]
    DataLength {
        /// The bytes that the columns need.
        needed: usize,
        /// The bytes after the header.
        length: usize,
    },

    /// A sample that is longer than it was before truncation.
    #[error("sample {sample}: its original length ({original}) must be >= its length ({length})")]
    OriginalLength {
        /// The sample.
        sample: usize,
        /// Its length before truncation.
        original: i32,
        /// Its length.
        length: u32,
    },

    /// One of the two columns of chains without the other.
    #[error("a table has only one of the columns chains and links; write it with to_bytes")]
    HalfOfChains,

    /// A sample that does not continue the samples of its chain.
    #[error(
        "sample {sample}: its place in chain {chain} is wrong: the ids of a sample must begin with those of the sample before it in its chain, without an action or a hole among them"
    )]
    Chain {
        /// The sample.
        sample: usize,
        /// Its chain.
        chain: i32,
    },

    /// Columns that do not belong to a table.
    #[error(transparent)]
    Column(#[from] CoreError),
}

impl TableBytesError {
    /// The kind of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Column(error) => error.kind(),
            _ => ErrorKind::Data,
        }
    }
}
