//! Collation of micro-batches of 16384 tokens in every layout, into reused buffers: nanoseconds per
//! real token. Workload W1, 1000 samples, seed 0.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ludic_benches::{Columns, Workload};
use ludic_core::collate::{Batch, CompactOut, LogpsOut, PaddedOut, PaddingFreeOut};
use ludic_core::{SampleTable, plan};

const BUDGET: usize = 16384;

/// Room for the largest micro-batch in any layout.
struct Buffers {
    wide: [Vec<i64>; 2],
    narrow: [Vec<i32>; 2],
    bits: Vec<u8>,
    floats: [Vec<f32>; 2],
    rows: [Vec<f32>; 2],
}

impl Buffers {
    fn new() -> Self {
        Self {
            wide: [(); 2].map(|()| vec![0; BUDGET]),
            narrow: [(); 2].map(|()| vec![0; BUDGET + 1]),
            bits: vec![0; BUDGET],
            floats: [(); 2].map(|()| vec![0.0; BUDGET]),
            rows: [(); 2].map(|()| vec![0.0; BUDGET]),
        }
    }

    fn padded(&mut self, batch: &Batch<'_>) {
        let (rows, size) = (batch.num_lines(), batch.num_lines() * batch.num_columns());
        let ([ids, attention], [action, logps], [weight, sums]) = (&mut self.wide, &mut self.floats, &mut self.rows);
        let out = PaddedOut {
            input_ids: &mut ids[..size],
            attention_mask: &mut attention[..size],
            action_mask: &mut action[..size],
            weight: &mut weight[..rows],
            logps: Some(LogpsOut { actor_logps: &mut logps[..size], old_logp_action: &mut sums[..rows] }),
        };
        batch.collate_padded(0, out).expect("the buffers fit");
    }

    fn padding_free(&mut self, batch: &Batch<'_>) {
        let (rows, size) = (batch.num_lines(), batch.num_tokens());
        let ([ids, positions], [action, logps], [weight, sums]) = (&mut self.wide, &mut self.floats, &mut self.rows);
        let out = PaddingFreeOut {
            input_ids: &mut ids[..size],
            position_ids: &mut positions[..size],
            cu_seqlens: &mut self.narrow[0][..=rows],
            action_mask: &mut action[..size],
            weight: &mut weight[..rows],
            logps: Some(LogpsOut { actor_logps: &mut logps[..size], old_logp_action: &mut sums[..rows] }),
        };
        batch.collate_padding_free(out).expect("the buffers fit");
    }

    fn compact(&mut self, batch: &Batch<'_>) {
        let (rows, size) = (batch.num_lines(), batch.num_lines() * batch.num_columns());
        let ([ids, lengths], [logps, _], [weight, sums]) = (&mut self.narrow, &mut self.floats, &mut self.rows);
        let out = CompactOut {
            input_ids: &mut ids[..size],
            action_mask: &mut self.bits[..size],
            lengths: &mut lengths[..rows],
            weight: &mut weight[..rows],
            logps: Some(LogpsOut { actor_logps: &mut logps[..size], old_logp_action: &mut sums[..rows] }),
        };
        batch.collate_compact(0, out).expect("the buffers fit");
    }
}

fn micro_batches(table: &SampleTable) -> Vec<Vec<i64>> {
    let plan = plan::greedy(&table.lengths(), BUDGET as i64).expect("the budget holds the longest");
    plan.iter().map(|rows| rows.iter().map(|&row| i64::from(row)).collect()).collect()
}

fn bench_layouts(criterion: &mut Criterion) {
    type Layout = fn(&mut Buffers, &Batch<'_>);
    let layouts: [(&str, Layout); 3] =
        [("padded", Buffers::padded), ("padding_free", Buffers::padding_free), ("compact", Buffers::compact)];
    let table = Columns::new(Workload::W1, 1_000, 0).table();
    let plan = micro_batches(&table);
    let mut group = criterion.benchmark_group("collate");
    group.throughput(Throughput::Elements(table.num_tokens() as u64));
    for (name, layout) in layouts {
        let mut buffers = Buffers::new();
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                for rows in &plan {
                    layout(&mut buffers, &table.batch(rows).expect("every index is in the table"));
                }
            });
        });
    }
}

criterion_group!(benches, bench_layouts);
criterion_main!(benches);
