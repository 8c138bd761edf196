//! The three layouts, written straight into numpy memory with the interpreter released.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::slice;

use ludic_core::collate::{Batch, CompactOut, LogpsOut, PaddedOut, PaddingFreeOut};
use numpy::ndarray::{ArrayView, Dimension, IntoDimension};
use numpy::{Element, PyArray, PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::errors::{Result, raised};
use crate::table::SampleTable;

/// Output buffers used again in turn. An array handed out is overwritten `slots` collations later; for one thread at a
/// time.
#[pyclass(module = "ludic._core")]
pub struct Arena {
    slots: Vec<HashMap<&'static str, Py<PyArray1<u64>>>>,
    next: usize,
}

#[pymethods]
impl Arena {
    #[new]
    #[pyo3(signature = (slots = 2))]
    fn new(slots: usize) -> PyResult<Self> {
        if slots == 0 {
            return Err(raised("ConfigError", "slots (0) must be positive".to_owned()));
        }
        Ok(Self { slots: (0..slots).map(|_| HashMap::new()).collect(), next: 0 })
    }

    fn __repr__(&self) -> String {
        format!("Arena(slots={})", self.slots.len())
    }
}

/// Hands out arrays for one collation and collects them by name.
struct Outputs<'py, 'a> {
    arrays: Bound<'py, PyDict>,
    reused: Option<&'a mut HashMap<&'static str, Py<PyArray1<u64>>>>,
}

impl<'py, 'a> Outputs<'py, 'a> {
    fn new(py: Python<'py>, arena: Option<&'a mut Arena>) -> Self {
        let reused = arena.map(|arena| {
            let slot = arena.next;
            arena.next = (slot + 1) % arena.slots.len();
            &mut arena.slots[slot]
        });
        Self { arrays: PyDict::new(py), reused }
    }

    /// A new array under `name`, and its memory, which the caller writes whole before the dictionary is handed out.
    fn array<T: Element + Copy, D: IntoDimension>(
        &mut self,
        name: &'static str,
        shape: D,
    ) -> PyResult<&'a mut [MaybeUninit<T>]> {
        let py = self.arrays.py();
        let shape = shape.into_dimension();
        let count = shape.size();
        let array: Bound<'py, PyArray<T, D::Dim>> = match &mut self.reused {
            // SAFETY: every element is written before Python sees the array.
            None => unsafe { PyArray::new(py, shape, false) },
            Some(buffers) => {
                let base = grown(py, buffers, name, (count * size_of::<T>()).div_ceil(size_of::<u64>()));
                // SAFETY: the base has room for `count` elements, is aligned for any of them, is never reallocated, and
                // lives as long as the array, whose base it is.
                unsafe {
                    let view = ArrayView::from_shape_ptr(shape, base.data().cast_const().cast::<T>());
                    PyArray::borrow_from_array(&view, base.into_any())
                }
            }
        };
        let memory = array.data().cast::<MaybeUninit<T>>();
        self.arrays.set_item(PyString::intern(py, name), array)?;
        // SAFETY: the dictionary keeps the array, nobody else can reach it before `finish`, and each name has its own.
        Ok(unsafe { slice::from_raw_parts_mut(memory, count) })
    }

    fn logps<D: IntoDimension>(
        &mut self,
        table: &SampleTable,
        shape: D,
        samples: usize,
    ) -> PyResult<Option<LogpsOut<'a, MaybeUninit<f32>>>> {
        if !table.0.has_actor_logps() {
            return Ok(None);
        }
        Ok(Some(LogpsOut {
            actor_logps: self.array("actor_logps", shape)?,
            old_logp_action: self.array("old_logp_action", [samples])?,
        }))
    }
}

/// The buffer under `name`, made larger where it is too small. Arrays handed out earlier keep the old one.
fn grown<'py>(
    py: Python<'py>,
    buffers: &mut HashMap<&'static str, Py<PyArray1<u64>>>,
    name: &'static str,
    words: usize,
) -> Bound<'py, PyArray1<u64>> {
    match buffers.get(name) {
        Some(buffer) if buffer.bind(py).len() >= words => buffer.bind(py).clone(),
        _ => {
            let larger = PyArray1::zeros(py, [words + words / 4], false);
            buffers.insert(name, larger.clone().unbind());
            larger
        }
    }
}

/// `turns` [N, 3], where samples share lines.
fn add_turns(outputs: &mut Outputs<'_, '_>, batch: &Batch<'_>) -> PyResult<()> {
    let Some(turns) = batch.turns() else { return Ok(()) };
    let out = outputs.array::<i64, _>("turns", [turns.len(), 3])?;
    out.iter_mut().zip(turns.as_flattened()).for_each(|(slot, &value)| {
        slot.write(value);
    });
    Ok(())
}

/// The right-padded layout.
pub fn padded<'py>(
    py: Python<'py>,
    table: &SampleTable,
    indices: &[i64],
    pad_token_id: i64,
    arena: Option<&mut Arena>,
) -> Result<Bound<'py, PyDict>> {
    let batch = table.0.batch(indices)?;
    let mut outputs = Outputs::new(py, arena);
    let (samples, shape) = (batch.num_samples(), [batch.num_lines(), batch.num_columns()]);
    let out = PaddedOut {
        input_ids: outputs.array::<i64, _>("input_ids", shape)?,
        attention_mask: outputs.array("attention_mask", shape)?,
        action_mask: outputs.array("action_mask", shape)?,
        weight: outputs.array("weight", [samples])?,
        logps: outputs.logps(table, shape, samples)?,
    };
    py.detach(|| batch.collate_padded(pad_token_id, out))?;
    add_turns(&mut outputs, &batch)?;
    Ok(outputs.arrays)
}

/// The padding-free layout.
pub fn padding_free<'py>(
    py: Python<'py>,
    table: &SampleTable,
    indices: &[i64],
    arena: Option<&mut Arena>,
) -> Result<Bound<'py, PyDict>> {
    let batch = table.0.batch(indices)?;
    let mut outputs = Outputs::new(py, arena);
    let (samples, shape) = (batch.num_samples(), [1, batch.num_tokens()]);
    let out = PaddingFreeOut {
        input_ids: outputs.array::<i64, _>("input_ids", shape)?,
        position_ids: outputs.array("position_ids", shape)?,
        cu_seqlens: outputs.array::<i32, _>("cu_seqlens", [batch.num_lines() + 1])?,
        action_mask: outputs.array("action_mask", shape)?,
        weight: outputs.array("weight", [samples])?,
        logps: outputs.logps(table, shape, samples)?,
    };
    py.detach(|| batch.collate_padding_free(out))?;
    outputs.arrays.set_item(intern!(py, "max_seqlen"), batch.num_columns())?;
    add_turns(&mut outputs, &batch)?;
    Ok(outputs.arrays)
}

/// The right-padded layout in nine bytes a token.
pub fn compact<'py>(
    py: Python<'py>,
    table: &SampleTable,
    indices: &[i64],
    pad_token_id: i64,
    arena: Option<&mut Arena>,
) -> Result<Bound<'py, PyDict>> {
    let batch = table.0.batch(indices)?;
    let mut outputs = Outputs::new(py, arena);
    let (samples, shape) = (batch.num_samples(), [batch.num_lines(), batch.num_columns()]);
    let out = CompactOut {
        input_ids: outputs.array::<i32, _>("input_ids", shape)?,
        action_mask: outputs.array::<u8, _>("action_mask", shape)?,
        lengths: outputs.array("lengths", [batch.num_lines()])?,
        weight: outputs.array("weight", [samples])?,
        logps: outputs.logps(table, shape, samples)?,
    };
    py.detach(|| batch.collate_compact(pad_token_id, out))?;
    add_turns(&mut outputs, &batch)?;
    Ok(outputs.arrays)
}
