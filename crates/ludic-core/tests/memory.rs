//! What a table allocates is bounded: read, by the bytes that were given, whatever they say; built, by
//! the distinct tokens of its dialogues.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use ludic_core::{ColumnInput, Floats, Ints, Sample, SampleTable, TableBuilder};

/// Counts all bytes ever allocated, freed or not.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the layout is the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from `alloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Held by the test that counts.
static ALONE: Mutex<()> = Mutex::new(());

fn allocated_by<T>(work: impl FnOnce() -> T) -> usize {
    let before = ALLOCATED.load(Ordering::Relaxed);
    let made = work();
    let allocated = ALLOCATED.load(Ordering::Relaxed) - before;
    drop(made);
    allocated
}

/// 100 turns of 30 tokens each: 3,000 distinct tokens of 9 bytes, where whole samples have 151,500.
#[test]
fn the_turns_of_a_dialogue_take_memory_for_their_distinct_tokens() {
    let alone = ALONE.lock().unwrap();
    let ids: Vec<i32> = (0..3000).collect();
    let masks: Vec<Vec<u8>> = (1..=100).map(|turn| [vec![0; 30 * turn - 10], vec![1; 10]].concat()).collect();
    let logps = [-0.5f32; 10];
    let build = |shared_from: usize| {
        let mut builder = TableBuilder::default();
        for mask in &masks {
            let mut own = ids[..mask.len()].to_vec();
            own[0] += i32::from(mask.len() < shared_from);
            let sample = Sample {
                input_ids: Ints::I32(&own),
                action_mask: Ints::U8(mask),
                attention_mask: None,
                actor_logps: Some(Floats::F32(&logps)),
                weight: 1.0,
            };
            builder.push(&sample).unwrap();
        }
        builder.finish()
    };
    let copies = masks.iter().map(|mask| 4 * mask.len()).sum::<usize>();
    // Everything ever allocated, so also what growing columns leave behind.
    let [shared, changed] = [0, 1500].map(|from| allocated_by(|| build(from)) - copies);
    assert!(shared < 10 * 9 * 3000, "{shared}");
    assert!(changed < 10 * 9 * 3000, "{changed}"); // the first id changes in the middle
    assert_eq!(build(0).num_tokens(), 151_500);
    drop(alone);
}

/// Per byte given, offsets need the most: 8 bytes become 8 of a copy and 32 of a row.
#[test]
fn reading_allocates_a_small_multiple_of_the_bytes() {
    let alone = ALONE.lock().unwrap();
    let allocated_by = |bytes: &[u8]| allocated_by(|| SampleTable::from_bytes(bytes));
    let samples = 1000;
    let offsets: Vec<i64> = (0..=samples).collect();
    let ids = vec![7; samples as usize];
    let table = SampleTable::from_columns(&ColumnInput {
        input_ids: Ints::I32(&ids),
        action_mask: Ints::U8(&vec![1; ids.len()]),
        attention_mask: None,
        actor_logps: Some(Floats::F32(&vec![-0.5; ids.len()])),
        weights: None,
        offsets: Ints::I64(&offsets),
    })
    .unwrap();
    let bytes = table.to_bytes().unwrap();
    let bound = |bytes: &[u8]| 8 * bytes.len() + (1 << 16);
    assert!(allocated_by(&bytes) > bytes.len(), "the allocations are counted");
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for at in 0..8 + header + 64 {
        for byte in [0, b'0', b'9', b'}', 255] {
            let mut damaged = bytes.clone();
            damaged[at] = byte;
            assert!(allocated_by(&damaged) <= bound(&damaged), "byte {at} = {byte}");
        }
    }
    let huge = "4611686018427387904";
    let text = std::str::from_utf8(&bytes[8..8 + header]).unwrap();
    for number in ["1000", "1001", "8008", "12008"] {
        let text = text.replace(number, huge);
        let damaged = [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &bytes[8 + header..]].concat();
        assert!(SampleTable::from_bytes(&damaged).is_err());
        assert!(allocated_by(&damaged) <= bound(&damaged), "{number}");
    }
    drop(alone);
}
