//! The program of `main.rs` as bytes, which are written to a file of each workspace.

/// An executable for the target's processor; empty if the target is not Linux.
pub const PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/relay"));
