//! Reads checkpoints that ranks saved without collectives, each with its own metadata.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use dcp_core::format::{FormatRegistry, Listing};
use dcp_core::metadata::Entry;
use dcp_core::storage::StorageExt as _;
use dcp_core::{CheckpointError, CheckpointMetadata, FormatError, Key, Storage, StorageErrorKind};
use futures_util::stream;
use futures_util::{Stream, StreamExt as _, TryStreamExt as _};

use super::files::DcpFiles;
use super::format::DcpFormat;
use super::index::{decode, parallelism};
use super::merge::{Copies, Merged, Merger, Unlike};
use super::names::Named;
use super::replica_equality::Content;
use crate::folder_contents::files_in;
use crate::metadata::check_chunks;

/// The number of names in a warning.
const SHOWN: usize = 5;

/// A tensor or object that differs between the ranks that have it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Differing {
    /// Its name.
    pub fqn: Arc<str>,
    /// The ranks that have it, grouped by equal content, ascending. For a tensor of several chunks,
    /// the ranks of the first chunk that differs.
    pub groups: Arc<[Vec<u32>]>,
}

impl Differing {
    /// The ranks that have it, ascending.
    #[must_use]
    pub fn ranks(&self) -> Vec<u32> {
        let mut ranks = self.groups.concat();
        ranks.sort_unstable();
        ranks
    }
}

/// The merged checkpoint of all ranks.
pub(super) struct ByRank {
    pub(super) metadata: CheckpointMetadata,
    pub(super) differing: Vec<Differing>,
    pub(super) warnings: Vec<String>,
    /// A message about metadata that an earlier save of more ranks left, if the other ranks form a
    /// whole checkpoint only without it.
    pub(super) stale: Option<String>,
}

/// Merges the metadata of all ranks. Where they differ, the entry of `rank` wins, or else that of
/// the lowest rank.
///
/// Archives are compared by the checksums of all their records, everything else by its bytes.
pub(super) async fn load(
    storage: &Arc<dyn Storage>,
    tolerant: bool,
    rank: Option<u32>,
) -> Result<ByRank, CheckpointError> {
    let (mut files, absent) = list(storage).await?;
    let mut warnings = Vec::new();
    if let Some(absent) = absent {
        warnings
            .push(format!("the metadata of rank {absent} is missing: what only it had is lost"));
    }
    // The first one added wins.
    files.sort_by_key(|(of, _)| (Some(*of) != rank, *of));
    let mut merger = Merger::default();
    let mut parts = read(storage, &files);
    while let Some((of, key, part)) = parts.try_next().await? {
        merger.add(of, &part).map_err(|error| error.in_file(key.as_str(), 0))?;
    }
    drop(parts);
    let merged = merger.finish();
    let overlap = merged.metadata.iter().any(|(_, entry)| match entry {
        Entry::Tensor(tensor) => check_chunks(tensor).is_err(),
        _ => false,
    });
    let divided = merged.unlike.iter().any(|unlike| unlike.divided);
    let stale = match overlap || divided {
        true => stale(storage, &files).await?,
        false => None,
    };
    let chosen = |unlike: &Unlike| rank.is_some_and(|rank| unlike.others.contains(&rank));
    if let Some(unlike) = merged.unlike.iter().find(|unlike| !chosen(unlike)) {
        let mut problem = format!("{:?} {}", unlike.fqn, unlike.problem);
        if !tolerant {
            problem.extend(stale.iter().flat_map(|stale| ["; ", stale]));
            let file = format!("__{}.metadata", unlike.rank);
            return Err(FormatError::new("rank-local metadata", problem).in_file(&file, 0).into());
        }
        warnings.push(problem);
    }
    // While stale metadata remains, no choice of a rank is right.
    let differing = match stale {
        Some(_) => Vec::new(),
        None => differing(storage, &merged).await?,
    };
    if !differing.is_empty() {
        warnings.push(describe(&differing, rank));
    }
    warnings.extend(stale.clone());
    Ok(ByRank { metadata: merged.metadata, differing, warnings, stale })
}

/// The ranks' metadata files, ascending by rank, and the first rank that has none.
async fn list(
    storage: &Arc<dyn Storage>,
) -> Result<(Vec<(u32, Key)>, Option<u32>), CheckpointError> {
    let (mut ranks, mut found) = (Vec::new(), DcpFiles::default());
    let mut objects = storage.list_files(None);
    while let Some(meta) = objects.next().await {
        let meta = match meta {
            Err(error) if error.kind() == StorageErrorKind::Unsupported => {
                let message = "not a checkpoint: there is no .metadata".to_owned();
                return Err(CheckpointError::NotACheckpoint { message });
            }
            meta => meta?,
        };
        found.add(meta.key.as_str());
        if let Some(Named::RankMetadata { rank }) = Named::parse(meta.key.as_str()) {
            ranks.push((rank, meta.key));
        }
    }
    if ranks.is_empty() {
        let listing = Listing::read(&**storage, &[]).await?;
        let folder = listing.root();
        let formats = FormatRegistry::empty().with(Arc::new(DcpFormat));
        let message = format!("{}{}", formats.explain(&folder), files_in(&folder));
        return Err(CheckpointError::NotACheckpoint { message });
    }
    ranks.sort_unstable();
    Ok((ranks, found.rank_without_index()))
}

/// The entries that differ between ranks.
async fn differing(
    storage: &Arc<dyn Storage>,
    merged: &Merged,
) -> Result<Vec<Differing>, CheckpointError> {
    let compared = merged.copies.iter().map(|copies| compare(&**storage, &merged.metadata, copies));
    let compared: Vec<_> = compared.collect();
    let found = stream::iter(compared).buffered(parallelism(&**storage));
    let found: Vec<_> = found.try_collect().await?;
    let unlike = merged.unlike.iter().map(|unlike| Differing {
        fqn: Arc::clone(&unlike.fqn),
        groups: [unlike.others.clone(), vec![unlike.rank]].into(),
    });
    let mut known = HashSet::new();
    let differing = unlike.chain(found.into_iter().flatten());
    Ok(differing.filter(|one| known.insert(Arc::clone(&one.fqn))).collect())
}

type Part = (u32, Key, CheckpointMetadata);

/// Reads several metadata files concurrently, in the order of `files`.
fn read(
    storage: &Arc<dyn Storage>,
    files: &[(u32, Key)],
) -> impl Stream<Item = Result<Part, CheckpointError>> + Unpin + use<> {
    let reads: Vec<_> = files
        .iter()
        .map(|(rank, key)| {
            let (storage, rank, key) = (Arc::clone(storage), *rank, key.clone());
            Box::pin(async move {
                let bytes = storage.read_all(&key).await?;
                let metadata = decode(key.as_str(), &bytes)?.metadata;
                Ok::<_, CheckpointError>((rank, key, metadata))
            })
        })
        .collect();
    stream::iter(reads).buffered(parallelism(&**storage))
}

/// Compares the copies of one entry.
async fn compare(
    storage: &dyn Storage,
    metadata: &CheckpointMetadata,
    copies: &Copies,
) -> Result<Option<Differing>, CheckpointError> {
    let mut groups: Vec<Vec<u32>> = Vec::new();
    let mut known: HashMap<Content, usize> = HashMap::new();
    for (rank, placement) in &copies.places {
        // Missing files are reported elsewhere.
        let Some(content) = Content::read(storage, metadata, *placement).await? else { continue };
        let at = *known.entry(content).or_insert(groups.len());
        match groups.get_mut(at) {
            Some(group) => group.push(*rank),
            None => groups.push(vec![*rank]),
        }
    }
    groups.iter_mut().for_each(|group| group.sort_unstable());
    groups.sort();
    let differ = groups.len() > 1;
    Ok(differ.then(|| Differing { fqn: Arc::clone(&copies.fqn), groups: groups.into() }))
}

/// Detects metadata of an earlier save of more ranks, where chunks overlap: the lower ranks then
/// have all elements of every tensor.
async fn stale(
    storage: &Arc<dyn Storage>,
    files: &[(u32, Key)],
) -> Result<Option<String>, CheckpointError> {
    let mut files = files.to_vec();
    files.sort_unstable();
    let mut merger = Merger::default();
    let mut parts = read(storage, &files);
    let mut count = 0;
    while let Some((rank, _, part)) = parts.try_next().await? {
        if merger.add(rank, &part).is_err() {
            return Ok(None);
        }
        count += 1;
        if count < files.len() && merger.is_whole() {
            let left: Vec<_> = files.iter().skip(count).map(|(_, key)| key.to_string()).collect();
            let (are, them, ranks) = match left.len() {
                1 => ("is", "it", "this rank"),
                _ => ("are", "them", "these ranks"),
            };
            return Ok(Some(format!(
                "{} {are} left from an earlier save of more ranks: the ranks before have all of \
                 every tensor; remove {them}, and the data files of {ranks}, to read the checkpoint",
                named(&left)
            )));
        }
    }
    Ok(None)
}

/// Messages about entries that differ between ranks.
fn describe(differing: &[Differing], rank: Option<u32>) -> String {
    let whose = rank.map_or("the lowest rank has".to_owned(), |rank| format!("rank {rank} has"));
    let names: Vec<_> = differing.iter().map(|one| format!("{:?}", one.fqn)).collect();
    let outdated = outdated(differing).map_or_else(String::new, |from| {
        format!("; ranks below {from} agree, so the others may be left from an earlier save")
    });
    format!(
        "the ranks saved without collectives and differ in {}: what {whose} is used{outdated}",
        named(&names)
    )
}

/// The first rank that may stem from an earlier save: all lower ranks agree on everything, and none
/// of them has the content of the higher ones.
fn outdated(differing: &[Differing]) -> Option<u32> {
    let agreeing = |one: &Differing| one.groups.first()?.last()?.checked_add(1);
    let from = differing.iter().filter_map(agreeing).min().filter(|from| *from > 1)?;
    let fits = |one: &Differing| {
        let mut groups = one.groups.iter();
        let before = groups.next().is_some_and(|first| first.iter().all(|rank| *rank < from));
        before && groups.flatten().all(|rank| *rank >= from)
    };
    differing.iter().all(fits).then_some(from)
}

/// The first of several names, and the number of the others.
fn named(names: &[String]) -> String {
    let shown = names.iter().take(SHOWN).map(|name| &**name).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
