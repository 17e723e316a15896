//! `load`: each rank loads its part of a checkpoint in its current layout.

mod fitting;
mod load_request;
mod record_replay;
mod request;
mod select_checkpoint;
pub(crate) mod strict;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::checkpoint::ReadReport;
use dcp_core::error::{Phase, PlanSubject, RanksProblem};
use dcp_core::plan::LoadReport;
use dcp_core::value::Dict;
use dcp_core::{CheckpointMetadata, Collective, DType, Dims, PlanError, Storage, StorageReader};
use dcp_engine::{Group, LoadMode, Loader, Settings};
use dcp_planner::FlattenRule;
use serde::{Deserialize, Serialize};

use crate::agreement;
use crate::agreement::common_check;
use crate::disk::common_state::COMMON_STATE;
use crate::disk::tracker::Tracked;
use crate::error::KeyMismatch;
use crate::error::MegatronError;
use crate::load::fitting::{Cleared, Clip, Fitted};
use crate::load::load_request::{ToLoad, is_stored, to_load};
use crate::load::record_replay::Indexed;
use crate::load::request::Request;
use crate::load::select_checkpoint::{Choice, Rule};
use crate::load::strict::StrictHandling;
use crate::open::checkpoint::MegatronOpenOptions;
use crate::open::strategy::{Opened, Strategies};
use crate::sharded::{
    IntegrityError, ObjectKey, RankShards, ShardedLeaf, ShardedStateDict, apply_factory_merges,
    check_merge, merge, sharded_leaves, validate_sharding_integrity,
};

/// Wraps the reader of a checkpoint.
type Wrap = dyn Fn(Arc<dyn StorageReader>) -> Arc<dyn StorageReader> + Send + Sync;

/// Options of a load, the same on every rank except for the group's own rank.
#[derive(Clone, Default)]
pub struct MegatronLoadOptions {
    group: Option<Arc<dyn Collective>>,
    strict: StrictHandling,
    skip_validation: bool,
    refuse_casts: bool,
    fall_back: bool,
    verify_integrity: bool,
    strategies: Option<Strategies>,
    open: MegatronOpenOptions,
    wrap: Option<Arc<Wrap>>,
}

impl MegatronLoadOptions {
    /// This process alone, with Megatron-Core's defaults: unexpected keys fail when they are read,
    /// the request is validated, and tensors are cast to the requested dtype.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Loads together with the other ranks of `group`; rank 0 coordinates. It alone reads
    /// the files that open the checkpoint, such as its index, and broadcasts them. The others check
    /// that their files have the same length and, where the storage has it, age. A rank with other
    /// files reads them itself.
    #[must_use]
    pub fn group(mut self, group: Arc<dyn Collective>) -> Self {
        self.group = Some(group);
        self
    }

    /// The treatment of keys on one side only.
    #[must_use]
    pub fn strict(mut self, strict: StrictHandling) -> Self {
        self.strict = strict;
        self
    }

    /// Whether the requests of all ranks must make whole tensors (the default). Turn it off to load
    /// parts.
    #[must_use]
    pub fn validate_access_integrity(mut self, validate: bool) -> Self {
        self.skip_validation = !validate;
        self
    }

    /// Whether tensors are cast to the requested element type (the default, as
    /// Megatron-Core), or another one is an error. Floats never become integers.
    #[must_use]
    pub fn cast(mut self, cast: bool) -> Self {
        self.refuse_casts = !cast;
        self
    }

    /// Whether a load from the folder of a run falls back to the last complete checkpoint when the
    /// one in the tracker is missing or incomplete. By default that is
    /// [`MegatronError::TrackedAbsent`]. [`Loaded::which`] names the loaded one.
    #[must_use]
    pub fn fall_back(mut self, fall_back: bool) -> Self {
        self.fall_back = fall_back;
        self
    }

    /// Whether every file is compared with `integrity.json` first (Megatron-Core 0.17.1 and later
    /// write it by an option;
    /// [`MegatronSaveOptions::integrity`](crate::MegatronSaveOptions::integrity)). Rank 0
    /// reads all files for it while the others wait. A checkpoint without a manifest then
    /// fails with [`MegatronError::Damaged`], as one of other contents does.
    #[must_use]
    pub fn verify_integrity(mut self, verify: bool) -> Self {
        self.verify_integrity = verify;
        self
    }

    /// The strategies of backends; they override those of [`open_options`](Self::open_options).
    #[must_use]
    #[doc(alias = "sharded_strategy")]
    pub fn strategies(mut self, strategies: Strategies) -> Self {
        self.strategies = Some(strategies);
        self
    }

    /// Options of opening, such as for a damaged checkpoint.
    #[must_use]
    pub fn open_options(mut self, open: MegatronOpenOptions) -> Self {
        self.open = open;
        self
    }

    /// Wraps the checkpoint's reader with `wrap`, such as to share reads among ranks. Ranks whose readers wait for each other have to be of one
    /// [`group`](Self::group), which lets none of them read alone.
    #[must_use]
    #[doc(alias = "FullyParallelLoadStrategyWrapper")]
    pub fn reader(
        mut self,
        wrap: impl Fn(Arc<dyn StorageReader>) -> Arc<dyn StorageReader> + Send + Sync + 'static,
    ) -> Self {
        self.wrap = Some(Arc::new(wrap));
        self
    }
}

/// The result of a load.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Loaded {
    /// The common state of the checkpoint, all of it, with what was requested: local tensors,
    /// objects, merged factories, and local objects.
    pub state: Dict,
    /// The loaded checkpoint, for the folder of a run.
    pub which: Option<Tracked>,
    /// Warnings about the checkpoint.
    pub warnings: Vec<String>,
    /// Damage that the tolerant mode skipped.
    pub damage: Vec<String>,
    /// Stored keys that no rank requested; with [`StrictHandling::ReturnAll`], and an empty set
    /// with [`StrictHandling::ReturnUnexpected`].
    pub missing: Option<BTreeSet<Arc<str>>>,
    /// Keys that this rank requested and that are not stored; with
    /// [`StrictHandling::ReturnAll`] and [`StrictHandling::ReturnUnexpected`].
    pub unexpected: Option<BTreeSet<Arc<str>>>,
    /// Keys that are stored and that this rank requested but did not get: as parts of factories that were
    /// left out as a whole, because other parts of them are not stored.
    pub left_out: BTreeSet<Arc<str>>,
    /// Tensors of this rank that were cast: key, stored type, requested type.
    pub casts: Vec<(Arc<str>, DType, DType)>,
    /// Tensors of this rank that are stored in another shape, as allowed: key, stored
    /// shape, requested shape. Elements that are not stored are zero.
    pub reshaped: Vec<(Arc<str>, Dims, Dims)>,
    /// The differences between the tensors and objects that this rank requested and those stored.
    pub report: LoadReport,
    /// The bytes and items of the reads.
    pub read: ReadReport,
}

/// Loads what each rank requests from the checkpoint in `storage`, in the ranks' present layout.
///
/// `request` is the state dict to load: tensors with memory are filled in place, others get new memory;
/// objects come by their unique key; factories merge; local objects are put back; plain values are
/// ignored. The result has all of the checkpoint's common state. In the folder of a run, rank 0
/// reads the tracker, and all ranks load its checkpoint.
///
/// # Errors
///
/// The same on all ranks, before any memory is touched: [`MegatronError::TrackedAbsent`],
/// [`MegatronError::Damaged`] and [`MegatronError::OtherCheckpoint`], in a group as a message;
/// [`MegatronError::Keys`] when the strict handling says so; then [`MegatronError::Integrity`]
/// when all requests together do not make whole tensors;
/// [`CheckpointError::Mismatch`](dcp_core::CheckpointError::Mismatch) when something is not stored
/// or
/// has another shape; when the checkpoint cannot be opened. Then those of [`Loader::load`], of [`merge`], and of factories.
pub async fn load(
    request: &ShardedStateDict,
    storage: &Arc<dyn Storage>,
    options: &MegatronLoadOptions,
) -> Result<Loaded, MegatronError> {
    let group = Group::new(options.group.clone(), 0)?;
    let agreed = agree(request, storage, options, &group).await;
    agreement::conclude(group, &agreed);
    let Agreed { mut own, keys, casts } = agreed?;

    let mut reader: Arc<dyn StorageReader> =
        Arc::new(Fitted::new(Arc::clone(&own.opened.reader), casts));
    if let Some(wrap) = &options.wrap {
        reader = wrap(reader);
    }
    let reshaped = own.request.reshaped(&own.stored);
    let cleared = own.request.views_of(&reshaped);
    let allowed = reshaped.iter().map(|(key, ..)| Arc::clone(key)).collect();
    let mut settings = Settings::new()
        .load_planner(Arc::new(Clip::new(allowed)))
        .load_mode(LoadMode::Strict)
        .flatten_rule(FlattenRule::TopLevel);
    if let Some(group) = &options.group {
        settings = settings.group(Arc::clone(group));
    }
    let loader = Loader::with_settings(settings);
    let summary = loader.load(&mut own.request.flat, &Cleared::new(reader, cleared)).await?;

    let group = Group::new(options.group.clone(), 0)?;
    let (casts, left_out) = (own.casts.clone(), std::mem::take(&mut own.wanted.left_out));
    let (which, warnings) = (own.opened.which, std::mem::take(&mut own.opened.warnings));
    let damage = std::mem::take(&mut own.opened.damage);
    let state = agreement::all(&group, Phase::Read, own.into_state()).await;
    agreement::conclude(group, &state);
    let state = state?;
    let returned = options.strict.returns_keys();
    Ok(Loaded {
        state,
        which,
        warnings,
        damage,
        missing: returned.then_some(keys.missing),
        unexpected: returned.then_some(keys.unexpected),
        left_out,
        casts,
        reshaped,
        report: summary.report,
        read: summary.read,
    })
}

/// The load that all ranks agreed on.
struct Agreed {
    own: Own,
    keys: KeyMismatch,
    casts: BTreeMap<Arc<str>, DType>,
}

/// The findings of one rank.
struct Own {
    opened: Opened,
    stored: Arc<CheckpointMetadata>,
    wanted: ToLoad,
    request: Request,
    /// Key, stored type, type requested.
    casts: Vec<(Arc<str>, DType, DType)>,
}

/// A rank's message to the coordinator, in front of its description.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    which: Option<Tracked>,
    /// The digest of the common state, where it has one: two iterations of a run hardly differ in
    /// anything else that is known before tensors are read.
    common: Option<[u8; 32]>,
    unexpected: Vec<Arc<str>>,
    /// Keys and the numbers of element types: of tensors that are cast or, where nothing else
    /// compares them between ranks, of all.
    casts: Vec<(Arc<str>, usize)>,
}

/// The findings of the coordinator.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Verdict {
    integrity: Option<IntegrityError>,
    missing: Vec<Arc<str>>,
    /// Of all ranks, where that is an error.
    unexpected: Vec<Arc<str>>,
    casts: Vec<(Arc<str>, usize)>,
}

async fn agree(
    request: &ShardedStateDict,
    storage: &Arc<dyn Storage>,
    options: &MegatronLoadOptions,
    group: &Group,
) -> Result<Agreed, MegatronError> {
    let MegatronLoadOptions { fall_back, verify_integrity, open, .. } = options;
    let rule = Rule { fall_back: *fall_back, verify_integrity: *verify_integrity, open };
    let choice = Choice::agree(storage, rule, group).await?;
    let strategies = options.strategies.as_ref().unwrap_or(&open.strategies);
    let opened = record_replay::open(strategies, &choice.place(storage)?, open, group).await?;
    let mine = own(request, opened, choice, options);
    let (offers, own) = agreement::offers(group, Phase::Plan, mine).await?;
    let found = offers.map(|offers| judge(&offers, &own.stored, options));
    let verdict = agreement::verdict(group, Phase::Plan, found).await?;
    own.opened.report(group.context().rank == 0);
    let mut keys = KeyMismatch {
        missing: verdict.missing.into_iter().collect(),
        unexpected: verdict.unexpected.into_iter().collect(),
    };
    if options.strict.raises() && !keys.is_empty() {
        return Err(keys.into());
    }
    keys.unexpected.clone_from(&own.wanted.unexpected);
    if options.strict.logs() && !keys.is_empty() {
        tracing::warn!("{keys}");
        if !own.wanted.left_out.is_empty() {
            tracing::warn!(keys = ?own.wanted.left_out, "stored, but left out with their factories");
        }
    }
    if let Some(error) = verdict.integrity {
        return Err(error.into());
    }
    let dtype = |code: usize| DType::ALL.get(code).copied();
    let casts = verdict.casts.into_iter().filter_map(|(key, code)| Some((key, dtype(code)?)));
    Ok(Agreed { own, keys, casts: casts.collect() })
}

fn own(
    request: &ShardedStateDict,
    opened: Result<Indexed, MegatronError>,
    choice: Choice,
    options: &MegatronLoadOptions,
) -> Result<(Bytes, Own), MegatronError> {
    let (mut opened, stored) = opened?;
    let mut wanted = to_load(request, None)?;
    opened.which = choice.which.or(opened.which);
    opened.warnings.extend(choice.warning);
    let described = !options.skip_validation || options.strict.asks_all_ranks();
    let description = match described {
        true => RankShards::of(sharded_leaves(&wanted.tree)).to_wire(),
        false => Bytes::new(),
    };
    let absent = |leaf: &ShardedLeaf<'_>| !is_stored(*leaf, &stored);
    if options.strict.compares() && sharded_leaves(&wanted.tree).iter().any(absent) {
        wanted = to_load(request, Some(&stored))?;
    }
    check_merge(&opened.common, &wanted.tree)?;
    let request = Request::new(&wanted.tree)?;
    let casts = match options.refuse_casts {
        true => Vec::new(),
        false => request.casts(&stored),
    };
    let code = |dtype: DType| DType::ALL.iter().position(|known| *known == dtype);
    let compared: Vec<_> = match options.skip_validation && !options.refuse_casts {
        true => request.dtypes().collect(),
        false => casts.iter().map(|(key, _, to)| (key, *to)).collect(),
    };
    let offer = Offer {
        which: opened.which,
        common: common_check::digest(&opened.common).ok(),
        unexpected: wanted.unexpected.iter().cloned().collect(),
        casts: { compared.into_iter() }
            .filter_map(|(key, to)| Some((Arc::clone(key), code(to)?)))
            .collect(),
    };
    let offer = serde_json::to_vec(&offer).map_err(|error| wire(&error))?;
    let message = [&(offer.len() as u64).to_le_bytes()[..], &offer, &description].concat();
    let own = Own { opened, stored, wanted, request, casts };
    Ok((message.into(), own))
}

/// Merges all ranks' requests on the coordinator.
fn judge(
    offers: &[Bytes],
    stored: &CheckpointMetadata,
    options: &MegatronLoadOptions,
) -> Result<Verdict, MegatronError> {
    let mut verdict = Verdict::default();
    let mut descriptions = Vec::with_capacity(offers.len());
    let mut casts: BTreeMap<Arc<str>, (dcp_core::Rank, usize)> = BTreeMap::new();
    let (mut unexpected, mut conflict) = (BTreeSet::new(), None);
    let mut opened = None;
    for (rank, offer) in (0_u32..).zip(offers) {
        let (offer, description) = split(offer).ok_or_else(|| wire(&"it ends too early"))?;
        let offer: Offer = serde_json::from_slice(offer).map_err(|error| wire(&error))?;
        let (which, common) = *opened.get_or_insert((offer.which, offer.common));
        if which != offer.which || common != offer.common {
            let name = |which: Option<Tracked>| match which {
                Some(which) => format!("that of {which}"),
                None => "one of no run".to_owned(),
            };
            let differs = match which == offer.which {
                true => "its common state is another".to_owned(),
                false => format!("{} instead of {}", name(offer.which), name(which)),
            };
            return Err(MegatronError::OtherCheckpoint { rank, differs });
        }
        unexpected.extend(offer.unexpected);
        for (key, code) in offer.casts {
            let (left_rank, first) = *casts.entry(Arc::clone(&key)).or_insert((rank, code));
            if first != code && conflict.is_none() {
                let name = |code: usize| DType::ALL.get(code).map_or("unknown", |d| d.name());
                conflict = Some(PlanError::Ranks(RanksProblem::Disagreement {
                    subject: PlanSubject::Entry(key.to_string()),
                    left: format!("requested as {}", name(first)),
                    left_rank,
                    right: format!("requested as {}", name(code)),
                    right_rank: rank,
                }));
            }
        }
        if !description.is_empty() {
            descriptions.push(RankShards::from_wire(description)?);
        }
    }
    if options.strict.raises() {
        verdict.unexpected = unexpected.into_iter().collect();
    }
    if options.strict.asks_all_ranks() {
        let wanted: BTreeSet<&str> =
            descriptions.iter().flat_map(RankShards::keys).map(|key| &**key).collect();
        let stored: BTreeSet<Arc<str>> = { stored.iter() }
            .map(|(fqn, _)| match ObjectKey::parse(fqn) {
                Some(object) => Arc::clone(object.key()),
                None => Arc::clone(fqn),
            })
            .filter(|key| &**key != COMMON_STATE && !wanted.contains(&**key))
            .collect();
        verdict.missing = stored.into_iter().collect();
    }
    // A misspelled key makes incomplete tensors too, so it is reported first.
    let differ = !verdict.unexpected.is_empty() || !verdict.missing.is_empty();
    if options.strict.raises() && differ {
        return Ok(verdict);
    }
    if !options.skip_validation {
        verdict.integrity = validate_sharding_integrity(&descriptions).err();
    }
    if let Some(conflict) = conflict.filter(|_| verdict.integrity.is_none()) {
        return Err(conflict.into());
    }
    let dtype = |key: &str| Some(stored.get(key)?.as_tensor()?.dtype);
    casts.retain(|key, (_, code)| {
        dtype(key).is_some_and(|dtype| DType::ALL.get(*code) != Some(&dtype))
    });
    verdict.casts = casts.into_iter().map(|(key, (_, code))| (key, code)).collect();
    Ok(verdict)
}

fn split(message: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = message.split_first_chunk::<8>()?;
    rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)
}

fn wire(problem: &dyn fmt::Display) -> PlanError {
    PlanError::message("the request of a rank", problem.to_string())
}

impl Own {
    /// The result, after the request's memory is filled.
    fn into_state(self) -> Result<Dict, MegatronError> {
        let Self { opened, wanted, request, .. } = self;
        let mut state = opened.common;
        merge(&mut state, request.into_values(&wanted.tree)?)?;
        apply_factory_merges(&mut state, &wanted.factories)?;
        Ok(state)
    }
}

impl Opened {
    /// Logs warnings, those of all ranks only once.
    fn report(&self, coordinates: bool) {
        for warning in self.warnings.iter().filter(|_| coordinates) {
            tracing::warn!(which = ?self.which, "{warning}");
        }
        for damage in &self.damage {
            tracing::warn!(which = ?self.which, "damaged checkpoint: {damage}");
        }
    }
}

impl fmt::Debug for MegatronLoadOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MegatronLoadOptions")
            .field("strict", &self.strict)
            .field("skip_validation", &self.skip_validation)
            .field("refuse_casts", &self.refuse_casts)
            .field("fall_back", &self.fall_back)
            .field("verify_integrity", &self.verify_integrity)
            .finish_non_exhaustive()
    }
}
