//! Reducers over records: every record is visited once, whatever the number of reducers.

use ludic_core::reduce::{self, Accumulator, Denominator, Reduction};
use numpy::PyReadonlyArray1;
use pyo3::exceptions::{PyKeyError, PyOverflowError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping, PySet, PyString};

use crate::arguments::{Count, described};
use crate::errors::{Result, raised, refusal};
use crate::fields::{kind_of, shown};

/// A dotted path, and which reducers read it: it is followed once a record.
struct Source<'py> {
    name: String,
    path: Vec<Bound<'py, PyString>>,
    readers: Vec<usize>,
}

impl<'py> Source<'py> {
    /// The sources of the reducers, each named once, in the order of first use.
    fn all(py: Python<'py>, names: impl Iterator<Item = String>) -> Vec<Self> {
        let mut sources: Vec<Self> = Vec::new();
        for (reader, name) in names.enumerate() {
            if let Some(known) = sources.iter_mut().find(|source| source.name == name) {
                known.readers.push(reader);
                continue;
            }
            let path = name.split('.').map(|key| PyString::intern(py, key)).collect();
            sources.push(Self { name, path, readers: vec![reader] });
        }
        sources
    }

    fn wrong_value(&self, at: usize, value: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
        let (py, shown, source) = (value.py(), shown(value), &self.name);
        if error.is_instance_of::<PyOverflowError>(py) {
            let message = format!("record {at}: {source} is {shown}, which does not fit in float64");
            return refusal(py, error, "DataError", message);
        }
        let rule = "but mean and sum take numbers; use count_true or a transform";
        refusal(py, error, "DataTypeError", format!("record {at}: {source} is {shown}, {rule}"))
    }

    fn wrong_truth(&self, at: usize, value: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
        let (shown, source) = (shown(value), &self.name);
        let rule = "but count_true takes what is true or false; reduce it in a transform, as by any()";
        refusal(value.py(), error, "DataTypeError", format!("record {at}: {source} is {shown}, {rule}"))
    }
}

/// One reducer on its way through the records.
struct Reducer<'py> {
    denominator: Denominator,
    counts_truth: bool,
    accumulator: Accumulator,
    /// The rollouts that a count by rollouts has counted: a rollout of many steps counts once.
    counted: Option<Bound<'py, PySet>>,
}

impl<'py> Reducer<'py> {
    fn new(py: Python<'py>, kind: &str, normalize_by: Option<&str>) -> Result<Self> {
        let reduction: Reduction = kind.parse()?;
        let denominator = Denominator::try_from(normalize_by)?;
        let counts_truth = reduction == Reduction::CountTrue;
        let by_rollout = counts_truth && denominator == Denominator::Rollouts;
        let counted = by_rollout.then(|| PySet::empty(py)).transpose()?;
        Ok(Self { denominator, counts_truth, accumulator: Accumulator::new(reduction), counted })
    }

    fn visit(
        &mut self,
        at: usize,
        record: &Bound<'py, PyAny>,
        source: &Source,
        value: &Bound<'py, PyAny>,
    ) -> Result<()> {
        if !self.counts_truth {
            let number = value.extract().map_err(|error| source.wrong_value(at, value, error))?;
            self.accumulator.add(number);
        } else if value.is_truthy().map_err(|error| source.wrong_truth(at, value, error))? && self.is_new(at, record)? {
            self.accumulator.add(1.0);
        }
        Ok(())
    }

    /// Whether the rollout of this record has not been counted. Records without `rollout_id` all
    /// count.
    fn is_new(&self, at: usize, record: &Bound<'py, PyAny>) -> PyResult<bool> {
        let Some(counted) = &self.counted else { return Ok(true) };
        let Some(rollout) = get(record, intern!(record.py(), "rollout_id"))? else { return Ok(true) };
        let is_new = !counted.contains(&rollout).map_err(|error| {
            let rule = "but must be hashable, such as a text or a number";
            let message = format!("record {at}: rollout_id is {}, {rule}", shown(&rollout));
            refusal(record.py(), error, "DataTypeError", message)
        })?;
        counted.add(rollout)?;
        Ok(is_new)
    }
}

/// The value at the end of the path; None where a key is absent, a value is None, or a mapping is
/// none.
fn lookup<'py>(record: &Bound<'py, PyAny>, path: &[Bound<'py, PyString>]) -> PyResult<Option<Bound<'py, PyAny>>> {
    let Some((first, rest)) = path.split_first() else { return Ok(None) };
    let mut found = get(record, first)?;
    for key in rest {
        match found {
            Some(inner) => found = get(&inner, key)?,
            None => return Ok(None),
        }
    }
    Ok(found)
}

/// One key of one mapping. An exact dict is asked without the overhead of a general mapping.
fn get<'py>(mapping: &Bound<'py, PyAny>, key: &Bound<'py, PyString>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let value = if let Ok(dict) = mapping.cast_exact::<PyDict>() {
        dict.get_item(key)?
    } else if let Ok(mapping) = mapping.cast::<PyMapping>() {
        match mapping.get_item(key) {
            Ok(value) => Some(value),
            Err(error) if error.is_instance_of::<PyKeyError>(mapping.py()) => None,
            Err(error) => return Err(error),
        }
    } else {
        None
    };
    Ok(value.filter(|value| !value.is_none()))
}

/// All reducers in one pass. A reducer is (kind, dotted path, None | samples | rollouts).
#[pyfunction]
pub fn reduce_records<'py>(
    py: Python<'py>,
    records: &Bound<'py, PyAny>,
    reducers: Vec<(String, String, Option<String>)>,
    num_samples: Count,
    num_rollouts: Count,
) -> Result<Vec<f64>> {
    let num_samples = not_negative("num_samples", num_samples)?;
    let num_rollouts = not_negative("num_rollouts", num_rollouts)?;
    let mut running = reducers
        .iter()
        .map(|(kind, _, normalize_by)| Reducer::new(py, kind, normalize_by.as_deref()))
        .collect::<Result<Vec<_>>>()?;
    let sources = Source::all(py, reducers.into_iter().map(|(_, source, _)| source));
    let each = records.try_iter().map_err(|error| {
        let message = format!("records is a {}, but must be a sequence of mappings", kind_of(records));
        refusal(py, error, "DataTypeError", message)
    })?;
    for (at, record) in each.enumerate() {
        let record = record?;
        for source in &sources {
            let Some(value) = lookup(&record, &source.path)? else { continue };
            for &reader in &source.readers {
                running[reader].visit(at, &record, source, &value)?;
            }
        }
    }
    let result = |reducer: &Reducer| reducer.accumulator.finish(reducer.denominator.count(num_samples, num_rollouts));
    Ok(running.iter().map(result).collect())
}

fn not_negative(name: &'static str, count: Count) -> Result<u64> {
    let value = count.0;
    Ok(u64::try_from(value).map_err(|_| ludic_core::CoreError::NegativeSetting { name, value })?)
}

/// The same over one column, in which every value is present.
#[pyfunction]
pub fn reduce_column(kind: &str, values: &Bound<'_, PyAny>) -> Result<f64> {
    let reduction: Reduction = kind.parse()?;
    let Ok(array) = values.extract::<PyReadonlyArray1<f64>>() else {
        let found = described(values)?;
        let message =
            format!("values must be a one-dimensional float64 array, not {found}; use np.asarray(values, float)");
        return Err(raised("DataTypeError", message).into());
    };
    Ok(match array.as_slice() {
        Ok(values) => reduce::reduce_column(reduction, values),
        Err(_) => reduce::reduce_column(reduction, &array.as_array().to_vec()),
    })
}
