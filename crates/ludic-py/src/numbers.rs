//! Python's numbers as arrays: of ids and of floats.

use ludic_core::Floats;
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;

use crate::errors::{Result, ludic_error};
use crate::fields::Field;
use crate::sequences::{FloatReader, IntReader};

/// Token ids as int32.
#[pyfunction]
pub fn read_ids<'py>(values: &Bound<'py, PyAny>) -> Result<Bound<'py, PyArray1<i32>>> {
    let (mut reader, field) = (IntReader::default(), Field::column("token ids"));
    reader.prepare(values, field)?;
    let wide = reader.borrow(values, field)?.to_i64()?;
    let ids = wide.iter().map(|&id| i32::try_from(id)).collect::<std::result::Result<Vec<_>, _>>();
    let ids = ids.map_err(|_| {
        let range = (wide.iter().min().unwrap_or(&0), wide.iter().max().unwrap_or(&0));
        ludic_error("DataError", format!("token ids are {} to {}; they must fit in 32 bits", range.0, range.1))
    })?;
    Ok(ids.into_pyarray(values.py()))
}

/// Floats as float32 if that changes none of them, else as float64.
#[pyfunction]
pub fn read_floats<'py>(values: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
    let (mut reader, field) = (FloatReader::default(), Field::column("log-probabilities"));
    reader.prepare(values, field)?;
    let py = values.py();
    Ok(match reader.borrow(values, field)? {
        Floats::F32(narrow) => narrow.to_vec().into_pyarray(py).into_any(),
        Floats::F64(wide) if wide.iter().all(|&value| f64::from(value as f32) == value) => {
            wide.iter().map(|&value| value as f32).collect::<Vec<_>>().into_pyarray(py).into_any()
        }
        Floats::F64(wide) => wide.to_vec().into_pyarray(py).into_any(),
    })
}
