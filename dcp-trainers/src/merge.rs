//! Merges the values of all ranks to those of the whole checkpoint.
//!
//! The class of a value decides: shards are pieces of the whole tensor, by their regions; of equal regions the first rank's
//! is taken, and the others are compared with it. A plain value that all ranks have alike is one. Where plain values
//! differ, a buffer beside sharded parameters is rank 0's, as in the full state dicts of PyTorch, and a note
//! names it; any other value is that of its rank, under `rank_R`. Equality never decides that something is a copy,
//! because shards of ones are equal too.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use dcp_core::path::{PathItem, StatePath};
use dcp_core::{CheckpointError, Dims, Region, Value};
use dcp_jobs::JobError;
use dcp_jobs::read::read_objects;
use dcp_jobs::view::{AssembledBuilder, Piece};

use crate::copies::Copies;
use crate::leaves::{Files, Leaf, Named};
use crate::messages::bad;
use crate::names::State;

/// Facts that a merge finds.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// Copies that differ, by name in the merged checkpoint.
    pub(crate) differing: BTreeSet<String>,
    /// Values that are kept for each rank.
    pub(crate) by_rank: u64,
}

/// Values of objects by rank and entry.
type Objects = HashMap<(u32, usize), Value>;

/// A merge of the files of one kind into the view.
pub(crate) struct Merge<'m> {
    pub(crate) files: &'m Files,
    pub(crate) copies: &'m mut Copies,
    pub(crate) findings: &'m mut Findings,
}

/// The path of a value below the root of its kind; with a rank, below that.
pub(crate) fn below(root: &str, rank: Option<u32>, path: &[PathItem]) -> StatePath {
    let root = (!root.is_empty()).then(|| PathItem::Key(root.into()));
    let rank = rank.map(|rank| PathItem::Key(format!("rank_{rank}").into()));
    root.into_iter().chain(rank).chain(path.iter().cloned()).collect()
}

impl Merge<'_> {
    /// Adds everything but what `skip` names.
    pub(crate) async fn add(
        &mut self,
        view: &mut AssembledBuilder,
        skip: impl Fn(&Named) -> bool,
    ) -> Result<(), JobError> {
        let files = self.files;
        let objects = read_all(files, &skip).await?;
        let sharded = sharded_parts(files);
        for (fqn, named) in files.all.iter().filter(|(_, named)| !skip(named)) {
            self.value(view, fqn, named, &objects, &sharded).await?;
        }
        Ok(())
    }

    async fn value(
        &mut self,
        view: &mut AssembledBuilder,
        fqn: &str,
        named: &Named,
        objects: &Objects,
        sharded: &BTreeSet<Option<PathItem>>,
    ) -> Result<(), JobError> {
        let root = self.files.group.name.root();
        let path = below(&root, None, &named.path);
        let Some((first_rank, first)) = named.by_rank.first_key_value() else { return Ok(()) };
        let Some(first_file) = self.files.ranks.get(first_rank) else { return Ok(()) };
        match first {
            Leaf::Shards(..) => return self.shards(view, fqn, named, &path).await,
            Leaf::Tensor(_, _, entry) | Leaf::Object(entry) => {
                let is_everywhere = named.by_rank.len() == self.files.ranks.len();
                let is_alike = self.is_alike(fqn, named, objects).await?;
                let top = self.top(named);
                let is_buffer = matches!(first, Leaf::Tensor(..))
                    && (self.files.group.name.state == State::Model || sharded.contains(&top));
                if is_alike && is_everywhere || is_buffer {
                    let flat = PathItem::flat_name(&path);
                    if !is_alike {
                        self.findings.differing.insert(flat.clone());
                    }
                    return view.pass(flat, Some(path), first_file.part, *entry);
                }
            }
        }
        self.findings.by_rank += 1;
        for (rank, leaf) in &named.by_rank {
            let (Leaf::Tensor(_, _, entry) | Leaf::Object(entry)) = leaf else {
                return Err(self.differs(fqn, *rank, "is a shard in it, and not elsewhere").into());
            };
            let Some(file) = self.files.ranks.get(rank) else { continue };
            let path = below(&root, Some(*rank), &named.path);
            view.pass(PathItem::flat_name(&path), Some(path), file.part, *entry)?;
        }
        Ok(())
    }

    /// The first key of a value, where a file has all state in one dict.
    fn top(&self, named: &Named) -> Option<PathItem> {
        let is_whole = self.files.group.name.state == State::Whole;
        named.path.first().filter(|_| is_whole && named.path.len() > 1).cloned()
    }

    fn differs(&self, fqn: &str, rank: u32, how: &str) -> CheckpointError {
        bad(self.files.file(rank), format!("{fqn:?} {how}: the files are of different saves"))
    }

    /// Whether all ranks that have a plain value have the same.
    async fn is_alike(
        &mut self,
        fqn: &str,
        named: &Named,
        objects: &Objects,
    ) -> Result<bool, CheckpointError> {
        let Some((first_rank, first)) = named.by_rank.first_key_value() else { return Ok(true) };
        let Some(first_file) = self.files.ranks.get(first_rank) else { return Ok(true) };
        let mut is_alike = true;
        for (rank, leaf) in named.by_rank.iter().skip(1) {
            let Some(file) = self.files.ranks.get(rank) else { continue };
            is_alike &= match (first, leaf) {
                (Leaf::Tensor(dtype, shape, a), Leaf::Tensor(other, sizes, b)) => {
                    let same = (dtype, shape) == (other, sizes);
                    same && self.copies.equal((first_file, *a), (file, *b)).await?
                }
                (Leaf::Object(a), Leaf::Object(b)) => {
                    match (objects.get(&(*first_rank, *a)), objects.get(&(*rank, *b))) {
                        (Some(a), Some(b)) => a.same(b),
                        _ => false,
                    }
                }
                (_, Leaf::Shards(..)) => {
                    return Err(self.differs(fqn, *rank, "is a shard in it, and not elsewhere"));
                }
                _ => false,
            };
        }
        Ok(is_alike)
    }

    /// Adds a tensor of which ranks have parts.
    async fn shards(
        &mut self,
        view: &mut AssembledBuilder,
        fqn: &str,
        named: &Named,
        path: &StatePath,
    ) -> Result<(), JobError> {
        let (dtype, shape, pieces) = self.pieces(fqn, named).await?;
        let flat = PathItem::flat_name(path);
        view.tensor(flat, Some(Arc::clone(path)), dtype, shape, pieces)
    }

    /// The pieces of a tensor of which ranks have parts.
    pub(crate) async fn pieces(
        &mut self,
        fqn: &str,
        named: &Named,
    ) -> Result<(dcp_core::DType, Dims, Vec<Piece>), JobError> {
        let mut known: Option<(dcp_core::DType, Dims)> = None;
        let mut by_region: BTreeMap<(Dims, Dims), (u32, usize)> = BTreeMap::new();
        let mut pieces = Vec::new();
        let root = self.files.group.name.root();
        for (rank, leaf) in &named.by_rank {
            let Leaf::Shards(dtype, shape, locals) = leaf else {
                return Err(self.differs(fqn, *rank, "is no shard in it, but elsewhere").into());
            };
            let whole = known.get_or_insert_with(|| (*dtype, shape.clone()));
            if (whole.0, &whole.1) != (*dtype, shape) {
                let how = format!(
                    "is {dtype} of {shape} in it, and {} of {} elsewhere",
                    whole.0, whole.1
                );
                return Err(self.differs(fqn, *rank, &how).into());
            }
            let Some(file) = self.files.ranks.get(rank) else { continue };
            for local in locals.iter().filter(|local| !local.region.is_empty()) {
                let region = &local.region;
                let key = (region.offsets().clone(), region.sizes().clone());
                match by_region.get(&key) {
                    Some((first, entry)) => {
                        let Some(first) = self.files.ranks.get(first) else { continue };
                        if !self.copies.equal((first, *entry), (file, local.entry)).await? {
                            let path = below(&root, None, &named.path);
                            self.findings.differing.insert(PathItem::flat_name(&path));
                        }
                    }
                    None => {
                        by_region.insert(key, (*rank, local.entry));
                        let from =
                            Region::full(region.sizes().clone()).map_err(CheckpointError::from)?;
                        pieces.push(Piece::same(region.clone(), file.part, local.entry, from));
                    }
                }
            }
        }
        let (dtype, shape) =
            known.ok_or_else(|| bad(self.files.file(0), format!("{fqn:?} has no shards")))?;
        let found =
            pieces.iter().fold(0_u64, |sum, piece| sum.saturating_add(piece.region.volume()));
        let expected = shape.checked_volume().unwrap_or(u64::MAX);
        if found < expected {
            let problem = format!(
                "{fqn:?} has {found} of {expected} elements in the files of {} ranks: files are missing, \
                 or are of different saves",
                self.files.ranks.len()
            );
            return Err(bad(self.files.file(0), problem).into());
        }
        Ok((dtype, shape, pieces))
    }
}

/// The first keys under which there are shards, where a file has all state in one dict.
fn sharded_parts(files: &Files) -> BTreeSet<Option<PathItem>> {
    if files.group.name.state != State::Whole {
        return BTreeSet::new();
    }
    let is_sharded =
        |named: &&Named| named.by_rank.values().any(|leaf| matches!(leaf, Leaf::Shards(..)));
    files.all.values().filter(is_sharded).map(|named| named.path.first().cloned()).collect()
}

/// The values of all objects, of every rank.
async fn read_all(
    files: &Files,
    skip: &impl Fn(&Named) -> bool,
) -> Result<Objects, CheckpointError> {
    let mut values = Objects::new();
    for (rank, file) in &files.ranks {
        let entries =
            files.all.values().filter(|named| !skip(named)).filter_map(|named| {
                match named.by_rank.get(rank) {
                    Some(Leaf::Object(entry)) => Some(*entry),
                    _ => None,
                }
            });
        let entries: Vec<usize> = entries.collect();
        for (entry, value) in read_objects(&file.source, &file.metadata, &entries).await {
            values.insert((*rank, entry), value?);
        }
    }
    Ok(values)
}
