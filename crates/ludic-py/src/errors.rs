//! Converts errors of the core to the exception classes of `ludic.errors`.

use ludic_core::bytes::TableBytesError;
use ludic_core::delta::DeltaError;
use ludic_core::{CoreError, ErrorKind};
use pyo3::exceptions::{
    PyAttributeError, PyBufferError, PyException, PyMemoryError, PyOverflowError, PyTypeError, PyValueError,
};
use pyo3::prelude::*;
use pyo3::types::PyType;

/// An error of the core, or an exception that Python raised during the call.
pub enum Error {
    Core(CoreError),
    Python(PyErr),
}

pub type Result<T> = std::result::Result<T, Error>;

impl From<CoreError> for Error {
    fn from(error: CoreError) -> Self {
        Self::Core(error)
    }
}

impl From<TableBytesError> for Error {
    fn from(error: TableBytesError) -> Self {
        Self::Python(core_error(error.kind(), error.to_string()))
    }
}

impl From<DeltaError> for Error {
    fn from(error: DeltaError) -> Self {
        Self::Python(core_error(ErrorKind::Data, error.to_string()))
    }
}

impl From<PyErr> for Error {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        match error {
            Error::Core(error) => core_error(error.kind(), error.to_string()),
            Error::Python(error) => error,
        }
    }
}

/// An exception of the class for errors of this kind.
fn core_error(kind: ErrorKind, message: String) -> PyErr {
    match kind {
        ErrorKind::Budget => ludic_error("BudgetError", message),
        ErrorKind::Setting => ludic_error("ConfigError", message),
        ErrorKind::Data => ludic_error("DataError", message),
        ErrorKind::Memory => PyMemoryError::new_err(message),
    }
}

/// Whether the caller may go on after the error: not after an interrupt or a lack of memory.
pub fn is_recoverable(error: &PyErr, py: Python<'_>) -> bool {
    error.is_instance_of::<PyException>(py) && !error.is_instance_of::<PyMemoryError>(py)
}

/// Whether the error is one that Python raises for a value of the wrong type or out of range. Other
/// errors come from the code of the object.
fn is_conversion_error(error: &PyErr, py: Python<'_>) -> bool {
    error.is_instance_of::<PyTypeError>(py)
        || error.is_instance_of::<PyValueError>(py)
        || error.is_instance_of::<PyAttributeError>(py)
        || error.is_instance_of::<PyOverflowError>(py)
        || error.is_instance_of::<PyBufferError>(py)
}

/// Replaces a conversion error with one of `ludic.errors` that has the original as its cause.
/// Returns any other error unchanged: an error of the object's own code is never replaced.
pub fn replace_conversion_error(py: Python<'_>, error: PyErr, class: &str, message: String) -> PyErr {
    if !is_conversion_error(&error, py) {
        return error;
    }
    let replacement = ludic_error(class, message);
    replacement.set_cause(py, Some(error));
    replacement
}

/// An exception of the class of `ludic.errors` with this name.
pub fn ludic_error(class: &str, message: String) -> PyErr {
    Python::attach(|py| {
        let attribute = py.import("ludic.errors").and_then(|module| module.getattr(class));
        match attribute.and_then(|class| Ok(class.cast_into::<PyType>()?)) {
            Ok(class) => PyErr::from_type(class, message),
            Err(error) => error,
        }
    })
}
