//! Errors in the input. Each names the values that are wrong.

mod kind;
pub use kind::ErrorKind;

/// An error in the input. The message names the value, the rule and the remedy.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CoreError {
    /// A token budget that cannot hold one sequence of the longest allowed length.
    #[error(
        "micro_token_budget ({budget}) must be >= the longest sequence ({longest}); raise the budget or lower max_seq_len"
    )]
    BudgetTooSmall {
        /// The budget, in tokens.
        budget: u64,
        /// The longest sequence, in tokens.
        longest: u64,
    },

    /// A token budget of zero or less.
    #[error("micro_token_budget ({budget}) must be positive")]
    BudgetNotPositive {
        /// The budget, in tokens.
        budget: i64,
    },

    /// A negative count.
    #[error("{name} ({value}) must not be negative")]
    NegativeSetting {
        /// The name of the setting.
        name: &'static str,
        /// Its value.
        value: i64,
    },

    /// A negative length.
    #[error("the length of sample {index} ({length}) must not be negative")]
    NegativeLength {
        /// The sample.
        index: u64,
        /// Its length, in tokens.
        length: i64,
    },

    /// More samples than 32-bit indices can number.
    #[error("{count} samples are more than one macro-batch can hold (2**32 - 2); split them")]
    TooManySamples {
        /// The number of samples.
        count: u64,
    },

    /// A budget that cannot hold the two rows of the longest pair.
    #[error(
        "micro_token_budget ({budget}) must be >= 2 * the longest pair ({longest}): a pair is two rows; raise the budget or lower max_seq_len"
    )]
    PairBudgetTooSmall {
        /// The budget, in tokens.
        budget: u64,
        /// The longer sample of the longest pair, in tokens.
        longest: u64,
    },

    /// A pair that names a sample that does not exist.
    #[error("pair {pair} names sample {sample}, but there are {samples} samples")]
    PairIndex {
        /// The pair.
        pair: u64,
        /// The index that it names.
        sample: i64,
        /// The number of samples.
        samples: u64,
    },

    /// A sample that is named twice.
    #[error("pair {pair} names sample {sample} again; a sample belongs to one pair and has one role in it")]
    PairRepeats {
        /// The pair that names it again.
        pair: u64,
        /// The sample.
        sample: u64,
    },

    /// A role other than "chosen" and "rejected".
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
        /// The role of both.
        role: &'static str,
        /// The first of the samples.
        first: u64,
        /// The second.
        second: u64,
    },

    /// A pair that lacks its chosen or its rejected sample.
    #[error(
        "Incomplete preference pair {pair}: it has only its {has} sample ({count} incomplete in all); drop incomplete pairs or complete them"
    )]
    IncompletePair {
        /// The pair's id.
        pair: String,
        /// The role that it has.
        has: &'static str,
        /// The number of incomplete pairs.
        count: u64,
    },

    /// Columns of different lengths.
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
        /// The name of the setting.
        name: &'static str,
        /// Its value.
        value: i64,
        /// The smallest allowed value.
        least: i64,
        /// The largest allowed value.
        most: i64,
    },

    /// An unknown packing.
    #[error("packing ({name:?}) must be \"greedy\", \"optimal\" or \"padding_free\"")]
    UnknownPacking {
        /// The name.
        name: String,
    },

    /// A setting that must be at least 1.
    #[error("{name} ({value}) must be positive")]
    NotPositive {
        /// The name of the setting.
        name: &'static str,
        /// Its value.
        value: i64,
    },

    /// A padding token outside the range of 32-bit ids.
    #[error("pad_token_id ({value}) must lie in 0..=2147483647; take the tokenizer's pad or eos token")]
    PadToken {
        /// The id.
        value: i64,
    },

    /// A token id outside the range of 32-bit ids.
    #[error(
        "sample {sample}: input_ids[{position}] is {value}, but a token id must lie in 0..=2147483647; drop the sample or correct its tokens"
    )]
    TokenId {
        /// The sample.
        sample: usize,
        /// The position in the sample.
        position: usize,
        /// The value at that position.
        value: i128,
    },

    /// A mask value that is neither 0 nor 1.
    #[error(
        "sample {sample}: {field}[{position}] is {value}, but a mask holds only 0 and 1; use weights for anything between"
    )]
    MaskValue {
        /// The sample.
        sample: usize,
        /// The name of the mask.
        field: &'static str,
        /// The position in the sample.
        position: usize,
        /// The value at that position.
        value: i128,
    },

    /// A mask whose length differs from the number of tokens.
    #[error(
        "sample {sample}: {field} has length {length} but input_ids has length {tokens}; give one value for each token"
    )]
    MaskLength {
        /// The sample.
        sample: usize,
        /// The name of the mask.
        field: &'static str,
        /// The number of values in the mask.
        length: usize,
        /// The number of tokens in the sample.
        tokens: usize,
    },

    /// Log-probabilities for some samples only.
    #[error(
        "Mixed presence of actor log-probs: sample {sample} has {}, those before it have {}; give them for all samples or for none",
        if *present { "some" } else { "none" },
        if *present { "none" } else { "some" }
    )]
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
        /// The number of log-probabilities.
        logps: usize,
        /// The number of ones in its action mask.
        actions: usize,
    },

    /// A log-probability that is NaN or infinite.
    #[error(
        "sample {sample}: actor log-prob {position} is {value:?}, but it must be finite in float32; drop the sample or ask the server for log-probs again"
    )]
    NonFiniteLogp {
        /// The sample.
        sample: usize,
        /// The index of the log-probability; in columns, of the token.
        position: usize,
        /// The value at that position.
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

    /// A token column that the table cannot have.
    #[error("token column {name:?} cannot be added: {rule}")]
    TokenColumn {
        /// Its name.
        name: String,
        /// What it must fulfil.
        rule: &'static str,
    },

    /// A token column with more or fewer values than action tokens.
    #[error(
        "token column {name:?} has {length} values for {actions} action tokens; give one for each 1 in the action masks"
    )]
    TokenColumnLength {
        /// Its name.
        name: String,
        /// Its number of values.
        length: usize,
        /// The number of action tokens of all samples.
        actions: usize,
    },

    /// A value of a token column that is NaN or infinite.
    #[error(
        "sample {sample}: {name}[{position}] is {value:?}, but it must be finite in float32; check what computed the column"
    )]
    NonFiniteToken {
        /// The name of the column.
        name: String,
        /// The sample.
        sample: usize,
        /// The index of the action token; in bytes, of the token.
        position: usize,
        /// The value.
        value: f64,
    },

    /// A sample without tokens.
    #[error("sample {sample} has no tokens, so a model computes nothing for it; drop it")]
    NoTokens {
        /// The sample.
        sample: usize,
    },

    /// A sample whose length does not fit in 32 bits.
    #[error("sample {sample} has {length} tokens, more than 2147483647; split it")]
    SampleTooLong {
        /// The sample.
        sample: usize,
        /// Its number of tokens.
        length: usize,
    },

    /// Empty offsets.
    #[error("offsets is empty; it must hold where each sample begins and where the last ends, or [0] for no samples")]
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
        /// The number of tokens in the columns.
        tokens: usize,
    },

    /// Offsets that decrease.
    #[error("sample {sample}: offsets fall from {begin} to {end}, but must not decrease")]
    OffsetOrder {
        /// The sample.
        sample: usize,
        /// Where it begins.
        begin: i128,
        /// Where it ends.
        end: i128,
    },

    /// A column whose length differs from the expected one.
    #[error("{column} has length {length}, but must have length {expected} to match the other columns")]
    ColumnLength {
        /// The name of the column.
        column: &'static str,
        /// Its length.
        length: usize,
        /// The length it must have.
        expected: usize,
    },

    /// An index outside the table.
    #[error("index {index} is outside a table of {samples} samples; indices count from 0 and are never negative")]
    IndexOutOfRange {
        /// The index.
        index: i64,
        /// The number of samples in the table.
        samples: usize,
    },

    /// An index that no table can hold.
    #[error("index {index} is outside any table; indices are below 2**63")]
    IndexTooLarge {
        /// The index.
        index: i128,
    },

    /// A batch without samples.
    #[error("cannot collate an empty list of samples; skip micro-batches without samples")]
    EmptyBatch,

    /// A padded batch that 32-bit offsets cannot address.
    #[error("a batch of {rows} rows by {columns} tokens is more than 2147483647 tokens; split it by a token budget")]
    BatchTooLarge {
        /// Its number of rows.
        rows: usize,
        /// Its number of columns: the tokens of its longest row.
        columns: usize,
    },

    /// A padding-free batch that 32-bit offsets cannot address.
    #[error(
        "a padding-free batch of {rows} rows has {tokens} tokens, more than 2147483647; split it by a token budget"
    )]
    PackedTooLarge {
        /// Its number of rows.
        rows: usize,
        /// The number of tokens of all rows.
        tokens: usize,
    },

    /// Not enough memory for a column.
    #[error("not enough memory for {values} more values of {column}; ingest fewer samples at once")]
    OutOfMemory {
        /// The name of the column.
        column: &'static str,
        /// The number of values to be added.
        values: usize,
    },

    /// An attention mask that a layout without one cannot represent.
    #[error(
        "index {index}: attention_mask is 0 within the sample, which only the padded layout can represent; use padded packing or remove those tokens"
    )]
    PartialAttention {
        /// The index of the sample in the table.
        index: i64,
    },

    /// An output buffer of the wrong size.
    #[error("output {name} has room for {length} values, but needs exactly {expected}")]
    OutputLength {
        /// The name of the output.
        name: &'static str,
        /// Its length.
        length: usize,
        /// The length it must have.
        expected: usize,
    },

    /// An unknown kind of reducer.
    #[error("unknown reducer kind {kind:?}; use mean, sum or count_true")]
    UnknownReduction {
        /// The name.
        kind: String,
    },

    /// An unknown denominator.
    #[error("unknown normalize_by {name:?}; use None, samples or rollouts")]
    UnknownDenominator {
        /// The name.
        name: String,
    },
}
