//! Rewriting a checkpoint as if another number of ranks had saved it.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::{
    CheckpointError, CheckpointMetadata, DataSource, Entry, GlobalPlan, Layout, ObjectEntry,
    Opaque, Placement, PlanKey, Region, RegionError, SavePlan, SavePlanner, SaveSession,
    StorageExt, StorageWriter, TensorEntry, TensorSpec, Value, WritePlan,
};
use dcp_planner::DefaultSavePlanner;
use futures_util::{StreamExt, TryStreamExt, stream};

use crate::check::refuse_unsound;
use crate::data::{CheckpointData, FirstRead, Part};
use crate::error::ConvertError;
use crate::job::JobOptions;
use crate::objects::{object_entries, read_objects};
use crate::source::Source;
use crate::tensor_read::TensorReader;
use crate::written::WriteReport;

/// Memory that writing one rank takes besides its segments, in bytes: what the format gathers
/// into a part, and the part on its way.
const RANK_OVERHEAD: u64 = 40 << 20;

/// Objects to hold as values at once.
const OBJECTS_AT_ONCE: usize = 256;
/// Encoded objects up to this many bytes are kept in memory until they are written.
const KEPT_BYTES: usize = 64 << 10;

/// The most ranks to write for; every rank is a file.
pub const MAX_RANKS: u32 = 1 << 16;

/// Writes the checkpoint anew as `ranks` ranks would have saved it: every tensor cut along its
/// first axis as FSDP2 cuts it (along its longest one where the first has fewer rows than there
/// are ranks), tensors with fewer elements than ranks whole, objects with their bytes as they
/// are. Nothing is held in memory as a whole. Chunks that are cut in too different a way to be
/// compared with their checksums on the way are read once more before the new checkpoint is
/// committed, so damage is never carried over.
///
/// # Errors
///
/// When the checkpoint is unsound or damaged, `ranks` is 0 or beyond [`MAX_RANKS`], or writing
/// fails; then what was there before is untouched.
pub async fn reshard(
    source: &Source,
    writer: &dyn StorageWriter,
    ranks: u32,
    options: &JobOptions,
) -> Result<WriteReport, ConvertError> {
    if !(1..=MAX_RANKS).contains(&ranks) {
        let problem = format!("is not a number of ranks between 1 and {MAX_RANKS}");
        return Err(ConvertError::unsupported(ranks.to_string(), problem));
    }
    let source = &source.for_job(options.parallelism);
    let metadata = source.metadata().await?;
    refuse_unsound(&metadata)?;
    let job = Job::prepare(source, writer, &metadata, options).await?;
    let (locals, data): (Vec<_>, Vec<_>) = (0..ranks)
        .map(|rank| job.rank(rank, ranks))
        .collect::<Result<Vec<_>, _>>()?
        .into_iter()
        .unzip();
    let mut global = DefaultSavePlanner::new().global_plan(&locals)?;
    let total = total_bytes(&global, &locals);
    let session = writer.begin().await?;
    let plans = writer.place(&session, &locals, &mut global).map_err(ConvertError::unwritable)?;
    if options.dry_run {
        return Ok(report(&global).with_files(planned_files(&global)).planned(&global.metadata));
    }
    options.start(total);
    let done = write(source, writer, session, &locals, &plans, data, &global, options).await;
    if let Err(error) = done {
        for plan in &plans {
            writer.abandon(plan).await;
        }
        return Err(error.into());
    }
    Ok(report(&global).with_files(done.unwrap_or_default()))
}

fn report(global: &GlobalPlan) -> WriteReport {
    let count = |is: fn(&Entry) -> bool| global.metadata.iter().filter(|(_, e)| is(e)).count();
    WriteReport {
        tensors: count(|entry| matches!(entry, Entry::Tensor(_))),
        objects: count(|entry| matches!(entry, Entry::Object(_))),
        chunks: global
            .metadata
            .iter()
            .filter_map(|(_, entry)| entry.as_tensor())
            .map(|tensor| tensor.chunks.len())
            .sum(),
        ..WriteReport::default()
    }
}

/// The files that a plan fills, and their bytes.
fn planned_files(global: &GlobalPlan) -> Vec<(String, u64)> {
    let mut lens = vec![0_u64; global.metadata.files().len()];
    let mut place = |placement: Placement| {
        if let Some(len) = lens.get_mut(placement.file.index()) {
            *len = (*len).max(placement.byte_offset.saturating_add(placement.byte_len));
        }
    };
    for (_, entry) in global.metadata.iter() {
        match entry {
            Entry::Tensor(tensor) => {
                tensor.chunks.iter().filter_map(|chunk| chunk.placement).for_each(&mut place);
            }
            Entry::Object(object) => object.placement.into_iter().for_each(&mut place),
            _ => {}
        }
    }
    let names = global.metadata.files().iter().map(ToString::to_string);
    let mut files: Vec<_> = names.zip(lens).collect();
    files.sort();
    files
}

#[allow(clippy::too_many_arguments, reason = "they are the state of one save")]
async fn write(
    source: &Source,
    writer: &dyn StorageWriter,
    session: SaveSession,
    locals: &[SavePlan],
    plans: &[WritePlan],
    data: Vec<Arc<dyn DataSource>>,
    global: &GlobalPlan,
    options: &JobOptions,
) -> Result<Vec<(String, u64)>, CheckpointError> {
    let at_once = usize::try_from(options.max_memory / RANK_OVERHEAD).unwrap_or(usize::MAX);
    let at_once = at_once.clamp(1, options.parallelism.max(1));
    let writes = locals
        .iter()
        .zip(plans)
        .zip(data)
        .map(|((local, plan), data)| writer.write(local, plan, data));
    let reports: Vec<_> = stream::iter(writes).buffered(at_once).try_collect().await?;
    let mut files: Vec<(String, u64)> = reports
        .iter()
        .flat_map(|report| report.files.iter().map(|(key, len)| (key.to_string(), *len)))
        .collect();
    files.sort();
    source.settle(options).await?;
    writer.commit(session, &global.metadata, reports).await?;
    Ok(files)
}

fn total_bytes(global: &GlobalPlan, locals: &[SavePlan]) -> u64 {
    let selected = global.selections.iter().zip(locals).flat_map(|(selected, local)| {
        selected.iter().filter_map(|one| local.item(one.item as usize)).map(|item| item.byte_len)
    });
    selected.fold(0, u64::saturating_add)
}

/// What all ranks' plans are made from.
struct Job<'a> {
    source: &'a Source,
    metadata: Arc<CheckpointMetadata>,
    readers: HashMap<usize, Arc<TensorReader>>,
    /// The objects by position: what they are made from, and their bytes.
    objects: HashMap<usize, (Part, u64)>,
    options: &'a JobOptions,
}

impl<'a> Job<'a> {
    async fn prepare(
        source: &'a Source,
        writer: &dyn StorageWriter,
        metadata: &Arc<CheckpointMetadata>,
        options: &'a JobOptions,
    ) -> Result<Self, ConvertError> {
        let mut readers = HashMap::new();
        for (index, (_, entry)) in metadata.iter().enumerate() {
            if let Entry::Tensor(_) = entry {
                let reader =
                    TensorReader::new(Arc::clone(&source.reader), Arc::clone(metadata), index)?;
                readers.insert(index, Arc::new(reader));
            }
        }
        let mut objects = HashMap::new();
        for batch in object_entries(metadata).chunks(OBJECTS_AT_ONCE) {
            for (index, value) in read_objects(source, metadata, batch).await {
                let Some((fqn, Entry::Object(object))) = metadata.at(index) else { continue };
                let part = object_part(source, writer, metadata, fqn, object, value?).await?;
                objects.insert(index, part);
            }
        }
        Ok(Self { source, metadata: Arc::clone(metadata), readers, objects, options })
    }

    /// What `rank` would offer to write, and where its bytes come from.
    fn rank(&self, rank: u32, ranks: u32) -> Result<(SavePlan, Arc<dyn DataSource>), ConvertError> {
        let mut plan = SavePlan::new();
        let mut parts = Vec::new();
        for (index, (fqn, entry)) in self.metadata.iter().enumerate() {
            let path = entry.path().cloned();
            match entry {
                Entry::Tensor(tensor) => {
                    let Some(reader) = self.readers.get(&index) else { continue };
                    let (sharded, region) = shard(tensor, rank, ranks)?;
                    let spec =
                        TensorSpec { dtype: tensor.dtype, shape: tensor.shape.clone(), sharded };
                    let fqn = Arc::clone(fqn);
                    let key = plan.push_key(PlanKey { fqn, path, tensor: Some(spec) });
                    plan.push_chunk(key, &region)?;
                    let reader = Arc::clone(reader);
                    let element_bytes = tensor.dtype.size() as u64;
                    parts.push(Part::Tensor { reader, region, element_bytes });
                }
                Entry::Object(_) => {
                    let Some((part, byte_len)) = self.objects.get(&index) else { continue };
                    let fqn = Arc::clone(fqn);
                    let key = plan.push_key(PlanKey { fqn, path, tensor: None });
                    plan.push_object(key, *byte_len)?;
                    parts.push(part.clone());
                }
                _ => {}
            }
        }
        Ok((plan, Arc::new(CheckpointData::new(self.source, parts, self.options))))
    }
}

/// The part of a tensor that `rank` gets, and whether ranks get different ones.
fn shard(tensor: &TensorEntry, rank: u32, ranks: u32) -> Result<(bool, Region), ConvertError> {
    let whole = full(tensor)?;
    let (rank, ranks) = (u64::from(rank), u64::from(ranks));
    if whole.volume() < ranks || ranks == 1 {
        return Ok((false, whole));
    }
    let longest = (0..whole.ndim()).max_by_key(|axis| (whole.end(*axis), whole.ndim() - axis));
    let axis = if whole.end(0) >= ranks { 0 } else { longest.unwrap_or(0) };
    let len = whole.end(axis);
    // As `torch.chunk` does: all chunks but the last ones are equally long.
    let each = len.div_ceil(ranks);
    let start = each.saturating_mul(rank).min(len);
    let (mut offsets, mut sizes) = (whole.offsets().clone(), whole.sizes().clone());
    offsets[axis] = start;
    sizes[axis] = each.min(len - start);
    Ok((true, Region::new(offsets, sizes).map_err(bad_region)?))
}

fn full(tensor: &TensorEntry) -> Result<Region, ConvertError> {
    Region::full(tensor.shape.clone()).map_err(bad_region)
}

fn bad_region(error: RegionError) -> ConvertError {
    ConvertError::unsupported("a shard", error.to_string())
}

/// What an object is made from: the stored bytes where they can be taken as they are, its value
/// encoded anew otherwise.
async fn object_part(
    source: &Source,
    writer: &dyn StorageWriter,
    metadata: &CheckpointMetadata,
    fqn: &str,
    object: &ObjectEntry,
    value: Value,
) -> Result<(Part, u64), ConvertError> {
    let archive = object.placement.filter(|placement| {
        metadata.encoding(placement).is_some_and(|encoding| {
            encoding.layout == Layout::TorchArchive && encoding.transforms.is_empty()
        })
    });
    let (Some(placement), Some(key)) = (archive, archive.and_then(|p| metadata.file(p.file)))
    else {
        let encoded = writer.encode_object(fqn, &value)?;
        let byte_len = encoded.len() as u64;
        return Ok((Part::Encoded(encoded), byte_len));
    };
    let range = placement.byte_offset..placement.byte_offset.saturating_add(placement.byte_len);
    let stored = source.storage.read_range(key, range).await?;
    let opaque = Value::Opaque(Arc::new(Opaque { encoded: stored.clone(), view: value }));
    let encoded = writer.encode_object(fqn, &opaque)?;
    let byte_len = encoded.len() as u64;
    // A large object stays where it is until its turn comes.
    let part = if encoded.len() > KEPT_BYTES && encoded == stored {
        let first = FirstRead::new(fqn, &encoded);
        Part::Stored { key: key.clone(), byte_offset: placement.byte_offset, first: Some(first) }
    } else {
        Part::Encoded(encoded)
    };
    Ok((part, byte_len))
}

#[cfg(test)]
mod tests {
    use dcp_core::DType;

    use super::*;

    fn shards(shape: &[u64], ranks: u32) -> Vec<(bool, String)> {
        let tensor = TensorEntry::new(DType::Float32, shape);
        (0..ranks)
            .map(|rank| shard(&tensor, rank, ranks).unwrap())
            .map(|(sharded, region)| (sharded, region.to_string()))
            .collect()
    }

    #[test]
    fn tensors_are_cut_as_fsdp2_cuts_them() {
        let cut = |shape: &[u64], ranks, expected: &[&str]| {
            let found = shards(shape, ranks);
            assert!(found.iter().all(|(sharded, _)| *sharded));
            let found: Vec<_> = found.iter().map(|(_, region)| region.as_str()).collect();
            assert_eq!(found, expected);
        };
        cut(&[5, 2], 2, &["[0:3, 0:2]", "[3:5, 0:2]"]);
        cut(&[5], 4, &["[0:2]", "[2:4]", "[4:5]", "[5:5]"]);
        cut(&[2, 6], 3, &["[0:2, 0:2]", "[0:2, 2:4]", "[0:2, 4:6]"]);
        cut(&[2, 2], 3, &["[0:1, 0:2]", "[1:2, 0:2]", "[2:2, 0:2]"]);
    }

    #[test]
    fn small_tensors_stay_whole() {
        assert_eq!(shards(&[], 2), vec![(false, "[]".to_owned()); 2]);
        assert_eq!(shards(&[0, 4], 2), vec![(false, "[0:0, 0:4]".to_owned()); 2]);
        assert_eq!(shards(&[3], 4), vec![(false, "[0:3]".to_owned()); 4]);
    }
}
