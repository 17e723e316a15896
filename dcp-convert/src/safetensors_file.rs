//! One safetensors file as a checkpoint: every tensor a chunk, no objects.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::{
    CheckpointError, CheckpointMetadata, DType, DataSink, Dims, Encoding, Entry, FormatError, Key,
    Layout, LoadPlan, Placement, PlanError, ReadInto, ReadItem, ReadKind, ReadReport, Region,
    Storage, StorageExt, StorageReader, TensorEntry, TensorView,
};
use dcp_formats::safetensors::{Header, PREFIX_LEN, TensorInfo, header_len};
use serde::Deserialize;

use crate::to_safetensors::RAW;

/// Runs of elements that are shorter than this many bytes are read together with what lies
/// between them.
const WORTH_A_READ: u64 = 64 << 10;
/// The most that is read together, in bytes.
const SPAN_MAX: u64 = 8 << 20;

/// Reads one `.safetensors` file.
///
/// Tensors that [`to_safetensors`](crate::to_safetensors()) stored as bytes, because the format
/// has no name for their type, get their type back.
pub struct SafetensorsFile {
    storage: Arc<dyn Storage>,
    key: Key,
}

impl SafetensorsFile {
    /// The file `key` of a storage.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>, key: Key) -> Self {
        Self { storage, key }
    }

    async fn header(&self) -> Result<(Header, u64), CheckpointError> {
        let file_len = self.storage.stat(&self.key).await?.byte_len;
        let prefix = self.storage.read_range(&self.key, 0..PREFIX_LEN.min(file_len)).await?;
        let in_file = |error: FormatError| error.in_file(self.key.as_str(), 0);
        let data_start = PREFIX_LEN + header_len(&prefix, file_len).map_err(in_file)?;
        let json = self.storage.read_range(&self.key, PREFIX_LEN..data_start).await?;
        let header = Header::parse(&json, file_len - data_start).map_err(in_file)?;
        Ok((header, data_start))
    }

    async fn read_item(
        &self,
        metadata: &CheckpointMetadata,
        item: &ReadItem,
        sink: &dyn DataSink,
    ) -> Result<(u64, u64), CheckpointError> {
        let bad = |problem: &str| PlanError::Unsupported {
            fqn: metadata.at(item.entry as usize).map_or(String::new(), |(fqn, _)| fqn.to_string()),
            problem: problem.to_owned(),
        };
        let ReadKind::Tensor { chunk, region, .. } = &item.kind else {
            return Err(bad("a safetensors file holds no objects").into());
        };
        let tensor = metadata.at(item.entry as usize).and_then(|(_, entry)| entry.as_tensor());
        let tensor = tensor.ok_or_else(|| bad("it is no tensor"))?;
        let stored = tensor.chunks.get(*chunk as usize);
        let placement = stored.and_then(|chunk| chunk.placement);
        let (Some(stored), Some(placement)) = (stored, placement) else {
            return Err(bad("its bytes have no place").into());
        };
        let whole = stored.region().map_err(|error| bad(&error.to_string()))?;
        let inner = region.relative_to(stored.offsets).filter(|_| whole.contains(region));
        let inner = inner.ok_or_else(|| bad("a region outside of its chunk was asked for"))?;
        let element = tensor.dtype.size() as u64;
        let runs = inner
            .runs_in(stored.sizes)
            .map(|(at, len)| (placement.byte_offset + at * element, len * element))
            .collect();
        let view = sink.destination(item)?;
        let read = self.fill(&view, runs).await?;
        sink.commit(item)?;
        Ok((view.byte_len(), read))
    }

    /// Reads `runs` of the file, in their order, into the elements of `view`, and returns how
    /// many bytes were read.
    async fn fill(&self, view: &TensorView, runs: Vec<(u64, u64)>) -> Result<u64, CheckpointError> {
        let lent = |source| CheckpointError::Memory { fqn: String::new(), source };
        let long = runs.first().is_some_and(|(_, len)| *len >= WORTH_A_READ) || runs.len() == 1;
        if long && view.is_contiguous() {
            let mut buffer = view.lend().map_err(lent)?;
            let reads = runs.iter().map(|(byte_offset, len)| {
                let len = usize::try_from(*len).unwrap_or(usize::MAX).min(buffer.len());
                ReadInto { byte_offset: *byte_offset, buffer: buffer.split_to(len) }
            });
            let reads = reads.collect();
            self.storage.read(&self.key, reads).await?;
            return Ok(view.byte_len());
        }
        let mut gathered = Vec::with_capacity(usize::try_from(view.byte_len()).unwrap_or(0));
        let mut read = 0;
        let mut runs = runs.into_iter().peekable();
        while let Some((start, len)) = runs.next() {
            let mut span = vec![(0, len)];
            let mut end = start + len;
            while let Some((next, len)) = runs.next_if(|(next, len)| next + len - start <= SPAN_MAX)
            {
                span.push((next - start, len));
                end = next + len;
            }
            let bytes = self.storage.read_range(&self.key, start..end).await?;
            read += end - start;
            for (at, len) in span {
                gathered.extend_from_slice(&piece(&bytes, at, len));
            }
        }
        view.fill_from(&gathered).map_err(lent)?;
        Ok(read)
    }
}

fn piece(bytes: &Bytes, at: u64, len: u64) -> Bytes {
    let end = |n: u64| usize::try_from(n).unwrap_or(usize::MAX).min(bytes.len());
    bytes.slice(end(at)..end(at + len))
}

#[async_trait]
impl StorageReader for SafetensorsFile {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        let (header, data_start) = self.header().await?;
        let raw = raw_types(&header);
        let mut metadata = CheckpointMetadata::new();
        metadata.provenance_mut().format = Some("safetensors".into());
        let full = || FormatError::new("safetensors header", "it has too many tensors");
        let file = metadata.intern_file(&self.key).ok_or_else(full)?;
        let encoding = metadata.intern_encoding(&Encoding::new(Layout::Raw)).ok_or_else(full)?;
        for (name, info) in header.tensors() {
            let (dtype, shape) = typed(name, info, &raw);
            let mut tensor = TensorEntry::new(dtype, shape.clone());
            let byte_len = info.byte_range.end - info.byte_range.start;
            let byte_offset = data_start + info.byte_range.start;
            let placement = Placement { file, encoding, byte_offset, byte_len };
            let pushed = tensor.chunks.push(&Dims::zeros(shape.ndim()), &shape, Some(placement));
            pushed.map_err(|error| FormatError::new("safetensors header", error.to_string()))?;
            metadata.insert(Arc::clone(name), Entry::Tensor(tensor));
        }
        Ok(Arc::new(metadata))
    }

    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let mut report = ReadReport::default();
        for item in &plan.items {
            let (needed, read) = self.read_item(metadata, item, &*sink).await?;
            report.bytes_needed += needed;
            report.bytes_read += read;
        }
        Ok(report)
    }
}

impl fmt::Debug for SafetensorsFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SafetensorsFile").field("key", &self.key).finish_non_exhaustive()
    }
}

/// What the header says of a tensor that is stored as bytes.
#[derive(Deserialize)]
struct RawType {
    dtype: String,
    shape: Vec<u64>,
}

fn raw_types(header: &Header) -> serde_json::Map<String, serde_json::Value> {
    let text = header.metadata().get(RAW).map_or("{}", String::as_str);
    serde_json::from_str(text).unwrap_or_default()
}

/// The type and shape of a tensor: what [`RAW`] says where that fits the bytes, what the format
/// says otherwise.
fn typed(
    name: &str,
    info: &TensorInfo,
    raw: &serde_json::Map<String, serde_json::Value>,
) -> (DType, Dims) {
    let described = raw.get(name).filter(|_| info.dtype == DType::UInt8).and_then(|described| {
        let described = RawType::deserialize(described).ok()?;
        let dtype: DType = described.dtype.parse().ok()?;
        let shape = Dims::from(described.shape);
        Region::full(shape.clone()).ok()?;
        let bytes = shape.checked_volume()?.checked_mul(dtype.size() as u64)?;
        (bytes == info.byte_range.end - info.byte_range.start).then_some((dtype, shape))
    });
    described.unwrap_or_else(|| (info.dtype, info.shape.clone()))
}
