//! The three layouts, written straight into numpy memory with the interpreter released.

use std::collections::HashMap;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::slice;

use ludic_core::CoreError;
use ludic_core::collate::{Batch, CompactOut, LogpsOut, PaddedOut, PaddingFreeOut};
use numpy::ndarray::{ArrayView, Dimension, IntoDimension};
use numpy::npyffi::{PY_ARRAY_API, npy_intp};
use numpy::{Element, PyArray, PyArray1, PyArrayDescrMethods, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::arguments::Count;
use crate::errors::{Result, raised};
use crate::table::SampleTable;

/// The most slots: each holds the arrays of a whole collation.
const MAX_SLOTS: i64 = 1024;

/// Up to that many tokens are collated with the interpreter attached, in well under a millisecond:
/// a thread that lets go of it waits for it afterwards for as long as another computes (5 ms).
const ATTACHED_TOKENS: usize = 1 << 18;

/// Output buffers used again in turn. An array handed out is overwritten `slots` collations later;
/// for one thread at a time.
#[pyclass(module = "ludic._core")]
pub struct Arena {
    slots: Vec<Buffers>,
    next: usize,
}

/// The memory of one collation, by name.
type Buffers = HashMap<&'static str, Py<PyArray1<u64>>>;

#[pymethods]
impl Arena {
    #[new]
    #[pyo3(signature = (slots = Count(2)), text_signature = "(slots=2)")]
    fn new(slots: Count) -> Result<Self> {
        if !(1..=MAX_SLOTS).contains(&slots.0) {
            let (name, least, most) = ("slots", 1, MAX_SLOTS);
            return Err(CoreError::OutOfRange { name, value: slots.0, least, most }.into());
        }
        Ok(Self { slots: (0..slots.0).map(|_| HashMap::new()).collect(), next: 0 })
    }

    fn __repr__(&self) -> String {
        format!("Arena(slots={})", self.slots.len())
    }
}

/// The arena for this collation alone.
pub fn locked<'py>(arena: Option<&Bound<'py, Arena>>) -> PyResult<Option<PyRefMut<'py, Arena>>> {
    let lock = |arena: &Bound<'py, Arena>| {
        let rule = "the arena is in use by another thread; give each thread an arena of its own";
        arena.try_borrow_mut().map_err(|_| raised("ConfigError", rule.to_owned()))
    };
    arena.map(lock).transpose()
}

/// Runs `collate`, which writes `tokens`, with the interpreter released where that is worth it.
fn written<T: Send>(py: Python<'_>, tokens: usize, collate: impl FnOnce() -> T + Send) -> T {
    if tokens <= ATTACHED_TOKENS { collate() } else { py.detach(collate) }
}

/// Hands out arrays for one collation and collects them by name.
struct Outputs<'py, 'a> {
    arrays: Bound<'py, PyDict>,
    reused: Option<&'a mut Buffers>,
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

    /// A new array under `name`, and its memory, which the caller writes whole before the
    /// dictionary is handed out.
    fn array<T: Element + Copy, D: IntoDimension>(
        &mut self,
        name: &'static str,
        shape: D,
    ) -> PyResult<&'a mut [MaybeUninit<T>]> {
        let py = self.arrays.py();
        let shape = shape.into_dimension();
        let count = shape.size();
        let array: Bound<'py, PyArray<T, D::Dim>> = match &mut self.reused {
            // Every element is written before Python sees the array.
            None => allocated(py, shape, Fill::Nothing)?,
            Some(buffers) => {
                let base = grown(py, buffers, name, (count * size_of::<T>()).div_ceil(size_of::<u64>()))?;
                // SAFETY: the base has room for `count` elements, is aligned for any of them, is
                // never reallocated, and lives as long as the array, whose base it is.
                unsafe {
                    let view = ArrayView::from_shape_ptr(shape, base.data().cast_const().cast::<T>());
                    PyArray::borrow_from_array(&view, base.into_any())
                }
            }
        };
        let memory = array.data().cast::<MaybeUninit<T>>();
        self.arrays.set_item(PyString::intern(py, name), array)?;
        // SAFETY: the dictionary keeps the array, nobody else can reach it before `finish`, and
        // each name has its own.
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

/// The buffer under `name`, made larger where it is too small. Arrays handed out earlier keep the
/// old one.
fn grown<'py>(
    py: Python<'py>,
    buffers: &mut Buffers,
    name: &'static str,
    words: usize,
) -> PyResult<Bound<'py, PyArray1<u64>>> {
    match buffers.get(name) {
        Some(buffer) if buffer.bind(py).len() >= words => Ok(buffer.bind(py).clone()),
        _ => {
            let larger = allocated(py, [words + words / 4].into_dimension(), Fill::Zeros)?;
            buffers.insert(name, larger.clone().unbind());
            Ok(larger)
        }
    }
}

/// What stands in a new array.
enum Fill {
    Nothing,
    Zeros,
}

/// A new array, or numpy's MemoryError: the constructors of the numpy crate panic where there is no
/// memory.
fn allocated<'py, T: Element, D: Dimension>(
    py: Python<'py>,
    shape: D,
    fill: Fill,
) -> PyResult<Bound<'py, PyArray<T, D>>> {
    let mut sizes: Vec<npy_intp> = shape.slice().iter().map(|&size| size as npy_intp).collect();
    let (rank, sizes, dtype) = (sizes.len() as c_int, sizes.as_mut_ptr(), T::get_dtype(py).into_dtype_ptr());
    // SAFETY: `sizes` has `rank` values, numpy takes over the reference to the type, and what it
    // returns is a new reference to an array of that type and rank, or null with an error set.
    unsafe {
        let array = match fill {
            Fill::Nothing => PY_ARRAY_API.PyArray_Empty(py, rank, sizes, dtype, 0),
            Fill::Zeros => PY_ARRAY_API.PyArray_Zeros(py, rank, sizes, dtype, 0),
        };
        Ok(Bound::from_owned_ptr_or_err(py, array)?.cast_into_unchecked())
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
    let (samples, size) = (batch.num_samples(), batch.padded_size()?);
    let shape = [batch.num_lines(), batch.num_columns()];
    let out = PaddedOut {
        input_ids: outputs.array::<i64, _>("input_ids", shape)?,
        attention_mask: outputs.array("attention_mask", shape)?,
        action_mask: outputs.array("action_mask", shape)?,
        weight: outputs.array("weight", [samples])?,
        logps: outputs.logps(table, shape, samples)?,
    };
    written(py, size, || batch.collate_padded(pad_token_id, out))?;
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
    let (samples, size) = (batch.num_samples(), batch.packed_size()?);
    let shape = [1, size];
    let out = PaddingFreeOut {
        input_ids: outputs.array::<i64, _>("input_ids", shape)?,
        position_ids: outputs.array("position_ids", shape)?,
        cu_seqlens: outputs.array::<i32, _>("cu_seqlens", [batch.num_lines() + 1])?,
        action_mask: outputs.array("action_mask", shape)?,
        weight: outputs.array("weight", [samples])?,
        logps: outputs.logps(table, shape, samples)?,
    };
    written(py, size, || batch.collate_padding_free(out))?;
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
    let (samples, size) = (batch.num_samples(), batch.padded_size()?);
    let shape = [batch.num_lines(), batch.num_columns()];
    let out = CompactOut {
        input_ids: outputs.array::<i32, _>("input_ids", shape)?,
        action_mask: outputs.array::<u8, _>("action_mask", shape)?,
        lengths: outputs.array("lengths", [batch.num_lines()])?,
        weight: outputs.array("weight", [samples])?,
        logps: outputs.logps(table, shape, samples)?,
    };
    written(py, size, || batch.collate_compact(pad_token_id, out))?;
    add_turns(&mut outputs, &batch)?;
    Ok(outputs.arrays)
}
