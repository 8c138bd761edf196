//! Loops compiled for the processor that they run on.

/// Runs `work` as compiled for the widest vectors of this processor: what a wheel must be compiled
/// for has 16 bytes, many a processor 32 or 64. It reaches what is inlined into `work`, so that
/// what it calls is marked `#[inline(always)]`.
#[inline(always)]
pub(crate) fn vectorized<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}
