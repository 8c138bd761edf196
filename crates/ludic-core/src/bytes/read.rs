//! Reads a table from bytes that anybody may have written.

use serde::Deserialize;

use super::{Column, FORMAT, Header, MAX_HEADER, Metadata, PREFIX, TOKEN, TableBytesError, VERSION};
use crate::ingest::{check_column, reserve};
use crate::table::{Columns, Row};
use crate::{ColumnInput, CoreError, Floats, Ints, SampleTable};

impl SampleTable {
    /// Reads a table from the bytes that [`to_bytes`](Self::to_bytes) returned. The table equals
    /// the one that was written, and shares no memory with `bytes`.
    ///
    /// # Errors
    /// The bytes are not a table, are damaged, or are of another version; or there is not enough
    /// memory. Whatever the bytes, the memory needed is at most a small multiple of their number.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, TableBytesError> {
        let (header, data) = split_header(bytes)?;
        let header = Header::read(header)?;
        header.check_places(data.len())?;
        let slice = |column: &Column| &data[column.data_offsets[0]..column.data_offsets[1]];
        let ids = decode("input_ids", slice(&header.input_ids), i32::from_le_bytes)?;
        let offsets = decode("offsets", slice(&header.offsets), i64::from_le_bytes)?;
        let weights = decode("weights", slice(&header.weights), f32::from_le_bytes)?;
        let read_logps = |column| decode("actor_logps", slice(column), f32::from_le_bytes);
        let logps = header.actor_logps.as_ref().map(read_logps).transpose()?;
        let mut table = Self::from_columns(&ColumnInput {
            input_ids: Ints::I32(&ids),
            action_mask: Ints::U8(slice(&header.action_mask)),
            attention_mask: header.attention_mask.as_ref().map(|column| Ints::U8(slice(column))),
            actor_logps: logps.as_deref().map(Floats::F32),
            weights: Some(Floats::F32(&weights)),
            offsets: Ints::I64(&offsets),
        })?;
        for (name, column) in &header.token_columns {
            let values = decode("a token column", slice(column), f32::from_le_bytes)?;
            table = table.with_aligned_column(&name[TOKEN.len()..], values)?;
        }
        if let Some(column) = &header.original_lengths {
            table.set_original_lengths(&decode("original_lengths", slice(column), i32::from_le_bytes)?)?;
        }
        match (&header.chains, &header.links) {
            (None, None) => {}
            (Some(chains), Some(links)) => table.set_chains(
                &decode("chains", slice(chains), i32::from_le_bytes)?,
                &decode("links", slice(links), i32::from_le_bytes)?,
            )?,
            _ => return Err(TableBytesError::HalfOfChains),
        }
        Ok(table)
    }

    fn set_original_lengths(&mut self, lengths: &[i32]) -> Result<(), TableBytesError> {
        check_column("original_lengths", lengths.len(), self.len())?;
        for (sample, (row, &original)) in self.rows.iter_mut().zip(lengths).enumerate() {
            let whole = u32::try_from(original).ok().filter(|&whole| whole >= row.len);
            let error = TableBytesError::OriginalLength { sample, original, length: row.len };
            row.original_len = whole.ok_or(error)?;
        }
        Ok(())
    }

    /// Puts the samples into chains, each of which must be one that [`chained`](Self::chained),
    /// followed by `select` and `truncate`, could have made: a layout would otherwise mix the
    /// tokens of different samples.
    fn set_chains(&mut self, chains: &[i32], links: &[i32]) -> Result<(), TableBytesError> {
        check_column("chains", chains.len(), self.len())?;
        check_column("links", links.len(), self.len())?;
        for (row, (&chain, &link)) in self.rows.iter_mut().zip(chains.iter().zip(links)) {
            (row.chain, row.link) = (chain as u32, link as u32);
        }
        let wrong = |sample: usize| TableBytesError::Chain { sample, chain: chains[sample] };
        let mut chained = Vec::new();
        reserve("chains", &mut chained, self.len())?;
        for (sample, row) in self.rows.iter().enumerate() {
            // The label of a chain is the link of its first sample, so no link is less.
            if row.is_chained() != (row.link != Row::NO_CHAIN) || row.is_chained() && row.link < row.chain {
                return Err(wrong(sample));
            }
            if row.is_chained() {
                if self.columns.has_hole(row) {
                    return Err(wrong(sample));
                }
                chained.push(sample);
            }
        }
        // That a sample continues the one before it is transitive: neighbours are enough.
        chained.sort_unstable_by_key(|&sample| (self.rows[sample].chain, self.rows[sample].link));
        for pair in chained.windows(2) {
            let [previous, row] = [&self.rows[pair[0]], &self.rows[pair[1]]];
            if row.chain == previous.chain && !self.columns.may_follow(row, previous) {
                return Err(wrong(pair[1]));
            }
        }
        Ok(())
    }
}

impl Columns {
    /// Whether `row` may come after `previous` in one chain: it is the same sample, selected twice,
    /// or continues it. Truncation may have made the two equally long.
    fn may_follow(&self, row: &Row, previous: &Row) -> bool {
        if row.link == previous.link {
            return self.ids[row.span()] == self.ids[previous.span()];
        }
        previous.len <= row.len && self.begins_with(row, previous)
    }
}

/// The header and the data after it.
fn split_header(bytes: &[u8]) -> Result<(&[u8], &[u8]), TableBytesError> {
    let too_short = |needed| TableBytesError::TooShort { length: bytes.len(), needed };
    let (prefix, rest) = bytes.split_first_chunk::<PREFIX>().ok_or(too_short(PREFIX as u64))?;
    let length = u64::from_le_bytes(*prefix);
    if length > MAX_HEADER as u64 {
        return Err(TableBytesError::HeaderTooLong { length, most: MAX_HEADER });
    }
    rest.split_at_checked(length as usize).ok_or(too_short(PREFIX as u64 + length))
}

impl Header {
    fn read(text: &[u8]) -> Result<Self, TableBytesError> {
        /// What every version has.
        #[derive(Deserialize)]
        struct AnyVersion {
            #[serde(rename = "__metadata__")]
            metadata: Metadata,
        }
        let header_error = |error: serde_json::Error| TableBytesError::Header { reason: error.to_string() };
        let Metadata { format, version } = serde_json::from_slice::<AnyVersion>(text).map_err(header_error)?.metadata;
        if format != FORMAT {
            return Err(TableBytesError::Format { found: format, expected: FORMAT });
        }
        if version != VERSION {
            return Err(TableBytesError::Version { found: version, expected: VERSION });
        }
        let header: Self = serde_json::from_slice(text).map_err(header_error)?;
        match header.token_columns.keys().find(|name| !name.starts_with(TOKEN)) {
            Some(name) => Err(TableBytesError::Header { reason: format!("unknown field `{name}`") }),
            None => Ok(header),
        }
    }

    /// Checks that the columns have their types, and that each lies where the one before it ends:
    /// all of them are then within the data, whose length is `length`.
    fn check_places(&self, length: usize) -> Result<(), TableBytesError> {
        let mut places = Vec::new();
        for (name, dtype, column) in self.columns() {
            let ([values], [begin, end], width) = (column.shape, column.data_offsets, dtype.width());
            if column.dtype != dtype {
                let [found, expected] = [column.dtype, dtype].map(|dtype| format!("{dtype:?}"));
                return Err(TableBytesError::Dtype { column: name.to_owned(), found, expected });
            }
            if values.checked_mul(width).and_then(|size| begin.checked_add(size)) != Some(end) {
                return Err(TableBytesError::ColumnSize { column: name.to_owned(), begin, end, values, width });
            }
            places.push((begin, end, name));
        }
        places.sort_unstable();
        let mut needed = 0;
        for (begin, end, column) in places {
            if begin != needed {
                return Err(TableBytesError::ColumnPlace { column: column.to_owned(), begin, end: needed });
            }
            needed = end;
        }
        if needed == length { Ok(()) } else { Err(TableBytesError::DataLength { needed, length }) }
    }
}

/// Numbers of W bytes, little-endian. The bytes are a multiple of W.
fn decode<T, const W: usize>(
    column: &'static str,
    bytes: &[u8],
    number: impl Fn([u8; W]) -> T,
) -> Result<Vec<T>, CoreError> {
    let (chunks, _) = bytes.as_chunks::<W>();
    let mut numbers = Vec::new();
    reserve(column, &mut numbers, chunks.len())?;
    numbers.extend(chunks.iter().map(|&chunk| number(chunk)));
    Ok(numbers)
}
