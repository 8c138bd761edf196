//! `SampleTable`: ingest, views and columns. Its layouts are in `collate.rs`.

use ludic_core::{ColumnInput, Sample, TableBuilder};
use numpy::{IntoPyArray, PyArray1};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use crate::arguments::Count;
use crate::collate::{self, Arena};
use crate::errors::{Result, raised};
use crate::sequences::{Field, FloatReader, IntReader, is_list_of_ones};

/// More items than this are refused at once: reading an object costs about half a microsecond, columns cost nothing.
const MAX_ITEMS: usize = 1 << 20;

/// A macro-batch as columns. Immutable: `truncate` and `select` return views that share the columns.
#[pyclass(frozen, module = "ludic._core")]
pub struct SampleTable(pub ludic_core::SampleTable);

#[pymethods]
impl SampleTable {
    /// Ingest `SAWItem`s once. Their sequences may be lists, tuples, numpy arrays or bytes.
    #[staticmethod]
    fn from_items(items: &Bound<'_, PyAny>) -> Result<Self> {
        let items = list_of_items(items)?;
        let mut builder = TableBuilder::with_capacity(items.len(), expected_tokens(&items));
        let mut reader = ItemReader::default();
        for (at, item) in items.iter().enumerate() {
            reader.push(&mut builder, at, &item)?;
        }
        Ok(Self(builder.finish()))
    }

    /// Columns of S tokens; `offsets` [N + 1]. `actor_logps` [S] is aligned with the tokens; what stands off the actions
    /// is not read.
    #[staticmethod]
    #[pyo3(signature = (input_ids, action_mask, offsets, weights = None, actor_logps = None, attention_mask = None))]
    fn from_columns(
        input_ids: &Bound<'_, PyAny>,
        action_mask: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
        actor_logps: Option<&Bound<'_, PyAny>>,
        attention_mask: Option<&Bound<'_, PyAny>>,
    ) -> Result<Self> {
        let [mut ids, mut action, mut bounds, mut attention] = [(); 4].map(|()| IntReader::default());
        let [mut credit, mut logps] = [(); 2].map(|()| FloatReader::default());
        let column = |name| Field { name, sample: None };
        let input = ColumnInput {
            input_ids: ids.read(input_ids, column("input_ids"))?,
            action_mask: action.read_mask(action_mask, column("action_mask"))?,
            attention_mask: attention_mask
                .map(|mask| attention.read_mask(mask, column("attention_mask")))
                .transpose()?,
            actor_logps: actor_logps.map(|values| logps.read(values, column("actor_logps"))).transpose()?,
            weights: weights.map(|values| credit.read(values, column("weights"))).transpose()?,
            offsets: bounds.read(offsets, column("offsets"))?,
        };
        Ok(Self(ludic_core::SampleTable::from_columns(&input)?))
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __repr__(&self) -> String {
        format!("SampleTable({} samples, {} tokens)", self.0.len(), self.0.num_tokens())
    }

    #[getter]
    fn num_tokens(&self) -> usize {
        self.0.num_tokens()
    }

    #[getter]
    fn has_actor_logps(&self) -> bool {
        self.0.has_actor_logps()
    }

    #[getter]
    fn lengths<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.0.lengths().into_pyarray(py)
    }

    #[getter]
    fn original_lengths<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.0.original_lengths().into_pyarray(py)
    }

    #[getter]
    fn action_counts<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.0.action_counts().into_pyarray(py)
    }

    #[getter]
    fn target_counts<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.0.target_counts().into_pyarray(py)
    }

    #[getter]
    fn weights<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f32>> {
        self.0.weights().into_pyarray(py)
    }

    #[getter]
    fn chains<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.0.chains().into_pyarray(py)
    }

    /// The same samples, with neighbours that continue each other chained: in a micro-batch they share a line.
    fn chained(&self) -> Self {
        Self(self.0.chained())
    }

    /// The same samples cut on the right to at most `max_seq_len` tokens. A change of length, no copy.
    fn truncate(&self, max_seq_len: Count) -> Result<Self> {
        Ok(Self(self.0.truncate(max_seq_len.0)?))
    }

    /// The samples at `indices`, in that order. No token is copied.
    fn select(&self, indices: Indices) -> Result<Self> {
        Ok(Self(self.0.select(&indices.0)?))
    }

    /// The right-padded layout: `input_ids` and `attention_mask` i64, `action_mask` f32 [B, T], `weight` f32 [B].
    #[pyo3(signature = (indices, pad_token_id, arena = None))]
    fn collate<'py>(
        &self,
        py: Python<'py>,
        indices: Indices,
        pad_token_id: Count,
        mut arena: Option<PyRefMut<'py, Arena>>,
    ) -> Result<Bound<'py, PyDict>> {
        collate::padded(py, self, &indices.0, pad_token_id.0, arena.as_deref_mut())
    }

    /// The padding-free layout: `input_ids` and `position_ids` i64, `action_mask` f32 [1, S], `cu_seqlens` i32 [B + 1],
    /// `weight` f32 [B].
    #[pyo3(signature = (indices, arena = None))]
    fn collate_padding_free<'py>(
        &self,
        py: Python<'py>,
        indices: Indices,
        mut arena: Option<PyRefMut<'py, Arena>>,
    ) -> Result<Bound<'py, PyDict>> {
        collate::padding_free(py, self, &indices.0, arena.as_deref_mut())
    }

    /// The compact layout: `input_ids` i32, `action_mask` u8 [B, T], `lengths` i32 [B], `weight` f32 [B].
    #[pyo3(signature = (indices, pad_token_id, arena = None))]
    fn collate_compact<'py>(
        &self,
        py: Python<'py>,
        indices: Indices,
        pad_token_id: Count,
        mut arena: Option<PyRefMut<'py, Arena>>,
    ) -> Result<Bound<'py, PyDict>> {
        collate::compact(py, self, &indices.0, pad_token_id.0, arena.as_deref_mut())
    }
}

/// Sample indices from a list or an integer array, copied so that the core can read them without the interpreter.
pub struct Indices(pub Vec<i64>);

impl<'py> FromPyObject<'_, 'py> for Indices {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let mut reader = IntReader::default();
        let field = Field { name: "indices", sample: None };
        Ok(Self(reader.read(&value, field)?.to_i64()))
    }
}

/// Reads the fields of a `SAWItem`; its buffers serve one item after the other.
#[derive(Default)]
struct ItemReader {
    ids: IntReader,
    action: IntReader,
    attention: IntReader,
    logps: FloatReader,
}

impl ItemReader {
    fn push<'py>(&mut self, builder: &mut TableBuilder, at: usize, item: &Bound<'py, PyAny>) -> Result<()> {
        let py = item.py();
        let field = |name| Field { name, sample: Some(at) };
        let attribute = |name: &Bound<'py, PyString>| item.getattr(name).map_err(|error| not_an_item(item, at, error));
        let input_ids = attribute(intern!(py, "input_ids"))?;
        let action_mask = attribute(intern!(py, "action_mask"))?;
        let attention_mask = attribute(intern!(py, "attention_mask"))?;
        let weight = attribute(intern!(py, "weight"))?;
        let logps = token_logps(item)?;
        let ids = self.ids.read(&input_ids, field("input_ids"))?;
        let attended = is_list_of_ones(&attention_mask, ids.len())?;
        let attention = match attended {
            true => None,
            false => Some(self.attention.read_mask(&attention_mask, field("attention_mask"))?),
        };
        let sample = Sample {
            input_ids: ids,
            action_mask: self.action.read_mask(&action_mask, field("action_mask"))?,
            attention_mask: attention,
            actor_logps: logps.as_ref().map(|logps| self.logps.read(logps, field("actor_logps"))).transpose()?,
            weight: weight.extract().map_err(|_| wrong_weight(&weight, at))?,
        };
        Ok(builder.push(&sample)?)
    }
}

/// `item.attachments.actor_logps.token_logps`, None where any of them is.
fn token_logps<'py>(item: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = item.py();
    let mut found = item.clone();
    for name in [intern!(py, "attachments"), intern!(py, "actor_logps"), intern!(py, "token_logps")] {
        match found.getattr_opt(name)? {
            Some(next) if !next.is_none() => found = next,
            _ => return Ok(None),
        }
    }
    Ok(Some(found))
}

/// A guess at the tokens of all items, so that the columns need not grow: what a sequence says of its length may be wrong.
fn expected_tokens(items: &Bound<'_, PyList>) -> usize {
    const LIMIT: usize = 1 << 26;
    let length = |item: Bound<'_, PyAny>| item.getattr(intern!(item.py(), "input_ids"))?.len();
    let total = items.iter().fold(0usize, |total, item| total.saturating_add(length(item).unwrap_or(0)));
    total.min(LIMIT)
}

fn list_of_items<'py>(items: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
    let found = items.get_type().name()?;
    let Ok(count) = items.len() else {
        let message = format!("items is a {found}, but must be a sequence of SAWItem; wrap it in list()");
        return Err(raised("DataTypeError", message));
    };
    if count > MAX_ITEMS {
        let message =
            format!("{count} items are more than one table takes ({MAX_ITEMS}); split them, or use from_columns");
        return Err(raised("DataError", message));
    }
    match items.cast::<PyList>() {
        Ok(list) => Ok(list.clone()),
        Err(_) => Ok(PyList::new(items.py(), items.try_iter()?.collect::<PyResult<Vec<_>>>()?)?),
    }
}

fn not_an_item(item: &Bound<'_, PyAny>, at: usize, error: PyErr) -> PyErr {
    let found = item.get_type().name().map_or_else(|_| "?".to_owned(), |name| name.to_string());
    let message = format!("sample {at} is a {found}, but must be a SAWItem: {error}");
    raised("DataTypeError", message)
}

fn wrong_weight(weight: &Bound<'_, PyAny>, at: usize) -> PyErr {
    let shown = weight.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string());
    raised("DataTypeError", format!("sample {at}: weight is {shown}, but must be a number"))
}
