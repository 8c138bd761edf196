//! Columns in, plans and buffers out: truncate, pack, collate and reduce macro-batches of token sequences.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod error;
pub mod plan;

pub use error::CoreError;
