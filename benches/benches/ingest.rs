//! Building a table from columns, and truncation with counts of tokens. Workload W1, seed 0.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ludic_benches::{Columns, Workload};
use ludic_core::SampleTable;
use std::hint::black_box;

fn from_columns(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("ingest");
    for samples in [100, 1_000] {
        let columns = Columns::new(Workload::W1, samples, 0);
        group.throughput(Throughput::Elements(columns.tokens() as u64));
        group.bench_function(BenchmarkId::new("from_columns", samples), |bencher| {
            bencher.iter(|| SampleTable::from_columns(black_box(&columns.input())).expect("the columns are valid"));
        });
    }
}

fn truncate(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("truncate");
    for samples in [1_000, 100_000] {
        let table = Columns::new(Workload::W1, samples, 0).table();
        group.throughput(Throughput::Elements(samples as u64));
        group.bench_function(BenchmarkId::new("lengths and action counts", samples), |bencher| {
            bencher.iter(|| {
                let view = black_box(&table).truncate(1024).expect("1024 is positive");
                (view.lengths(), view.action_counts())
            });
        });
    }
}

criterion_group!(benches, from_columns, truncate);
criterion_main!(benches);
