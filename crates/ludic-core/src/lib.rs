//! Truncates, packs, collates and reduces macro-batches of token sequences. Takes columns; returns
//! plans and writes into the caller's buffers.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod balance;
pub mod bytes;
pub mod collate;
pub mod delta;
mod error;
pub mod gae;
mod ingest;
mod numbers;
pub mod pairs;
pub mod plan;
pub mod reduce;
mod table;
mod token_columns;
pub mod trees;
mod truncate;
mod vectors;

pub use error::{CoreError, ErrorKind};
pub use ingest::{ColumnInput, Sample, TableBuilder};
pub use numbers::{Floats, Ints};
pub use table::SampleTable;
