//! Readers that convert stored tensors to the dtypes and shapes of a request.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::plan::{LeafKind, LoadPlan, LoadReport, PlanContext, StateIndex};
use dcp_core::planner::LoadPlanner;
use dcp_core::{
    CheckpointError, CheckpointMetadata, DType, Dims, PlanError, Region, StorageReader, TensorView,
};
use dcp_jobs::JobError;
use dcp_jobs::cast::CastOptions;
use dcp_jobs::view::Cast;
use dcp_planner::DefaultLoadPlanner;
use tokio::sync::OnceCell;

/// A reader whose tensors have the requested dtypes. It is created with the index, so that
/// an impossible cast fails the load on all ranks.
pub(crate) struct Fitted {
    inner: Arc<dyn StorageReader>,
    casts: BTreeMap<Arc<str>, DType>,
    built: OnceCell<Arc<dyn StorageReader>>,
}

impl Fitted {
    pub(crate) fn new(inner: Arc<dyn StorageReader>, casts: BTreeMap<Arc<str>, DType>) -> Self {
        Self { inner, casts, built: OnceCell::new() }
    }

    async fn built(&self) -> Result<&Arc<dyn StorageReader>, CheckpointError> {
        let build = async || {
            if self.casts.is_empty() {
                return Ok(Arc::clone(&self.inner));
            }
            let rule = |fqn: &str, _| self.casts.get(fqn).copied();
            let cast = Cast::new(Arc::clone(&self.inner), rule, CastOptions::default()).await;
            match cast {
                Ok(cast) => Ok(Arc::new(cast) as Arc<dyn StorageReader>),
                Err(JobError::Checkpoint(error)) => Err(error),
                Err(other) => Err(CheckpointError::Mismatch { summary: other.to_string() }),
            }
        };
        self.built.get_or_try_init(build).await
    }
}

impl fmt::Debug for Fitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { inner, casts, .. } = self;
        f.debug_struct("Fitted").field("inner", inner).field("casts", casts).finish()
    }
}

#[async_trait]
impl StorageReader for Fitted {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        self.built().await?.metadata().await
    }

    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        self.built().await?.read(metadata, plan, sink).await
    }
}

/// A reader that clears memory before it reads: elements that are not stored become zero.
#[derive(Debug)]
pub(crate) struct Cleared {
    inner: Arc<dyn StorageReader>,
    views: Vec<(Arc<str>, TensorView)>,
}

impl Cleared {
    pub(crate) fn new(inner: Arc<dyn StorageReader>, views: Vec<(Arc<str>, TensorView)>) -> Self {
        Self { inner, views }
    }

    fn clear(&self) -> Result<(), CheckpointError> {
        for (key, view) in &self.views {
            for run in view.runs() {
                let lent = view.memory().lend(run);
                let named = |source| CheckpointError::Memory { fqn: key.to_string(), source };
                lent.map_err(named)?.fill(0);
            }
        }
        Ok(())
    }
}

#[async_trait]
impl StorageReader for Cleared {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        self.inner.metadata().await
    }

    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        // From here on all ranks continue.
        if let Err(error) = self.clear() {
            // Ranks that share reads wait for this one.
            let nothing = LoadPlan::default();
            return self.inner.read(metadata, &nothing, sink).await.and(Err(error));
        }
        self.inner.read(metadata, plan, sink).await
    }
}

/// Plans loads; of some tensors only the elements that the stored and the requested shape share.
#[derive(Debug)]
pub(crate) struct Clip {
    allowed: HashSet<Arc<str>>,
}

impl Clip {
    pub(crate) fn new(allowed: HashSet<Arc<str>>) -> Self {
        Self { allowed }
    }
}

impl LoadPlanner for Clip {
    fn local_plan(
        &self,
        wanted: &StateIndex,
        stored: &CheckpointMetadata,
        context: &PlanContext,
    ) -> Result<(LoadPlan, LoadReport), PlanError> {
        let mut clipped = wanted.clone();
        for leaf in &mut clipped.leaves {
            if !self.allowed.contains(&leaf.fqn) {
                continue;
            }
            let Some(entry) = stored.get(&leaf.fqn).and_then(|entry| entry.as_tensor()) else {
                continue;
            };
            let LeafKind::Tensor { shape, regions, .. } = &mut leaf.kind else { continue };
            if entry.shape.ndim() != shape.ndim() {
                continue;
            }
            let full = |shape: &Dims| {
                Region::full(shape.clone())
                    .map_err(|error| PlanError::from(error).with_fqn(&*leaf.fqn))
            };
            let whole = full(&entry.shape)?;
            let nothing = full(&Dims::zeros(shape.ndim()))?;
            for region in regions {
                *region = region.intersect(&whole).unwrap_or_else(|| nothing.clone());
            }
            *shape = entry.shape.clone();
        }
        DefaultLoadPlanner::new().local_plan(&clipped, stored, context)
    }
}
