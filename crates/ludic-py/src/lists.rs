//! Lists, element by element without an object for each.

use pyo3::exceptions::{PyMemoryError, PyOverflowError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyList, PyRange, PyTuple};

use crate::errors::{is_error_of_the_value, refusal};
use crate::fields::{Field, kind_of};

/// Whether `value` is a list of `length` values that all equal 1. The list counts them itself,
/// several times as fast as they can be read from outside; nearly every attention mask is such a
/// list.
pub fn is_list_of_ones(value: &Bound<'_, PyAny>, length: usize) -> PyResult<bool> {
    match value.cast_exact::<PyList>() {
        Ok(list) if list.len() == length => match list.call_method1(intern!(list.py(), "count"), (1,)) {
            Ok(count) => Ok(count.extract::<usize>()? == length),
            // An element that cannot be compared is named by whoever reads the list.
            Err(error) if is_error_of_the_value(&error, list.py()) => Ok(false),
            Err(error) => Err(error),
        },
        _ => Ok(false),
    }
}

/// The list itself, or the items of a tuple or a range as a list; None for anything else.
pub fn as_list<'py>(value: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyList>>> {
    if let Ok(list) = value.cast::<PyList>() {
        return Ok(Some(list.clone()));
    }
    if let Ok(tuple) = value.cast::<PyTuple>() {
        return Ok(Some(tuple.as_sequence().to_list()?));
    }
    match value.cast::<PyRange>() {
        // Python's own list, which raises a MemoryError for a range that no memory holds.
        Ok(range) => Ok(Some(range.py().get_type::<PyList>().call1((range,))?.cast_into()?)),
        Err(_) => Ok(None),
    }
}

/// A number that a list may hold.
pub trait Element: Copy + Default {
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
        // SAFETY: the caller vouches for `item`; an exact int is converted without running Python
        // code.
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
        // SAFETY: the caller vouches for `item`; an exact float is read without running Python
        // code, and without errors.
        unsafe {
            let exact = ffi::Py_TYPE(item) == &raw mut ffi::PyFloat_Type;
            exact.then(|| ffi::PyFloat_AsDouble(item))
        }
    }

    fn slow(item: &Bound<'_, PyAny>) -> PyResult<Self> {
        item.extract()
    }
}

pub fn read_list<T: Element>(list: &Bound<'_, PyList>, out: &mut Vec<T>, field: Field) -> PyResult<()> {
    out.clear();
    reserve(out, list.len(), field)?;
    out.resize(list.len(), T::default());
    for (position, slot) in out.iter_mut().enumerate() {
        let item = list_item(list, position)?;
        // SAFETY: the list holds a reference to `item`, and nothing runs that could take it out.
        *slot = match unsafe { T::quick(item) } {
            Some(value) => value,
            None => {
                // SAFETY: as above; from here on `item` is owned, so Python code may run.
                let item = unsafe { Bound::from_borrowed_ptr(list.py(), item) };
                if field.places && item.is_instance_of::<PyBool>() {
                    return Err(field.no_mask(&format!("a list with {item} at {position}")));
                }
                T::slow(&item).map_err(|error| refused(&item, error, field, position, T::KIND))?
            }
        };
    }
    Ok(())
}

/// The item at `position`, borrowed from the list.
#[inline(always)]
fn list_item(list: &Bound<'_, PyList>, position: usize) -> PyResult<*mut ffi::PyObject> {
    // SAFETY: `list` is a list and the interpreter is attached. The bound is checked, and the
    // result with it.
    let item = unsafe { ffi::PyList_GetItem(list.as_ptr(), position as ffi::Py_ssize_t) };
    if item.is_null() { Err(PyErr::fetch(list.py())) } else { Ok(item) }
}

/// Reads a list of which every item is the object 0, 1, False or True; false at the first that is
/// not.
pub fn read_bits(list: &Bound<'_, PyList>, out: &mut Vec<u8>, field: Field) -> PyResult<bool> {
    let py = list.py();
    let [zero, one] = [0, 1].map(|bit| PyInt::new(py, bit));
    let (zero, one) = (zero.as_ptr(), one.as_ptr());
    // SAFETY: the two are immortal statics of the interpreter.
    let (no, yes) = unsafe { (ffi::Py_False(), ffi::Py_True()) };
    out.clear();
    reserve(out, list.len(), field)?;
    out.resize(list.len(), 0);
    for (position, slot) in out.iter_mut().enumerate() {
        let item = list_item(list, position)?;
        if item == one || item == yes {
            *slot = 1;
        } else if item != zero && item != no {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Room in a reader, or an error in place of the end of the process.
pub fn reserve<T>(values: &mut Vec<T>, count: usize, field: Field) -> PyResult<()> {
    let place = field.whole();
    values
        .try_reserve(count)
        .map_err(|_| PyMemoryError::new_err(format!("no memory to read the {count} values of {place}")))
}

/// `len` of the item at `position`, without taking hold of it if it is a list.
pub fn length_at(sequences: &Bound<'_, PyList>, position: usize) -> PyResult<usize> {
    let item = list_item(sequences, position)?;
    // SAFETY: the list holds a reference to `item`; the size of an exact list is read without
    // running Python code.
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
    // SAFETY: a new list, whose every slot is given an owned reference below; a list with empty
    // slots may be dropped. The index is within the list, so that nothing runs and nothing fails.
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
        return refusal(item.py(), error, "DataError", format!("{place} is {shown}, which does not fit in 64 bits"));
    }
    let found = kind_of(item);
    let mut message = format!("{place} is {shown} ({found}), but must be {kind}");
    if field.places {
        message.push_str(" that counts from 0; for a mask take np.flatnonzero(mask)");
    } else if kind == i64::KIND {
        message.push_str("; convert the sequence once with list(map(int, ...)) or numpy's astype");
    }
    refusal(item.py(), error, "DataTypeError", message)
}
