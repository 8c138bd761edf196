//! Laws of deltas: applying one gives the new bits, applying it again the old ones; no delta is much
//! longer than its tensor; a damaged one changes nothing.

use ludic_core::delta::{DeltaError, apply, encode};
use proptest::prelude::*;
use proptest::sample::Index;

const WIDTHS: [usize; 4] = [1, 2, 4, 8];

/// Width of an entry, and two versions of a tensor: few entries changed, or all, by their low bits or
/// by any.
fn versions() -> impl Strategy<Value = (usize, Vec<u8>, Vec<u8>)> {
    (prop::sample::select(&WIDTHS[..]), 0_usize..200).prop_flat_map(|(width, entries)| {
        let bytes = prop::collection::vec(any::<u8>(), width * entries);
        let low = (any::<Index>(), 0..4_u8);
        let changes = prop_oneof![
            prop::collection::vec((any::<Index>(), any::<u8>()), 0..8),
            prop::collection::vec(low, 0..400),
            prop::collection::vec((any::<Index>(), any::<u8>()), 0..4000),
        ];
        (bytes, changes).prop_map(move |(base, changes)| {
            let mut new = base.clone();
            for (index, xor) in changes {
                if !new.is_empty() {
                    new[index.index(base.len())] ^= xor;
                }
            }
            (width, base, new)
        })
    })
}

proptest! {
    #[test]
    fn a_delta_gives_the_new_bits_and_then_the_old_ones((width, base, new) in versions()) {
        let mut target = base.clone();
        match encode(&base, &new, width).unwrap() {
            None => prop_assert_eq!(&base, &new),
            Some(delta) => {
                prop_assert_ne!(&base, &new);
                prop_assert!(delta.len() <= 1 + new.len());
                apply(&mut target, &delta, width).unwrap();
                prop_assert_eq!(&target, &new);
                apply(&mut target, &delta, width).unwrap();
                prop_assert_eq!(&target, &base);
            }
        }
    }

    #[test]
    fn a_few_small_changes_take_few_bytes(entries in 1_usize..5000, indices in prop::collection::vec(any::<Index>(), 1..20)) {
        let base = vec![0_u8; 2 * entries];
        let mut new = base.clone();
        let mut changed: Vec<usize> = indices.iter().map(|index| index.index(entries)).collect();
        changed.sort_unstable();
        changed.dedup();
        changed.iter().for_each(|&entry| new[2 * entry] = 127);
        let delta = encode(&base, &new, 2).unwrap().unwrap();
        prop_assert!(delta.len() <= 1 + 3 * changed.len(), "a gap below 2**14 has two bytes, the change one");
    }

    #[test]
    fn a_cut_delta_and_one_with_more_bytes_change_nothing((width, base, new) in versions(), at in any::<Index>(), more in any::<u8>()) {
        let Some(delta) = encode(&base, &new, width).unwrap() else { return Ok(()) };
        let mut target = base.clone();
        let cut = &delta[..at.index(delta.len())];
        if apply(&mut target, cut, width).is_err() {
            prop_assert_eq!(&target, &base);
        } else {
            prop_assert_eq!(delta[0], 0, "only gaps may end early: they then change fewer entries");
            target.clone_from(&base);
        }
        let longer: Vec<u8> = delta.iter().copied().chain([more | 128]).collect();
        prop_assert!(apply(&mut target, &longer, width).is_err());
        prop_assert_eq!(&target, &base);
    }

    #[test]
    fn whatever_the_bytes_they_change_the_tensor_within_its_size_or_nothing(
        width in prop::sample::select(&WIDTHS[..]), entries in 0_usize..20, form in 0..4_u8, rest in prop::collection::vec(any::<u8>(), 0..60)
    ) {
        let base = vec![0x5a_u8; width * entries];
        let mut target = base.clone();
        let delta: Vec<u8> = [form].into_iter().chain(rest).collect();
        match apply(&mut target, &delta, width) {
            Err(_) => prop_assert_eq!(target, base),
            Ok(()) => {
                apply(&mut target, &delta, width).unwrap();
                prop_assert_eq!(target, base);
            }
        }
    }
}

fn bytes_of(entries: &[u16]) -> Vec<u8> {
    entries.iter().flat_map(|entry| entry.to_le_bytes()).collect()
}

#[test]
fn the_forms_have_the_bytes_of_the_documentation() {
    let base = bytes_of(&[7, 9, 4, 300]);
    // 9 ^ 8 = 1 and 300 ^ 500 = 216 = 1 * 128 + 88; 88 + 128 = 216. A gap of 1 before each.
    assert_eq!(encode(&base, &bytes_of(&[7, 8, 4, 500]), 2), Ok(Some(vec![0, 1, 1, 1, 216, 1])));
    // 7 ^ 6 = 1, 9 ^ 8 = 1, 4 ^ 5 = 1, 300 ^ 301 = 1: five bytes instead of nine.
    assert_eq!(encode(&base, &bytes_of(&[6, 8, 5, 301]), 2), Ok(Some(vec![1, 1, 1, 1, 1])));
    // The highest bit needs a varint of three bytes, so all are stored as they are.
    let high = bytes_of(&[7 | 1 << 15, 9 | 1 << 15, 4 | 1 << 15, 300 | 1 << 15]);
    assert_eq!(encode(&base, &high, 2), Ok(Some(vec![2, 0, 128, 0, 128, 0, 128, 0, 128])));
    assert_eq!(encode(&base, &base, 2), Ok(None));
}

#[test]
fn bits_are_compared_not_values() {
    let [nan, other_nan] = [0x7fc0_0001_u32, 0x7fc0_0002].map(u32::to_le_bytes);
    assert_eq!(encode(&nan, &nan, 4), Ok(None));
    assert_eq!(encode(&nan, &other_nan, 4), Ok(Some(vec![1, 3])));
    let [zero, minus_zero] = [0.0_f32, -0.0].map(f32::to_le_bytes);
    assert!(encode(&zero, &minus_zero, 4).unwrap().is_some());
}

#[test]
fn what_is_not_a_delta_of_the_tensor_is_refused_with_the_cause() {
    let refuse = |delta: &[u8]| apply(&mut [0; 8], delta, 2).unwrap_err();
    assert_eq!(encode(&[0; 4], &[0; 6], 2), Err(DeltaError::Lengths { base: 4, new: 6 }));
    assert_eq!(encode(&[0; 6], &[0; 6], 3), Err(DeltaError::Width { width: 3, bytes: 6 }));
    assert_eq!(encode(&[0; 6], &[0; 6], 4), Err(DeltaError::Width { width: 4, bytes: 6 }));
    assert_eq!(refuse(&[]), DeltaError::Form { form: None });
    assert_eq!(refuse(&[3]), DeltaError::Form { form: Some(3) });
    assert_eq!(refuse(&[0, 4, 1]), DeltaError::Entries { entry: 4, entries: 4 });
    assert_eq!(refuse(&[0, 3, 1, 0, 1]), DeltaError::Entries { entry: 4, entries: 4 });
    assert_eq!(refuse(&[0, 1]), DeltaError::Cut { bytes: 2 });
    assert_eq!(refuse(&[0, 1, 255, 255, 4]), DeltaError::TooLarge { bits: 16 });
    assert_eq!(refuse(&[1, 0, 0, 0]), DeltaError::Cut { bytes: 4 });
    assert_eq!(refuse(&[1, 0, 0, 0, 0, 0]), DeltaError::Entries { entry: 4, entries: 4 });
    assert_eq!(refuse(&[2, 0, 0, 0]), DeltaError::Cut { bytes: 4 });
    let most = [0, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1, 1]; // a gap of 2**64 - 1
    assert_eq!(refuse(&most), DeltaError::Entries { entry: u64::MAX, entries: 4 });
}
