//! Preference pairs: groups samples into pairs, and plans that keep pairs whole.

use ludic_core::pairs::{self, PairId};
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray2, PyUntypedArray};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBool, PyBytes, PyList, PySequence, PyString};

use crate::arguments::{Count, InPlace, Lengths, describe_array};
use crate::errors::{Result, ludic_error, replace_conversion_error};
use crate::fields::repr_of;
use crate::lists::as_list;
use crate::plan::Plan;

/// A pair id from Python: a string, or anything that converts to an integer.
enum Id {
    Text(PyBackedStr),
    Number(i64),
}

impl<'py> FromPyObject<'_, 'py> for Id {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let rule = |actual: &str| format!("a pair_id must be a string or a 64-bit integer, not {actual}");
        if value.is_instance_of::<PyString>() {
            return value.extract().map(Self::Text).map_err(|error| {
                let message = rule(&format!("{}, which has no UTF-8 encoding", repr_of(&value)));
                replace_conversion_error(value.py(), error, "DataTypeError", message)
            });
        }
        if value.is_instance_of::<PyBool>() {
            return Err(ludic_error(
                "DataTypeError",
                rule(&format!("the bool {}, which Python treats as a number", repr_of(&value))),
            ));
        }
        let number = value.extract().map(Self::Number);
        number.map_err(|error| replace_conversion_error(value.py(), error, "DataTypeError", rule(&repr_of(&value))))
    }
}

impl Id {
    fn as_pair_id(&self) -> PairId<'_> {
        match self {
            Self::Text(text) => PairId::Text(text),
            Self::Number(number) => PairId::Number(*number),
        }
    }
}

/// A role: any string. The core checks that it is "chosen" or "rejected".
pub struct Role(PyBackedStr);

impl<'py> FromPyObject<'_, 'py> for Role {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let message = || format!("a role must be a string, not {}", repr_of(&value));
        value
            .extract()
            .map(Self)
            .map_err(|error| replace_conversion_error(value.py(), error, "DataTypeError", message()))
    }
}

/// The items of a sequence or of a numpy array, one per sample. A string or bytes object is
/// refused, although it is a sequence.
fn list_per_sample<'py>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
    if let Some(list) = as_list(value)? {
        return Ok(list);
    }
    let is_sequence = value.cast::<PySequence>().is_ok() || value.cast::<PyUntypedArray>().is_ok();
    if !is_sequence || value.is_instance_of::<PyString>() || value.is_instance_of::<PyBytes>() {
        let message =
            format!("{name} is {}, but must be a sequence with one value per sample; pass a list", repr_of(value));
        return Err(ludic_error("DataTypeError", message));
    }
    PyList::new(value.py(), value.try_iter()?.collect::<PyResult<Vec<_>>>()?)
}

/// [P, 2] sample indices, and the ids of incomplete pairs.
type GroupedPairs<'py> = (Bound<'py, PyArray2<i64>>, Bound<'py, PyList>);

/// Groups samples by pair id. Returns [P, 2] indices (chosen, rejected) in order of first
/// appearance, and the ids of incomplete pairs.
#[pyfunction]
#[pyo3(signature = (pair_ids, roles, drop_incomplete = true))]
pub fn group_pairs<'py>(
    py: Python<'py>,
    pair_ids: &Bound<'py, PyAny>,
    roles: &Bound<'py, PyAny>,
    drop_incomplete: bool,
) -> Result<GroupedPairs<'py>> {
    let pair_ids = list_per_sample("pair_ids", pair_ids)?;
    let ids: Vec<Id> = pair_ids.extract()?;
    let roles: Vec<Role> = list_per_sample("roles", roles)?.extract()?;
    let groups = py.detach(|| {
        let ids: Vec<PairId<'_>> = ids.iter().map(Id::as_pair_id).collect();
        let roles: Vec<&str> = roles.iter().map(|role| &*role.0).collect();
        pairs::group(&ids, &roles, drop_incomplete)
    })?;
    let rows = groups.pairs.iter().flatten().map(|&sample| i64::from(sample));
    let indices = PyArray1::from_iter(py, rows).reshape([groups.pairs.len(), 2])?;
    let incomplete = groups.incomplete.iter().map(|&sample| pair_ids.get_item(sample as usize));
    Ok((indices, PyList::new(py, incomplete.collect::<PyResult<Vec<_>>>()?)?))
}

/// A copy of a [P, 2] int64 array.
pub struct Pairs(Vec<[i64; 2]>);

impl<'py> FromPyObject<'_, 'py> for Pairs {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let array = value.extract::<PyReadonlyArray2<'py, i64>>().ok();
        let Some(array) = array.filter(|array| array.as_array().ncols() == 2) else {
            let actual = describe_array(&value)?;
            return Err(ludic_error(
                "DataTypeError",
                format!("pairs must be an int64 array [P, 2] of (chosen, rejected), not {actual}"),
            ));
        };
        Ok(Self(array.as_array().rows().into_iter().map(|row| [row[0], row[1]]).collect()))
    }
}

/// Plans micro-batches that keep pairs whole: `2 * longest * pairs <= budget`. `pairs` [P, 2] are
/// sample indices (chosen, rejected), which are adjacent in the plan.
#[pyfunction]
#[pyo3(signature = (lengths, pairs, micro_token_budget, overhead_tokens = None))]
pub fn plan_pairs(
    py: Python<'_>,
    lengths: Lengths<'_>,
    pairs: Pairs,
    micro_token_budget: Count,
    overhead_tokens: Option<Count>,
) -> Result<Plan> {
    let overhead = overhead_tokens.map(|overhead| overhead.0);
    Ok(Plan(
        lengths.plan(py, InPlace::PAIRS, |lengths| pairs::plan(lengths, &pairs.0, micro_token_budget.0, overhead))?,
    ))
}
