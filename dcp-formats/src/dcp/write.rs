//! Writes one rank's files: archives, concatenated.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use dcp_core::checkpoint::DataSource;
use dcp_core::error::{PlanProblem, StateProblem};
use dcp_core::plan::{SavePlan, WritePlan};
use dcp_core::{CheckpointError, DType, FormatError, Key, PlanError, Storage};

use super::compression::Compression;
use crate::expansion::ItemKind;
use crate::torch_tensor::TensorLayout;
use crate::torch_zip::{ArchiveEncoder, RecordSet};
use crate::upload::{
    ByteProgress, FileItem, FileOptions, FileSpec, Framing, ItemEncoder, PendingFile, prepare_file,
    write_file,
};

/// The size of a tensor chunk in a file, in bytes.
pub(super) fn encoded_len(fqn: &str, dtype: DType, sizes: &[u64]) -> Result<u64, CheckpointError> {
    if dtype.is_quantized() {
        let problem = format!("{dtype} needs a scale, which the state dict has no place for");
        return Err(StateProblem::NotStorable { problem }.of(fqn).into());
    }
    Ok(archive(dtype, sizes)?.byte_len())
}

fn archive(dtype: DType, sizes: &[u64]) -> Result<ArchiveEncoder, FormatError> {
    let layout = TensorLayout::contiguous(dtype, sizes)?;
    ArchiveEncoder::new(RecordSet::default(), layout.to_pickle()?, &[layout.byte_len()])
}

/// Writes a file of one tensor as `torch.save` of PyTorch 2.15 does, without its name yet. Item 0
/// of `data` has its elements; `options` say whether an existing file is replaced.
///
/// # Errors
///
/// For a quantized tensor, and when the data or the storage fails. No file is created then.
pub async fn prepare_tensor_file<'a>(
    storage: &'a dyn Storage,
    (key, options): (&Key, FileOptions),
    (fqn, dtype, sizes): (&Arc<str>, DType, &[u64]),
    data: Arc<dyn DataSource>,
) -> Result<PendingFile<'a>, CheckpointError> {
    let byte_len = encoded_len(fqn, dtype, sizes)?;
    let elements = TensorLayout::contiguous(dtype, sizes)?.byte_len();
    let tensor = Some((dtype, sizes.into()));
    let items = vec![Archive { fqn: Arc::clone(fqn), tensor, byte_offset: 0, byte_len }];
    let job = FileJob {
        key: key.clone(),
        byte_len,
        items: Arc::new([FileItem { item: 0, byte_len: elements }]),
        framing: Arc::new(Archives { items, ..Archives::new(true, Compression::None) }),
    };
    prepare_file(storage, job.spec(), options, &data, None).await
}

/// A file of this rank.
#[derive(Debug)]
pub(super) struct FileJob {
    key: Key,
    byte_len: u64,
    items: Arc<[FileItem]>,
    framing: Arc<Archives>,
}

/// A file whose items are being collected.
struct Draft {
    key: Key,
    byte_len: u64,
    items: Vec<FileItem>,
    framing: Archives,
}

impl Draft {
    fn finish(self) -> FileJob {
        let Self { key, byte_len, items, framing } = self;
        FileJob { key, byte_len, items: items.into(), framing: Arc::new(framing) }
    }
}

#[derive(Debug)]
struct Archives {
    items: Vec<Archive>,
    checksums: bool,
    compression: Compression,
    written: Mutex<Written>,
}

/// The results of writing items, by their positions.
#[derive(Debug, Default)]
struct Written {
    /// The CRC-32s of the elements of tensors, and of encoded objects.
    crc32s: Vec<(usize, u32)>,
    /// The byte ranges of items in the file, if they were encoded.
    ranges: BTreeMap<usize, Range<u64>>,
}

#[derive(Debug)]
struct Archive {
    fqn: Arc<str>,
    /// The tensor's dtype and shape; `None` for an object, which is already an archive.
    tensor: Option<(DType, Box<[u64]>)>,
    byte_offset: u64,
    /// Its length before it is encoded, in bytes.
    byte_len: u64,
}

impl Archive {
    fn kind_and_len(&self) -> (ItemKind, u64) {
        (ItemKind::of(self.tensor.is_some()), self.byte_len)
    }
}

impl FileJob {
    /// The files of a plan. Fails unless its placements agree with the lengths of its items.
    pub(super) fn for_plan(
        local: &SavePlan,
        plan: &WritePlan,
        checksums: bool,
        compression: &Compression,
    ) -> Result<Vec<Self>, CheckpointError> {
        let encodings = compression.encodings();
        let draft = |key: &Key| Draft {
            key: key.clone(),
            byte_len: 0,
            items: Vec::new(),
            framing: Archives::new(checksums, compression.clone()),
        };
        let mut drafts: Vec<Draft> = plan.files.iter().map(draft).collect();
        for order in &plan.orders {
            let placement = order.placement;
            let index = order.item as usize;
            let items = local.len() as u64;
            let item = local.item(index);
            let item = item.ok_or(PlanError::no_item(index as u64, items))?;
            let misplaced = |problem: String| {
                let fqn = item.key.fqn.to_string();
                CheckpointError::from(PlanError::Plan(PlanProblem::Misplaced { fqn, problem }))
            };
            let (byte_len, tensor) = match &item.key.tensor {
                None => (item.byte_len, None),
                Some(spec) => {
                    let len = encoded_len(&item.key.fqn, spec.dtype, item.sizes)?;
                    (len, Some((spec.dtype, item.sizes.into())))
                }
            };
            let kind = ItemKind::of(tensor.is_some());
            let encoding = encodings.get(usize::from(compression.encoding_of(kind, byte_len)));
            if plan.encodings.get(usize::from(placement.encoding)) != encoding {
                let problem = "its encoding is not the one of this rank's writer; all ranks need \
                               the same options"
                    .to_owned();
                return Err(misplaced(problem));
            }
            let job = drafts
                .get_mut(placement.file.index())
                .ok_or_else(|| misplaced("the plan does not have its file".to_owned()))?;
            if placement.byte_offset != job.byte_len || placement.byte_len != byte_len {
                return Err(misplaced(format!(
                    "it is planned at {}+{} of {:?}, and written at {}+{byte_len}",
                    placement.byte_offset, placement.byte_len, job.key, job.byte_len
                )));
            }
            let byte_offset = job.byte_len;
            job.byte_len = job.byte_len.saturating_add(byte_len);
            job.items.push(FileItem { item: index, byte_len: item.byte_len });
            let fqn = Arc::clone(&item.key.fqn);
            job.framing.items.push(Archive { fqn, tensor, byte_offset, byte_len });
        }
        Ok(drafts.into_iter().map(Draft::finish).collect())
    }

    pub(super) fn key(&self) -> &Key {
        &self.key
    }

    /// The CRC-32s of the items that were written, by the offset of their archive.
    pub(super) fn checksums(&self) -> Vec<(u64, u32)> {
        let written = self.framing.written();
        let item = |&(position, crc32): &(usize, u32)| {
            let offset = match written.ranges.get(&position) {
                Some(range) => range.start,
                None => self.framing.items.get(position)?.byte_offset,
            };
            Some((offset, crc32))
        };
        written.crc32s.iter().filter_map(item).collect()
    }

    /// Returns the byte ranges of encoded items, by the offsets at which they were planned.
    pub(super) fn stored(&self) -> Vec<(u64, Range<u64>)> {
        let written = self.framing.written();
        let items = written.ranges.iter();
        items
            .filter_map(|(at, range)| {
                Some((self.framing.items.get(*at)?.byte_offset, range.clone()))
            })
            .collect()
    }

    fn spec(&self) -> FileSpec<'_> {
        FileSpec {
            key: &self.key,
            byte_len: self.framing.byte_len_max(self.byte_len),
            items: Arc::clone(&self.items),
            framing: Arc::clone(&self.framing) as _,
        }
    }

    pub(super) async fn write(
        &self,
        storage: &dyn Storage,
        data: &Arc<dyn DataSource>,
        options: FileOptions,
        progress: Option<&ByteProgress>,
    ) -> Result<u64, CheckpointError> {
        let meta = write_file(storage, self.spec(), data, options, progress).await?;
        Ok(meta.byte_len)
    }
}

impl Archives {
    fn new(checksums: bool, compression: Compression) -> Self {
        Self { items: Vec::new(), checksums, compression, written: Mutex::default() }
    }

    fn written(&self) -> MutexGuard<'_, Written> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The length of the file whose items have `byte_len` bytes before they are encoded, or its
    /// maximum.
    fn byte_len_max(&self, byte_len: u64) -> u64 {
        if self.compression.is_none() {
            return byte_len;
        }
        let lens = self.items.iter().map(|item| self.compression.byte_len_max(item.byte_len));
        lens.fold(0, u64::saturating_add)
    }

    fn tensor(&self, position: usize) -> Option<&(DType, Box<[u64]>)> {
        self.items.get(position)?.tensor.as_ref()
    }
}

impl Framing for Archives {
    fn before(&self, position: usize) -> Result<Bytes, FormatError> {
        match self.tensor(position) {
            Some((dtype, sizes)) => Ok(archive(*dtype, sizes)?.head()),
            None => Ok(Bytes::new()),
        }
    }

    fn after(&self, position: usize, crc32: u32) -> Result<Bytes, FormatError> {
        let crc32 = if self.checksums { crc32 } else { 0 };
        if self.checksums {
            self.written().crc32s.push((position, crc32));
        }
        match self.tensor(position) {
            Some((dtype, sizes)) => Ok(archive(*dtype, sizes)?.tail(&[crc32])),
            None => Ok(Bytes::new()),
        }
    }

    fn needs_crc(&self, _position: usize) -> bool {
        self.checksums
    }

    fn name(&self, position: usize) -> &str {
        self.items.get(position).map_or("", |archive| &archive.fqn)
    }

    fn encoder(&self) -> Option<Box<dyn ItemEncoder>> {
        self.compression.encoder(|| self.items.iter().map(Archive::kind_and_len).collect())
    }

    fn stored(&self, position: usize, range: Range<u64>) {
        self.written().ranges.insert(position, range);
    }
}
