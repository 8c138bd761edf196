//! Numpy arrays for the output of one collation: new ones, or the buffers of an `Arena`.

use std::collections::HashMap;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::slice;

use ludic_core::CoreError;
use numpy::ndarray::{ArrayView, Dimension, IntoDimension};
use numpy::npyffi::{PY_ARRAY_API, npy_intp};
use numpy::{Element, PyArray, PyArray1, PyArrayDescrMethods, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::arguments::Count;
use crate::errors::{Result, ludic_error};

/// The largest number of slots. Each holds the arrays of one collation.
const MAX_SLOTS: i64 = 1024;

/// Output buffers that are reused in turn. An array is overwritten `slots` collations after it was
/// returned. For one thread at a time.
///
/// Nothing in `ludic` uses it yet; it is for data-parallel training.
#[pyclass(module = "ludic._core")]
pub struct Arena {
    slots: Vec<Buffers>,
    next: usize,
}

/// The memory of one collation, by the name of the array.
type Buffers = HashMap<String, Py<PyArray1<u64>>>;

#[pymethods]
impl Arena {
    #[new]
    #[pyo3(signature = (slots = Count(2)), text_signature = "(slots=2)")]
    fn new(slots: Count) -> Result<Self> {
        if !(1..=MAX_SLOTS).contains(&slots.0) {
            let (name, least, most) = ("slots", 1, MAX_SLOTS);
            return Err(CoreError::OutOfRange { name, value: slots.0, least, most }.into());
        }
        Ok(Self { slots: (0..slots.0).map(|_| HashMap::new()).collect(), next: 0 })
    }

    fn __repr__(&self) -> String {
        format!("Arena(slots={})", self.slots.len())
    }
}

/// The arena, borrowed for this collation. Raises ConfigError while another thread uses it.
pub fn lock_arena<'py>(arena: Option<&Bound<'py, Arena>>) -> PyResult<Option<PyRefMut<'py, Arena>>> {
    let lock = |arena: &Bound<'py, Arena>| {
        let message = "the arena is in use by another thread; give each thread an arena of its own";
        arena.try_borrow_mut().map_err(|_| ludic_error("ConfigError", message.to_owned()))
    };
    arena.map(lock).transpose()
}

/// Allocates the arrays of one collation and collects them by name.
pub struct Outputs<'py, 'a> {
    pub arrays: Bound<'py, PyDict>,
    reused: Option<&'a mut Buffers>,
}

impl<'py, 'a> Outputs<'py, 'a> {
    pub fn new(py: Python<'py>, arena: Option<&'a mut Arena>) -> Self {
        let reused = arena.map(|arena| {
            let slot = arena.next;
            arena.next = (slot + 1) % arena.slots.len();
            &mut arena.slots[slot]
        });
        Self { arrays: PyDict::new(py), reused }
    }

    /// Adds an array under `name` and returns its memory. The caller must write all of it before
    /// the dictionary is returned to Python.
    pub fn array<T: Element + Copy, D: IntoDimension>(
        &mut self,
        name: &str,
        shape: D,
    ) -> PyResult<&'a mut [MaybeUninit<T>]> {
        let py = self.arrays.py();
        let shape = shape.into_dimension();
        let count = shape.size();
        let array: Bound<'py, PyArray<T, D::Dim>> = match &mut self.reused {
            // Every element is written before Python sees the array.
            None => allocate(py, shape, Fill::Nothing)?,
            Some(buffers) => {
                let base = buffer_for(py, buffers, name, (count * size_of::<T>()).div_ceil(size_of::<u64>()))?;
                // SAFETY: the base has room for `count` elements, is aligned for any of them, is
                // never reallocated, and lives as long as the array, whose base it is.
                unsafe {
                    let view = ArrayView::from_shape_ptr(shape, base.data().cast_const().cast::<T>());
                    PyArray::borrow_from_array(&view, base.into_any())
                }
            }
        };
        let memory = array.data().cast::<MaybeUninit<T>>();
        self.arrays.set_item(PyString::intern(py, name), array)?;
        // SAFETY: the dictionary keeps the array alive, Python cannot reach it before the collation
        // ends, and each name has its own memory.
        Ok(unsafe { slice::from_raw_parts_mut(memory, count) })
    }
}

/// The buffer under `name`, with room for `words`. If the present one is too small, a new one takes
/// its place, and arrays that were returned earlier keep the old one.
///
/// A buffer of 4 words serves `words` 3 and 4. For `words` 5 a new one of `5 + 5 / 4 = 6` is made.
fn buffer_for<'py>(
    py: Python<'py>,
    buffers: &mut Buffers,
    name: &str,
    words: usize,
) -> PyResult<Bound<'py, PyArray1<u64>>> {
    match buffers.get(name) {
        Some(buffer) if buffer.bind(py).len() >= words => Ok(buffer.bind(py).clone()),
        _ => {
            let buffer = allocate(py, [words + words / 4].into_dimension(), Fill::Zeros)?;
            buffers.insert(name.to_owned(), buffer.clone().unbind());
            Ok(buffer)
        }
    }
}

/// The initial values of a new array.
enum Fill {
    Nothing,
    Zeros,
}

/// A new array, or numpy's MemoryError. The constructors of the numpy crate panic if there is not
/// enough memory.
fn allocate<'py, T: Element, D: Dimension>(
    py: Python<'py>,
    shape: D,
    fill: Fill,
) -> PyResult<Bound<'py, PyArray<T, D>>> {
    let mut sizes: Vec<npy_intp> = shape.slice().iter().map(|&size| size as npy_intp).collect();
    let (rank, sizes, dtype) = (sizes.len() as c_int, sizes.as_mut_ptr(), T::get_dtype(py).into_dtype_ptr());
    // SAFETY: `sizes` has `rank` values, numpy takes over the reference to the type, and what it
    // returns is a new reference to an array of that type and rank, or null with an error set.
    unsafe {
        let array = match fill {
            Fill::Nothing => PY_ARRAY_API.PyArray_Empty(py, rank, sizes, dtype, 0),
            Fill::Zeros => PY_ARRAY_API.PyArray_Zeros(py, rank, sizes, dtype, 0),
        };
        Ok(Bound::from_owned_ptr_or_err(py, array)?.cast_into_unchecked())
    }
}
