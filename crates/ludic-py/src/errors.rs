//! What the core refuses, raised as the classes of `ludic.errors`.

use ludic_core::{CoreError, ErrorKind};
use pyo3::exceptions::{
    PyAttributeError, PyBufferError, PyException, PyMemoryError, PyOverflowError, PyTypeError, PyValueError,
};
use pyo3::prelude::*;
use pyo3::types::PyType;

/// Why a call failed: an error of the core, or one raised by Python on the way.
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

impl From<PyErr> for Error {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        match error {
            Error::Core(error) => raised_as(error.kind(), error.to_string()),
            Error::Python(error) => error,
        }
    }
}

/// An instance of the class for errors of this kind.
fn raised_as(kind: ErrorKind, message: String) -> PyErr {
    match kind {
        ErrorKind::Budget => raised("BudgetError", message),
        ErrorKind::Setting => raised("ConfigError", message),
        ErrorKind::Data => raised("DataError", message),
        ErrorKind::Memory => PyMemoryError::new_err(message),
    }
}

/// Whether something went wrong with a value, and not with the process, as by an interrupt or for
/// want of memory.
pub fn is_error_of_the_value(error: &PyErr, py: Python<'_>) -> bool {
    error.is_instance_of::<PyException>(py) && !error.is_instance_of::<PyMemoryError>(py)
}

/// Whether Python says that a value is not what was asked for. An error of the object's own code is
/// not that, and is never replaced.
fn is_refusal(error: &PyErr, py: Python<'_>) -> bool {
    error.is_instance_of::<PyTypeError>(py)
        || error.is_instance_of::<PyValueError>(py)
        || error.is_instance_of::<PyAttributeError>(py)
        || error.is_instance_of::<PyOverflowError>(py)
        || error.is_instance_of::<PyBufferError>(py)
}

/// A refusal of Python's in our words, with its own as the cause; any other error as it is.
pub fn refusal(py: Python<'_>, error: PyErr, class: &str, message: String) -> PyErr {
    if !is_refusal(&error, py) {
        return error;
    }
    let ours = raised(class, message);
    ours.set_cause(py, Some(error));
    ours
}

/// An instance of a class of `ludic.errors`.
pub fn raised(class: &str, message: String) -> PyErr {
    Python::attach(|py| {
        let found = py.import("ludic.errors").and_then(|module| module.getattr(class));
        match found.and_then(|found| Ok(found.cast_into::<PyType>()?)) {
            Ok(class) => PyErr::from_type(class, message),
            Err(error) => error,
        }
    })
}
