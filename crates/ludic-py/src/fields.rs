//! Names the field that is being read, for error messages.

use pyo3::prelude::*;

use crate::errors::ludic_error;

/// A sequence of numbers that is read from Python.
#[derive(Clone, Copy)]
pub struct Field {
    name: &'static str,
    /// The sample; `None` for a column of all samples.
    sample: Option<usize>,
    /// Whether the numbers are indices or offsets. A mask is then refused, although Python would
    /// convert its booleans to 0 and 1.
    pub holds_indices: bool,
}

impl Field {
    /// A column of all samples.
    pub fn column(name: &'static str) -> Self {
        Self { name, sample: None, holds_indices: false }
    }

    /// A field of one sample.
    pub fn of_sample(name: &'static str, sample: usize) -> Self {
        Self { name, sample: Some(sample), holds_indices: false }
    }

    /// Indices or offsets.
    pub fn indices(name: &'static str) -> Self {
        Self { name, sample: None, holds_indices: true }
    }

    /// For messages: "sample 1: input_ids[2]".
    pub fn describe_element(&self, position: usize) -> String {
        format!("{}[{position}]", self.describe())
    }

    /// For messages: "sample 1: input_ids", or "input_ids" for a column.
    pub fn describe(&self) -> String {
        match self.sample {
            Some(sample) => format!("sample {sample}: {}", self.name),
            None => self.name.to_owned(),
        }
    }

    /// The error for booleans or bytes where indices are expected.
    pub fn mask_error(&self, actual: &str) -> PyErr {
        let field = self.describe();
        let rule = "but must hold whole numbers that count from 0; for a mask use np.flatnonzero(mask)";
        ludic_error("DataTypeError", format!("{field} is {actual}, {rule}"))
    }
}

/// The repr of a value, for messages.
pub fn repr_of(value: &Bound<'_, PyAny>) -> String {
    value.repr().map_or_else(|_| "an object without repr".to_owned(), |text| text.to_string())
}

/// The name of the value's type, for messages.
pub fn type_name(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map_or_else(|_| "?".to_owned(), |name| name.to_string())
}
