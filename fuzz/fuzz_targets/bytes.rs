//! Arbitrary bytes, and damaged bytes of tables: they are refused with a message, or are a table
//! that is written as the same bytes again and whose layouts hold its samples.
//!
//! `cargo +nightly fuzz run bytes -- -max_total_time=600`
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use ludic_core::{ColumnInput, Floats, Ints, SampleTable};

#[derive(Debug, Arbitrary)]
enum Input {
    Any(Vec<u8>),
    /// A table as bytes, with some bytes replaced. The positions count from the front if positive.
    Damaged {
        lengths: Vec<u8>,
        logps: bool,
        limit: u8,
        changes: Vec<(i16, u8)>,
    },
    /// A table without a header, with this one.
    Header {
        header: String,
        data: Vec<u8>,
    },
}

fn bytes_of(input: Input) -> Option<Vec<u8>> {
    match input {
        Input::Any(bytes) => Some(bytes),
        Input::Header { header, data } => {
            Some([&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat())
        }
        Input::Damaged { lengths, logps, limit, changes } => {
            let offsets: Vec<i64> = std::iter::once(0)
                .chain(lengths.iter().scan(0, |end, &length| {
                    *end += i64::from(length) + 1;
                    Some(*end)
                }))
                .collect();
            let tokens = *offsets.last()? as usize;
            let (ids, actions, values) = (vec![5; tokens], vec![0; tokens], vec![-0.5; tokens]);
            let column = ColumnInput {
                input_ids: Ints::I32(&ids),
                action_mask: Ints::U8(&actions),
                attention_mask: None,
                actor_logps: logps.then_some(Floats::F32(&values)),
                weights: None,
                offsets: Ints::I64(&offsets),
            };
            let table = SampleTable::from_columns(&column).expect("the columns are valid");
            let view = table.chained().truncate(i64::from(limit) + 1).expect("the limit is positive");
            let mut bytes = view.to_bytes().expect("there is enough memory");
            for (at, byte) in changes {
                let at = at as isize;
                let at = if at < 0 { bytes.len().wrapping_add_signed(at) } else { at as usize };
                if let Some(slot) = bytes.get_mut(at) {
                    *slot = byte;
                }
            }
            Some(bytes)
        }
    }
}

fuzz_target!(|input: Input| {
    let Some(bytes) = bytes_of(input) else { return };
    match SampleTable::from_bytes(&bytes) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(table) => {
            let again = table.to_bytes().expect("there is enough memory");
            let same = SampleTable::from_bytes(&again).expect("a written table is valid");
            assert_eq!(same.to_bytes().as_ref(), Ok(&again));
            assert_eq!((same.lengths(), same.chains()), (table.lengths(), table.chains()));
            if !table.is_empty() {
                let batch = table.batch(&(0..table.len() as i64).collect::<Vec<_>>()).expect("the indices are valid");
                assert!(batch.num_tokens() <= table.num_tokens());
            }
        }
    }
});
