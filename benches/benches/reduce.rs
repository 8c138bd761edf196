//! Reducers over a column: nanoseconds per value.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ludic_core::reduce::{Reduction, reduce_column};
use std::hint::black_box;

fn columns(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("reduce_column");
    for (name, reduction) in [("mean", Reduction::Mean), ("count_true", Reduction::CountTrue)] {
        for samples in [10_000u32, 100_000] {
            let values: Vec<f64> = (0..samples).map(|at| f64::from(at % 3)).collect();
            group.throughput(Throughput::Elements(u64::from(samples)));
            group.bench_function(BenchmarkId::new(name, samples), |bencher| {
                bencher.iter(|| reduce_column(reduction, black_box(&values)));
            });
        }
    }
}

criterion_group!(benches, columns);
criterion_main!(benches);
