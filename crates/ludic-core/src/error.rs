//! Everything that can be wrong with the input, with the values that were wrong.

/// What the core refuses, naming the value, the rule and the remedy.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CoreError {
    /// A token budget that cannot hold one sequence of the longest allowed length.
    #[error(
        "micro_token_budget ({budget}) must be >= the longest sequence ({longest}); raise the budget or lower max_seq_len"
    )]
    BudgetTooSmall {
        /// The budget given, in tokens.
        budget: u64,
        /// The longest sequence, in tokens.
        longest: u64,
    },

    /// A token budget of zero or less.
    #[error("micro_token_budget ({budget}) must be positive")]
    BudgetNotPositive {
        /// The budget given, in tokens.
        budget: i64,
    },

    /// A setting that counts something and is negative.
    #[error("{name} ({value}) must not be negative")]
    NegativeSetting {
        /// Which setting.
        name: &'static str,
        /// What it was set to.
        value: i64,
    },

    /// A length below zero.
    #[error("the length of sample {index} ({length}) must not be negative")]
    NegativeLength {
        /// The sample.
        index: u64,
        /// Its length, in tokens.
        length: i64,
    },

    /// More samples than an index of 32 bits can name.
    #[error("{count} samples are more than one macro-batch can hold (2**32 - 2); split them")]
    TooManySamples {
        /// How many there are.
        count: u64,
    },
}
