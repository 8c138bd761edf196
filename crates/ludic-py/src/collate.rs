//! The three layouts, written directly into numpy memory with the interpreter released.

use std::mem::MaybeUninit;

use ludic_core::SampleTable;
use ludic_core::collate::{Batch, CompactOut, LogpsOut, PaddedOut, PaddingFreeOut};
use numpy::ndarray::IntoDimension;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arena::{Arena, Outputs};
use crate::arguments::run_detached;
use crate::errors::Result;

/// Adds the arrays of log-probabilities, if the table has any.
fn add_logps<'a, D: IntoDimension>(
    outputs: &mut Outputs<'_, 'a>,
    has_logps: bool,
    shape: D,
    samples: usize,
) -> PyResult<Option<LogpsOut<'a, MaybeUninit<f32>>>> {
    if !has_logps {
        return Ok(None);
    }
    Ok(Some(LogpsOut {
        actor_logps: outputs.array("actor_logps", shape)?,
        old_logp_action: outputs.array("old_logp_action", [samples])?,
    }))
}

/// Adds `turns` [N, 3] if samples share lines. See `Batch::turns`.
fn add_turns(outputs: &mut Outputs<'_, '_>, batch: &Batch<'_>) -> PyResult<()> {
    let Some(turns) = batch.turns() else { return Ok(()) };
    let out = outputs.array::<i64, _>("turns", [turns.len(), 3])?;
    out.iter_mut().zip(turns.as_flattened()).for_each(|(slot, &value)| {
        slot.write(value);
    });
    Ok(())
}

/// Adds the token columns, each in the shape of the ids; a `width` of 0 means no padding.
fn add_token_columns<D: IntoDimension + Copy>(
    outputs: &mut Outputs<'_, '_>,
    table: &SampleTable,
    batch: &Batch<'_>,
    shape: D,
    width: usize,
) -> Result<()> {
    for (index, name) in table.token_column_names().enumerate() {
        let out = outputs.array::<f32, _>(name, shape)?;
        batch.collate_token_column(index, width, out)?;
    }
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
    let batch = table.batch(indices)?;
    let mut outputs = Outputs::new(py, arena);
    let (samples, size) = (batch.num_samples(), batch.padded_size()?);
    let shape = [batch.num_lines(), batch.num_columns()];
    let out = PaddedOut {
        input_ids: outputs.array::<i64, _>("input_ids", shape)?,
        attention_mask: outputs.array("attention_mask", shape)?,
        action_mask: outputs.array("action_mask", shape)?,
        weight: outputs.array("weight", [samples])?,
        logps: add_logps(&mut outputs, table.has_actor_logps(), shape, samples)?,
    };
    run_detached(py, size, || batch.collate_padded(pad_token_id, out))?;
    add_token_columns(&mut outputs, table, &batch, shape, batch.num_columns())?;
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
    let batch = table.batch(indices)?;
    let mut outputs = Outputs::new(py, arena);
    let (samples, size) = (batch.num_samples(), batch.packed_size()?);
    let shape = [1, size];
    let out = PaddingFreeOut {
        input_ids: outputs.array::<i64, _>("input_ids", shape)?,
        position_ids: outputs.array("position_ids", shape)?,
        cu_seqlens: outputs.array::<i32, _>("cu_seqlens", [batch.num_lines() + 1])?,
        action_mask: outputs.array("action_mask", shape)?,
        weight: outputs.array("weight", [samples])?,
        logps: add_logps(&mut outputs, table.has_actor_logps(), shape, samples)?,
    };
    run_detached(py, size, || batch.collate_padding_free(out))?;
    add_token_columns(&mut outputs, table, &batch, shape, 0)?;
    outputs.arrays.set_item(intern!(py, "max_seqlen"), batch.num_columns())?;
    add_turns(&mut outputs, &batch)?;
    Ok(outputs.arrays)
}

/// The right-padded layout in nine bytes per token.
pub fn compact<'py>(
    py: Python<'py>,
    table: &SampleTable,
    indices: &[i64],
    pad_token_id: i64,
    arena: Option<&mut Arena>,
) -> Result<Bound<'py, PyDict>> {
    let batch = table.batch(indices)?;
    let mut outputs = Outputs::new(py, arena);
    let (samples, size) = (batch.num_samples(), batch.padded_size()?);
    let shape = [batch.num_lines(), batch.num_columns()];
    let out = CompactOut {
        input_ids: outputs.array::<i32, _>("input_ids", shape)?,
        action_mask: outputs.array::<u8, _>("action_mask", shape)?,
        lengths: outputs.array("lengths", [batch.num_lines()])?,
        weight: outputs.array("weight", [samples])?,
        logps: add_logps(&mut outputs, table.has_actor_logps(), shape, samples)?,
    };
    run_detached(py, size, || batch.collate_compact(pad_token_id, out))?;
    add_token_columns(&mut outputs, table, &batch, shape, batch.num_columns())?;
    add_turns(&mut outputs, &batch)?;
    Ok(outputs.arrays)
}
