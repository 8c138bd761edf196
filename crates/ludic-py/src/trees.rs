//! Prefix trees: the plan as arrays, and the layout in numpy memory.

use ludic_core::SampleTable;
use ludic_core::trees::TreeOut;
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arena::{Arena, Outputs};
use crate::arguments::run_detached;
use crate::errors::Result;

/// The fields of a `TreePlan`: order, shared, bounds, tokens.
pub type PlanArrays<'py> =
    (Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i32>>);

/// Plans the trees of the samples, or with `paired` of the pairs, at `indices`.
pub fn plan<'py>(
    py: Python<'py>,
    table: &SampleTable,
    indices: &[i64],
    micro_token_budget: i64,
    min_shared: i64,
    paired: bool,
) -> Result<PlanArrays<'py>> {
    let plan = run_detached(py, table.num_tokens(), || {
        if paired {
            table.plan_pair_trees(indices, micro_token_budget, min_shared)
        } else {
            table.plan_trees(indices, micro_token_budget, min_shared)
        }
    })?;
    let shared: Vec<i64> = plan.shared.into_iter().map(i64::from).collect();
    Ok((
        plan.order.into_pyarray(py),
        shared.into_pyarray(py),
        plan.bounds.into_pyarray(py),
        plan.tokens.into_pyarray(py),
    ))
}

/// Writes the tree layout.
pub fn collate<'py>(
    py: Python<'py>,
    table: &SampleTable,
    indices: &[i64],
    shared: &[i64],
    arena: Option<&mut Arena>,
) -> Result<Bound<'py, PyDict>> {
    let trees = table.trees(indices, shared)?;
    let mut outputs = Outputs::new(py, arena);
    let out = TreeOut {
        input_ids: outputs.array::<i64, _>("input_ids", [1, trees.num_tokens()])?,
        position_ids: outputs.array("position_ids", [1, trees.num_tokens()])?,
        places: outputs.array("places", [trees.num_places()])?,
    };
    run_detached(py, trees.num_places(), || trees.collate(out))?;
    Ok(outputs.arrays)
}
