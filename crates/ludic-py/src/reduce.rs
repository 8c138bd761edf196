//! Reducers over records. Every record is visited once, whatever the number of reducers.

use ludic_core::reduce::{self, Accumulator, Denominator, Reduction};
use numpy::PyReadonlyArray1;
use pyo3::exceptions::{PyKeyError, PyOverflowError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping, PySet, PyString};

use crate::arguments::{Count, read_array};
use crate::errors::{Result, replace_conversion_error};
use crate::fields::{repr_of, type_name};

/// A dotted path and the indices of the reducers that read it. It is looked up once per record.
struct Source<'py> {
    name: String,
    keys: Vec<Bound<'py, PyString>>,
    reducers: Vec<usize>,
}

impl<'py> Source<'py> {
    /// The distinct sources of the reducers, in the order of first use. The names a, b, a give a
    /// with the reducers [0, 2], and b with [1].
    fn from_names(py: Python<'py>, names: impl Iterator<Item = String>) -> Vec<Self> {
        let mut sources: Vec<Self> = Vec::new();
        for (reducer, name) in names.enumerate() {
            if let Some(source) = sources.iter_mut().find(|source| source.name == name) {
                source.reducers.push(reducer);
                continue;
            }
            let keys = name.split('.').map(|key| PyString::intern(py, key)).collect();
            sources.push(Self { name, keys, reducers: vec![reducer] });
        }
        sources
    }

    /// The error for a value that is not a number.
    fn number_error(&self, index: usize, value: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
        let (py, actual, source) = (value.py(), repr_of(value), &self.name);
        if error.is_instance_of::<PyOverflowError>(py) {
            let message = format!("record {index}: {source} is {actual}, which does not fit in float64");
            return replace_conversion_error(py, error, "DataError", message);
        }
        let rule = "but mean and sum take numbers; use count_true or a transform";
        replace_conversion_error(py, error, "DataTypeError", format!("record {index}: {source} is {actual}, {rule}"))
    }

    /// The error for a value that is neither true nor false.
    fn truth_error(&self, index: usize, value: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
        let (actual, source) = (repr_of(value), &self.name);
        let rule = "but count_true takes values that are true or false; reduce it in a transform, as by any()";
        replace_conversion_error(
            value.py(),
            error,
            "DataTypeError",
            format!("record {index}: {source} is {actual}, {rule}"),
        )
    }
}

/// One reducer and its running state.
struct Reducer<'py> {
    denominator: Denominator,
    counts_true: bool,
    accumulator: Accumulator,
    /// The rollouts that have been counted, for a count by rollouts: a rollout counts once, even if
    /// it is true in several of its steps.
    counted_rollouts: Option<Bound<'py, PySet>>,
}

impl<'py> Reducer<'py> {
    fn new(py: Python<'py>, kind: &str, normalize_by: Option<&str>) -> Result<Self> {
        let reduction: Reduction = kind.parse()?;
        let denominator = Denominator::try_from(normalize_by)?;
        let counts_true = reduction == Reduction::CountTrue;
        let by_rollout = counts_true && denominator == Denominator::Rollouts;
        let counted_rollouts = by_rollout.then(|| PySet::empty(py)).transpose()?;
        Ok(Self { denominator, counts_true, accumulator: Accumulator::new(reduction), counted_rollouts })
    }

    /// Adds the value of the record with this index.
    fn add(
        &mut self,
        index: usize,
        record: &Bound<'py, PyAny>,
        source: &Source,
        value: &Bound<'py, PyAny>,
    ) -> Result<()> {
        if !self.counts_true {
            let number = value.extract().map_err(|error| source.number_error(index, value, error))?;
            self.accumulator.add(number);
        } else if value.is_truthy().map_err(|error| source.truth_error(index, value, error))?
            && self.is_new_rollout(index, record)?
        {
            self.accumulator.add(1.0);
        }
        Ok(())
    }

    /// Whether the rollout of this record has not been counted yet; marks it as counted. Without a
    /// count by rollouts, and for records without `rollout_id`, always true.
    fn is_new_rollout(&self, index: usize, record: &Bound<'py, PyAny>) -> PyResult<bool> {
        let Some(counted) = &self.counted_rollouts else { return Ok(true) };
        let Some(rollout) = get_key(record, intern!(record.py(), "rollout_id"))? else { return Ok(true) };
        let is_new = !counted.contains(&rollout).map_err(|error| {
            let rule = "but must be hashable, such as a text or a number";
            let message = format!("record {index}: rollout_id is {}, {rule}", repr_of(&rollout));
            replace_conversion_error(record.py(), error, "DataTypeError", message)
        })?;
        counted.add(rollout)?;
        Ok(is_new)
    }
}

/// The value at the end of a path of keys. None if a key is absent, a value is None, or something
/// on the way is not a mapping.
fn look_up<'py>(record: &Bound<'py, PyAny>, keys: &[Bound<'py, PyString>]) -> PyResult<Option<Bound<'py, PyAny>>> {
    let Some((first, rest)) = keys.split_first() else { return Ok(None) };
    let mut value = get_key(record, first)?;
    for key in rest {
        match value {
            Some(mapping) => value = get_key(&mapping, key)?,
            None => return Ok(None),
        }
    }
    Ok(value)
}

/// The value of one key of a mapping. An exact dict is read without the overhead of a general
/// mapping.
fn get_key<'py>(mapping: &Bound<'py, PyAny>, key: &Bound<'py, PyString>) -> PyResult<Option<Bound<'py, PyAny>>> {
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

/// Applies all reducers in one pass. A reducer is (kind, dotted path, None | samples | rollouts).
#[pyfunction]
pub fn reduce_records<'py>(
    py: Python<'py>,
    records: &Bound<'py, PyAny>,
    reducers: Vec<(String, String, Option<String>)>,
    num_samples: Count,
    num_rollouts: Count,
) -> Result<Vec<f64>> {
    let num_samples = check_count("num_samples", num_samples)?;
    let num_rollouts = check_count("num_rollouts", num_rollouts)?;
    let mut running = reducers
        .iter()
        .map(|(kind, _, normalize_by)| Reducer::new(py, kind, normalize_by.as_deref()))
        .collect::<Result<Vec<_>>>()?;
    let sources = Source::from_names(py, reducers.into_iter().map(|(_, source, _)| source));
    let records = records.try_iter().map_err(|error| {
        let message = format!("records is a {}, but must be a sequence of mappings", type_name(records));
        replace_conversion_error(py, error, "DataTypeError", message)
    })?;
    for (index, record) in records.enumerate() {
        let record = record?;
        for source in &sources {
            let Some(value) = look_up(&record, &source.keys)? else { continue };
            for &reducer in &source.reducers {
                running[reducer].add(index, &record, source, &value)?;
            }
        }
    }
    let result = |reducer: &Reducer| reducer.accumulator.finish(reducer.denominator.count(num_samples, num_rollouts));
    Ok(running.iter().map(result).collect())
}

fn check_count(name: &'static str, count: Count) -> Result<u64> {
    let value = count.0;
    Ok(u64::try_from(value).map_err(|_| ludic_core::CoreError::NegativeSetting { name, value })?)
}

/// The same for one column, in which every value is present.
#[pyfunction]
pub fn reduce_column(kind: &str, values: &Bound<'_, PyAny>) -> Result<f64> {
    let reduction: Reduction = kind.parse()?;
    let array: PyReadonlyArray1<'_, f64> = read_array("values", values)?;
    Ok(match array.as_slice() {
        Ok(values) => reduce::reduce_column(reduction, values),
        Err(_) => reduce::reduce_column(reduction, &array.as_array().to_vec()),
    })
}
