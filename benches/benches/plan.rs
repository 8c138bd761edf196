//! Planning from lengths: nanoseconds per sequence. Seed 0, a budget of 16384 tokens.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ludic_benches::Workload;
use ludic_core::balance::{Packing, RankOptions, plan_ranks};
use ludic_core::{pairs, plan};
use std::hint::black_box;

const BUDGET: i64 = 16384;
const OVERHEAD: i64 = 256;

fn one_rank(criterion: &mut Criterion) {
    type Planner = fn(&[i32]) -> plan::Plan;
    let planners: [(&str, Planner); 3] = [
        ("greedy", |lengths| plan::greedy(lengths, BUDGET).expect("valid")),
        ("optimal", |lengths| plan::optimal(lengths, BUDGET, OVERHEAD).expect("valid")),
        ("padding_free", |lengths| plan::padding_free(lengths, BUDGET).expect("valid")),
    ];
    for (name, planner) in planners {
        let mut group = criterion.benchmark_group(name);
        let sizes = [1_000, 10_000, 100_000, 1_000_000].map(|samples| (Workload::W1, samples));
        let shapes = [Workload::W2, Workload::W3, Workload::W4].map(|workload| (workload, 100_000));
        for (workload, samples) in sizes.into_iter().chain(shapes) {
            let lengths = workload.lengths(samples, 0);
            group.throughput(Throughput::Elements(samples as u64));
            let id = BenchmarkId::new(format!("{workload:?}"), samples);
            group.bench_function(id, |bencher| bencher.iter(|| planner(black_box(&lengths))));
        }
    }
}

fn eight_ranks(criterion: &mut Criterion) {
    for (name, packing) in [("optimal", Packing::Optimal), ("padding_free", Packing::PaddingFree)] {
        let options = RankOptions { world_size: 8, packing, overhead_tokens: OVERHEAD, linear: 24576, quadratic: 1 };
        let mut group = criterion.benchmark_group(format!("ranks_8_{name}"));
        for samples in [256, 1_000, 4_096, 100_000] {
            let lengths = Workload::W1.lengths(samples, 0);
            group.throughput(Throughput::Elements(samples as u64));
            group.bench_function(BenchmarkId::new("W1", samples), |bencher| {
                bencher.iter(|| plan_ranks(black_box(&lengths), BUDGET, &options).expect("valid"));
            });
        }
    }
}

fn preference_pairs(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pairs");
    for count in [1_000, 100_000] {
        let lengths = Workload::W1.pair_lengths(count, 0);
        let rows: Vec<[i64; 2]> = (0..count as i64).map(|pair| [2 * pair, 2 * pair + 1]).collect();
        group.throughput(Throughput::Elements(count as u64));
        group.bench_function(BenchmarkId::new("plan", count), |bencher| {
            bencher.iter(|| pairs::plan(black_box(&lengths), &rows, BUDGET, None).expect("valid"));
        });
        let ids: Vec<String> = (0..2 * count).map(|sample| format!("pref_{}", sample / 2)).collect();
        let ids: Vec<pairs::PairId> = ids.iter().map(|id| pairs::PairId::Text(id)).collect();
        let roles: Vec<&str> = (0..2 * count).map(|sample| ["chosen", "rejected"][sample % 2]).collect();
        group.bench_function(BenchmarkId::new("group", count), |bencher| {
            bencher.iter(|| pairs::group(black_box(&ids), &roles, true).expect("valid"));
        });
    }
}

criterion_group!(benches, one_rank, eight_ranks, preference_pairs);
criterion_main!(benches);
