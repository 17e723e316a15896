//! Writes a `torch.save` file as a stream, with its length known before the first byte.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::DataSource;
use dcp_core::error::StateProblem;
use dcp_core::path::StatePath;
use dcp_core::storage::{OwnThreads, PutMode};
use dcp_core::{
    CheckpointError, DType, Dims, FormatError, Key, Payload, PlanError, Storage, Value,
};

use super::compose::{Composed, NewStorage, StorageContent, compose};
use super::graphs::TorchSaveGraphs;
use super::legacy;
use crate::pickle::Writer;
use crate::torch_zip::{ArchiveEncoder, Record, RecordSet};
use crate::upload::{
    ByteProgress, FileItem, FileOptions, FileSpec, Framing, PendingFile, prepare_file,
};

/// The name of an archive without a file name in PyTorch.
const NO_STEM: &str = "archive";

/// An item to write.
#[derive(Clone, Debug)]
pub struct TorchSaveItem {
    /// Its FQN: its name in errors, and its key if it has no path.
    pub name: Arc<str>,
    /// Its path in nested dicts and lists, as `dcp_to_torch_save` builds them; the first step is a
    /// key. `None` for an entry of the root dict under its name.
    pub path: Option<StatePath>,
    /// Its content.
    pub content: TorchSaveContent,
}

/// The content of an item.
#[derive(Clone, Debug)]
pub enum TorchSaveContent {
    /// A tensor whose row-major, little-endian elements the data source has.
    Tensor {
        /// The element type.
        dtype: DType,
        /// The shape.
        shape: Dims,
        /// The position of the item whose storage this one shares: a tensor of the same dtype and
        /// number of elements that shares no other's. Only that item is read from the data source.
        same_as: Option<usize>,
    },
    /// An object or a tensor of another `torch.save` file, copied unchanged, by its FQN there. All
    /// such items of a plan come from one file. Their storages are the plan's
    /// [`kept`](TorchSavePlan::kept).
    Kept {
        /// The objects of that file.
        graphs: Arc<TorchSaveGraphs>,
        /// Its name in that file.
        fqn: Arc<str>,
    },
    /// Any other value. An opaque one is copied out of its `torch.save` archive, with its tensors.
    Object(Value),
}

/// Options of writing a file.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct TorchSaveOptions {
    /// The form of the file.
    pub form: TorchSaveForm,
    /// The root folder of a zip archive. By default the file name without its last extension, as in
    /// PyTorch.
    pub root: Option<String>,
    /// The device onto which Python loads all tensors, such as `cpu`. By default tensors copied
    /// from other files keep theirs, and all others are on the CPU.
    pub device: Option<String>,
}

impl From<TorchSaveForm> for TorchSaveOptions {
    fn from(form: TorchSaveForm) -> Self {
        Self::default().with_form(form)
    }
}

/// The form of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TorchSaveForm {
    /// A zip archive, for PyTorch 1.6 and later.
    Zip(RecordSet),
    /// The stream of earlier versions, which every version reads; without checksums.
    Legacy,
}

impl Default for TorchSaveForm {
    fn default() -> Self {
        Self::Zip(RecordSet::default())
    }
}

impl TorchSaveOptions {
    /// Sets the form of the file.
    #[must_use]
    pub fn with_form(mut self, form: TorchSaveForm) -> Self {
        self.form = form;
        self
    }

    /// Sets the device of all tensors.
    #[must_use]
    pub fn with_device(mut self, device: impl Into<String>) -> Self {
        self.device = Some(device.into());
        self
    }

    /// Sets the root folder.
    #[must_use]
    pub fn with_root(mut self, root: impl Into<String>) -> Self {
        self.root = Some(root.into());
        self
    }
}

/// The layout of a file to write.
#[derive(Debug)]
pub struct TorchSavePlan {
    key: Key,
    byte_len: u64,
    storages: Vec<NewStorage>,
    image: Image,
}

impl TorchSavePlan {
    /// Lays out the file `key` with `items`. Does no I/O.
    ///
    /// # Errors
    ///
    /// [`PlanError`](dcp_core::PlanError) when an item, which it names, cannot be written: a
    /// quantized tensor, whose scale is unknown here; a value that
    /// [`Writer::value`](crate::pickle::Writer::value) cannot write; two items at the same path.
    pub fn new(
        key: &Key,
        items: &[TorchSaveItem],
        options: &TorchSaveOptions,
    ) -> Result<Self, CheckpointError> {
        let made = items.iter().map(|item| Made { name: item.name.to_string(), expected: None });
        Self::lay_out(key, options, made.collect(), |writer, key_width| {
            compose(items, writer, key_width, options.device.as_deref())
        })
    }

    /// Lays out the file `key` with the pickle that `compose` writes, given a writer and the
    /// minimum number of digits of a storage key. `made` are the origins of its storages.
    pub(super) fn lay_out<E: Into<CheckpointError>>(
        key: &Key,
        options: &TorchSaveOptions,
        made: Vec<Made>,
        compose: impl Fn(Writer, usize) -> Result<Composed, E>,
    ) -> Result<Self, CheckpointError> {
        let compose = |writer, key_width| compose(writer, key_width).map_err(Into::into);
        let (storages, form, byte_len) = match options.form {
            TorchSaveForm::Zip(records) => {
                let composed: Composed = compose(Writer::new(), 0)?;
                let root = options.root.clone().unwrap_or_else(|| stem(key).to_owned());
                let lens: Vec<_> = composed.storages.iter().map(|s| s.byte_len).collect();
                let encoder = ArchiveEncoder::with_root(&root, records, composed.pickle, &lens)?;
                let byte_len = encoder.byte_len();
                let crc32s = Mutex::new(vec![0; lens.len()]);
                (composed.storages, Form::Zip { encoder: Box::new(encoder), crc32s }, byte_len)
            }
            TorchSaveForm::Legacy => {
                // Storages follow in the order of their keys as text; leading zeros make that the
                // order of their numbers.
                let count = compose(Writer::new(), 0)?.storages.len();
                let width = count.saturating_sub(1).to_string().len();
                let composed = compose(Writer::with_storage_views(), width)?;
                refuse_nested(key, &composed.pickle)?;
                let head = legacy::head(&composed.pickle, count, width)?;
                let mut byte_len = Some(head.len() as u64);
                for storage in &composed.storages {
                    byte_len = byte_len
                        .and_then(|len| len.checked_add(legacy::COUNT_LEN))
                        .and_then(|len| len.checked_add(storage.byte_len));
                }
                let byte_len = byte_len.ok_or_else(|| {
                    FormatError::new("torch.save file", "its tensors exceed 2^64 bytes")
                })?;
                let elements = composed.storages.iter().map(|s| s.byte_len / s.element).collect();
                (composed.storages, Form::Legacy { head, elements }, byte_len)
            }
        };
        let in_object = || Made { name: "a tensor in an object".to_owned(), expected: None };
        let mut parts = vec![Made { name: key.to_string(), expected: None }];
        parts.extend(storages.iter().map(|storage| match storage.content {
            StorageContent::Item(item) => made.get(item).cloned().unwrap_or_else(in_object),
            StorageContent::Bytes(_) => in_object(),
            StorageContent::Kept { ref record, ref file, .. } => {
                let expected = Some((record.clone(), file.clone()));
                Made { name: "a storage of an object".to_owned(), expected }
            }
        }));
        Ok(Self { key: key.clone(), byte_len, storages, image: Image { parts, form } })
    }

    /// The size of the file in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.byte_len
    }

    /// The storages of [`TorchSaveContent::Kept`] items, in the file of these items. The data
    /// source numbers them after the items of the plan, each once.
    #[must_use]
    pub fn kept(&self) -> Vec<Record> {
        let kept = self.storages.iter().filter_map(|storage| match &storage.content {
            StorageContent::Kept { record, .. } => Some(record.clone()),
            _ => None,
        });
        kept.collect()
    }

    /// Writes the file, which must not exist yet. Items of `data` are numbered as those of the
    /// plan; each tensor is read once, in file order.
    ///
    /// # Errors
    ///
    /// When the data or the storage fails. No file is created then.
    pub async fn write(
        self,
        storage: &dyn Storage,
        data: Arc<dyn DataSource>,
        progress: Option<&ByteProgress>,
    ) -> Result<(), CheckpointError> {
        let pending =
            self.prepare(storage, FileOptions::new(PutMode::Create), data, progress).await?;
        pending.publish().await?;
        Ok(())
    }

    /// Writes the file without its name yet; `options` say whether an existing file is replaced.
    ///
    /// # Errors
    ///
    /// When the data or the storage fails. Nothing remains of the file then.
    pub async fn prepare<'a>(
        self,
        storage: &'a dyn Storage,
        options: FileOptions,
        data: Arc<dyn DataSource>,
        progress: Option<&ByteProgress>,
    ) -> Result<PendingFile<'a>, CheckpointError> {
        let mut items = vec![FileItem { item: 0, byte_len: 0 }];
        items.extend(
            self.storages
                .iter()
                .enumerate()
                .map(|(item, storage)| FileItem { item, byte_len: storage.byte_len }),
        );
        let spec = FileSpec {
            key: &self.key,
            byte_len: self.byte_len,
            items: items.into(),
            framing: Arc::new(self.image),
        };
        let contents = self.storages.iter().map(|storage| storage.content.clone()).collect();
        let data: Arc<dyn DataSource> = Arc::new(Contents { data, contents });
        prepare_file(storage, spec, options, &data, progress).await
    }
}

/// Plans and writes a file that must not exist yet. Returns its size in bytes.
///
/// # Errors
///
/// As [`TorchSavePlan::new`] and [`TorchSavePlan::write`]. No file is created then.
pub async fn write(
    storage: &dyn Storage,
    key: &Key,
    items: &[TorchSaveItem],
    data: Arc<dyn DataSource>,
    options: &TorchSaveOptions,
    progress: Option<&ByteProgress>,
) -> Result<u64, CheckpointError> {
    let plan = TorchSavePlan::new(key, items, options)?;
    let byte_len = plan.byte_len();
    plan.write(storage, data, progress).await?;
    Ok(byte_len)
}

/// Fails where PyTorch accesses tensors while it reads the pickle, although their bytes follow it:
/// it builds a nested tensor from the sizes in another one, and cannot load even its own files with
/// one (2.15).
fn refuse_nested(key: &Key, pickle: &[u8]) -> Result<(), PlanError> {
    const NESTED: &[u8] = b"ctorch._utils\n_rebuild_nested_tensor\n";
    if !pickle.windows(NESTED.len()).any(|part| part == NESTED) {
        return Ok(());
    }
    let problem = "it would hold a nested tensor, which PyTorch cannot load from the form of \
                   before 1.6; write the zip form, or leave the tensor out";
    Err(StateProblem::NotStorable { problem: problem.to_owned() }.of(key.to_string()))
}

/// The archive name that PyTorch derives from the file name.
fn stem(key: &Key) -> &str {
    let name = key.file_name();
    let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
    // PyTorch writes a name that its C++ code cannot take as a stream, which has no name.
    if stem.is_empty() || !name.is_ascii() { NO_STEM } else { stem }
}

/// The bytes around each storage; position 0 precedes all.
#[derive(Debug)]
struct Image {
    parts: Vec<Made>,
    form: Form,
}

/// The origin of a storage.
#[derive(Clone, Debug)]
pub(super) struct Made {
    /// A name for errors.
    pub(super) name: String,
    /// The record of another file whose bytes it must equal.
    pub(super) expected: Option<(Record, Key)>,
}

enum Form {
    Zip { encoder: Box<ArchiveEncoder>, crc32s: Mutex<Vec<u32>> },
    Legacy { head: Bytes, elements: Vec<u64> },
}

impl fmt::Debug for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Zip { .. } => "Zip",
            Self::Legacy { .. } => "Legacy",
        })
    }
}

impl Framing for Image {
    fn before(&self, position: usize) -> Result<Bytes, FormatError> {
        Ok(match (&self.form, position.checked_sub(1)) {
            (Form::Zip { encoder, .. }, None) => encoder.head(),
            (Form::Zip { .. }, Some(_)) => Bytes::new(),
            (Form::Legacy { head, .. }, None) => head.clone(),
            (Form::Legacy { elements, .. }, Some(number)) => {
                let count = elements.get(number).copied().unwrap_or(0);
                Bytes::copy_from_slice(&count.to_le_bytes())
            }
        })
    }

    fn after(&self, position: usize, crc32: u32) -> Result<Bytes, FormatError> {
        if let Some(Made { name, expected: Some((record, file)) }) = self.parts.get(position) {
            record.check_crc32(crc32).map_err(|error| {
                let problem = format!("{name:?}: {}", error.problem());
                let named = FormatError::new(error.what(), problem).at(record.data.start);
                named.in_file(file.as_str(), 0)
            })?;
        }
        let Form::Zip { encoder, crc32s } = &self.form else { return Ok(Bytes::new()) };
        let mut crc32s = crc32s.lock().unwrap_or_else(PoisonError::into_inner);
        let number = position.checked_sub(1);
        if let Some(slot) = number.and_then(|number| crc32s.get_mut(number)) {
            *slot = crc32;
        }
        Ok(match number {
            _ if position == crc32s.len() => encoder.tail(&crc32s),
            Some(number) => encoder.between(number, crc32),
            None => Bytes::new(),
        })
    }

    fn needs_crc(&self, position: usize) -> bool {
        let known = |made: &Made| made.expected.as_ref().is_some_and(|(r, _)| r.crc32.is_some());
        position > 0
            && (matches!(self.form, Form::Zip { .. })
                || self.parts.get(position).is_some_and(known))
    }

    fn name(&self, position: usize) -> &str {
        self.parts.get(position).map_or("", |made| &made.name)
    }
}

/// The storages' bytes, by number.
#[derive(Debug)]
struct Contents {
    data: Arc<dyn DataSource>,
    contents: Vec<StorageContent>,
}

#[async_trait]
impl DataSource for Contents {
    async fn resolve(
        &self,
        item: usize,
        byte_range: Range<u64>,
    ) -> Result<Payload, CheckpointError> {
        match self.contents.get(item) {
            Some(StorageContent::Item(item) | StorageContent::Kept { item, .. }) => {
                self.data.resolve(*item, byte_range).await
            }
            Some(StorageContent::Bytes(bytes)) => {
                Ok(Payload::from(bytes.clone()).slice(byte_range))
            }
            None => Ok(Payload::default()),
        }
    }

    fn segment_bytes(&self) -> u64 {
        self.data.segment_bytes()
    }

    fn own_threads(&self) -> Option<Arc<dyn OwnThreads>> {
        self.data.own_threads()
    }
}
