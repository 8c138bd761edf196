//! Everything that can be wrong with the input, with the values that were wrong.

/// Whose fault an error is, and so what a caller can do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// A token budget that cannot hold what must be packed into it.
    Budget,
    /// Another setting that breaks a rule.
    Setting,
    /// A sample, a column or an index that breaks a rule.
    Data,
    /// Memory that the machine does not have.
    Memory,
}

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

    /// A budget that cannot hold the two rows of the longest pair.
    #[error(
        "micro_token_budget ({budget}) must be >= 2 * the longest pair ({longest}): a pair is two rows; raise the budget or lower max_seq_len"
    )]
    PairBudgetTooSmall {
        /// The budget given, in tokens.
        budget: u64,
        /// The longer sample of the longest pair, in tokens.
        longest: u64,
    },

    /// A pair that names a sample that is not there.
    #[error("pair {pair} names sample {sample}, but there are {samples} samples")]
    PairIndex {
        /// The pair.
        pair: u64,
        /// What it names.
        sample: i64,
        /// How many samples there are.
        samples: u64,
    },

    /// A sample named twice.
    #[error("pair {pair} names sample {sample} again; a sample belongs to one pair and has one role in it")]
    PairRepeats {
        /// The pair that names it the second time.
        pair: u64,
        /// The sample.
        sample: u64,
    },

    /// A role that is neither of the two.
    #[error("the role of sample {index} ({role:?}) must be \"chosen\" or \"rejected\"")]
    UnknownRole {
        /// The sample.
        index: u64,
        /// Its role.
        role: String,
    },

    /// Two samples of one pair with the same role.
    #[error(
        "Preference pair {pair} has two {role} samples ({first} and {second}); it must have one chosen and one rejected"
    )]
    DuplicateRole {
        /// The pair's id.
        pair: String,
        /// The role that both have.
        role: &'static str,
        /// The first of the samples.
        first: u64,
        /// The second.
        second: u64,
    },

    /// A pair without its other half.
    #[error(
        "Incomplete preference pair {pair}: it has only its {has} sample ({count} incomplete in all); drop incomplete pairs or complete them"
    )]
    IncompletePair {
        /// The pair's id.
        pair: String,
        /// The role that is there.
        has: &'static str,
        /// How many pairs are incomplete.
        count: u64,
    },

    /// Columns that should be of one length.
    #[error("{first} ({first_len}) and {second} ({second_len}) must be equally long")]
    UnequalColumns {
        /// One column.
        first: &'static str,
        /// Its length.
        first_len: u64,
        /// The other.
        second: &'static str,
        /// Its length.
        second_len: u64,
    },

    /// A setting outside its range.
    #[error("{name} ({value}) must be from {least} to {most}")]
    OutOfRange {
        /// Which setting.
        name: &'static str,
        /// What it was set to.
        value: i64,
        /// The least it may be.
        least: i64,
        /// The most it may be.
        most: i64,
    },

    /// A packing by a name that there is not.
    #[error("packing ({name:?}) must be \"greedy\", \"optimal\" or \"padding_free\"")]
    UnknownPacking {
        /// The name given.
        name: String,
    },

    /// A setting that must be at least 1.
    #[error("{name} ({value}) must be positive")]
    NotPositive {
        /// Which setting.
        name: &'static str,
        /// What it was set to.
        value: i64,
    },

    /// A padding token that no vocabulary can hold.
    #[error("pad_token_id ({value}) must lie in 0..=2147483647; take the tokenizer's pad or eos token")]
    PadToken {
        /// The id given.
        value: i64,
    },

    /// A token id outside the range of 32-bit ids.
    #[error(
        "sample {sample}: input_ids[{position}] is {value}, but a token id must lie in 0..=2147483647; drop the sample or mend its tokens"
    )]
    TokenId {
        /// The sample.
        sample: usize,
        /// Where in the sample.
        position: usize,
        /// What stands there.
        value: i128,
    },

    /// A mask value that is neither 0 nor 1.
    #[error(
        "sample {sample}: {field}[{position}] is {value}, but a mask holds only 0 and 1; use weights for anything between"
    )]
    MaskValue {
        /// The sample.
        sample: usize,
        /// Which mask.
        field: &'static str,
        /// Where in the sample.
        position: usize,
        /// What stands there.
        value: i128,
    },

    /// A mask with more or fewer values than there are tokens.
    #[error(
        "sample {sample}: {field} has length {length} but input_ids has length {tokens}; give one value for each token"
    )]
    MaskLength {
        /// The sample.
        sample: usize,
        /// Which mask.
        field: &'static str,
        /// Values in the mask.
        length: usize,
        /// Tokens in the sample.
        tokens: usize,
    },

    /// Log-probabilities on some samples only.
    #[error("Mixed presence of actor log-probs: sample {sample} has {}, those before it have {}; give them for all samples or for none", some_or_none(*.present), some_or_none(!*.present))]
    MixedLogps {
        /// The first sample that differs from those before it.
        sample: usize,
        /// Whether that sample has log-probabilities.
        present: bool,
    },

    /// More or fewer log-probabilities than action tokens.
    #[error(
        "Length mismatch: sample {sample} has {logps} actor log-probs for {actions} action tokens; give one for each 1 in action_mask"
    )]
    LogpCount {
        /// The sample.
        sample: usize,
        /// Log-probabilities given.
        logps: usize,
        /// Ones in its action mask.
        actions: usize,
    },

    /// A log-probability that is NaN or infinite.
    #[error(
        "sample {sample}: actor log-prob {position} is {value:?}, but it must be finite in float32; drop the sample or ask the server for log-probs again"
    )]
    NonFiniteLogp {
        /// The sample.
        sample: usize,
        /// Which of its log-probabilities; in columns, which of its tokens.
        position: usize,
        /// What stands there.
        value: f64,
    },

    /// A weight that is NaN or infinite.
    #[error(
        "sample {sample}: weight is {value:?}, but it must be finite in float32; check the rewards and the credit assigner"
    )]
    NonFiniteWeight {
        /// The sample.
        sample: usize,
        /// Its weight.
        value: f64,
    },

    /// A sample without a token.
    #[error("sample {sample} has no tokens, so that a model computes nothing for it; drop it")]
    NoTokens {
        /// The sample.
        sample: usize,
    },

    /// A sample whose length does not fit in 32 bits.
    #[error("sample {sample} has {length} tokens, more than 2147483647; split it")]
    SampleTooLong {
        /// The sample.
        sample: usize,
        /// Its tokens.
        length: usize,
    },

    /// Offsets without a single value.
    #[error("offsets is empty; give [0] for no samples, else the beginning of each sample and the end of the last")]
    NoOffsets,

    /// Offsets that do not span the columns.
    #[error(
        "offsets begin at {first} and end at {last}, but must begin at 0 and end at the number of tokens ({tokens})"
    )]
    OffsetEnds {
        /// The first offset.
        first: i128,
        /// The last offset.
        last: i128,
        /// Tokens in the columns.
        tokens: usize,
    },

    /// Offsets that go back.
    #[error("sample {sample}: offsets fall from {begin} to {end}, but must not decrease")]
    OffsetOrder {
        /// The sample.
        sample: usize,
        /// Where it begins.
        begin: i128,
        /// Where it ends.
        end: i128,
    },

    /// A column that does not fit the others.
    #[error("{column} has length {length}, but must have length {expected} like the columns beside it")]
    ColumnLength {
        /// Which column.
        column: &'static str,
        /// Its length.
        length: usize,
        /// The length it must have.
        expected: usize,
    },

    /// An index that names no sample.
    #[error("index {index} names no sample of a table of {samples}; indices count from 0 and are never negative")]
    IndexOutOfRange {
        /// The index given.
        index: i64,
        /// Samples in the table.
        samples: usize,
    },

    /// An index beyond what any table can hold.
    #[error("index {index} names no sample: no table has as many")]
    IndexTooLarge {
        /// The index given.
        index: i128,
    },

    /// A collation of nothing.
    #[error("cannot collate an empty list of samples; skip micro-batches without samples")]
    EmptyBatch,

    /// A padded batch that 32-bit offsets cannot address.
    #[error("a batch of {rows} rows by {columns} tokens is more than 2147483647 tokens; split it by a token budget")]
    BatchTooLarge {
        /// Its rows.
        rows: usize,
        /// Its columns: the tokens of its longest row.
        columns: usize,
    },

    /// A padding-free batch that 32-bit offsets cannot address.
    #[error(
        "a padding-free batch of {rows} rows has {tokens} tokens, more than 2147483647; split it by a token budget"
    )]
    PackedTooLarge {
        /// Its rows.
        rows: usize,
        /// The tokens of all its rows.
        tokens: usize,
    },

    /// A column that the machine has no memory for.
    #[error("no memory for {values} more values of {column}; ingest fewer samples at once")]
    OutOfMemory {
        /// Which column.
        column: &'static str,
        /// What was to be added to it.
        values: usize,
    },

    /// An attention mask that a layout without one cannot say.
    #[error(
        "index {index}: attention_mask is 0 within the sample, which only the padded layout can say; use padded packing or remove those tokens"
    )]
    PartialAttention {
        /// The index of the sample in the table.
        index: i64,
    },

    /// An output buffer of the wrong size.
    #[error("output {name} has room for {length} values, but needs exactly {expected}")]
    OutputLength {
        /// Which output.
        name: &'static str,
        /// Its length.
        length: usize,
        /// The length it must have.
        expected: usize,
    },

    /// A kind of reducer that does not exist.
    #[error("unknown reducer kind {kind:?}; use mean, sum or count_true")]
    UnknownReduction {
        /// The name given.
        kind: String,
    },

    /// A denominator that does not exist.
    #[error("unknown normalize_by {name:?}; use None, samples or rollouts")]
    UnknownDenominator {
        /// The name given.
        name: String,
    },
}

impl CoreError {
    /// Whose fault it is. Every variant is named, so that a new one must say it.
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

fn some_or_none(present: bool) -> &'static str {
    if present { "some" } else { "none" }
}
