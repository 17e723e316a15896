//! Saving while training goes on.

use std::sync::{Arc, Mutex, PoisonError};

use dcp_core::{
    CheckpointError, Dict, HostMemory, Object, PlanError, Shard, StateDict, StorageWriter, Tensor,
    Value,
};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::save::{SaveSummary, Saver};

/// Saves in the background: the state is copied before [`start`](Self::start) returns, so that
/// training may change it at once; planning, writing and commit follow on the runtime.
///
/// Saves happen one after the other, in the order of the calls, which is the same on all ranks.
/// Give it a group of its own, not the one that training uses.
#[derive(Clone, Debug)]
pub struct BackgroundSaver {
    saver: Saver,
    /// Ends with the save that was started last.
    last: Arc<Mutex<Option<oneshot::Receiver<()>>>>,
}

/// A copy of a state, which training may change meanwhile.
#[derive(Clone, Debug)]
pub struct StagedState(StateDict);

/// A save that is under way.
///
/// Dropping it lets the save finish unobserved; its error is then logged. To notice a failure,
/// [`wait`](Self::wait).
#[derive(Debug)]
pub struct PendingSave {
    task: JoinHandle<Result<SaveSummary, CheckpointError>>,
    told: bool,
}

impl BackgroundSaver {
    /// Saves as `saver` does.
    #[must_use]
    pub fn new(saver: Saver) -> Self {
        Self { saver, last: Arc::default() }
    }

    /// Copies `state` and begins to save the copy. Must be called within a tokio runtime.
    ///
    /// # Errors
    ///
    /// When the state cannot be copied because some of its memory is lent for writing. What fails
    /// later is reported by [`PendingSave::wait`].
    pub fn start(
        &self,
        state: &StateDict,
        writer: Arc<dyn StorageWriter>,
    ) -> Result<PendingSave, CheckpointError> {
        Ok(self.start_staged(StagedState::of(state)?, writer))
    }

    /// Begins to save a copy that was made before, as after all ranks have agreed that theirs were.
    /// Must be called within a tokio runtime.
    #[must_use = "an error is only noticed by waiting"]
    pub fn start_staged(
        &self,
        StagedState(staged): StagedState,
        writer: Arc<dyn StorageWriter>,
    ) -> PendingSave {
        let saver = self.saver.clone();
        // The turn is taken here and not in the task, because tasks may run in any order.
        let (done, mine) = oneshot::channel::<()>();
        let before = self.last.lock().unwrap_or_else(PoisonError::into_inner).replace(mine);
        let task = tokio::spawn(async move {
            if let Some(before) = before {
                // It ends with an error when its sender is dropped, which is all it ever does.
                let _ = before.await;
            }
            let result = saver.save(&staged, &*writer).await;
            drop(done);
            if let Err(error) = &result {
                tracing::error!(error = dcp_core::error_chain(error), "background save failed");
            }
            result
        });
        PendingSave { task, told: false }
    }
}

impl StagedState {
    /// Copies a state: all elements of all tensors, so as much memory again.
    ///
    /// # Errors
    ///
    /// When some of the memory is lent for writing.
    pub fn of(state: &StateDict) -> Result<Self, CheckpointError> {
        Ok(Self(copy_dict(state, "")?))
    }
}

impl PendingSave {
    /// Waits for the end and tells how it went.
    ///
    /// # Errors
    ///
    /// As [`Saver::save`], and when the save panicked.
    pub async fn wait(mut self) -> Result<SaveSummary, CheckpointError> {
        self.ended().await
    }

    /// As [`wait`](Self::wait), for who has only borrowed it; the outcome is told once.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait), and when the outcome was told before.
    pub async fn ended(&mut self) -> Result<SaveSummary, CheckpointError> {
        if self.told {
            return Err(unfinished("its outcome was told before"));
        }
        let outcome = (&mut self.task).await;
        self.told = true;
        outcome.unwrap_or_else(|error| Err(unfinished(&error.to_string())))
    }

    /// Gives up, on all ranks: the group of the save is aborted, and unless it has got as far as
    /// the commit, what is written counts for nothing.
    pub fn abort(&self) {
        self.task.abort();
    }

    /// Whether it has ended, well or not.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.task.is_finished()
    }
}

fn unfinished(why: &str) -> CheckpointError {
    PlanError::Unsupported {
        fqn: String::new(),
        problem: format!("the background save did not finish: {why}"),
    }
    .into()
}

fn copy_dict(dict: &Dict, path: &str) -> Result<Dict, CheckpointError> {
    dict.iter()
        .map(|(key, value)| {
            let name = key.as_str().unwrap_or("?");
            Ok((key.clone(), copy(value, &format!("{path}.{name}"))?))
        })
        .collect()
}

fn copy(value: &Value, path: &str) -> Result<Value, CheckpointError> {
    let copy_all = |items: &[Value]| -> Result<Vec<Value>, CheckpointError> {
        items.iter().map(|item| copy(item, path)).collect()
    };
    Ok(match value {
        Value::Tensor(tensor) => Value::Tensor(copy_tensor(tensor, path)?),
        Value::Dict(dict) => Value::Dict(copy_dict(dict, path)?),
        Value::List(items) => Value::List(copy_all(items)?),
        Value::Tuple(items) => Value::Tuple(copy_all(items)?),
        Value::Set(items) => Value::Set(copy_all(items)?),
        Value::FrozenSet(items) => Value::FrozenSet(copy_all(items)?),
        Value::Object(object) => Value::Object(Box::new(copy_object(object, path)?)),
        // All else is immutable.
        other => other.clone(),
    })
}

fn copy_object(object: &Object, path: &str) -> Result<Object, CheckpointError> {
    let mut copied = object.clone();
    for part in copied.args.iter_mut().chain(&mut copied.state).chain(&mut copied.items) {
        *part = copy(part, path)?;
    }
    for (key, value) in &mut copied.entries {
        (*key, *value) = (copy(key, path)?, copy(value, path)?);
    }
    Ok(copied)
}

fn copy_tensor(tensor: &Tensor, path: &str) -> Result<Tensor, CheckpointError> {
    let fqn = || path.trim_start_matches('.').to_owned();
    let shards = tensor
        .shards()
        .iter()
        .map(|shard| {
            let payload = shard
                .view()
                .payload()
                .map_err(|source| CheckpointError::Memory { fqn: fqn(), source })?;
            let mut bytes = Vec::with_capacity(usize::try_from(payload.len()).unwrap_or(0));
            payload.pieces().iter().for_each(|piece| bytes.extend_from_slice(piece));
            let memory = HostMemory::from_vec(bytes);
            Ok((shard.region().clone(), memory))
        })
        .collect::<Result<Vec<_>, CheckpointError>>()?;
    let dtype = tensor.dtype();
    if !tensor.is_sharded()
        && let [(_, memory)] = &*shards
    {
        return Ok(Tensor::replicated(dtype, tensor.shape().clone(), memory.clone())?);
    }
    let shards = shards
        .into_iter()
        .map(|(region, memory)| Shard::new(dtype, region, memory))
        .collect::<Result<Vec<_>, PlanError>>()?;
    Ok(Tensor::sharded(dtype, tensor.shape().clone(), shards)?)
}
