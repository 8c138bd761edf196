//! Numbers out of Python sequences: lists element by element without an object for each, arrays
//! without touching elements.
//!
//! A list, a tuple, a range, bytes, anything with a buffer of one dimension and anything that numpy
//! makes an array of is read. Reading has two phases, because Python code may run while a sequence
//! is converted, and such code can free the memory of any array. `prepare` runs it: what is no
//! plain array is copied. `borrow` runs none: it looks at a plain array's memory, which therefore
//! stays where it is until the caller has read it, as long as the caller runs no Python code in
//! between.

use std::{ptr, slice};

use ludic_core::{Floats, Ints};
use numpy::{PyArray1, PyArrayDescrMethods, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::buffer::{ElementType, PyUntypedBuffer};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes};

use crate::errors::{raised, refusal};
use crate::fields::{Field, kind_of};
use crate::lists::{as_list, read_bits, read_list, reserve};

/// Where `prepare` left the numbers.
#[derive(Clone, Copy, Default)]
enum Found {
    /// In the reader, converted.
    #[default]
    Converted,
    /// In the reader, as zeros and ones.
    Bits,
    /// In the reader, as they lay in a buffer.
    Copied(Layout),
    /// In the array that was given.
    InPlace,
}

/// The elements of a copied buffer.
#[derive(Clone, Copy)]
struct Layout {
    kind: Kind,
    width: usize,
    count: usize,
}

#[derive(Clone, Copy)]
enum Kind {
    Signed,
    Unsigned,
    Float,
}

/// Reads one field of many samples in turn; its memory is used again.
#[derive(Default)]
pub struct IntReader {
    wide: Vec<i64>,
    bits: Vec<u8>,
    copied: Copied,
    found: Found,
}

impl IntReader {
    /// Converts integers of any width, except those of a plain array. Python code may run. Returns
    /// how many there are.
    pub fn prepare(&mut self, value: &Bound<'_, PyAny>, field: Field) -> PyResult<usize> {
        if let Some(ints) = int_array(value) {
            self.found = Found::InPlace;
            return Ok(ints.len());
        }
        if let Some(list) = as_list(value)? {
            read_list(&list, &mut self.wide, field)?;
            self.found = Found::Converted;
            return Ok(self.wide.len());
        }
        let layout = self.copied.fill(value, field, int_kind, "integers in native byte order")?;
        self.found = Found::Copied(layout);
        Ok(layout.count)
    }

    /// The same for zeros and ones, which in a list are two objects known beforehand: no element is
    /// looked into.
    pub fn prepare_mask(&mut self, value: &Bound<'_, PyAny>, field: Field) -> PyResult<usize> {
        match as_list(value)? {
            Some(list) if read_bits(&list, &mut self.bits, field)? => {
                self.found = Found::Bits;
                Ok(self.bits.len())
            }
            _ => self.prepare(value, field),
        }
    }

    /// What was prepared from `value`. No Python code runs.
    pub fn borrow<'a>(&'a self, value: &'a Bound<'_, PyAny>, field: Field) -> PyResult<Ints<'a>> {
        Ok(match self.found {
            Found::Converted => Ints::I64(&self.wide),
            Found::Bits => Ints::U8(&self.bits),
            Found::Copied(layout) => self.copied.ints(layout),
            Found::InPlace => int_array(value).ok_or_else(|| changed(field))?,
        })
    }
}

/// The same for floats.
#[derive(Default)]
pub struct FloatReader {
    wide: Vec<f64>,
    copied: Copied,
    found: Found,
}

impl FloatReader {
    pub fn prepare(&mut self, value: &Bound<'_, PyAny>, field: Field) -> PyResult<()> {
        self.found = if float_array(value).is_some() {
            Found::InPlace
        } else if let Some(list) = as_list(value)? {
            read_list(&list, &mut self.wide, field)?;
            Found::Converted
        } else {
            Found::Copied(self.copied.fill(value, field, float_kind, "float32 or float64 in native byte order")?)
        };
        Ok(())
    }

    pub fn borrow<'a>(&'a self, value: &'a Bound<'_, PyAny>, field: Field) -> PyResult<Floats<'a>> {
        Ok(match self.found {
            Found::Converted | Found::Bits => Floats::F64(&self.wide),
            Found::Copied(layout) => self.copied.floats(layout),
            Found::InPlace => float_array(value).ok_or_else(|| changed(field))?,
        })
    }
}

/// The bytes of a buffer, in words so that elements of any width are aligned.
#[derive(Default)]
struct Copied {
    words: Vec<u64>,
}

impl Copied {
    /// Takes the buffer of `value`, copies it before any other Python code can run, and lets go of
    /// it.
    fn fill(
        &mut self,
        value: &Bound<'_, PyAny>,
        field: Field,
        kind_of: fn(&PyUntypedBuffer) -> Option<Kind>,
        wanted: &str,
    ) -> PyResult<Layout> {
        if field.places && (value.is_instance_of::<PyBytes>() || value.is_instance_of::<PyByteArray>()) {
            return Err(field.no_mask("bytes"));
        }
        let buffer = plain_buffer(value, field)?;
        let (width, count) = (buffer.item_size(), buffer.item_count());
        let kind = kind_of(&buffer).filter(|_| [1, 2, 4, 8].contains(&width));
        let truths = matches!(element_type(&buffer), ElementType::Bool);
        let layout = match kind {
            _ if field.places && truths => Err(field.no_mask("an array of truths")),
            // Without an element there is none of a wrong type: so is what numpy makes of an empty
            // list.
            None if count == 0 => Ok(Layout { kind: Kind::Signed, width: 8, count }),
            None => Err(wrong_elements(&buffer, field, wanted)),
            Some(kind) => Ok(Layout { kind, width, count }),
        };
        if layout.is_ok() {
            self.words.clear();
            reserve(&mut self.words, buffer.len_bytes().div_ceil(size_of::<u64>()), field)?;
            self.words.resize(buffer.len_bytes().div_ceil(size_of::<u64>()), 0);
            // SAFETY: `plain_buffer` made sure of contiguity, `words` has room for as many bytes,
            // and between taking the buffer and here no Python code has run.
            unsafe {
                ptr::copy_nonoverlapping(
                    buffer.buf_ptr().cast(),
                    self.words.as_mut_ptr().cast::<u8>(),
                    buffer.len_bytes(),
                )
            };
        }
        buffer.release(value.py());
        layout
    }

    fn ints(&self, layout: Layout) -> Ints<'_> {
        match (layout.kind, layout.width) {
            (Kind::Unsigned, 1) => Ints::U8(self.elements(layout)),
            (Kind::Unsigned, 2) => Ints::U16(self.elements(layout)),
            (Kind::Unsigned, 4) => Ints::U32(self.elements(layout)),
            (Kind::Unsigned, _) => Ints::U64(self.elements(layout)),
            (_, 1) => Ints::I8(self.elements(layout)),
            (_, 2) => Ints::I16(self.elements(layout)),
            (_, 4) => Ints::I32(self.elements(layout)),
            _ => Ints::I64(self.elements(layout)),
        }
    }

    fn floats(&self, layout: Layout) -> Floats<'_> {
        match layout.width {
            4 => Floats::F32(self.elements(layout)),
            _ => Floats::F64(self.elements(layout)),
        }
    }

    /// The elements as `T`, a number of the width that the layout says.
    fn elements<T: numpy::Element>(&self, layout: Layout) -> &[T] {
        debug_assert_eq!(size_of::<T>(), layout.width);
        let count = layout.count.min(self.words.len() * size_of::<u64>() / size_of::<T>());
        // SAFETY: the words are this reader's own, hold as many elements, are aligned for any
        // number of up to 64 bits, and any bits are such a number.
        unsafe { slice::from_raw_parts(self.words.as_ptr().cast(), count) }
    }
}

/// The elements of a numpy array of one plain dimension; None for anything else, which the buffer
/// protocol then reads or refuses. The same as through the buffer, without the half microsecond
/// that numpy takes to describe one.
fn int_array<'a>(value: &'a Bound<'_, PyAny>) -> Option<Ints<'a>> {
    let dtype = value.cast::<PyUntypedArray>().ok()?.dtype();
    Some(match (dtype.kind(), dtype.itemsize()) {
        (b'i', 4) => Ints::I32(plain_array(value)?),
        (b'i', 8) => Ints::I64(plain_array(value)?),
        (b'u', 1) => Ints::U8(plain_array(value)?),
        _ => return None,
    })
}

fn float_array<'a>(value: &'a Bound<'_, PyAny>) -> Option<Floats<'a>> {
    let dtype = value.cast::<PyUntypedArray>().ok()?.dtype();
    Some(match (dtype.kind(), dtype.itemsize()) {
        (b'f', 4) => Floats::F32(plain_array(value)?),
        (b'f', 8) => Floats::F64(plain_array(value)?),
        _ => return None,
    })
}

fn plain_array<'a, T: numpy::Element>(value: &'a Bound<'_, PyAny>) -> Option<&'a [T]> {
    // The cast looks at the byte order too.
    let array = value.cast::<PyArray1<T>>().ok()?;
    let data = array.data();
    if array.is_empty() {
        return Some(&[]);
    }
    let plain = array.is_c_contiguous() && data.is_aligned();
    // SAFETY: the type is checked by the cast, contiguity and alignment here, and `value` keeps the
    // array. Only Python code could free its memory, and none runs while the slice is in use: see
    // the head of this file.
    plain.then(|| unsafe { slice::from_raw_parts(data, array.len()) })
}

/// An array that was plain when it was looked at, and is not when it is read.
fn changed(field: Field) -> PyErr {
    raised("DataError", format!("{} changed while the sample was read; give a copy", field.whole()))
}

/// A contiguous buffer of one dimension: that of `value`, or of a copy that numpy makes.
fn plain_buffer(value: &Bound<'_, PyAny>, field: Field) -> PyResult<PyUntypedBuffer> {
    let buffer = PyUntypedBuffer::get(value).or_else(|error| {
        let Some(array) = as_array(value, field)? else { return Err(wrong_type(value, field, error)) };
        PyUntypedBuffer::get(&array).map_err(|error| wrong_type(value, field, error))
    })?;
    if buffer.dimensions() != 1 {
        let found = format!("{} has {} dimensions, but must have one", field.whole(), buffer.dimensions());
        return Err(raised("DataTypeError", found));
    }
    if buffer.is_c_contiguous() {
        return Ok(buffer);
    }
    PyUntypedBuffer::get(&value.py().import("numpy")?.call_method1("array", (value,))?)
}

/// The array that an object without a buffer says it is: so does a tensor of torch. None where it
/// does not say it.
fn as_array<'py>(value: &Bound<'py, PyAny>, field: Field) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = value.py();
    let Some(convert) = value.getattr_opt(intern!(py, "__array__"))? else { return Ok(None) };
    let array = convert.call0().map_err(|error| {
        let (place, found) = (field.whole(), kind_of(value));
        let message = format!("{place} is a {found} that numpy cannot read: {}", error.value(py));
        refusal(py, error, "DataTypeError", message)
    })?;
    Ok(array.cast::<PyUntypedArray>().is_ok().then_some(array))
}

fn wrong_type(value: &Bound<'_, PyAny>, field: Field, error: PyErr) -> PyErr {
    let py = value.py();
    let (place, found) = (field.whole(), kind_of(value));
    let mut message =
        format!("{place} is a {found}, but must be a list, a tuple, a one-dimensional numpy array or bytes");
    if !error.is_instance_of::<PyTypeError>(py) {
        message.push_str(&format!(": {}", error.value(py)));
    }
    refusal(py, error, "DataTypeError", message)
}

/// What the buffer holds; unknown in foreign byte order, which `ElementType` does not look at.
fn element_type(buffer: &PyUntypedBuffer) -> ElementType {
    let foreign: &[u8] = if cfg!(target_endian = "little") { b">!" } else { b"<" };
    match buffer.format().to_bytes() {
        [order, ..] if foreign.contains(order) => ElementType::Unknown,
        _ => ElementType::from_format(buffer.format()),
    }
}

/// The width is the buffer's to say: ctypes gives a long of eight bytes the letter of one of four.
fn int_kind(buffer: &PyUntypedBuffer) -> Option<Kind> {
    match element_type(buffer) {
        ElementType::SignedInteger { .. } => Some(Kind::Signed),
        ElementType::UnsignedInteger { .. } | ElementType::Bool => Some(Kind::Unsigned),
        _ => None,
    }
}

fn float_kind(buffer: &PyUntypedBuffer) -> Option<Kind> {
    let wide = matches!(element_type(buffer), ElementType::Float { .. }) && buffer.item_size() >= 4;
    wide.then_some(Kind::Float)
}

fn wrong_elements(buffer: &PyUntypedBuffer, field: Field, wanted: &str) -> PyErr {
    let format = buffer.format().to_string_lossy();
    let place = field.whole();
    raised(
        "DataTypeError",
        format!("{place} is a buffer of format {format:?}, but must hold {wanted}; convert it with numpy's astype"),
    )
}
