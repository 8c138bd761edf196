//! Reads Python lists element by element, without creating an object for each.

use pyo3::exceptions::{PyMemoryError, PyOverflowError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyList, PyRange, PyTuple};

use crate::errors::{is_recoverable, replace_conversion_error};
use crate::fields::{Field, repr_of, type_name};

/// Whether `value` is a list of `length` values that all equal 1, as nearly every attention mask
/// is. The list counts them itself, which is several times as fast as reading them.
pub fn is_list_of_ones(value: &Bound<'_, PyAny>, length: usize) -> PyResult<bool> {
    match value.cast_exact::<PyList>() {
        Ok(list) if list.len() == length => match list.call_method1(intern!(list.py(), "count"), (1,)) {
            Ok(count) => Ok(count.extract::<usize>()? == length),
            // An element that cannot be compared is reported when the list is read.
            Err(error) if is_recoverable(&error, list.py()) => Ok(false),
            Err(error) => Err(error),
        },
        _ => Ok(false),
    }
}

/// The list itself, or a list of the items of a tuple or a range. None for anything else.
pub fn as_list<'py>(value: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyList>>> {
    if let Ok(list) = value.cast::<PyList>() {
        return Ok(Some(list.clone()));
    }
    if let Ok(tuple) = value.cast::<PyTuple>() {
        return Ok(Some(tuple.as_sequence().to_list()?));
    }
    match value.cast::<PyRange>() {
        // Python's `list` raises a MemoryError for a range that is too large.
        Ok(range) => Ok(Some(range.py().get_type::<PyList>().call1((range,))?.cast_into()?)),
        Err(_) => Ok(None),
    }
}

/// A number that a list may hold.
pub trait Element: Copy + Default {
    const KIND: &'static str;

    /// Reads an object of exactly the type `int` or `float`. None if it has another type or is out
    /// of range. Runs no Python code.
    ///
    /// # Safety
    /// `item` must be a live object.
    unsafe fn read_exact(item: *mut ffi::PyObject) -> Option<Self>;

    /// Converts an object of any type. Python code may run.
    fn convert(item: &Bound<'_, PyAny>) -> PyResult<Self>;
}

impl Element for i64 {
    const KIND: &'static str = "an integer";

    #[inline(always)]
    unsafe fn read_exact(item: *mut ffi::PyObject) -> Option<Self> {
        // SAFETY: the caller guarantees `item`. Converting an exact int runs no Python code.
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

    fn convert(item: &Bound<'_, PyAny>) -> PyResult<Self> {
        item.extract()
    }
}

impl Element for f64 {
    const KIND: &'static str = "a number";

    #[inline(always)]
    unsafe fn read_exact(item: *mut ffi::PyObject) -> Option<Self> {
        // SAFETY: the caller guarantees `item`. Reading an exact float runs no Python code and
        // cannot fail.
        unsafe {
            let exact = ffi::Py_TYPE(item) == &raw mut ffi::PyFloat_Type;
            exact.then(|| ffi::PyFloat_AsDouble(item))
        }
    }

    fn convert(item: &Bound<'_, PyAny>) -> PyResult<Self> {
        item.extract()
    }
}

/// Reads all items of the list into `out`, which is cleared first.
pub fn read_list<T: Element>(list: &Bound<'_, PyList>, out: &mut Vec<T>, field: Field) -> PyResult<()> {
    out.clear();
    reserve(out, list.len(), field)?;
    out.resize(list.len(), T::default());
    for (position, slot) in out.iter_mut().enumerate() {
        let item = list_item(list, position)?;
        // SAFETY: the list holds a reference to `item`, and no code runs that could remove it.
        *slot = match unsafe { T::read_exact(item) } {
            Some(value) => value,
            None => {
                // SAFETY: as above. From here on `item` is owned, so that Python code may run.
                let item = unsafe { Bound::from_borrowed_ptr(list.py(), item) };
                if field.holds_indices && item.is_instance_of::<PyBool>() {
                    return Err(field.mask_error(&format!("a list with {item} at {position}")));
                }
                T::convert(&item).map_err(|error| item_error(&item, error, field, position, T::KIND))?
            }
        };
    }
    Ok(())
}

/// The item at `position`, borrowed from the list.
#[inline(always)]
fn list_item(list: &Bound<'_, PyList>, position: usize) -> PyResult<*mut ffi::PyObject> {
    // SAFETY: `list` is a list and the interpreter is attached. `PyList_GetItem` checks the bounds
    // and returns null outside them.
    let item = unsafe { ffi::PyList_GetItem(list.as_ptr(), position as ffi::Py_ssize_t) };
    if item.is_null() { Err(PyErr::fetch(list.py())) } else { Ok(item) }
}

/// Reads a list in which every item is the object 0, 1, False or True. Returns false at the first
/// item that is none of them.
pub fn read_bits(list: &Bound<'_, PyList>, out: &mut Vec<u8>, field: Field) -> PyResult<bool> {
    let py = list.py();
    let [zero, one] = [0, 1].map(|bit| PyInt::new(py, bit));
    let (zero, one) = (zero.as_ptr(), one.as_ptr());
    // SAFETY: both are immortal statics of the interpreter.
    let (false_, true_) = unsafe { (ffi::Py_False(), ffi::Py_True()) };
    out.clear();
    reserve(out, list.len(), field)?;
    out.resize(list.len(), 0);
    for (position, slot) in out.iter_mut().enumerate() {
        let item = list_item(list, position)?;
        if item == one || item == true_ {
            *slot = 1;
        } else if item != zero && item != false_ {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Reserves memory for `count` values. Returns an error where a plain push would end the process.
pub fn reserve<T>(values: &mut Vec<T>, count: usize, field: Field) -> PyResult<()> {
    let field = field.describe();
    values
        .try_reserve(count)
        .map_err(|_| PyMemoryError::new_err(format!("not enough memory to read the {count} values of {field}")))
}

/// The `len` of the item at `position`. Takes no reference to the item if it is a list.
pub fn length_at(sequences: &Bound<'_, PyList>, position: usize) -> PyResult<usize> {
    let item = list_item(sequences, position)?;
    // SAFETY: the list holds a reference to `item`. Reading the size of an exact list runs no
    // Python code.
    unsafe {
        if ffi::Py_TYPE(item) == &raw mut ffi::PyList_Type {
            return Ok(ffi::PyList_Size(item) as usize);
        }
        Bound::from_borrowed_ptr(sequences.py(), item).len()
    }
}

/// A list of the items at `positions`. `PyList::new` would need a vector of the items first.
pub fn pick_items<'py>(items: &Bound<'py, PyList>, positions: &[u32]) -> PyResult<Bound<'py, PyList>> {
    let py = items.py();
    // SAFETY: the list is new, and every slot is filled below with an owned reference. A list with
    // empty slots may be dropped. Setting an item within the list runs no code and cannot fail.
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

/// The error for an item that cannot be converted to `kind`.
fn item_error(item: &Bound<'_, PyAny>, error: PyErr, field: Field, position: usize, kind: &str) -> PyErr {
    let (element, value) = (field.describe_element(position), repr_of(item));
    if error.is_instance_of::<PyOverflowError>(item.py()) {
        return replace_conversion_error(
            item.py(),
            error,
            "DataError",
            format!("{element} is {value}, which does not fit in 64 bits"),
        );
    }
    let mut message = format!("{element} is {value} ({}), but must be {kind}", type_name(item));
    if field.holds_indices {
        message.push_str(" that counts from 0; for a mask use np.flatnonzero(mask)");
    } else if kind == i64::KIND {
        message.push_str("; convert the sequence once with list(map(int, ...)) or numpy's astype");
    }
    replace_conversion_error(item.py(), error, "DataTypeError", message)
}
