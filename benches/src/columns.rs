//! A macro-batch in columns, with the lengths of a workload.

use ludic_core::{ColumnInput, Floats, Ints, SampleTable};

use crate::Workload;

/// The columns of a macro-batch. The first quarter of each sample is its prompt; all other tokens
/// are actions.
#[derive(Debug)]
pub struct Columns {
    ids: Vec<i32>,
    action: Vec<u8>,
    logps: Vec<f32>,
    offsets: Vec<i64>,
}

impl Columns {
    /// The columns of `samples` samples, the same for the same seed.
    pub fn new(workload: Workload, samples: usize, seed: u64) -> Self {
        let lengths = workload.lengths(samples, seed);
        let mut offsets = vec![0];
        let mut action = Vec::new();
        for length in lengths {
            let (length, prompt) = (length as usize, length as usize / 4);
            action.extend((0..length).map(|at| u8::from(at >= prompt)));
            offsets.push(action.len() as i64);
        }
        let ids = (0..action.len() as i32).map(|at| at.wrapping_mul(7919) & 0xffff).collect();
        let logps = action.iter().enumerate().map(|(at, &bit)| f32::from(bit) * -((at % 97) as f32) / 32.0).collect();
        Self { ids, action, logps, offsets }
    }

    /// The number of tokens.
    pub fn tokens(&self) -> usize {
        self.ids.len()
    }

    /// The input of a table.
    pub fn input(&self) -> ColumnInput<'_> {
        ColumnInput {
            input_ids: Ints::I32(&self.ids),
            action_mask: Ints::U8(&self.action),
            attention_mask: None,
            actor_logps: Some(Floats::F32(&self.logps)),
            weights: None,
            offsets: Ints::I64(&self.offsets),
        }
    }

    /// The table of all samples.
    pub fn table(&self) -> SampleTable {
        SampleTable::from_columns(&self.input()).expect("the columns are valid")
    }
}
