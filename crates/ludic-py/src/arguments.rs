//! Arguments read at the border: wrong types are refused here, wrong values by the core.

use numpy::{PyReadonlyArray1, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;

use crate::errors::raised;

/// An integer of any size. Beyond 64 bits it stands for the largest: no sum of lengths reaches it.
#[derive(Clone, Copy)]
pub struct Count(pub i64);

impl<'py> FromPyObject<'_, 'py> for Count {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match value.extract::<i64>() {
            Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => {
                Ok(Self(if value.lt(0)? { i64::MIN } else { i64::MAX }))
            }
            found => found.map(Self),
        }
    }
}

/// Up to that many lengths are planned where they are, with the interpreter attached: no thread waits for longer than it
/// would for another that computes (5 ms), and the copy, whose memory is new each time, costs as much as the sort.
const IN_PLACE: usize = 1 << 19;

/// An int32 vector.
pub struct Lengths<'py>(PyReadonlyArray1<'py, i32>);

impl Lengths<'_> {
    /// Plans, in place or on a copy with the interpreter released.
    pub fn plan<T: Send>(&self, py: Python<'_>, plan: impl FnOnce(&[i32]) -> T + Send) -> T {
        match self.0.as_slice() {
            Ok(lengths) if lengths.len() <= IN_PLACE => plan(lengths),
            _ => {
                let copy: Vec<i32> = self.0.as_array().iter().copied().collect();
                py.detach(|| plan(&copy))
            }
        }
    }
}

impl<'py> FromPyObject<'_, 'py> for Lengths<'py> {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let Ok(array) = value.extract::<PyReadonlyArray1<'py, i32>>() else {
            let found = described(&value)?;
            return Err(raised(
                "DataTypeError",
                format!(
                    "lengths must be a one-dimensional int32 array, not {found}; use np.asarray(lengths, np.int32)"
                ),
            ));
        };
        Ok(Self(array))
    }
}

/// "a 2-dimensional float64 array", or the name of the type.
pub fn described(value: &Bound<'_, PyAny>) -> PyResult<String> {
    match value.cast::<PyUntypedArray>() {
        Ok(array) => Ok(format!("a {}-dimensional {} array", array.ndim(), array.dtype().str()?)),
        Err(_) => Ok(value.get_type().name()?.to_string()),
    }
}
