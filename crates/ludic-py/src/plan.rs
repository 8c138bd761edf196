//! `Plan`, and the planners for one rank.

use ludic_core::plan;
use numpy::PyArray1;
use pyo3::exceptions::{PyIndexError, PyOverflowError};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::arguments::{Count, InPlace, Lengths};
use crate::errors::{Result, ludic_error, replace_conversion_error};
use crate::fields::{repr_of, type_name};
use crate::lists::{as_list, length_at, pick_items};

/// Micro-batches as lists of sample indices. Every index occurs once; none is empty.
#[pyclass(frozen, sequence, module = "ludic._core")]
pub struct Plan(pub plan::Plan);

#[pymethods]
impl Plan {
    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __getitem__<'py>(&self, py: Python<'py>, index: Position) -> PyResult<Bound<'py, PyArray1<i64>>> {
        get_micro_batch(index, self.0.len(), |index| self.0.get(index)).map(|rows| int64_array(py, rows))
    }

    fn __repr__(&self) -> String {
        let (len, samples, padded) = (self.0.len(), self.0.indices().len(), self.0.padded_tokens());
        format!(
            "Plan({len} micro-batches, {samples} samples, {padded} tokens of which {} are real)",
            self.0.num_tokens()
        )
    }

    #[getter]
    fn indices<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        int64_array(py, self.0.indices())
    }

    #[getter]
    fn offsets<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        int64_array(py, self.0.offsets())
    }

    #[getter]
    fn num_tokens(&self) -> u64 {
        self.0.num_tokens()
    }

    #[getter]
    fn padded_tokens(&self) -> u64 {
        self.0.padded_tokens()
    }

    /// The items of each micro-batch. `items` must have one item for each planned sample.
    fn split<'py>(&self, py: Python<'py>, items: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let items = &require_list("items", items)?;
        let (num_items, planned) = (items.len(), self.0.indices().len());
        if num_items != planned {
            let message = format!("items ({num_items}) and the plan's samples ({planned}) must be equally long");
            return Err(ludic_error("DataError", message));
        }
        PyList::new(py, self.0.iter().map(|rows| pick_items(items, rows)).collect::<PyResult<Vec<_>>>()?)
    }

    fn to_lists(&self) -> Vec<Vec<u32>> {
        self.0.iter().map(<[u32]>::to_vec).collect()
    }
}

/// The position of a micro-batch in a plan; a negative one counts from the end.
pub struct Position(isize);

impl<'py> FromPyObject<'_, 'py> for Position {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        value.extract().map(Self).map_err(|error| {
            if error.is_instance_of::<PyOverflowError>(value.py()) {
                return PyIndexError::new_err(format!(
                    "micro-batch index {} is out of range for any plan",
                    repr_of(&value)
                ));
            }
            let rule = "must be a whole number; for a slice, use list(plan)";
            let message = format!("a micro-batch index is {}, but {rule}", repr_of(&value));
            replace_conversion_error(value.py(), error, "DataTypeError", message)
        })
    }
}

/// The samples of one micro-batch of a plan of `len`. With `len` 3, the position -1 is 2.
pub fn get_micro_batch<'a>(
    Position(index): Position,
    len: usize,
    get: impl FnOnce(usize) -> Option<&'a [u32]>,
) -> PyResult<&'a [u32]> {
    let from_front = if index < 0 { index.checked_add_unsigned(len) } else { Some(index) };
    let rows = from_front.and_then(|index| usize::try_from(index).ok()).and_then(get);
    rows.ok_or_else(|| {
        PyIndexError::new_err(format!("micro-batch index {index} is out of range for a plan of {len} micro-batches"))
    })
}

/// The list, or a list of the items of a tuple or range. An error for anything else.
fn require_list<'py>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
    as_list(value)?.ok_or_else(|| {
        let message = format!("{name} is a {}, but must be a list; wrap it in list()", type_name(value));
        ludic_error("DataTypeError", message)
    })
}

/// An int64 array of the values.
pub fn int64_array<'py>(py: Python<'py>, values: &[u32]) -> Bound<'py, PyArray1<i64>> {
    PyArray1::from_iter(py, values.iter().map(|&value| i64::from(value)))
}

/// Plans micro-batches in ascending order of length (a stable sort). A new one begins when
/// `longest * rows` would exceed the budget. O(n).
#[pyfunction]
pub fn plan_greedy(py: Python<'_>, lengths: Lengths<'_>, micro_token_budget: Count) -> Result<Plan> {
    Ok(Plan(lengths.plan(py, InPlace::GREEDY, |lengths| plan::greedy(lengths, micro_token_budget.0))?))
}

/// Plans micro-batches with the exact minimum of `padded_tokens + overhead_tokens * micro_batches`
/// under the same rule. O(n log n).
#[pyfunction]
#[pyo3(
    signature = (lengths, micro_token_budget, overhead_tokens = Count(256)),
    text_signature = "(lengths, micro_token_budget, overhead_tokens=256)"
)]
pub fn plan_optimal(
    py: Python<'_>,
    lengths: Lengths<'_>,
    micro_token_budget: Count,
    overhead_tokens: Count,
) -> Result<Plan> {
    Ok(Plan(
        lengths
            .plan(py, InPlace::OPTIMAL, |lengths| plan::optimal(lengths, micro_token_budget.0, overhead_tokens.0))?,
    ))
}

/// Plans micro-batches without padding by best fit decreasing: the sum of the lengths of each is at
/// most the budget.
#[pyfunction]
pub fn plan_padding_free(py: Python<'_>, lengths: Lengths<'_>, micro_token_budget: Count) -> Result<Plan> {
    Ok(Plan(lengths.plan(py, InPlace::PADDING_FREE, |lengths| plan::padding_free(lengths, micro_token_budget.0))?))
}

/// [N] `len` of each sequence of a list, for a plan without a table. Nothing in `ludic` uses it
/// yet; it is for data-parallel training.
#[pyfunction]
pub fn lengths_of<'py>(py: Python<'py>, sequences: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<i32>>> {
    let sequences = &require_list("sequences", sequences)?;
    let lengths = (0..sequences.len()).map(|position| {
        let length = length_at(sequences, position).map_err(|error| {
            let message = format!("sequences[{position}] is not a sequence: {}", error.value(py));
            replace_conversion_error(py, error, "DataTypeError", message)
        })?;
        i32::try_from(length).map_err(|_| {
            ludic_error("DataError", format!("sequences[{position}] has {length} tokens, which exceeds 2**31 - 1"))
        })
    });
    Ok(PyArray1::from_vec(py, lengths.collect::<PyResult<_>>()?))
}
