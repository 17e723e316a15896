//! The contents of the files of ranks, by name.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use dcp_core::format::OpenedCheckpoint;
use dcp_core::metadata::Entry;
use dcp_core::path::StatePath;
use dcp_core::{
    CheckpointError, CheckpointMetadata, DType, Dims, Key, Region, Storage, StorageError,
    StorageReader as _,
};
use dcp_formats::torch_save::{DistributedTensor, MeshPlacement, RankDivision, TorchSaveReader};
use dcp_jobs::Source;
use indexmap::IndexMap;

use crate::folder::Group;
use crate::messages::bad;
use crate::names::RankName;
use crate::placement::{region_of, shard_number};

/// The file of one rank.
pub(crate) struct RankFile {
    pub(crate) rank: u32,
    pub(crate) file: String,
    /// Its position among the parts of the merged checkpoint.
    pub(crate) part: usize,
    pub(crate) reader: Arc<TorchSaveReader>,
    pub(crate) source: Source,
    pub(crate) metadata: Arc<CheckpointMetadata>,
}

/// The part of a tensor that a rank has, and where the file has it.
#[derive(Clone, Debug)]
pub(crate) struct Local {
    pub(crate) region: Region,
    pub(crate) entry: usize,
}

/// A value in the file of a rank.
#[derive(Clone, Debug)]
pub(crate) enum Leaf {
    /// A part of a tensor of several ranks.
    Shards(DType, Dims, Vec<Local>),
    /// A whole tensor.
    Tensor(DType, Dims, usize),
    Object(usize),
}

/// A value by rank.
pub(crate) struct Named {
    pub(crate) path: StatePath,
    pub(crate) by_rank: BTreeMap<u32, Leaf>,
}

/// The shard of a rank: the number among those that differ, and whether it is the first of equal ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShardPlace {
    pub(crate) number: u64,
    pub(crate) is_first: bool,
}

/// The files of one kind.
pub(crate) struct Files {
    pub(crate) group: Group,
    pub(crate) ranks: BTreeMap<u32, RankFile>,
    pub(crate) all: IndexMap<Arc<str>, Named>,
    /// The place of each rank that has a shard of a tensor.
    pub(crate) places: BTreeMap<u32, ShardPlace>,
}

impl Files {
    /// Opens the files of a group, of `world` ranks. No tensor is read.
    pub(crate) async fn open(
        storage: &Arc<dyn Storage>,
        group: &Group,
        world: u32,
        first_part: usize,
    ) -> Result<Self, CheckpointError> {
        let (mut ranks, mut all) = (BTreeMap::new(), IndexMap::new());
        let mut places = BTreeMap::new();
        for (part, (rank, file)) in (first_part..).zip(&group.files) {
            let key = Key::new(file.clone()).map_err(StorageError::from)?;
            let reader = Arc::new(TorchSaveReader::of_rank(Arc::clone(storage), key));
            let metadata = reader.metadata().await?;
            refuse_renamed(file, reader.saved_as().await?.as_deref())?;
            let opened = OpenedCheckpoint::new(Arc::clone(storage), Arc::clone(&reader) as _);
            let source = Source::from(opened.with_audit(Arc::clone(&reader) as _));
            let file = file.clone();
            let opened = RankFile { rank: *rank, file, part, reader, source, metadata };
            opened.collect(world, &mut all, &mut places).await?;
            ranks.insert(*rank, opened);
        }
        Ok(Self { group: group.clone(), ranks, all, places })
    }

    pub(crate) fn file(&self, rank: u32) -> &str {
        self.ranks.get(&rank).map_or("", |file| &file.file)
    }
}

/// Refuses a file that PyTorch saved under the name of another rank or kind: each file looks like all others, and
/// pieces of a flat parameter have no other mark of their rank. Any other name in it says nothing.
fn refuse_renamed(file: &str, saved_as: Option<&str>) -> Result<(), CheckpointError> {
    let Some(saved_as) = saved_as else { return Ok(()) };
    let Some((stem, ending)) = file.rsplit_once('.') else { return Ok(()) };
    let was = format!("{saved_as}.{ending}");
    if stem == saved_as || !matches!(RankName::parse(&was), Some(Ok(_))) {
        return Ok(());
    }
    let problem =
        format!("it was saved as {was:?}, and renamed or copied: give each file its own name");
    Err(bad(file, problem))
}

impl RankFile {
    async fn collect(
        &self,
        world: u32,
        all: &mut IndexMap<Arc<str>, Named>,
        places: &mut BTreeMap<u32, ShardPlace>,
    ) -> Result<(), CheckpointError> {
        let distributed = self.reader.distributed().await?;
        let mut of_entry = HashMap::new();
        let mut further = HashSet::new();
        for (number, tensor) in distributed.iter().enumerate() {
            if let Some((first, rest)) = tensor.locals.split_first() {
                of_entry.insert(*first, number);
                further.extend(rest.iter().copied());
            }
            if let Some(place) = self.place(tensor, world)? {
                places.entry(self.rank).or_insert(place);
            }
        }
        for (entry, (fqn, stored)) in self.metadata.iter().enumerate() {
            if further.contains(&entry) {
                continue;
            }
            let Some(path) = stored.path() else { continue };
            let leaf = match (of_entry.get(&entry), stored) {
                (Some(number), _) => match distributed.get(*number) {
                    Some(tensor) => self.shards(tensor)?,
                    None => continue,
                },
                (None, Entry::Tensor(tensor)) => {
                    Leaf::Tensor(tensor.dtype, tensor.shape.clone(), entry)
                }
                _ => Leaf::Object(entry),
            };
            self.add(all, fqn, path, leaf);
        }
        // A rank may have no shard of a tensor.
        for tensor in distributed.iter().filter(|tensor| tensor.locals.is_empty()) {
            self.add(all, &tensor.fqn, &tensor.path, self.shards(tensor)?);
        }
        Ok(())
    }

    fn add(
        &self,
        all: &mut IndexMap<Arc<str>, Named>,
        fqn: &Arc<str>,
        path: &StatePath,
        leaf: Leaf,
    ) {
        let named = all.entry(Arc::clone(fqn));
        let named =
            named.or_insert_with(|| Named { path: Arc::clone(path), by_rank: BTreeMap::new() });
        named.by_rank.insert(self.rank, leaf);
    }

    fn of(&self, tensor: &DistributedTensor, problem: &str) -> CheckpointError {
        bad(&self.file, format!("{:?}: {problem}", &*tensor.fqn))
    }

    /// The place of this rank's shard, after a check that the file is that of the rank in its name.
    fn place(
        &self,
        tensor: &DistributedTensor,
        world: u32,
    ) -> Result<Option<ShardPlace>, CheckpointError> {
        let (rank, ranks, place) = match &tensor.division {
            RankDivision::Mesh { mesh, placements, .. } => {
                let is_cut = placements.iter().any(|one| *one != MeshPlacement::Replicate);
                let (number, is_first) = shard_number(mesh, placements);
                (mesh.rank, mesh.world, is_cut.then_some(ShardPlace { number, is_first }))
            }
            RankDivision::Shards { rank, world, .. } => {
                (Some(*rank), *world, Some(ShardPlace { number: *rank, is_first: true }))
            }
            _ => return Ok(None),
        };
        if ranks > u64::from(world) {
            let problem = format!(
                "it is of a save of {ranks} ranks, and there are files of {world}: copy the others here"
            );
            return Err(self.of(tensor, &problem));
        }
        match rank.filter(|rank| *rank != u64::from(self.rank)) {
            Some(rank) => {
                let problem = format!(
                    "rank {rank} wrote this file, which has the name of rank {}: it was renamed, or \
                     copied over another",
                    self.rank
                );
                Err(self.of(tensor, &problem))
            }
            None => Ok(place),
        }
    }

    /// The shards of this rank, by their regions in the whole tensor.
    fn shards(&self, tensor: &DistributedTensor) -> Result<Leaf, CheckpointError> {
        let regions = match &tensor.division {
            RankDivision::Mesh { mesh, placements, order } => {
                let region = region_of(&tensor.shape, mesh, placements, order.as_deref());
                vec![region.map_err(|problem| self.of(tensor, &problem))?]
            }
            RankDivision::Shards { own, .. } => own.clone(),
            _ => return Err(self.of(tensor, "it is divided in an unknown way")),
        };
        let mut locals = Vec::with_capacity(regions.len());
        for (region, entry) in regions.into_iter().zip(&tensor.locals) {
            let stored = self.metadata.at(*entry).and_then(|(_, entry)| entry.as_tensor());
            let fits = stored.filter(|local| local.shape == *region.sizes());
            if fits.is_none_or(|local| local.dtype != tensor.dtype) {
                let problem = format!(
                    "its local tensor is not {} of {}, as its placements say",
                    tensor.dtype,
                    region.sizes()
                );
                return Err(self.of(tensor, &problem));
            }
            locals.push(Local { region, entry: *entry });
        }
        Ok(Leaf::Shards(tensor.dtype, tensor.shape.clone(), locals))
    }
}
