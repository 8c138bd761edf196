//! `SampleTable`: ingest, views and columns. Its layouts are in `collate.rs`.

use ludic_core::{ColumnInput, Sample, TableBuilder};
use numpy::{IntoPyArray, PyArray1};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use crate::arena::{Arena, lock_arena};
use crate::arguments::Count;
use crate::collate;
use crate::errors::{Error, Result, is_error_of_the_value, raised, refusal};
use crate::fields::Field;
use crate::lists::is_list_of_ones;
use crate::sequences::{FloatReader, IntReader};

/// More items than this are refused at once: reading an object costs about half a microsecond,
/// columns cost nothing.
const MAX_ITEMS: usize = 1 << 20;

/// A macro-batch as columns. Immutable: `truncate` and `select` return views that share the
/// columns.
#[pyclass(frozen, module = "ludic._core")]
pub struct SampleTable(pub ludic_core::SampleTable);

#[pymethods]
impl SampleTable {
    /// Ingest `SAWItem`s once. Their sequences may be lists, tuples, numpy arrays or bytes.
    #[staticmethod]
    fn from_items(items: &Bound<'_, PyAny>) -> Result<Self> {
        let items = list_of_items(items)?;
        let mut builder = TableBuilder::with_capacity(items.len(), expected_tokens(&items)?);
        let mut reader = ItemReader::default();
        for (at, item) in items.iter().enumerate() {
            reader.push(&mut builder, at, &item)?;
        }
        Ok(Self(builder.finish()))
    }

    /// Columns of S tokens; `offsets` [N + 1]. `actor_logps` [S] is aligned with the tokens; what
    /// stands off the actions is not read.
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
        let column = Columns { input_ids, action_mask, offsets, weights, actor_logps, attention_mask };
        column.table()
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

    /// The same samples, with neighbours that continue each other chained: in a micro-batch they
    /// share a line.
    fn chained(&self) -> Self {
        Self(self.0.chained())
    }

    /// The same samples cut on the right to at most `max_seq_len` tokens. A change of length, no
    /// copy.
    fn truncate(&self, max_seq_len: Count) -> Result<Self> {
        Ok(Self(self.0.truncate(max_seq_len.0)?))
    }

    /// The samples at `indices`, in that order. No token is copied.
    fn select(&self, indices: Indices) -> Result<Self> {
        Ok(Self(self.0.select(&indices.0)?))
    }

    /// The right-padded layout: `input_ids` and `attention_mask` i64, `action_mask` f32 [B, T],
    /// `weight` f32 [B].
    #[pyo3(signature = (indices, pad_token_id, arena = None))]
    fn collate<'py>(
        &self,
        py: Python<'py>,
        indices: Indices,
        pad_token_id: Count,
        arena: Option<&Bound<'py, Arena>>,
    ) -> Result<Bound<'py, PyDict>> {
        collate::padded(py, &self.0, &indices.0, pad_token_id.0, lock_arena(arena)?.as_deref_mut())
    }

    /// The padding-free layout: `input_ids` and `position_ids` i64, `action_mask` f32 [1, S],
    /// `cu_seqlens` i32 [B + 1], `weight` f32 [B].
    #[pyo3(signature = (indices, arena = None))]
    fn collate_padding_free<'py>(
        &self,
        py: Python<'py>,
        indices: Indices,
        arena: Option<&Bound<'py, Arena>>,
    ) -> Result<Bound<'py, PyDict>> {
        collate::padding_free(py, &self.0, &indices.0, lock_arena(arena)?.as_deref_mut())
    }

    /// The compact layout: `input_ids` i32, `action_mask` u8 [B, T], `lengths` i32 [B], `weight`
    /// f32 [B].
    #[pyo3(signature = (indices, pad_token_id, arena = None))]
    fn collate_compact<'py>(
        &self,
        py: Python<'py>,
        indices: Indices,
        pad_token_id: Count,
        arena: Option<&Bound<'py, Arena>>,
    ) -> Result<Bound<'py, PyDict>> {
        collate::compact(py, &self.0, &indices.0, pad_token_id.0, lock_arena(arena)?.as_deref_mut())
    }
}

/// Sample indices from a list or an integer array, copied so that the core can read them without
/// the interpreter.
pub struct Indices(pub Vec<i64>);

impl<'py> FromPyObject<'_, 'py> for Indices {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let mut reader = IntReader::default();
        let field = Field::places("indices");
        reader.prepare(&value, field)?;
        Ok(Self(reader.borrow(&value, field)?.to_i64().map_err(Error::from)?))
    }
}

/// The columns as Python gives them.
struct Columns<'a, 'py> {
    input_ids: &'a Bound<'py, PyAny>,
    action_mask: &'a Bound<'py, PyAny>,
    offsets: &'a Bound<'py, PyAny>,
    weights: Option<&'a Bound<'py, PyAny>>,
    actor_logps: Option<&'a Bound<'py, PyAny>>,
    attention_mask: Option<&'a Bound<'py, PyAny>>,
}

impl Columns<'_, '_> {
    fn table(&self) -> Result<SampleTable> {
        let [mut ids, mut action, mut bounds, mut attention] = [(); 4].map(|()| IntReader::default());
        let [mut credit, mut logps] = [(); 2].map(|()| FloatReader::default());
        let column = Field::column;
        ids.prepare(self.input_ids, column("input_ids"))?;
        action.prepare_mask(self.action_mask, column("action_mask"))?;
        let attend = |mask| attention.prepare_mask(mask, column("attention_mask"));
        self.attention_mask.map(attend).transpose()?;
        self.actor_logps.map(|values| logps.prepare(values, column("actor_logps"))).transpose()?;
        self.weights.map(|values| credit.prepare(values, column("weights"))).transpose()?;
        bounds.prepare(self.offsets, Field::places("offsets"))?;
        // From here on no Python code runs: arrays are borrowed.
        let attended = |mask| attention.borrow(mask, column("attention_mask"));
        let input = ColumnInput {
            input_ids: ids.borrow(self.input_ids, column("input_ids"))?,
            action_mask: action.borrow(self.action_mask, column("action_mask"))?,
            attention_mask: self.attention_mask.map(attended).transpose()?,
            actor_logps: self.actor_logps.map(|values| logps.borrow(values, column("actor_logps"))).transpose()?,
            weights: self.weights.map(|values| credit.borrow(values, column("weights"))).transpose()?,
            offsets: bounds.borrow(self.offsets, Field::places("offsets"))?,
        };
        Ok(SampleTable(ludic_core::SampleTable::from_columns(&input)?))
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
        let field = |name| Field::of_sample(name, at);
        let attribute = |name: &Bound<'py, PyString>| item.getattr(name).map_err(|error| not_an_item(item, at, error));
        let input_ids = attribute(intern!(py, "input_ids"))?;
        let action_mask = attribute(intern!(py, "action_mask"))?;
        let attention_mask = attribute(intern!(py, "attention_mask"))?;
        let weight = attribute(intern!(py, "weight"))?;
        let logps = token_logps(item)?;
        let weight = weight.extract().map_err(|error| wrong_weight(&weight, at, error))?;
        let tokens = self.ids.prepare(&input_ids, field("input_ids"))?;
        self.action.prepare_mask(&action_mask, field("action_mask"))?;
        let is_attended = is_list_of_ones(&attention_mask, tokens)?;
        if !is_attended {
            self.attention.prepare_mask(&attention_mask, field("attention_mask"))?;
        }
        logps.as_ref().map(|logps| self.logps.prepare(logps, field("actor_logps"))).transpose()?;
        // From here on no Python code runs: arrays are borrowed.
        let attention = || self.attention.borrow(&attention_mask, field("attention_mask"));
        let sample = Sample {
            input_ids: self.ids.borrow(&input_ids, field("input_ids"))?,
            action_mask: self.action.borrow(&action_mask, field("action_mask"))?,
            attention_mask: (!is_attended).then(attention).transpose()?,
            actor_logps: logps.as_ref().map(|logps| self.logps.borrow(logps, field("actor_logps"))).transpose()?,
            weight,
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

/// A guess at the tokens of all items, so that the columns need not grow: what a sequence says of
/// its length may be wrong.
fn expected_tokens(items: &Bound<'_, PyList>) -> PyResult<usize> {
    const LIMIT: usize = 1 << 26;
    let mut total = 0usize;
    for item in items {
        let length = item.getattr(intern!(item.py(), "input_ids")).and_then(|ids| ids.len());
        total = match length {
            Ok(length) => total.saturating_add(length),
            // What is wrong with it is said when it is read.
            Err(error) if is_error_of_the_value(&error, items.py()) => total,
            Err(error) => return Err(error),
        };
    }
    Ok(total.min(LIMIT))
}

fn list_of_items<'py>(items: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
    let found = items.get_type().name()?;
    let count = items.len().map_err(|error| {
        let message = format!("items is a {found}, but must be a sequence of SAWItem; wrap it in list()");
        refusal(items.py(), error, "DataTypeError", message)
    })?;
    if count > MAX_ITEMS {
        let message =
            format!("{count} items are more than one table takes ({MAX_ITEMS}); split them, or use from_columns");
        return Err(raised("DataError", message));
    }
    if let Ok(list) = items.cast::<PyList>() {
        return Ok(list.clone());
    }
    let read = items.try_iter()?.take(count + 1).collect::<PyResult<Vec<_>>>()?;
    if read.len() > count {
        let message = format!("items is a {found} that says it has {count} items, and has more; wrap it in list()");
        return Err(raised("DataError", message));
    }
    PyList::new(items.py(), read)
}

fn not_an_item(item: &Bound<'_, PyAny>, at: usize, error: PyErr) -> PyErr {
    let found = item.get_type().name().map_or_else(|_| "?".to_owned(), |name| name.to_string());
    let message = format!("sample {at} is a {found}, but must be a SAWItem: {error}");
    refusal(item.py(), error, "DataTypeError", message)
}

fn wrong_weight(weight: &Bound<'_, PyAny>, at: usize, error: PyErr) -> PyErr {
    let shown = weight.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string());
    let message = format!("sample {at}: weight is {shown}, but must be a number");
    refusal(weight.py(), error, "DataTypeError", message)
}
