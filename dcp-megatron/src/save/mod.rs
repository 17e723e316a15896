//! `save`: writes the sharded state dict of all ranks as a checkpoint.

pub(crate) mod async_queue;
mod options;
pub(crate) mod prepare;

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::error::FailureKind;
use dcp_core::error::{Phase, RankFailure, error_chain};
use dcp_core::value::Dict;
use dcp_core::{
    CheckpointError, Collective, PlanError, Rank, StateDict, Storage, StorageWriter, Value,
};
use dcp_engine::stage::BlockingStager;
use dcp_engine::{BackgroundSaver, Group, SaveHandle, SaveSummary, Saver, StagedState};
use serde::{Deserialize, Serialize};

use crate::agreement;
use crate::agreement::common_check;
use crate::error::MegatronError;
use crate::error::{CommonDifference, CommonDiffers};
use crate::open::strategy::WriterSettings;
use crate::save::prepare::ToSave;
use crate::sharded::culprit;
use crate::sharded::{
    IntegrityError, RankShards, ReplicaId, ShardedLeaf, ShardedStateDict, ShardedTensor,
    ShardedValue, sharded_leaves, validate_sharding_integrity,
};

pub use options::MegatronSaveOptions;
use options::settings;

/// The member of the common state that says what the content is like.
const CONTENT_METADATA: &str = "content_metadata";
/// A member of it that only has a meaning while the job runs.
const RUNTIME_GROUP: &str = "dp_cp_group";

/// Divides among ranks what several of them hold, as a fully parallel save does.
///
/// Every rank calls it in every save, with its shards in the order of its state dict, factories
/// expanded.
#[async_trait]
pub trait SaveDistribution: fmt::Debug + Send + Sync {
    /// For each of the shards, in their order, whether this rank writes it. What it does not
    /// write, another rank must. The replica ids of the shards are those of the state; when the
    /// save is [validated](MegatronSaveOptions::validate_access_integrity), they are known to be right.
    ///
    /// # Errors
    ///
    /// When the ranks cannot agree.
    async fn owned(&self, shards: &[&ShardedTensor]) -> Result<Vec<bool>, MegatronError>;
}

/// Saves `state` into `storage` with the other ranks of the options' group, by Megatron-Core's
/// rules: factories are expanded, local objects dropped, tensors and objects stored under their
/// keys by the ranks with the main replicas, and all else as the common state, that of rank 0.
///
/// `state` is not changed; contiguous memory is written without a copy. When this returns, the
/// checkpoint is complete, and `metadata.json`, which makes it one, was written last.
///
/// # Errors
///
/// The same on all ranks, before anything is written: [`MegatronError::Integrity`] when the shards
/// do not make whole tensors, [`MegatronError::CommonDiffers`] when the common state is not the
/// same, [`MegatronError::CommonState`] when a part of it cannot be sent or compared,
/// [`MegatronError::MixedLists`], and what factories say. A part of the common state that cannot be
/// written, such as an object in itself, is named by its path. Then those of [`Saver::save`](dcp_engine::Saver::save).
pub async fn save(
    state: &ShardedStateDict,
    storage: &Arc<dyn Storage>,
    options: &MegatronSaveOptions,
) -> Result<SaveSummary, MegatronError> {
    let Ready { flat, writer, .. } = ready(state, storage, options, None).await?;
    Ok(options.saver.save(&flat, &*writer).await?)
}

/// Saves in the background: when this returns, all ranks have agreed on what is saved, and it was
/// copied, so that training may go on. Writing and commit follow on `background`, whose saver needs
/// a group of its own, of the same ranks in the same order; the options' group is not used any more
/// then.
///
/// The last thing that the background save does, on rank 0, is to write `metadata.json`; whatever
/// is to be done when the checkpoint is complete, such as writing the tracker of the run, is done
/// after [`SaveHandle::wait`] returned on all ranks, which an
/// [`AsyncCallsQueue`](crate::AsyncCallsQueue) sees to. Megatron-Core guarantees the same order of
/// finalization.
///
/// # Errors
///
/// As [`save`], and on all ranks when one cannot copy its state or has a background saver of other
/// ranks ([`MegatronError::OtherGroup`]); what goes wrong later [`SaveHandle::wait`] reports.
#[doc(alias = "async_sharded_save")]
pub async fn async_save(
    state: &ShardedStateDict,
    storage: &Arc<dyn Storage>,
    options: &MegatronSaveOptions,
    background: &MegatronBackgroundSaver,
) -> Result<SaveHandle, MegatronError> {
    let Ready { flat, staged, writer } = ready(state, storage, options, Some(background)).await?;
    let staged = staged.map_or_else(|| background.stager.copy(&flat), Ok)?;
    Ok(background.saver.start_staged(staged, writer))
}

/// Saves in the background, one after the other; for [`async_save`].
#[derive(Clone, Debug)]
pub struct MegatronBackgroundSaver {
    saver: BackgroundSaver,
    /// Keeps the memory of a copy for the next save.
    stager: BlockingStager,
    rank: Rank,
    world_size: u32,
}

impl MegatronBackgroundSaver {
    /// For this process alone, or with the ranks of `group`, which nothing else uses: those of the
    /// group of [`MegatronSaveOptions`], in the same order.
    #[must_use]
    pub fn new(group: Option<Arc<dyn Collective>>) -> Self {
        let (rank, world_size) = group.as_ref().map_or((0, 1), |g| (g.rank(), g.world_size()));
        let settings = match group {
            Some(group) => settings().group(group),
            None => settings(),
        };
        let stager = BlockingStager::new();
        Self {
            saver: BackgroundSaver::new(Saver::with_settings(settings)),
            stager,
            rank,
            world_size,
        }
    }

    /// Ranks that commit in other groups than they agreed in would each commit a part.
    fn check_group(&self, group: &Group) -> Result<(), MegatronError> {
        let save = group.context();
        if (self.rank, self.world_size) == (save.rank, save.world_size) {
            return Ok(());
        }
        Err(MegatronError::OtherGroup {
            rank: save.rank,
            world_size: save.world_size,
            background_rank: self.rank,
            background_world_size: self.world_size,
        })
    }
}

/// A save on which all ranks have agreed.
struct Ready {
    flat: StateDict,
    /// The copy, for a save in the background.
    staged: Option<StagedState>,
    writer: Arc<dyn StorageWriter>,
}

/// The part of a save that a rank prepares on its own.
struct Own {
    flat: Result<StateDict, MegatronError>,
    staged: Option<StagedState>,
    writer: Arc<dyn StorageWriter>,
    /// Its message to the coordinator.
    offer: Bytes,
    /// The common state as it is compared.
    compared: Dict,
}

async fn ready(
    state: &ShardedStateDict,
    storage: &Arc<dyn Storage>,
    options: &MegatronSaveOptions,
    background: Option<&MegatronBackgroundSaver>,
) -> Result<Ready, MegatronError> {
    let group = options.saver.settings().enter_group()?;
    let ready = agreed(state, storage, options, background, &group).await;
    agreement::conclude(group, &ready);
    ready
}

async fn agreed(
    state: &ShardedStateDict,
    storage: &Arc<dyn Storage>,
    options: &MegatronSaveOptions,
    background: Option<&MegatronBackgroundSaver>,
    group: &Group,
) -> Result<Ready, MegatronError> {
    let fits = background.map_or(Ok(()), |background| background.check_group(group));
    let prepared = fits.and_then(|()| options.prepare(state));
    let prepared = match &options.distribution {
        None => prepared,
        Some(distribution) => {
            // All or none call the distribution, which is collective itself.
            let mut prepared = match options.validate {
                true => claims_checked(prepared, group).await?,
                false => agreement::all(group, Phase::Plan, prepared).await?,
            };
            redistribute(&mut prepared.sharded, &**distribution).await.map(|()| prepared)
        }
    };
    let stager = background.map(|background| &background.stager);
    let own = prepared.and_then(|prepared| options.own(prepared, storage, stager));
    let offer = own.map(|own| (own.offer.clone(), own));
    let (offers, own) = agreement::offers(group, Phase::Plan, offer).await?;
    let found = offers.map(|offers| judge(&offers, options.validate));
    let verdict = agreement::verdict(group, Phase::Plan, found).await?;
    if let Some(error) = verdict.integrity {
        return Err(error.into());
    }
    if !verdict.failures.is_empty() {
        return Err(match own.flat {
            Err(error) if group.context().world_size == 1 => error,
            _ => {
                let failures = verdict.failures.into_iter();
                let failures = failures
                    .map(|(rank, text)| RankFailure::new(rank, FailureKind::InvalidPlan, text));
                let failures = failures.collect();
                CheckpointError::Ranks { phase: Phase::Plan, failures }.into()
            }
        });
    }
    if !verdict.same_common {
        let differs = differences(group, &own.compared).await?;
        if options.common_must_agree && !differs.ranks.is_empty() {
            return Err(differs.into());
        }
        tracing::warn!("{differs}; that of rank 0 is saved");
    }
    Ok(Ready { flat: own.flat?, staged: own.staged, writer: own.writer })
}

/// Checks the replica ids of the state itself, which a distribution replaces: where several claim
/// to be the main replica, it would choose one, and the data of the others would be lost.
async fn claims_checked(
    prepared: Result<ToSave, MegatronError>,
    group: &Group,
) -> Result<ToSave, MegatronError> {
    let offer = prepared.map(|prepared| (described(&prepared.sharded), prepared));
    let (offers, prepared) = agreement::offers(group, Phase::Plan, offer).await?;
    let found = offers.map(|offers| Ok(problems(offers.iter().map(|offer| &**offer))?));
    match agreement::verdict(group, Phase::Plan, found).await? {
        Some(error) => Err(MegatronError::Integrity(error)),
        None => Ok(prepared),
    }
}

fn described(sharded: &ShardedStateDict) -> Bytes {
    RankShards::of(sharded_leaves(sharded)).to_wire()
}

/// Validates the shards that ranks describe; `None` when nothing is wrong.
fn problems<'a>(
    offers: impl Iterator<Item = &'a [u8]>,
) -> Result<Option<IntegrityError>, PlanError> {
    let ranks = offers.map(RankShards::from_wire).collect::<Result<Vec<_>, _>>()?;
    Ok(validate_sharding_integrity(&ranks).err())
}

impl MegatronSaveOptions {
    fn prepare(&self, state: &ShardedStateDict) -> Result<ToSave, MegatronError> {
        let mut prepared = prepare::to_save(state, self.allow_mixed_lists)?;
        if let Some(content) = &self.content_metadata {
            let mut content = content.clone();
            content.remove(RUNTIME_GROUP);
            prepared.common.insert(CONTENT_METADATA, content);
        }
        Ok(prepared)
    }

    /// All that can be done without the other ranks.
    fn own(
        &self,
        prepared: ToSave,
        storage: &Arc<dyn Storage>,
        stager: Option<&BlockingStager>,
    ) -> Result<Own, MegatronError> {
        let ToSave { sharded, mut common } = prepared;
        let compared = match &self.preprocess {
            Some(preprocess) => preprocess(&common),
            None => common.clone(),
        };
        let digest = common_check::digest(&compared).map_err(|error| {
            let path = culprit(&compared.clone().into(), &|part| part.to_wire().is_err());
            let problem = format!("cannot be saved: {path}: {}", error_chain(&error));
            MegatronError::CommonState { problem }
        })?;
        let description = match self.validate {
            true => described(&sharded),
            false => Bytes::new(),
        };
        let flat = prepare::flat(&sharded);
        // Before the ranks agree, so that none begins to write when one has no copy.
        let staged = match (&flat, stager) {
            (Ok(flat), Some(stager)) => Some(stager.copy(flat)?),
            _ => None,
        };
        // A shard that cannot be saved by itself may be one that all ranks together explain better.
        let problem = flat.as_ref().err().map_or_else(String::new, |error| error_chain(error));
        let len = (problem.len() as u64).to_le_bytes();
        let offer = Bytes::from([&digest[..], &len, problem.as_bytes(), &description].concat());
        if stager.is_some() {
            // Tensors of the common state are encoded later than this returns.
            let copy = Value::from_wire(&Value::from(common.clone()).to_wire()?)?;
            if let Value::Dict(copy) = copy {
                common = copy;
            }
        }
        let settings = WriterSettings { common, ..self.settings.clone() };
        let writer = self.strategies.save(&self.backend)?.writer(storage, settings)?;
        Ok(Own { flat, staged, writer, offer, compared })
    }
}

/// The coordinator's findings about the offers of all ranks.
#[derive(Debug, Serialize, Deserialize)]
struct Verdict {
    integrity: Option<IntegrityError>,
    /// Ranks whose shards cannot be saved, and why.
    failures: Vec<(Rank, String)>,
    same_common: bool,
}

fn judge(offers: &[Bytes], validate: bool) -> Result<Verdict, MegatronError> {
    let mut descriptions = Vec::with_capacity(offers.len());
    let (mut digests, mut failures) = (Vec::new(), Vec::new());
    for (rank, offer) in (0..).zip(offers) {
        let parts = split(offer).ok_or_else(|| {
            PlanError::message(format!("what rank {rank} has to save"), "it ends too early")
        })?;
        let (digest, problem, description) = parts;
        digests.push(digest);
        if !problem.is_empty() {
            failures.push((rank, String::from_utf8_lossy(problem).into_owned()));
        }
        descriptions.push(description);
    }
    let same_common = digests.windows(2).all(|pair| pair[0] == pair[1]);
    let integrity = if validate { problems(descriptions.into_iter())? } else { None };
    Ok(Verdict { integrity, failures, same_common })
}

/// Digest, problem and description of an offer.
fn split(offer: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (digest, rest) = offer.split_at_checked(32)?;
    let (len, rest) = rest.split_first_chunk::<8>()?;
    let (problem, description) =
        rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
    Some((digest, problem, description))
}

/// Compares every rank's common state with that of rank 0. Only requested when one differs.
async fn differences(group: &Group, compared: &Dict) -> Result<CommonDiffers, MegatronError> {
    let mine = (group.context().rank == 0).then(|| Ok(Value::from(compared.clone()).to_wire()?));
    let first = group.broadcast(Phase::Plan, 0, mine).await?;
    let mine = match Value::from_wire(&first) {
        Ok(Value::Dict(first)) => Ok(common_check::compare(&first, compared)),
        Ok(_) => Ok(CommonDifference::default()),
        Err(error) => Err(error.into()),
    };
    let all = group.all_gather_results(Phase::Plan, mine).await?;
    let ranks = (0..).zip(all).filter(|(_, difference)| !difference.is_empty()).collect();
    Ok(CommonDiffers { ranks })
}

/// Makes main replicas of the shards that this rank writes, and of no others.
async fn redistribute(
    sharded: &mut ShardedStateDict,
    distribution: &dyn SaveDistribution,
) -> Result<(), MegatronError> {
    let (owned, shards) = {
        let leaves = sharded_leaves(sharded);
        let tensors: Vec<&ShardedTensor> = leaves
            .iter()
            .filter_map(|leaf| match leaf {
                ShardedLeaf::Tensor(tensor) => Some(*tensor),
                _ => None,
            })
            .collect();
        (distribution.owned(&tensors).await?, tensors.len())
    };
    if owned.len() != shards {
        return Err(MegatronError::Distribution { decided: owned.len(), shards });
    }
    let mut owned = owned.into_iter();
    for (_, value) in sharded.iter_mut() {
        assign(value, &mut owned);
    }
    Ok(())
}

fn assign(value: &mut ShardedValue, owned: &mut impl Iterator<Item = bool>) {
    match value {
        ShardedValue::Dict(dict) => dict.iter_mut().for_each(|(_, value)| assign(value, owned)),
        ShardedValue::List(items) => items.iter_mut().for_each(|item| assign(item, owned)),
        ShardedValue::Tensor(tensor) => {
            let id = match owned.next() {
                Some(true) => ReplicaId::MAIN,
                _ => ReplicaId::from(1),
            };
            *tensor = tensor.clone().with_replica_id(id);
        }
        _ => {}
    }
}
