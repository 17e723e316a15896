//! Reads a `torch.save` file as a checkpoint.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::error::{ChunksProblem, DataProblem};
use dcp_core::format::ListedStorage;
use dcp_core::metadata::{Layout, Placement};
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::value::Dict;
use dcp_core::{
    CheckpointError, CheckpointMetadata, FormatError, Key, PlanError, Region, Storage,
    StorageReader,
};
use futures_util::lock::Mutex;

use super::contents::Contents;
use super::distributed::DistributedTensor;
use super::graphs::TorchSaveGraphs;
use super::index::{Index, Leaf};
use super::inflated::Inflated;
use super::object::Objects;
use super::rewrite::TorchSaveRewrite;
use super::strided::{self, Place};
use super::structure;
use super::write::TorchSaveOptions;
use crate::pickle::ForeignName;
use crate::placed_reads::PlacedReads;
use crate::torch_tensor::TensorLayout;
use crate::torch_zip::{Method, Record};

/// Reads one `torch.save` file: a zip archive (PyTorch 1.6 and later) or the stream of earlier
/// versions.
///
/// Names are those of PyTorch's own `torch_save_to_dcp`: the paths through dicts and lists, joined
/// by dots, where a list is flattened only if it contains a tensor or a dict. An object that is not
/// a dict is named `value`. Tensors in wrappers (parameters, subclasses) are plain tensors.
/// Everything else is an object, and one with unknown classes becomes a
/// [`Value::Opaque`](dcp_core::Value::Opaque), which can be written again.
///
/// Reading the index costs the directory, the pickle and a header per storage. Elements that are
/// stored row-major are read in place, by byte runs; others are gathered by their strides, a few
/// MiB at a time. A deflated storage, which PyTorch does not write, is inflated once and cached
/// while its tensors are read, up to 1 GiB. The CRC-32 of a storage is checked when one read covers
/// it.
pub struct TorchSaveReader {
    storage: Arc<dyn Storage>,
    key: Key,
    index: Mutex<Option<Arc<Index>>>,
    inflated: Inflated,
    of_rank: bool,
}

/// A record of a file, and the tensors that use it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FileRecord {
    /// The name in the archive, such as `archive/data/0`, or the key of the storage.
    pub name: Arc<str>,
    /// Its position and checksum.
    pub record: Record,
    /// The tensors that use the storage.
    pub tensors: Vec<Arc<str>>,
}

/// The device of a tensor, unless it is the CPU.
fn device(leaf: &Leaf) -> Option<&str> {
    let Leaf::Tensor(layout, _) = leaf else { return None };
    let device = &*layout.storage().location;
    (device != "cpu").then_some(device)
}

impl TorchSaveReader {
    /// A reader of the file `key`.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>, key: Key) -> Self {
        let storage = Arc::new(ListedStorage::unlisted(storage));
        let inflated = Inflated::default();
        Self { storage, key, index: Mutex::new(None), inflated, of_rank: false }
    }

    /// A reader of the file `key` as that of one rank: tensors of several ranks are shown by the tensors that the file
    /// has of them, the first under the name of the whole, and [`distributed`](Self::distributed) says of which part
    /// they are.
    #[must_use]
    pub fn of_rank(storage: Arc<dyn Storage>, key: Key) -> Self {
        Self { of_rank: true, ..Self::new(storage, key) }
    }

    /// The tensors of several ranks, where the file is [read as that of one](Self::of_rank).
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn distributed(&self) -> Result<Vec<DistributedTensor>, CheckpointError> {
        Ok(self.index().await?.distributed.clone())
    }

    /// The file.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The folder in the archive that has its records: for PyTorch the name of the file that it saves to, without
    /// the ending, or `archive` where it saves to a stream. `None` for a file of the form before archives.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn saved_as(&self) -> Result<Option<Arc<str>>, CheckpointError> {
        let index = self.index().await?;
        let first = index.contents.records.keys().next();
        Ok(first.and_then(|name| name.split_once('/')).map(|(root, _)| Arc::from(root)))
    }

    /// The storage that has the file.
    pub(super) fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// The record of that name, as [`records`](Self::records) calls it.
    pub(super) async fn record_named(&self, name: &str) -> Result<Option<Record>, CheckpointError> {
        let index = self.index().await?;
        let contents = &index.contents;
        Ok(match contents.records.is_empty() {
            true => contents.storages.get(name).cloned(),
            false => contents.records.get(name).cloned(),
        })
    }

    /// The CRC-32 of a chunk's elements, little-endian and row-major, if the file has one: the
    /// chunk must be a whole, unencoded storage. Files from before the zip format have none.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn chunk_crc32(
        &self,
        metadata: &CheckpointMetadata,
        entry: usize,
        chunk: usize,
    ) -> Result<Option<u32>, CheckpointError> {
        let index = self.index().await?;
        let tensor = metadata.at(entry).and_then(|(_, entry)| entry.as_tensor());
        let placement = tensor.and_then(|tensor| tensor.chunks.get(chunk)?.placement);
        Ok(placement.and_then(|placement| {
            let raw = metadata.encoding(&placement)?.layout == Layout::Raw;
            let place = (placement.byte_offset, placement.byte_len);
            raw.then(|| index.checksums.get(&place).copied()).flatten()
        }))
    }

    /// The storage that contains a placement, if the file has a checksum of it.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn record_at(
        &self,
        placement: &Placement,
    ) -> Result<Option<Record>, CheckpointError> {
        let index = self.index().await?;
        let end = placement.byte_offset.saturating_add(placement.byte_len);
        let before = index.by_start.partition_point(|(start, _)| *start <= placement.byte_offset);
        let record = before.checked_sub(1).and_then(|at| index.by_start.get(at));
        let record = record.and_then(|(_, at)| index.contents.storages.get_index(*at));
        let record = record.map(|(_, record)| record);
        Ok(record.filter(|r| r.data.end >= end && r.crc32.is_some()).cloned())
    }

    /// Checks all bytes of the archive outside the data of records: its directory, its end records,
    /// and the headers of its records. Calls `found` with each problem. Checks nothing in a file
    /// from before PyTorch 1.6.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn check_structure(
        &self,
        found: impl FnMut(FormatError) + Send,
    ) -> Result<(), CheckpointError> {
        let index = self.index().await?;
        structure::check(&*self.storage, &self.key, &index.contents, found).await
    }

    /// The device, such as `cuda:0`, onto which Python loads the tensor at a position in the
    /// metadata by default; `None` for the CPU and for objects.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn device(&self, entry: usize) -> Result<Option<String>, CheckpointError> {
        Ok(self.index().await?.leaves.get(entry).and_then(device).map(ToOwned::to_owned))
    }

    /// The devices of all tensors that are not on the CPU, by entry.
    pub(super) async fn devices(&self) -> Result<BTreeMap<usize, String>, CheckpointError> {
        let index = self.index().await?;
        let named = |(entry, leaf)| Some((entry, device(leaf)?.to_owned()));
        Ok(index.leaves.iter().enumerate().filter_map(named).collect())
    }

    /// Observations about the names of tensors and objects: keys that become equal when joined by
    /// dots, and keys that are not strings.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn notes(&self) -> Result<Vec<String>, CheckpointError> {
        Ok(self.index().await?.notes.clone())
    }

    /// The number of bytes after the end of the archive, which PyTorch (2.15) ignores.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn trailing_bytes(&self) -> Result<u64, CheckpointError> {
        Ok(self.index().await?.contents.trailing)
    }

    /// All records of the archive, for checking each byte of the file once. For a file from before
    /// the zip format its storages, without checksums.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn records(&self) -> Result<Vec<FileRecord>, CheckpointError> {
        let index = self.index().await?;
        let mut by_start: std::collections::HashMap<u64, Vec<Arc<str>>> = Default::default();
        for ((fqn, _), leaf) in index.metadata.iter().zip(&index.leaves) {
            if let Leaf::Tensor(_, record) = leaf
                && record.byte_len > 0
            {
                by_start.entry(record.data.start).or_default().push(Arc::clone(fqn));
            }
        }
        let contents = &index.contents;
        let records = match contents.records.is_empty() {
            true => &contents.storages,
            false => &contents.records,
        };
        let records = records.iter().map(|(name, record)| FileRecord {
            name: Arc::from(&**name),
            record: record.clone(),
            tensors: match record.byte_len {
                0 => Vec::new(),
                _ => by_start.remove(&record.data.start).unwrap_or_default(),
            },
        });
        Ok(records.collect())
    }

    /// The names in the file that Python imports when it loads it, and that are not known to be
    /// harmless.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn foreign_names(&self) -> Result<Vec<ForeignName>, CheckpointError> {
        Ok(self.index().await?.foreign.clone())
    }

    /// Lays out the file `key` with the exact objects of this one: keys of any class, empty
    /// containers, shared parts, tensors over one storage, quantizers, instances of classes.
    ///
    /// Returns `None` for a file that can only be copied in parts: a big-endian or deflated one, or
    /// one that refers to anything but whole storages.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`], and when a storage is missing.
    pub async fn again(
        &self,
        key: &Key,
        options: &TorchSaveOptions,
    ) -> Result<Option<TorchSaveRewrite>, CheckpointError> {
        TorchSaveRewrite::new(key, &self.key, &*self.index().await?, options)
    }

    /// The objects among `wanted`, by FQN, that can be copied unchanged into another file.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn graphs(
        &self,
        wanted: impl Fn(&str) -> bool + Send,
    ) -> Result<TorchSaveGraphs, CheckpointError> {
        let index = self.index().await?;
        let graphs = TorchSaveGraphs::new(self.key.clone(), index, wanted);
        Ok(graphs.map_err(|error| self.locate(error))?)
    }

    /// The values of the file's root dict under the keys that `wanted` accepts: empty containers,
    /// keys of all types, and for unknown classes a [`Value::Opaque`](dcp_core::Value::Opaque).
    /// Tensors in them are read whole, up to 1 GiB per key.
    ///
    /// Returns `None` when the root is not a dict.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`], and when a value is damaged or too large.
    pub async fn values(
        &self,
        wanted: impl Fn(&str) -> bool + Send,
    ) -> Result<Option<Dict>, CheckpointError> {
        let index = self.index().await?;
        let objects = Objects::new(&*self.storage, &self.key, &index.contents);
        let mut objects = objects.map_err(|error| self.locate(error))?;
        let Some(items) = objects.items() else { return Ok(None) };
        let mut values = Dict::new();
        for (key, node) in items {
            if wanted(&key) {
                let value = objects.value(node).await;
                values.insert(&*key, value.map_err(|error| self.name(&key, error))?);
            }
        }
        Ok(Some(values))
    }

    async fn index(&self) -> Result<Arc<Index>, CheckpointError> {
        let mut index = self.index.lock().await;
        if let Some(index) = &*index {
            return Ok(Arc::clone(index));
        }
        let contents = Contents::read(&*self.storage, &self.key).await?;
        let loaded =
            Index::new(&self.key, contents, self.of_rank).map_err(|error| self.locate(error))?;
        Ok(Arc::clone(index.insert(Arc::new(loaded))))
    }

    fn locate(&self, error: FormatError) -> FormatError {
        error.in_file(self.key.as_str(), 0)
    }

    async fn read_strided(
        &self,
        index: &Index,
        layout: &TensorLayout,
        record: &Record,
        item: &ReadItem,
        sink: &dyn DataSink,
    ) -> Result<ReadReport, CheckpointError> {
        let fqn = index.metadata.entry_name(item.entry as usize);
        let ReadKind::Tensor { region, .. } = &item.kind else {
            return Err(PlanError::not_an_object(fqn.into_owned()).into());
        };
        let whole = Region::full(layout.sizes().clone());
        if !whole.is_ok_and(|whole| whole.contains(region)) {
            return Err(ChunksProblem::Outside {
                region: region.to_string(),
                bounds: format!("shape {}", layout.sizes()),
                rank: None,
            }
            .of(fqn.into_owned())
            .into());
        }
        let view = sink.destination(item)?;
        let bytes_needed = region.volume().saturating_mul(layout.dtype().size() as u64);
        if view.shape() != region.sizes() || view.byte_len() != bytes_needed {
            return Err(PlanError::Data(DataProblem::Destination {
                fqn: fqn.into_owned(),
                region: region.to_string(),
                expected: bytes_needed,
                shape: view.shape().to_string(),
                byte_len: view.byte_len(),
            })
            .into());
        }
        let (storage, key) = (&*self.storage, &self.key);
        let order = index.contents.byte_order;
        let bytes_read = match record.method {
            Method::Stored => {
                let place = Place::File { storage, key, start: record.data.start };
                strided::read(place, layout, order, region, &view, &fqn).await?
            }
            Method::Deflated => {
                let (content, read) = self.inflated.get(storage, key, record).await?;
                strided::read(Place::Memory(&content), layout, order, region, &view, &fqn).await?;
                read
            }
        };
        sink.commit(item)?;
        Ok(ReadReport::new(bytes_needed, bytes_read))
    }
}

#[async_trait]
impl StorageReader for TorchSaveReader {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        Ok(Arc::clone(&self.index().await?.metadata))
    }

    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let index = self.index().await?;
        let mut direct = LoadPlan::default();
        let mut objects = None;
        let mut total = ReadReport::default();
        for item in &plan.items {
            let Some((fqn, entry)) = metadata.at(item.entry as usize) else {
                return Err(PlanError::no_entry(item.entry.into(), None).into());
            };
            let leaf = index.metadata.index_of(fqn).and_then(|at| index.leaves.get(at));
            let named = |error| self.name(fqn, error);
            let report = match (leaf, &item.kind) {
                (Some(Leaf::Tensor(layout, record)), _) => {
                    let tensor = entry.as_tensor().and_then(|tensor| tensor.chunks.get(0));
                    let placement = tensor.and_then(|chunk| chunk.placement);
                    let encoding = placement.and_then(|at| metadata.encoding(&at).cloned());
                    if encoding.is_some_and(|encoding| encoding.layout == Layout::Raw) {
                        direct.items.push(item.clone());
                        continue;
                    }
                    let read = self.read_strided(&index, layout, record, item, &*sink);
                    read.await.map_err(named)?
                }
                (Some(Leaf::Plain(value)), ReadKind::Object) => {
                    sink.object(item, value.clone())?;
                    ReadReport::default()
                }
                (Some(Leaf::Object(node)), ReadKind::Object) => {
                    let objects = match &mut objects {
                        Some(objects) => objects,
                        none => {
                            let (storage, key) = (&*self.storage, &self.key);
                            let opened = Objects::new(storage, key, &index.contents);
                            none.insert(opened.map_err(|error| self.locate(error))?)
                        }
                    };
                    let value = objects.value(*node).await.map_err(named)?;
                    sink.object(item, value)?;
                    let read = std::mem::take(&mut objects.bytes_read);
                    ReadReport::new(read, read)
                }
                (Some(_), _) => return Err(PlanError::not_a_tensor(fqn.to_string()).into()),
                (None, _) => {
                    return Err(PlanError::Missing { fqns: vec![fqn.to_string()] }.into());
                }
            };
            total.bytes_needed += report.bytes_needed;
            total.bytes_read += report.bytes_read;
        }
        drop(objects);
        if !direct.items.is_empty() {
            let reads = PlacedReads::new(Arc::clone(&self.storage))
                .with_checksums(Arc::clone(&index.checksums));
            let report = reads.read(metadata, &direct, sink).await?;
            total.bytes_needed += report.bytes_needed;
            total.bytes_read += report.bytes_read;
        }
        Ok(total)
    }
}

impl TorchSaveReader {
    /// Adds the name of the value and the file to an error.
    fn name(&self, fqn: &str, error: CheckpointError) -> CheckpointError {
        match error {
            CheckpointError::Format(error) => {
                let at = error.byte_offset().unwrap_or(0);
                self.locate(error.of_item(fqn).at(at)).into()
            }
            CheckpointError::Memory { source, .. } => {
                CheckpointError::Memory { fqn: fqn.to_owned(), source }
            }
            other => other,
        }
    }
}

impl fmt::Debug for TorchSaveReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TorchSaveReader").field("key", &self.key).finish_non_exhaustive()
    }
}
