//! Laws of tables as bytes: reading returns what was written, bytes that are no table are
//! refused with a message, and accepted bytes are a valid table.

mod samples;

use ludic_core::bytes::TableBytesError;
use ludic_core::collate::{LogpsOut, PaddedOut};
use ludic_core::{ColumnInput, CoreError, Floats, Ints, SampleTable};
use proptest::prelude::*;
use proptest::sample::Index;
use samples::{Owned, table};

/// A view of a table: what `truncate`, `select` and `chained` can do to it.
#[derive(Debug, Clone)]
enum Change {
    Truncate(i64),
    Select(Vec<Index>),
    Chain,
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let change = prop_oneof![
        1 => (1i64..160).prop_map(Change::Truncate),
        1 => prop::collection::vec(any::<Index>(), 0..10).prop_map(Change::Select),
        2 => Just(Change::Chain),
    ];
    prop::collection::vec(change, 0..5)
}

fn apply(table: &SampleTable, change: &Change) -> SampleTable {
    match change {
        Change::Truncate(limit) => table.truncate(*limit).unwrap(),
        Change::Select(_) if table.is_empty() => table.clone(),
        Change::Select(which) => {
            let indices: Vec<i64> = which.iter().map(|index| index.index(table.len()) as i64).collect();
            table.select(&indices).unwrap()
        }
        Change::Chain => table.chained(),
    }
}

/// Tables and views as training makes them: of dialogues, of samples with holes, of either with or
/// without log-probabilities.
fn tables() -> impl Strategy<Value = SampleTable> {
    let samples = prop_oneof![samples::samples(), samples::any_samples()];
    (samples, changes())
        .prop_map(|(samples, changes)| changes.iter().fold(table(&samples).unwrap(), |table, one| apply(&table, one)))
}

/// The padded layout of the samples: ids, attention, action mask, log-probabilities and their sums,
/// weights (floats as bits), turns.
type Layout = (Vec<i64>, Vec<i64>, [Vec<u32>; 4], Option<Vec<[i64; 3]>>);

fn collate(table: &SampleTable, indices: &[i64]) -> Layout {
    let batch = table.batch(indices).unwrap();
    let (size, samples) = (batch.padded_size().unwrap(), batch.num_samples());
    let (mut ids, mut attention) = (vec![-7i64; size], vec![-7i64; size]);
    let [mut action, mut logps] = [(); 2].map(|()| vec![-7.0f32; size]);
    let [mut weight, mut sums] = [(); 2].map(|()| vec![-7.0f32; samples]);
    let logps_out = LogpsOut { actor_logps: &mut logps[..], old_logp_action: &mut sums[..] };
    let out = PaddedOut {
        input_ids: &mut ids[..],
        attention_mask: &mut attention[..],
        action_mask: &mut action[..],
        weight: &mut weight[..],
        logps: table.has_actor_logps().then_some(logps_out),
    };
    batch.collate_padded(0, out).unwrap();
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    (ids, attention, [action, logps, sums, weight].map(bits), batch.turns())
}

/// Everything that can be seen of a table, with the layouts of these batches and of all samples.
fn contents(table: &SampleTable, batches: &[Vec<Index>]) -> (Vec<Vec<i32>>, Vec<u32>, bool, Vec<Layout>) {
    let pick = |batch: &Vec<Index>| batch.iter().map(|index| index.index(table.len()) as i64).collect();
    let all: Vec<i64> = (0..table.len() as i64).collect();
    let batches: Vec<Vec<i64>> =
        if table.is_empty() { vec![] } else { batches.iter().map(pick).chain([all]).collect() };
    (
        vec![table.lengths(), table.original_lengths(), table.action_counts(), table.target_counts(), table.chains()],
        table.weights().into_iter().map(f32::to_bits).collect(),
        table.has_actor_logps(),
        batches.iter().map(|batch| collate(table, batch)).collect(),
    )
}

fn batches() -> impl Strategy<Value = Vec<Vec<Index>>> {
    prop::collection::vec(prop::collection::vec(any::<Index>(), 1..6), 0..3)
}

/// One damage to bytes.
#[derive(Debug, Clone)]
enum Damage {
    Set(Index, u8),
    /// A digit of the header.
    Digit(Index, u8),
    Cut(Index),
    Insert(Index, u8),
    /// Copies 8 bytes elsewhere.
    Copy(Index, Index),
}

fn damages() -> impl Strategy<Value = Vec<Damage>> {
    let at = any::<Index>;
    let damage = prop_oneof![
        (at(), any::<u8>()).prop_map(|(at, byte)| Damage::Set(at, byte)),
        (at(), b'0'..=b'9').prop_map(|(at, digit)| Damage::Digit(at, digit)),
        at().prop_map(Damage::Cut),
        (at(), any::<u8>()).prop_map(|(at, byte)| Damage::Insert(at, byte)),
        (at(), at()).prop_map(|(from, to)| Damage::Copy(from, to)),
    ];
    prop::collection::vec(damage, 1..4)
}

fn damage(bytes: &mut Vec<u8>, damage: &Damage) {
    if bytes.len() < 16 {
        return;
    }
    match damage {
        Damage::Set(at, byte) => *at.get_mut(bytes) = *byte,
        Damage::Digit(at, digit) => {
            let digits: Vec<usize> = (8..bytes.len()).filter(|&at| bytes[at].is_ascii_digit()).collect();
            if !digits.is_empty() {
                bytes[*at.get(&digits)] = *digit;
            }
        }
        Damage::Cut(at) => bytes.truncate(at.index(bytes.len())),
        Damage::Insert(at, byte) => bytes.insert(at.index(bytes.len()), *byte),
        Damage::Copy(from, to) => {
            let [from, to] = [from, to].map(|at| at.index(bytes.len() - 8));
            bytes.copy_within(from..from + 8, to);
        }
    }
}

proptest! {
    #[test]
    fn a_table_that_is_read_equals_the_one_that_was_written(table in tables(), later in changes(), batches in batches()) {
        let bytes = table.to_bytes().unwrap();
        let read = SampleTable::from_bytes(&bytes).unwrap();
        prop_assert_eq!(contents(&read, &batches), contents(&table, &batches));
        prop_assert_eq!(read.to_bytes().unwrap(), bytes);
        let [read, table] = [read, table].map(|table| later.iter().fold(table, |table, change| apply(&table, change)));
        prop_assert_eq!(contents(&read, &batches), contents(&table, &batches));
    }

    #[test]
    fn the_columns_begin_at_multiples_of_their_width(table in tables()) {
        let bytes = table.to_bytes().unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        prop_assert_eq!(header % 8, 0);
        let text: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
        for (name, column) in text.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__") {
            let width = match column["dtype"].as_str().unwrap() { "I64" => 8, "I32" | "F32" => 4, "U8" => 1, other => panic!("{other}") };
            prop_assert_eq!(column["data_offsets"][0].as_u64().unwrap() % width, 0, "{}", name);
        }
    }

    #[test]
    fn damaged_bytes_are_refused_or_are_another_table(table in tables(), damages in damages(), batches in batches()) {
        let mut bytes = table.to_bytes().unwrap();
        damages.iter().for_each(|one| damage(&mut bytes, one));
        match SampleTable::from_bytes(&bytes) {
            Err(error) => prop_assert!(!error.to_string().is_empty()),
            Ok(read) => {
                let again = SampleTable::from_bytes(&read.to_bytes().unwrap()).unwrap();
                prop_assert_eq!(contents(&again, &batches), contents(&read, &batches));
                prop_assert_eq!(read.num_tokens(), contents(&read, &[]).0[0].iter().map(|&length| length as usize).sum::<usize>());
            }
        }
    }

    #[test]
    fn any_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(SampleTable::from_bytes(&bytes).is_err());
    }

    #[test]
    fn no_part_of_a_table_is_a_table(table in tables(), cut in any::<Index>(), extra in prop::collection::vec(any::<u8>(), 1..20)) {
        let bytes = table.to_bytes().unwrap();
        prop_assert!(SampleTable::from_bytes(&bytes[..cut.index(bytes.len())]).is_err());
        prop_assert!(SampleTable::from_bytes(&[bytes, extra].concat()).is_err());
    }

    #[test]
    fn a_sample_is_only_accepted_in_a_chain_that_it_continues(samples in samples::dialogues(), chain in prop::collection::vec((0i32..3, 0i32..6), 20)) {
        let unchained = table(&samples).unwrap();
        let labels = &chain[..samples.len()];
        let bytes = with_chains(&unchained, labels);
        let follows = |earlier: &Owned, later: &Owned, same: bool| {
            later.ids.starts_with(&earlier.ids) && if same { earlier.ids == later.ids } else { !later.action[..earlier.ids.len()].contains(&1) }
        };
        let numbered = || labels.iter().zip(&samples);
        let valid = labels.iter().all(|(chain, link)| chain <= link) && numbered().all(|(&(chain, link), earlier)| {
            numbered().all(|(&(other, place), later)| chain != other || link > place || follows(earlier, later, link == place))
        });
        prop_assert_eq!(SampleTable::from_bytes(&bytes).is_ok(), valid);
    }
}

/// The bytes of a table without truncation, with these chains and links.
fn with_chains(table: &SampleTable, labels: &[(i32, i32)]) -> Vec<u8> {
    let bytes = table.to_bytes().unwrap();
    let (header, data) = parts(&bytes);
    let end = data.len();
    let added = format!(
        r#","chains":{{"dtype":"I32","shape":[{0}],"data_offsets":[{end},{1}]}},"links":{{"dtype":"I32","shape":[{0}],"data_offsets":[{1},{2}]}}}}"#,
        labels.len(),
        end + 4 * labels.len(),
        end + 8 * labels.len(),
    );
    let header = header.trim_end().strip_suffix('}').unwrap().to_owned() + &added;
    let chains = labels.iter().flat_map(|(chain, _)| chain.to_le_bytes());
    let links = labels.iter().flat_map(|(_, link)| link.to_le_bytes());
    join(&header, &data.iter().copied().chain(chains).chain(links).collect::<Vec<_>>())
}

fn parts(bytes: &[u8]) -> (&str, &[u8]) {
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (std::str::from_utf8(&bytes[8..8 + header]).unwrap(), &bytes[8 + header..])
}

fn join(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// The samples [5, 6, 7] and [8, 9].
fn example() -> SampleTable {
    SampleTable::from_columns(&ColumnInput {
        input_ids: Ints::I32(&[5, 6, 7, 8, 9]),
        action_mask: Ints::U8(&[0, 1, 1, 0, 1]),
        attention_mask: None,
        actor_logps: None,
        weights: Some(Floats::F32(&[0.5, -0.5])),
        offsets: Ints::I64(&[0, 3, 5]),
    })
    .unwrap()
}

const HEADER: &str = concat!(
    r#"{"__metadata__":{"format":"ludic.sample_table","version":"1"},"#,
    r#""offsets":{"dtype":"I64","shape":[3],"data_offsets":[0,24]},"#,
    r#""input_ids":{"dtype":"I32","shape":[5],"data_offsets":[24,44]},"#,
    r#""weights":{"dtype":"F32","shape":[2],"data_offsets":[44,52]},"#,
    r#""action_mask":{"dtype":"U8","shape":[5],"data_offsets":[52,57]}}"#,
);

/// Version 1, byte for byte: tables that were written once must stay readable.
#[test]
fn the_layout_is_the_documented_one() {
    let bytes = example().to_bytes().unwrap();
    let (header, data) = parts(&bytes);
    assert_eq!(header.trim_end(), HEADER);
    assert_eq!(header.len() % 8, 0);
    #[rustfmt::skip]
    let want = [
        0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, // offsets
        5, 0, 0, 0, 6, 0, 0, 0, 7, 0, 0, 0, 8, 0, 0, 0, 9, 0, 0, 0, // ids
        0, 0, 0, 63, 0, 0, 0, 191, // weights: 0.5 is 0x3f000000
        0, 1, 1, 0, 1, // action mask
    ];
    assert_eq!(data, want);
    assert_eq!(contents(&SampleTable::from_bytes(&join(HEADER, &want)).unwrap(), &[]), contents(&example(), &[]));
}

/// The message for the example's bytes with one piece of the header replaced.
fn refusal(from: &str, to: &str) -> TableBytesError {
    let bytes = example().to_bytes().unwrap();
    assert!(HEADER.contains(from), "{from}");
    SampleTable::from_bytes(&join(&HEADER.replace(from, to), parts(&bytes).1)).unwrap_err()
}

#[test]
fn a_header_that_lies_is_refused_by_name() {
    let cases = [
        (
            r#""version":"1""#,
            r#""version":"2""#,
            r#"a table of version "2" cannot be read, only version "1"; use the same version"#,
        ),
        ("ludic.sample_table", "pt", r#"bytes of the format "pt" are not a table"#),
        (r#","version":"1""#, "", "missing field `version`"),
        (r#""weights":"#, r#""credit":"#, "missing field `weights`"),
        (
            r#""version":"1"}"#,
            r#""version":"1"},"credit":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}"#,
            "unknown field `credit`",
        ),
        (r#""weights":"#, r#""offsets":"#, "duplicate field `offsets`"),
        (r#","action_mask":{"dtype":"U8","shape":[5],"data_offsets":[52,57]}"#, "", "missing field `action_mask`"),
        ("\"I64\"", "\"I32\"", "column offsets of a table is I32, but must be I64"),
        ("\"F32\"", "\"BF16\"", "unknown variant `BF16`"),
        ("[5],\"data_offsets\":[24", "[5,1],\"data_offsets\":[24", "expected `]`|trailing characters"),
        (
            "[24,44]",
            "[24,40]",
            "column input_ids of a table lies at 24..40, which is not the size of 5 values of 4 bytes",
        ),
        ("[24,44]", "[44,24]", "column input_ids of a table lies at 44..24"),
        ("[52,57]", "[51,56]", "column action_mask of a table begins at 51, but the column before it ends at 52"),
        ("[52,57]", "[60,65]", "column action_mask of a table begins at 60, but the column before it ends at 52"),
        ("[5],\"data_offsets\":[52,57]", "[6],\"data_offsets\":[52,58]", "need 58 bytes, but 57 follow its header"),
        (
            "[5],\"data_offsets\":[52,57]",
            "[4611686018427387904],\"data_offsets\":[52,57]",
            "4611686018427387904 values of 1 bytes",
        ),
        (
            "[5],\"data_offsets\":[24,44]",
            "[4611686018427387905],\"data_offsets\":[24,28]",
            "4611686018427387905 values of 4 bytes",
        ),
        ("[5],\"data_offsets\":[24,44]", "[-1],\"data_offsets\":[24,20]", "invalid value: integer `-1`"),
        ("{\"__", "[\"__", "cannot be read"),
    ];
    for (from, to, message) in cases {
        let error = refusal(from, to).to_string();
        assert!(message.split('|').any(|one| error.contains(one)), "{from} -> {to}: {error}");
    }
}

/// Each of these sums of sizes is 2**64 or more. Eight columns of 2**61 bytes overflow the offsets
/// of a reader that adds them unchecked.
#[test]
fn sizes_beyond_64_bits_are_refused() {
    let huge = 1u64 << 61;
    let names =
        ["offsets", "input_ids", "weights", "actor_logps", "original_lengths", "chains", "links", "action_mask"];
    let mut header = r#"{"__metadata__":{"format":"ludic.sample_table","version":"1"}"#.to_owned();
    for (at, name) in (0u64..).zip(names) {
        let (dtype, width) = match name {
            "offsets" => ("I64", 8),
            "action_mask" => ("U8", 1),
            "weights" | "actor_logps" => ("F32", 4),
            _ => ("I32", 4),
        };
        let (begin, end) = (huge.wrapping_mul(at), huge.wrapping_mul(at).wrapping_add(huge));
        header +=
            &format!(r#","{name}":{{"dtype":"{dtype}","shape":[{}],"data_offsets":[{begin},{end}]}}"#, huge / width);
    }
    assert!(SampleTable::from_bytes(&join(&(header + "}"), &[])).is_err());
}

#[test]
fn short_and_long_headers_are_refused() {
    let message = |bytes: &[u8]| SampleTable::from_bytes(bytes).unwrap_err().to_string();
    assert!(message(b"").contains("a table of 0 bytes ends before its header does (8 bytes)"));
    assert!(
        message(&[9, 0, 0, 0, 0, 0, 0, 0, b'{']).contains("a table of 9 bytes ends before its header does (17 bytes)")
    );
    assert!(message(&[255; 40]).contains("has 18446744073709551615 bytes, more than 4096"));
    assert!(message(&join(&"[".repeat(4096), &[])).contains("cannot be read"));
}

/// The refusal of the example's bytes with these bytes of the data changed.
fn refusal_of_data(at: usize, changed: &[u8]) -> TableBytesError {
    let mut bytes = example().to_bytes().unwrap();
    let begin = bytes.len() - 57 + at;
    bytes[begin..begin + changed.len()].copy_from_slice(changed);
    SampleTable::from_bytes(&bytes).unwrap_err()
}

#[test]
fn values_are_checked_as_those_of_columns() {
    assert_eq!(refusal_of_data(8, &[6]), CoreError::OffsetOrder { sample: 1, begin: 6, end: 5 }.into());
    assert_eq!(refusal_of_data(16, &[4]), CoreError::OffsetEnds { first: 0, last: 4, tokens: 5 }.into());
    let negative = CoreError::TokenId { sample: 0, position: 0, value: 5 - (1 << 31) };
    assert_eq!(refusal_of_data(24 + 3, &[128]), negative.into());
    let value = f64::INFINITY;
    assert_eq!(
        refusal_of_data(44, &f32::INFINITY.to_le_bytes()),
        CoreError::NonFiniteWeight { sample: 0, value }.into()
    );
    let two = CoreError::MaskValue { sample: 1, field: "action_mask", position: 1, value: 2 };
    assert_eq!(refusal_of_data(52 + 4, &[2]), two.into());
}

#[test]
fn a_sample_is_not_longer_than_it_was() {
    let bytes = example().truncate(2).unwrap().to_bytes().unwrap();
    let (header, data) = parts(&bytes);
    let mut data = data.to_vec();
    let at = data.len() - 4 - 8; // before the mask of 4 tokens: two lengths
    assert_eq!(data[at..at + 8], [3, 0, 0, 0, 2, 0, 0, 0]);
    data[at] = 1;
    let error = SampleTable::from_bytes(&join(header, &data)).unwrap_err();
    assert_eq!(error, TableBytesError::OriginalLength { sample: 0, original: 1, length: 2 });
    data[at..at + 4].copy_from_slice(&(-1i32).to_le_bytes());
    let error = SampleTable::from_bytes(&join(header, &data)).unwrap_err();
    assert_eq!(error, TableBytesError::OriginalLength { sample: 0, original: -1, length: 2 });
}

#[test]
fn chains_are_those_of_the_table() {
    let dialogue = |chains: &[(i32, i32)]| {
        let ids = [5, 5, 6, 8];
        let input = ColumnInput {
            input_ids: Ints::I32(&ids),
            action_mask: Ints::U8(&[1, 0, 1, 1]),
            attention_mask: None,
            actor_logps: None,
            weights: None,
            offsets: Ints::I64(&[0, 1, 3, 4]),
        };
        SampleTable::from_bytes(&with_chains(&SampleTable::from_columns(&input).unwrap(), chains))
    };
    assert_eq!(dialogue(&[(0, 0), (0, 1), (-1, -1)]).unwrap().chains(), [0, 0, -1]);
    assert_eq!(dialogue(&[(0, 0), (0, 1), (0, 2)]).unwrap_err(), TableBytesError::Chain { sample: 2, chain: 0 });
    assert_eq!(dialogue(&[(0, 1), (0, 0), (-1, -1)]).unwrap_err(), TableBytesError::Chain { sample: 0, chain: 0 });
    assert_eq!(dialogue(&[(0, 0), (0, -1), (-1, -1)]).unwrap_err(), TableBytesError::Chain { sample: 1, chain: 0 });
    assert_eq!(dialogue(&[(-1, 0), (-1, -1), (-1, -1)]).unwrap_err(), TableBytesError::Chain { sample: 0, chain: -1 });
    assert_eq!(dialogue(&[(3, 2), (-1, -1), (-1, -1)]).unwrap_err(), TableBytesError::Chain { sample: 0, chain: 3 });
    let short = dialogue(&[(0, 0), (0, 1)]).unwrap_err();
    assert_eq!(short, CoreError::ColumnLength { column: "chains", length: 2, expected: 3 }.into());
}

#[test]
fn the_output_must_have_the_size_of_the_table() {
    let table = example();
    let encoded = table.encode();
    let error = encoded.write(&mut vec![0; encoded.size() + 1]).unwrap_err();
    assert_eq!(error, CoreError::OutputLength { name: "bytes", length: encoded.size() + 1, expected: encoded.size() });
}
