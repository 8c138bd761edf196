//! Preference pairs: grouping by id, and plans that keep them whole.

use ludic_core::pairs::{self, PairId};
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray2, PyUntypedArray};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBool, PyBytes, PyList, PySequence, PyString};

use crate::arguments::{Count, InPlace, Lengths, described};
use crate::errors::{Result, raised, refusal};
use crate::fields::shown;
use crate::lists::as_list;
use crate::plan::Plan;

/// A pair id as Python gives it: a text, or anything that stands for a whole number.
enum Id {
    Text(PyBackedStr),
    Number(i64),
}

impl<'py> FromPyObject<'_, 'py> for Id {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let rule = |found: &str| format!("a pair_id must be a text or a whole number of 64 bits, not {found}");
        if value.is_instance_of::<PyString>() {
            return value.extract().map(Self::Text).map_err(|error| {
                let message = rule(&format!("{}, which has no UTF-8", shown(&value)));
                refusal(value.py(), error, "DataTypeError", message)
            });
        }
        if value.is_instance_of::<PyBool>() {
            return Err(raised(
                "DataTypeError",
                rule(&format!("the truth {}, which Python takes for a number", shown(&value))),
            ));
        }
        let number = value.extract().map(Self::Number);
        number.map_err(|error| refusal(value.py(), error, "DataTypeError", rule(&shown(&value))))
    }
}

impl Id {
    fn borrowed(&self) -> PairId<'_> {
        match self {
            Self::Text(text) => PairId::Text(text),
            Self::Number(number) => PairId::Number(*number),
        }
    }
}

/// Role texts; anything else is refused with what it was.
pub struct Role(PyBackedStr);

impl<'py> FromPyObject<'_, 'py> for Role {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let message = || format!("a role must be a text, not {}", shown(&value));
        value.extract().map(Self).map_err(|error| refusal(value.py(), error, "DataTypeError", message()))
    }
}

/// The items of a sequence, or of a numpy array. A text is a sequence of its letters, and never
/// meant.
fn one_a_sample<'py>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
    if let Some(list) = as_list(value)? {
        return Ok(list);
    }
    let is_sequence = value.cast::<PySequence>().is_ok() || value.cast::<PyUntypedArray>().is_ok();
    if !is_sequence || value.is_instance_of::<PyString>() || value.is_instance_of::<PyBytes>() {
        let message = format!("{name} is {}, but must be a sequence with one a sample; give a list", shown(value));
        return Err(raised("DataTypeError", message));
    }
    PyList::new(value.py(), value.try_iter()?.collect::<PyResult<Vec<_>>>()?)
}

/// What `group_pairs` returns: [P, 2] sample indices, and the ids of incomplete pairs.
type Grouped<'py> = (Bound<'py, PyArray2<i64>>, Bound<'py, PyList>);

/// [P, 2] indices (chosen, rejected) in order of first appearance, and the ids of incomplete pairs.
#[pyfunction]
#[pyo3(signature = (pair_ids, roles, drop_incomplete = true))]
pub fn group_pairs<'py>(
    py: Python<'py>,
    pair_ids: &Bound<'py, PyAny>,
    roles: &Bound<'py, PyAny>,
    drop_incomplete: bool,
) -> Result<Grouped<'py>> {
    let pair_ids = one_a_sample("pair_ids", pair_ids)?;
    let ids: Vec<Id> = pair_ids.extract()?;
    let roles: Vec<Role> = one_a_sample("roles", roles)?.extract()?;
    let groups = py.detach(|| {
        let ids: Vec<PairId<'_>> = ids.iter().map(Id::borrowed).collect();
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
            let found = described(&value)?;
            return Err(raised(
                "DataTypeError",
                format!("pairs must be an int64 array [P, 2] of (chosen, rejected), not {found}"),
            ));
        };
        Ok(Self(array.as_array().rows().into_iter().map(|row| [row[0], row[1]]).collect()))
    }
}

/// `pairs` [P, 2] are sample indices (chosen, rejected); `2 * longest * pairs <= budget`; chosen
/// and rejected are neighbours.
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
