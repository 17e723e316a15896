//! A save that PyTorch's planner has planned: the native half of `distcp.torch.Writer`.
//!
//! PyTorch's protocol has other steps than the engine's. Its coordinator merges plans before any rank has encoded its
//! objects, so the lengths of files are unknown then, and places are not part of the plan. So each rank gives its own
//! items their places, in files with its rank in their names, and returns them with its results. The coordinator
//! begins (`PlannedSave`), which claims the place and finds the generation of the names, and at the end commits the
//! index of all results as any save of dcp.
//!
//! PyTorch reports no failure of another rank to a writer. So a save that failed leaves the files of ranks that had
//! written, without an index that names them; the next save into the place removes them.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use dcp::core::checkpoint::{DataSource, SaveSession, WriteReport};
use dcp::core::error::PlanError;
use dcp::core::metadata::{Encoding, Entry, ObjectEntry, Placement, TensorEntry};
use dcp::core::path::{PathItem, StatePath};
use dcp::core::plan::{GlobalPlan, PlanKey, SavePlan, SelectedItem, TensorSpec};
use dcp::core::registry::Access;
use dcp::core::storage::OwnThreads;
use dcp::core::{CheckpointMetadata, Dims, Key, Payload, StorageError, StorageWriter, TensorView};
use dcp::formats::dcp::{DcpWriter, FileLayout};
use dcp::{CheckpointError, DType, Region};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::call;
use crate::failure::Failure;
use crate::state::{Part, view};
use crate::storages::storages;

/// A place in a file: its name, offset and length.
type Place = (String, u64, u64);

/// The files that a rank wrote, with their lengths, and the checksums of their items by offset.
type Report = (Vec<(String, u64)>, Vec<(String, Vec<(u64, u32)>)>);

/// An item to write: its name, and the encoded object or a chunk of a tensor.
type Item<'py> = (String, Option<Bound<'py, PyBytes>>, Option<Chunk>);

/// The chunk of a tensor: dtype, shape of the whole, offsets, sizes, elements.
type Chunk = (String, Vec<u64>, Vec<u64>, Vec<u64>, Part);

/// A stored entry: its name, its path in the state dict, the place of an object or dtype, shape and chunks.
type StoredEntry =
    (String, Option<Vec<Step>>, Option<Place>, Option<(String, Vec<u64>, Vec<StoredChunk>)>);

type StoredChunk = (Vec<u64>, Vec<u64>, Place);

/// A step of a path.
#[derive(FromPyObject)]
enum Step {
    Index(u64),
    Key(String),
}

/// A save that has begun, on the coordinator.
#[pyclass(module = "distcp._native", frozen)]
pub(crate) struct PlannedSave {
    writer: Arc<DcpWriter>,
    session: Mutex<Option<SaveSession>>,
    generation: u64,
}

async fn writer(
    url: &str,
    files: Option<usize>,
    overwrite: bool,
) -> Result<DcpWriter, CheckpointError> {
    let storage = storages().open(url, Access::Write).await?;
    let layout =
        files.and_then(NonZeroUsize::new).map_or_else(FileLayout::default, FileLayout::SplitBySize);
    Ok(DcpWriter::builder(storage).files(layout).overwrite(overwrite).build())
}

#[pymethods]
impl PlannedSave {
    /// Claims `url` and chooses names that touch nothing that is there.
    #[staticmethod]
    #[pyo3(signature = (url, *, overwrite=true))]
    fn begin(py: Python<'_>, url: &str, overwrite: bool) -> Result<Self, Failure> {
        call::run(py, || async {
            let writer = writer(url, None, overwrite).await?;
            let session = writer.begin().await?;
            let generation = session.generation;
            Ok::<_, CheckpointError>(Self {
                writer: Arc::new(writer),
                session: Mutex::new(Some(session)),
                generation,
            })
        })
    }

    /// The number in the names of files.
    #[getter]
    fn generation(&self) -> u64 {
        self.generation
    }

    /// Writes the items of one rank. Returns the place of each, in their order, and the report for `commit`.
    #[staticmethod]
    #[pyo3(signature = (url, generation, rank, items, *, files=None))]
    fn write(
        py: Python<'_>,
        url: &str,
        generation: u64,
        rank: usize,
        items: Vec<Item<'_>>,
        files: Option<usize>,
    ) -> Result<(Vec<Place>, Report), Failure> {
        let (local, data, mut global) = described(items, rank)?;
        call::run(py, || async {
            let writer = writer(url, files, true).await?;
            let session = SaveSession::new(generation, Vec::new());
            let mut locals = vec![SavePlan::new(); rank];
            locals.push(local.clone());
            let mut plans = writer.place(&session, &locals, &mut global)?;
            let plan = plans.pop().unwrap_or_default();
            let mut places = vec![Place::default(); local.len()];
            for order in &plan.orders {
                let Placement { file, byte_offset, byte_len, .. } = order.placement;
                let name = plan.files.get(file.index()).map(Key::to_string).unwrap_or_default();
                if let Some(place) = places.get_mut(order.item as usize) {
                    *place = (name, byte_offset, byte_len);
                }
            }
            match writer.write(&local, &plan, Arc::new(data)).await {
                Ok(report) => Ok((places, report_of(&report))),
                Err(error) => {
                    writer.abandon(&plan).await;
                    Err(error)
                }
            }
        })
    }

    /// Publishes the checkpoint of all entries, when every file of the reports is there and whole.
    fn commit(
        &self,
        py: Python<'_>,
        entries: Vec<StoredEntry>,
        reports: Vec<Report>,
    ) -> Result<(), Failure> {
        let metadata = index_of(entries)?;
        let reports = reports.into_iter().map(report_from).collect::<Result<Vec<_>, _>>()?;
        let session = self.session.lock().unwrap_or_else(PoisonError::into_inner).take();
        let session =
            session.ok_or_else(|| Failure::Argument("the save has ended before".to_owned()))?;
        call::run(py, || async { self.writer.commit(session, &metadata, reports).await })
    }

    /// Ends the save without a checkpoint, and frees the place for others.
    fn abandon(&self) {
        self.session.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// The plan of a rank's items, their data, and a global plan that selects all of them.
fn described(
    items: Vec<Item<'_>>,
    rank: usize,
) -> Result<(SavePlan, ItemData, GlobalPlan), Failure> {
    let mut local = SavePlan::new();
    let mut keys: HashMap<String, (usize, usize)> = HashMap::new();
    let (mut data, mut selected) =
        (Vec::with_capacity(items.len()), Vec::with_capacity(items.len()));
    let mut metadata = CheckpointMetadata::new();
    for (fqn, object, chunk) in items {
        let failed = |error: PlanError| Failure::Checkpoint(error.into());
        let item = u32::try_from(data.len())
            .map_err(|_| Failure::Argument("too many items".to_owned()))?;
        let (entry, at) = if let Some((dtype, shape, offsets, sizes, part)) = chunk {
            let dtype: DType = dtype
                .parse()
                .map_err(|error| Failure::Argument(format!("{fqn:?} has an {error}")))?;
            let (key, entry) = *keys.entry(fqn.clone()).or_insert_with(|| {
                let spec = TensorSpec { dtype, shape: Dims::from(shape.clone()), sharded: true };
                let key = PlanKey { fqn: fqn.as_str().into(), path: None, tensor: Some(spec) };
                let entry = Entry::Tensor(TensorEntry::new(dtype, shape));
                (local.push_key(key), metadata.insert(fqn.as_str(), entry))
            });
            let of_tensor = |error: dcp::core::error::TensorError| {
                Failure::Checkpoint(error.with_fqn(&fqn).into())
            };
            let region = Region::new(offsets.clone(), sizes.clone());
            let region = region.map_err(|error| of_tensor(error.into()))?;
            local.push_chunk(key, &region).map_err(failed)?;
            data.push(Data::Elements(view(dtype, &sizes, part).map_err(of_tensor)?));
            let at = match metadata.at_mut(entry) {
                Some((_, Entry::Tensor(tensor))) => tensor.chunks.push(&offsets, &sizes, None),
                _ => return Err(Failure::Argument(format!("{fqn:?} is a tensor and an object"))),
            };
            (entry, at.map_err(|error| of_tensor(error.into()))?)
        } else if let Some(object) = object {
            let bytes = Bytes::copy_from_slice(object.as_bytes());
            let key =
                local.push_key(PlanKey { fqn: fqn.as_str().into(), path: None, tensor: None });
            local.push_object(key, bytes.len() as u64).map_err(failed)?;
            data.push(Data::Object(bytes));
            (metadata.insert(fqn.as_str(), Entry::Object(ObjectEntry::new(None))), 0)
        } else {
            return Err(Failure::Argument(format!("{fqn:?} has neither an object nor elements")));
        };
        let number =
            |n: usize| u32::try_from(n).map_err(|_| Failure::Argument("too many items".to_owned()));
        selected.push(SelectedItem { item, entry: number(entry)?, chunk: number(at)? });
    }
    let mut selections = vec![Vec::new(); rank];
    selections.push(selected);
    let global = GlobalPlan { metadata, selections, ..GlobalPlan::default() };
    Ok((local, ItemData(data), global))
}

/// The data of items, in memory.
#[derive(Debug)]
struct ItemData(Vec<Data>);

#[derive(Debug)]
enum Data {
    Elements(TensorView),
    Object(Bytes),
}

#[async_trait]
impl DataSource for ItemData {
    async fn resolve(
        &self,
        item: usize,
        byte_range: Range<u64>,
    ) -> Result<Payload, CheckpointError> {
        let whole = match self.0.get(item) {
            Some(Data::Object(bytes)) => Payload::from(bytes.clone()),
            Some(Data::Elements(view)) => view.payload().map_err(|source| {
                CheckpointError::Memory { fqn: format!("item {item}"), source }
            })?,
            None => return Err(PlanError::no_item(item as u64, self.0.len() as u64).into()),
        };
        let is_whole = byte_range.start == 0 && byte_range.end == whole.len();
        Ok(if is_whole { whole } else { whole.slice(byte_range) })
    }

    fn segment_bytes(&self) -> u64 {
        u64::MAX
    }

    fn own_threads(&self) -> Option<Arc<dyn OwnThreads>> {
        None
    }
}

fn report_of(report: &WriteReport) -> Report {
    let files = report.files.iter().map(|(key, byte_len)| (key.to_string(), *byte_len)).collect();
    let checksums =
        report.checksums.iter().map(|(key, of)| (key.to_string(), of.clone())).collect();
    (files, checksums)
}

fn report_from((files, checksums): Report) -> Result<WriteReport, Failure> {
    let files = files.into_iter().map(|(name, byte_len)| Ok((key_of(&name)?, byte_len)));
    let files = files.collect::<Result<Vec<_>, Failure>>()?;
    let checksums = checksums.into_iter().map(|(name, of)| Ok((key_of(&name)?, of)));
    let checksums = checksums.collect::<Result<BTreeMap<_, _>, Failure>>()?;
    Ok(WriteReport::new(files).with_checksums(checksums))
}

fn key_of(name: &str) -> Result<Key, Failure> {
    Key::new(name).map_err(|error| Failure::Checkpoint(StorageError::from(error).into()))
}

/// The index of stored entries.
fn index_of(entries: Vec<StoredEntry>) -> Result<CheckpointMetadata, Failure> {
    let mut metadata = CheckpointMetadata::new();
    for (fqn, path, object, tensor) in entries {
        let path = path.map(|steps| -> StatePath {
            let steps = steps.into_iter().map(|step| match step {
                Step::Key(key) => PathItem::Key(key.into()),
                Step::Index(index) => PathItem::Index(index),
            });
            steps.collect()
        });
        let entry = match (object, tensor) {
            (Some(place), None) => {
                let mut entry = ObjectEntry::new(Some(placed(&mut metadata, place)?));
                entry.path = path;
                Entry::Object(entry)
            }
            (None, Some((dtype, shape, chunks))) => {
                let dtype: DType = dtype
                    .parse()
                    .map_err(|error| Failure::Argument(format!("{fqn:?} has an {error}")))?;
                let mut entry = TensorEntry::new(dtype, shape);
                for (offsets, sizes, place) in chunks {
                    let place = placed(&mut metadata, place)?;
                    let pushed = entry.chunks.push(&offsets, &sizes, Some(place));
                    pushed.map_err(|error| Failure::Checkpoint(error.into()))?;
                }
                entry.path = path;
                Entry::Tensor(entry)
            }
            _ => {
                return Err(Failure::Argument(format!(
                    "{fqn:?} is neither an object nor a tensor"
                )));
            }
        };
        metadata.insert(fqn, entry);
    }
    Ok(metadata)
}

fn placed(
    metadata: &mut CheckpointMetadata,
    (name, byte_offset, byte_len): Place,
) -> Result<Placement, Failure> {
    let too_many = || Failure::Argument("too many files".to_owned());
    let file = metadata.intern_file(&key_of(&name)?).ok_or_else(too_many)?;
    let encoding = metadata.intern_encoding(&Encoding::default()).ok_or_else(too_many)?;
    Ok(Placement { file, encoding, byte_offset, byte_len })
}
