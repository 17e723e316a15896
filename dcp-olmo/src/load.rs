//! OLMo-core's `load_model_and_optim_state` and `get_checkpoint_metadata`.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::plan::{LoadPlan, LoadReport, PlanContext, StateIndex};
use dcp_core::planner::LoadPlanner;
use dcp_core::storage::StorageExt;
use dcp_core::{
    CheckpointError, CheckpointMetadata, DType, Key, PlanError, StateDict, Storage, StorageError,
    StorageReader, Value,
};
use dcp_engine::{LoadMode, Loader};
use dcp_formats::dcp::DcpReader;
use dcp_jobs::JobError;
use dcp_jobs::cast::CastOptions;
use dcp_jobs::view::Cast;
use dcp_planner::{DefaultLoadPlanner, FlattenRule, flatten};
use tokio::sync::OnceCell;

use crate::format::MODEL_FOLDER;
use crate::key_mapping::{KeyMapping, mapped};
use crate::layout::{OptimizerLayout, relaid};
use crate::roots::{MODEL, OPTIM};
use crate::state::{wanted_groups, whole};

/// Options of a load.
#[derive(Clone, Debug)]
pub struct OlmoLoadOptions {
    /// Whether everything that the model and optimizer request must exist. OLMo-core (3.0) fails
    /// even with `strict=False`, because PyTorch fails first.
    pub(crate) strict: bool,
    /// Parameters with another name in the checkpoint.
    pub(crate) key_mapping: KeyMapping,
    /// Whether tensors of another float dtype are cast, as OLMo-core (3.0) does silently. Otherwise
    /// they are an error, or are skipped when `strict` is off.
    pub(crate) cast: bool,
}

impl Default for OlmoLoadOptions {
    /// Strict, without mapping, without casts.
    fn default() -> Self {
        Self { strict: true, key_mapping: KeyMapping::new(), cast: false }
    }
}

impl OlmoLoadOptions {
    /// Sets [`strict`](Self::strict).
    #[must_use]
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Sets [`key_mapping`](Self::key_mapping).
    #[must_use]
    pub fn key_mapping(mut self, mapping: KeyMapping) -> Self {
        self.key_mapping = mapping;
        self
    }

    /// Sets [`cast`](Self::cast).
    #[must_use]
    pub fn cast(mut self, cast: bool) -> Self {
        self.cast = cast;
        self
    }
}

/// The result of a load on this rank.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LoadedState {
    /// The differences between checkpoint and state: missing names, which keep their values; stored
    /// names that were not requested; tensors of other shapes and dtypes.
    pub report: LoadReport,
    /// Names of the model in `key_mapping` whose name is not in the checkpoint.
    pub unmapped: Vec<String>,
    /// The layout of the optimizer in the checkpoint. It was converted if the state has the other
    /// one.
    pub stored_layout: Option<OptimizerLayout>,
    /// The cost of reading.
    pub read: ReadReport,
}

/// Loads a checkpoint into a model, and into its optimizer if there is one, in place, with the
/// other ranks of the loader's group. The optimizer may have either layout, in the checkpoint and
/// in the state; its keys show `flatten_optimizer_state`.
///
/// `loader` has the group. `options` determine its mode, and a strict load uses the default
/// planner.
///
/// # Errors
///
/// With `strict`, when the checkpoint lacks anything requested, naming all of it; when the mapping
/// is wrong; when parameters of one group have different settings in the checkpoint; and as
/// [`Loader::load`].
#[doc(alias = "flatten_optimizer_state")]
pub async fn load_model_and_optim_state(
    loader: &Loader,
    reader: Arc<dyn StorageReader>,
    model: &mut StateDict,
    mut optim: Option<&mut StateDict>,
    options: &OlmoLoadOptions,
) -> Result<LoadedState, CheckpointError> {
    let mut state = whole(model, optim.as_deref());
    let adapted = Adapted {
        inner: reader,
        options: options.clone(),
        optim: optim.as_deref().cloned(),
        state: state.clone(),
        built: OnceCell::new(),
    };
    // The views are created when the loader requests the metadata, so that an error on one rank
    // ends the load on all.
    let settings = loader.settings().clone().flatten_rule(FlattenRule::Torch24);
    let settings = match options.strict {
        true => settings.load_planner(Arc::new(Complete)).load_mode(LoadMode::Strict),
        false => settings.load_mode(LoadMode::Partial),
    };
    let summary = Loader::with_settings(settings).load(&mut state, &adapted).await?;
    if let Some(Value::Dict(loaded)) = state.remove(MODEL) {
        *model = loaded;
    }
    if let (Some(optim), Some(Value::Dict(loaded))) = (&mut optim, state.remove(OPTIM)) {
        **optim = loaded;
    }
    let built = adapted.built.into_inner();
    let (unmapped, stored_layout) =
        built.map_or_else(Default::default, |built| (built.unmapped, built.stored_layout));
    Ok(LoadedState { report: summary.report, unmapped, stored_layout, read: summary.read })
}

/// A checkpoint as the model requests it: names mapped, the optimizer in its layout, floats cast.
struct Adapted {
    inner: Arc<dyn StorageReader>,
    options: OlmoLoadOptions,
    optim: Option<StateDict>,
    state: StateDict,
    built: OnceCell<Built>,
}

struct Built {
    reader: Arc<dyn StorageReader>,
    unmapped: Vec<String>,
    stored_layout: Option<OptimizerLayout>,
}

impl Adapted {
    async fn built(&self) -> Result<&Built, CheckpointError> {
        self.built.get_or_try_init(|| self.build()).await
    }

    async fn build(&self) -> Result<Built, CheckpointError> {
        let options = &self.options;
        let inner = Arc::clone(&self.inner);
        let stored_layout = OptimizerLayout::of(&*inner.metadata().await?);
        let (mut reader, unmapped) = mapped(inner, &options.key_mapping, !options.strict).await?;
        let optim = self.optim.as_ref();
        match optim.and_then(OptimizerLayout::of_state) {
            Some(OptimizerLayout::Nested) => {
                let groups = optim.map(wanted_groups).transpose()?;
                reader = relaid(reader, OptimizerLayout::Nested, groups.as_deref()).await?;
            }
            Some(OptimizerLayout::Flat) => {
                reader = relaid(reader, OptimizerLayout::Flat, None).await?;
            }
            None => {}
        }
        if options.cast {
            reader = self.cast(reader).await?;
        }
        Ok(Built { reader, unmapped, stored_layout })
    }

    async fn cast(
        &self,
        reader: Arc<dyn StorageReader>,
    ) -> Result<Arc<dyn StorageReader>, CheckpointError> {
        let wanted: HashMap<Arc<str>, DType> = flatten(&self.state, FlattenRule::Torch24)?
            .into_iter()
            .filter_map(|leaf| Some((leaf.fqn, leaf.value.as_tensor()?.dtype())))
            .collect();
        let rule = |fqn: &str, stored: DType| {
            let wanted = wanted.get(fqn).copied()?;
            (dcp_jobs::cast::is_float(stored) && dcp_jobs::cast::is_float(wanted)).then_some(wanted)
        };
        let cast = Cast::new(reader, rule, CastOptions::default()).await;
        cast.map(|cast| Arc::new(cast) as Arc<dyn StorageReader>).map_err(|error| match error {
            JobError::Checkpoint(error) => error,
            other => PlanError::plugin(other).into(),
        })
    }
}

impl std::fmt::Debug for Adapted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { inner, options, .. } = self;
        f.debug_struct("Adapted").field("inner", inner).field("options", options).finish()
    }
}

#[async_trait]
impl StorageReader for Adapted {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        self.built().await?.reader.metadata().await
    }

    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        self.built().await?.reader.read(metadata, plan, sink).await
    }
}

/// The default planner, failing with all missing names.
#[derive(Debug)]
struct Complete;

impl LoadPlanner for Complete {
    fn local_plan(
        &self,
        wanted: &StateIndex,
        stored: &CheckpointMetadata,
        context: &PlanContext,
    ) -> Result<(LoadPlan, LoadReport), PlanError> {
        let (plan, report) = DefaultLoadPlanner::new().local_plan(wanted, stored, context)?;
        if report.missing.is_empty() {
            return Ok((plan, report));
        }
        Err(PlanError::Missing { fqns: report.missing.iter().map(ToString::to_string).collect() })
    }
}

/// The index of a checkpoint: the folder that OLMo-core calls `model_and_optim`. It works without
/// listing.
///
/// # Errors
///
/// [`CheckpointError::NotACheckpoint`] when there is no `.metadata`, with a hint when this is a
/// step of a run that contains the checkpoint; when the index is bad.
pub async fn get_checkpoint_metadata(
    storage: &Arc<dyn Storage>,
) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
    let contains = async |name: &str| {
        let key = Key::new(name).map_err(StorageError::from)?;
        storage.contains(&key).await
    };
    if contains(".metadata").await? {
        return DcpReader::new(Arc::clone(storage)).metadata().await;
    }
    let mut message = "it is not a distributed checkpoint folder".to_owned();
    if contains(&format!("{MODEL_FOLDER}/.metadata")).await? {
        message.push_str(&format!("; did you mean to use the folder {MODEL_FOLDER:?} in it?"));
    }
    Err(CheckpointError::NotACheckpoint { message })
}
