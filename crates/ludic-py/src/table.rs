//! `SampleTable`: input, views and columns. The layouts are in `collate.rs`.

use ludic_core::{ColumnInput, Sample, TableBuilder};
use numpy::{IntoPyArray, PyArray1};
use pyo3::exceptions::{PyAttributeError, PyKeyError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};

use crate::arena::{Arena, lock_arena};
use crate::arguments::Count;
use crate::bytes;
use crate::collate;
use crate::errors::{Error, Result, is_recoverable, ludic_error, replace_conversion_error};
use crate::fields::{Field, repr_of, type_name};
use crate::lists::is_list_of_ones;
use crate::sequences::{FloatReader, IntReader};
use crate::trees;

/// The largest number of items. Reading an item costs about half a microsecond per object; columns
/// have no such cost.
const MAX_ITEMS: usize = 1 << 20;

/// A macro-batch stored as columns. Immutable: `truncate` and `select` return views that share the
/// columns.
#[pyclass(frozen, module = "ludic._core")]
pub struct SampleTable(pub ludic_core::SampleTable);

#[pymethods]
impl SampleTable {
    /// Builds a table from `SAWItem`s. Their sequences may be lists, tuples, numpy arrays or bytes.
    #[staticmethod]
    fn from_items(items: &Bound<'_, PyAny>) -> Result<Self> {
        let items = list_items(items)?;
        let mut builder = TableBuilder::with_capacity(items.len(), estimate_tokens(&items)?);
        let mut reader = ItemReader::default();
        for (index, item) in items.iter().enumerate() {
            reader.push(&mut builder, index, &item)?;
        }
        Ok(Self(builder.finish()))
    }

    /// Builds a table from columns of S tokens; `offsets` has the shape [N + 1]. `actor_logps` [S]
    /// is aligned with the tokens; values at tokens that are not actions are ignored.
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
        Columns { input_ids, action_mask, offsets, weights, actor_logps, attention_mask }.build_table()
    }

    /// Reads a table from the bytes that `to_bytes` returned.
    #[staticmethod]
    fn from_bytes(buffer: &Bound<'_, PyAny>) -> Result<Self> {
        Ok(Self(bytes::read(buffer)?))
    }

    /// The table as bytes, in the layout of safetensors.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>> {
        bytes::write(py, &self.0)
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

    /// The same samples, with those that continue each other linked into chains, which share a line
    /// of a micro-batch.
    fn chained(&self) -> Self {
        Self(self.0.chained())
    }

    /// Whether a sample of the columns has a 0 in its attention mask.
    #[getter]
    fn has_partial_attention(&self) -> bool {
        self.0.has_partial_attention()
    }

    /// The same samples, cut on the right to at most `max_seq_len` tokens. No token is copied.
    fn truncate(&self, max_seq_len: Count) -> Result<Self> {
        Ok(Self(self.0.truncate(max_seq_len.0)?))
    }

    /// The same samples with other weights, one each. No token is copied.
    fn with_weights(&self, weights: &Bound<'_, PyAny>) -> Result<Self> {
        let mut reader = FloatReader::default();
        reader.prepare(weights, Field::column("weights"))?;
        Ok(Self(self.0.with_weights(reader.borrow(weights, Field::column("weights"))?)?))
    }

    /// The names of the token columns, in alphabetical order.
    #[getter]
    fn token_columns<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.token_column_names())
    }

    /// The values of a token column, one for each token of each sample; 0 where the token is not an
    /// action.
    fn token_column<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyArray1<f32>>> {
        let values = self.0.token_column(name);
        values.map(|values| values.into_pyarray(py)).ok_or_else(|| PyKeyError::new_err(name.to_owned()))
    }

    /// The same samples with one more token column. No other column is copied.
    fn with_token_column(&self, name: &str, values: &Bound<'_, PyAny>) -> Result<Self> {
        let (mut reader, field) = (FloatReader::default(), Field::column("a token column"));
        reader.prepare(values, field)?;
        Ok(Self(self.0.with_token_column(name, reader.borrow(values, field)?)?))
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

    /// The samples at `indices` in the order of their prefix trees; see `trees.rs` of the core.
    #[pyo3(signature = (indices, micro_token_budget, min_shared = Count(1), paired = false), text_signature = "($self, indices, micro_token_budget, min_shared=1, paired=False)")]
    fn plan_trees<'py>(
        &self,
        py: Python<'py>,
        indices: Indices,
        micro_token_budget: Count,
        min_shared: Count,
        paired: bool,
    ) -> Result<trees::PlanArrays<'py>> {
        trees::plan(py, &self.0, &indices.0, micro_token_budget.0, min_shared.0, paired)
    }

    /// The tree layout: `input_ids` and `position_ids` i64 [1, U], `places` i64 [S].
    #[pyo3(signature = (indices, shared, arena = None))]
    fn collate_trees<'py>(
        &self,
        py: Python<'py>,
        indices: Indices,
        shared: Indices,
        arena: Option<&Bound<'py, Arena>>,
    ) -> Result<Bound<'py, PyDict>> {
        trees::collate(py, &self.0, &indices.0, &shared.0, lock_arena(arena)?.as_deref_mut())
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
        let field = Field::indices("indices");
        reader.prepare(&value, field)?;
        Ok(Self(reader.borrow(&value, field)?.to_i64().map_err(Error::from)?))
    }
}

/// The columns as Python objects.
struct Columns<'a, 'py> {
    input_ids: &'a Bound<'py, PyAny>,
    action_mask: &'a Bound<'py, PyAny>,
    offsets: &'a Bound<'py, PyAny>,
    weights: Option<&'a Bound<'py, PyAny>>,
    actor_logps: Option<&'a Bound<'py, PyAny>>,
    attention_mask: Option<&'a Bound<'py, PyAny>>,
}

impl Columns<'_, '_> {
    fn build_table(&self) -> Result<SampleTable> {
        let [mut ids, mut action, mut offsets, mut attention] = [(); 4].map(|()| IntReader::default());
        let [mut weights, mut logps] = [(); 2].map(|()| FloatReader::default());
        let column = Field::column;
        ids.prepare(self.input_ids, column("input_ids"))?;
        action.prepare_mask(self.action_mask, column("action_mask"))?;
        self.attention_mask.map(|mask| attention.prepare_mask(mask, column("attention_mask"))).transpose()?;
        self.actor_logps.map(|values| logps.prepare(values, column("actor_logps"))).transpose()?;
        self.weights.map(|values| weights.prepare(values, column("weights"))).transpose()?;
        offsets.prepare(self.offsets, Field::indices("offsets"))?;
        // From here on no Python code may run: arrays are borrowed.
        let borrow_attention = |mask| attention.borrow(mask, column("attention_mask"));
        let input = ColumnInput {
            input_ids: ids.borrow(self.input_ids, column("input_ids"))?,
            action_mask: action.borrow(self.action_mask, column("action_mask"))?,
            attention_mask: self.attention_mask.map(borrow_attention).transpose()?,
            actor_logps: self.actor_logps.map(|values| logps.borrow(values, column("actor_logps"))).transpose()?,
            weights: self.weights.map(|values| weights.borrow(values, column("weights"))).transpose()?,
            offsets: offsets.borrow(self.offsets, Field::indices("offsets"))?,
        };
        Ok(SampleTable(ludic_core::SampleTable::from_columns(&input)?))
    }
}

/// Reads the fields of one `SAWItem` after the other and reuses its memory.
#[derive(Default)]
struct ItemReader {
    ids: IntReader,
    action: IntReader,
    attention: IntReader,
    logps: FloatReader,
}

impl ItemReader {
    /// Reads the item with this index and pushes it to `builder`.
    fn push<'py>(&mut self, builder: &mut TableBuilder, index: usize, item: &Bound<'py, PyAny>) -> Result<()> {
        let py = item.py();
        let field = |name| Field::of_sample(name, index);
        let attribute =
            |name: &Bound<'py, PyString>| stored(item, name).map_err(|error| item_error(item, index, error));
        let input_ids = attribute(intern!(py, "input_ids"))?;
        let action_mask = attribute(intern!(py, "action_mask"))?;
        let attention_mask = attribute(intern!(py, "attention_mask"))?;
        let weight = attribute(intern!(py, "weight"))?;
        let logps = token_logps(item)?;
        let weight = weight.extract().map_err(|error| weight_error(&weight, index, error))?;
        let tokens = self.ids.prepare(&input_ids, field("input_ids"))?;
        self.action.prepare_mask(&action_mask, field("action_mask"))?;
        let all_attended = is_list_of_ones(&attention_mask, tokens)?;
        if !all_attended {
            self.attention.prepare_mask(&attention_mask, field("attention_mask"))?;
        }
        logps.as_ref().map(|logps| self.logps.prepare(logps, field("actor_logps"))).transpose()?;
        // From here on no Python code may run: arrays are borrowed.
        let borrow_attention = || self.attention.borrow(&attention_mask, field("attention_mask"));
        let sample = Sample {
            input_ids: self.ids.borrow(&input_ids, field("input_ids"))?,
            action_mask: self.action.borrow(&action_mask, field("action_mask"))?,
            attention_mask: (!all_attended).then(borrow_attention).transpose()?,
            actor_logps: logps.as_ref().map(|logps| self.logps.borrow(logps, field("actor_logps"))).transpose()?,
            weight,
        };
        Ok(builder.push(&sample)?)
    }
}

/// The attribute as the object holds it. Samples hold arrays that become lists when their attribute
/// is read (`ludic.columns`); here they stay arrays.
fn stored<'py>(item: &Bound<'py, PyAny>, name: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyAny>> {
    let fields = item.getattr_opt(intern!(item.py(), "__dict__"))?;
    let held = match fields.as_ref().map(|fields| fields.cast_exact::<PyDict>()) {
        Some(Ok(fields)) => fields.get_item(name)?,
        _ => None,
    };
    held.map_or_else(|| item.getattr(name), Ok)
}

/// `item.attachments.actor_logps.token_logps`; None if any of them is absent or None.
fn token_logps<'py>(item: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = item.py();
    let mut value = item.clone();
    for name in [intern!(py, "attachments"), intern!(py, "actor_logps")] {
        match value.getattr_opt(name)? {
            Some(next) if !next.is_none() => value = next,
            _ => return Ok(None),
        }
    }
    match stored(&value, intern!(py, "token_logps")) {
        Ok(logps) => Ok(Some(logps).filter(|logps| !logps.is_none())),
        Err(error) if error.is_instance_of::<PyAttributeError>(py) => Ok(None),
        Err(error) => Err(error),
    }
}

/// An estimate of the number of tokens of all items, so that the columns need not grow. The `len`
/// of a sequence may be wrong.
fn estimate_tokens(items: &Bound<'_, PyList>) -> PyResult<usize> {
    const LIMIT: usize = 1 << 26;
    let mut total = 0usize;
    for item in items {
        let length = stored(&item, intern!(item.py(), "input_ids")).and_then(|ids| ids.len());
        total = match length {
            Ok(length) => total.saturating_add(length),
            // The error is reported when the item is read.
            Err(error) if is_recoverable(&error, items.py()) => total,
            Err(error) => return Err(error),
        };
    }
    Ok(total.min(LIMIT))
}

/// The items as a list. Checks that there are not too many, and not more than `len` says.
fn list_items<'py>(items: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
    let actual = items.get_type().name()?;
    let count = items.len().map_err(|error| {
        let message = format!("items is a {actual}, but must be a sequence of SAWItem; wrap it in list()");
        replace_conversion_error(items.py(), error, "DataTypeError", message)
    })?;
    if count > MAX_ITEMS {
        let message =
            format!("{count} items are more than one table takes ({MAX_ITEMS}); split them, or use from_columns");
        return Err(ludic_error("DataError", message));
    }
    if let Ok(list) = items.cast::<PyList>() {
        return Ok(list.clone());
    }
    let list = items.try_iter()?.take(count + 1).collect::<PyResult<Vec<_>>>()?;
    if list.len() > count {
        let message = format!("items is a {actual} with a len of {count}, but yields more items; wrap it in list()");
        return Err(ludic_error("DataError", message));
    }
    PyList::new(items.py(), list)
}

fn item_error(item: &Bound<'_, PyAny>, index: usize, error: PyErr) -> PyErr {
    let message = format!("sample {index} is a {}, but must be a SAWItem: {error}", type_name(item));
    replace_conversion_error(item.py(), error, "DataTypeError", message)
}

fn weight_error(weight: &Bound<'_, PyAny>, index: usize, error: PyErr) -> PyErr {
    let message = format!("sample {index}: weight is {}, but must be a number", repr_of(weight));
    replace_conversion_error(weight.py(), error, "DataTypeError", message)
}
