//! The load protocol: look, plan, agree, read, agree.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;
use tracing::Instrument;

use dcp_core::checkpoint::ReadReport;
use dcp_core::digest::WordHash;
use dcp_core::error::FailureKind;
use dcp_core::error::Phase;
use dcp_core::metadata::Entry;
use dcp_core::path::StatePath;
use dcp_core::plan::{LoadPlan, LoadReport, ReadKind};
use dcp_core::{
    CheckpointError, CheckpointMetadata, StateDict, Stateful, StorageErrorKind, StorageReader,
    Tensor,
};
use dcp_planner::{choose_rule, flatten, index_of, set_at_path};
use serde::{Deserialize, Serialize};

use crate::device::piece_bytes;
use crate::event::{CheckpointEvent, Observers, Operation};
use crate::group::Group;
use crate::metadata_lookup::tensor_dtype;
use crate::read_sharing::ParallelReader;
use crate::rounds;
use crate::settings::{LoadMode, Settings};
use crate::sink::StateSink;

/// Loads checkpoints into state dicts, in place.
///
/// Every rank of the group makes one with the same settings and calls [`load`](Self::load) with
/// its own state dict, in whatever topology it likes, and a reader of the same place. Without a
/// group, this process loads alone.
#[derive(Clone, Debug)]
pub struct Loader {
    settings: Settings,
}

/// The result of a load on this rank.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LoadSummary {
    /// The differences between checkpoint and state dict.
    pub report: LoadReport,
    /// The cost of the reads.
    pub read: ReadReport,
    /// The checkpoint's index.
    pub metadata: Arc<CheckpointMetadata>,
}

/// The reader of a load.
#[derive(Clone, Copy, Debug)]
enum Through<'a> {
    Any(&'a dyn StorageReader),
    /// With one decision for all rounds.
    Shared(&'a ParallelReader),
}

impl<'a> Through<'a> {
    fn reader(self) -> &'a dyn StorageReader {
        match self {
            Self::Any(reader) => reader,
            Self::Shared(reader) => reader,
        }
    }
}

/// This rank's part of a load, ready to be read.
#[derive(Debug)]
struct Prepared {
    metadata: Arc<CheckpointMetadata>,
    rounds: Vec<LoadPlan>,
    report: LoadReport,
    sink: Arc<StateSink>,
    places: Vec<Place>,
}

/// The place of a leaf in the state dict.
#[derive(Clone, Debug)]
enum Place {
    Path(StatePath),
    TopLevel(Arc<str>),
}

/// The checkpoint as one rank sees it; ranks compare these, so that all load the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Sight {
    entries: u64,
    digest: u64,
    /// The number of times that this rank reads.
    rounds: u64,
}

impl Sight {
    fn shows_the_same_as(&self, other: &Self) -> bool {
        (self.entries, self.digest) == (other.entries, other.digest)
    }
}

impl Default for Loader {
    fn default() -> Self {
        Self::new()
    }
}

impl Loader {
    /// A strict loader for this process alone.
    #[must_use]
    pub fn new() -> Self {
        Self::with_settings(Settings::new())
    }

    /// A loader with these settings.
    #[must_use]
    pub fn with_settings(settings: Settings) -> Self {
        Self { settings }
    }

    /// The settings of its loads.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Loads into `state`: tensors in place, in the memory they have; objects by replacing them.
    ///
    /// Nothing is changed before every rank has seen the same checkpoint and found that it fits.
    /// An error after that leaves tensors partly filled, and objects as they were. Every rank
    /// gets the same outcome. Dropping the future aborts the group.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Mismatch`] when the checkpoint does not fit as [`LoadMode`] demands,
    /// and whatever storage and format find. In a group, [`CheckpointError::Ranks`] on every rank
    /// with the errors of all.
    pub async fn load(
        &self,
        state: &mut StateDict,
        reader: &dyn StorageReader,
    ) -> Result<LoadSummary, CheckpointError> {
        let group = self.settings.enter_group()?;
        group.run(async |group| self.run(group, state, Through::Any(reader)).await).await
    }

    /// Like [`load`](Self::load), into a value with a state dict. When
    /// [`load_state_dict`](Stateful::load_state_dict) of one rank fails, the load fails on all ranks.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load), and when the value has no state or refuses the one that was read.
    pub async fn load_stateful<S: Stateful + Send + ?Sized>(
        &self,
        target: &mut S,
        reader: &dyn StorageReader,
    ) -> Result<LoadSummary, CheckpointError> {
        self.load_through(target, Through::Any(reader)).await
    }

    /// As [`load_stateful`](Self::load_stateful), with one decision of `reader` for the whole load. A load to
    /// devices reads in rounds, in each of which any other method lets the ranks decide, by the few bytes of a
    /// round.
    ///
    /// # Errors
    ///
    /// As [`load_stateful`](Self::load_stateful).
    pub async fn load_shared<S: Stateful + Send + ?Sized>(
        &self,
        target: &mut S,
        reader: &ParallelReader,
    ) -> Result<LoadSummary, CheckpointError> {
        self.load_through(target, Through::Shared(reader)).await
    }

    async fn load_through<S: Stateful + Send + ?Sized>(
        &self,
        target: &mut S,
        through: Through<'_>,
    ) -> Result<LoadSummary, CheckpointError> {
        let mut state = match target.state_dict() {
            Ok(state) => state,
            Err(error) => return Err(self.fail(error).await),
        };
        let group = self.settings.enter_group()?;
        group
            .run(async |group| {
                let summary = self.run(group, &mut state, through).await?;
                group.all_succeed(Phase::Read, target.load_state_dict(state)).await?;
                Ok(summary)
            })
            .await
    }

    /// Takes part in a load with an error that occurred before [`load`](Self::load) could be
    /// called, such as a storage that does not open. Every rank of the group returns it.
    ///
    /// Returns what `load` would: without a group, `error` itself.
    pub async fn fail(&self, error: CheckpointError) -> CheckpointError {
        let failed = async |group: &Group| -> Result<Infallible, CheckpointError> {
            group.all_gather_results::<Sight>(Phase::Plan, Err(error)).await?;
            Err(group.unanswered())
        };
        let result = match self.settings.enter_group() {
            Ok(group) => group.run(failed).await,
            Err(error) => Err(error),
        };
        let observers = self.settings.observers.of_rank(self.settings.rank());
        let Err(error) = observers.watch(Operation::Load, result);
        error
    }

    async fn run(
        &self,
        group: &Group,
        state: &mut StateDict,
        through: Through<'_>,
    ) -> Result<LoadSummary, CheckpointError> {
        let observers = self.settings.observers.of_rank(group.context().rank);
        let span = tracing::info_span!("dcp_load", rank = group.context().rank);
        let loaded = self.load_in(group, state, through, &observers).instrument(span).await;
        observers.watch(Operation::Load, loaded)
    }

    async fn load_in(
        &self,
        group: &Group,
        state: &mut StateDict,
        through: Through<'_>,
        observers: &Observers,
    ) -> Result<LoadSummary, CheckpointError> {
        let reader = through.reader();
        let started = Instant::now();
        let prepared = match reader.metadata().await {
            Ok(metadata) => self.prepare(state, metadata, group),
            Err(error) => Err(error),
        };
        let seen = prepared.map(|mine| (sight(&mine.metadata, mine.rounds.len() as u64), mine));
        let (sights, prepared) = group.all_gather_with(Phase::Plan, seen).await?;
        let Prepared { metadata, rounds, report, sink, places } = prepared;
        same_sight(&sights)?;
        observers.send(&CheckpointEvent::Planned {
            operation: Operation::Load,
            items: rounds.iter().map(|plan| plan.items.len() as u64).sum(),
            bytes: rounds.iter().map(|plan| plan_bytes(&metadata, plan)).sum(),
            reused: false,
            duration: started.elapsed(),
        });

        let started = Instant::now();
        let span = tracing::info_span!("read", bytes = tracing::field::Empty);
        let count = sights.iter().map(|sight| sight.rounds).max().unwrap_or(1);
        let read = async {
            let Through::Shared(sharing) = through else {
                return rounds::read(reader, &metadata, &rounds, count, &sink).await;
            };
            let mut report = sharing.prepare(&metadata, &rounds::whole(&rounds)).await?;
            report += rounds::read(reader, &metadata, &rounds, count, &sink).await?;
            Ok(report)
        };
        let read = read.instrument(span.clone()).await;
        if let Through::Shared(sharing) = through {
            sharing.forget();
        }
        let duration = started.elapsed();
        // Objects go into a copy first, so that no rank takes any before all have everything.
        let done = read.and_then(|read| Ok((read, with_objects(state, &places, &sink)?)));
        let (read, loaded) = group.all_succeed(Phase::Read, done).await?;
        span.record("bytes", read.bytes_needed);
        *state = loaded;
        observers.send(&CheckpointEvent::Read {
            bytes_needed: read.bytes_needed,
            bytes_read: read.bytes_read,
            duration,
            all_ranks: started.elapsed(),
        });
        Ok(LoadSummary { report, read, metadata })
    }

    fn prepare(
        &self,
        state: &StateDict,
        metadata: Arc<CheckpointMetadata>,
        group: &Group,
    ) -> Result<Prepared, CheckpointError> {
        let rule = self.settings.flatten_rule.map_or_else(|| choose_rule(state, &metadata), Ok)?;
        let flat = flatten(state, rule)?;
        let index = index_of(&flat, |_, _| Ok::<_, CheckpointError>(0))?;
        let (plan, mut report) =
            self.settings.load_planner.local_plan(&index, &metadata, &group.context())?;
        let mode = self.settings.load_mode;
        let fits = match mode {
            LoadMode::Exact => report.is_complete() && report.unexpected.is_empty(),
            LoadMode::Strict => report.is_complete(),
            LoadMode::AllowMissing => {
                let missing = std::mem::take(&mut report.missing);
                let fits = report.is_complete();
                report.missing = missing;
                fits
            }
            LoadMode::Partial => true,
        };
        if !fits {
            let mut shown = report;
            // What is no error in this mode.
            if mode != LoadMode::Exact {
                shown.unexpected.clear();
            }
            if mode == LoadMode::AllowMissing {
                shown.missing.clear();
            }
            let is_all_missing = !shown.missing.is_empty()
                && shown.shapes.is_empty()
                && shown.dtypes.is_empty()
                && shown.kinds.is_empty();
            let hint = match is_all_missing {
                true => "; LoadMode::AllowMissing keeps the values that the checkpoint lacks",
                false => "",
            };
            return Err(CheckpointError::Mismatch { summary: format!("{shown}{hint}") });
        }
        let leaves = flat
            .iter()
            .map(|entry| (Arc::clone(&entry.fqn), entry.value.as_tensor().cloned()))
            .collect::<Vec<(Arc<str>, Option<Tensor>)>>();
        let places = flat
            .iter()
            .map(|entry| match &entry.path {
                Some(path) => Place::Path(Arc::clone(path)),
                None => Place::TopLevel(Arc::clone(&entry.fqn)),
            })
            .collect();
        let sink = Arc::new(StateSink::new(leaves, piece_bytes(self.settings.staging_bytes)));
        let rounds = rounds::rounds(plan, &sink, self.settings.staging_bytes);
        Ok(Prepared { metadata, rounds, report, sink, places })
    }
}

/// Bytes of the tensors that a plan reads.
fn plan_bytes(metadata: &CheckpointMetadata, plan: &LoadPlan) -> u64 {
    let bytes = plan.items.iter().filter_map(|item| {
        let ReadKind::Tensor { region, .. } = &item.kind else { return None };
        let dtype = tensor_dtype(metadata, item.entry).ok()?;
        Some(region.volume().saturating_mul(dtype.size() as u64))
    });
    bytes.fold(0, u64::saturating_add)
}

/// The state with the objects that were read; tensors share their memory with it.
fn with_objects(
    state: &StateDict,
    places: &[Place],
    sink: &StateSink,
) -> Result<StateDict, CheckpointError> {
    let mut state = state.clone();
    for (leaf, value) in sink.take_objects() {
        match places.get(leaf) {
            Some(Place::Path(path)) => set_at_path(&mut state, path, value)?,
            Some(Place::TopLevel(key)) => {
                state.insert(Arc::clone(key), value);
            }
            None => {}
        }
    }
    Ok(state)
}

/// A few bytes that differ when two ranks see different checkpoints, as on a network file system
/// that lags behind.
fn sight(metadata: &CheckpointMetadata, rounds: u64) -> Sight {
    let mut digest = WordHash::new();
    for (fqn, entry) in metadata.iter() {
        digest.bytes(fqn.as_bytes());
        match entry {
            Entry::Tensor(tensor) => {
                digest.bytes(tensor.dtype.name().as_bytes());
                tensor.shape.iter().for_each(|size| digest.number(*size));
                for chunk in tensor.chunks.iter() {
                    chunk.offsets.iter().chain(chunk.sizes).for_each(|n| digest.number(*n));
                    add_placement(&mut digest, metadata, chunk.placement.as_ref());
                }
            }
            Entry::Object(object) => {
                add_placement(&mut digest, metadata, object.placement.as_ref())
            }
            _ => {}
        }
    }
    Sight { entries: metadata.len() as u64, digest: digest.finish(), rounds }
}

fn add_placement(
    digest: &mut WordHash,
    metadata: &CheckpointMetadata,
    placement: Option<&dcp_core::metadata::Placement>,
) {
    let Some(placement) = placement else { return digest.number(u64::MAX) };
    if let Some(file) = metadata.file(placement.file) {
        digest.bytes(file.as_str().as_bytes());
    }
    digest.number(placement.byte_offset);
    digest.number(placement.byte_len);
}

fn same_sight(sights: &[Sight]) -> Result<(), CheckpointError> {
    let Some(first) = sights.first() else { return Ok(()) };
    let differs = sights.iter().position(|sight| !sight.shows_the_same_as(first));
    let Some(rank) = differs else { return Ok(()) };
    // Every rank sees the same list, so every rank returns this.
    Err(CheckpointError::Ranks {
        phase: Phase::Open,
        failures: vec![dcp_core::error::RankFailure::new(
            u32::try_from(rank).unwrap_or(u32::MAX),
            FailureKind::Storage(StorageErrorKind::Transient),
            "it sees another checkpoint than rank 0; the storage may not have settled, try again",
        )],
    })
}
