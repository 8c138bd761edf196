//! The kind of each error. The binding maps it to an exception class.

use super::CoreError;

/// The cause of an error, which says what a caller can do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// A token budget too small for what must be packed.
    Budget,
    /// Another setting that breaks a rule.
    Setting,
    /// A sample, a column or an index that breaks a rule.
    Data,
    /// Not enough memory.
    Memory,
}

impl CoreError {
    /// The kind of the error. Every variant is listed, so that a new one must choose its kind.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::BudgetTooSmall { .. } | Self::BudgetNotPositive { .. } | Self::PairBudgetTooSmall { .. } => {
                ErrorKind::Budget
            }
            Self::NegativeSetting { .. }
            | Self::NotPositive { .. }
            | Self::OutOfRange { .. }
            | Self::PadToken { .. }
            | Self::UnknownDenominator { .. }
            | Self::UnknownPacking { .. }
            | Self::UnknownReduction { .. } => ErrorKind::Setting,
            Self::OutOfMemory { .. } => ErrorKind::Memory,
            Self::NegativeLength { .. }
            | Self::TooManySamples { .. }
            | Self::PairIndex { .. }
            | Self::PairRepeats { .. }
            | Self::UnknownRole { .. }
            | Self::DuplicateRole { .. }
            | Self::IncompletePair { .. }
            | Self::UnequalColumns { .. }
            | Self::TokenId { .. }
            | Self::MaskValue { .. }
            | Self::MaskLength { .. }
            | Self::MixedLogps { .. }
            | Self::LogpCount { .. }
            | Self::NonFiniteLogp { .. }
            | Self::NonFiniteWeight { .. }
            | Self::TokenColumn { .. }
            | Self::TokenColumnLength { .. }
            | Self::NonFiniteToken { .. }
            | Self::NoTokens { .. }
            | Self::SampleTooLong { .. }
            | Self::NoOffsets
            | Self::OffsetEnds { .. }
            | Self::OffsetOrder { .. }
            | Self::ColumnLength { .. }
            | Self::IndexOutOfRange { .. }
            | Self::IndexTooLarge { .. }
            | Self::EmptyBatch
            | Self::BatchTooLarge { .. }
            | Self::PackedTooLarge { .. }
            | Self::PartialAttention { .. }
            | Self::OutputLength { .. } => ErrorKind::Data,
        }
    }
}
