//! Collates samples of a table into the arrays that a model reads. Writes into slices of the
//! caller, which can be the memory of numpy arrays that torch shares.
//!
//! A *line* is one row of a batch. It holds one sample, or several adjacent samples of a chain.
//!
//! ```
//! use ludic_core::collate::PaddedOut;
//! use ludic_core::{ColumnInput, Floats, Ints, SampleTable};
//!
//! // Two samples: the ids [5, 6, 7] and [8, 9].
//! let table = SampleTable::from_columns(&ColumnInput {
//!     input_ids: Ints::I32(&[5, 6, 7, 8, 9]),
//!     action_mask: Ints::U8(&[0, 1, 1, 0, 1]),
//!     attention_mask: None,
//!     actor_logps: None,
//!     weights: Some(Floats::F32(&[0.5, -0.5])),
//!     offsets: Ints::I64(&[0, 3, 5]),
//! })?;
//! let batch = table.batch(&[0, 1])?;
//! let (mut ids, mut attention) = ([0i64; 6], [0i64; 6]);
//! let (mut actions, mut weight) = ([0.0f32; 6], [0.0f32; 2]);
//! let out = PaddedOut {
//!     input_ids: &mut ids[..],
//!     attention_mask: &mut attention[..],
//!     action_mask: &mut actions[..],
//!     weight: &mut weight[..],
//!     logps: None,
//! };
//! batch.collate_padded(0, out)?;
//! assert_eq!(ids, [5, 6, 7, 8, 9, 0]);
//! assert_eq!(attention, [1, 1, 1, 1, 1, 0]);
//! assert_eq!(actions, [0.0, 1.0, 1.0, 0.0, 1.0, 0.0]);
//! assert_eq!(weight, [0.5, -0.5]);
//! # Ok::<(), ludic_core::CoreError>(())
//! ```

mod layouts;

use std::ops::Range;
use std::sync::Arc;

use crate::table::{Columns, Row};
use crate::token_columns::TokenColumn;
use crate::vectors::vectorized;
use crate::{CoreError, SampleTable};

pub use layouts::{CompactOut, LogpsOut, PaddedOut, PaddingFreeOut, Slot};

/// The part of a sample that its line stores for it: the tokens from `begin` on. `begin` is 0
/// unless the sample continues the one before it. The ids [5, 6] and [5, 6, 7] of one chain are two
/// pieces of line 0: `begin` 0 and `begin` 2.
#[derive(Debug)]
struct Piece {
    row: Row,
    line: usize,
    begin: usize,
    /// Whether it is the last piece of its line.
    last: bool,
}

impl Piece {
    /// The range of its tokens in the columns of the table.
    fn span(&self) -> Range<usize> {
        self.row.start + self.begin..self.row.span().end
    }

    /// Writes what a column has for its tokens, 0 for a token that is no action, then `T::default()`
    /// up to the end of `out`.
    #[inline(always)]
    fn copy_actions<S: Copy, T: Copy + Default, O: Slot<T>>(
        &self,
        out: &mut [O],
        column: &[S],
        convert: impl Fn(S) -> T,
    ) {
        let (before, stored) = self.row.stored(self.begin);
        let (zeros, rest) = out.split_at_mut(before);
        zeros.iter_mut().for_each(|slot| slot.put(T::default()));
        copy_row(rest, &column[stored], convert, T::default());
    }

    /// Whether `row` may share the line of this piece.
    fn is_continued_by(&self, row: &Row) -> bool {
        row.is_chained() && row.chain == self.row.chain && row.link > self.row.link && row.len >= self.row.len
    }
}

/// The samples of one micro-batch, checked and ready to be written in any layout.
#[derive(Debug)]
pub struct Batch<'t> {
    columns: &'t Columns,
    token_columns: &'t [Arc<TokenColumn>],
    pieces: Vec<Piece>,
    lines: usize,
    /// The first index whose sample has a 0 in its attention mask.
    partial_attention: Option<i64>,
    longest: usize,
    num_tokens: usize,
}

impl SampleTable {
    /// Returns the samples at `indices`, in that order, as one micro-batch. Each sample has a line
    /// of its own, except that adjacent samples of a [chain](Self::chained) share one.
    pub fn batch(&self, indices: &[i64]) -> Result<Batch<'_>, CoreError> {
        if indices.is_empty() {
            return Err(CoreError::EmptyBatch);
        }
        let columns = &*self.columns;
        let mut pieces: Vec<Piece> = Vec::with_capacity(indices.len());
        let (mut lines, mut partial_attention) = (0, None);
        for &index in indices {
            let row = self.row(index)?;
            let begin = match pieces.last_mut() {
                Some(previous) if previous.is_continued_by(&row) => {
                    previous.last = false;
                    previous.row.len as usize
                }
                _ => {
                    lines += 1;
                    0
                }
            };
            if columns.has_hole(&row) {
                partial_attention = partial_attention.or(Some(index));
            }
            pieces.push(Piece { row, line: lines - 1, begin, last: true });
        }
        let longest = pieces.iter().map(|piece| piece.row.len as usize).max().unwrap_or(0);
        let num_tokens = pieces.iter().map(|piece| piece.span().len()).sum();
        Ok(Batch { columns, token_columns: &self.token_columns, pieces, lines, partial_attention, longest, num_tokens })
    }
}

impl Batch<'_> {
    /// N, the number of samples.
    pub fn num_samples(&self) -> usize {
        self.pieces.len()
    }

    /// B, the number of lines.
    pub fn num_lines(&self) -> usize {
        self.lines
    }

    /// T, the number of tokens of the longest line.
    pub fn num_columns(&self) -> usize {
        self.longest
    }

    /// S, the number of tokens of all lines, without padding.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// B * T, the size of the padded and the compact layout, or an error if it exceeds 32-bit
    /// offsets.
    pub fn padded_size(&self) -> Result<usize, CoreError> {
        let (rows, columns) = (self.lines, self.longest);
        let size = rows.checked_mul(columns).filter(|&size| size <= i32::MAX as usize);
        size.ok_or(CoreError::BatchTooLarge { rows, columns })
    }

    /// S, the size of the padding-free layout, or an error if it exceeds 32-bit offsets.
    pub fn packed_size(&self) -> Result<usize, CoreError> {
        let (rows, tokens) = (self.lines, self.num_tokens);
        if tokens <= i32::MAX as usize { Ok(tokens) } else { Err(CoreError::PackedTooLarge { rows, tokens }) }
    }

    /// The line of each sample, and where its own tokens begin and end in that line. `None` if
    /// every sample has a line of its own. The ids [5, 6] and [5, 6, 7] of one chain give [[0, 0,
    /// 2], [0, 2, 3]].
    pub fn turns(&self) -> Option<Vec<[i64; 3]>> {
        let turn = |piece: &Piece| [piece.line as i64, piece.begin as i64, i64::from(piece.row.len)];
        (self.lines < self.pieces.len()).then(|| self.pieces.iter().map(turn).collect())
    }

    /// Writes the right-padded layout.
    pub fn collate_padded<I: Slot<i64>, F: Slot<f32>>(
        &self,
        pad_token_id: i64,
        out: PaddedOut<'_, I, F>,
    ) -> Result<(), CoreError> {
        let pad = i64::from(check_pad(pad_token_id)?);
        let size = self.padded_size()?;
        check_output("input_ids", out.input_ids, size)?;
        check_output("attention_mask", out.attention_mask, size)?;
        check_output("action_mask", out.action_mask, size)?;
        self.write_weights(out.weight)?;
        self.write_logps(out.logps, self.longest)?;
        vectorized(
            #[inline(always)]
            || {
                for piece in &self.pieces {
                    let (cells, span) = (self.cells(piece, self.longest), piece.span());
                    copy_row(&mut out.input_ids[cells.clone()], &self.columns.ids[span.clone()], widen, pad);
                    piece.copy_actions(&mut out.action_mask[cells.clone()], &self.columns.action, f32::from);
                    let attention = &mut out.attention_mask[cells];
                    match &self.columns.attention {
                        Some(mask) => copy_row(attention, &mask[span], i64::from, 0),
                        None => {
                            let (tokens, padding) = attention.split_at_mut(span.len());
                            tokens.iter_mut().for_each(|slot| slot.put(1));
                            padding.iter_mut().for_each(|slot| slot.put(0));
                        }
                    }
                }
            },
        );
        Ok(())
    }

    /// Writes the padding-free layout. Refuses a sample with a 0 in its attention mask, because
    /// this layout has no attention mask.
    pub fn collate_padding_free<I: Slot<i64>, C: Slot<i32>, F: Slot<f32>>(
        &self,
        out: PaddingFreeOut<'_, I, C, F>,
    ) -> Result<(), CoreError> {
        self.refuse_partial_attention()?;
        let size = self.packed_size()?;
        check_output("input_ids", out.input_ids, size)?;
        check_output("position_ids", out.position_ids, size)?;
        check_output("action_mask", out.action_mask, size)?;
        check_output("cu_seqlens", out.cu_seqlens, self.lines + 1)?;
        self.write_weights(out.weight)?;
        self.write_logps(out.logps, 0)?;
        out.cu_seqlens[0].put(0);
        vectorized(
            #[inline(always)]
            || {
                let mut end = 0;
                for piece in &self.pieces {
                    let (begin, span) = (end, piece.span());
                    end += span.len();
                    copy_row(&mut out.input_ids[begin..end], &self.columns.ids[span], widen, 0);
                    piece.copy_actions(&mut out.action_mask[begin..end], &self.columns.action, f32::from);
                    write_positions(&mut out.position_ids[begin..end], piece.begin as i64);
                    out.cu_seqlens[piece.line + 1].put(end as i32);
                }
            },
        );
        Ok(())
    }

    /// Writes the compact layout. Refuses a sample with a 0 in its attention mask, because this
    /// layout has only the length of each line.
    pub fn collate_compact<C: Slot<i32>, U: Slot<u8>, F: Slot<f32>>(
        &self,
        pad_token_id: i64,
        out: CompactOut<'_, C, U, F>,
    ) -> Result<(), CoreError> {
        let pad = check_pad(pad_token_id)?;
        self.refuse_partial_attention()?;
        let size = self.padded_size()?;
        check_output("input_ids", out.input_ids, size)?;
        check_output("action_mask", out.action_mask, size)?;
        check_output("lengths", out.lengths, self.lines)?;
        self.write_weights(out.weight)?;
        self.write_logps(out.logps, self.longest)?;
        vectorized(
            #[inline(always)]
            || {
                for piece in &self.pieces {
                    let (cells, span) = (self.cells(piece, self.longest), piece.span());
                    copy_row(&mut out.input_ids[cells.clone()], &self.columns.ids[span], |id| id, pad);
                    piece.copy_actions(&mut out.action_mask[cells], &self.columns.action, |bit| bit);
                    out.lengths[piece.line].put(piece.row.len as i32);
                }
            },
        );
        Ok(())
    }

    /// The range of a piece in a padded array; the last piece of a line includes the padding. In
    /// lines of width 4, a last piece of line 1 with `begin` 2 has the cells 6..8.
    fn cells(&self, piece: &Piece, width: usize) -> Range<usize> {
        let end = if piece.last { width } else { piece.row.len as usize };
        piece.line * width + piece.begin..piece.line * width + end
    }

    fn write_weights<F: Slot<f32>>(&self, out: &mut [F]) -> Result<(), CoreError> {
        check_output("weight", out, self.pieces.len())?;
        self.pieces.iter().zip(out).for_each(|(piece, slot)| slot.put(piece.row.weight));
        Ok(())
    }

    /// Writes log-probabilities with every line padded to `width`. A width of 0 means no padding.
    fn write_logps<F: Slot<f32>>(&self, out: Option<LogpsOut<'_, F>>, width: usize) -> Result<(), CoreError> {
        let (out, logps) = match (out, &self.columns.logps) {
            (Some(out), Some(logps)) => (out, logps),
            (None, None) => return Ok(()),
            (Some(out), None) => return check_output("actor_logps", out.actor_logps, 0),
            (None, Some(_)) => {
                return check_output::<f32>("actor_logps", &[], self.num_tokens.max(1));
            }
        };
        let size = if width == 0 { self.num_tokens } else { self.lines * width };
        check_output("actor_logps", out.actor_logps, size)?;
        check_output("old_logp_action", out.old_logp_action, self.pieces.len())?;
        vectorized(
            #[inline(always)]
            || {
                let mut end = 0;
                for (piece, sum) in self.pieces.iter().zip(out.old_logp_action) {
                    let cells = if width == 0 { end..end + piece.span().len() } else { self.cells(piece, width) };
                    end = cells.end;
                    piece.copy_actions(&mut out.actor_logps[cells], logps, |value| value);
                    let (before, stored) = piece.row.stored(piece.begin);
                    sum.put(sum_in_lanes(before, &logps[stored]));
                }
            },
        );
        Ok(())
    }

    /// Writes the token column at `index` of the table, with every line padded to `width`. A width of
    /// 0 means no padding. Tokens that are not actions have 0.
    ///
    /// # Errors
    /// [`CoreError::OutputLength`] if `out` has another length than the layout has tokens.
    pub fn collate_token_column<F: Slot<f32>>(
        &self,
        index: usize,
        width: usize,
        out: &mut [F],
    ) -> Result<(), CoreError> {
        let column = &self.token_columns[index].values;
        let size = if width == 0 { self.num_tokens } else { self.lines * width };
        check_output("a token column", out, size)?;
        let mut end = 0;
        for piece in &self.pieces {
            let cells = if width == 0 { end..end + piece.span().len() } else { self.cells(piece, width) };
            end = cells.end;
            piece.copy_actions(&mut out[cells], column, |value| value);
        }
        Ok(())
    }

    fn refuse_partial_attention(&self) -> Result<(), CoreError> {
        self.partial_attention.map_or(Ok(()), |index| Err(CoreError::PartialAttention { index }))
    }
}

/// Widens an id. Ids are never negative, so that they can be extended with zeros, which is cheaper
/// than sign extension.
#[inline(always)]
fn widen(id: i32) -> i64 {
    i64::from(id as u32)
}

/// Writes `first`, `first + 1`, ... into `out`. The addition wraps, because an overflow check would
/// prevent vectorisation.
#[inline(always)]
fn write_positions<I: Slot<i64>>(out: &mut [I], first: i64) {
    let mut position = first;
    for slot in out {
        slot.put(position);
        position = position.wrapping_add(1);
    }
}

/// Writes the converted values, then `pad` up to the end of `out`.
#[inline(always)]
fn copy_row<S: Copy, T: Copy, O: Slot<T>>(out: &mut [O], values: &[S], convert: impl Fn(S) -> T, pad: T) {
    let (tokens, padding) = out.split_at_mut(values.len());
    tokens.iter_mut().zip(values).for_each(|(slot, &value)| slot.put(convert(value)));
    padding.iter_mut().for_each(|slot| slot.put(pad));
}

/// The sum of `zeros` zeros and the values in a fixed order: 16 lanes, then the lanes and the tail.
/// The result is the same on every machine, and more accurate than adding the values one after the
/// other. With 18 zeros, the first 14 values belong to the lanes 2 to 15.
#[inline(always)]
fn sum_in_lanes(zeros: usize, values: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [0.0f32; LANES];
    let first = zeros % LANES;
    let (head, rest) = match first {
        0 => (&[][..], values),
        _ => values.split_at_checked(LANES - first).unwrap_or((&[], values)),
    };
    lanes[first..].iter_mut().zip(head).for_each(|(lane, value)| *lane += value);
    let (groups, tail) = rest.as_chunks::<LANES>();
    for group in groups {
        lanes.iter_mut().zip(group).for_each(|(lane, value)| *lane += value);
    }
    lanes.iter().chain(tail).sum()
}

/// The padding token, if it is a valid id.
fn check_pad(pad_token_id: i64) -> Result<i32, CoreError> {
    let pad = i32::try_from(pad_token_id).ok().filter(|&pad| pad >= 0);
    pad.ok_or(CoreError::PadToken { value: pad_token_id })
}

/// Checks that an output array has exactly the size that is written.
pub(crate) fn check_output<T>(name: &'static str, out: &[T], expected: usize) -> Result<(), CoreError> {
    if out.len() == expected { Ok(()) } else { Err(CoreError::OutputLength { name, length: out.len(), expected }) }
}
