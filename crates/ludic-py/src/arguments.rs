//! Reads arguments from Python. Wrong types are refused here, wrong values by the core.

use ludic_core::balance::Packing;
use numpy::{Element, PyReadonlyArray1, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;

use crate::errors::ludic_error;

/// An integer of any size, clamped to 64 bits. No sum of lengths reaches the largest.
#[derive(Clone, Copy)]
pub struct Count(pub i64);

impl<'py> FromPyObject<'_, 'py> for Count {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match value.extract::<i64>() {
            Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => {
                Ok(Self(if value.lt(0)? { i64::MIN } else { i64::MAX }))
            }
            result => result.map(Self),
        }
    }
}

/// The largest number of lengths for which each planner runs in place, with the interpreter
/// attached. For a small plan, a copy and the wait for the interpreter afterwards take longer than
/// the plan.
///
/// Another thread must not wait longer for a plan than Python's switch interval (5 ms). So these
/// are the largest powers of two at which each planner took less than 4 ms of thread time (least of
/// three) on an EPYC, whatever the lengths (lognormal around 512, uniform to 2**16 and to 2**31),
/// the budget (1, 4 and 64 times the longest) and the ranks (1 to 1000).
pub struct InPlace;

impl InPlace {
    pub const GREEDY: usize = 1 << 18;
    pub const OPTIMAL: usize = 1 << 16;
    pub const PADDING_FREE: usize = 1 << 15;
    /// For greedy and for optimal plans.
    pub const PAIRS: usize = 1 << 16;

    pub fn ranks(packing: Packing) -> usize {
        match packing {
            Packing::Greedy => 1 << 15,
            Packing::Optimal => 1 << 7,
            Packing::PaddingFree => 1 << 11,
        }
    }
}

/// Up to this many tokens are collated, written or read with the interpreter attached, which takes well under a
/// millisecond. A thread that releases the interpreter may wait 5 ms to get it back.
const ATTACHED_TOKENS: usize = 1 << 18;

/// Runs `work` on `tokens` tokens. Releases the interpreter if there are many.
pub fn run_detached<T: Send>(py: Python<'_>, tokens: usize, work: impl FnOnce() -> T + Send) -> T {
    if tokens <= ATTACHED_TOKENS { work() } else { py.detach(work) }
}

/// An int32 vector.
pub struct Lengths<'py>(PyReadonlyArray1<'py, i32>);

impl Lengths<'_> {
    /// Runs `plan` in place for up to `in_place` lengths, otherwise on a copy with the interpreter
    /// released.
    pub fn plan<T: Send>(&self, py: Python<'_>, in_place: usize, plan: impl FnOnce(&[i32]) -> T + Send) -> T {
        match self.0.as_slice() {
            Ok(lengths) if lengths.len() <= in_place => plan(lengths),
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
            let actual = describe_array(&value)?;
            return Err(ludic_error(
                "DataTypeError",
                format!(
                    "lengths must be a one-dimensional int32 array, not {actual}; use np.asarray(lengths, np.int32)"
                ),
            ));
        };
        Ok(Self(array))
    }
}

/// The argument `name` as an array of one dimension with elements of `T`: float64 or int64.
pub fn read_array<'py, T: Element>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<PyReadonlyArray1<'py, T>> {
    if let Ok(array) = value.extract::<PyReadonlyArray1<'py, T>>() {
        return Ok(array);
    }
    let (kind, actual) = (T::get_dtype(value.py()).to_string(), describe_array(value)?);
    let message =
        format!("{name} must be a one-dimensional {kind} array, not {actual}; use np.asarray({name}, np.{kind})");
    Err(ludic_error("DataTypeError", message))
}

/// For messages: "a 2-dimensional float64 array", or the name of the type if it is not an array.
pub fn describe_array(value: &Bound<'_, PyAny>) -> PyResult<String> {
    match value.cast::<PyUntypedArray>() {
        Ok(array) => Ok(format!("a {}-dimensional {} array", array.ndim(), array.dtype().str()?)),
        Err(_) => Ok(value.get_type().name()?.to_string()),
    }
}
