//! What the core refuses, raised as the classes of `ludic.errors`.

use ludic_core::CoreError;
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
            Error::Core(error) => raised(class(&error), error.to_string()),
            Error::Python(error) => error,
        }
    }
}

/// The class of `ludic.errors` for each refusal.
fn class(error: &CoreError) -> &'static str {
    match error {
        CoreError::BudgetTooSmall { .. }
        | CoreError::BudgetNotPositive { .. }
        | CoreError::PairBudgetTooSmall { .. } => "BudgetError",
        CoreError::NegativeSetting { .. }
        | CoreError::NotPositive { .. }
        | CoreError::OutOfRange { .. }
        | CoreError::PadToken { .. }
        | CoreError::UnknownDenominator { .. }
        | CoreError::UnknownPacking { .. }
        | CoreError::UnknownReduction { .. } => "ConfigError",
        _ => "DataError",
    }
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
