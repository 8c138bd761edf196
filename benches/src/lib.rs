//! Seeded workloads shared by the benches.
