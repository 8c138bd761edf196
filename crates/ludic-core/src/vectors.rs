//! Runtime dispatch to the widest vector instructions of the processor.

/// Runs `work` with the widest vector instructions of this processor. A wheel is compiled for
/// vectors of 16 bytes; many processors have 32 or 64. Only code that is inlined into `work`
/// benefits, so mark the functions that it calls `#[inline(always)]`.
#[inline(always)]
pub(crate) fn vectorized<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}
