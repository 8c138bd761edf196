//! Slow and obvious versions of the planners, and the inputs on which both must agree.
#![allow(dead_code)] // Each test file uses a part of it.

use proptest::prelude::*;

/// Micro-batches as lists of sample indices.
pub type Lists = Vec<Vec<u32>>;

/// From 0 to `most` lengths, with few or many ties, from 0 tokens up to the largest length.
pub fn lengths(most: usize) -> impl Strategy<Value = Vec<i32>> {
    let longest = prop_oneof![Just(1), Just(3), Just(12), Just(100), Just(5000), Just(i32::MAX)];
    longest.prop_flat_map(move |longest| prop::collection::vec(0..=longest, 0..=most))
}

/// A budget that holds the longest sample exactly, a few times, or many times.
pub fn budget(lengths: &[i32]) -> impl Strategy<Value = i64> + use<> {
    let longest = i64::from(lengths.iter().copied().max().unwrap_or(0)).max(1);
    prop_oneof![Just(longest), longest..=2 * longest, longest..=8 * longest, longest..=200 * longest, Just(i64::MAX),]
}

/// Lengths and a budget that holds them.
pub fn workload(most: usize) -> impl Strategy<Value = (Vec<i32>, i64)> {
    lengths(most).prop_flat_map(|lengths| {
        let budget = budget(&lengths);
        (Just(lengths), budget)
    })
}

/// The overhead of a micro-batch in tokens, from 0 to beyond the sum of all lengths.
pub fn overhead() -> impl Strategy<Value = i64> {
    prop_oneof![Just(0), Just(1), 2..300i64, 300..100_000i64, Just(1 << 40), Just(i64::MAX)]
}

/// Sample indices by ascending length, ties by index.
pub fn ascending(lengths: &[i32]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..lengths.len() as u32).collect();
    order.sort_by_key(|&index| lengths[index as usize]);
    order
}

pub fn longest(lengths: &[i32], rows: &[u32]) -> i128 {
    rows.iter().map(|&row| i128::from(lengths[row as usize])).max().unwrap_or(0)
}

/// The tokens that a padded micro-batch computes.
pub fn padded(lengths: &[i32], rows: &[u32]) -> i128 {
    rows.len() as i128 * longest(lengths, rows)
}

/// The tokens that a padded plan computes.
pub fn padded_tokens(lengths: &[i32], lists: &[Vec<u32>]) -> i128 {
    lists.iter().map(|rows| padded(lengths, rows)).sum()
}

/// The greedy plan, sample by sample.
pub fn greedy(lengths: &[i32], budget: i64) -> Lists {
    let mut lists: Lists = Vec::new();
    for index in ascending(lengths) {
        match lists.last_mut() {
            Some(rows) if (rows.len() as i128 + 1) * i128::from(lengths[index as usize]) <= i128::from(budget) => {
                rows.push(index);
            }
            _ => lists.push(vec![index]),
        }
    }
    lists
}

/// The optimal plan by dynamic programming over the sorted samples, in O(n^2). On ties the last
/// micro-batch is the longest.
pub fn optimal(lengths: &[i32], budget: i64, overhead: i64) -> Lists {
    let order = ascending(lengths);
    let mut best = vec![(0i128, 0usize)];
    for end in 1..=order.len() {
        let begins = (0..end).filter(|&begin| padded(lengths, &order[begin..end]) <= i128::from(budget));
        let cost = |begin: usize| best[begin].0 + i128::from(overhead) + padded(lengths, &order[begin..end]);
        best.push(begins.map(|begin| (cost(begin), begin)).min().expect("one row fits"));
    }
    let (mut end, mut lists) = (order.len(), Vec::new());
    while end > 0 {
        lists.push(order[best[end].1..end].to_vec());
        end = best[end].1;
    }
    lists.reverse();
    lists
}

/// Every partition of `0..n` into sets.
pub fn set_partitions(n: u32) -> Vec<Lists> {
    let Some(last) = n.checked_sub(1) else {
        return vec![Vec::new()];
    };
    let mut all = Vec::new();
    for smaller in set_partitions(last) {
        for block in 0..=smaller.len() {
            let mut partition = smaller.clone();
            if block == smaller.len() {
                partition.push(Vec::new());
            }
            partition[block].push(last);
            all.push(partition);
        }
    }
    all
}

/// Every partition of the sorted samples into consecutive parts.
pub fn contiguous_partitions(lengths: &[i32]) -> Vec<Lists> {
    let order = ascending(lengths);
    let Some(gaps) = order.len().checked_sub(1) else {
        return vec![Vec::new()];
    };
    let cut = |mask: u32| {
        let mut lists: Lists = vec![vec![order[0]]];
        for (gap, &index) in order[1..].iter().enumerate() {
            match lists.last_mut() {
                Some(rows) if mask >> gap & 1 == 0 => rows.push(index),
                _ => lists.push(vec![index]),
            }
        }
        lists
    };
    (0..1u32 << gaps).map(cut).collect()
}

/// The longest first, each into the fullest micro-batch that holds it; among equally full ones, the
/// one that became so first.
pub fn best_fit_decreasing(lengths: &[i32], budget: i64) -> Lists {
    let mut order = ascending(lengths);
    order.sort_by_key(|&index| std::cmp::Reverse(lengths[index as usize]));
    // Free tokens, time of the last change, samples.
    let mut bins: Vec<(i64, usize, Vec<u32>)> = Vec::new();
    for (time, index) in order.into_iter().enumerate() {
        let length = i64::from(lengths[index as usize]);
        let fitting = bins.iter_mut().filter(|bin| bin.0 >= length);
        match fitting.min_by_key(|bin| (bin.0, bin.1)) {
            Some(bin) => {
                bin.0 -= length;
                bin.1 = if length > 0 { time } else { bin.1 };
                bin.2.push(index);
            }
            None => bins.push((budget - length, time, vec![index])),
        }
    }
    bins.into_iter().map(|bin| bin.2).collect()
}

/// Checks that every index of `0..samples` occurs once in the lists.
pub fn every_index_once<'a>(samples: usize, lists: impl IntoIterator<Item = &'a [u32]>) -> Result<(), TestCaseError> {
    let mut indices: Vec<u32> = lists.into_iter().flatten().copied().collect();
    indices.sort_unstable();
    prop_assert_eq!(indices, (0..samples as u32).collect::<Vec<_>>());
    Ok(())
}
