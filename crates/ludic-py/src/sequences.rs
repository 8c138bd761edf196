//! Reads numbers from Python sequences: lists, tuples, ranges, bytes, other one-dimensional
//! buffers, and objects with `__array__`. Lists are read element by element without creating an
//! object for each.
//!
//! Reading has two phases, because Python code may run while a sequence is converted, and such code
//! can free the memory of any array. `prepare` may run Python code; it copies everything except
//! *plain* arrays: contiguous, aligned and of a common type. `borrow` runs no Python code; it
//! returns the copy or the memory of the plain array. That memory stays valid as long as the caller
//! runs no Python code either.

use std::{ptr, slice};

use ludic_core::{Floats, Ints};
use numpy::{PyArray1, PyArrayDescrMethods, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::buffer::{ElementType, PyUntypedBuffer};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes};

use crate::errors::{ludic_error, replace_conversion_error};
use crate::fields::{Field, type_name};
use crate::lists::{as_list, read_bits, read_list, reserve};

/// Where the numbers are after `prepare`.
#[derive(Clone, Copy, Default)]
enum Source {
    /// In the reader, converted from a list.
    #[default]
    Converted,
    /// In the reader, as zeros and ones from a list.
    Bits,
    /// In the reader, as the bytes of a buffer.
    Copied(Layout),
    /// In the plain array that the caller passed.
    InPlace,
}

/// The type and number of the elements of a copied buffer. `width` is in bytes.
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

/// Reads an integer field of one sample after the other and reuses its memory.
#[derive(Default)]
pub struct IntReader {
    wide: Vec<i64>,
    bits: Vec<u8>,
    copy: BufferCopy,
    source: Source,
}

impl IntReader {
    /// Copies integers of any width, unless they are in a plain array. Python code may run. Returns
    /// the number of integers.
    pub fn prepare(&mut self, value: &Bound<'_, PyAny>, field: Field) -> PyResult<usize> {
        if let Some(ints) = int_array(value) {
            self.source = Source::InPlace;
            return Ok(ints.len());
        }
        if let Some(list) = as_list(value)? {
            read_list(&list, &mut self.wide, field)?;
            self.source = Source::Converted;
            return Ok(self.wide.len());
        }
        let layout = self.copy.fill(value, field, int_kind, "integers in native byte order")?;
        self.source = Source::Copied(layout);
        Ok(layout.count)
    }

    /// The same for a mask. In a list, zeros and ones are single objects, which are recognised by
    /// their address without reading them.
    pub fn prepare_mask(&mut self, value: &Bound<'_, PyAny>, field: Field) -> PyResult<usize> {
        match as_list(value)? {
            Some(list) if read_bits(&list, &mut self.bits, field)? => {
                self.source = Source::Bits;
                Ok(self.bits.len())
            }
            _ => self.prepare(value, field),
        }
    }

    /// The integers that were prepared from `value`. No Python code runs.
    pub fn borrow<'a>(&'a self, value: &'a Bound<'_, PyAny>, field: Field) -> PyResult<Ints<'a>> {
        Ok(match self.source {
            Source::Converted => Ints::I64(&self.wide),
            Source::Bits => Ints::U8(&self.bits),
            Source::Copied(layout) => self.copy.ints(layout),
            Source::InPlace => int_array(value).ok_or_else(|| changed_error(field))?,
        })
    }
}

/// Reads a float field of one sample after the other and reuses its memory.
#[derive(Default)]
pub struct FloatReader {
    wide: Vec<f64>,
    copy: BufferCopy,
    source: Source,
}

impl FloatReader {
    /// Copies floats, unless they are in a plain array. Python code may run.
    pub fn prepare(&mut self, value: &Bound<'_, PyAny>, field: Field) -> PyResult<()> {
        self.source = if float_array(value).is_some() {
            Source::InPlace
        } else if let Some(list) = as_list(value)? {
            read_list(&list, &mut self.wide, field)?;
            Source::Converted
        } else {
            Source::Copied(self.copy.fill(value, field, float_kind, "float32 or float64 in native byte order")?)
        };
        Ok(())
    }

    /// The floats that were prepared from `value`. No Python code runs.
    pub fn borrow<'a>(&'a self, value: &'a Bound<'_, PyAny>, field: Field) -> PyResult<Floats<'a>> {
        Ok(match self.source {
            Source::Converted | Source::Bits => Floats::F64(&self.wide),
            Source::Copied(layout) => self.copy.floats(layout),
            Source::InPlace => float_array(value).ok_or_else(|| changed_error(field))?,
        })
    }
}

/// The bytes of a buffer, stored in words so that elements of any width are aligned.
#[derive(Default)]
struct BufferCopy {
    words: Vec<u64>,
}

impl BufferCopy {
    /// Copies the buffer of `value` before any other Python code can run, and releases it.
    fn fill(
        &mut self,
        value: &Bound<'_, PyAny>,
        field: Field,
        read_kind: fn(&PyUntypedBuffer) -> Option<Kind>,
        expected: &str,
    ) -> PyResult<Layout> {
        if field.holds_indices && (value.is_instance_of::<PyBytes>() || value.is_instance_of::<PyByteArray>()) {
            return Err(field.mask_error("bytes"));
        }
        let buffer = plain_buffer(value, field)?;
        let (width, count) = (buffer.item_size(), buffer.item_count());
        let kind = read_kind(&buffer).filter(|_| [1, 2, 4, 8].contains(&width));
        let is_bool = matches!(element_type(&buffer), ElementType::Bool);
        let layout = match kind {
            _ if field.holds_indices && is_bool => Err(field.mask_error("an array of bool")),
            // An empty array of any type is accepted: numpy makes float64 of an empty list.
            None if count == 0 => Ok(Layout { kind: Kind::Signed, width: 8, count }),
            None => Err(element_error(&buffer, field, expected)),
            Some(kind) => Ok(Layout { kind, width, count }),
        };
        if layout.is_ok() {
            self.words.clear();
            reserve(&mut self.words, buffer.len_bytes().div_ceil(size_of::<u64>()), field)?;
            self.words.resize(buffer.len_bytes().div_ceil(size_of::<u64>()), 0);
            // SAFETY: `plain_buffer` checked that the buffer is contiguous, `words` has room for
            // its bytes, and no Python code has run since the buffer was taken.
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

    /// The elements as `T`, which must have the width of the layout.
    fn elements<T: numpy::Element>(&self, layout: Layout) -> &[T] {
        debug_assert_eq!(size_of::<T>(), layout.width);
        let count = layout.count.min(self.words.len() * size_of::<u64>() / size_of::<T>());
        // SAFETY: the words belong to this reader, hold `count` elements and are aligned for any
        // number of up to 64 bits. Any bits are a valid number.
        unsafe { slice::from_raw_parts(self.words.as_ptr().cast(), count) }
    }
}

/// The elements of a plain numpy array of one dimension. None for anything else, which is then read
/// or refused by the buffer protocol. This saves the half microsecond that numpy takes to describe
/// a buffer.
fn int_array<'a>(value: &'a Bound<'_, PyAny>) -> Option<Ints<'a>> {
    let dtype = value.cast::<PyUntypedArray>().ok()?.dtype();
    Some(match (dtype.kind(), dtype.itemsize()) {
        (b'i', 4) => Ints::I32(plain_array(value)?),
        (b'i', 8) => Ints::I64(plain_array(value)?),
        (b'u', 1) => Ints::U8(plain_array(value)?),
        _ => return None,
    })
}

/// The same for floats.
fn float_array<'a>(value: &'a Bound<'_, PyAny>) -> Option<Floats<'a>> {
    let dtype = value.cast::<PyUntypedArray>().ok()?.dtype();
    Some(match (dtype.kind(), dtype.itemsize()) {
        (b'f', 4) => Floats::F32(plain_array(value)?),
        (b'f', 8) => Floats::F64(plain_array(value)?),
        _ => return None,
    })
}

/// The elements of a one-dimensional array of `T`, if it is contiguous and aligned.
fn plain_array<'a, T: numpy::Element>(value: &'a Bound<'_, PyAny>) -> Option<&'a [T]> {
    // The cast also checks the byte order.
    let array = value.cast::<PyArray1<T>>().ok()?;
    let data = array.data();
    if array.is_empty() {
        return Some(&[]);
    }
    let plain = array.is_c_contiguous() && data.is_aligned();
    // SAFETY: the cast checks the type; contiguity and alignment are checked above; `value` keeps
    // the array alive. Only Python code could free its memory, and none runs while the slice is in
    // use: see the documentation of this module.
    plain.then(|| unsafe { slice::from_raw_parts(data, array.len()) })
}

/// The error for an array that was plain in `prepare` and no longer is in `borrow`.
fn changed_error(field: Field) -> PyErr {
    ludic_error("DataError", format!("{} changed while the sample was read; pass a copy", field.describe()))
}

/// A contiguous buffer of one dimension: the one of `value`, or of a copy made by numpy.
fn plain_buffer(value: &Bound<'_, PyAny>, field: Field) -> PyResult<PyUntypedBuffer> {
    let buffer = PyUntypedBuffer::get(value).or_else(|error| {
        let Some(array) = call_array_method(value, field)? else { return Err(type_error(value, field, error)) };
        PyUntypedBuffer::get(&array).map_err(|error| type_error(value, field, error))
    })?;
    if buffer.dimensions() != 1 {
        let message = format!("{} has {} dimensions, but must have one", field.describe(), buffer.dimensions());
        return Err(ludic_error("DataTypeError", message));
    }
    if buffer.is_c_contiguous() {
        return Ok(buffer);
    }
    PyUntypedBuffer::get(&value.py().import("numpy")?.call_method1("array", (value,))?)
}

/// The array that `value.__array__()` returns, as for a tensor of torch. None if there is no such
/// method, or if it does not return an array.
fn call_array_method<'py>(value: &Bound<'py, PyAny>, field: Field) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = value.py();
    let Some(method) = value.getattr_opt(intern!(py, "__array__"))? else { return Ok(None) };
    let array = method.call0().map_err(|error| {
        let (field, actual) = (field.describe(), type_name(value));
        let message = format!("{field} is a {actual} that numpy cannot read: {}", error.value(py));
        replace_conversion_error(py, error, "DataTypeError", message)
    })?;
    Ok(array.cast::<PyUntypedArray>().is_ok().then_some(array))
}

/// The error for a value that is not a supported sequence.
fn type_error(value: &Bound<'_, PyAny>, field: Field, error: PyErr) -> PyErr {
    let py = value.py();
    let (field, actual) = (field.describe(), type_name(value));
    let mut message =
        format!("{field} is a {actual}, but must be a list, a tuple, a one-dimensional numpy array or bytes");
    if !error.is_instance_of::<PyTypeError>(py) {
        message.push_str(&format!(": {}", error.value(py)));
    }
    replace_conversion_error(py, error, "DataTypeError", message)
}

/// The type of the elements; unknown for foreign byte order, which `ElementType` does not check.
fn element_type(buffer: &PyUntypedBuffer) -> ElementType {
    let foreign: &[u8] = if cfg!(target_endian = "little") { b">!" } else { b"<" };
    match buffer.format().to_bytes() {
        [order, ..] if foreign.contains(order) => ElementType::Unknown,
        _ => ElementType::from_format(buffer.format()),
    }
}

/// The kind of an integer buffer. The width is the item size of the buffer, not of its format:
/// ctypes gives a long of eight bytes the letter of one of four.
fn int_kind(buffer: &PyUntypedBuffer) -> Option<Kind> {
    match element_type(buffer) {
        ElementType::SignedInteger { .. } => Some(Kind::Signed),
        ElementType::UnsignedInteger { .. } | ElementType::Bool => Some(Kind::Unsigned),
        _ => None,
    }
}

/// The kind of a buffer of float32 or float64.
fn float_kind(buffer: &PyUntypedBuffer) -> Option<Kind> {
    let wide = matches!(element_type(buffer), ElementType::Float { .. }) && buffer.item_size() >= 4;
    wide.then_some(Kind::Float)
}

/// The error for a buffer with elements of the wrong type.
fn element_error(buffer: &PyUntypedBuffer, field: Field, expected: &str) -> PyErr {
    let format = buffer.format().to_string_lossy();
    let field = field.describe();
    ludic_error(
        "DataTypeError",
        format!("{field} is a buffer of format {format:?}, but must hold {expected}; convert it with numpy's astype"),
    )
}
