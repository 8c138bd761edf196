//! `ludic._core`: registers the classes and functions of the other modules.
mod arena;
mod arguments;
mod bytes;
mod collate;
mod delta;
mod errors;
mod fields;
mod gae;
mod lists;
mod numbers;
mod pairs;
mod plan;
mod ranks;
mod reduce;
mod sequences;
mod table;
mod trees;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// An error unless the Python files have the version from which the extension was built.
fn check_build(py: Python<'_>) -> PyResult<()> {
    let python: String = py.import("ludic")?.getattr("__version__")?.extract()?;
    if python == VERSION {
        return Ok(());
    }
    let message = format!(
        "ludic {python} has an extension that was built from {VERSION}; build it again: `make setup` in a clone, \
         or install ludic again"
    );
    Err(errors::ludic_error("StaleBuildError", message))
}

#[pyfunction]
fn relay_program(py: Python<'_>) -> Bound<'_, PyBytes> {
    PyBytes::new(py, ludic_relay::PROGRAM)
}

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    check_build(module.py())?;
    module.add("__version__", VERSION)?;
    module.add_class::<table::SampleTable>()?;
    module.add_class::<arena::Arena>()?;
    module.add_class::<plan::Plan>()?;
    module.add_class::<ranks::RankPlan>()?;
    module.add_function(wrap_pyfunction!(numbers::read_ids, module)?)?;
    module.add_function(wrap_pyfunction!(numbers::read_floats, module)?)?;
    module.add_function(wrap_pyfunction!(plan::lengths_of, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_greedy, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_optimal, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan_padding_free, module)?)?;
    module.add_function(wrap_pyfunction!(pairs::group_pairs, module)?)?;
    module.add_function(wrap_pyfunction!(pairs::plan_pairs, module)?)?;
    module.add_function(wrap_pyfunction!(ranks::plan_ranks, module)?)?;
    module.add_function(wrap_pyfunction!(gae::gae, module)?)?;
    module.add_function(wrap_pyfunction!(delta::encode_delta, module)?)?;
    module.add_function(wrap_pyfunction!(delta::apply_delta, module)?)?;
    module.add_function(wrap_pyfunction!(reduce::reduce_records, module)?)?;
    module.add_function(wrap_pyfunction!(reduce::reduce_column, module)?)?;
    module.add_function(wrap_pyfunction!(relay_program, module)?)?;
    Ok(())
}
