//! What is being read, for messages.

use pyo3::prelude::*;

use crate::errors::raised;

/// A sequence of numbers that Python gives.
#[derive(Clone, Copy)]
pub struct Field {
    name: &'static str,
    /// None when a column of all samples is read.
    sample: Option<usize>,
    /// Whether the numbers say where something is. Then a mask is no such number, though Python
    /// would convert it.
    pub places: bool,
}

impl Field {
    /// A column of all samples.
    pub fn column(name: &'static str) -> Self {
        Self { name, sample: None, places: false }
    }

    /// A field of one sample.
    pub fn of_sample(name: &'static str, sample: usize) -> Self {
        Self { name, sample: Some(sample), places: false }
    }

    /// Numbers that say where something is.
    pub fn places(name: &'static str) -> Self {
        Self { name, sample: None, places: true }
    }

    pub fn at(&self, position: usize) -> String {
        format!("{}[{position}]", self.whole())
    }

    pub fn whole(&self) -> String {
        match self.sample {
            Some(sample) => format!("sample {sample}: {}", self.name),
            None => self.name.to_owned(),
        }
    }

    /// The refusal of truths, or of bytes, where numbers are counted.
    pub fn no_mask(&self, found: &str) -> PyErr {
        let place = self.whole();
        let rule = "but must hold whole numbers that count from 0; for a mask take np.flatnonzero(mask)";
        raised("DataTypeError", format!("{place} is {found}, {rule}"))
    }
}

/// How it is written, for messages.
pub fn shown(value: &Bound<'_, PyAny>) -> String {
    value.repr().map_or_else(|_| "an object without repr".to_owned(), |text| text.to_string())
}

/// The name of its type.
pub fn kind_of(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map_or_else(|_| "?".to_owned(), |name| name.to_string())
}
