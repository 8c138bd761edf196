//! Writes a table into the caller's bytes.

use std::iter;

use super::{Column, Dtype, FORMAT, Header, Metadata, PREFIX, TOKEN, VERSION};
use crate::table::Row;
use crate::{CoreError, SampleTable};

/// A table ready to be written as bytes: its header and its size are known.
#[derive(Debug)]
pub struct TableBytes<'t> {
    table: &'t SampleTable,
    header: Header,
    /// The header in JSON, with spaces up to the next multiple of 8.
    text: Vec<u8>,
    size: usize,
}

impl SampleTable {
    /// The table as bytes: the tokens of its samples, after truncation. See the module
    /// [`bytes`](crate::bytes) for the layout.
    ///
    /// ```
    /// # use ludic_core::{ColumnInput, Ints, SampleTable};
    /// # let table = SampleTable::from_columns(&ColumnInput {
    /// #     input_ids: Ints::I32(&[5, 6, 7, 8, 9]),
    /// #     action_mask: Ints::U8(&[0, 1, 1, 0, 1]),
    /// #     attention_mask: None,
    /// #     actor_logps: None,
    /// #     weights: None,
    /// #     offsets: Ints::I64(&[0, 3, 5]),
    /// # })?;
    /// let bytes = table.to_bytes()?;
    /// assert_eq!(SampleTable::from_bytes(&bytes)?.lengths(), [3, 2]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn to_bytes(&self) -> Result<Vec<u8>, CoreError> {
        let encoded = self.encode();
        let mut bytes = Vec::new();
        let no_memory = CoreError::OutOfMemory { column: "bytes", values: encoded.size() };
        bytes.try_reserve_exact(encoded.size()).map_err(|_| no_memory)?;
        bytes.resize(encoded.size(), 0);
        encoded.write(&mut bytes)?;
        Ok(bytes)
    }

    /// Prepares the table to be written into bytes of the caller.
    pub fn encode(&self) -> TableBytes<'_> {
        let header = Header::new(self);
        // Numbers and fixed names: serialising them cannot fail.
        let mut text = serde_json::to_vec(&header).unwrap_or_default();
        text.resize(text.len().next_multiple_of(PREFIX), b' ');
        let data = header.columns().map(|(_, _, column)| column.data_offsets[1]).max().unwrap_or(0);
        TableBytes { table: self, size: PREFIX + text.len() + data, header, text }
    }
}

impl Header {
    fn new(table: &SampleTable) -> Self {
        let (samples, tokens) = (table.len(), table.num_tokens());
        let mut end = 0;
        let mut place = |dtype: Dtype, values: usize| {
            let begin = end;
            end += values * dtype.width();
            Column { dtype, shape: [values], data_offsets: [begin, end] }
        };
        let truncated = table.rows.iter().any(|row| row.original_len != row.len);
        let chained = table.rows.iter().any(Row::is_chained);
        let has_holes = table.rows.iter().any(|row| table.columns.has_hole(row));
        // The fields are evaluated in this order, which is the order of the columns.
        Self {
            metadata: Metadata { format: FORMAT.to_owned(), version: VERSION.to_owned() },
            offsets: place(Dtype::I64, samples + 1),
            input_ids: place(Dtype::I32, tokens),
            weights: place(Dtype::F32, samples),
            actor_logps: table.has_actor_logps().then(|| place(Dtype::F32, tokens)),
            original_lengths: truncated.then(|| place(Dtype::I32, samples)),
            chains: chained.then(|| place(Dtype::I32, samples)),
            links: chained.then(|| place(Dtype::I32, samples)),
            token_columns: table
                .token_column_names()
                .map(|name| (format!("{TOKEN}{name}"), place(Dtype::F32, tokens)))
                .collect(),
            action_mask: place(Dtype::U8, tokens),
            attention_mask: has_holes.then(|| place(Dtype::U8, tokens)),
        }
    }
}

impl TableBytes<'_> {
    /// The number of bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Writes the table.
    ///
    /// # Errors
    /// [`CoreError::OutputLength`] if `out` has another length than [`size`](Self::size).
    pub fn write(&self, out: &mut [u8]) -> Result<(), CoreError> {
        if out.len() != self.size {
            return Err(CoreError::OutputLength { name: "bytes", length: out.len(), expected: self.size });
        }
        let (rows, columns) = (&self.table.rows, &*self.table.columns);
        let mut out = Writer { rest: out };
        out.put(iter::once((self.text.len() as u64).to_le_bytes()));
        out.put_bytes(&self.text);
        let mut end = 0;
        let ends = rows.iter().map(|row| {
            end += i64::from(row.len);
            end.to_le_bytes()
        });
        out.put(iter::once(0i64.to_le_bytes()));
        out.put(ends);
        rows.iter().for_each(|row| out.put(columns.ids[row.span()].iter().map(|id| id.to_le_bytes())));
        out.put(rows.iter().map(|row| row.weight.to_le_bytes()));
        if let Some(logps) = &columns.logps {
            rows.iter().for_each(|row| out.put_actions(row, logps, f32::to_le_bytes));
        }
        if self.header.original_lengths.is_some() {
            out.put(rows.iter().map(|row| row.original_len.to_le_bytes()));
        }
        if self.header.chains.is_some() {
            out.put(rows.iter().map(|row| row.chain.to_le_bytes()));
            // Where a sample in no chain stands among its neighbours means nothing.
            let link = |row: &Row| if row.is_chained() { row.link } else { Row::NO_CHAIN };
            out.put(rows.iter().map(|row| link(row).to_le_bytes()));
        }
        for column in &self.table.token_columns {
            rows.iter().for_each(|row| out.put_actions(row, &column.values, f32::to_le_bytes));
        }
        rows.iter().for_each(|row| out.put_actions(row, &columns.action, |bit| [bit]));
        if let (Some(mask), Some(_)) = (&columns.attention, &self.header.attention_mask) {
            rows.iter().for_each(|row| out.put_bytes(&mask[row.span()]));
        }
        debug_assert!(out.rest.is_empty());
        Ok(())
    }
}

/// Fills bytes from the front.
struct Writer<'a> {
    rest: &'a mut [u8],
}

impl Writer<'_> {
    fn put_bytes(&mut self, bytes: &[u8]) {
        let (head, rest) = std::mem::take(&mut self.rest).split_at_mut(bytes.len());
        head.copy_from_slice(bytes);
        self.rest = rest;
    }

    /// Writes what a column has for each token of a sample; 0 where the token is shared.
    fn put_actions<T: Copy + Default, const W: usize>(
        &mut self,
        row: &Row,
        column: &[T],
        to_bytes: impl Fn(T) -> [u8; W],
    ) {
        let (before, stored) = row.stored(0);
        self.put(iter::repeat_n(to_bytes(T::default()), before));
        self.put(column[stored].iter().map(|&value| to_bytes(value)));
    }

    /// Writes numbers of W bytes.
    fn put<const W: usize>(&mut self, numbers: impl ExactSizeIterator<Item = [u8; W]>) {
        let (head, rest) = std::mem::take(&mut self.rest).split_at_mut(W * numbers.len());
        head.as_chunks_mut::<W>().0.iter_mut().zip(numbers).for_each(|(slot, number)| *slot = number);
        self.rest = rest;
    }
}
