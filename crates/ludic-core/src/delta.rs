//! The change of a tensor as bytes: small if most entries kept their bits.
//!
//! Entries are compared as bits, so a NaN is like any other value. What is stored of a changed entry
//! is `old XOR new`, as a little-endian number: applied to the old bits it gives the new ones, and
//! applied again the old ones. An optimizer step changes the low bits of a float, so this number is
//! small, and as a varint (seven bits a byte, the lowest first, the highest bit set in all but the
//! last byte) it has mostly one byte.
//!
//! The first byte is the form; the smallest form is chosen:
//!
//! ```text
//! 0  gaps   for each changed entry: how many unchanged ones are before it, then its XOR; varints
//! 1  dense  for each entry: its XOR, a varint
//! 2  raw    for each entry: its XOR, in all its bytes
//! ```
//!
//! Example: the entries [7, 9, 4, 300] become [7, 8, 4, 500]. Entry 1 changes by `9 ^ 8 = 1` after one
//! unchanged entry, entry 3 by `300 ^ 500 = 216 = 0b1_1011000` after one more, so the form `gaps` is
//! `[0,  1, 1,  1, 216, 1]`: the varint of 216 has the bytes `0b1_1011000` and `1`.

/// Bytes that are no delta, or not one of this tensor. The message names the value, the rule and the
/// remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeltaError {
    /// Two versions of a tensor with different sizes.
    #[error("the base has {base} bytes and the new tensor {new}; a delta needs two versions of one tensor")]
    Lengths {
        /// The bytes of the base.
        base: usize,
        /// The bytes of the new version.
        new: usize,
    },

    /// A width that is no width of an entry, or does not divide the tensor.
    #[error("width ({width}) must be 1, 2, 4 or 8 and divide the {bytes} bytes of the tensor; pass its itemsize")]
    Width {
        /// The width.
        width: usize,
        /// The bytes of the tensor.
        bytes: usize,
    },

    /// A first byte that is no form.
    #[error("the form of a delta ({form:?}) must be 0, 1 or 2; these are not bytes from encode_delta")]
    Form {
        /// The first byte, if there is one.
        form: Option<u8>,
    },

    /// A number that ends after the delta does.
    #[error("a delta of {bytes} bytes ends within a number; pass all bytes that encode_delta returned")]
    Cut {
        /// The bytes of the delta.
        bytes: usize,
    },

    /// A number that an entry, or an index, cannot have.
    #[error("a delta has a number of more than {bits} bits; it is damaged, or of a tensor with wider entries")]
    TooLarge {
        /// The most bits.
        bits: usize,
    },

    /// Changes of more or fewer entries than there are.
    #[error("a delta changes entry {entry} of a tensor with {entries}; it is damaged, or of another tensor")]
    Entries {
        /// The entry.
        entry: u64,
        /// The number of entries.
        entries: usize,
    },
}

const GAPS: u8 = 0;
const DENSE: u8 = 1;
const RAW: u8 = 2;
/// Bytes that are compared together.
const BLOCK: usize = 64;

/// The change from `base` to `new`, whose entries have `width` bytes; `None` if no bit differs. At most
/// one byte longer than the tensor.
///
/// # Errors
/// The two have different sizes, or are not made of entries of 1, 2, 4 or 8 bytes.
pub fn encode(base: &[u8], new: &[u8], width: usize) -> Result<Option<Vec<u8>>, DeltaError> {
    if base.len() != new.len() {
        return Err(DeltaError::Lengths { base: base.len(), new: new.len() });
    }
    check_width(width, new.len())?;
    Ok(match width {
        1 => encode_entries::<1>(base, new),
        2 => encode_entries::<2>(base, new),
        4 => encode_entries::<4>(base, new),
        _ => encode_entries::<8>(base, new),
    })
}

/// Applies a delta from [`encode`] to its base, in place, or to its result, which becomes the base
/// again. On an error nothing is written.
///
/// # Errors
/// The bytes are not a delta of a tensor of this size and width.
pub fn apply(target: &mut [u8], delta: &[u8], width: usize) -> Result<(), DeltaError> {
    check_width(width, target.len())?;
    match width {
        1 => apply_entries::<1>(target.as_chunks_mut().0, delta),
        2 => apply_entries::<2>(target.as_chunks_mut().0, delta),
        4 => apply_entries::<4>(target.as_chunks_mut().0, delta),
        _ => apply_entries::<8>(target.as_chunks_mut().0, delta),
    }
}

fn check_width(width: usize, bytes: usize) -> Result<(), DeltaError> {
    let known = matches!(width, 1 | 2 | 4 | 8) && bytes.is_multiple_of(width);
    if known { Ok(()) } else { Err(DeltaError::Width { width, bytes }) }
}

fn encode_entries<const W: usize>(base: &[u8], new: &[u8]) -> Option<Vec<u8>> {
    let entries = new.len() / W;
    // 1. The form `gaps`, for as long as it is not longer than `raw`, and the sizes of the others.
    //    `dense` has a byte for each entry at least.
    let (mut delta, mut changed, mut dense) = (vec![GAPS], 0_usize, entries);
    for_each_change::<W>(base, new, |gap, xor| {
        if delta.len() - 1 <= new.len() {
            push_varint(&mut delta, gap);
            push_varint(&mut delta, xor);
        }
        changed += 1;
        dense += varint_len(xor) - 1;
    });
    if changed == 0 {
        return None;
    }
    // 2. Another form if it is smaller.
    let raw = new.len();
    if delta.len() - 1 <= dense.min(raw) {
        return Some(delta);
    }
    delta.clear();
    if dense <= raw {
        delta.push(DENSE);
        let (old, new) = (base.as_chunks::<W>().0, new.as_chunks::<W>().0);
        old.iter().zip(new).for_each(|(old, new)| push_varint(&mut delta, number(old) ^ number(new)));
    } else {
        delta.push(RAW);
        delta.extend(base.iter().zip(new).map(|(old, new)| old ^ new));
    }
    Some(delta)
}

/// Calls `change` with the number of unchanged entries before each changed one, and its XOR. Compares
/// blocks, then words of 8 bytes, then entries, since most are equal.
fn for_each_change<const W: usize>(base: &[u8], new: &[u8], mut change: impl FnMut(u64, u64)) {
    let mut gap = 0;
    for (old, new) in base.chunks(BLOCK).zip(new.chunks(BLOCK)) {
        if old == new {
            gap += (new.len() / W) as u64;
            continue;
        }
        for (old, new) in old.chunks(8).zip(new.chunks(8)) {
            let xors = number(old) ^ number(new);
            if xors == 0 {
                gap += (new.len() / W) as u64;
                continue;
            }
            for entry in 0..new.len() / W {
                match xors >> (8 * W * entry) & (u64::MAX >> (64 - 8 * W)) {
                    0 => gap += 1,
                    xor => {
                        change(gap, xor);
                        gap = 0;
                    }
                }
            }
        }
    }
}

fn apply_entries<const W: usize>(target: &mut [[u8; W]], delta: &[u8]) -> Result<(), DeltaError> {
    let entries = target.len();
    // 1. Read all of it, so that a damaged delta changes nothing.
    read_changes::<W>(delta, entries, |_, _| {})?;
    // 2. Apply it: every entry is now known to exist.
    read_changes::<W>(delta, entries, |entry, xor| {
        for (byte, change) in target[entry].iter_mut().zip(xor.to_le_bytes()) {
            *byte ^= change;
        }
    })
}

/// Calls `change` with each changed entry, below `entries`, and its XOR, which has at most `W` bytes.
fn read_changes<const W: usize>(
    delta: &[u8],
    entries: usize,
    mut change: impl FnMut(usize, u64),
) -> Result<(), DeltaError> {
    let outside = |entry: u64| DeltaError::Entries { entry, entries };
    let (&form, mut rest) = delta.split_first().ok_or(DeltaError::Form { form: None })?;
    let cut = |error: Option<DeltaError>| error.unwrap_or(DeltaError::Cut { bytes: delta.len() });
    match form {
        GAPS => {
            let mut next = 0_u64;
            while !rest.is_empty() {
                let gap = read_varint(&mut rest, 64).map_err(cut)?;
                let entry = next.saturating_add(gap);
                let index = usize::try_from(entry).ok().filter(|&index| index < entries).ok_or(outside(entry))?;
                change(index, read_varint(&mut rest, 8 * W).map_err(cut)?);
                next = entry + 1;
            }
        }
        DENSE => {
            for entry in 0..entries {
                change(entry, read_varint(&mut rest, 8 * W).map_err(cut)?);
            }
            if !rest.is_empty() {
                return Err(outside(entries as u64));
            }
        }
        RAW => {
            let (xors, odd) = rest.as_chunks::<W>();
            if !odd.is_empty() || xors.len() < entries {
                return Err(cut(None));
            }
            if xors.len() > entries {
                return Err(outside(entries as u64));
            }
            xors.iter().enumerate().for_each(|(entry, xor)| change(entry, number(xor)));
        }
        _ => return Err(DeltaError::Form { form: Some(form) }),
    }
    Ok(())
}

/// At most 8 bytes as a little-endian number.
fn number(bytes: &[u8]) -> u64 {
    let mut wide = [0; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(wide)
}

fn varint_len(value: u64) -> usize {
    (64 - (value | 1).leading_zeros() as usize).div_ceil(7)
}

fn push_varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 128 {
        bytes.push(value as u8 | 128);
        value >>= 7;
    }
    bytes.push(value as u8);
}

/// Takes a number of at most `bits` bits. The error is `None` if the bytes end before it does.
fn read_varint(bytes: &mut &[u8], bits: usize) -> Result<u64, Option<DeltaError>> {
    let (mut value, mut shift) = (0_u64, 0);
    loop {
        let (&byte, rest) = bytes.split_first().ok_or(None)?;
        *bytes = rest;
        let low = u64::from(byte & 127);
        if shift >= bits || (bits - shift < 7 && low >> (bits - shift) != 0) {
            return Err(Some(DeltaError::TooLarge { bits }));
        }
        value |= low << shift;
        if byte < 128 {
            return Ok(value);
        }
        shift += 7;
    }
}
