//! Generalised advantage estimation over numpy columns.

use ludic_core::gae::{Estimates, gae as estimate};
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;

use crate::arguments::{read_array, run_detached};
use crate::errors::Result;

type Column<'py> = Bound<'py, PyArray1<f64>>;

/// Advantages and returns of the tokens of packed episodes.
#[pyfunction]
#[pyo3(signature = (rewards, values, lengths, last_values, *, gamma, lam))]
pub fn gae<'py>(
    py: Python<'py>,
    rewards: &Bound<'py, PyAny>,
    values: &Bound<'py, PyAny>,
    lengths: &Bound<'py, PyAny>,
    last_values: &Bound<'py, PyAny>,
    gamma: f64,
    lam: f64,
) -> Result<(Column<'py>, Column<'py>)> {
    let floats = |name, column| Ok::<_, PyErr>(read_array::<f64>(name, column)?.as_array().to_vec());
    let (rewards, values) = (floats("rewards", rewards)?, floats("values", values)?);
    let lengths = read_array::<i64>("lengths", lengths)?.as_array().to_vec();
    let last_values = floats("last_values", last_values)?;
    let work = || estimate(&rewards, &values, &lengths, &last_values, gamma, lam);
    let Estimates { advantages, returns } = run_detached(py, rewards.len(), work)?;
    Ok((advantages.into_pyarray(py), returns.into_pyarray(py)))
}
