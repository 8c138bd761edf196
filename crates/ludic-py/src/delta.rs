//! Deltas of tensors, whose bytes are numpy arrays. They are read and written in place, with the
//! interpreter released if they are large: the caller lets no other thread write to them.

use ludic_core::delta::{apply, encode};
use numpy::{IntoPyArray, PyArray1, PyArrayMethods, PyReadonlyArray1};
use pyo3::prelude::*;

use crate::arguments::{describe_array, read_array, run_detached};
use crate::errors::{Result, ludic_error};

/// Bytes that take as long as a token of a table.
const BYTES_OF_A_TOKEN: usize = 9;

/// The change from `base` to `new` as bytes, or None if no bit differs.
#[pyfunction]
pub fn encode_delta<'py>(
    py: Python<'py>,
    base: &Bound<'py, PyAny>,
    new: &Bound<'py, PyAny>,
    width: usize,
) -> Result<Option<Bound<'py, PyArray1<u8>>>> {
    let (base, new) = (read_array::<u8>("base", base)?, read_array::<u8>("new", new)?);
    let (base, new) = (bytes_of("base", &base)?, bytes_of("new", &new)?);
    let delta = run_detached(py, new.len() / BYTES_OF_A_TOKEN, || encode(base, new, width))?;
    Ok(delta.map(|delta| delta.into_pyarray(py)))
}

/// Applies a delta to the bytes of a tensor, in place.
#[pyfunction]
pub fn apply_delta(py: Python<'_>, target: &Bound<'_, PyAny>, delta: &Bound<'_, PyAny>, width: usize) -> Result<()> {
    let refused = |problem: &str| {
        ludic_error(
            "DataTypeError",
            format!("target must be a contiguous uint8 array that may be written, not {problem}"),
        )
    };
    let Ok(array) = target.cast::<PyArray1<u8>>() else { return Err(refused(&describe_array(target)?).into()) };
    let mut target = array.try_readwrite().map_err(|error| refused(&error.to_string()))?;
    let target = target.as_slice_mut().map_err(|_| refused("one with gaps"))?;
    let delta = read_array::<u8>("delta", delta)?;
    let delta = bytes_of("delta", &delta)?;
    Ok(run_detached(py, delta.len() / BYTES_OF_A_TOKEN, || apply(target, delta, width))?)
}

fn bytes_of<'a>(name: &str, array: &'a PyReadonlyArray1<'_, u8>) -> PyResult<&'a [u8]> {
    let message = format!("{name} must be contiguous; use np.ascontiguousarray({name})");
    array.as_slice().map_err(|_| ludic_error("DataTypeError", message))
}
