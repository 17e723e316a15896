//! Copies of a state, for saves that run while training goes on.

mod arena;
mod copy;
mod layout;

use std::any::Any;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::Arc;
use std::{fmt, thread};

use dcp_core::{CheckpointError, StateDict};
use tokio::sync::oneshot;

use self::arena::Arenas;
use self::layout::Layout;

/// Threads that copy a state, where the machine has them: a few saturate its memory.
const MAX_THREADS: usize = 8;

/// Copies the state of an asynchronous save: PyTorch's `AsyncStager`.
///
/// A [`BackgroundSaver`](crate::BackgroundSaver) calls it on the trainer's thread, so the time it
/// takes is the time that training stops.
pub trait Stager: fmt::Debug + Send + Sync {
    /// Copies `state`, or starts to.
    ///
    /// # Errors
    ///
    /// When the state cannot be copied. The save then does not start.
    fn stage(&self, state: &StateDict) -> Result<Staging, CheckpointError>;
}

/// A copy of a state that is complete, or under way.
pub struct Staging(Progress);

enum Progress {
    Complete(StagedState),
    Running(Running),
}

type Running = Pin<Box<dyn Future<Output = Result<StagedState, CheckpointError>> + Send>>;

impl Staging {
    /// A complete copy: training may change its tensors.
    #[must_use]
    pub fn complete(state: StagedState) -> Self {
        Self(Progress::Complete(state))
    }

    /// A copy that `copied` completes. Training may change its tensors after
    /// [`SaveHandle::staged`](crate::SaveHandle::staged).
    pub fn running<F>(copied: F) -> Self
    where
        F: Future<Output = Result<StagedState, CheckpointError>> + Send + 'static,
    {
        Self(Progress::Running(Box::pin(copied)))
    }

    /// Whether the copy is complete.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        matches!(self.0, Progress::Complete(_))
    }

    /// Waits for the copy.
    pub(crate) async fn finish(self) -> Result<StagedState, CheckpointError> {
        match self.0 {
            Progress::Complete(state) => Ok(state),
            Progress::Running(copied) => copied.await,
        }
    }
}

impl fmt::Debug for Staging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Staging").field("complete", &self.is_complete()).finish()
    }
}

/// A copy of a state. Training may change the tensors of the original.
#[derive(Clone)]
pub struct StagedState {
    state: StateDict,
    /// Returns the memory of the copy to its stager when the last clone is dropped.
    _memory: Option<Arc<dyn Any + Send + Sync>>,
}

impl StagedState {
    /// Copies a state. Tensors in immutable memory are not copied.
    ///
    /// # Errors
    ///
    /// When some of the memory is lent for writing, or there is not enough for the copy.
    pub fn of(state: &StateDict) -> Result<Self, CheckpointError> {
        BlockingStager::new().copy(state)
    }

    /// A state that a [`Stager`] has copied. `memory` is dropped when the save has ended, so a
    /// stager can use its memory again.
    #[must_use]
    pub fn new(state: StateDict, memory: impl Any + Send + Sync) -> Self {
        Self { state, _memory: Some(Arc::new(memory)) }
    }

    /// The copy.
    #[must_use]
    pub fn state(&self) -> &StateDict {
        &self.state
    }
}

impl fmt::Debug for StagedState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StagedState").field("entries", &self.state.len()).finish_non_exhaustive()
    }
}

/// Copies a state before it returns, on several threads. The default of a
/// [`BackgroundSaver`](crate::BackgroundSaver).
///
/// It keeps the memory of a copy for the next save of the same size, so from the second save on
/// nothing is allocated. Tensors in immutable memory ([`HostMemory::from_bytes`](dcp_core::HostMemory::from_bytes)) are not copied;
/// tensors that share memory are copied once. Clones share the memory.
#[derive(Clone, Debug)]
pub struct BlockingStager {
    threads: usize,
    arenas: Arc<Arenas>,
}

impl Default for BlockingStager {
    fn default() -> Self {
        Self::new()
    }
}

impl BlockingStager {
    /// A stager that copies on up to 8 threads.
    #[must_use]
    pub fn new() -> Self {
        let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self { threads: threads.min(MAX_THREADS), arenas: Arc::default() }
    }

    /// The number of threads that copy.
    #[must_use]
    pub fn threads(mut self, threads: NonZeroUsize) -> Self {
        self.threads = threads.get();
        self
    }

    /// Frees the memory that no save uses now.
    pub fn release(&self) {
        self.arenas.release();
    }

    /// Copies `state`.
    ///
    /// # Errors
    ///
    /// When some of the memory is lent for writing, or there is not enough for the copy.
    pub fn copy(&self, state: &StateDict) -> Result<StagedState, CheckpointError> {
        let mut layout = Layout::of(state)?;
        if layout.byte_len() == 0 {
            return Ok(StagedState { state: layout.staged(state, None)?, _memory: None });
        }
        let lease = self.arenas.take(layout.byte_len())?;
        layout.copy_into(lease.memory(), self.threads)?;
        let state = layout.staged(state, Some(lease.memory()))?;
        Ok(StagedState { state, _memory: Some(Arc::new(lease)) })
    }
}

impl Stager for BlockingStager {
    fn stage(&self, state: &StateDict) -> Result<Staging, CheckpointError> {
        self.copy(state).map(Staging::complete)
    }
}

/// Copies a state on a thread of its own, while the next forward pass runs.
///
/// Training waits for [`SaveHandle::staged`](crate::SaveHandle::staged) before it changes a tensor,
/// such as before the next optimizer step. Until then the memory is lent: a write through
/// [`HostMemory`](dcp_core::HostMemory) is an error, and foreign memory must not be written. Memory is kept and shared as
/// by [`BlockingStager`].
#[derive(Clone, Debug, Default)]
pub struct OverlappedStager {
    stager: BlockingStager,
}

impl OverlappedStager {
    /// A stager that copies on up to 8 threads.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The number of threads that copy.
    #[must_use]
    pub fn threads(mut self, threads: NonZeroUsize) -> Self {
        self.stager = self.stager.threads(threads);
        self
    }

    /// Frees the memory that no save uses now.
    pub fn release(&self) {
        self.stager.release();
    }
}

impl Stager for OverlappedStager {
    fn stage(&self, state: &StateDict) -> Result<Staging, CheckpointError> {
        let (stager, state) = (self.stager.clone(), state.clone());
        let (done, copied) = oneshot::channel();
        let copy = move || drop(done.send(stager.copy(&state)));
        let failed = |problem: String| CheckpointError::Background { problem, source: None };
        thread::Builder::new()
            .name("dcp-stage".into())
            .spawn(copy)
            .map_err(|error| failed(format!("no thread copies the state: {error}")))?;
        Ok(Staging::running(async move {
            copied.await.unwrap_or_else(|_| Err(failed("the copy of the state panicked".into())))
        }))
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use dcp_core::{DType, HostMemory, Region, Shard, Tensor, TensorView, Value};

    use super::*;

    fn address(state: &StateDict, key: &str) -> usize {
        let tensor = state.get(key).and_then(Value::as_tensor).unwrap();
        let payload = tensor.shards()[0].view().unwrap().payload().unwrap();
        payload.pieces()[0].as_ptr().addr()
    }

    fn same(a: &StateDict, b: &StateDict) -> bool {
        Value::Dict(a.clone()).same(&Value::Dict(b.clone()))
    }

    fn tensor(bytes: Vec<u8>) -> Tensor {
        Tensor::replicated(DType::UInt8, [bytes.len() as u64], bytes).unwrap()
    }

    #[test]
    fn the_second_copy_uses_the_memory_of_the_first() {
        let state = StateDict::from([("w", Value::from(tensor(vec![7; 5000])))]);
        let stager = BlockingStager::new();
        let first = stager.copy(&state).unwrap();
        let at = address(first.state(), "w");
        assert_ne!(at, address(&state, "w"));
        let second = stager.copy(&state).unwrap();
        assert_ne!(address(second.state(), "w"), at, "the first save still uses it");
        drop(first);
        let third = stager.copy(&state).unwrap();
        assert_eq!(address(third.state(), "w"), at);
        assert!(same(third.state(), &state));
    }

    #[test]
    fn memory_with_a_loan_is_not_used_again() {
        let state = StateDict::from([("w", Value::from(tensor(vec![7; 5000])))]);
        let stager = BlockingStager::new();
        let first = stager.copy(&state).unwrap();
        let loan = first.state().get("w").and_then(Value::as_tensor).unwrap().shards()[0]
            .view()
            .unwrap()
            .payload()
            .unwrap();
        drop(first);
        let other = StateDict::from([("w", Value::from(tensor(vec![8; 5000])))]);
        let second = stager.copy(&other).unwrap();
        assert!(same(second.state(), &other));
        assert_eq!(loan.to_bytes()[..], [7; 5000]);
    }

    #[test]
    fn immutable_memory_is_shared_and_shared_memory_is_copied_once() {
        let immutable = HostMemory::from_bytes(Bytes::from(vec![3; 100]));
        let immutable = Tensor::replicated(DType::UInt8, [100], immutable).unwrap();
        let tied = tensor(vec![5; 4096]);
        let state = StateDict::from([
            ("immutable", Value::from(immutable)),
            ("embedding", Value::from(tied.clone())),
            ("head", Value::List(vec![Value::from(tied)])),
        ]);
        let staged = BlockingStager::new().copy(&state).unwrap();
        assert!(same(staged.state(), &state));
        assert_eq!(address(staged.state(), "immutable"), address(&state, "immutable"));
        let Some(Value::List(head)) = staged.state().get("head") else { panic!() };
        let head = StateDict::from([("head", head[0].clone())]);
        assert_eq!(address(staged.state(), "embedding"), address(&head, "head"));
        assert_ne!(address(staged.state(), "embedding"), address(&state, "embedding"));
    }

    #[test]
    fn borrowed_memory_is_copied_because_its_scope_ends() {
        let borrowed = [7_u8; 5000];
        let staged = dcp_core::memory::scope(|scope| {
            let memory = scope.borrow(&borrowed);
            let tensor = Tensor::replicated(DType::UInt8, [5000], memory).unwrap();
            let state = StateDict::from([("w", Value::from(tensor))]);
            BlockingStager::new().copy(&state).unwrap()
        });
        let copied = staged.state().at("w").and_then(Value::as_tensor).unwrap();
        assert_eq!(*copied.elements::<u8>().unwrap(), borrowed);
    }

    #[test]
    fn strided_and_sharded_tensors_are_copied_whole() {
        let memory = HostMemory::from_vec((0..=255).collect());
        let columns = TensorView::strided(memory.clone(), DType::Int16, [8, 4], vec![16, 1], 6);
        let transposed = TensorView::strided(memory, DType::UInt8, [16, 16], vec![1, 16], 0);
        let part = |view: TensorView, offset| {
            let region = Region::new([offset, 0], view.shape().clone()).unwrap();
            Shard::with_view(region, view).unwrap()
        };
        let columns = Tensor::sharded(DType::Int16, [16, 4], vec![part(columns.unwrap(), 8)]);
        let transposed = Tensor::from_view(transposed.unwrap());
        let state = StateDict::from([
            ("columns", Value::from(columns.unwrap())),
            ("transposed", Value::from(transposed.unwrap())),
            ("empty", Value::from(tensor(Vec::new()))),
            ("scalar", Value::from(Tensor::zeros(DType::Float32, []).unwrap())),
            ("none held", Value::from(Tensor::sharded(DType::Int8, [4], Vec::new()).unwrap())),
            ("step", Value::from(3)),
        ]);
        for threads in [1, 3] {
            let stager = BlockingStager::new().threads(NonZeroUsize::new(threads).unwrap());
            assert!(same(stager.copy(&state).unwrap().state(), &state));
        }
    }

    #[test]
    fn memory_that_is_lent_for_writing_is_an_error_with_the_name() {
        let tensor = tensor(vec![1; 10]);
        let loan = tensor.shards()[0].view().unwrap().memory().lend(0..1).unwrap();
        let state = StateDict::from([(
            "optimizer",
            Value::from(StateDict::from([("momentum", Value::from(tensor))])),
        )]);
        let error = BlockingStager::new().copy(&state).unwrap_err();
        assert!(error.to_string().contains("\"optimizer.momentum\""), "{error}");
        drop(loan);
        BlockingStager::new().copy(&state).unwrap();
    }
}
