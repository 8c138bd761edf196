//! Everything that can be wrong with the input, with the values that were wrong.

/// What the core refuses, naming the value, the rule and the remedy.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CoreError {
    /// A token budget that cannot hold one sequence of the longest allowed length.
    #[error("micro_token_budget ({budget}) must be >= the longest sequence ({longest}); raise the budget or lower max_seq_len")]
    BudgetTooSmall {
        /// The budget given, in tokens.
        budget: u64,
        /// The longest sequence, in tokens.
        longest: u64,
    },
}
