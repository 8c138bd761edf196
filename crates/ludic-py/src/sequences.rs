//! Numbers out of Python sequences: lists element by element without an object for each, arrays and bytes through the
//! buffer protocol without touching elements.
//!
//! A list, a tuple, bytes and anything with a buffer of one dimension is read. An array that is not contiguous or not
//! aligned is copied first. Anything else, also a buffer in foreign byte order, is a `DataTypeError`.

use std::slice;

use ludic_core::{Floats, Ints};
use numpy::{PyArray1, PyArrayDescrMethods, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::buffer::{ElementType, PyUntypedBuffer};
use pyo3::exceptions::PyOverflowError;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList, PyTuple};

use crate::errors::raised;

/// What is being read, for messages.
#[derive(Clone, Copy)]
pub struct Field {
    pub name: &'static str,
    /// None when a column of all samples is read.
    pub sample: Option<usize>,
}

impl Field {
    fn at(&self, position: usize) -> String {
        format!("{}[{position}]", self.whole())
    }

    fn whole(&self) -> String {
        match self.sample {
            Some(sample) => format!("sample {sample}: {}", self.name),
            None => self.name.to_owned(),
        }
    }
}

/// Reads one field of many samples in turn; its memory is used again.
#[derive(Default)]
pub struct IntReader {
    wide: Vec<i64>,
    bits: Vec<u8>,
    buffer: Option<PyUntypedBuffer>,
}

impl IntReader {
    /// Integers of any width.
    pub fn read<'a>(&'a mut self, value: &'a Bound<'_, PyAny>, field: Field) -> PyResult<Ints<'a>> {
        if let Some(ints) = int_array(value) {
            return Ok(ints);
        }
        match as_list(value)? {
            Some(list) => {
                read_list(&list, &mut self.wide, field)?;
                Ok(Ints::I64(&self.wide))
            }
            None => int_buffer(hold(&mut self.buffer, value, field)?, field),
        }
    }

    /// Zeros and ones, which in a list are two objects known beforehand: no element is looked into.
    pub fn read_mask<'a>(&'a mut self, value: &'a Bound<'_, PyAny>, field: Field) -> PyResult<Ints<'a>> {
        match as_list(value)? {
            Some(list) if read_bits(&list, &mut self.bits) => Ok(Ints::U8(&self.bits)),
            _ => self.read(value, field),
        }
    }
}

/// The same for floats.
#[derive(Default)]
pub struct FloatReader {
    wide: Vec<f64>,
    buffer: Option<PyUntypedBuffer>,
}

impl FloatReader {
    pub fn read<'a>(&'a mut self, value: &'a Bound<'_, PyAny>, field: Field) -> PyResult<Floats<'a>> {
        if let Some(floats) = float_array(value) {
            return Ok(floats);
        }
        match as_list(value)? {
            Some(list) => {
                read_list(&list, &mut self.wide, field)?;
                Ok(Floats::F64(&self.wide))
            }
            None => float_buffer(hold(&mut self.buffer, value, field)?, field),
        }
    }
}

/// Whether `value` is a list of `length` values that all equal 1. The list counts them itself, several times as fast as they
/// can be read from outside; nearly every attention mask is such a list.
pub fn is_list_of_ones(value: &Bound<'_, PyAny>, length: usize) -> PyResult<bool> {
    match value.cast_exact::<PyList>() {
        Ok(list) if list.len() == length => {
            Ok(list.call_method1(intern!(list.py(), "count"), (1,))?.extract::<usize>()? == length)
        }
        _ => Ok(false),
    }
}

/// The list itself, or the items of a tuple as a list; None for anything else.
fn as_list<'py>(value: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyList>>> {
    if let Ok(list) = value.cast::<PyList>() {
        return Ok(Some(list.clone()));
    }
    value.cast::<PyTuple>().ok().map(|tuple| tuple.as_sequence().to_list()).transpose()
}

/// A number that a list may hold.
trait Element: Copy + Default {
    const KIND: &'static str;

    /// Reads an object of exactly the usual type. None when it is of another type, or out of range.
    ///
    /// # Safety
    /// `item` is a live object. No Python code runs.
    unsafe fn quick(item: *mut ffi::PyObject) -> Option<Self>;

    /// Reads anything that converts. Python code may run.
    fn slow(item: &Bound<'_, PyAny>) -> PyResult<Self>;
}

impl Element for i64 {
    const KIND: &'static str = "an integer";

    #[inline(always)]
    unsafe fn quick(item: *mut ffi::PyObject) -> Option<Self> {
        // SAFETY: the caller vouches for `item`; an exact int is converted without running Python code.
        unsafe {
            if ffi::Py_TYPE(item) != &raw mut ffi::PyLong_Type {
                return None;
            }
            let value = ffi::PyLong_AsLongLong(item);
            if value == -1 && !ffi::PyErr_Occurred().is_null() {
                ffi::PyErr_Clear();
                return None;
            }
            Some(value)
        }
    }

    fn slow(item: &Bound<'_, PyAny>) -> PyResult<Self> {
        item.extract()
    }
}

impl Element for f64 {
    const KIND: &'static str = "a number";

    #[inline(always)]
    unsafe fn quick(item: *mut ffi::PyObject) -> Option<Self> {
        // SAFETY: the caller vouches for `item`; an exact float is read without running Python code, and without errors.
        unsafe {
            let exact = ffi::Py_TYPE(item) == &raw mut ffi::PyFloat_Type;
            exact.then(|| ffi::PyFloat_AsDouble(item))
        }
    }

    fn slow(item: &Bound<'_, PyAny>) -> PyResult<Self> {
        item.extract()
    }
}

fn read_list<T: Element>(list: &Bound<'_, PyList>, out: &mut Vec<T>, field: Field) -> PyResult<()> {
    out.clear();
    out.resize(list.len(), T::default());
    for (position, slot) in out.iter_mut().enumerate() {
        let item = list_item(list, position)?;
        // SAFETY: the list holds a reference to `item`, and nothing runs that could take it out.
        *slot = match unsafe { T::quick(item) } {
            Some(value) => value,
            None => {
                // SAFETY: as above; from here on `item` is owned, so Python code may run.
                let item = unsafe { Bound::from_borrowed_ptr(list.py(), item) };
                T::slow(&item).map_err(|error| refused(&item, error, field, position, T::KIND))?
            }
        };
    }
    Ok(())
}

/// The item at `position`, borrowed from the list.
#[inline(always)]
fn list_item(list: &Bound<'_, PyList>, position: usize) -> PyResult<*mut ffi::PyObject> {
    // SAFETY: `list` is a list and the interpreter is attached. The bound is checked, and the result with it.
    let item = unsafe { ffi::PyList_GetItem(list.as_ptr(), position as ffi::Py_ssize_t) };
    if item.is_null() { Err(PyErr::fetch(list.py())) } else { Ok(item) }
}

/// Reads a list of which every item is the object 0, 1, False or True; false at the first that is not.
fn read_bits(list: &Bound<'_, PyList>, out: &mut Vec<u8>) -> bool {
    let py = list.py();
    let [zero, one] = [0, 1].map(|bit| PyInt::new(py, bit));
    let (zero, one) = (zero.as_ptr(), one.as_ptr());
    // SAFETY: the two are immortal statics of the interpreter.
    let (no, yes) = unsafe { (ffi::Py_False(), ffi::Py_True()) };
    out.clear();
    out.resize(list.len(), 0);
    for (position, slot) in out.iter_mut().enumerate() {
        let Ok(item) = list_item(list, position) else { return false };
        if item == one || item == yes {
            *slot = 1;
        } else if item != zero && item != no {
            return false;
        }
    }
    true
}

/// `len` of the item at `position`, without taking hold of it if it is a list.
pub fn length_at(sequences: &Bound<'_, PyList>, position: usize) -> PyResult<usize> {
    let item = list_item(sequences, position)?;
    // SAFETY: the list holds a reference to `item`; the size of an exact list is read without running Python code.
    unsafe {
        if ffi::Py_TYPE(item) == &raw mut ffi::PyList_Type {
            return Ok(ffi::PyList_Size(item) as usize);
        }
        Bound::from_borrowed_ptr(sequences.py(), item).len()
    }
}

/// A list of the items at `positions`. `PyList::new` would go through a vector of them.
pub fn picked<'py>(items: &Bound<'py, PyList>, positions: &[u32]) -> PyResult<Bound<'py, PyList>> {
    let py = items.py();
    // SAFETY: a new list, whose every slot is given an owned reference below; a list with empty slots may be dropped. The
    // index is within the list, so that nothing runs and nothing fails.
    unsafe {
        let list = Bound::from_owned_ptr_or_err(py, ffi::PyList_New(positions.len() as ffi::Py_ssize_t))?;
        for (slot, &position) in positions.iter().enumerate() {
            let item = list_item(items, position as usize)?;
            ffi::Py_IncRef(item);
            ffi::PyList_SetItem(list.as_ptr(), slot as ffi::Py_ssize_t, item);
        }
        Ok(list.cast_into_unchecked())
    }
}

fn refused(item: &Bound<'_, PyAny>, error: PyErr, field: Field, position: usize, kind: &str) -> PyErr {
    let place = field.at(position);
    let shown = item.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string());
    if error.is_instance_of::<PyOverflowError>(item.py()) {
        return raised("DataError", format!("{place} is {shown}, which does not fit in 64 bits"));
    }
    let found = item.get_type().name().map_or_else(|_| "?".to_owned(), |name| name.to_string());
    let mut refusal = format!("{place} is {shown} ({found}), but must be {kind}");
    if kind == i64::KIND {
        refusal.push_str("; convert the sequence once with list(map(int, ...)) or numpy's astype");
    }
    raised("DataTypeError", refusal)
}

/// The elements of a numpy array of one plain dimension; None for anything else, which the buffer protocol then reads or refuses.
/// The same as through the buffer, without the half microsecond that numpy takes to describe one.
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
    // SAFETY: as for `elements`, with the type checked by the cast and the array kept by `value`.
    plain.then(|| unsafe { slice::from_raw_parts(data, array.len()) })
}

/// Takes the buffer of `value`, of a copy where its layout is not plain, and keeps it until the next call.
fn hold<'a>(
    held: &'a mut Option<PyUntypedBuffer>,
    value: &Bound<'_, PyAny>,
    field: Field,
) -> PyResult<&'a PyUntypedBuffer> {
    if let Some(last) = held.take() {
        last.release(value.py());
    }
    let Ok(buffer) = PyUntypedBuffer::get(value) else {
        return Err(wrong_type(value, field));
    };
    if buffer.dimensions() != 1 {
        let found = format!("{} has {} dimensions, but must have one", field.whole(), buffer.dimensions());
        return Err(raised("DataTypeError", found));
    }
    let plain = buffer.is_c_contiguous() && buffer.buf_ptr().addr().is_multiple_of(buffer.item_size().max(1));
    if plain {
        return Ok(held.insert(buffer));
    }
    let copy = value.py().import("numpy")?.call_method1("array", (value,))?;
    Ok(held.insert(PyUntypedBuffer::get(&copy)?))
}

fn wrong_type(value: &Bound<'_, PyAny>, field: Field) -> PyErr {
    let found = value.get_type().name().map_or_else(|_| "?".to_owned(), |name| name.to_string());
    let place = field.whole();
    raised(
        "DataTypeError",
        format!("{place} is a {found}, but must be a list, a tuple, a one-dimensional numpy array or bytes"),
    )
}

/// The elements of a contiguous, aligned buffer.
fn elements<T>(buffer: &PyUntypedBuffer) -> &[T] {
    let count = buffer.len_bytes() / size_of::<T>();
    if count == 0 {
        return &[];
    }
    // SAFETY: `hold` made sure of contiguity and alignment, the caller of the width of the elements; `buffer` keeps the
    // memory. The interpreter stays attached, and the slice is read only after the last field has been converted, when no
    // more Python code runs.
    unsafe { slice::from_raw_parts(buffer.buf_ptr().cast(), count) }
}

/// What the buffer holds; unknown in foreign byte order, which `ElementType` does not look at.
fn element_type(buffer: &PyUntypedBuffer) -> ElementType {
    let foreign: &[u8] = if cfg!(target_endian = "little") { b">!" } else { b"<" };
    match buffer.format().to_bytes() {
        [order, ..] if foreign.contains(order) => ElementType::Unknown,
        _ => ElementType::from_format(buffer.format()),
    }
}

fn int_buffer(buffer: &PyUntypedBuffer, field: Field) -> PyResult<Ints<'_>> {
    match (element_type(buffer), buffer.item_size()) {
        (ElementType::SignedInteger { bytes: 1 }, 1) => Ok(Ints::I8(elements(buffer))),
        (ElementType::SignedInteger { bytes: 2 }, 2) => Ok(Ints::I16(elements(buffer))),
        (ElementType::SignedInteger { bytes: 4 }, 4) => Ok(Ints::I32(elements(buffer))),
        (ElementType::SignedInteger { bytes: 8 }, 8) => Ok(Ints::I64(elements(buffer))),
        (ElementType::UnsignedInteger { bytes: 1 } | ElementType::Bool, 1) => Ok(Ints::U8(elements(buffer))),
        (ElementType::UnsignedInteger { bytes: 2 }, 2) => Ok(Ints::U16(elements(buffer))),
        (ElementType::UnsignedInteger { bytes: 4 }, 4) => Ok(Ints::U32(elements(buffer))),
        (ElementType::UnsignedInteger { bytes: 8 }, 8) => Ok(Ints::U64(elements(buffer))),
        _ => Err(wrong_elements(buffer, field, "integers in native byte order")),
    }
}

fn float_buffer(buffer: &PyUntypedBuffer, field: Field) -> PyResult<Floats<'_>> {
    match (element_type(buffer), buffer.item_size()) {
        (ElementType::Float { bytes: 4 }, 4) => Ok(Floats::F32(elements(buffer))),
        (ElementType::Float { bytes: 8 }, 8) => Ok(Floats::F64(elements(buffer))),
        _ => Err(wrong_elements(buffer, field, "float32 or float64 in native byte order")),
    }
}

fn wrong_elements(buffer: &PyUntypedBuffer, field: Field, wanted: &str) -> PyErr {
    let format = buffer.format().to_string_lossy();
    let place = field.whole();
    raised(
        "DataTypeError",
        format!("{place} is a buffer of format {format:?}, but must hold {wanted}; convert it with numpy's astype"),
    )
}
