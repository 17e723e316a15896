//! Rewrites a checkpoint as another set of ranks would save it.

use dcp_core::planner::SavePlanner;
use dcp_core::storage::StorageExt;
use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::checkpoint::DataSource;
use dcp_core::metadata::{Entry, Layout, ObjectEntry, Placement, TensorEntry};
use dcp_core::plan::{GlobalPlan, PlanKey, SavePlan, TensorSpec};
use dcp_core::save_run::RankWrite;
use dcp_core::value::Opaque;
use dcp_core::{CheckpointError, CheckpointMetadata, FormatError, Key, StorageWriter, Value};
use dcp_formats::torch_object::{decode_object, encode_object};
use dcp_formats::torch_zip::check_archive;
use dcp_planner::DefaultSavePlanner;

use crate::error::{ForeignCallable, JobError};
use crate::integrity::callables;
use crate::integrity::check::refuse_unsound;
use crate::integrity::checked_source::CheckedSource;
use crate::options::JobOptions;
use crate::read::objects::{ObjectBatches, object_entries};
use crate::read::tensor_read::TensorReader;
use crate::source::Source;
use crate::view::with_quantizers;
use crate::write::division::{Division, FirstAxis, Owner, candidates};
use crate::write::on_ranks::share_of;
use crate::write::rank_writes::{NotWritten, begin, byte_lens, commit, write};
use crate::write::stored_data_source::{CheckpointData, FirstRead, Part};
use crate::write::wrapped_tensors::{refuse_rank_parts, refuse_unreadable};
use crate::write::written::ConversionReport;

/// Objects with more encoded bytes than this are encoded again when they are written.
const MADE_AGAIN: usize = 1 << 20;
/// Objects with up to this many encoded bytes stay in memory until they are written.
const KEPT_BYTES: usize = 64 << 10;

/// Chunks that are planned with any memory.
const CHUNKS_ALWAYS: u64 = 1 << 20;
/// Bytes of the memory of a job for each chunk that is planned beyond those. A chunk takes more than
/// these while it is planned: the index is not counted in that memory.
const PLANNED_PER_BYTE: u64 = 32;

/// The first bytes of a `torch.save` archive.
const ARCHIVE: &[u8] = b"PK\x03\x04";

/// The maximum number of ranks; each writes at least one file.
pub const MAX_RANKS: u32 = 1 << 16;

/// Rewrites the checkpoint as `ranks` ranks would save it. Every tensor is divided along its first
/// axis as FSDP2 does, or along its longest axis if the first is shorter than the number of ranks.
/// Tensors with fewer elements than ranks stay whole, and objects keep their bytes. Memory is
/// bounded, and so is the number of chunks, by [`JobOptions::max_memory`]. Chunks whose parts cannot be compared with their checksums on the way are read again
/// before the commit, so the new checkpoint never contains damaged data. The processes of a
/// [group](JobOptions::group) divide the new files among them, and rank 0 commits.
///
/// # Errors
///
/// As [`divide`]; [`JobError::TooLarge`] for more chunks than are planned in a bounded memory.
pub async fn reshard(
    source: &Source,
    writer: &dyn StorageWriter,
    ranks: u32,
    options: &JobOptions,
) -> Result<ConversionReport, JobError> {
    let division = FirstAxis { ranks };
    let chunks = division.chunk_count(&*source.metadata().await?)?;
    let limit = (options.max_memory / PLANNED_PER_BYTE).max(CHUNKS_ALWAYS);
    if chunks > limit {
        return Err(JobError::TooLarge {
            what: format!("a checkpoint of {chunks} chunks, as {ranks} ranks write it,"),
            limit: format!("{limit} chunks, which are planned with this `JobOptions::max_memory`"),
            instead: "write it for fewer ranks, or raise `JobOptions::max_memory`",
        });
    }
    divide(source, writer, &division, options).await
}

/// Rewrites the checkpoint as the ranks of `division` would save it. [`reshard`] is this with the
/// division of FSDP2.
///
/// # Errors
///
/// When the checkpoint is inconsistent or damaged, it has [parts of one rank](crate::write::refuse_rank_parts())
/// or tensors of subclasses that could not be read again, there are 0 ranks or more than [`MAX_RANKS`],
/// the division does not cover a tensor, or writing fails. The target is then unchanged.
pub async fn divide(
    source: &Source,
    writer: &dyn StorageWriter,
    division: &dyn Division,
    options: &JobOptions,
) -> Result<ConversionReport, JobError> {
    let ranks = division.ranks();
    if !(1..=MAX_RANKS).contains(&ranks) {
        let problem = format!("is not a number of ranks between 1 and {MAX_RANKS}");
        return Err(JobError::invalid_option(ranks.to_string(), problem));
    }
    let holds = |fqn: &str| division.object(fqn) != Owner::Nobody;
    let source = with_quantizers(CheckedSource::new(source, options), holds).await?;
    let metadata = source.metadata().await?;
    refuse_unsound(&metadata)?;
    refuse_rank_parts(&metadata)?;
    let job = Job::prepare(&source, writer, &metadata, division, options).await?;
    let (locals, data) = job.all_ranks(division)?;
    let mut global = DefaultSavePlanner::new().global_plan(&locals)?;
    let total = byte_lens(&global, &locals).into_iter().fold(0, u64::saturating_add);
    let listed = |planned: &mut CheckpointMetadata| list_as_tensors(&metadata, planned);
    let (save, plans) = begin(writer, &locals, &mut global, listed, options).await?;
    let callables = job.callables.clone();
    if options.dry_run {
        return Ok(report(&global, callables)
            .with_files(planned_files(&global))
            .planned(&global.metadata));
    }
    options.start(total);
    drop(job);
    let writes: Vec<_> =
        plans.into_iter().map(|plan| RankWrite::new(writer, Arc::new(plan))).collect();
    let own = share_of(options.group.as_ref(), &byte_lens(&global, &locals));
    let written = write(source, own.clone(), &locals, &writes, data, options).await;
    let (save, reports, verified) = match (written, save) {
        (Ok((reports, verified)), Some(save)) => (save, reports, verified),
        // Rank 0 commits.
        (Ok(_), None) => return Ok(report(&global, callables)),
        (Err(NotWritten { error, abandon }), save) => {
            // Rank 0 also removes what lost ranks wrote.
            let own = if save.is_some() { 0..writes.len() } else { own };
            if abandon {
                for rank in writes.into_iter().take(own.end).skip(own.start) {
                    rank.abandon().await;
                }
            }
            return Err(error.into());
        }
    };
    let mut files: Vec<(String, u64)> = reports
        .iter()
        .flat_map(|report| report.files.iter().map(|(key, len)| (key.to_string(), *len)))
        .collect();
    files.sort();
    commit(save, writes, &global.metadata, reports, verified).await?;
    Ok(report(&global, callables).with_files(files))
}

/// Lists objects that PyTorch treats as tensors as PyTorch does: as one chunk with the dtype and
/// shape that they report.
fn list_as_tensors(
    stored: &CheckpointMetadata,
    planned: &mut CheckpointMetadata,
) -> Result<(), JobError> {
    let wrapped = stored.iter().filter_map(|(fqn, entry)| {
        let tensor = entry.as_object()?.tensor.as_ref()?;
        let object = planned.get(fqn)?.as_object()?;
        Some((Arc::clone(fqn), tensor, object.placement, object.path.clone()))
    });
    let wrapped: Vec<_> = wrapped.collect();
    let named: Vec<_> =
        wrapped.iter().map(|(fqn, tensor, at, _)| (&**fqn, &***tensor, *at)).collect();
    refuse_unreadable(&named, planned)?;
    for (fqn, tensor, placement, path) in wrapped {
        let mut entry = TensorEntry::new(tensor.dtype, tensor.shape.clone());
        let offsets = vec![0; tensor.shape.ndim()];
        let pushed = entry.chunks.push(&offsets, &tensor.shape, placement);
        pushed.map_err(|error| FormatError::new("index", error.to_string()))?;
        entry.path = path;
        planned.insert(fqn, Entry::Tensor(entry));
    }
    Ok(())
}

fn report(global: &GlobalPlan, callables: Vec<ForeignCallable>) -> ConversionReport {
    let count = |is: fn(&Entry) -> bool| global.metadata.iter().filter(|(_, e)| is(e)).count();
    ConversionReport {
        tensors: count(|entry| matches!(entry, Entry::Tensor(_))),
        objects: count(|entry| matches!(entry, Entry::Object(_))),
        chunks: global
            .metadata
            .iter()
            .filter_map(|(_, entry)| entry.as_tensor())
            .map(|tensor| tensor.chunks.len())
            .sum(),
        callables,
        ..ConversionReport::default()
    }
}

/// The files of a plan, and their sizes in bytes.
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

/// The common input of all ranks' plans.
struct Job<'a> {
    source: &'a CheckedSource,
    metadata: Arc<CheckpointMetadata>,
    readers: HashMap<usize, Arc<TensorReader>>,
    /// The objects by position: their origin and length.
    objects: HashMap<usize, (Part, u64)>,
    /// The Python callables in the objects, all of them allowed.
    callables: Vec<ForeignCallable>,
    options: &'a JobOptions,
}

impl<'a> Job<'a> {
    async fn prepare(
        source: &'a CheckedSource,
        writer: &dyn StorageWriter,
        metadata: &Arc<CheckpointMetadata>,
        division: &dyn Division,
        options: &'a JobOptions,
    ) -> Result<Self, JobError> {
        let mut readers = HashMap::new();
        for (index, (_, entry)) in metadata.iter().enumerate() {
            if let Entry::Tensor(_) = entry {
                let reader =
                    TensorReader::new(Arc::clone(&source.reader), Arc::clone(metadata), index)?;
                readers.insert(index, Arc::new(reader));
            }
        }
        let mut wanted = object_entries(metadata);
        wanted.retain(|index| {
            metadata.at(*index).is_some_and(|(fqn, _)| division.object(fqn) != Owner::Nobody)
        });
        let (mut objects, mut foreign) = (HashMap::new(), Vec::new());
        let (mut written, limit) = (0_u64, written_max(source).await?);
        let mut batches = ObjectBatches::new(source, metadata, &wanted);
        while let Some(batch) = batches.next().await {
            for (index, value) in batch {
                let Some((fqn, Entry::Object(object))) = metadata.at(index) else { continue };
                let (value, stored) = with_stored(source, metadata, fqn, object, value?).await?;
                foreign.extend(callables::foreign_callables(fqn, &value)?);
                let (part, byte_len) = object_part(writer, fqn, &value, stored)?;
                written = written.saturating_add(byte_len);
                if written > limit {
                    return Err(shared_too_often(limit));
                }
                objects.insert(index, (made_again(part, metadata, index, &value), byte_len));
            }
        }
        let callables = callables::admit(foreign, options)?;
        let metadata = Arc::clone(metadata);
        Ok(Self { source, metadata, readers, objects, callables, options })
    }

    /// The plans of all ranks, and the sources of their bytes.
    fn all_ranks(&self, division: &dyn Division) -> Result<Offers, JobError> {
        let mut ranks: Vec<Rank> = (0..division.ranks()).map(|_| Rank::default()).collect();
        for (index, (fqn, entry)) in self.metadata.iter().enumerate() {
            let path = entry.path().filter(|_| division.is_nested()).cloned();
            let fqn = Arc::clone(fqn);
            match entry {
                Entry::Tensor(tensor) => {
                    let Some(reader) = self.readers.get(&index) else { continue };
                    let held = division.tensor(&fqn, tensor)?;
                    let sharded = held.sharded;
                    let spec =
                        TensorSpec { dtype: tensor.dtype, shape: tensor.shape.clone(), sharded };
                    let element_bytes = tensor.dtype.size() as u64;
                    let key = PlanKey { fqn, path, tensor: Some(spec) };
                    for (rank, region) in held.parts {
                        let Some(rank) = ranks.get_mut(rank as usize) else {
                            return Err(no_such_rank(&key.fqn, rank));
                        };
                        let at = rank.key(index, &key);
                        rank.plan.push_chunk(at, &region)?;
                        let reader = Arc::clone(reader);
                        rank.parts.push(Part::Tensor { reader, region, element_bytes });
                    }
                }
                Entry::Object(_) => {
                    let Some((part, byte_len)) = self.objects.get(&index) else { continue };
                    let holders = match division.object(&fqn) {
                        Owner::Nobody => continue,
                        Owner::Anybody => candidates(&fqn, division.ranks()).collect(),
                        Owner::Rank(rank) => vec![rank],
                    };
                    let key = PlanKey { fqn, path, tensor: None };
                    for rank in holders {
                        let Some(rank) = ranks.get_mut(rank as usize) else {
                            return Err(no_such_rank(&key.fqn, rank));
                        };
                        let at = rank.key(index, &key);
                        rank.plan.push_object(at, *byte_len)?;
                        rank.parts.push(part.clone());
                    }
                }
                _ => {}
            }
        }
        let data = |parts| -> Arc<dyn DataSource> {
            Arc::new(CheckpointData::hashed(self.source, parts, self.options))
        };
        Ok(ranks.into_iter().map(|rank| (rank.plan, data(rank.parts))).unzip())
    }
}

/// The plans of all ranks, and the sources of their bytes.
type Offers = (Vec<SavePlan>, Vec<Arc<dyn DataSource>>);

/// The plan of one rank, and the sources of its bytes.
#[derive(Default)]
struct Rank {
    plan: SavePlan,
    parts: Vec<Part>,
    /// The entry of the plan's last key.
    entry: Option<usize>,
}

impl Rank {
    /// The position of an entry's key. All items of an entry are consecutive.
    fn key(&mut self, entry: usize, key: &PlanKey) -> usize {
        if self.entry.replace(entry) == Some(entry) {
            return self.plan.keys().len().saturating_sub(1);
        }
        self.plan.push_key(key.clone())
    }
}

fn no_such_rank(fqn: &str, rank: u32) -> JobError {
    let problem =
        format!("is assigned to rank {rank}, which does not exist; the division of ranks is wrong");
    JobError::not_storable(fqn, problem)
}

/// An object, with the placement and bytes of its archive if the archive can be copied.
async fn with_stored(
    source: &Source,
    metadata: &CheckpointMetadata,
    fqn: &str,
    object: &ObjectEntry,
    value: Value,
) -> Result<(Value, Option<(Key, u64)>), JobError> {
    let archive = object.placement.filter(|placement| {
        metadata.encoding(placement).is_some_and(|encoding| {
            encoding.layout == Layout::TorchArchive && encoding.transforms.is_empty()
        })
    });
    let (Some(placement), Some(key)) = (archive, archive.and_then(|p| metadata.file(p.file)))
    else {
        return Ok((value, None));
    };
    let range = placement.byte_offset..placement.byte_offset.saturating_add(placement.byte_len);
    let encoded = source.storage.read_range(key, range).await?;
    check_archive(&encoded)
        .map_err(|error| error.of_item(fqn).in_file(key.as_str(), placement.byte_offset))?;
    let opaque = Value::Opaque(Arc::new(Opaque { encoded, view: value }));
    Ok((opaque, Some((key.clone(), placement.byte_offset))))
}

/// The maximum total size of a source's objects when each is written separately. For a file in
/// which they may share memory, it is proportional to the size of the file.
async fn written_max(source: &Source) -> Result<u64, CheckpointError> {
    const PER_BYTE: u64 = 16;
    let Some(file) = source.single_pickle() else { return Ok(u64::MAX) };
    let len = source.storage.stat(file).await?.byte_len;
    Ok(len.saturating_mul(PER_BYTE).saturating_add(256 << 20))
}

fn shared_too_often(limit: u64) -> JobError {
    let problem = format!(
        "share memory in the file, and have more than {limit} bytes when each is written by \
         itself; `Keys::exclude` leaves some out, and a file of torch.save can share them, too"
    );
    JobError::no_form("the objects of the checkpoint", problem)
}

/// Turns an object that is too large to keep into one that is read and encoded again when it is
/// written, if that yields the same bytes.
fn made_again(part: Part, metadata: &Arc<CheckpointMetadata>, entry: usize, value: &Value) -> Part {
    let Part::Encoded(encoded) = &part else { return part };
    let again = encoded.len() > MADE_AGAIN && encode_object(value).is_ok_and(|b| b == *encoded);
    let Some((fqn, _)) = metadata.at(entry).filter(|_| again) else { return part };
    let first = FirstRead::new(fqn, encoded);
    Part::Object { metadata: Arc::clone(metadata), entry, first }
}

/// The origin of an object's bytes: its stored archive if the writer accepts it, its value encoded
/// again otherwise.
fn object_part(
    writer: &dyn StorageWriter,
    fqn: &str,
    value: &Value,
    stored: Option<(Key, u64)>,
) -> Result<(Part, u64), JobError> {
    let encoded = writer.encode_object(fqn, value)?;
    // An object that is encoded again may come from an unchecked file, and the target must pass
    // every check.
    if stored.is_none() && encoded.starts_with(ARCHIVE) {
        let checked = check_archive(&encoded).and_then(|()| decode_object(&encoded).map(drop));
        checked.map_err(|error| {
            let problem = format!("{fqn:?} is damaged: {}", error.problem());
            CheckpointError::from(FormatError::new(error.what(), problem).with_source(error))
        })?;
    }
    let byte_len = encoded.len() as u64;
    // A large object stays in its file until it is written.
    let part = match (value, stored) {
        (Value::Opaque(opaque), Some((key, byte_offset)))
            if encoded.len() > KEPT_BYTES && encoded == opaque.encoded =>
        {
            let first = FirstRead::new(fqn, &encoded);
            Part::Stored { key, byte_offset, first: Some(first) }
        }
        _ => Part::Encoded(encoded),
    };
    Ok((part, byte_len))
}
