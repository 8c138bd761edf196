//! Plans for several ranks. Nothing in `ludic` uses them yet; they are for data-parallel training.

use ludic_core::balance::{self, Packing, RankOptions};
use numpy::PyArray1;
use pyo3::prelude::*;

use crate::arguments::{Count, InPlace, Lengths};
use crate::errors::Result;
use crate::plan::{Position, get_micro_batch, int64_array};

/// The micro-batches of one rank. An empty one stands for a row of weight zero, which keeps the
/// ranks in step.
#[pyclass(frozen, sequence, module = "ludic._core")]
pub struct RankPlan(balance::RankPlan);

#[pymethods]
impl RankPlan {
    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __getitem__<'py>(&self, py: Python<'py>, index: Position) -> PyResult<Bound<'py, PyArray1<i64>>> {
        get_micro_batch(index, self.0.len(), |index| self.0.get(index)).map(|rows| int64_array(py, rows))
    }

    fn __repr__(&self) -> String {
        let (len, padded, cost) = (self.0.len(), self.0.padded_tokens(), self.0.cost());
        format!("RankPlan({len} micro-batches, {padded} tokens, cost {cost})")
    }

    #[getter]
    fn cost(&self) -> u128 {
        self.0.cost()
    }

    #[getter]
    fn padded_tokens(&self) -> u64 {
        self.0.padded_tokens()
    }
}

/// Plans the same number of micro-batches for each rank, balanced by cost. A row of n tokens costs
/// `linear * n + quadratic * n**2`.
#[pyfunction]
#[pyo3(
    signature = (
        lengths, micro_token_budget, world_size, packing = "optimal", overhead_tokens = Count(256), linear = Count(24576),
        quadratic = Count(1)
    ),
    text_signature = "(lengths, micro_token_budget, world_size, packing='optimal', overhead_tokens=256, linear=24576, quadratic=1)"
)]
#[allow(clippy::too_many_arguments)] // The signature of the Python function.
pub fn plan_ranks(
    py: Python<'_>,
    lengths: Lengths<'_>,
    micro_token_budget: Count,
    world_size: Count,
    packing: &str,
    overhead_tokens: Count,
    linear: Count,
    quadratic: Count,
) -> Result<Vec<RankPlan>> {
    let options = RankOptions {
        world_size: world_size.0,
        packing: Packing::from_name(packing)?,
        overhead_tokens: overhead_tokens.0,
        linear: linear.0,
        quadratic: quadratic.0,
    };
    let in_place = InPlace::ranks(options.packing);
    let plans = lengths.plan(py, in_place, |lengths| balance::plan_ranks(lengths, micro_token_budget.0, &options))?;
    Ok(plans.into_iter().map(RankPlan).collect())
}
