//! Tables as bytes, written and read with the interpreter released if they are large.

use ludic_core::SampleTable;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::run_detached;
use crate::errors::{Error, Result, replace_conversion_error};
use crate::fields::type_name;

/// The bytes of a token: id, action mask and log-probability.
const TOKEN_BYTES: usize = 9;

/// The bytes of the table.
pub fn write<'py>(py: Python<'py>, table: &SampleTable) -> Result<Bound<'py, PyBytes>> {
    let encoded = table.encode();
    // No other code has the new object yet, so its memory may be written without the interpreter.
    Ok(PyBytes::new_with(py, encoded.size(), |out| {
        run_detached(py, table.num_tokens(), || encoded.write(out)).map_err(|error| Error::from(error).into())
    })?)
}

/// The table in a `bytes` object, which is read in place, or in another buffer, which is copied
/// first: its memory could change or be freed while the interpreter is released.
pub fn read(buffer: &Bound<'_, PyAny>) -> Result<SampleTable> {
    let py = buffer.py();
    let read = |bytes: &[u8]| run_detached(py, bytes.len() / TOKEN_BYTES, || SampleTable::from_bytes(bytes));
    if let Ok(bytes) = buffer.cast::<PyBytes>() {
        return Ok(read(bytes.as_bytes())?);
    }
    let view = PyBuffer::<u8>::get(buffer).map_err(|error| {
        let actual = type_name(buffer);
        let message = format!(
            "a table cannot be read from a {actual}: pass bytes, or another buffer of bytes: {}",
            error.value(py)
        );
        replace_conversion_error(py, error, "DataTypeError", message)
    })?;
    let copy = view.to_vec(py)?;
    drop(view);
    Ok(read(&copy)?)
}
